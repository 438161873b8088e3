"""Tree drafting: SGLang's draft loop, with our choice of what grows.

SGLang's ``draft_forward`` asks two functions what to do: ``select_top_k_tokens`` once per
layer, which rows are forwarded next, and ``organize_draft_results`` at the end, which
nodes are verified. Both are module globals; inside our ``draft_forward`` they are ours.
The result travels as SGLang's own 4-tuple of batch-major tensors, so that a CUDA graph
runner that captures ``draft_forward`` can slice it:

    parent_list       [B, N, 3]  parents, depths and sources of the trees' nodes
    top_scores_index  [B, N]     the nodes' keys
    draft_tokens      [B, N]     their tokens, roots not filled in
    draft_probs       None

What is drafted also depends on what draft rows attend to: see ``ancestors.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.plan.step import StepKind
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.draft import ancestors
from sglang_c2t.srt.draft.extend import extend_over_accepted
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.draft.watcher import DraftWatcher, no_forward, step_of, timed_layer
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.tree import build_verify_input
from sglang_c2t.tree import LinkedTrees, Trees

# B requests, W beam rows, K topk, D steps, N nodes of a tree, H draft hidden size


class TreeDraftMixin(DraftWatcher):
    """Grows trees with the gate's policy."""

    gate: TreeGate

    follows_ancestors = False
    """Whether draft rows attend to their ancestors by our doing; else as in stock."""

    def draft_forward(self, forward_batch: Any) -> Any:
        """Grow the trees of a batch; see the top of the file for what comes back."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        with GATE_CLOCK:
            self.gate.begin(forward_batch.req_pool_indices)
        with (
            self._watching(self._draft_layer),
            attach.swapped(eagle_worker_v2, "select_top_k_tokens", self._select),
            attach.swapped(eagle_worker_v2, "organize_draft_results", self._organize),
        ):
            drafted = super().draft_forward(forward_batch)
        if (step := step_of(forward_batch)) is not None:
            step.layers_end()
        return drafted

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """SGLang's, up to the verify input, which is ours."""
        if batch.forward_mode.is_idle():
            return super().draft(batch, *args, **kwargs)
        step = self._begin_step(batch)
        with (
            self._eager_if_recorded(),
            attach.swapped(eagle_worker_v2, "build_eagle_verify_input", partial(self._built, step)),
            self.lengths.drafting(step.plan.num_layers),
        ):
            return super().draft(batch, *args, **kwargs)

    def _built(
        self,
        step: Step,
        batch: Any,
        draft_input: Any,
        links: Tensor,
        keys: Tensor,
        tokens: Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> Any:
        """In place of ``build_eagle_verify_input``."""
        parents, depth, source = links.unbind(dim=2)
        drafted = Trees(tokens, parents, depth, (parents >= 0).sum(dim=1) + 1, source)
        trees, packing = self._selected(step, drafted, keys, draft_input.bonus_tokens)
        return build_verify_input(
            trees, batch, num_steps=self.lengths.most, topk=self.topk, packing=packing, step=step
        )

    def _selected(
        self, step: Step, drafted: Trees, keys: Tensor, roots: Tensor
    ) -> tuple[LinkedTrees, Packing]:
        """What is verified of the ``drafted`` trees, given their nodes' ``keys`` [B, N] and
        ``roots`` [B], and its rows.
        """
        plan, chosen, total = step.plan, None, None
        if plan.kind is StepKind.UNIFORM:
            total = plan.row_budget
        elif plan.kind is not StepKind.FIXED:
            chosen, total = self.planning.selector.select(step, drafted, keys)
        trees = self.gate.finalize(drafted, keys, roots, chosen)
        requests, width = trees.tokens.shape
        shape: Any = {"parents": trees.parents, "num_steps": self.lengths.most}
        if total == requests * width or not self.packed:
            return trees, Packing.full(requests, width, keys.device, **shape)
        return trees, Packing(trees.num_nodes, width, total=total, **shape)

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture draft extend at the width that :meth:`_draft_extend_for_decode` gives it."""
        with compat.draft_extend_width(self.lengths.most + 1):
            super()._capture_cuda_graphs(*args, **kwargs)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        """Extend the draft over the accepted path, at most D + 1 rows of a tree's N."""
        verify_input, stock = batch.spec_info, super()._draft_extend_for_decode
        if not isinstance(verify_input, PackedVerifyInput):
            return stock(batch, batch_result, **kwargs)
        width = verify_input.max_tree_depth
        with attach.swapped(self, "speculative_num_draft_tokens", width):
            return extend_over_accepted(self, stock, batch, batch_result, **kwargs)

    # -- what SGLang's loop calls ---------------------------------------------------------

    def _select(
        self,
        step: int,
        topk_p: Tensor,
        topk_index: Tensor,
        hidden_states: Tensor | None,
        _scores: Any,
        _topk: int,
    ) -> tuple[Tensor, Tensor | None, None, tuple[None, None, Tensor]]:
        """In place of ``select_top_k_tokens``: (ids [B * W], hidden [B * W, H], -, -) of the layer
        to come.

        ``topk_p`` and ``topk_index`` are [B * W, K], ``hidden_states`` [B * W, H] of this one.
        """
        batch, width = self.gate.batch, topk_p.shape[0] // self.gate.batch
        children = topk_index.view(batch, width, -1), topk_p.view(batch, width, -1)
        with GATE_CLOCK:
            beams = self.gate.add(*children)
        if step < self.speculative_num_steps - 1:
            if hidden_states is not None:
                hidden_states = hidden_states[beams.row_of_batch.flatten()]
            if self.follows_ancestors and step > 0:  # no ancestor of a first row stands elsewhere
                ancestors.follow(self.draft_attn_backend, step, self.gate.ancestor_rows)
        # The numbers of the expanded nodes are for a SGLang that follows ancestors itself.
        return beams.tokens.flatten(), hidden_states, None, (None, None, beams.candidate)

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer, as for chains: it buys a whole draft forward
        # whenever every tree of the batch has stopped growing.
        token_map: Any = self.hot_token_id
        if not self._reads_host or self.gate.any_alive():
            output = timed_layer(forward_batch, run)
        else:
            token_map = None  # the choices are no vocabulary's
            COUNTERS.draft_forwards_skipped += 1
            output = no_forward(forward_batch, choices=self.gate.topk)
        said = output.logits_output
        with GATE_CLOCK:
            judged = self.gate.observe(said.next_token_logits, said.hidden_states, token_map)
        if judged is None:
            return output
        # The gate has chosen already: SGLang's softmax and top-K run over K numbers, and
        # _select does not look at what they say.
        return SimpleNamespace(
            logits_output=SimpleNamespace(
                next_token_logits=judged.prob, hidden_states=said.hidden_states
            )
        )

    def _organize(
        self, _scores: Any, _tokens: Any, _parents: Any, _num_draft_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In place of ``organize_draft_results``."""
        with GATE_CLOCK:
            trees, keys = self.gate.finish()
        links = torch.stack((trees.parents, trees.depth, trees.source), dim=2)
        return links, keys, trees.tokens


class C2TEagleTreeDraftWorker(TreeDraftMixin, EagleDraftWorker):
    """Tree-growing draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneTreeDraftWorker(TreeDraftMixin, StandaloneDraftWorker):
    """Tree-growing draft worker of STANDALONE."""
