"""Decode throughput of servers of a fleet: cells of a method at a batch size, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.gpu.answers import accept_length
from eval.gpu.fleet import Fleet, Running
from eval.gpu.results import Results, elapsed
from eval.gpu.step_clock import KEY, decoding, since

#: Rounds of a cell: small batches take little time, and few requests say little.
ROUNDS = {1: 4, 8: 2}

#: Seconds that a cell is expected to take before one of its batch size was measured.
FIRST_GUESS = 4.0


@dataclass(frozen=True)
class Method:
    """How one server of the fleet is measured.

    Attributes:
        switch: Posted to ``/c2t`` before its cells, where another method was measured before.
        plans: Whether it learns from the load, and needs more warm-up requests.
    """

    name: str
    server: str
    switch: dict[str, Any] | None = None
    plans: bool = False


class Speed:
    """Measures cells; all requests of a batch start together."""

    def __init__(self, results: Results, fleet: Fleet, texts: Sequence[str], tokens: int) -> None:
        self._results, self._fleet, self._texts, self._tokens = results, fleet, texts, tokens
        self._policy: dict[str, Any] = {}
        self._longest: dict[int, float] = {}
        self._baseline: dict[tuple[str, int], list[int]] = {}  # answers by shape and prompt

    def measure(
        self,
        shape: str,
        methods: Sequence[Method],
        batches: Sequence[int],
        repeats: Sequence[int],
        until: float,
    ) -> None:
        """Measure all cells that can end before ``until``, the methods of a batch in turn."""
        for repeat in repeats:
            for batch in batches:
                for method in methods:
                    key = shape, method.name, batch, repeat
                    running = self._fleet.running.get(method.server)
                    if not self._serves(running, batch):
                        continue
                    if elapsed() + 1.3 * self._longest.get(batch, FIRST_GUESS) > until:
                        self._results.log(f"no time for {key}")
                        return
                    assert running is not None
                    self._try(running, method, key)

    def _serves(self, running: Running | None, batch: int) -> bool:
        return running is not None and running.alive and batch <= max(running.spec.batches)

    def _try(self, running: Running, method: Method, key: tuple[str, str, int, int]) -> None:
        began, batch = time.monotonic(), key[2]
        try:
            self._cell(running, method, key)
        except Exception as error:  # the other cells are measured all the same
            cause = f"{type(error).__name__}: {error}"[:600]
            self._results.add("failed", cell=key, error=cause)
            self._results.log(f"FAILED {key}: {cause}")
        seconds = time.monotonic() - began
        self._longest[batch] = max(self._longest.get(batch, 0.0), seconds)

    def switch(self, running: Running, policy: dict[str, Any]) -> bool:
        """Have a server serve another policy; whether it did, also kept as a result."""
        if self._policy.get(running.spec.name) == policy:
            return True
        error = ""
        try:
            running.server.switch(**policy)
            self._policy[running.spec.name] = policy
        except Exception as raised:
            error = str(raised)[:600]
        self._results.add(
            "switched", server=running.spec.name, policy=policy["policy"], ok=not error, error=error
        )
        return not error

    def _cell(self, running: Running, method: Method, key: tuple[str, str, int, int]) -> None:
        shape, _, batch, repeat = key
        if method.switch and not self.switch(running, method.switch):
            raise RuntimeError(f"POST /c2t {method.switch} was refused")
        self._warm_up(running, method, batch)
        rounds = ROUNDS.get(batch, 1)
        numbers = self._numbers(repeat * batch * rounds, batch * rounds)
        before, began = running.server.internal_state(), time.monotonic()
        replies = []
        for turn in range(rounds):
            mine = numbers[turn * batch : (turn + 1) * batch]
            replies += running.generate([self._texts[i] for i in mine], self._tokens)
        wall = time.monotonic() - began
        after = running.server.internal_state()
        steps = since(before[KEY], after[KEY])
        span = decoding(steps)
        self._results.add(
            "cell",
            shape=shape,
            method=method.name,
            batch=batch,
            repeat=repeat,
            tokens_per_second=round(span.tokens / span.seconds, 1),
            decode_s=round(span.seconds, 4),
            tokens=span.tokens,
            steps=span.steps,
            rows=span.rows,
            wall_s=round(wall, 2),
            tau=accept_length(replies),
            parted=self._differences(shape, method, numbers, replies),
            requests=len(replies),
            planner=after.get("c2t", {}).get("planner") if method.plans else None,
        )
        self._results.log(
            f"{shape} {method.name} batch {batch}: {span.tokens / span.seconds:.0f} tokens/s, "
            f"{span.steps} steps of {1e3 * span.seconds / span.steps:.2f} ms, "
            f"{span.rows / span.steps:.0f} rows each"
        )

    def _warm_up(self, running: Running, method: Method, batch: int) -> None:
        """Short requests once for each method and batch size, other prompts than the cell's."""
        if (method.name, batch) in running.warm:
            return
        for turn in range(3 if method.plans else 1):
            numbers = self._numbers(-(turn + 1) * batch, batch)
            running.generate([self._texts[i] for i in numbers], self._tokens // 3)
        running.warm.add((method.name, batch))

    def _numbers(self, first: int, count: int) -> list[int]:
        return [(first + i) % len(self._texts) for i in range(count)]

    def _differences(
        self, shape: str, method: Method, numbers: Sequence[int], replies: Sequence[Any]
    ) -> int | None:
        """Answers that are not those of ``none`` to the same prompts; ``None`` if it has none."""
        pairs = [((shape, i), r["output_ids"]) for i, r in zip(numbers, replies, strict=True)]
        if method.name == "none":
            self._baseline.update(pairs)
            return None
        known = [(self._baseline[at], ids) for at, ids in pairs if at in self._baseline]
        return sum(ours != ids for ours, ids in known) if known else None
