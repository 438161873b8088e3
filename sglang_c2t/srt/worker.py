"""The speculative workers: SGLang's own, with drafts cut or pruned before verification."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_c2t.config import C2TConfig, ConfigError, active
from sglang_c2t.draft.chain import ChainGate, truncated_chains
from sglang_c2t.draft.relay import FirstTokenRelay
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.policies import policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import compat
from sglang_c2t.srt.draft import ancestors
from sglang_c2t.srt.draft.chain import (
    C2TEagleDraftWorker,
    C2TStandaloneDraftWorker,
    ChainDraftMixin,
)
from sglang_c2t.srt.draft.tree import (
    C2TEagleTreeDraftWorker,
    C2TStandaloneTreeDraftWorker,
    TreeDraftMixin,
)
from sglang_c2t.srt.draft.watcher import DraftWatcher
from sglang_c2t.srt.hooks.control import approved, changed
from sglang_c2t.srt.hooks.step_metrics import Step
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.tensor_parallel import agreement, ranks
from sglang_c2t.srt.verify import chain as ragged_verify
from sglang_c2t.srt.verify import tree as tree_verify
from sglang_c2t.srt.verify.lookback import Lookback, choose_packing
from sglang_c2t.srt.verify.packing import warm_up

logger = logging.getLogger(__name__)


class WorkerMixin:
    """Puts our draft worker in place of SGLang's and lets it watch its drafts."""

    _draft_worker: DraftWatcher

    #: Module whose global names the draft worker class that SGLang's constructor builds,
    #: that name, and our class.
    draft_worker_global: ClassVar[tuple[ModuleType, str]]
    draft_worker_class: ClassVar[type[DraftWatcher]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with compat.swapped(*self.draft_worker_global, self.draft_worker_class):
            super().__init__(*args, **kwargs)
        config = active()
        assert config is not None, "the factory builds this worker only when C2T is on"
        self._config = self._start = config
        self._recorder = Recorder.from_config(config, self.server_args)  # type: ignore[attr-defined]
        self._draft_worker.watch(self._gate_maker(), self._recorder)
        compat.widen_request_table()  # SGLang makes it once its workers are there
        self._lookback = Lookback(
            self.target_worker,  # type: ignore[attr-defined]
            agreement() if ranks() > 1 else None,
            config.max_verify_rows,
        )

    def _gate_maker(self) -> Callable[..., FirstTokenRelay]:
        """The gate, still to be given its request table."""
        raise NotImplementedError

    def init_cuda_graphs(self) -> None:
        """Capture, and have ready what runs outside of the graphs."""
        super().init_cuda_graphs()  # type: ignore[misc]
        runner = self.target_worker.model_runner  # type: ignore[attr-defined]
        if runner.device == "cuda" and self._packs:
            warm_up(
                runner,
                self._draft_worker.draft_runner,  # type: ignore[attr-defined]
                self.speculative_num_draft_tokens,  # type: ignore[attr-defined]
                runner.max_running_requests,
                trees=self.topk > 1,  # type: ignore[attr-defined]
                num_steps=self.speculative_num_steps,  # type: ignore[attr-defined]
            )

    def change(self, values: object) -> C2TConfig:
        """Serve the policy of other settings from the next step on; returns all settings.

        ``values`` are what a client asks for, see :mod:`~sglang_c2t.srt.hooks.control`. Raises
        :class:`~sglang_c2t.config.ConfigError` where that needs a restart; then nothing has
        changed.
        """
        if self._config.record is not None:
            raise ConfigError("the policy of a server that records stays: restart it without")
        config = changed(self._config, values, self._start)
        policy = approved(config, self._start, self._shape)
        if "hidden" in policy.needs and isinstance(self, StandaloneWorkerV2):
            raise ConfigError(
                f"policy {policy.name} reads hidden states, and a STANDALONE draft passes none on"
            )
        draft: Any = self._draft_worker
        graphs = "cuda_graph_runner", "cuda_graph_runner_for_draft_extend"
        draft.gate.switch(policy, captured=any(getattr(draft, g, None) for g in graphs))
        self._config = config
        return config

    @property
    def _shape(self) -> TreeShape:
        return TreeShape(
            self.topk,  # type: ignore[attr-defined]
            self.speculative_num_steps,  # type: ignore[attr-defined]
            self.speculative_num_draft_tokens,  # type: ignore[attr-defined]
        )

    @property
    def _packs(self) -> bool:
        """Whether verification may be packed."""
        raise NotImplementedError

    def _announce(self, what: str) -> None:
        """One line at the start that says what this server does."""
        logger.info("C2T: policy %s, %s, settings %s", self._config.policy, what,
                    self._config.to_json())  # fmt: skip


class ChainWorkerMixin(WorkerMixin):
    """Cuts each request's draft at the length its gate chose, then verifies as stock.

    Output is unchanged by construction: with argmax drafts, which tokens are verified
    is a function of the prefix alone, and a cut chain takes its bonus token from the
    target's distribution at the cut.
    """

    _draft_worker: ChainDraftMixin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ragged = False
        self._draft_worker.draft_steps = self._config.draft_steps
        ragged_verify.install(self.target_worker)  # type: ignore[attr-defined]

    def _gate_maker(self) -> Callable[..., FirstTokenRelay]:
        return partial(
            ChainGate,
            policy_for(self._config, self._shape),
            agree=agreement(),
            recording=self._config.record is not None,
        )

    def init_attention_backends(self) -> None:
        """Learn whether the target's backend can verify packed rows."""
        super().init_attention_backends()  # type: ignore[misc]
        runner = self.target_worker.model_runner  # type: ignore[attr-defined]
        self._ragged = ragged_verify.decide(self._config.verify, runner)
        self._matches_exactly = compat.accepts_exactly(self.server_args)  # type: ignore[attr-defined]
        self._announce(f"{'ragged' if self._ragged else 'static'} verification of chains")

    @property
    def _packs(self) -> bool:
        return self._ragged

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Cut the drafts of the batch, verify, and report the lengths."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        gate, recorder = self._draft_worker.gate, self._recorder
        verify_lens = self._draft_worker.verify_lens  # [B] int32
        assert len(verify_lens) == len(batch.seq_lens), (
            f"gate saw {len(verify_lens)} requests, verification {len(batch.seq_lens)}"
        )
        verify_input = batch.spec_info
        packing = None
        if self._ragged:
            packing = choose_packing(
                self._lookback,
                verify_lens,
                verify_input.draft_token_num,
                # A recorded step drafts all layers, and its lengths say nothing of the gate.
                depth=None if gate.exploring else self._draft_worker.depth,
            )
        # Every rank must cut alike, and only rank 0 has a recorder: ask the configuration.
        commit_lens = (
            torch.ones_like(verify_lens) if self._config.visits_every_root else verify_lens
        )
        verify_input.retrieve_next_token = truncated_chains(
            verify_input.retrieve_next_token, commit_lens
        )
        draft_tokens = verify_input.draft_token
        with ragged_verify.packed(packing, batch, own_acceptance=self._matches_exactly):
            result = super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        # SGLang carries this field to meta_info["spec_cap_length"] and its log.
        result.cap_lens = verify_lens
        width = verify_input.draft_token_num
        result.c2t_step = Step(
            full=width,
            drafted=self._draft_worker.steps + 1,
            forwarded_rows=packing.forwarded_rows if packing else width * len(verify_lens),
            fell_back=gate.fell_back,
        )
        if recorder is not None and gate.exploring:
            complete = gate.first_tokens_complete(batch.req_pool_indices)
            recorder.add(batch, gate.layers, complete, draft_tokens, result)
        return result


class TreeWorkerMixin(WorkerMixin):
    """Verifies whatever tree each request has grown, all in one target forward.

    Output is unchanged by construction: a token is sampled per verified row, and drafts
    are only ever matched against it.
    """

    _draft_worker: TreeDraftMixin

    def _gate_maker(self) -> Callable[..., FirstTokenRelay]:
        return partial(
            TreeGate,
            policy_for(self._config, self._shape),
            self._shape,
            max_rows=self._config.max_verify_rows,
            agree=agreement(),
            recording=self._config.record is not None,
        )

    def init_attention_backends(self) -> None:
        """Learn what the attention backends of target and draft can do with trees."""
        super().init_attention_backends()  # type: ignore[misc]
        draft, config = self._draft_worker, self._config
        draft.lookback = self._lookback
        runner = self.target_worker.model_runner  # type: ignore[attr-defined]
        draft.packed = tree_verify.decide(config, runner)
        rows = "packed" if draft.packed else "padded"
        self._announce(f"{rows} verification of trees, {self._follow_ancestors()} ancestors")

    def _follow_ancestors(self) -> str:
        """Have draft rows attend to their ancestors where that can be; returns what they do."""
        backend = self._draft_worker.draft_attn_backend  # type: ignore[attr-defined]
        if ancestors.sglang_follows(backend):
            return "SGLang's exact"
        if not self._config.exact_ancestors:
            return "stock"
        self._draft_worker.follow_ancestors = ancestors.follower(backend)
        if self._draft_worker.follow_ancestors is None and backend is not None:
            logger.warning(
                "C2T: draft attention %s cannot be told a node's ancestors: same output, but "
                "fewer drafts will be accepted",
                type(backend).__name__,
            )
            return "stock"
        return "exact"

    @property
    def _packs(self) -> bool:
        return True  # padded trees go the same way, with all rows

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify the batch's trees and report their sizes."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        gate, recorder = self._draft_worker.gate, self._recorder
        verify_input = batch.spec_info
        if self._config.visits_every_root:  # every rank must: see ChainWorkerMixin.verify
            links = verify_input.retrieve_next_token
            verify_input.retrieve_next_token = torch.full_like(links, -1)
        with tree_verify.verifying():
            result = super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        compat.set_output_stride(result, verify_input.max_tree_depth)
        # SGLang carries this field to meta_info["spec_cap_length"] and its log.
        result.cap_lens = verify_input.trees.num_nodes.to(torch.int32)
        width = verify_input.draft_token_num
        result.c2t_step = Step(
            full=width,
            drafted=width,
            forwarded_rows=verify_input.packing.forwarded_rows,
            max_rows=self._config.max_verify_rows,
            fell_back=gate.fell_back,
        )
        if recorder is not None and gate.exploring:
            complete = gate.first_tokens_complete(batch.req_pool_indices)
            rows = verify_input.retrieve_index
            accepted = verify_input.accept_index
            recorder.add_trees(
                batch, gate.layers, complete, verify_input.trees, rows, accepted, result
            )
        return result


class C2TEagleWorker(ChainWorkerMixin, EAGLEWorkerV2):
    """Worker of EAGLE, EAGLE3 and NEXTN."""

    draft_worker_global = (eagle_worker_v2, "EagleDraftWorker")
    draft_worker_class = C2TEagleDraftWorker


class C2TStandaloneWorker(ChainWorkerMixin, StandaloneWorkerV2):
    """Worker of STANDALONE."""

    draft_worker_global = (standalone_worker_v2, "StandaloneDraftWorker")
    draft_worker_class = C2TStandaloneDraftWorker


class C2TEagleTreeWorker(TreeWorkerMixin, EAGLEWorkerV2):
    """Worker of EAGLE, EAGLE3 and NEXTN that verifies trees."""

    draft_worker_global = (eagle_worker_v2, "EagleDraftWorker")
    draft_worker_class = C2TEagleTreeDraftWorker


class C2TStandaloneTreeWorker(TreeWorkerMixin, StandaloneWorkerV2):
    """Worker of STANDALONE that verifies trees."""

    draft_worker_global = (standalone_worker_v2, "StandaloneDraftWorker")
    draft_worker_class = C2TStandaloneTreeDraftWorker


class Workers(NamedTuple):
    """Ours for one of SGLang's workers."""

    chain: type
    tree: type


WORKERS: dict[type, Workers] = {
    EAGLEWorkerV2: Workers(C2TEagleWorker, C2TEagleTreeWorker),
    StandaloneWorkerV2: Workers(C2TStandaloneWorker, C2TStandaloneTreeWorker),
}
