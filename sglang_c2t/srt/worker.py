"""The speculative workers: SGLang's own, with drafts cut or pruned before verification."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2
from torch import Tensor

from sglang_c2t.checks import told
from sglang_c2t.classifier.pair import Pair
from sglang_c2t.config import C2TConfig, ConfigError, active, publish
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.gate import Gate
from sglang_c2t.draft.served import told_of
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.plan.fixed import FixedPlanner
from sglang_c2t.policies import named, plans, policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.draft import ancestors
from sglang_c2t.srt.draft.chain import (
    C2TEagleDraftWorker,
    C2TStandaloneDraftWorker,
    ChainDraftMixin,
)
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.seeding import seed_costs
from sglang_c2t.srt.draft.selection import ChainSelector, Selector, TreeSelector
from sglang_c2t.srt.draft.state_file import StateFile
from sglang_c2t.srt.draft.tree import (
    C2TEagleTreeDraftWorker,
    C2TStandaloneTreeDraftWorker,
    TreeDraftMixin,
)
from sglang_c2t.srt.draft.watcher import DraftWatcher
from sglang_c2t.srt.hooks.control import FORGET, approved, changed
from sglang_c2t.srt.hooks.reporting import PARTS
from sglang_c2t.srt.hooks.step_metrics import Step
from sglang_c2t.srt.pair import served_pair, shipped_on_all_ranks
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.tensor_parallel import agreement, all_ranks, host_agreement, sharing
from sglang_c2t.srt.verify import backends, chain, tree, trial
from sglang_c2t.srt.verify.grading import FirstDrafts
from sglang_c2t.srt.verify.packed import IdleVerifyInput, PackedVerifyInput, verifying
from sglang_c2t.srt.verify.packing import tiers_of
from sglang_c2t.srt.verify.penalties import OutputHistory
from sglang_c2t.srt.verify.row_logits import recall
from sglang_c2t.srt.verify.warm_up import one_of_each, warm_up

logger = logging.getLogger(__name__)


class WorkerMixin(EAGLEWorkerV2):
    """Puts our draft worker in place of SGLang's and lets it watch its drafts."""

    _draft_worker: DraftWatcher

    #: Module whose global names the draft worker class that SGLang's constructor builds,
    #: that name, and our class.
    draft_worker_global: ClassVar[tuple[ModuleType, str]]
    draft_worker_class: ClassVar[type[DraftWatcher]]

    _planning: Planning

    _unpacked: str | None = None
    """Why rows are not packed; ``None``: they are."""

    _first_drafts: FirstDrafts | None = None
    """What is known of these, where nobody plans."""

    _pair: Pair | None = None
    _shipped: str | None = None
    """The folder of the classifiers that are shipped for the pair; ``None``: there are none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with attach.swapped(*self.draft_worker_global, self.draft_worker_class):
            super().__init__(*args, **kwargs)
        config = active()
        assert config is not None, "the factory builds this worker only when C2T is on"
        self._typed = config
        self._config = self._start = named(config, packed=True)
        self._plannings: dict[str, Planning] = {}
        rows = max(self.speculative_num_draft_tokens, self.speculative_num_steps + 1)
        self._history = OutputHistory(rows)
        self._pair = served_pair(self.server_args)
        self._shipped = shipped_on_all_ranks(self._pair)
        self._recorder = Recorder.from_config(self._config, self.server_args, self._pair)
        self._draft_worker.watch(self._gate_maker(), self._recorder)
        compat.on_arrival(self.server_args, self._draft_worker.arrive)
        PARTS["serving"] = self._serving_told
        compat.widen_request_table()  # SGLang makes it once its workers are there

    def _gate_maker(self) -> Callable[..., Gate]:
        """The gate, still to be given its request table."""
        raise NotImplementedError

    def init_cuda_graphs(self) -> None:
        """Capture, and have ready what runs outside of the graphs."""
        super().init_cuda_graphs()
        runner = self.target_worker.model_runner
        if runner.device == "cuda":
            self._warm_up(runner)
        # A recorded step drafts and verifies everything, and a server that prefills has none.
        steps = self._config.record is None and not compat.only_prefills(self.server_args)
        if self._planning.plans and steps:
            seed_costs(self._planning, self)

    def _warm_up(self, runner: Any) -> None:
        """Compile what a GPU would compile when a request first needs it."""
        self._draft_worker.gate.warm_up()
        warm_up(
            runner,
            self._draft_worker.draft_runner,
            self.speculative_num_draft_tokens,
            runner.max_running_requests,
            trees=self.topk > 1,
            num_steps=self.speculative_num_steps,
            packed=self._draft_worker.packed,
        )
        self._planning.warm_up(one_of_each(runner.max_running_requests))

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Also let a request that was retracted keep its penalties."""
        if batch.forward_mode.is_extend():
            recall(batch)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify what the gate left of the batch's drafts, and report it."""
        verify_input = batch.spec_info
        if batch.forward_mode.is_idle():
            return self._verify_along(partial(super().verify, batch, *args, **kwargs), batch)
        if not isinstance(verify_input, PackedVerifyInput):
            return super().verify(batch, *args, **kwargs)
        gate, width = self._draft_worker.gate, verify_input.draft_token_num
        # Every rank must cut alike, and only rank 0 has a recorder: ask the configuration.
        if self._config.visits_every_root:
            verify_input.reject_drafts()
        planning, step = self._planning, verify_input.step
        with (
            attach.swapped(self, "speculative_num_draft_tokens", width),
            attach.swapped(self, "topk", verify_input.topk),  # a tree server may verify chains
            verifying(verify_input, self.target_worker, self._history),
        ):
            result = super().verify(batch, *args, **kwargs)
        if not gate.exploring:
            planning.finish(step, verify_input, result.accept_lens)
            if self._first_drafts is not None and not planning.plans:
                self._first_drafts.verified(
                    gate,
                    batch.req_pool_indices,
                    verify_input.num_rows,
                    result.accept_lens,
                    partial(self._draft_worker.constrained_in, batch),
                )
        compat.set_output_stride(result, verify_input.output_stride)
        # SGLang carries this field to meta_info["spec_cap_length"] and its log.
        attach.write(result, cap_lens=verify_input.num_rows)
        result.c2t_step = Step(
            full=self.speculative_num_draft_tokens,
            drafted=planning.planner.full_rows(step.plan.num_layers),
            forwarded_rows=verify_input.forwarded_rows,
            plan=step.plan,
            max_rows=self._config.max_verify_rows,
            predicted_ms=getattr(planning.planner, "predicted_ms", 0.0),
            measured_ms=getattr(planning.planner, "measured_ms", 0.0),
            gate_fell_back=gate.fell_back,
        )
        if self._recorder is not None and gate.exploring:
            recordable = gate.first_tokens_complete(batch.req_pool_indices)
            self._record(self._recorder, batch, recordable, verify_input, result)
        return result

    def _verify_along(self, verify: Callable[[], Any], batch: Any) -> Any:
        """SGLang's ``verify`` of nobody, beside the ranks that serve."""
        draft = self._draft_worker
        if draft.peers is None or not draft.packed:
            return verify()
        verify_input = IdleVerifyInput.beside(batch.spec_info)
        attach.write(batch, spec_info=verify_input)
        with verifying(verify_input, self.target_worker):
            return verify()

    def _record(
        self, recorder: Recorder, batch: Any, recordable: Tensor, verify_input: Any, result: Any
    ) -> None:
        """Write an exploring step; ``recordable`` [B] bool: whose first token was measured."""
        raise NotImplementedError

    def change(self, values: object) -> C2TConfig:
        """Serve the policy of other settings from the next step on; returns all settings.

        ``values`` are what a client asks for, see :mod:`~sglang_c2t.srt.hooks.control`. Raises
        :class:`~sglang_c2t.config.ConfigError` where that needs a restart; then nothing has
        changed.
        """
        if self._config.record is not None:
            raise ConfigError("the policy of a server that records stays: restart it without")
        config = changed(self._config, values, self._start)
        policy = approved(config, self._start, self._shape, self._shipped)
        if "hidden" in policy.needs and isinstance(self, StandaloneWorkerV2):
            raise ConfigError(
                f"policy {policy.name} reads hidden states, and a STANDALONE draft passes none on"
            )
        draft: Any = self._draft_worker
        graphs = "cuda_graph_runner", "cuda_graph_runner_for_draft_extend"
        captured = any(getattr(draft, g, None) for g in graphs)
        if plans(policy) and captured and not self._captured_for(policy):
            raise ConfigError(
                f"policy {policy.name} cannot take over in captured CUDA graphs, which compute no "
                "survivals for it: start the server with it"
            )
        planning = self._planning_for(policy)
        forgets = isinstance(values, Mapping) and values.get(FORGET)
        if forgets and not planning.plans:
            raise ConfigError(f"policy {policy.name} learns nothing while it serves")
        draft.gate.switch(policy, captured=captured)
        if self._first_drafts is not None:
            self._first_drafts = FirstDrafts()  # another gate judges from now on
        self._plan_with(planning)
        draft.forget_first_layers()
        if forgets:
            planning.planner.reset()
        self._config = config
        self._announce_classifier()
        return config

    def _captured_for(self, policy: Any) -> bool:
        """Whether draft graphs write the survivals that this policy's planner ranks by. They still
        do while another policy is in charge.
        """
        captured = self._draft_worker.captured_planning
        return captured is not None and self._plannings.get(policy.name) is captured

    def _plan_with(self, planning: Planning) -> None:
        """Plan the next steps so."""
        draft: Any = self._draft_worker
        self._planning = draft.planning = planning
        draft.gating = self._gating

    @cached_property
    def _gating(self) -> Planning:
        """Plans the steps of policies that do not plan."""
        width = self.speculative_num_draft_tokens
        return self._planning_with(FixedPlanner(self.speculative_num_steps, self.topk, width), None)

    def _planning_for(self, policy: Any) -> Planning:
        """What plans the steps of this policy; :class:`ConfigError` where it cannot be."""
        if not plans(policy):
            return self._gating
        if policy.name in self._plannings:
            return self._plannings[policy.name]
        if not self._draft_worker.packed:
            raise ConfigError(
                f"policy {policy.name} plans how many rows are verified, and here all are: choose "
                "another policy, or a backend that packs rows (the log says which)"
            )
        if self._config.max_verify_rows is not None:
            raise ConfigError(
                f"policy {policy.name} plans how many rows are verified: start the server without "
                "--c2t-max-verify-rows"
            )
        try:
            planner = policy.planner(self._shape)
        except Exception as error:
            raise ConfigError(f"policy {policy.name} makes no planner: {told(error)}") from error
        planning = self._planning_with(planner, self._selector(planner))
        self._plannings[policy.name] = planning
        PARTS["planner"] = self._plans_told
        return planning

    def _planning_with(self, planner: Any, selector: Selector | None) -> Planning:
        runner = self.target_worker.model_runner
        return Planning(
            planner,
            selector,
            tiers=lambda: tiers_of(runner),
            width=self.speculative_num_draft_tokens,
            device=self.device,
            forwards=lambda: runner.forward_pass_id,
            state_file=self._state_file if selector and self._config is self._start else None,
            agree=host_agreement(),
            failed=self._draft_worker.gate.served.failed,
        )

    def _selector(self, planner: Any) -> Selector:
        """What shares out the rows that a planner plans."""
        raise NotImplementedError

    def _state_file(self, planner: Any) -> StateFile | None:
        """The file that keeps what this server learns, on the rank that learns it; of several
        replicas all begin with it, and the first one writes it.
        """
        if self._config.state is None or sharing().rank_in_group != 0:
            return None
        args = self.server_args
        learnt_on = {
            "target": compat.argument(args, "model_path"),
            "draft": compat.argument(args, "speculative_draft_model_path"),
            "num_steps": self.speculative_num_steps,
            "topk": self.topk,
            "policy": self._config.policy,
        }
        writes = all_ranks().rank_in_group == 0
        writes = writes and compat.dp_rank(self.target_worker.model_runner) == 0
        return StateFile(Path(self._config.state), planner, learnt_on, writes=writes)

    def _plans_told(self) -> dict[str, Any] | None:
        """What the planner in charge has learnt; ``None``: no policy plans now."""
        if not self._planning.plans:
            return None
        return self._planning.report(self.target_worker.model_runner.max_running_requests)

    def _serving_told(self) -> dict[str, Any]:
        """How drafts are verified here and why so, and what the gate's confidences are worth."""
        policy = self._draft_worker.gate.served.policy
        return {
            "packed": self._unpacked is None,
            "unpacked_because": self._unpacked,
            "num_steps": self.speculative_num_steps,
            "topk": self.topk,
            "num_draft_tokens": self.speculative_num_draft_tokens,
            "max_running_requests": self.target_worker.model_runner.max_running_requests,
            "plans": plans(policy),
            "row_ms": getattr(self._planning.planner, "row_ms", None),
            "beta": getattr(policy, "beta", None),
            "classifier": told_of(policy, self._pair),
            "pair": self._pair and self._pair._asdict(),
            "first_drafts": self._first_drafts.grades.to_dict() if self._first_drafts else None,
        }

    @property
    def _shape(self) -> TreeShape:
        return TreeShape(
            self.topk,
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
        )

    def _settle_policy(self) -> None:
        """Name the policy where none was chosen, now that it is known what can be packed."""
        config = named(self._typed, packed=self._draft_worker.packed)
        if config != self._start:
            policy = policy_for(config, self._shape, self._shipped)
            self._draft_worker.gate.switch(policy, captured=False)
            self._config = self._start = config
        publish(config)  # what this process reports

    def _announce(self, what: str) -> None:
        """One line at the start that says what this server does."""
        if compat.only_prefills(self.server_args):
            logger.info("C2T: cuts nothing here, as another server verifies what this one drafts")
            return
        logger.info(
            "C2T: policy %s, %s, settings %s", self._config.policy, what, self._config.to_json()
        )
        self._announce_classifier()

    def _announce_classifier(self) -> None:
        """One line that says which classifier judges drafts, if one does, and why this one."""
        facts = told_of(self._draft_worker.gate.served.policy, self._pair)
        if facts is None:
            return
        given = self._config.classifier != "default"
        why = "as given" if given else "the default"
        if not given and facts["learnt_from"] != "this pair":
            why = "none is shipped for this pair"
            why += f" {tuple(self._pair)}" if self._pair else ", whose weights are not to be found"
        level = logging.WARNING if facts["learnt_from"] == "another pair" else logging.INFO
        logger.log(
            level,
            "C2T: classifier %s learnt from %s (%s): %s",
            facts["name"], facts["learnt_from"], ", ".join(facts["origins"]), why,
        )  # fmt: skip


