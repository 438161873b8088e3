"""Differences between a server of chains and one of trees, outside of drafting itself."""

from __future__ import annotations

import logging
from typing import Any

from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import compat
from sglang_c2t.srt.draft import ancestors
from sglang_c2t.srt.draft.chain import ChainDrafter
from sglang_c2t.srt.draft.host import Host
from sglang_c2t.srt.draft.selection import ChainSelector, Selector, TreeSelector
from sglang_c2t.srt.draft.tree import TreeDrafter
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.tensor_parallel import broadcast_from_rank0
from sglang_c2t.srt.verify import chain, tree, trial

logger = logging.getLogger(__name__)


class Chains:
    """Server of chains: each request's draft is one chain."""

    def make_selector(self, planner: Any, draft: Any) -> Selector:
        """Make what distributes a planner's row budgets, on the device of the draft worker."""
        slots = draft.req_to_token_pool.req_to_token.shape[0]
        width = draft.speculative_num_draft_tokens
        return ChainSelector(planner, width=width, slots=slots, device=draft.device)

    def make_drafter(
        self, host: Host, policy: Any, shape: TreeShape, config: C2TConfig, recorder: Any
    ) -> ChainDrafter:
        """Make the drafter for SGLang's draft worker, with a gate for the ``policy``."""
        gate = ChainGate(policy, **gate_parts(host, config, recorder))
        return ChainDrafter(host, gate, exact=compat.accepts_exactly(host.server_args))

    def prepare_packing(self, config: C2TConfig, target_runner: Any) -> str | None:
        """Prepare the target for packed rows; returns why it cannot verify them."""
        return chain.prepare_packing(config.verify, target_runner)

    def fall_back(self, config: C2TConfig, worker: Any) -> str | None:
        """Try packed rows; returns their defect after it has disabled packing, otherwise
        ``None``.
        """
        reason = trial.packed_output_mismatch_on_any_rank(worker)
        if reason is not None:
            chain.disable_packing(config.verify, worker.target_worker.model_runner, reason)
        return reason

    def describe(self, _draft: Any, *, packed: bool) -> str:
        """Describe for the start-up line how this server verifies."""
        return f"{'ragged' if packed else 'static'} verification of chains"

    def record(
        self, recorder: Recorder, gate: Any, batch: Any, verify_input: Any, result: Any
    ) -> None:
        """Write the drafts of an exploration step."""
        recordable = gate.first_tokens_complete(batch.req_pool_indices)
        recorder.add(batch, gate.layers, recordable, verify_input.draft_token, result)


class Trees:
    """Server of trees. Its methods are those of :class:`Chains`."""

    def make_selector(self, planner: Any, draft: Any) -> Selector:
        """Make what distributes a planner's row budgets, on the device of the draft worker."""
        width = draft.speculative_num_draft_tokens
        return TreeSelector(planner, width=width, device=draft.device)

    def make_drafter(
        self, host: Host, policy: Any, shape: TreeShape, config: C2TConfig, recorder: Any
    ) -> TreeDrafter:
        """Make the drafter for SGLang's draft worker, with a gate for the ``policy``."""
        parts = gate_parts(host, config, recorder)
        gate = TreeGate(policy, shape, max_rows=config.max_verify_rows, **parts)
        return TreeDrafter(host, gate)

    def prepare_packing(self, config: C2TConfig, target_runner: Any) -> str | None:
        """Prepare the target for trees; returns why their rows are padded."""
        return tree.prepare_packing(config, target_runner)

    def fall_back(self, config: C2TConfig, worker: Any) -> str | None:
        """Return ``None``: no tree can be verified without our masks for comparison."""
        return None

    def describe(self, draft: Any, *, packed: bool) -> str:
        """Describe for the start-up line how this server verifies. Warns of inexact ancestors."""
        backend = draft.draft_attn_backend
        if (whose := ancestors.followed_by(backend)) == "stock":
            logger.warning(
                "C2T: draft attention %s cannot read a node's ancestors: same output, but "
                "fewer drafts will be accepted",
                type(backend).__name__,
            )
        return f"{'packed' if packed else 'padded'} verification of trees, {whose} ancestors"

    def record(
        self, recorder: Recorder, gate: Any, batch: Any, verify_input: Any, result: Any
    ) -> None:
        """Write the trees of an exploration step."""
        recordable = gate.first_tokens_complete(batch.req_pool_indices)
        rows = verify_input.trees.retrieve_index(verify_input.packing.num_rows)
        accepted = verify_input.paths.accept_index
        recorder.add_trees(
            batch, gate.layers, recordable, verify_input.trees, rows, accepted, result
        )


def gate_parts(host: Host, config: C2TConfig, recorder: Recorder | None) -> dict[str, Any]:
    """Return the arguments of both gates; see :class:`~sglang_c2t.draft.gate.Gate`."""
    return {
        "num_slots": host.num_slots,
        "device": host.device,
        "exploration": recorder,
        "agree": broadcast_from_rank0(),
        "recording": config.record is not None,
    }
