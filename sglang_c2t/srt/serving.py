"""The policy and the planner of a server: chosen at its start, switched while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_c2t.checks import format_error
from sglang_c2t.classifier.pair import Pair
from sglang_c2t.config import C2TConfig, ConfigError, publish
from sglang_c2t.draft.served import classifier_facts
from sglang_c2t.plan.fixed import FixedPlanner
from sglang_c2t.policies import named, plans, policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import compat
from sglang_c2t.srt.announce import log_classifier
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.selection import Selector
from sglang_c2t.srt.draft.state_file import StateFile
from sglang_c2t.srt.hooks.control import FORGET, approved, changed
from sglang_c2t.srt.hooks.reporting import PARTS
from sglang_c2t.srt.pair import shipped_on_all_ranks
from sglang_c2t.srt.tensor_parallel import all_ranks, host_broadcast_from_rank0, tp_group
from sglang_c2t.srt.verify.packing import tiers_of

_DRAFT_GRAPHS = "cuda_graph_runner", "cuda_graph_runner_for_draft_extend"


class Serving:
    """Owns the settings in force; policy, planner and classifier follow from them.

    Args:
        typed: The settings as the user typed them.
        draft: Our draft worker, as SGLang's constructor leaves it.
        target_runner: SGLang's model runner of the target.
        make_selector: Makes the selector of a planner, which distributes its row budgets.
        pair: The served models; ``None`` if unknown.
    """

    def __init__(
        self,
        typed: C2TConfig,
        draft: Any,
        target_runner: Any,
        *,
        make_selector: Callable[[Any], Selector],
        pair: Pair | None = None,
    ) -> None:
        self._typed = typed
        self.config = self._start = named(typed, packed=True)
        self.shape = TreeShape(
            draft.topk, draft.speculative_num_steps, draft.speculative_num_draft_tokens
        )
        self.pair = pair
        self._shipped = shipped_on_all_ranks(pair)  # a folder; None: no classifier for the pair
        self._draft, self._target_runner = draft, target_runner
        self._make_selector = make_selector
        self._plannings: dict[str, Planning] = {}  # by policy
        self.planning: Planning
        """Plans each step; set by :meth:`start`."""
        self.unpacked_reason: str | None = None
        """Why the target verifies full drafts; ``None``: it verifies packed rows."""

    def initial_policy(self) -> Any:
        """Return the policy for the gate, before it is known what can be packed."""
        return policy_for(self.config, self.shape, self._shipped)

    @property
    def packed(self) -> bool:
        """Whether the target verifies packed rows."""
        return self.unpacked_reason is None

    @property
    def policy(self) -> Any:
        """The policy in force."""
        return self._draft.drafter.gate.served.policy

    def start(self, unpacked_reason: str | None) -> None:
        """Serve the typed settings; the default policy depends on packed rows. Raises
        :class:`ConfigError` if the typed policy needs packed rows and ``unpacked_reason`` excludes
        them.
        """
        self.unpacked_reason = unpacked_reason
        config = named(self._typed, packed=self.packed)
        if config != self._start:
            policy = policy_for(config, self.shape, self._shipped)
            self._draft.drafter.gate.switch(policy, captured=False)
            self.config = self._start = config
        publish(config)  # reported by this process
        self._use(self._planning_for(config, self.policy), config)

    def change(self, values: object) -> C2TConfig:
        """Serve other settings from the next step on; returns all settings in force. ``values``
        come from a client, see :mod:`~sglang_c2t.srt.hooks.control`. Raises :class:`ConfigError`
        for a change that needs a restart; then nothing has changed.
        """
        if self.config.record is not None:
            raise ConfigError("the policy of a server that records stays: restart it without")
        config = changed(self.config, values, self._start)
        policy = approved(config, self._start, self.shape, self._shipped)
        captured = any(getattr(self._draft, graphs, None) for graphs in _DRAFT_GRAPHS)
        self._require_switchable(policy, captured=captured)
        planning = self._planning_for(config, policy)
        forgets = isinstance(values, Mapping) and values.get(FORGET)
        if forgets and not planning.plans:
            raise ConfigError(f"policy {policy.name} learns nothing while it serves")
        drafter = self._draft.drafter
        drafter.gate.switch(policy, captured=captured)
        self._use(planning, config)
        drafter.requests.forget_scores()
        if forgets:
            planning.planner.reset()
        self.config = config
        log_classifier(config, policy, self.pair)
        return config

    def _require_switchable(self, policy: Any, *, captured: bool) -> None:
        """Raise :class:`ConfigError` for a policy that this server can only start with."""
        # Draft graphs write the survivals of the planner that they were captured with.
        planning = self._draft.drafter.captured_planning
        fits = planning is not None and self._plannings.get(policy.name) is planning
        if plans(policy) and captured and not fits:
            raise ConfigError(
                f"policy {policy.name} cannot take over in captured CUDA graphs, which compute no "
                "survivals for it: start the server with it"
            )

    def _use(self, planning: Planning, config: C2TConfig) -> None:
        """Plan the next steps with ``planning``."""
        self.planning = planning
        if hasattr(planning.planner, "tpot_ms"):
            planning.planner.tpot_ms = config.tpot_ms
        self._draft.drafter.serve(planning, self._gating, packed=self.packed)

    @cached_property
    def _gating(self) -> Planning:
        """Plans full drafts, for policies whose gate decides and for steps that are recorded."""
        shape = self.shape
        planner = FixedPlanner(shape.num_steps, shape.topk, shape.num_draft_tokens)
        return self._planning_with(planner)

    def _planning_for(self, config: C2TConfig, policy: Any) -> Planning:
        """Return the planning of a policy; without a planner, the planning of full drafts. Raises
        :class:`ConfigError` if the policy needs a planner that is not possible, or cannot keep a
        limit.
        """
        planning = self._planning_of(config, policy)
        if config.tpot_ms is not None and not hasattr(planning.planner, "tpot_ms"):
            raise ConfigError(
                f"policy {policy.name} keeps no limit: leave --c2t-tpot-ms out, or choose a policy "
                "that plans, such as auto"
            )
        return planning

    def _planning_of(self, config: C2TConfig, policy: Any) -> Planning:
        if not plans(policy):
            return self._gating
        if not self.packed:  # a planner made before a failed trial is not used either
            raise ConfigError(
                f"policy {policy.name} plans how many rows are verified, and here all are: choose "
                "another policy, or a backend that packs rows (the log says which)"
            )
        if config.max_verify_rows is not None:
            raise ConfigError(
                f"policy {policy.name} plans how many rows are verified: start the server without "
                "--c2t-max-verify-rows"
            )
        if policy.name in self._plannings:
            return self._plannings[policy.name]
        try:
            planner = policy.planner(self.shape)
        except Exception as error:
            raise ConfigError(
                f"policy {policy.name} makes no planner: {format_error(error)}"
            ) from error
        # The file belongs to the policy at the server's start.
        keeps = config.policy == self._start.policy
        planning = self._planning_with(
            planner, self._make_selector(planner), self._state_file if keeps else None
        )
        self._plannings[policy.name] = planning
        PARTS["planner"] = self.planner_report
        return planning

    def _planning_with(
        self,
        planner: Any,
        selector: Selector | None = None,
        state_file: Callable[[Any], StateFile | None] | None = None,
    ) -> Planning:
        runner = self._target_runner
        return Planning(
            planner,
            selector,
            tiers=lambda: tiers_of(runner),
            width=self.shape.num_draft_tokens,
            device=self._draft.device,
            forwards=lambda: runner.forward_pass_id,
            state_file=state_file,
            agree=host_broadcast_from_rank0(),
            failed=self._draft.drafter.gate.served.failed,
        )

    def _state_file(self, planner: Any) -> StateFile | None:
        """Return the file of the planner's state; ``None`` on ranks that learn nothing. All
        replicas start from it, and the first one writes it.
        """
        if self._start.state is None or tp_group().rank_in_group != 0:
            return None
        args = self._draft.server_args
        learnt_on = {
            "target": compat.argument(args, "model_path"),
            "draft": compat.argument(args, "speculative_draft_model_path"),
            "num_steps": self.shape.num_steps,
            "topk": self.shape.topk,
            "policy": self._start.policy,
        }
        first_replica = compat.dp_rank(self._target_runner) == 0
        writes = all_ranks().rank_in_group == 0 and first_replica
        return StateFile(Path(self._start.state), planner, learnt_on, writes=writes)

    # -- reports --------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Report how and why drafts are verified, and the classifier, for ``GET /c2t``."""
        policy = self.policy
        return {
            "packed": self.packed,
            "unpacked_because": self.unpacked_reason,
            "num_steps": self.shape.num_steps,
            "topk": self.shape.topk,
            "num_draft_tokens": self.shape.num_draft_tokens,
            "max_running_requests": self._target_runner.max_running_requests,
            "plans": plans(policy),
            "row_ms": getattr(self.planning.planner, "row_ms", None),
            "beta": getattr(policy, "beta", None),
            "classifier": classifier_facts(policy, self.pair),
            "pair": self.pair and self.pair._asdict(),
        }

    def planner_report(self) -> dict[str, Any] | None:
        """Report what the planner in force has learnt; ``None`` without a planner."""
        if not self.planning.plans:
            return None
        return self.planning.report(self._target_runner.max_running_requests)