class ChainWorkerMixin(WorkerMixin):
    """Cuts each request's draft at the length its gate chose, then verifies as stock.

    Output is unchanged by construction: every accepted token is the target's own, and which
    drafts are verified never depends on what the target will sample.
    """

    _draft_worker: ChainDraftMixin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._config.visits_every_root:  # where no draft is accepted
            self._first_drafts = FirstDrafts()

    def _gate_maker(self) -> Callable[..., Gate]:
        return partial(
            ChainGate,
            policy_for(self._config, self._shape, self._shipped),
            agree=agreement(),
            recording=self._config.record is not None,
        )

    def init_attention_backends(self) -> None:
        """Learn whether the target's backend can verify packed rows."""
        super().init_attention_backends()
        draft, runner = self._draft_worker, self.target_worker.model_runner
        self._unpacked = chain.decide(self._config.verify, runner)
        draft.packed = self._unpacked is None
        draft.exact = compat.accepts_exactly(self.server_args)
        self._settle_policy()
        self._plan_with(self._planning_for(draft.gate.served.policy))
        self._announce(f"{'ragged' if draft.packed else 'static'} verification of chains")

    def init_cuda_graphs(self) -> None:
        """Also see, once the target has its graphs, that packed rows come out of them right."""
        if self._draft_worker.packed and (reason := self._misread()) is not None:
            self._verify_whole(reason)
        super().init_cuda_graphs()

    def _misread(self) -> str | None:
        """What is wrong with packed rows, as all ranks see it."""
        try:
            reason = trial.misread(self)
        except Exception as error:
            reason = f"a packed batch failed with {type(error).__name__}: {error}"
        agree = host_agreement() or (lambda numbers: numbers)
        (differs,) = agree([int(reason is not None)])
        if (together := self._draft_worker.peers) is not None:
            (differs,) = max(together.of_all(differs))
        return (reason or "another rank saw them differ") if differs else None

    def _verify_whole(self, reason: str) -> None:
        """Verify whole drafts from now on, and serve what can be served so."""
        chain.settle(self._config.verify, reason)
        backends.give_back(self.target_worker.model_runner)
        self._draft_worker.packed, self._unpacked = False, reason
        self._settle_policy()
        self._plan_with(self._planning_for(self._draft_worker.gate.served.policy))
        self._announce("static verification of chains")

    def _selector(self, planner: Any) -> Selector:
        slots = self._draft_worker.req_to_token_pool.req_to_token.shape[0]
        width = self.speculative_num_draft_tokens
        return ChainSelector(planner, width=width, slots=slots, device=self.device)

    def _record(
        self, recorder: Recorder, batch: Any, recordable: Tensor, verify_input: Any, result: Any
    ) -> None:
        layers = self._draft_worker.gate.layers
        recorder.add(batch, layers, recordable, verify_input.draft_token, result)


