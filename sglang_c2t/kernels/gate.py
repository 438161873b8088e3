"""The gate of one drafted layer: draft logits in, best tokens and which to keep out.

C_k = F(P_k, H, d) and keep = C_k >= beta (C2T, arXiv:2502.13652, eq. 6-8 and Algorithm 1),
with the features of :mod:`sglang_c2t.classifier` and its one-hidden-layer network. One read
of the logits and two launches per draft step, whatever K is::

    logit_partials   grid (R, C): each chunk of 4096 logits becomes max, sums and 64 maxima
    judge            grid (R,):   merges them, finds the K best tokens, asks the network

The entropy needs no second read. With m = max l, s = sum e^(l-m), t = sum e^(l-m) (l-m):
H = ln s - t/s. Neither do the K best tokens: they lie in those K groups of 64 logits whose
maxima are best, for each of these groups offers one token that is at least as good as any
token outside. So only K * 64 logits are read again, from cache.

No atomics, no host reads, static shapes: may stand in a CUDA graph. Weights and threshold
are data in one device buffer, so a captured graph sees new ones at its next replay.
Of equal logits the lowest token id wins. -inf and nan logits have probability zero. A row of
nothing else, as the padding of a graph may be, gets valid ids and meaningless numbers.

Triton on CUDA, plain torch (:func:`judge_layer_reference`) elsewhere. Knows nothing of
SGLang, policies or classifier files.

Legend: R rows, V draft vocabulary, K topk, C chunks, F features, H hidden units.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from sglang_c2t import draft_layer

MAX_TOPK = 16
MAX_HIDDEN = 64

#: What may be read; names and meanings are the classifier's.
FEATURES = (
    "joint", "log_joint", "prob", "log_prob", "logit_prob", "topk_prob", "margin", "entropy",
    "depth", "parent_rank", "rank",
)  # fmt: skip

CHUNK = 4096  # logits per program: 8 or 16 KB, enough programs even for one row
GROUP = 64  # logits per maximum

MIN_PROB = tl.constexpr(1e-9)  # classifier.features.MIN_PROB
LOGIT_EPS = tl.constexpr(1e-6)  # classifier.features.LOGIT_EPS
MAX_MARGIN = tl.constexpr(draft_layer.MAX_MARGIN)
FLOOR = tl.constexpr(draft_layer.FLOOR)
NO_KEY = tl.constexpr(-(2**63))  # below every key


class GateOutput(NamedTuple):
    """What is known about the K best children of each row, best first."""

    tokens: Tensor
    """[R, K] int64: target token ids."""

    prob: Tensor
    """[R, K] float32: draft probability at temperature 1."""

    joint: Tensor
    """[R, K] float32: product of ``prob`` along the path, this token included."""

    confidence: Tensor
    """[R, K] float32: what is compared with beta."""

    keep: Tensor
    """[R, K] bool: the parent is alive and the confidence reaches beta."""

    entropy: Tensor
    """[R] float32, nats: of the whole distribution."""

    @classmethod
    def empty(cls, rows: int, topk: int, device: torch.device | str) -> GateOutput:
        """Room for a layer."""
        kinds = _kinds(rows, topk)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds))


class Relay(NamedTuple):
    """A table in which what is said waits for another step, with a column for each of S slots."""

    table: Tensor
    """[1 + 2 K, S] float32: entropy, then ``prob`` and ``confidence`` of the K best."""

    slots: Tensor
    """[R] integers: the column of each row."""


class Weights(NamedTuple):
    """A network of one hidden layer, ``sigmoid(out @ relu(hidden @ x))``, on any device.

    In the order of ``ConfidenceNet.parameters()``.
    """

    hidden_weight: Tensor  # [H, F]
    hidden_bias: Tensor  # [H]
    out_weight: Tensor  # [1, H]
    out_bias: Tensor  # [1]


class DepthWeights(NamedTuple):
    """``sigmoid(weight[d] x + bias[d])`` of the first feature x, with numbers for D depths d.

    In the order of ``DepthLogistic.parameters()``.
    """

    weight: Tensor  # [D]
    bias: Tensor  # [D]


class FusedGate:
    """A network and a threshold, in device memory that captured graphs keep reading.

    Args:
        names: Features in the network's order, of :data:`FEATURES`; with no network
            exactly one, itself the confidence (``joint``: DyJoint, ``prob``: DyMax).
        weights: The network, or ``None``.
        beta: Least confidence of a token that is kept.
        device: Where the logits will be.
        sign: With no network: -1 where the confidence is minus the feature, so that it must not
            exceed minus beta.
        running: The confidence is the network's times the parent's.
        together: A chain is kept wherever one of the batch is. The kernels do not know of others:
            this is for who asks them.

    Raises:
        ValueError: See :meth:`refusal`; or weights of other shapes.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights | DepthWeights | None,
        *,
        beta: float,
        device: torch.device | str,
        sign: int = 1,
        running: bool = False,
        together: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.hidden_size = weights.hidden_weight.shape[0] if isinstance(weights, Weights) else 0
        self.num_depths = weights.weight.shape[0] if isinstance(weights, DepthWeights) else 0
        self.running, self.together = running, together
        reason = self.refusal(self.names, (self.hidden_size,) if self.hidden_size else ())
        if reason is not None:
            raise ValueError(reason)
        size = 2 + (2 + len(self.columns)) * self.hidden_size + 2 * self.num_depths
        #: float32. Of a network [2 + 2 H + F H]: beta, out_bias, hidden_bias, out_weight, and
        #: hidden_weight transposed, since the kernel adds one feature to all units at once. Of
        #: depths [2 + 2 D]: beta, nothing, weight, bias. Else beta and the sign.
        self.buffer = torch.zeros(size, dtype=torch.float32, device=device)
        self.set_beta(beta)
        if weights is not None:
            self.load(weights)
        else:
            self.buffer[1].fill_(sign)

    @staticmethod
    def refusal(names: Sequence[str], hidden_sizes: Sequence[int]) -> str | None:
        """Why the kernels cannot run such a gate, or ``None`` if they can."""
        strange = [name for name in names if name not in FEATURES]
        if strange:
            return f"the gate kernel reads {', '.join(FEATURES)}, not {', '.join(strange)}"
        if len(hidden_sizes) > 1 or not all(1 <= size <= MAX_HIDDEN for size in hidden_sizes):
            return (
                f"the gate kernel runs one hidden layer of at most {MAX_HIDDEN} units, "
                f"got {list(hidden_sizes)}"
            )
        alone = bool(names) and tuple(names[1:]) in {(), ("depth",)} and names[0] != "topk_prob"
        if not hidden_sizes and not alone:
            return f"without a network the first feature is what decides, got {tuple(names)}"
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """F names: of each number that the network reads."""
        wide = {"topk_prob": draft_layer.TOPK_PROBS}
        return tuple(name for name in self.names for _ in range(wide.get(name, 1)))

    def fits(self, other: FusedGate) -> bool:
        """Whether kernels compiled for ``other`` can run this one: only the data differ."""
        mine, theirs = (
            (of.names, of.hidden_size, of.num_depths, of.running, of.together)
            for of in (self, other)
        )
        return mine == theirs

    def load(self, weights: Weights | DepthWeights) -> None:
        """Write other weights into the buffer, in one copy on the current stream."""
        hidden, depths = self.hidden_size, self.num_depths
        shapes = [tuple(t.shape) for t in weights]
        if isinstance(weights, Weights):
            expected = [(hidden, len(self.columns)), (hidden,), (1, hidden), (1,)]
            parts = [weights.out_bias, weights.hidden_bias, weights.out_weight]
            parts.append(weights.hidden_weight.T)
        else:
            expected, parts = [(depths,), (depths,)], [weights.weight, weights.bias]
        if (hidden or depths) == 0 or shapes != expected:
            raise ValueError(f"this gate's weights have the shapes {expected}, got {shapes}")
        packed = torch.cat([part.detach().float().flatten() for part in parts])
        self.buffer[-len(packed) :].copy_(packed)

    def set_beta(self, beta: float) -> None:
        """Write another threshold into the buffer, on the current stream."""
        self.buffer[0].fill_(beta)

    @property
    def beta(self) -> Tensor:
        """[] float32: a view of the buffer, like :attr:`weights`."""
        return self.buffer[0]

    @property
    def weights(self) -> Weights:
        """The network as the buffer holds it."""
        hidden = self.hidden_size
        _, out_bias, hidden_bias, out_weight, columns = self.buffer.split(
            [1, 1, hidden, hidden, len(self.columns) * hidden]
        )
        return Weights(columns.view(-1, hidden).T, hidden_bias, out_weight[None], out_bias)

    @property
    def depth_weights(self) -> DepthWeights:
        """Those of depths as the buffer holds them."""
        return DepthWeights(*self.buffer[2:].view(2, self.num_depths))

    @property
    def sign(self) -> Tensor:
        """[] float32: that of the feature."""
        return self.buffer[1]


