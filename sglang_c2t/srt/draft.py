"""The draft side: watch SGLang's own draft logits, gate, and stop drafting early.

``draft_forward`` and the draft-extend functions are SGLang's. We shadow the draft
runner's ``forward`` on the instance, read the logits it returns, and, once no chain of
the batch is alive, return a placeholder instead of running the model: the loop then
spins through its remaining steps without a forward, and the tokens it collects lie
behind every request's cut.
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

from sglang_c2t.chain import ChainGate, Exploration
from sglang_c2t.policies import ChainPolicy
from sglang_c2t.srt.reporting import COUNTERS

# B requests, V draft vocabulary


class C2TDraftMixin:
    """Adds a :class:`ChainGate` to one of SGLang's draft workers."""

    gate: ChainGate
    _policy: ChainPolicy
    _agree: Callable[[Tensor], Tensor]
    _exploration: Exploration | None
    _watcher: Callable[[Any, Callable[[], Any]], Any] | None

    def watch(
        self,
        policy: ChainPolicy,
        agree: Callable[[Tensor], Tensor],
        exploration: Exploration | None,
    ) -> None:
        """Start watching the draft runner; ``agree`` equalises decisions over TP ranks."""
        self._policy = policy
        self._agree = agree
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
        self.gate = ChainGate(
            self._policy,
            num_slots=self.req_to_token_pool.req_to_token.shape[0],  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
            exploration=self._exploration,
            agree=self._agree,
        )

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
            return _no_forward(forward_batch)
        output = run()
        logits_output = output.logits_output
        self.gate.observe(logits_output.next_token_logits, logits_output.hidden_states)
        return output

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


class C2TEagleDraftWorker(C2TDraftMixin, EagleDraftWorker):
    """Gated draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneDraftWorker(C2TDraftMixin, StandaloneDraftWorker):
    """Gated draft worker of STANDALONE."""


def _no_forward(forward_batch: Any) -> Any:
    """What ``draft_runner.forward`` returns, for a layer nobody will verify.

    One logit per request makes the loop pick token 0; the hidden states pass through.
    """
    logits = torch.zeros((forward_batch.batch_size, 1), device=forward_batch.input_ids.device)
    return SimpleNamespace(
        logits_output=SimpleNamespace(
            next_token_logits=logits, hidden_states=forward_batch.spec_info.hidden_states
        )
    )