class TreeWorkerMixin(WorkerMixin):
    """Verifies whatever tree each request has grown, all in one target forward.

    Output is unchanged by construction: a token is sampled per verified row, and drafts
    are only ever matched against it.
    """

    _draft_worker: TreeDraftMixin

    def _gate_maker(self) -> Callable[..., Gate]:
        return partial(
            TreeGate,
            policy_for(self._config, self._shape, self._shipped),
            self._shape,
            max_rows=self._config.max_verify_rows,
            agree=agreement(),
            recording=self._config.record is not None,
        )

    def init_attention_backends(self) -> None:
        """Learn what the attention backends of target and draft can do with trees."""
        super().init_attention_backends()
        draft, runner = self._draft_worker, self.target_worker.model_runner
        self._unpacked = tree.decide(self._config, runner)
        draft.packed = self._unpacked is None
        self._settle_policy()
        self._plan_with(self._planning_for(draft.gate.served.policy))
        rows = "packed" if draft.packed else "padded"
        self._announce(f"{rows} verification of trees, {self._follow_ancestors()} ancestors")

    def _follow_ancestors(self) -> str:
        """Have draft rows attend to their ancestors where that can be; returns what they do."""
        backend = self._draft_worker.draft_attn_backend
        if ancestors.sglang_follows(backend):
            return "SGLang's exact"
        if not self._config.exact_ancestors:
            return "stock"
        self._draft_worker.follows_ancestors = ancestors.can_follow(backend)
        if not self._draft_worker.follows_ancestors and backend is not None:
            logger.warning(
                "C2T: draft attention %s cannot be told a node's ancestors: same output, but "
                "fewer drafts will be accepted",
                type(backend).__name__,
            )
            return "stock"
        return "exact"

    def _selector(self, planner: Any) -> Selector:
        return TreeSelector(planner, width=self.speculative_num_draft_tokens, device=self.device)

    def _record(
        self, recorder: Recorder, batch: Any, recordable: Tensor, verify_input: Any, result: Any
    ) -> None:
        layers = self._draft_worker.gate.layers
        rows = verify_input.trees.retrieve_index(verify_input.packing.num_rows)
        accepted = verify_input.paths.accept_index
        recorder.add_trees(batch, layers, recordable, verify_input.trees, rows, accepted, result)


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
