"""Measures the servers of a fleet: their answers against no speculation, and decode throughput.

Answers may differ at ties of the logits, see ``ties.py``. A cell is a method at a batch size; all
requests of a batch start together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.gpu.fleet import Fleet, Running
from eval.gpu.results import Results, elapsed
from eval.gpu.step_clock import KEY, decoding, since
from eval.gpu.ties import Reference, excused, parting

#: Rounds of a cell: small batches take little time, and few requests say little.
ROUNDS = {1: 4, 8: 2}

#: Seconds that a cell is expected to take before one of its batch size was measured.
FIRST_GUESS = 4.0


@dataclass(frozen=True)
class Method:
    """How one server of the fleet is measured."""

    name: str
    server: str
    switch: dict[str, Any] | None = None  # posted to /c2t before its cells
    plans: bool = False  # whether it learns from the load, and needs more warm-up requests


def accept_length(replies: Sequence[Any]) -> float | None:
    """Tokens per verification over all requests; ``None`` without speculation."""
    verified = sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies)
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
    return round(tokens / verified, 3) if verified else None


def switch(results: Results, running: Running, policy: dict[str, Any]) -> bool:
    """Switch a server to another policy; whether it did, also kept as a result."""
    if running.policy == policy:
        return True
    error = ""
    try:
        running.server.switch(**policy)
        running.policy = policy
    except Exception as raised:
        error = str(raised)[:600]
    name = running.spec.name
    results.add("switched", server=name, policy=policy["policy"], ok=not error, error=error)
    return not error


class Answers:
    """Greedy answers of one server without speculation, to compare other servers' with."""

    def __init__(
        self, results: Results, server: Running, texts: Sequence[str], tokens: int
    ) -> None:
        self._results, self._texts, self._tokens = results, texts, tokens
        replies = server.generate(texts, tokens, return_logprob=True, top_logprobs_num=2)
        self._references = [Reference.of(reply) for reply in replies]
        parted = total = 0  # how often the server differs from itself at smaller batch sizes
        for size in {max(len(texts) // 4, 1), max(len(texts) // 8, 1)}:
            for known, reply in zip(
                self._references, server.generate(texts[:size], tokens), strict=False
            ):
                parted += parting(known, reply["output_ids"]) is not None
                total += 1
        results.add("control", server=server.spec.name, parted=parted, total=total)

    def compare(self, server: Running, method: str, batches: Sequence[int]) -> None:
        """Compare the answers of ``server`` at each batch size; at 1, three of them in turn."""
        for batch in batches:
            groups = [range(batch)] if batch > 1 else [range(i, i + 1) for i in range(3)]
            replies: list[tuple[int, Any]] = []
            for group in groups:
                numbers = [i % len(self._texts) for i in group]
                texts = [self._texts[i] for i in numbers]
                replies += zip(numbers, server.generate(texts, self._tokens), strict=True)
            pairs = [(i, self._references[i], reply["output_ids"]) for i, reply in replies]
            wrong = [_difference(*pair) for pair in pairs if not excused(*pair[1:])]
            self._results.add(
                "answers",
                server=server.spec.name,
                method=method,
                batch=batch,
                total=len(replies),
                parted=sum(parting(*pair[1:]) is not None for pair in pairs),
                num_wrong=len(wrong),
                wrong=wrong,
                tau=accept_length([reply for _, reply in replies]),
            )


def _difference(prompt: int, reference: Reference, tokens: Sequence[int]) -> dict[str, Any]:
    """The first place that differs, the reference's two best tokens there, and the token taken."""
    place = parting(reference, tokens)
    assert place is not None, "an equal answer is excused"
    known = place < min(len(tokens), len(reference.top))
    return {
        "prompt": prompt,
        "place": place,
        "top": [list(entry) for entry in reference.top[place][:2]] if known else [],
        "got": tokens[place] if known else None,
        "lengths": [len(reference.tokens), len(tokens)],
    }


class Speed:
    """Measures cells and adds their rows."""

    def __init__(self, results: Results, fleet: Fleet, texts: Sequence[str], tokens: int) -> None:
        self._results, self._fleet, self._texts, self._tokens = results, fleet, texts, tokens
        self._longest: dict[int, float] = {}
        self._baseline: dict[tuple[str, int], list[int]] = {}  # answers by shape and prompt

    def measure(
        self, methods: Sequence[Method], batches: Sequence[int], repeats: Sequence[int],
        until: float,
    ) -> None:  # fmt: skip
        """Measure all cells that can end before ``until``, the methods of a batch in turn."""
        for repeat in repeats:
            for batch in batches:
                for method in methods:
                    running = self._fleet.running.get(method.server)
                    if running is None or not running.alive or batch > max(running.spec.batches):
                        continue
                    if elapsed() + 1.3 * self._longest.get(batch, FIRST_GUESS) > until:
                        self._results.log(f"no time for {method.name} batch {batch}")
                        return
                    began = time.monotonic()
                    try:
                        self._cell(running, method, batch, repeat)
                    except Exception as error:  # the other cells are measured all the same
                        cause = f"{type(error).__name__}: {error}"[:600]
                        key = running.spec.shape, method.name, batch, repeat
                        self._results.add("failed", cell=key, error=cause)
                    seconds = time.monotonic() - began
                    self._longest[batch] = max(self._longest.get(batch, 0.0), seconds)

    def _cell(self, running: Running, method: Method, batch: int, repeat: int) -> None:
        if method.switch and not switch(self._results, running, method.switch):
            raise RuntimeError(f"POST /c2t {method.switch} was refused")
        if (method.name, batch) not in running.warm:  # short requests, other prompts
            for turn in range(3 if method.plans else 1):
                self._ask(running, -(turn + 1) * batch, batch, self._tokens // 3)
            running.warm.add((method.name, batch))
        rounds = ROUNDS.get(batch, 1)
        before, began, pairs = running.server.internal_state(), time.monotonic(), []
        for turn in range(rounds):
            pairs += self._ask(running, (repeat * rounds + turn) * batch, batch, self._tokens)
        wall = time.monotonic() - began
        after = running.server.internal_state()
        span = decoding(since(before[KEY], after[KEY]))
        self._results.add(
            "cell",
            shape=running.spec.shape,
            method=method.name,
            batch=batch,
            repeat=repeat,
            tokens_per_second=round(span.tokens / span.seconds, 1),
            ms_per_step=round(1e3 * span.seconds / span.steps, 2),
            rows_per_step=round(span.rows / span.steps, 1),
            **{**span._asdict(), "seconds": round(span.seconds, 4)},
            wall_s=round(wall, 2),
            tau=accept_length([reply for _, reply in pairs]),
            parted=self._differences(running.spec.shape, method, pairs),
            requests=len(pairs),
            planner=after.get("c2t", {}).get("planner") if method.plans else None,
        )

    def _ask(
        self, running: Running, first: int, count: int, tokens: int
    ) -> list[tuple[int, dict[str, Any]]]:
        """Numbers of ``count`` prompts, and the replies to them."""
        numbers = [(first + i) % len(self._texts) for i in range(count)]
        replies = running.generate([self._texts[i] for i in numbers], tokens)
        return list(zip(numbers, replies, strict=True))

    def _differences(
        self, shape: str, method: Method, pairs: Sequence[tuple[int, Any]]
    ) -> int | None:
        """Answers that are not those of ``none`` to the same prompts; ``None`` if it has none."""
        answers = {(shape, number): reply["output_ids"] for number, reply in pairs}
        if method.name == "none":
            self._baseline |= answers
            return None
        known = [(self._baseline[at], ids) for at, ids in answers.items() if at in self._baseline]
        return sum(ours != ids for ours, ids in known) if known else None
