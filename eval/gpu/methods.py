"""What the throughput benchmark compares, and which server measures it.

Gated policies share one ``--c2t`` server: between them only the recorded lengths differ, and the
gate costs the same whoever's weights it holds. Everything else gets a server of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.gpu.launch import speculative_flags
from eval.gpu.models import Pair

BASELINE = "no speculation"
MAX_STEPS = 7

#: Policies of ``--c2t`` at their own thresholds, in the order of their numbers. The server gates
#: with the last one, the most expensive.
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "dymax"},
    {"policy": "dyjoint"},
    {"policy": "c2t"},
    {"policy": "c2t-log"},
    {"policy": "c2t-plus"},
)

REPLAY = ("step_clock", "trace_replay")


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    num_steps: int
    """Drafts verified per step without a policy; 0: no speculation."""

    policy: int | None = None
    """Index into :data:`POLICIES`."""

    predictable: bool = True
    """Whether the traces alone say how many steps an answer takes."""


@dataclass(frozen=True)
class Host:
    """A server and the methods it measures."""

    name: str
    methods: Sequence[Method]
    flags: Sequence[str] = ()
    plugins: Sequence[str] = field(default=REPLAY)


def fixed(num_steps: int) -> Method:
    """SGLang's chains of one length."""
    return Method(f"fixed {num_steps}", num_steps)


def hosts(pair: Pair, *, gated_steps: int = MAX_STEPS) -> list[Host]:
    """All of them, the most telling first, because time may end early."""

    def draft(num_steps: int) -> tuple[str, ...]:
        return speculative_flags(pair.draft, num_steps)

    plain = Method(BASELINE, 0)
    gated = [Method(p["policy"], gated_steps, policy=i) for i, p in enumerate(POLICIES)]
    last = POLICIES[-1]["policy"]
    with_c2t = ("c2t", *REPLAY)
    chains = {n: Host(f"fixed {n}", [fixed(n)], draft(n)) for n in range(1, MAX_STEPS + 1)}
    adaptive = Method("SGLang adaptive", MAX_STEPS, predictable=False)
    off = "plugin installed, off"
    return [
        Host(BASELINE, [plain]),
        chains[3],
        Host("c2t", gated, (*draft(gated_steps), "--c2t", "--c2t-policy", last), with_c2t),
        chains[1],
        chains[2],
        chains[5],
        # From its longest length on: SGLang 0.5.17 sizes what its graphs share by the first.
        Host("adaptive", [adaptive], (*draft(MAX_STEPS), "--speculative-adaptive")),
        chains[7],
        chains[4],
        chains[6],
        Host(off, [Method(f"{BASELINE}, {off}", 0)], (), with_c2t),
        Host(f"fixed 3, {off}", [Method(f"fixed 3, {off}", 3)], draft(3), with_c2t),
    ]
