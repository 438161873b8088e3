"""References in torch of the compiled kernels that a Llama with a draft model launches.

References write into tensors as the host sees them, when their launch is due. What a kernel must
not be given raises :class:`Defect` then.

Legend: R rows, B requests, H query heads, G key heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulated.device import DeviceTensor, launch
from tests.emulated.memory import pinned

NAN = float("nan")


class Defect(AssertionError):
    """A kernel would read or write what it must not."""


# -- norms, activation, positions, KV --------------------------------------------------------


def rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, *_: Any) -> None:
    """Root mean square norm."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_(x32 * scale * weight.float())


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: Any) -> None:
    """The sum goes into ``residual``, its norm into ``x``."""
    total = x.float() + residual.float()
    residual.copy_(total)
    rmsnorm(x, total, weight, eps)


def jit_rmsnorm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """SGLang's own order of arguments."""
    rmsnorm(out, x, weight, eps)


def fused_eh_norm(
    embeds: Tensor, hidden: Tensor, of_embeds: Tensor, of_hidden: Tensor, out: Tensor, eps: float
) -> None:
    """Both normed, beside each other: what an MTP layer reads."""
    for x, weight, half in zip(
        (embeds, hidden), (of_embeds, of_hidden), out.chunk(2, -1), strict=True
    ):
        rmsnorm(half, x, weight, eps)


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Summed up in float32."""
    out.copy_(x.float() @ weight.float())


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def activation(x: Tensor, out: Tensor, name: str) -> None:
    """Gated: of the first half, times the second."""
    gate, up = x.float().chunk(2, -1)
    out.copy_(_ACTIVATIONS[name](gate) * up)


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor, neox: bool, size: int) -> None:
    """Rotary embedding of the first ``size`` of each head of ``x`` [R, heads * D], in place."""
    heads = x.view(len(x), -1, x.shape[-1] if x.dim() == 3 else size)
    cos, sin = cos_sin[positions.long()].float()[:, None].chunk(2, -1)
    turned = heads[..., :size].float()
    if neox:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    heads[..., :size] = turned.to(x.dtype)


def rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, *, made_for: tuple[Any, ...]
) -> None:
    """``made_for`` says neox or not, and the size that turns."""
    neox, size = str(made_for[0]) == "true", int(made_for[1])
    for x in (q, k):
        rotate(x, cos_sin, positions, neox, size)


def rope_and_store(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos_sin: Tensor,
    positions: Tensor, slots: Tensor, *, made_for: tuple[Any, ...],
) -> None:  # fmt: skip
    """Both in one launch."""
    rope(q, k, cos_sin, positions, made_for=made_for)
    store_cache(k, v, k_cache, v_cache, slots, skip=-1)


def store_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    limit: int | None = None, skip: int = 0,
) -> None:  # fmt: skip
    """Keys and values of R rows go to their ``slots``; rows at ``skip`` are never read."""
    limit = limit or len(k_cache)
    if slots.numel() and not (int(slots.min()) >= -1 and int(slots.max()) < limit):
        raise Defect(f"KV is stored in slots {slots.tolist()} of {limit}")
    kept = slots != skip
    where = slots[kept].long()
    for new, cache in ((k, k_cache), (v, v_cache)):
        rows = new.reshape(len(new), -1)[: len(slots)][kept]
        cache[where] = rows.view(len(where), *cache.shape[1:]).to(cache.dtype)


def set_mla_kv_buffer(
    cache: Tensor, slots: Tensor, latent: Tensor, turned: Tensor, _warps: int, skip: int
) -> None:
    """Latents of R rows, and what RoPE turned of their keys, go to their ``slots``."""
    rows = torch.cat((latent, turned), dim=1)
    store_cache(rows, rows, cache, cache, slots, skip=skip)


def concat_mla_k(out: Tensor, keys: Tensor, turned: Tensor) -> None:
    """Keys [R, H, D] of heads, and what they share [R, 1, D']."""
    out.copy_(torch.cat((keys, turned.expand(-1, keys.shape[1], -1)), dim=-1))


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor | None, head_size: int, cos_sin: Tensor, neox: bool
) -> None:
    """SGLang's older entry."""
    for x in (q, k):
        if x is not None:
            heads = x.view(len(x), -1, head_size)
            rotate(heads, cos_sin, positions, neox, cos_sin.shape[-1])


def clamp_position(out: Tensor, lengths: Tensor) -> None:
    """Position of the token that a length ends with."""
    out.copy_((lengths - 1).clamp(min=0))


