"""The gate of one drafted layer: from draft logits to the best tokens and which to keep.

C_k = F(P_k, H, d) and keep = C_k >= beta (C2T, arXiv:2502.13652, eq. 6-8 and Algorithm 1), with the
features of :mod:`sglang_c2t.classifier` and its network of one hidden layer. One read of the logits
and two launches per draft step, for any K::

    logit_partials   grid (R, C): each chunk of 4096 logits becomes max, sums and 64 maxima
    judge            grid (R,):   merges them, finds the K best tokens, computes the confidence

The entropy needs no second read. With m = max l, s = sum e^(l-m), t = sum e^(l-m) (l-m): H = ln s -
t/s. The K best tokens need none either: they lie in the K groups of 64 logits with the best maxima.
Each of these groups has a token at least as good as any token outside. So the kernel reads only
K * 64 logits again, from cache.

No atomics, no host reads, static shapes: a CUDA graph may contain it. Of equal logits the lowest
token id wins. -inf and nan logits have probability zero. A row with no other logits, such as a
graph's padding, gets valid ids and meaningless numbers.

Triton on CUDA, plain torch (:func:`judge_layer_reference`) elsewhere. It knows neither SGLang,
policies nor classifier files.

Legend: R rows, V draft vocabulary, K topk, C chunks, F features, H hidden units.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from sglang_c2t import draft_layer
from sglang_c2t.kernels.gate_device import MIN_PROB, judge, logit_partials
from sglang_c2t.kernels.gate_program import MAX_TOPK, FusedGate, GateOutput, Relay
from sglang_c2t.kernels.rows import runs_triton

CHUNK = 4096  # logits per program: 8 or 16 KB, enough programs even for one row
GROUP = 64  # logits per maximum


def judge_layer(
    logits: Tensor,  # [R, V] bf16, fp16 or fp32; rows may be strided
    program: FusedGate,
    *,
    depth: int,  # 1 for children of the root
    topk: int,  # K, at most MAX_TOPK and V
    joint: Tensor | None = None,  # [R] float32 of the parents; None: 1, as for the root
    alive: Tensor | None = None,  # [R] bool, of the parents; None: all
    token_map: Tensor | None = None,  # [V] int64: target id of each draft id (EAGLE-3)
    num_kept: Tensor | None = None,  # [R] int32, in place: += keep[:, 0]
    out: GateOutput | None = None,  # written in place and returned
    tokens: bool = True,  # False: the caller does not read the ids
    width: int = 1,  # adjacent rows per request, best first
    relay: Relay | None = None,  # also written
) -> GateOutput:
    """Return the K best children of each row, and which of them to keep.

    Without ``tokens`` the twin skips the ids, which are half of its time. ``joint`` and ``alive``
    may share ``out``'s memory (K = 1): each row is read before it is written. With ``num_kept`` a
    step of a chain needs no other launch.

    Logits ln [0.6, 0.4], parents' joint [0.5], names ("joint",), beta 0.25, K 2: tokens
    [[0, 1]], joint [[0.3, 0.2]], keep [[True, False]].

    Raises:
        ValueError: Shapes, types or strides that do not fit.
    """
    if not runs_triton(logits):
        return judge_layer_reference(
            logits, program, depth=depth, topk=topk, joint=joint, alive=alive, token_map=token_map,
            num_kept=num_kept, out=out, tokens=tokens, width=width, relay=relay,
        )  # fmt: skip
    _check(logits, topk, out, joint=joint, alive=alive, token_map=token_map, num_kept=num_kept)
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
        logits, logits.stride(0), vocab, maxima, partials, program.buffer,
        float(depth),  # an int would be compiled in when it is 1
        joint, alive, token_map, num_kept,
        *((None, None, 0) if relay is None else (*relay, relay.table.shape[1])),
        *out, **judge_constants(program, topk, num_chunks, width), num_warps=4,
    )  # fmt: skip
    return out


def judge_constants(
    program: FusedGate, topk: int, num_chunks: int, width: int = 1
) -> dict[str, object]:
    """Return the constants for which the kernel ``judge`` is compiled."""
    best = max(topk, 2)  # the margin needs the runner-up, which costs a kernel next to nothing
    return {
        "WIDTH": width if "parent_rank" in program.names else 1,
        "NAMES": program.names,
        "HIDDEN": program.hidden_size,
        "K": topk,
        "BEST": best,
        "PAD_K": triton.next_power_of_2(best),
        "CHUNKS": num_chunks,
        "PAD_CHUNKS": triton.next_power_of_2(num_chunks),
        "PAD_HIDDEN": max(16, triton.next_power_of_2(program.hidden_size)),
        "GROUPS": CHUNK // GROUP,
        "GROUP": GROUP,
    }


def judge_layer_reference(
    logits: Tensor, program: FusedGate, *, depth: int, topk: int,
    joint: Tensor | None = None, alive: Tensor | None = None, token_map: Tensor | None = None,
    num_kept: Tensor | None = None, out: GateOutput | None = None, tokens: bool = True,
    width: int = 1, relay: Relay | None = None,
) -> GateOutput:  # fmt: skip
    """Twin of :func:`judge_layer`. It reads values on the host: not for CUDA graphs."""
    _check(logits, topk, out, joint=joint, alive=alive, token_map=token_map, num_kept=num_kept)
    x = draft_layer.floored(logits)
    log_probs = x.log_softmax(dim=-1)
    entropy = draft_layer.entropy(log_probs)  # [R]
    count = min(max(topk, 2 if "margin" in program.names else 1), x.shape[1])
    if tokens:
        draft_ids = _best_tokens(x, count)
        best = log_probs.gather(1, draft_ids)  # [R, count]
        ids = draft_ids[:, :topk]
        ids = ids if token_map is None else token_map[ids]
    else:
        best = log_probs.amax(-1, keepdim=True) if count == 1 else log_probs.topk(count).values
        shape = (len(x), topk)
        ids = x.new_empty(shape, dtype=torch.int64) if out is None else out.tokens
    prob = best[:, :topk].exp()
    path = prob if joint is None else prob * joint[:, None]
    confidence = _confidence(program, best, prob, path, entropy, depth, width)
    keep = confidence >= program.beta
    if alive is not None:
        keep = keep & alive[:, None]
    if num_kept is not None:
        num_kept += keep[:, 0]
    judged = GateOutput(ids, prob, path, confidence, keep, entropy.clamp(min=0))
    if relay is not None:
        relay.table[:, relay.slots] = torch.cat((judged.entropy[None], prob.T, confidence.T))
    if out is None:
        return judged
    for there, here in zip(out, judged, strict=True):
        if there is not here:
            there.copy_(here)
    return out


def _best_tokens(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64: tokens of the largest logits [R, V], of equal ones the lowest ids first."""
    values, ids = logits.topk(min(count + 1, logits.shape[1]))
    if bool((values[:, 1:] == values[:, :-1]).any()):  # topk does not order equal values
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
    return ids[:, :count]


