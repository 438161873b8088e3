"""Device code of the gate: the two kernels of :func:`~.gate.judge_layer`.
:mod:`sglang_c2t.kernels.gate` explains the method and the legend, and launches them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from sglang_c2t import draft_layer

MIN_PROB = tl.constexpr(1e-9)  # classifier.features.MIN_PROB
MAX_MARGIN = tl.constexpr(draft_layer.MAX_MARGIN)
FLOOR = tl.constexpr(draft_layer.FLOOR)
NO_KEY = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _load(row_logits, ids, vocab):
    """Load float32 logits; -inf, nan and ids beyond the vocabulary become the floor."""
    x = tl.load(row_logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(x > FLOOR, x, FLOOR)


@triton.jit
def logit_partials(
    logits, row_stride, vocab, maxima, partials, CHUNK: tl.constexpr, GROUP: tl.constexpr
):
    """Reduce one chunk of a row; the only read of all logits.

    logits [R, V], maxima [R, C * CHUNK / GROUP] float32, partials [R, 3, C] float32: m, s and t
    (see :mod:`sglang_c2t.kernels.gate`). Grid (R, C).

    Floor: R * V * itemsize read, R * V / 16 bytes written: 256 rows of 32000 bf16 logits
    are 16.4 + 0.5 MB, 3.5 us at 4.8 TB/s.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load(logits + row * row_stride, ids, vocab)
    group_max = tl.max(x, axis=1)
    tl.store(maxima + row * num_chunks * (CHUNK // GROUP) + group, group_max)

    m = tl.max(group_max, axis=0)
    e = tl.exp(x - m)
    s = tl.sum(tl.sum(e, axis=1), axis=0)
    t = tl.sum(tl.sum(e * (x - m), axis=1), axis=0)
    here = partials + row * 3 * num_chunks + chunk
    tl.store(here, m)
    tl.store(here + num_chunks, s)
    tl.store(here + 2 * num_chunks, t)


@triton.jit
def _key(value, index):
    """Return a unique int64 that orders by value, then by lowest index."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _largest(keys, COUNT: tl.constexpr, PAD: tl.constexpr):
    """[PAD] int64: the COUNT largest of all keys, descending; NO_KEY after them."""
    place = tl.arange(0, PAD)
    found = tl.full([PAD], NO_KEY, tl.int64)
    last = tl.max(keys)
    found = tl.where(place == 0, last, found)
    for k in range(1, COUNT):
        last = tl.max(tl.where(keys < last, keys, NO_KEY))
        found = tl.where(place == k, last, found)
    return found


@triton.jit
def _feature(
    NAMES: tl.constexpr, F: tl.constexpr,
    prob, joint, margin, entropy, depth, rank, parent_rank,
):  # fmt: skip
    """[K] float32."""
    x = tl.zeros_like(prob)
    if NAMES[F] == "joint":
        x += joint
    elif NAMES[F] == "log_joint":
        x += tl.log(tl.maximum(joint, MIN_PROB))
    elif NAMES[F] == "prob":
        x += prob
    elif NAMES[F] == "margin":
        x += margin
    elif NAMES[F] == "entropy":
        x += entropy
    elif NAMES[F] == "rank":
        x += rank
    elif NAMES[F] == "parent_rank":
        x += parent_rank
    else:
        tl.static_assert(NAMES[F] == "depth")
        x += depth
    return x


@triton.jit
def judge(
    logits, row_stride, vocab, maxima, partials, program, depth, parent_joint, parent_alive,
    token_map, num_kept, relay_table, relay_slots, num_slots,
    tokens_out, prob_out, joint_out, confidence_out, keep_out, entropy_out,
    WIDTH: tl.constexpr, NAMES: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr,
    BEST: tl.constexpr, PAD_K: tl.constexpr, CHUNKS: tl.constexpr, PAD_CHUNKS: tl.constexpr,
    PAD_HIDDEN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Judge one row from the results of :func:`logit_partials`; grid (R,).

    Pointers are those of ``judge_layer``; ``parent_joint``, ``parent_alive``, ``token_map``,
    ``num_kept`` and the relay may be None. ``program`` is ``FusedGate.buffer``. The kernel finds
    BEST >= K tokens and stores K of them: the margin needs the runner-up.

    Reads per row, from L2: V / 16 bytes of maxima, 12 C of partials, K * 64 logits, the weights
    (964 bytes for 3-48-1). Latency bounds it, not bytes: 2 BEST reductions, one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD_K)

    chunk = tl.arange(0, PAD_CHUNKS)
    exists = chunk < CHUNKS
    chunk_partials = partials + row * 3 * CHUNKS + chunk
    chunk_m = tl.load(chunk_partials, mask=exists, other=FLOOR)
    chunk_s = tl.load(chunk_partials + CHUNKS, mask=exists, other=0.0)
    chunk_t = tl.load(chunk_partials + 2 * CHUNKS, mask=exists, other=0.0)
    m = tl.max(chunk_m, axis=0)
    scale = tl.exp(chunk_m - m)
    s = tl.sum(scale * chunk_s, axis=0)
    t = tl.sum(scale * (chunk_t + chunk_s * (chunk_m - m)), axis=0)
    entropy = tl.maximum(tl.log(s) - t / s, 0.0)
    tl.store(entropy_out + row, entropy)

    # The best tokens lie in the groups with the best maxima. Entries beyond the vocabulary or the
    # groups are at the floor and have the highest numbers, so they are never among the best.
    num_groups = CHUNKS * GROUPS
    group = tl.arange(0, PAD_CHUNKS * GROUPS)
    group_max = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=FLOOR)
    best_groups = _index_of(_largest(_key(group_max, group), BEST, PAD_K))
    best_groups = tl.where(place < BEST, best_groups, num_groups)  # beyond the vocabulary
    ids = best_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = _load(logits + row * row_stride, ids, vocab)
    best = _largest(_key(values, ids), BEST, PAD_K)
    value = tl.where(place < BEST, _value_of(best), FLOOR)
    draft_ids = tl.where(place < K, _index_of(best), 0)

    prob = tl.exp(value - m) / s
    joint = prob
    if parent_joint is not None:
        joint = prob * tl.load(parent_joint + row)
    second = tl.sum(tl.where(place == 1, value, 0.0), axis=0)  # unused without "margin"
    margin = value - tl.where(place == 0, second, m)
    margin = tl.minimum(tl.maximum(margin, -MAX_MARGIN), MAX_MARGIN)

    rank, parent_rank = place.to(tl.float32), (row % WIDTH).to(tl.float32)
    if HIDDEN == 0:
        x = _feature(NAMES, 0, prob, joint, margin, entropy, depth, rank, parent_rank)
        confidence = x * tl.load(program + 1)
    else:
        unit = tl.arange(0, PAD_HIDDEN)
        used = unit < HIDDEN
        hidden_bias = tl.load(program + 2 + unit, mask=used, other=0.0)
        out_weight = tl.load(program + 2 + HIDDEN + unit, mask=used, other=0.0)
        hidden = tl.zeros([PAD_K, PAD_HIDDEN], tl.float32) + hidden_bias[None, :]
        for f in tl.static_range(len(NAMES)):
            x = _feature(NAMES, f, prob, joint, margin, entropy, depth, rank, parent_rank)
            weight = tl.load(program + 2 + (2 + f) * HIDDEN + unit, mask=used, other=0.0)
            hidden += x[:, None] * weight[None, :]
        activity = tl.maximum(hidden, 0.0) * out_weight[None, :]
        confidence = tl.sigmoid(tl.sum(activity, axis=1) + tl.load(program + 1))

    keep = confidence >= tl.load(program)
    if parent_alive is not None:
        keep = keep & (tl.load(parent_alive + row) != 0)
    if num_kept is not None:
        first = tl.sum(tl.where(place == 0, keep.to(tl.int32), 0), axis=0)
        tl.store(num_kept + row, tl.load(num_kept + row) + first)

    # Parents and children may share memory: no warp writes before all warps have read.
    tl.debug_barrier()
    here = row * K + place
    wanted = place < K
    tokens = draft_ids.to(tl.int64)
    if token_map is not None:
        tokens = tl.load(token_map + draft_ids, mask=wanted, other=0)
    tl.store(tokens_out + here, tokens, mask=wanted)
    tl.store(prob_out + here, prob, mask=wanted)
    tl.store(joint_out + here, joint, mask=wanted)
    tl.store(confidence_out + here, confidence, mask=wanted)
    tl.store(keep_out + here, keep, mask=wanted)
    if relay_table is not None:
        column = relay_table + tl.load(relay_slots + row)
        tl.store(column, entropy)
        tl.store(column + (1 + place) * num_slots, prob, mask=wanted)
        tl.store(column + (1 + K + place) * num_slots, confidence, mask=wanted)