# -- experts ---------------------------------------------------------------------------------


def moe_align_block_size(
    chosen: Tensor, experts: int, size: int, routes: Tensor, blocks: Tensor, padded: Tensor,
    _cumsum: Tensor, _pad: bool, _ignore: bool,
) -> None:  # fmt: skip
    """Which ``routes``, places in ``chosen`` [R, K], go to which expert: in blocks of so many, each
    of one expert, padded with a place behind the last. ``experts`` counts one more, for padding.
    """
    place, at = chosen.flatten(), 0
    routes.fill_(place.numel())
    for expert in range(experts - 1):
        mine = (place == expert).nonzero()[:, 0]
        routes[at : at + len(mine)] = mine
        count = -(-len(mine) // size)
        blocks[at // size : at // size + count] = expert
        at += count * size
    padded.fill_(at)


def moe_sum_reduce(x: Tensor, out: Tensor, scale: float) -> None:
    """Sum of a row's experts [R, K, D], scaled."""
    out.copy_(x.float().sum(1) * scale)


# -- attention -------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """[R, H, D] and log-sum-exp [R, H] of ``q`` [R, H, D] over ``k``, ``v`` [n, G, D], of which
    each row sees what ``visible`` [R, n] says. Rows that see nothing are 0.
    """
    heads = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(heads, 1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float() * scale, k).masked_fill(~visible, -math.inf)
    v = torch.where(visible.any(0)[:, None, None], v, 0.0)  # masked values may be nan
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), scores.logsumexp(-1).t()


def _visible(rows: int, keys: int, causal: bool = True, window: int = -1) -> Tensor:
    """[R, n] bool: the rows are the last of the keys; -1: no window."""
    before = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)[None]
    visible = before >= 0 if causal else torch.ones_like(before, dtype=torch.bool)
    return visible if window < 0 else visible & (before <= window)


def _in_pool(slots: Tensor, cache: Tensor) -> Tensor:
    """[n, G, D]: what stands in these slots of a paged pool."""
    pool = cache.flatten(0, 1)
    if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < len(pool)):
        raise Defect(f"attention reads slot {int(slots.max())} of {len(pool)}")
    return pool[slots]


def _slots(pages: Tensor, size: int, keys: int) -> Tensor:
    """[n] slots of the first ``keys`` tokens in these pages."""
    return (pages.long()[:, None] * size + torch.arange(size)).flatten()[:keys]


def fa3_paged(
    out: Tensor, lse: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    page_table: Tensor, cu_rows: Tensor, longest: int, scale: float, causal: bool, window: int,
) -> None:  # fmt: skip
    """``q`` [R, H, D] of B requests behind each other, over pages of ``k_cache``, ``v_cache``."""
    cu, size = cu_rows.tolist(), k_cache.shape[1]
    batch = len(cu) - 1
    if batch > min(len(lengths), len(page_table)):
        raise Defect(f"FA3: {batch} requests, {len(lengths)} lengths, {len(page_table)} tables")
    out.fill_(NAN)
    for b, (start, end) in enumerate(itertools.pairwise(cu)):
        rows, keys = end - start, int(lengths[b])
        if rows <= 0:
            continue
        if end > len(q):
            raise Defect(f"FA3: rows {start} to {end} of {len(q)}")
        if keys <= 0:
            out[start:end] = 0
            continue
        pages = -(-keys // size)
        if pages > page_table.shape[1]:
            raise Defect(f"FA3: {keys} keys, and a table of {page_table.shape[1]} pages")
        slots = _slots(page_table[b, :pages], size, keys)
        visible = _visible(rows, keys, causal, window)
        values, sums = attend(
            q[start:end], _in_pool(slots, k_cache), _in_pool(slots, v_cache), scale, visible
        )
        end = start + min(rows, longest)  # nothing is launched for more, as padding may have
        out[start:end], lse[:, start:end] = values[:longest].to(out.dtype), sums[:longest].t()


def fa3_ragged(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, cu_keys: Tensor,
    scale: float, causal: bool,
) -> None:  # fmt: skip
    """Keys and values of each request behind the other's."""
    rows, keys = cu_rows.tolist(), cu_keys.tolist()
    out.fill_(NAN)
    for b in range(len(rows) - 1):
        mine, seen = slice(*rows[b : b + 2]), slice(*keys[b : b + 2])
        n, m = mine.stop - mine.start, seen.stop - seen.start
        if n:
            values, sums = attend(q[mine], k[seen], v[seen], scale, _visible(n, m, causal))
            out[mine], lse[:, mine] = values.to(out.dtype), sums.t()


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Any = None,
    cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: None = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), *_: Any, return_softmax_lse: bool = False,
    out: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """In place of FA3's, for what SGLang asks of it."""
    for given in (k, v, qv, rotary_cos, cache_batch_idx, cache_leftpad, options.get("sinks")):
        if given is not None:
            raise NotImplementedError("FA3 is asked for what no reference here does")
    shape = q.shape
    if q.dim() == 4:
        batch, max_seqlen_q = shape[:2]
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * shape[1]
        q = q.flatten(0, 1)
    assert max_seqlen_q is not None
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    into = q.new_empty((*q.shape[:2], v_cache.shape[-1])) if out is None else out
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    launch(
        "fa3", fa3_paged, into.view(len(q), q.shape[1], -1), lse, q, k_cache, v_cache,
        cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, scale, causal, window_size[0],
    )  # fmt: skip
    into = into.view(*shape[:-1], -1)
    return (into, lse) if return_softmax_lse else into


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *_: Any,
    softmax_scale: float | None = None, causal: bool = False, return_softmax_lse: bool = False,
    **__: Any,
) -> Any:  # fmt: skip
    """In place of FA3's."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    launch("fa3 ragged", fa3_ragged, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(*, batch_size: int, cache_seqlens: Tensor, **_: Any) -> Tensor:
    """Not read here."""
    return cache_seqlens.new_zeros(1 + 4 * batch_size, dtype=torch.int32)


# -- FlashInfer: plan() runs on the host and leaves its result in the device's workspace, through
# pinned memory, so that a replayed graph reads what was planned last; run() reads that and the
# buffers that it was given.


def _note_plan(pinned_workspace: Tensor, words: list[int]) -> Tensor:
    """Its bytes, in the host's workspace."""
    if not pinned(pinned_workspace):
        raise Defect("FlashInfer's host workspace is not pinned")
    plan = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    host = pinned_workspace.view(torch.uint8)[: len(plan)]
    return host.copy_(plan)


