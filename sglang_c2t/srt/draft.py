"""The draft side: watch SGLang's own draft logits, gate, and stop drafting early.

``draft_forward`` and the draft-extend functions are SGLang's. We shadow the draft
runner's ``forward`` on the instance, read the logits it returns, and, once no draft of
the batch is alive, return a placeholder instead of running the model: the loop then
spins through its remaining steps without a forward, and the tokens it collects lie
behind every request's cut. Here for chains; ``tree_draft.py`` adds trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_c2t.chain import ChainGate
from sglang_c2t.relay import Exploration, FirstTokenRelay
from sglang_c2t.srt.reporting import COUNTERS

# B requests, V draft vocabulary


class DraftWatcher:
    """Reads the draft logits of one of SGLang's draft workers for a gate."""

    gate: FirstTokenRelay
    _make_gate: Callable[..., FirstTokenRelay]
    _exploration: Exploration | None
    _watcher: Callable[[Any, Callable[[], Any]], Any] | None

    def watch(
        self, make_gate: Callable[..., FirstTokenRelay], exploration: Exploration | None
    ) -> None:
        """Start watching the draft runner.

        ``make_gate`` takes the keyword arguments of
        :class:`~sglang_c2t.relay.FirstTokenRelay` once the request table exists.
        """
        self._make_gate = make_gate
        self._exploration = exploration
        self._watcher = None
        runner = self.draft_runner  # type: ignore[attr-defined]
        forward = runner.forward

        def watched_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            run = lambda: forward(forward_batch, *args, **kwargs)  # noqa: E731 - passed on
            return run() if self._watcher is None else self._watcher(forward_batch, run)

        runner.forward = watched_forward

    @contextmanager
    def _watching(self, watcher: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Size the relay of first-token statistics like SGLang's own request table."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        self.gate = self._make_gate(
            num_slots=self.req_to_token_pool.req_to_token.shape[0],  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
            exploration=self._exploration,
        )

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Measure the first token drafted behind each prompt."""
        with self._last_output() as output:
            result = super()._draft_extend_for_prefill(  # type: ignore[misc]
                batch, *args, **kwargs
            )
        if not batch.forward_mode.is_idle():
            self.gate.join(batch.req_pool_indices, *output())
        return result

    def _draft_extend_for_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Measure the first token drafted behind each verification."""
        with self._last_output() as output:
            super()._draft_extend_for_decode(batch, *args, **kwargs)  # type: ignore[misc]
        if not batch.forward_mode.is_idle():
            self.gate.relay_first_token(batch.req_pool_indices, *output())

    @contextmanager
    def _last_output(self) -> Iterator[Callable[[], tuple[Tensor, Tensor | None]]]:
        """Yields a getter for logits [B, V] and hidden states [B, H] of the draft extend
        inside the block.

        SGLang selects the last accepted row of each request *in place* on the output
        object after the forward, so the getter reads it only afterwards.
        """
        outputs: list[Any] = []

        def keep(_forward_batch: Any, run: Callable[[], Any]) -> Any:
            output = run()
            outputs.append(output.logits_output)
            return output

        with self._watching(keep):
            yield lambda: (outputs[-1].next_token_logits, outputs[-1].hidden_states)


class ChainDraftMixin(DraftWatcher):
    """Cuts chains."""

    gate: ChainGate

    def draft_forward(self, forward_batch: Any) -> Any:
        """Draft a batch of chains; afterwards ``gate.verify_lens`` says where each ends."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)  # type: ignore[misc]
        self.gate.begin(forward_batch.req_pool_indices)
        with self._watching(self._draft_layer):
            return super().draft_forward(forward_batch)  # type: ignore[misc]

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer: free on a CPU; on a GPU one wait for a tiny
        # kernel, which buys a whole draft forward whenever the batch has stopped.
        if not self.gate.any_alive():
            COUNTERS.draft_forwards_skipped += 1
            return no_forward(forward_batch)
        output = run()
        logits_output = output.logits_output
        self.gate.observe(logits_output.next_token_logits, logits_output.hidden_states)
        return output


class C2TEagleDraftWorker(ChainDraftMixin, EagleDraftWorker):
    """Gated draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneDraftWorker(ChainDraftMixin, StandaloneDraftWorker):
    """Gated draft worker of STANDALONE."""


def no_forward(forward_batch: Any, choices: int = 1) -> Any:
    """What ``draft_runner.forward`` returns, for a layer nobody will verify.

    ``choices`` equal logits per row make the loop pick tokens from 0 on; the hidden states
    pass through.
    """
    ids = forward_batch.input_ids
    logits = torch.zeros((len(ids), choices), device=ids.device)
    return SimpleNamespace(
        logits_output=SimpleNamespace(
            next_token_logits=logits, hidden_states=forward_batch.spec_info.hidden_states
        )
    )
