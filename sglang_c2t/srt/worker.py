"""The speculative workers: SGLang's own, with drafts cut before verification. They do not change
the output. Each verified row samples a token, drafts must match it, and the choice of verified
drafts never depends on the target's samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_c2t.config import C2TConfig, active
from sglang_c2t.srt import announce, attach, compat
from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.seeding import seed_costs
from sglang_c2t.srt.draft.workers import C2TEagleDraftWorker, C2TStandaloneDraftWorker
from sglang_c2t.srt.hooks.reporting import PARTS
from sglang_c2t.srt.hooks.step_metrics import Step
from sglang_c2t.srt.kinds import Chains, Trees
from sglang_c2t.srt.pair import served_pair
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.serving import Serving
from sglang_c2t.srt.verify.packed import IdleVerifyInput, PackedVerifyInput, verifying
from sglang_c2t.srt.verify.penalties import OutputHistory
from sglang_c2t.srt.verify.row_logits import recall
from sglang_c2t.srt.verify.warm_up import sizes_per_triton_specialization, warm_up


class C2TEagleWorker(EAGLEWorkerV2):
    """Worker of EAGLE, EAGLE3 and NEXTN. :class:`~sglang_c2t.srt.serving.Serving` holds policy and
    planner; :mod:`~sglang_c2t.srt.kinds` holds what differs between chains and trees.
    """

    _draft_worker: C2TEagleDraftWorker

    draft_worker_global: ClassVar[tuple[ModuleType, str]] = (eagle_worker_v2, "EagleDraftWorker")
    """The global from which SGLang's constructor takes the class of its draft worker."""

    draft_worker_class: ClassVar[type[C2TEagleDraftWorker]] = C2TEagleDraftWorker
    """Our draft worker for that global."""

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        config = active()
        assert config is not None, "the factory builds this worker only when C2T is on"
        trees = compat.draft_shape(server_args).topk > 1
        self._kind = Trees() if trees else Chains()
        with attach.swapped(*self.draft_worker_global, self.draft_worker_class):
            super().__init__(server_args, *args, **kwargs)
        self._attach(config)

    def _attach(self, config: C2TConfig) -> None:
        """Connect our parts with each other and with SGLang's."""
        draft = self._draft_worker
        pair = served_pair(self.server_args)
        self._serving = Serving(
            config,
            draft,
            self.target_worker.model_runner,
            make_selector=partial(self._kind.make_selector, draft=draft),
            pair=pair,
        )
        rows = max(self.speculative_num_draft_tokens, self.speculative_num_steps + 1)
        self._history = OutputHistory(rows)
        policy = self._serving.initial_policy()
        self._recorder = Recorder.from_config(self._serving.config, self.server_args, pair, policy)
        parts = policy, self._serving.shape, config, self._recorder
        self._draft_worker.make_drafter = lambda host: self._kind.make_drafter(host, *parts)
        compat.on_arrival(self.server_args, lambda batch: draft.drafter.requests.arrive(batch))
        compat.widen_request_table()  # SGLang makes it after its workers
        PARTS["serving"] = self._serving.report

    @property
    def _drafter(self) -> Drafter:
        return self._draft_worker.drafter

    # -- start-up -------------------------------------------------------------------------

    def init_attention_backends(self) -> None:
        """Choose packed or full verification, as the target's attention backend allows."""
        super().init_attention_backends()
        config = self._serving.config
        self._serve(self._kind.prepare_packing(config, self.target_worker.model_runner))

    def _serve(self, unpacked_reason: str | None) -> None:
        """Choose policy and planner; with ``unpacked_reason`` the target verifies full drafts."""
        serving = self._serving
        serving.start(unpacked_reason)
        if compat.only_prefills(self.server_args):
            announce.log_prefill_only()
            return
        verification = self._kind.describe(self._draft_worker, packed=serving.packed)
        announce.log_start(serving.config, verification, serving.policy, serving.pair)

    def init_cuda_graphs(self) -> None:
        """Try packed rows with the target's graphs; then capture, compile, measure."""
        if self._serving.packed:
            reason = self._kind.fall_back(self._serving.config, self)
            if reason is not None:
                self._serve(reason)
        super().init_cuda_graphs()
        runner = self.target_worker.model_runner
        if runner.device == "cuda":
            self._warm_up(runner)
        # A recording server always drafts and verifies everything; a prefill server has no steps.
        steps = self._serving.config.record is None and not compat.only_prefills(self.server_args)
        if self._serving.planning.plans and steps:
            seed_costs(self._serving.planning, self)

    def _warm_up(self, runner: Any) -> None:
        """Compile the GPU kernels that requests would otherwise wait for."""
        self._drafter.gate.warm_up()
        warm_up(
            runner,
            self._draft_worker.draft_runner,
            self.speculative_num_draft_tokens,
            runner.max_running_requests,
            trees=self.topk > 1,
            num_steps=self.speculative_num_steps,
            packed=self._serving.packed,
        )
        self._serving.planning.warm_up(sizes_per_triton_specialization(runner.max_running_requests))

    # -- steps ----------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward; before a prefill, restore the penalties of retracted requests."""
        if batch.forward_mode.is_extend():
            recall(batch)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify the drafts that the gate or the planner selected, and attach the step's
        numbers.
        """
        verify_input = batch.spec_info
        stock = partial(super().verify, batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            return self._verify_idle(stock, batch)
        if not isinstance(verify_input, PackedVerifyInput):
            return stock()
        gate, width = self._drafter.gate, verify_input.draft_token_num
        # All ranks must cut equally, and only rank 0 has a recorder: use the configuration.
        if self._serving.config.visits_every_root:
            verify_input.reject_drafts()
        with (
            attach.swapped(self, "speculative_num_draft_tokens", width),
            attach.swapped(self, "topk", verify_input.topk),  # a tree server may verify chains
            verifying(verify_input, self.target_worker, self._history),
        ):
            result = stock()
        if not gate.exploring:
            self._serving.planning.finish(verify_input.step, verify_input, result.accept_lens)
        compat.set_output_stride(result, verify_input.output_stride)
        # SGLang carries this field to meta_info["spec_cap_length"] and its log.
        attach.write(result, cap_lens=verify_input.num_rows)
        result.c2t_step = self._step(verify_input)
        if self._recorder is not None and gate.exploring:
            self._kind.record(self._recorder, gate, batch, verify_input, result)
        return result

    def _verify_idle(self, stock: Callable[[], Any], batch: Any) -> Any:
        """Verify on a rank without requests, which takes part in the forwards of other ranks."""
        drafter = self._drafter
        if drafter.host.peers is None or not drafter.packed:
            return stock()
        verify_input = IdleVerifyInput.with_dummy_row(batch.spec_info)
        attach.write(batch, spec_info=verify_input)
        with verifying(verify_input, self.target_worker):
            return stock()

    def _step(self, verify_input: PackedVerifyInput) -> Step:
        """Return the numbers of a step that metrics need beyond its result."""
        planner, plan = self._serving.planning.planner, verify_input.step.plan
        return Step(
            full=self.speculative_num_draft_tokens,
            drafted=planner.full_rows(plan.num_layers),
            forwarded_rows=verify_input.forwarded_rows,
            plan=plan,
            max_rows=self._serving.config.max_verify_rows,
            predicted_ms=getattr(planner, "predicted_ms", 0.0),
            measured_ms=getattr(planner, "measured_ms", 0.0),
            gate_fell_back=self._drafter.gate.fell_back,
        )

    def change(self, values: object) -> C2TConfig:
        """Serve other settings, see :meth:`Serving.change`."""
        return self._serving.change(values)


class C2TStandaloneWorker(C2TEagleWorker, StandaloneWorkerV2):
    """Worker of STANDALONE."""

    draft_worker_global = (standalone_worker_v2, "StandaloneDraftWorker")
    draft_worker_class = C2TStandaloneDraftWorker


#: Our workers, by the SGLang worker that each replaces.
WORKERS: dict[type, type] = {
    EAGLEWorkerV2: C2TEagleWorker,
    StandaloneWorkerV2: C2TStandaloneWorker,
}
