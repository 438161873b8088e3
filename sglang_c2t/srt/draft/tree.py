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

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, select_top_k_tokens
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.plan.plan import Plan
from sglang_c2t.srt import attach, compat
from sglang_c2t.srt.draft.ancestors import Follow
from sglang_c2t.srt.draft.plain import PlainDrafting
from sglang_c2t.srt.draft.tree_planning import TreePlanning
from sglang_c2t.srt.draft.watcher import no_forward
from sglang_c2t.srt.hooks.reporting import COUNTERS, GATE_CLOCK
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.feedback import choose_packing
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.tree import AlikeTrees, build_verify_input
from sglang_c2t.tree import LinkedTrees, Trees

# B requests, W beam rows, K topk, D steps, N nodes of a tree, H draft hidden size


#: Of trees as drafted, their nodes' keys [B, N] and roots [B]: what is verified, and its rows.
Choose = Callable[[Trees, Tensor, Tensor], tuple[LinkedTrees, Packing]]


class TreeDraftMixin(PlainDrafting):
    """Grows trees with the gate's policy, wide or narrow; in plain steps trees or chains, as SGLang
    does.
    """

    gate: TreeGate

    planning: TreePlanning | None = None

    follow_ancestors: Follow | None = None
    """Tells attention where a row's ancestors are; ``None``: rows attend as in stock."""

    @property
    def draft_widths(self) -> Collection[int] | None:
        """Captured graphs have one width."""
        return None if self.device == "cpu" else (self.topk,)

    def draft_forward(self, forward_batch: Any) -> Any:
        """Grow the trees of a batch; see the top of the file for what comes back."""
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        if self.planning is not None and self.planning.plain:
            with attach.swapped(eagle_worker_v2, "select_top_k_tokens", _select_uncompiled):
                return self._plain_forward(partial(super().draft_forward, forward_batch))
        with GATE_CLOCK:
            self._catch_up()
            self.gate.begin(forward_batch.req_pool_indices)
        with (
            self._watching(self._draft_layer),
            attach.swapped(eagle_worker_v2, "select_top_k_tokens", self._select),
            attach.swapped(eagle_worker_v2, "organize_draft_results", self._organize),
        ):
            return super().draft_forward(forward_batch)

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """SGLang's, up to the verify input, which is ours."""
        self.drafted_rows = self.speculative_num_draft_tokens
        self.gate.layers_planned = self.gate.width_planned = None
        choose: Choose = self._chosen
        rows: Any = nullcontext()
        if not batch.forward_mode.is_idle():
            if self.gate.exploring:  # recorded: whole drafts, and times that say nothing
                self._interrupted()
            elif self.planning is not None:
                plain = self._sglang_may(batch)
                plan, whole = self._begin_planned(batch, self.planning, plain=plain)
                if self.planning.plain:
                    draft = partial(super().draft, batch, *args, **kwargs)
                    return self._draft_plain(draft, batch, self.planning)
                choose = self._as_planned(self.planning, plan, whole)
                if plan.width < self.topk:
                    rows = self._one_row(ask=True)
        with (
            self._eager_if_recorded(),
            attach.swapped(
                eagle_worker_v2,
                "build_eagle_verify_input",
                self._around_build(eagle_worker_v2.build_eagle_verify_input, choose, self.topk),
            ),
            rows,
        ):
            return super().draft(batch, *args, **kwargs)

    def _draft_plain(
        self, draft: Callable[[], Any], batch: Any, planning: TreePlanning
    ) -> PackedVerifyInput:
        """A plain step: what SGLang's ``draft`` drafts of trees or of chains, all of one size."""
        steps, first = planning.layers, batch.spec_info
        if planning.width > 1:
            self.drafted_rows = planning.rows_each
            backend = self._backends_of_trees.get(steps)  # none drafts a layer that is there
            with (
                self._drafting_short(steps, planning.rows_each),
                attach.swapped(self, "draft_attn_backend", backend),
            ):
                trees = draft()
            planning.layers_end()
            return AlikeTrees.of(trees)
        self.drafted_rows = steps + 1
        with (
            self._one_row(ask=False),
            self._drafting_short(steps),
            attach.swapped(first, "topk_p", first.topk_p[:, :1]),
            attach.swapped(first, "topk_index", first.topk_index[:, :1]),
        ):
            chains = draft()
        planning.layers_end()
        lens, total = planning.alike()
        if planning.rows_each == self.drafted_rows:
            return ChainVerifyInput.of(chains, verify_lens=lens, exact=self.exact)
        cut = ChainVerifyInput.cut(chains, lens, exact=self.exact)
        cut.packing = Packing(cut.verify_lens, self.drafted_rows, total=total)
        return cut

    def _as_planned(self, planning: TreePlanning, plan: Plan, whole: Collection[int]) -> Choose:
        """A step of this ``plan`` starts; returns what chooses its nodes."""
        layers = plan.layers
        self.gate.layers_planned, self.gate.width_planned = layers, plan.width
        self.drafted_rows = planning.planner.full_rows(layers, plan.width)
        if self.cuda_graph_runner is not None:
            planning.layers_begin()  # a replay calls nothing of ours

        def planned(drafted: Trees, keys: Tensor, roots: Tensor) -> tuple[LinkedTrees, Packing]:
            planning.layers_end()
            chosen, total = planning.choose_nodes(drafted, keys, layers, whole)
            trees = self.gate.finalize(drafted, keys, roots, chosen)
            requests, width = trees.tokens.shape
            links: Any = {"parents": trees.parents, "num_steps": self.speculative_num_steps}
            if total < requests * width:
                return trees, Packing(trees.num_nodes, width, total=total, **links)
            return trees, Packing.full(requests, width, keys.device, **links)

        return planned

    def _chosen(self, drafted: Trees, keys: Tensor, roots: Tensor) -> tuple[LinkedTrees, Packing]:
        """What is verified where nobody plans, and its rows."""
        trees = self.gate.finalize(drafted, keys, roots)
        return trees, choose_packing(
            self.feedback,
            trees.num_nodes,
            trees.tokens.shape[1],
            packed=self.packed,
            parents=trees.parents,
            num_steps=self.speculative_num_steps,
        )

    def _capture_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture draft extend at the width that :meth:`_draft_extend_for_decode` gives it."""
        width = self.speculative_num_steps + 1
        with compat.draft_extend_width(width):
            super()._capture_cuda_graphs(*args, **kwargs)
        if self.planning is not None and getattr(self, "cuda_graph_runner", None) is not None:
            self.planning.depths = [self.speculative_num_steps]

    def init_attention_backend(self) -> None:
        """Also attentions for chains and for lower trees, where a step may draft these."""
        super().init_attention_backend()
        if self.draft_widths is not None:
            return
        steps = self.speculative_num_steps
        with (
            attach.swapped(self, "topk", 1),
            attach.swapped(self, "speculative_num_draft_tokens", steps + 1),
        ):
            self._rebuild_topk1_chain_buffers()

        def backend(topk: int, steps: int) -> Any:
            factory = compat.draft_backends(self.server_args, self.draft_runner, topk, steps)
            return factory.create_decode_backend()

        self._backend_of_chains = backend(1, steps)
        self._backends_of_trees = {lower: backend(self.topk, lower) for lower in range(2, steps)}
        self._backends_of_trees[steps] = self.draft_attn_backend

    @contextmanager
    def _one_row(self, *, ask: bool) -> Iterator[None]:
        """SGLang's layers forward one row of each request inside the block, and ``ask`` us what is
        drafted, which they do of chains only where SGLang's tables of them are too small.
        """
        tables = self._topk1_parents_prealloc
        assert tables is not None, "made with the attention backend"
        with (
            attach.swapped(self, "topk", 1),
            attach.swapped(self, "draft_attn_backend", self._backend_of_chains),
            attach.swapped(self, "_topk1_parents_prealloc", tables[:0] if ask else tables),
        ):
            yield

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        """Extend the draft over the accepted path, at most D + 1 rows of a tree's N."""
        verify_input, stock = batch.spec_info, super()._draft_extend_for_decode
        if not isinstance(verify_input, PackedVerifyInput):
            return stock(batch, batch_result, **kwargs)
        width = verify_input.max_tree_depth
        with attach.swapped(self, "speculative_num_draft_tokens", width):
            return self._extend_over_accepted(stock, batch, batch_result, **kwargs)

    # -- what SGLang's loop calls ---------------------------------------------------------

    def _select(
        self,
        step: int,
        topk_p: Tensor,
        topk_index: Tensor,
        hidden_states: Tensor | None,
        scores: Any,
        topk: int,
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
            # Neither has a first row ancestors that stand elsewhere, nor has an only one.
            if self.follow_ancestors is not None and step > 0 and topk > 1:
                self.follow_ancestors(step, self.gate.ancestor_rows)
        # The numbers of the expanded nodes are for a SGLang that follows ancestors itself.
        return beams.tokens.flatten(), hidden_states, None, (None, None, beams.candidate)

    def _draft_layer(self, forward_batch: Any, run: Callable[[], Any]) -> Any:
        # Reads the host once per layer, as for chains: it buys a whole draft forward
        # whenever every tree of the batch has stopped growing.
        token_map: Any = self.hot_token_id
        if not self._reads_host or self.gate.any_alive():
            if self.planning is not None:
                self.planning.layers_begin()
            output = run()
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

    def _around_build(
        self, stock: Callable[..., Any], choose: Choose, topk: int
    ) -> Callable[..., Any]:
        """In place of ``build_eagle_verify_input``; stock's for idle ranks."""

        def build(
            batch: Any,
            draft_input: Any,
            links: Tensor,
            keys: Tensor,
            tokens: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if batch.forward_mode.is_idle():
                return stock(batch, draft_input, links, keys, tokens, *args, **kwargs)
            parents, depth, source = links.unbind(dim=2)
            drafted = Trees(tokens, parents, depth, (parents >= 0).sum(dim=1) + 1, source)
            trees, packing = choose(drafted, keys, draft_input.bonus_tokens)
            return build_verify_input(
                trees, batch, num_steps=self.speculative_num_steps, topk=topk, packing=packing
            )

        return build


def _select_uncompiled(*args: Any) -> Any:
    """SGLang's ``select_top_k_tokens``, which it compiles when a tree first grows: seconds of
    somebody's answer, for some microseconds of a step.
    """
    with torch.compiler.set_stance("force_eager"):
        return select_top_k_tokens(*args)


class C2TEagleTreeDraftWorker(TreeDraftMixin, EagleDraftWorker):
    """Tree-growing draft worker of EAGLE, EAGLE3 and NEXTN."""


class C2TStandaloneTreeDraftWorker(TreeDraftMixin, StandaloneDraftWorker):
    """Tree-growing draft worker of STANDALONE."""