def _confidence(
    program: FusedGate, best: Tensor, prob: Tensor, joint: Tensor, entropy: Tensor,
    depth: int, width: int,
) -> Tensor:  # fmt: skip
    """[R, K] from ``best`` [R, >= K] log probabilities, [R, K] and [R] of the children."""
    rows, topk = prob.shape
    numbered = partial(torch.arange, device=prob.device)
    features = {
        "joint": lambda: joint,
        "log_joint": lambda: joint.clamp(min=MIN_PROB.value).log(),
        "prob": lambda: prob,
        "margin": lambda: draft_layer.margins(best, topk),
        "entropy": lambda: entropy[:, None].expand_as(prob),
        "depth": lambda: torch.full_like(prob, depth),
        "rank": lambda: numbered(topk).expand_as(prob).float(),
        "parent_rank": lambda: (numbered(rows) % width)[:, None].expand_as(prob).float(),
    }
    read = [features[name]() for name in program.names]
    if program.hidden_size == 0:
        return program.sign * read[0]
    weights = program.weights
    x = torch.stack(read, dim=-1)
    hidden = torch.relu(linear(x, weights.hidden_weight, weights.hidden_bias))
    return torch.sigmoid(linear(hidden, weights.out_weight, weights.out_bias).squeeze(-1))


def _check(logits: Tensor, topk: int, out: GateOutput | None, **of_rows: Tensor | None) -> None:
    """Raise ValueError for tensors that :func:`judge_layer` does not support."""
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
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "joint": ((rows,), torch.float32),
        "alive": ((rows,), torch.bool),
        "token_map": ((vocab,), torch.int64),
        "num_kept": ((rows,), torch.int32),
    }
    for name, x in of_rows.items():
        _require_kind(name, x, kinds[name], logits.device)
    if out is not None:
        for name, x, kind in zip(out._fields, out, GateOutput.kinds(rows, topk), strict=True):
            _require_kind(f"out.{name}", x, kind, logits.device)


def _require_kind(
    name: str, x: Tensor | None, kind: tuple[tuple[int, ...], torch.dtype], device: torch.device
) -> None:
    if x is None or ((x.shape, x.dtype) == kind and x.device == device and x.is_contiguous()):
        return
    shape, dtype = kind
    raise ValueError(
        f"{name} must be contiguous, {list(shape)} {dtype} on {device}, got "
        f"{list(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
    )
