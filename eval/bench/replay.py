"""Runs whose acceptance and draft lengths come from recorded traces, on models of random weights.

Inside the servers ``eval/gpu/trace_replay.py`` replays them. Here is what a run has to know of it:
prompts that name a trace and a policy, what a server is told, and how many verifications each
request must then take.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eval.bench.config import BenchConfig, MethodConfig
from eval.bench.datasets import Dataset, Sample
from eval.bench.records import Cell
from eval.gpu.trace_replay import LANE_SHIFT, Settings, lengths_of, prompt
from eval.gpu.traces import DEMO, Traces, fingerprint, load


def expected_steps(
    correct: Sequence[int], verified: Sequence[int] | int, num_tokens: int, shift: int = 0
) -> int:
    """Verifications an answer takes: the first token comes from the prefill.

    ``correct`` [R] of one trace, ``verified`` drafts [R] or everywhere; both start again at the
    end. Correct 2 0 1, 2 verified, 5 tokens: 1 -> 4 (behind root 0) -> 5 (root 3 = 0): 2.
    """
    tokens, root, steps = 1, shift, 0
    while tokens < num_tokens:
        at = root % len(correct)
        limit = verified if isinstance(verified, int) else verified[at]
        accepted = min(correct[at], limit) + 1
        tokens, root, steps = tokens + accepted, root + accepted, steps + 1
    return steps


@dataclass(frozen=True)
class Replay:
    """The traces of a run. Prompt i of a cell walks lane i, whatever the method."""

    config: BenchConfig

    @property
    def _gated(self) -> list[MethodConfig]:
        """Methods whose policies prompts name by number."""
        return [method for method in self.config.methods if method.gated]

    @property
    def _path(self) -> Path:
        assert self.config.replay is not None
        name = self.config.replay.traces
        return DEMO if name == "demo" else Path(name)

    @cached_property
    def _traces(self) -> Traces:
        return load(self._path)

    def settings(self, *, gated: bool) -> Settings:
        """What servers are told; those without a gate of no policies."""
        assert self.config.replay is not None
        return Settings(
            str(self._path.resolve()),
            [method.c2t_settings() for method in self._gated] if gated else [],
            max((method.num_steps for method in self._gated), default=1),
            max_positions=self.config.replay.max_positions,
        )

    def samples(self, method: MethodConfig | None, num: int) -> list[Sample]:
        """Prompts of one length, the first ``num`` lanes under the method's policy."""
        assert self.config.replay is not None
        length = self.config.replay.prompt_tokens
        policy = self._gated.index(method) if method in self._gated else 0
        return [Sample("trace", prompt(lane, policy, length), length) for lane in range(num)]

    def dataset(self) -> Dataset:
        """As many prompts as the largest cell sends, and where the traces come from."""
        num = max(n for load in self.config.load for n in load.prompts)
        made = self._traces.provenance
        groups = ", ".join(f"{name} {n}" for name, n in made["groups"].items())
        source = (
            f"{made['num_traces']} answers, {made['num_roots']} tokens, drafted {made['depth']} "
            f"deep by {made['origins'][0]['algorithm']} ({groups})"
        )
        told = {"name": f"traces {self._path.name}", "n": num, "sha256": fingerprint(self._path)}
        part = {**told, "family": "trace", "source": source}
        return Dataset(self.samples(None, num), {**told, "parts": [part]})

    @cached_property
    def _correct(self) -> list[list[int]]:
        """Of each trace [R]: leading drafts that the target accepts."""
        return self._by_trace(self._traces.chains.num_correct.tolist())

    @cached_property
    def _verified(self) -> list[list[list[int]]]:
        """Of each policy and trace [R]: drafts that it lets through."""
        kept = lengths_of(self._traces, self.settings(gated=True))
        return [self._by_trace(lengths.tolist()) for lengths in kept]

    def _by_trace(self, values: list[int]) -> list[list[int]]:
        ends = itertools.pairwise(self._traces.chains.first_root.tolist())
        return [values[start:end] for start, end in ends]

    def disagreements(self, cells: Sequence[Cell]) -> list[str]:
        """A sentence for each cell in which requests took other verifications than traces say."""
        return [told for cell in cells if (told := self.disagreement(cell)) is not None]

    def disagreement(self, cell: Cell) -> str | None:
        """Such a sentence, if there is cause for one.

        A gated server may draft fewer layers than its policy would verify, so it may need up to
        a quarter more. Of SGLang's adaptive lengths the traces say nothing.
        """
        method = next(m for m in self.config.methods if m.name == cell.method)
        if method.kind in ("none", "adaptive"):
            return None
        wrong = [
            request.index
            for request in cell.requests
            if not self._as_recorded(method, request.index, request.meta.get("spec_verify_ct", 0))
        ]
        if not wrong:
            return None
        return (
            f"{cell.key}: {len(wrong)} of {len(cell.requests)} requests took other verifications "
            f"than their traces say, first prompt {wrong[0]}: the replay did not work"
        )

    def _as_recorded(self, method: MethodConfig, lane: int, verifications: int) -> bool:
        shift, trace = divmod(lane, len(self._correct))
        verified = (
            self._verified[self._gated.index(method)][trace] if method.gated else method.num_steps
        )
        tokens = self.config.requests.max_new_tokens
        steps = expected_steps(self._correct[trace], verified, tokens, shift * LANE_SHIFT)
        return steps <= verifications <= (1.25 * steps + 2 if method.gated else steps)
