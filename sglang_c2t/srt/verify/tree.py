"""Tree verification: one target forward over the live nodes of all trees, packed.

SGLang verifies B trees of one width N. Here each request brings its own number of rows::

    trees [B, N] --rows--> target forward [R] --sample a token per row--> walk the trees

``run_eagle_verify`` stays SGLang's; what assumed one width is replaced while it runs: the
batch it prepares, the sampler, and the move of the accepted path to the front. Padded
verification is the same code with N rows for every request: the oracle of packed
verification, and the way out where an attention backend cannot read packed rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify.accept import match_rows
from sglang_c2t.srt.verify.chain import obstacle, prepare, verify_window
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.tree import Trees, child_links

# B requests, N nodes of a padded tree, R verified rows, V vocabulary, S = D + 1 nodes of the
# longest path


@dataclasses.dataclass(kw_only=True)
class TreeVerifyInput(EagleVerifyInput):
    """A batch of trees, padded, and which of their rows the target forwards.

    The inherited fields are SGLang's [B, N] tables; ``draft_token`` and ``positions`` are
    [B * N]. What the target's forward gets is the packing's.
    """

    trees: Trees
    packing: Packing
    """Which of the B * N rows the target forwards."""

    window: Tensor
    """[B, max(N, S)] int64: KV slots behind each committed prefix; node j writes slot j."""

    accept_index: Tensor | None = None
    """[B, S] rows of the accepted path, once verified: older SGLang's result does not say."""

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching, so that attention and acceptance read mask and links."""
        return -1

    @property
    def rows(self) -> Tensor:
        """[R] int64: which of the B * N rows are verified. Waits for the host to know R."""
        return self.packing.rows


def build_verify_input(
    trees: Trees, batch: Any, *, num_steps: int, topk: int, packing: Packing
) -> TreeVerifyInput:
    """The verify input of a batch, given its settled trees."""
    max_nodes = trees.tokens.shape[1]
    next_token, next_sibling = child_links(trees.parents)
    return TreeVerifyInput(
        draft_token=trees.tokens.flatten(),
        custom_mask=None,
        positions=trees.positions(batch.seq_lens.long()).flatten(),
        retrieve_index=trees.retrieve_index(packing.num_rows),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_cum_len=None,
        spec_steps=num_steps,
        topk=topk,
        draft_token_num=max_nodes,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        trees=trees,
        packing=packing,
        window=verify_window(
            batch.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            max(max_nodes, num_steps + 1),
        ),
    )


def decide(config: C2TConfig, target_runner: Any) -> bool:
    """Whether to pack, given ``--c2t-verify``, and prepare the target for it.

    Trees need a backend that reads our masks at all, so there is no full-width way out for
    others, as there is for chains: raises :class:`ConfigError`.
    """
    hindrance = obstacle(target_runner)
    if hindrance is not None:
        raise ConfigError(f"--c2t cannot verify trees: {hindrance}")
    prepare(target_runner, trees=True, max_rows=config.max_verify_rows)
    return config.verify != "static"


@contextmanager
def verifying() -> Iterator[None]:
    """``run_eagle_verify`` verifies :class:`TreeVerifyInput` batches inside the block."""
    replacements: dict[str, Callable[..., Any]] = {
        "eagle_prepare_for_verify": _around_prepare(eagle_worker_common.eagle_prepare_for_verify),
        "eagle_sample": sample_and_match,
        "_finalize_accept_tree_path": accepted_to_front,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(compat.swapped(eagle_worker_common, name, replacement))
        yield


def _around_prepare(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The target's forward batch is built from the packed copy."""

    def prepare(
        verify_input: TreeVerifyInput, req_to_token_pool: Any, batch: Any, target_worker: Any
    ) -> Any:
        packing, runner = verify_input.packing, target_worker.model_runner
        packed, slots = packing.forwarded(verify_input, batch, runner)
        compat.write(batch, spec_info=packed)
        try:
            with (
                compat.writing_rows(packed, slots),
                compat.rotating_rows(packed, verify_input.positions, packing.rotated),
            ):
                return stock(packed, req_to_token_pool, batch, target_worker)
        finally:
            compat.write(batch, spec_info=verify_input)

    return prepare


def sample_and_match(
    verify_input: TreeVerifyInput,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of ``eagle_sample``: see :func:`match_rows`. Rows are numbered as packed."""
    packing = verify_input.packing
    at = torch.arange(packing.total, device=verify_input.draft_token.device)
    return match_rows(verify_input, packing, at, batch, logits_output, grammar_mask)


def accepted_to_front(
    batch: Any,
    accept_index: Tensor,
    accept_lens: Tensor,
    predict: Tensor,
    logits_output: Any,
    _batch_size: int,
    *,
    token_to_kv_pool_allocator: Any,
    num_draft_tokens: int,
) -> Tensor:
    """In place of ``_finalize_accept_tree_path``: [B * S] int32 tokens of the accepted paths.

    Moves each path's KV to the first slots of its window, and its hidden states to
    [B * S, H]. Behind the path stand leftovers nobody reads, as in stock.
    """
    verify_input = batch.spec_info
    verify_input.accept_index = accept_index
    width = accept_index.shape[1]
    accepted = torch.arange(width, device=accept_index.device) < accept_lens[:, None]  # [B, S]
    row = accept_index.long().clamp(min=0)
    # From the window, not from req_to_token: by now the scheduler may have given a finished
    # request's row away. Slot 0 is SGLang's padding slot.
    front = verify_input.window[:, :width].masked_fill(~accepted, 0)
    slots = verify_input.window[:, :num_draft_tokens].flatten()[verify_input.rows]
    written = slots[row].masked_fill(~accepted, 0)
    token_to_kv_pool_allocator.get_kvcache().move_kv_cache(front.flatten(), written.flatten())
    if logits_output.hidden_states is not None:
        compat.write(logits_output, hidden_states=logits_output.hidden_states[row.flatten()])
    return predict[row.flatten()]
