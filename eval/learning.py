"""What a planner learns from real traffic, and how soon: calibration, ranking, warm-up.

    python -m eval.learning runs/tables/EAGLE3-test --curves runs/planner.json

Drafts and what became of them are recorded (roots: every; see ``eval.recordings``), in the order in
which a server would come to them; the time of a step is simulated from cost curves
(``eval.simulate``), so that the same run gives the same numbers anywhere. Beside the planner of
``auto`` stands vLLM's estimator, on its own feature.

    calibration   told of each draft before its outcome is learnt, behind the first 10,000 verified
                  ones: expected calibration error and AUC by depth, of the drafts that the planner
                  had verified and of all that were recorded
    warm-up       tokens until windows of WINDOW tokens are within 2 % of what a planner brings that
                  has served the same traffic at the same load before: from a cold start, after
                  other traffic, after another load

Legend: B requests, D layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.simulate import Costs, MeasuredCosts, RecordedDrafts, Simulation, costs_of, gate_of
from eval.tables.markdown import section
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.offline.replay import Chains
from sglang_c2t.offline.scores import auc, expected_calibration_error
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.survival import Array
from sglang_c2t.policies import build_policy
from sglang_c2t.policies.base import TreeShape

LEARNT_DRAFTS = 10_000
WINDOW = 500
WITHIN = 0.98

#: Drafts of a depth before an error is told: of fewer, chance alone makes one.
ENOUGH = 1000
ESTIMATORS = ("auto", "rows-only")


@dataclass
class Traffic:
    """Requests of a recording that a server answers, and what their steps cost."""

    chains: Chains
    layers: int
    costs: Costs | MeasuredCosts

    def planner(self, policy: str) -> Planner:
        """One that knows nothing."""
        planning: Any = build_policy(C2TConfig(policy=policy))
        made: Planner = planning.planner(TreeShape(1, self.layers, self.layers + 1))
        return made

    def simulation(self, policy: str, batch: int, families: str = "") -> Simulation:
        """B at a time, of the families whose names begin so, from the first request."""
        chosen = [i for i, rid in enumerate(self.chains.requests) if rid.startswith(families)]
        if not chosen:
            raise ConfigError(f"no recorded request is of a family {families}")
        drafts = RecordedDrafts(self.chains, gate_of(policy), self.layers, chosen)
        return Simulation(drafts, self.costs, batch)


@dataclass(frozen=True)
class Calibration:
    """Of one estimator, by depth."""

    verified: list[int]
    """Drafts whose outcome the server saw."""

    verified_error: list[float]
    error: list[float]
    auc: list[float]
    rate: float
    """Tokens a second behind the first :data:`LEARNT_DRAFTS`, simulated."""


def calibration(traffic: Traffic, policy: str, batch: int, drafts: int) -> Calibration:
    """What ``policy``'s planner told of ``drafts`` recorded drafts, while it served and learnt."""
    planner, made = traffic.planner(policy), traffic.simulation(policy, batch)
    rng = np.random.default_rng(0)
    verified = 0
    while verified < LEARNT_DRAFTS:
        verified += made.step(rng, planner).rows - batch
    planner.free.reliability[:] = 0.0
    told: list[Array] = []
    became: list[Array] = []
    tokens = milliseconds = 0.0
    while sum(map(np.size, told)) < drafts:
        confidence, survival = made.drafts.draw(rng, batch)
        told.append(planner.survival.of_chains(confidence))
        became.append(survival)
        step = made.step(rng, planner)
        tokens, milliseconds = tokens + step.tokens, milliseconds + step.milliseconds
    pairs = [
        (torch.tensor(a), torch.tensor(b))
        for a, b in zip(np.concatenate(told).T, np.concatenate(became).T, strict=True)
    ]
    return Calibration(
        planner.free.reliability[:, 0].sum(axis=1).astype(int).tolist(),
        planner.calibration_errors(),
        [expected_calibration_error(a, b) for a, b in pairs],
        [auc(a, b) for a, b in pairs],
        1e3 * tokens / milliseconds,
    )


