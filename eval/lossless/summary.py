"""What a run found, as tables for people and as one JSON file. Knows nothing of servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval import terminal
from eval.lossless import diverge
from eval.lossless.greedy import REFERENCE_BATCH, Wave
from eval.lossless.outcome import NOT_RUN, Outcome
from eval.lossless.sampling import FAMILY_ALPHA, POWER, SampleTest
from eval.lossless.seeded import Reproduced
from eval.lossless.suite import Found
from sglang_c2t.files import write_whole

FORMAT = 1
SUMMARY_FILE = "summary.json"

#: Decoded characters of a prompt that are shown of a divergence.
SHOWN = 120

Decode = Callable[[Sequence[int]], str]


def write(
    found: Found, config: dict[str, Any], provenance: dict[str, Any], decode: Decode, out: Path
) -> Path:
    """Everything found, as JSON in the folder ``out``; the path of the file."""
    document = {
        "format": FORMAT,
        "lossless": found.defects == 0,
        "defects": found.defects,
        "config": config,
        "provenance": provenance,
        "greedy": {
            "control": [_wave(wave, decode) for wave in found.control],
            "waves": [_wave(wave, decode) for wave in found.waves],
            "rounding_noise": found.noise and {**asdict(found.noise), "bound": found.noise.bound},
        },
        "sampling": {
            "family_alpha": FAMILY_ALPHA,
            "power": POWER,
            "tests": [{**asdict(test), "passed": test.passed} for test in found.tests],
        },
        "seeded": [asdict(run) for run in found.seeded],
        "kits": [asdict(outcome) for outcome in found.kits],
        "kits_not_run": NOT_RUN if found.kits else {},
        "broken": [asdict(broken) for broken in found.broken],
    }
    path = out / SUMMARY_FILE
    write_whole({path: lambda tmp: tmp.write_text(json.dumps(document, indent=1) + "\n")})
    return path


def _wave(wave: Wave, decode: Decode) -> dict[str, Any]:
    texts = [decode(divergence.prompt_ids) for divergence in wave.divergences]
    told = asdict(wave)
    for divergence, text in zip(told["divergences"], texts, strict=True):
        divergence["prompt"] = text
    return told


def show(found: Found, decode: Decode, console: Console) -> None:
    """Tables of all parts that ran, what differs one by one, and the verdict."""
    if found.waves:
        console.print(greedy_table([*found.control, *found.waves]))
        console.print(
            f"[dim]Expected: answers of the plain server, {REFERENCE_BATCH} at once; rows "
            "without a policy are servers without --c2t, which need not repeat it either. Lead: in "
            "float32, of the likelier token at the place of parting, the row's largest.[/dim]"
        )
        for wave in (*found.control, *found.waves):
            for divergence in wave.divergences:
                console.print(sentence(wave, divergence, decode), markup=False)
        if found.noise is not None:
            console.print(noise_sentence(found.noise))
    if found.tests:
        console.print(sampling_table(found.tests))
        console.print(
            f"[dim]Chi-square over continuations. All tests together raise a false alarm in "
            f"{FAMILY_ALPHA:g} of runs. Any deviation of at least TV (total variation distance) is "
            f"found with probability {POWER:g}, most are found much earlier.[/dim]"
        )
    if found.seeded:
        console.print(seeded_table(found.seeded))
    if found.kits:
        console.print(kits_table(found.kits))
        for outcome in found.kits:
            if not outcome.passed:
                console.print(f"{outcome.server}: {outcome.kit}.{outcome.test}", style="red")
                console.print(outcome.message, markup=False)
        for left_out, reason in NOT_RUN.items():
            console.print(f"not run: {left_out}: {reason}", style="dim", markup=False)
    for broken in found.broken:
        console.print(f"{broken.server} broke: {broken.message}", style="red", markup=False)
    console.print(verdict(found), style="bold green" if found.defects == 0 else "bold red")


def verdict(found: Found) -> str:
    """One line."""
    told = []
    if found.waves:
        requests = sum(wave.requests for wave in found.waves)
        told.append(
            f"{requests} greedy requests, {_ties(found.waves)} parted at floating-point ties"
        )
    if found.tests:
        told.append(f"{len(found.tests)} distribution tests")
    if found.seeded:
        told.append(f"{sum(run.requests for run in found.seeded)} seeded requests")
    if found.kits:
        told.append(f"{len(found.kits)} tests of SGLang's kits")
    answer = "lossless: yes" if found.defects == 0 else f"lossless: NO, {found.defects} defects"
    return f"{answer} ({'; '.join(told) or 'nothing ran'})"


def sentence(wave: Wave, divergence: diverge.Divergence, decode: Decode) -> str:
    """Where one answer parts, and what it is."""
    one, other = (
        "the end" if token is None else f"{decode([token])!r} ({token})"
        for token in (divergence.wanted, divergence.got)
    )
    return (
        f"{divergence.verdict.upper()}: {wave.server}, {wave.policy}, {wave.concurrency} at once, "
        f"request {divergence.index} ({divergence.sort}), token {divergence.place}: {other} "
        f"instead of {one}; {divergence.why}. "
        f"Prompt: ...{decode(divergence.prompt_ids)[-SHOWN:]!r}"
    )


def noise_sentence(noise: diverge.Noise) -> str:
    """How the bound of a tie came about."""
    return (
        f"[dim]Rounding: over {noise.places} places where two tokens are within "
        f"{diverge.NEAR_TIE:g} nat, the plain server's lead of one over the other differs from "
        f"float32's by {noise.median:.1e} nats in the median and {noise.largest:.1e} at most; "
        f"a tie is a lead within {diverge.SAFETY:g} times that.[/dim]"
    )


# -- tables ---------------------------------------------------------------------------------


def greedy_table(waves: Sequence[Wave]) -> Table:
    """One row per server and policy, its batch sizes added up."""
    table = terminal.table(
        "Greedy equality", "server", "policy",
        numbers=("requests (at once)", "tokens", "tau", "gamma", "ties", "lead", "defects"),
    )  # fmt: skip
    for (server, policy), group in groupby(waves, key=lambda wave: (wave.server, wave.policy)):
        rows = list(group)
        ties = _ties(rows)
        defects = sum(len(row.divergences) for row in rows) - ties
        # Of the largest batch, which has most of the requests.
        tau, gamma = rows[-1].accept_length, rows[-1].gamma
        table.add_row(
            server, policy, _batches(rows), str(sum(row.tokens for row in rows)), _number(tau),
            _number(gamma), str(ties), _lead(rows), _alarm(defects),
        )  # fmt: skip
    return table


def sampling_table(tests: Sequence[SampleTest]) -> Table:
    """One row per test."""
    table = terminal.table(
        "Distribution of samples", "server", "samples from",
        numbers=("n", "chi-square", "cells less 1", "p", "alpha", "finds TV >=", "tau", "follows"),
    )  # fmt: skip
    for test in tests:
        found = test.fit
        table.add_row(
            test.server, test.cut, str(found.n), f"{found.statistic:.0f}", str(found.dof),
            f"{found.p_value:.3g}", f"{test.alpha:.1e}", f"{test.detectable:.3f}",
            _number(test.accept_length), "yes" if test.passed else "[bold red]NO[/]",
        )  # fmt: skip
    return table


def seeded_table(runs: Sequence[Reproduced]) -> Table:
    """One row per server and cut."""
    table = terminal.table(
        "Seeded equality", "server", "samples from",
        numbers=("requests (at once)", "tokens", "accepted drafts", "differ"),
    )  # fmt: skip
    for (server, cut), group in groupby(runs, key=lambda run: (run.server, run.cut)):
        rows = list(group)
        table.add_row(
            server, cut, _batches(rows), str(sum(row.tokens for row in rows)),
            str(sum(row.accepted_drafts for row in rows)), _differing(rows),
        )  # fmt: skip
    return table


def _differing(rows: Sequence[Reproduced]) -> str:
    count = sum(len(row.differing) for row in rows)
    return _alarm(count) if all(row.promised for row in rows) else f"{count} (not promised)"


def kits_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per server and kit."""
    table = terminal.table(
        "SGLang's own kits", "server", "kit", numbers=("tests", "failed", "seconds")
    )
    ordered = sorted(outcomes, key=lambda outcome: (outcome.server, outcome.kit))
    for (server, kit), group in groupby(ordered, key=lambda o: (o.server, o.kit)):
        rows = list(group)
        failed, seconds = sum(not row.passed for row in rows), sum(row.seconds for row in rows)
        table.add_row(server, kit, str(len(rows)), _alarm(failed), f"{seconds:.0f}")
    return table


def _ties(waves: Sequence[Wave]) -> int:
    return sum(wave.count("tie") for wave in waves)


def _batches(rows: Sequence[Wave] | Sequence[Reproduced]) -> str:
    return " + ".join(f"{row.requests} ({row.concurrency})" for row in rows)


def _lead(waves: Sequence[Wave]) -> str:
    leads = [d.lead for wave in waves for d in wave.divergences if d.lead is not None]
    return f"{max(leads):.3f}" if leads else "-"


def _alarm(count: int) -> str:
    return f"[bold red]{count}[/]" if count else "0"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
