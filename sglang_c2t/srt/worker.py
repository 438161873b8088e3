"""The speculative workers: SGLang's own, with drafts cut before verification."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, ClassVar

import torch
from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_c2t.chain import truncated_chains
from sglang_c2t.config import C2TConfig, active
from sglang_c2t.policies import build_policy
from sglang_c2t.srt import compat, ragged_verify
from sglang_c2t.srt.draft import C2TDraftMixin, C2TEagleDraftWorker, C2TStandaloneDraftWorker
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.tensor_parallel import agreement

logger = logging.getLogger(__name__)


class C2TWorkerMixin:
    """Cuts each request's draft at the length its gate chose, then verifies as stock.

    Output is unchanged by construction: with argmax drafts, which tokens are verified
    is a function of the prefix alone, and a cut chain takes its bonus token from the
    target's distribution at the cut.
    """

    _draft_worker: C2TDraftMixin

    #: Module whose global names the draft worker class that SGLang's constructor builds,
    #: that name, and our class.
    draft_worker_global: ClassVar[tuple[ModuleType, str]]
    draft_worker_class: ClassVar[type[C2TDraftMixin]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with compat.swapped(*self.draft_worker_global, self.draft_worker_class):
            super().__init__(*args, **kwargs)
        config = active()
        assert config is not None, "the factory builds this worker only when C2T is on"
        self._config: C2TConfig = config
        self._recorder = Recorder.from_config(config, self.server_args)  # type: ignore[attr-defined]
        self._draft_worker.watch(build_policy(config), agreement(), self._recorder)
        self._ragged = False
        ragged_verify.install(self.target_worker)  # type: ignore[attr-defined]

    def init_attention_backends(self) -> None:
        """Learn whether the target's backend can verify packed rows."""
        super().init_attention_backends()  # type: ignore[misc]
        runner = self.target_worker.model_runner  # type: ignore[attr-defined]
        self._ragged = ragged_verify.decide(self._config.verify, runner)
        logger.info(
            "C2T: policy %s, %s verification, settings %s",
            self._config.policy,
            "ragged" if self._ragged else "static",
            self._config.to_json(),
        )

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Cut the drafts of the batch, verify, and report the lengths."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        gate, recorder = self._draft_worker.gate, self._recorder
        verify_lens = gate.verify_lens  # [B] int32
        assert len(verify_lens) == len(batch.seq_lens), (
            f"gate saw {len(verify_lens)} requests, verification {len(batch.seq_lens)}"
        )
        verify_input = batch.spec_info
        # Every rank must cut alike, and only rank 0 has a recorder: ask the configuration.
        commit_lens = (
            torch.ones_like(verify_lens) if self._config.visits_every_root else verify_lens
        )
        verify_input.retrieve_next_token = truncated_chains(
            verify_input.retrieve_next_token, commit_lens
        )
        draft_tokens = verify_input.draft_token
        with ragged_verify.packing(verify_lens if self._ragged else None):
            result = super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        # SGLang carries this field to meta_info["spec_cap_length"] and its log.
        result.cap_lens = verify_lens
        if recorder is not None and gate.exploring:
            complete = gate.first_tokens_complete(batch.req_pool_indices)
            recorder.add(batch, gate.layers, complete, draft_tokens, result)
        return result


class C2TEagleWorker(C2TWorkerMixin, EAGLEWorkerV2):
    """Worker of EAGLE, EAGLE3 and NEXTN."""

    draft_worker_global = (eagle_worker_v2, "EagleDraftWorker")
    draft_worker_class = C2TEagleDraftWorker


class C2TStandaloneWorker(C2TWorkerMixin, StandaloneWorkerV2):
    """Worker of STANDALONE."""

    draft_worker_global = (standalone_worker_v2, "StandaloneDraftWorker")
    draft_worker_class = C2TStandaloneDraftWorker


WORKERS: dict[type, type] = {
    EAGLEWorkerV2: C2TEagleWorker,
    StandaloneWorkerV2: C2TStandaloneWorker,
}