def warm_up(traffic: Traffic, before: Callable[[Planner], None], batch: int, families: str) -> int:
    """Tokens that ``auto`` needs, after what it went through ``before``."""
    new, settled = traffic.planner("auto"), traffic.planner("auto")
    before(new)
    serve(traffic.simulation("auto", batch, families), settled, 20 * WINDOW)
    rates = [
        np.array(serve(traffic.simulation("auto", batch, families), planner, 20 * WINDOW))
        for planner in (new, settled)
    ]
    return tokens_until(rates[0], rates[1])


def serve(made: Simulation, planner: Planner, tokens: float) -> list[float]:
    """Tokens a millisecond in each window of :data:`WINDOW` tokens."""
    rng = np.random.default_rng(0)
    rates: list[float] = []
    spent = brought = 0.0
    while len(rates) * WINDOW < tokens:
        step = made.step(rng, planner)
        spent, brought = spent + step.milliseconds, brought + step.tokens
        if brought >= WINDOW:
            rates.append(brought / spent)
            spent = brought = 0.0
    return rates


def tokens_until(rates: Array, steady: Array) -> int:
    """Tokens behind which what remains of ``rates`` is within 2 % of the ``steady`` ones."""
    ratio = rates / steady
    rest = np.array([ratio[at:].mean() for at in range(len(ratio))])
    close = (ratio >= WITHIN) | (rest >= 1.0)
    return WINDOW * int(np.argmax(close & (rest >= WITHIN)))


def tables(traffic: Traffic, batches: Sequence[int], drafts: int) -> list[str]:
    """Markdown."""
    depths = [str(depth) for depth in range(1, traffic.layers + 1)]
    rows: list[tuple[str, list[str]]] = []
    for batch in batches:
        for policy in ESTIMATORS:
            found = calibration(traffic, policy, batch, drafts)
            seen = [
                f"{error:.3f}" if n >= ENOUGH else "-"
                for error, n in zip(found.verified_error, found.verified, strict=True)
            ]
            of_depths = {
                "verified": [f"{n:,}" for n in found.verified],
                "ECE, verified": seen,
                "ECE, all": [f"{error:.3f}" for error in found.error],
                "AUC, all": [f"{area:.3f}" for area in found.auc],
                "tokens/s, simulated": [f"{found.rate:.1f}", *[""] * (traffic.layers - 1)],
            }
            rows += [(str(batch), [policy, name, *cells]) for name, cells in of_depths.items()]
    lines = section(
        "## Calibration",
        f"Behind the first {LEARNT_DRAFTS:,} verified drafts, by depth; - below {ENOUGH:,} drafts.",
        ["at once", "policy", "", *depths],
        rows,
    )
    families = sorted({rid.rsplit("/", 1)[0] for rid in traffic.chains.requests if "/" in rid})
    first, last = families[0], families[-1]

    def served(family: str, batch: int) -> Callable[[Planner], None]:
        def done(planner: Planner) -> None:
            serve(traffic.simulation("auto", batch, family), planner, 20 * WINDOW)

        return done

    few, many = min(batches), max(batches)
    cases = {
        f"cold, {few} at once": (lambda _: None, few, ""),
        f"cold, {many} at once": (lambda _: None, many, ""),
        f"{first} -> {last}, {few} at once": (served(first, few), few, last),
        f"{last} -> {first}, {few} at once": (served(last, few), few, first),
        f"{few} -> {many} at once": (served("", few), many, ""),
        f"{many} -> {few} at once": (served("", many), few, ""),
    }
    rows = [(name, [f"{warm_up(traffic, *case):,}"]) for name, case in cases.items()]
    return [*lines, *section("## Warm-up", "Of `auto`.", ["change", "tokens"], rows)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, help="a recording of chains, roots: every")
    parser.add_argument("--curves", type=Path, help="JSON of GET /c2t; without: an H200's roofline")
    parser.add_argument("--layers", type=int, default=5, help="D, of at most those recorded")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--drafts", type=int, default=200_000, help="looked at for a calibration")
    args = parser.parse_args(argv)
    try:
        chains = Chains.from_recording(read_recording(args.recording))
        if not 1 <= args.layers <= chains.max_length:
            raise ConfigError(f"--layers must lie in 1..{chains.max_length}, as recorded")
        traffic = Traffic(chains, args.layers, costs_of(args.curves))
        print("\n".join(tables(traffic, args.batch, args.drafts)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