def _leave_plan(device_workspace: Tensor, pinned_workspace: Tensor, words: list[int]) -> None:
    host = _note_plan(pinned_workspace, words)
    device_workspace.view(torch.uint8)[: len(host)].copy_(host, non_blocking=True)


def prefill_plan(
    _floats: Tensor, workspace: Tensor, pinned_workspace: Tensor, qo_indptr: Tensor,
    kv_indptr: Tensor, kv_lens: Tensor, total_rows: int, batch: int, *rest: Any,
) -> list[int]:  # fmt: skip
    """Tiles are planned from lengths on the host."""
    for given in (qo_indptr, kv_indptr, kv_lens):
        if isinstance(given, DeviceTensor):
            raise Defect("FlashInfer plans from tensors of the device")
    rows, keys, in_graph = qo_indptr.tolist(), kv_lens.tolist(), rest[3]
    if in_graph and rows[batch] > total_rows:
        raise Defect(f"FlashInfer: {rows[batch]} rows, and a graph of {total_rows}")
    _leave_plan(workspace, pinned_workspace, [batch, *rows[: batch + 1], *keys[:batch]])
    return [batch] + [0] * 15


def decode_plan(
    _floats: Tensor, workspace: Tensor, pinned_workspace: Tensor, indptr: Tensor, batch: int,
    *_: Any,
) -> list[int]:  # fmt: skip
    """One row each."""
    if isinstance(indptr, DeviceTensor):
        raise Defect("FlashInfer plans from a tensor of the device")
    keys = indptr.diff().tolist()
    _leave_plan(workspace, pinned_workspace, [batch, *range(batch + 1), *keys])
    return [batch] + [0] * 9


def _planned(workspace: Tensor) -> tuple[list[int], list[int]]:
    """Rows [B + 1] and keys [B] of the plan in the workspace."""
    raw = workspace.view(torch.uint8)
    batch = int(raw[:4].view(torch.int32))
    words = raw[4 : 4 * (2 + 2 * batch)].view(torch.int32).tolist()
    return words[: batch + 1], words[batch + 1 :]


