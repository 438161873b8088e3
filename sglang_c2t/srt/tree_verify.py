"""Tree verification: one target forward over the live nodes of all trees, packed.

SGLang verifies B trees of one width N. Here each request brings its own number of rows::

    trees [B, N] --rows--> target forward [T] --sample a token per row--> walk the trees

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
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

from sglang_c2t.chain import packed_rows
from sglang_c2t.config import ConfigError
from sglang_c2t.srt import compat
from sglang_c2t.srt.ragged_verify import obstacle, verify_window
from sglang_c2t.srt.target_sampling import sample_rows
from sglang_c2t.tree import Trees, child_links, prefixed_mask, visible_blocks, visible_nodes

# B requests, N nodes of a padded tree, T rows of the target's forward, V vocabulary,
# S = D + 1 nodes of the longest path, L committed length (the root not counted)


@dataclasses.dataclass(kw_only=True)
class TreeVerifyInput(EagleVerifyInput):
    """A batch of trees, padded, and which of their rows the target forwards.

    The inherited fields are SGLang's [B, N] tables; ``draft_token`` and ``positions`` are
    [B * N]. :meth:`packed` is what the target's forward gets.
    """

    trees: Trees
    num_rows: Tensor
    """[B] int64: rows of each request in the target's forward."""

    rows: Tensor
    """[T] int64: which of the B * N they are."""

    window: Tensor
    """[B, max(N, S)] int64: KV slots behind each committed prefix; node j writes slot j."""

    visible: Tensor
    """[B, N, N] bool."""

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching, so that attention and acceptance read mask and links."""
        return -1

    def packed(self) -> TreeVerifyInput:
        """A copy whose tensors hold the forwarded rows [T] only."""
        slots = self.window[:, : self.draft_token_num].flatten()
        forwarded: dict[str, Any] = {
            "draft_token": self.draft_token[self.rows],
            "positions": self.positions[self.rows],
            "prepared_out_cache_loc": slots[self.rows],
            "custom_mask": visible_blocks(self.visible, self.num_rows),
        }
        packed = dataclasses.replace(self, **forwarded)
        # An attribute, not a field: dataclasses.replace() would drop it.
        packed.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=self.num_rows.to(torch.int32), graph_num_tokens=self.rows.numel()
        )
        return packed

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        translator: Any,
        plan: Any,
        **kind: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """FlashInfer's arguments, ragged: (kv_indices, kv_indptr, qo_indptr, custom_mask).

        ``paged_kernel_lens`` [B] are the committed lengths; each request's keys are those
        and its rows. Source: ``EagleVerifyInput.generate_attn_arg_prefill``, one width.
        """
        kv_lens = paged_kernel_lens + self.num_rows
        qo_indptr, kv_indptr = _indptr(self.num_rows), _indptr(kv_lens)
        num_rows_total = self.draft_token.numel()
        kv_indices = torch.empty(
            paged_kernel_lens_sum + num_rows_total, dtype=torch.int32, device=qo_indptr.device
        )
        translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=kv_lens,
            indptr=kv_indptr,
            out=kv_indices,
            num_token_blocks=None,
            kv_lens_sum=paged_kernel_lens_sum + num_rows_total,
            **kind,
        )
        mask = prefixed_mask(self.visible, self.num_rows, paged_kernel_lens)
        return kv_indices, kv_indptr, qo_indptr, mask


def _indptr(lengths: Tensor) -> Tensor:
    """[B + 1] int32: where each request starts, and the end."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def build_verify_input(
    trees: Trees, batch: Any, *, num_steps: int, topk: int, packed: bool
) -> TreeVerifyInput:
    """The verify input of a batch, given its settled trees."""
    max_nodes = trees.tokens.shape[1]
    num_rows = trees.num_nodes if packed else torch.full_like(trees.num_nodes, max_nodes)
    next_token, next_sibling = child_links(trees.parents)
    return TreeVerifyInput(
        draft_token=trees.tokens.flatten(),
        custom_mask=None,
        positions=trees.positions(batch.seq_lens.long()).flatten(),
        retrieve_index=trees.retrieve_index(num_rows),
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
        num_rows=num_rows,
        # Reads the host once, to learn T: the target's forward is sized by it.
        rows=packed_rows(num_rows, max_nodes),
        window=verify_window(
            batch.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            max(max_nodes, num_steps + 1),
        ),
        visible=visible_nodes(trees.parents, num_steps),
    )


def decide(mode: str, target_runner: Any) -> bool:
    """Whether to pack, given ``--c2t-verify``. Raises :class:`ConfigError` where it cannot be.

    Trees need a backend that reads our masks at all, so there is no full-width way out for
    others, as there is for chains.
    """
    backend = target_runner.attn_backend
    hindrance = obstacle(target_runner, reads_rows=compat.is_flashinfer(backend))
    if hindrance is not None:
        raise ConfigError(f"--c2t cannot verify trees: {hindrance}")
    return mode != "static"


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
        packed = verify_input.packed()
        batch.spec_info = packed
        try:
            return stock(packed, req_to_token_pool, batch, target_worker)
        finally:
            batch.spec_info = verify_input

    return prepare


def sample_and_match(
    verify_input: TreeVerifyInput,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of ``eagle_sample``: (predict, accept_lens, accept_index).

    One token per row from the target's processed distribution, then the path along which
    drafts equal those tokens. Exact for every tree (see ``target_sampling.py``).

    Returns:
        predict: [B * N] int32, the target's token at each accepted row.
        accept_lens: [B] int32, accepted nodes, root (that is, bonus) included.
        accept_index: [B, S] int32, their rows, -1 behind the path.
    """
    num_rows = verify_input.num_rows
    logits = logits_output.next_token_logits  # [T, V]
    info = batch.sampling_info
    sanitize_nan_logits(logits, "verify: target model logits")
    _apply_biases(logits, info, num_rows)
    if grammar_mask is not None:
        # Built for all B * N nodes; T of them were forwarded.
        mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask[verify_input.rows])
        mask.apply(logits)
    if info.is_all_greedy:
        target = logits.argmax(dim=-1)
    else:
        target = sample_rows(logits, info, num_rows, verify_input.positions[verify_input.rows])

    batch_size, max_nodes = verify_input.retrieve_index.shape
    device = logits.device
    # The kernel wants B * N entries; only the first T are rows, and links reach no others.
    target_predict = torch.zeros(batch_size * max_nodes, dtype=torch.int64, device=device)
    target_predict[: len(target)] = target
    predict, accept_index, num_correct = compat.verify_tree_greedy(
        predicts=torch.zeros(batch_size * max_nodes, dtype=torch.int32, device=device),
        accept_index=torch.full(
            (batch_size, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device
        ),
        accept_token_num=torch.empty(batch_size, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.view(batch_size, max_nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=target_predict.view(batch_size, max_nodes),
        topk=verify_input.tree_topk,
    )
    return predict, num_correct + 1, accept_index


def _apply_biases(logits: Tensor, info: Any, num_rows: Tensor) -> None:
    """Penalties and logit bias [B, V], on every row of their request, in place."""

    def per_row(values: Tensor) -> Tensor:
        return values.repeat_interleave(num_rows, dim=0, output_size=len(logits))

    if info.acc_additive_penalties is not None:
        logits.add_(per_row(info.acc_additive_penalties))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, per_row(info.acc_scaling_penalties))
    if info.logit_bias is not None:
        logits.add_(per_row(info.logit_bias))


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
        logits_output.hidden_states = logits_output.hidden_states[row.flatten()]
    return predict[row.flatten()]