def judge_layer(
    logits: Tensor,  # [R, V] bf16, fp16 or fp32; rows may lie further apart than V
    program: FusedGate,
    *,
    depth: int,  # 1 for the children of the root
    topk: int,  # K, at most MAX_TOPK and V
    joint: Tensor | None = None,  # [R] float32 of the parents; None: 1, as for the root
    alive: Tensor | None = None,  # [R] bool, the parents'; None: all
    token_map: Tensor | None = None,  # [V] int64: target id of each draft id (EAGLE-3)
    num_kept: Tensor | None = None,  # [R] int32, in place: += keep[:, 0]
    out: GateOutput | None = None,  # written in place and returned
    tokens: bool = True,  # False: nobody asks which tokens they are
    width: int = 1,  # rows of a request, best first, which stand together
    relay: Relay | None = None,  # written as well
    sure: Tensor | None = None,  # [R] float32, the parents' confidence, where it is running
) -> GateOutput:
    """The K best children of each row, and which of them to keep.

    Without ``tokens`` the twin leaves the ids out, which cost it as much as all the rest.

    ``joint``, ``alive`` and ``sure`` may be ``out``'s own memory (K = 1): each row is read before
    it is written. With ``num_kept`` a step of a chain is these two launches and nothing else.

    Logits ln [0.6, 0.4], parents' joint [0.5], names ("joint",), beta 0.25, K 2: tokens
    [[0, 1]], joint [[0.3, 0.2]], keep [[True, False]].

    Raises:
        ValueError: Shapes, types or strides that do not fit.
    """
    if not (logits.is_cuda or triton.knobs.runtime.interpret):
        return judge_layer_reference(
            logits,
            program,
            depth=depth,
            topk=topk,
            joint=joint,
            alive=alive,
            token_map=token_map,
            num_kept=num_kept,
            out=out,
            tokens=tokens,
            width=width,
            relay=relay,
            sure=sure,
        )
    _check(logits, topk, joint, alive, token_map, num_kept, out, sure)
    rows, vocab = logits.shape
    out = GateOutput.empty(rows, topk, logits.device) if out is None else out
    if rows == 0:
        return out
    num_chunks = triton.cdiv(vocab, CHUNK)
    maxima = logits.new_empty((rows, num_chunks * (CHUNK // GROUP)), dtype=torch.float32)
    partials = logits.new_empty((rows, 3, num_chunks), dtype=torch.float32)
    logit_partials[(rows, num_chunks)](
        logits, logits.stride(0), vocab, maxima, partials, CHUNK=CHUNK, GROUP=GROUP, num_warps=4
    )
    judge[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        maxima,
        partials,
        program.buffer,
        float(depth),  # an int would be compiled in where it is 1
        joint,
        alive,
        token_map,
        num_kept,
        sure if program.running else None,
        *((None, None, 0) if relay is None else (*relay, relay.table.shape[1])),
        *out,
        **judge_constants(program, topk, num_chunks, width),
        num_warps=4,
    )
    return out


def judge_constants(
    program: FusedGate, topk: int, num_chunks: int, width: int = 1
) -> dict[str, object]:
    """What the kernel ``judge`` is compiled for."""
    names = program.columns
    best = _num_best(names, topk, margin=True)  # the runner-up costs a kernel nothing to speak of
    return {
        "WIDTH": width if "parent_rank" in names else 1,
        "NAMES": names,
        "TOP": names.index("topk_prob") if "topk_prob" in names else 0,
        "HIDDEN": program.hidden_size,
        "DEPTHS": program.num_depths,
        "K": topk,
        "BEST": best,
        "PAD_K": triton.next_power_of_2(best),
        "CHUNKS": num_chunks,
        "PAD_CHUNKS": triton.next_power_of_2(num_chunks),
        "PAD_HIDDEN": max(16, triton.next_power_of_2(program.hidden_size)),
        "GROUPS": CHUNK // GROUP,
        "GROUP": GROUP,
    }


def _num_best(names: Sequence[str], topk: int, *, margin: bool) -> int:
    """How many of a row's best tokens somebody reads, the runner-up if there is a ``margin``."""
    return max(topk, 2 if margin else 1, draft_layer.TOPK_PROBS if "topk_prob" in names else 1)


def judge_layer_reference(
    logits: Tensor,
    program: FusedGate,
    *,
    depth: int,
    topk: int,
    joint: Tensor | None = None,
    alive: Tensor | None = None,
    token_map: Tensor | None = None,
    num_kept: Tensor | None = None,
    out: GateOutput | None = None,
    tokens: bool = True,
    width: int = 1,
    relay: Relay | None = None,
    sure: Tensor | None = None,
) -> GateOutput:
    """:func:`judge_layer` in plain torch. It looks at its numbers, so no CUDA graph can hold it."""
    _check(logits, topk, joint, alive, token_map, num_kept, out, sure)
    x = draft_layer.floored(logits)
    log_probs = x.log_softmax(dim=-1)
    entropy = draft_layer.entropy(log_probs)  # [R]
    count = min(_num_best(program.names, topk, margin="margin" in program.names), x.shape[1])
    if tokens:
        draft_ids = _best_tokens(x, count)
        best = log_probs.gather(1, draft_ids)  # [R, count]
        ids = draft_ids[:, :topk]
        ids = ids if token_map is None else token_map[ids]
    else:
        best = log_probs.amax(-1, keepdim=True) if count == 1 else log_probs.topk(count).values
        shape = (len(x), topk)
        ids = x.new_empty(shape, dtype=torch.int64) if out is None else out.tokens
    numbered = partial(torch.arange, device=x.device)
    prob = best[:, :topk].exp()
    parents = prob if joint is None else prob * joint[:, None]
    features = {
        "joint": lambda: parents,
        "log_joint": lambda: parents.clamp(min=MIN_PROB.value).log(),
        "prob": lambda: prob,
        "log_prob": lambda: prob.clamp(min=MIN_PROB.value).log(),
        "logit_prob": lambda: prob.logit(eps=LOGIT_EPS.value),
        "topk_prob": lambda: _top_probs(best)[:, None, :].expand(-1, topk, -1),
        "margin": lambda: draft_layer.margins(best, topk),
        "entropy": lambda: entropy[:, None].expand_as(prob),
        "depth": lambda: torch.full_like(prob, depth),
        "rank": lambda: numbered(topk).expand_as(prob).float(),
        "parent_rank": lambda: (numbered(len(x)) % width)[:, None].expand_as(prob).float(),
    }
    confidence = _confidence(program, [features[name]() for name in program.names], depth)
    if program.running and sure is not None:
        confidence = confidence * sure[:, None]
    keep = confidence >= program.beta
    if alive is not None:
        keep = keep & alive[:, None]
    if num_kept is not None:
        num_kept += keep[:, 0]
    judged = GateOutput(ids, prob, parents, confidence, keep, entropy.clamp(min=0))
    if relay is not None:
        said = judged.entropy[None], judged.prob.T, judged.confidence.T
        relay.table[:, relay.slots] = torch.cat(said)
    if out is None:
        return judged
    for there, here in zip(out, judged, strict=True):
        if there is not here:
            there.copy_(here)
    return out


def _best_tokens(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64: the tokens of the largest logits [R, V], of equals the lowest ids first."""
    values, ids = logits.topk(min(count + 1, logits.shape[1]))
    if bool((values[:, 1:] == values[:, :-1]).any()):  # topk orders equals as it likes
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
    return ids[:, :count]


def _top_probs(best: Tensor) -> Tensor:
    """[R, TOPK_PROBS] from log probabilities [R, n], descending; zero where there are no more."""
    probs = best[:, : draft_layer.TOPK_PROBS].exp()
    return pad(probs, (0, draft_layer.TOPK_PROBS - probs.shape[1]))


def _confidence(program: FusedGate, features: Sequence[Tensor], depth: int) -> Tensor:
    """[R, K] from what the network reads, [R, K] or wider each."""
    if program.num_depths:
        of_depth = min(max(depth, 1), program.num_depths) - 1
        weight, bias = (column[of_depth] for column in program.depth_weights)
        return torch.sigmoid(weight * features[0] + bias)
    if program.hidden_size == 0:
        return program.sign * features[0]
    weights = program.weights
    x = torch.cat([f if f.dim() == 3 else f[:, :, None] for f in features], dim=-1)
    hidden = torch.relu(linear(x, weights.hidden_weight, weights.hidden_bias))
    return torch.sigmoid(linear(hidden, weights.out_weight, weights.out_bias).squeeze(-1))


def _kinds(rows: int, topk: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each field of :class:`GateOutput`."""
    dtypes = (torch.int64, *(torch.float32,) * 3, torch.bool)
    return [*(((rows, topk), dtype) for dtype in dtypes), ((rows,), torch.float32)]


def _check(
    logits: Tensor,
    topk: int,
    joint: Tensor | None,
    alive: Tensor | None,
    token_map: Tensor | None,
    num_kept: Tensor | None,
    out: GateOutput | None,
    sure: Tensor | None,
) -> None:
    if logits.dim() != 2 or logits.dtype not in {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(
            "logits must be [R, V] bfloat16, float16 or float32, "
            f"got {list(logits.shape)} {logits.dtype}"
        )
    rows, vocab = logits.shape
    if not 1 <= topk <= min(MAX_TOPK, vocab) or vocab < 2:
        raise ValueError(f"topk must be in [1, {MAX_TOPK}] and fit into V = {vocab}, got {topk}")
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be neighbours, strides are {logits.stride()}")
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("joint", joint, (rows,), torch.float32),
        ("alive", alive, (rows,), torch.bool),
        ("token_map", token_map, (vocab,), torch.int64),
        ("num_kept", num_kept, (rows,), torch.int32),
        ("sure", sure, (rows,), torch.float32),
    ]
    if out is not None:
        fields = zip(out._fields, out, _kinds(rows, topk), strict=True)
        expected += [(f"out.{name}", tensor, *kind) for name, tensor, kind in fields]
    for name, x, shape, dtype in expected:
        if x is None or (_kind(x) == (shape, dtype, logits.device) and x.is_contiguous()):
            continue
        raise ValueError(
            f"{name} must be contiguous, {list(shape)} {dtype} on {logits.device}, got "
            f"{list(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
        )


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


# -- kernels ------------------------------------------------------------------------------


@triton.jit
def _load(row_logits, ids, vocab):
    """Float32 logits; -inf, nan and what lies behind the vocabulary become the floor."""
    x = tl.load(row_logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(x > FLOOR, x, FLOOR)


@triton.jit
def logit_partials(
    logits, row_stride, vocab, maxima, partials, CHUNK: tl.constexpr, GROUP: tl.constexpr
):
    """What one chunk of a row contributes; the only read of all logits.

    logits [R, V], maxima [R, C * CHUNK / GROUP] float32, partials [R, 3, C] float32: m, s
    and t (see the top of the file). Grid (R, C).

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
    """int64 that orders by value, then by lowest index; no two are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, with which it ties
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
    """[PAD] int64: the COUNT largest of all keys, descending; NO_KEY behind them."""
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
    NAMES: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr,
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
    elif NAMES[F] == "log_prob":
        x += tl.log(tl.maximum(prob, MIN_PROB))
    elif NAMES[F] == "logit_prob":
        p = tl.minimum(tl.maximum(prob, LOGIT_EPS), 1 - LOGIT_EPS)
        x += tl.log(p / (1 - p))
    elif NAMES[F] == "topk_prob":
        x += tl.sum(tl.where(rank == F - TOP, prob, 0.0), axis=0)
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
    logits,
    row_stride,
    vocab,
    maxima,
    partials,
    program,
    depth,
    parent_joint,
    parent_alive,
    token_map,
    num_kept,
    parent_sure,
    relay_table,
    relay_slots,
    num_slots,
    tokens_out,
    prob_out,
    joint_out,
    confidence_out,
    keep_out,
    entropy_out,
    WIDTH: tl.constexpr,
    NAMES: tl.constexpr,
    TOP: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    BEST: tl.constexpr,
    PAD_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAD_CHUNKS: tl.constexpr,
    PAD_HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Judge one row from what :func:`logit_partials` left; grid (R,).

    Pointers are those of :func:`judge_layer`; ``parent_joint``, ``parent_alive``,
    ``token_map``, ``num_kept``, ``parent_sure`` and the relay may be None. ``program`` is
    ``FusedGate.buffer``. Of the BEST tokens, K or more, all are looked at and K are told.

    Reads per row, from L2: V / 16 bytes of maxima, 12 C of partials, K * 64 logits, the
    weights (964 bytes for 3-48-1). Bound by latency, not by bytes: 2 BEST reductions,
    one after the other.
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

    # The best tokens lie in the groups with the best maxima. What stands behind the vocabulary
    # or the groups is at the floor and has the highest numbers: never among the best.
    num_groups = CHUNKS * GROUPS
    group = tl.arange(0, PAD_CHUNKS * GROUPS)
    group_max = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=FLOOR)
    best_groups = _index_of(_largest(_key(group_max, group), BEST, PAD_K))
    best_groups = tl.where(place < BEST, best_groups, num_groups)  # behind the vocabulary
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
    if DEPTHS > 0:
        x = _feature(NAMES, 0, TOP, prob, joint, margin, entropy, depth, rank, parent_rank)
        of_layer = (tl.zeros([], tl.float32) + depth).to(tl.int32)  # the interpreter's is a float
        of_depth = program + 1 + tl.minimum(tl.maximum(of_layer, 1), DEPTHS)
        confidence = tl.sigmoid(x * tl.load(of_depth) + tl.load(of_depth + DEPTHS))
    elif HIDDEN == 0:
        x = _feature(NAMES, 0, TOP, prob, joint, margin, entropy, depth, rank, parent_rank)
        confidence = x * tl.load(program + 1)
    else:
        unit = tl.arange(0, PAD_HIDDEN)
        used = unit < HIDDEN
        hidden_bias = tl.load(program + 2 + unit, mask=used, other=0.0)
        out_weight = tl.load(program + 2 + HIDDEN + unit, mask=used, other=0.0)
        hidden = tl.zeros([PAD_K, PAD_HIDDEN], tl.float32) + hidden_bias[None, :]
        for f in tl.static_range(len(NAMES)):
            x = _feature(NAMES, f, TOP, prob, joint, margin, entropy, depth, rank, parent_rank)
            weight = tl.load(program + 2 + (2 + f) * HIDDEN + unit, mask=used, other=0.0)
            hidden += x[:, None] * weight[None, :]
        activity = tl.maximum(hidden, 0.0) * out_weight[None, :]
        confidence = tl.sigmoid(tl.sum(activity, axis=1) + tl.load(program + 1))

    if parent_sure is not None:
        confidence = confidence * tl.load(parent_sure + row)
    keep = confidence >= tl.load(program)
    if parent_alive is not None:
        keep = keep & (tl.load(parent_alive + row) != 0)
    if num_kept is not None:
        first = tl.sum(tl.where(place == 0, keep.to(tl.int32), 0), axis=0)
        tl.store(num_kept + row, tl.load(num_kept + row) + first)

    # The parents' memory may be the children's: nobody writes before all warps have read.
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