def _seen(mode: int, rows: int, keys: int, bits: Any, starts: Any, request: int) -> Tensor:
    """[R, n] bool, by FlashInfer's mask modes: all, causal, or a mask of bits."""
    if mode < 2:
        return _visible(rows, keys, causal=mode == 1)
    start = int(starts[request])
    packed = bits.view(torch.uint8)[start : start + (rows * keys + 7) // 8]
    each = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return each.bool().flatten()[: rows * keys].view(rows, keys)


def paged(
    workspace: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, qo_indptr: Any,
    kv_indptr: Tensor, kv_indices: Tensor, last_page: Tensor, out: Tensor, lse: Any, mode: int,
    bits: Any, starts: Any, scale: float,
) -> None:  # fmt: skip
    """Over pages; the plan's rows and the device's must agree."""
    planned_rows, planned_keys = _planned(workspace)
    rows = planned_rows if qo_indptr is None else qo_indptr.tolist()
    pages, size, q = kv_indptr.tolist(), k_cache.shape[1], q.clone()  # out may be q
    out.fill_(NAN)
    for b in range(len(planned_keys)):
        start, end = planned_rows[b : b + 2]
        if rows[b : b + 2] != [start, end]:
            raise Defect(f"FlashInfer: rows {start} to {end} are planned, {rows[b : b + 2]} there")
        if start == end:
            continue
        indices = kv_indices[pages[b] : pages[b + 1]]
        keys = (len(indices) - 1) * size + int(last_page[b])
        if len(indices) == 0:  # a plan counts the last page all the same
            planned_keys[b] = keys
        if keys not in (planned_keys[b], planned_keys[b] * size):
            raise Defect(f"FlashInfer: {planned_keys[b]} keys are planned, {keys} there")
        if keys <= 0:
            out[start:end] = 0
            if lse is not None:
                lse[start:end] = -torch.inf
            continue
        slots = _slots(indices, size, keys)
        visible = _seen(mode, end - start, keys, bits, starts, b)
        values, sums = attend(
            q[start:end], _in_pool(slots, k_cache), _in_pool(slots, v_cache), scale, visible
        )
        out[start:end] = values.to(out.dtype)
        if lse is not None:
            lse[start:end] = sums / math.log(2)


def ragged(
    workspace: Tensor, q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor,
    out: Tensor, lse: Any, mode: int, bits: Any, starts: Any, scale: float,
) -> None:  # fmt: skip
    """Keys and values behind each other."""
    rows, keys, q = qo_indptr.tolist(), kv_indptr.tolist(), q.clone()
    out.fill_(NAN)
    for b in range(len(_planned(workspace)[1])):
        mine, seen = slice(*rows[b : b + 2]), slice(*keys[b : b + 2])
        n, m = mine.stop - mine.start, seen.stop - seen.start
        if n == 0:
            continue
        values, sums = attend(q[mine], k[seen], v[seen], scale, _seen(mode, n, m, bits, starts, b))
        out[mine] = values.to(out.dtype)
        if lse is not None:
            lse[mine] = sums / math.log(2)


def prefill_module(*_: Any, **__: Any) -> Any:
    """In place of FlashInfer's compiled module; arguments stand where its own stand."""

    def paged_run(*given: Any) -> Any:
        launch("flashinfer paged", paged, given[1], *given[3:13], *given[16:18], given[23])
        return given[10]

    def ragged_run(*given: Any) -> Any:
        launch("flashinfer ragged", ragged, given[1], *given[3:11], *given[14:16], given[21])
        return given[8]

    return SimpleNamespace(plan=prefill_plan, paged_run=paged_run, ragged_run=ragged_run,
                           workspace_size=None)  # fmt: skip


def decode_module(*_: Any, **__: Any) -> Any:
    """The same for one row of each request."""

    def run(*given: Any) -> Any:
        cached, indices = given[3:6], given[6:11]
        launch("flashinfer decode", _decode, given[1], *cached, *indices, given[16])
        return given[9]

    return SimpleNamespace(plan=decode_plan, run=run)


def _decode(
    workspace: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor,
    kv_indices: Tensor, last_page: Tensor, out: Tensor, lse: Any, scale: float,
) -> None:  # fmt: skip
    paged(workspace, q, k_cache, v_cache, None, kv_indptr, kv_indices, last_page, out, lse, 0,
          None, None, scale)  # fmt: skip


# -- FlashInfer's attention over latents (MLA)


def mla_cluster(rows: int, heads: int, batch: int) -> int:
    """Blocks that share a tile of queries: two where requests have many of them on average."""
    return 2 if rows * heads // batch > 64 else 1


def mla_plan(
    _floats: Tensor, _workspace: Tensor, pinned_workspace: Tensor, qo_indptr: Tensor,
    kv_indptr: Tensor, kv_lens: Tensor, heads: int, *_: Any,
) -> tuple[list[int], int]:  # fmt: skip
    """Work is cut from lengths on the host; the launch is planned, and captured in a graph.
    Gives back the bytes of the host's workspace that have to be copied.
    """
    for given in (qo_indptr, kv_indptr, kv_lens):
        if isinstance(given, DeviceTensor):
            raise Defect("FlashInfer plans from tensors of the device")
    rows, batch = qo_indptr.tolist(), len(kv_lens)
    cluster = mla_cluster(rows[batch], heads, batch)
    words = [batch, *rows[: batch + 1], *kv_indptr.tolist()[:batch], *kv_lens.tolist(), cluster]
    return [cluster] + [0] * 17, len(_note_plan(pinned_workspace, words))


def mla(
    workspace: Tensor, launched: int, q: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor,
    kv_indices: Tensor, out: Tensor, lse: Any, causal: bool, size: int, scale: float,
) -> None:  # fmt: skip
    """One latent head of keys, of which values are the first part; of pages as were planned."""
    raw = workspace.view(torch.uint8)
    batch = int(raw[:4].view(torch.int32))
    words = raw[4 : 4 * (3 + 3 * batch)].view(torch.int32).tolist()
    rows, words = words[: batch + 1], words[batch + 1 :]
    starts, lengths, (cluster,) = words[:batch], words[batch : 2 * batch], words[2 * batch :]
    if cluster != launched:
        raise Defect(f"FlashInfer: clusters of {launched}, and a plan for those of {cluster}")
    if rows[batch] > len(q):
        raise Defect(f"FlashInfer: {rows[batch]} rows are planned, and there are {len(q)}")
    queries, out_of = torch.cat((q, q_pe), dim=-1), out.fill_(NAN)
    for b, (start, end) in enumerate(itertools.pairwise(rows)):
        keys, pages = lengths[b], -(-lengths[b] // size)
        if start == end:
            continue
        if starts[b] + pages > len(kv_indices):
            raise Defect(f"FlashInfer: pages to {starts[b] + pages} of {len(kv_indices)}")
        slots = _slots(kv_indices[starts[b] : starts[b] + pages], size, keys)
        latents = _in_pool(slots, ckv)[:, None]
        both = torch.cat((latents, _in_pool(slots, kpe)[:, None]), dim=-1)
        visible = _visible(end - start, keys, causal)
        values, sums = attend(queries[start:end], both, latents, scale, visible)
        out_of[start:end] = values.to(out.dtype)
        if lse is not None:
            lse[start:end] = sums / math.log(2)


def mla_module(staged: bool) -> Any:
    """In place of the compiled module. ``staged``: FlashInfer's Python copies plans to the device;
    older modules do that themselves.
    """

    def plan(floats: Tensor, workspace: Tensor, host: Tensor, *given: Any) -> Any:
        info, count = mla_plan(floats, workspace, host, *given)
        if staged:
            return info, count
        workspace.view(torch.uint8)[:count].copy_(host.view(torch.uint8)[:count], non_blocking=True)
        return info

    def run(_floats: Tensor, workspace: Tensor, info: list[int], *given: Any) -> None:
        *tensors, mode, _heads, size, scale = given[:11]
        launch("flashinfer mla", mla, workspace, info[0], *tensors, mode == 1, size, scale)

    return SimpleNamespace(plan=plan, run=run)


def segment_packbits(
    x: Tensor, indptr: Tensor, out_indptr: Tensor, order: str | int, out: Tensor
) -> None:
    """Bits of each segment, eight to a byte."""
    starts, goes = indptr.tolist(), out_indptr.tolist()
    shifts = torch.arange(8) if order in ("little", 0) else torch.arange(7, -1, -1)
    for b in range(len(starts) - 1):
        bits = x[starts[b] : starts[b + 1]].to(torch.int64)
        packed = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8) << shifts
        out[goes[b] : goes[b] + len(packed)] = packed.sum(-1).to(torch.uint8)


def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, out: Tensor, sums: Tensor
) -> None:
    """Attention over two sets of keys from that over each; sums are logarithms to base 2."""
    most = torch.maximum(s_a, s_b)
    a, b = torch.exp2(s_a - most), torch.exp2(s_b - most)
    total = (v_a.float() * a[..., None] + v_b.float() * b[..., None]) / (a + b)[..., None]
    out.copy_(total.to(out.dtype))
    sums.copy_(most + torch.log2(a + b))
