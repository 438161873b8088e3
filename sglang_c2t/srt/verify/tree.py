"""Verification of trees: one target forward over the live nodes of all of them.

SGLang verifies B trees of one width N. Here each request brings its own number of nodes::

    trees [B, N] --rows--> target forward [R] --sample a token per row--> walk the trees

Padded verification is the same code with N rows for every request. It is the oracle of packed
verification, and ``--c2t-verify static`` selects it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.kernels.accept import AcceptedPaths
from sglang_c2t.srt import attach
from sglang_c2t.srt.verify import backends
from sglang_c2t.srt.verify.accept import match_rows
from sglang_c2t.srt.verify.packed import Accepted, PackedVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.tree import LinkedTrees

# B requests, N nodes of a padded tree, R verified rows, S = D + 1 nodes of the longest path


@dataclasses.dataclass(kw_only=True)
class TreeVerifyInput(PackedVerifyInput):
    """A batch of padded trees, and the rows that the target forwards."""

    packing: Packing

    trees: LinkedTrees

    paths: AcceptedPaths | None = None
    """Accepted paths of all requests, after verification."""

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching, so that attention and acceptance read mask and links."""
        return -1

    @property
    def num_rows(self) -> Tensor:
        """[B] int32: verified rows of each request."""
        return self.trees.num_nodes.to(torch.int32)

    def accept(
        self,
        stock: Callable[..., Accepted],
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Accepted:
        """Replace ``eagle_sample``; see :func:`match_rows`."""
        self.paths = match_rows(self, self.packing, batch, logits_output, grammar_mask)
        return self.paths.predict, self.paths.accept_lens, self.paths.accept_index

    def accepted_to_front(
        self,
        _batch: Any,
        _accept_index: Tensor,
        _accept_lens: Tensor,
        predict: Tensor,
        logits_output: Any,
        *_: Any,
        token_to_kv_pool_allocator: Any,
        **__: Any,
    ) -> Tensor:
        """Replace ``_finalize_accept_tree_path``: return the accepted paths' tokens, [B * S] int32.
        It moves each path's KV to the first slots of its window, and its hidden states to [B * S,
        H]. Entries after the path are stale and never read, as in SGLang.
        """
        assert self.paths is not None, "moved before it was accepted"
        # Uses the window, not req_to_token: the scheduler may already have given a finished
        # request's row to another request.
        kv_cache = token_to_kv_pool_allocator.get_kvcache()
        kv_cache.move_kv_cache(self.paths.front, self.paths.written)
        rows = self.paths.accept_index.clamp(min=0).flatten()
        if logits_output.hidden_states is not None:
            attach.write(logits_output, hidden_states=logits_output.hidden_states[rows])
        return predict[rows]


def build_verify_input(
    trees: LinkedTrees, batch: Any, *, num_steps: int, topk: int, packing: Packing, step: Any = None
) -> TreeVerifyInput:
    """Build the verify input of a batch from its final trees."""
    unread: Any = None  # packed verification has its own masks, rows and sizes
    return TreeVerifyInput(
        draft_token=trees.tokens.flatten(),
        custom_mask=unread,
        positions=trees.positions(batch.seq_lens.long()).flatten(),
        retrieve_index=unread,
        retrieve_next_token=trees.first_child,
        retrieve_next_sibling=trees.next_sibling,
        retrieve_cum_len=unread,
        spec_steps=num_steps,
        topk=topk,
        draft_token_num=trees.tokens.shape[1],
        capture_hidden_mode=unread,
        seq_lens_sum=unread,
        seq_lens_cpu=unread,
        trees=trees,
        packing=packing,
        step=step,
    )


def prepare_packing(config: C2TConfig, target_runner: Any) -> str | None:
    """Prepare the target for trees; returns why their rows are padded, ``None`` if packed. SGLang's
    own verification cannot read our masks, so trees have no fallback, unlike chains. Raises
    :class:`ConfigError` for a target that cannot verify trees.
    """
    reason = backends.unsupported_reason(target_runner, trees=True)
    if reason is not None:
        raise ConfigError(f"--c2t cannot verify trees: {reason}")
    backends.prepare(target_runner, trees=True, max_rows=config.max_verify_rows)
    return backends.ASKED_FOR if config.verify == "static" else None
