"""Draft chains of a batch: which are still alive, where each ends, and their packing.

A chain of request b is its root (the committed bonus token, always verified) followed
by up to D drafted tokens. ``verify_lens[b]`` counts the rows the target verifies, root
included, so it lies in [1, D + 1]::

    request 0   root a b c      verify_lens 4      packed rows: root a b c
    request 1   root x          verify_lens 2                   root x
                                                   row numbers: 0 1 2 3 | 4 5   (width 4)

Pure torch; knows nothing of SGLang.

Legend: B requests, N = D + 1 rows of a full chain, T = sum of verify_lens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_c2t.classifier.features import TokenStats, token_stats
from sglang_c2t.classifier.recording import COLUMNS
from sglang_c2t.config import ConfigError
from sglang_c2t.policies.base import ChainPolicy, DraftLayer

#: Statistics of a first token nobody measured (e.g. a request whose prefill ran on
#: another server): certain, so that the gate stays open for it.
UNKNOWN_FIRST_TOKEN = TokenStats(prob=torch.ones(1), entropy=torch.zeros(1))


#: Optional fields of DraftLayer that the gate fills in.
MEASURED: frozenset[str] = frozenset()


class ChainGate:
    """Asks the policy after each drafted layer and keeps the answer per request.

    SGLang drafts the first token of a step at the end of the previous step (draft
    extend), so its statistics are relayed in a table with one row per request slot.

    Args:
        policy: Where a chain ends.
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Where draft logits live.
        agree: Makes a [B] uint8 tensor equal on all tensor-parallel ranks, in place or
            not, and returns it. Identity on one rank.

    Raises:
        ConfigError: The policy needs something this gate does not measure.
    """

    def __init__(
        self,
        policy: ChainPolicy,
        *,
        num_slots: int,
        device: torch.device | str,
        agree: Callable[[Tensor], Tensor] = lambda decision: decision,
    ) -> None:
        if missing := policy.needs - MEASURED:
            raise ConfigError(
                f"policy {policy.name} needs {', '.join(sorted(missing))}, which the chain gate "
                "does not measure yet; choose another --c2t-policy"
            )
        self._policy = policy
        self._agree = agree
        unknown = UNKNOWN_FIRST_TOKEN
        self._first_prob = unknown.prob.to(device).repeat(num_slots)  # [num_slots]
        self._first_entropy = unknown.entropy.to(device).repeat(num_slots)  # [num_slots]
        self._layers: list[DraftLayer] = []
        self._alive = torch.ones(0, dtype=torch.bool, device=device)  # [B]
        self._num_kept = torch.zeros(0, dtype=torch.int32, device=device)  # [B]

    def relay_first_token(self, slots: Tensor, logits: Tensor) -> None:
        """Remember the statistics of each request's next first token.

        ``slots`` is [B] (``req_pool_indices``), ``logits`` [B, V] of the draft.
        """
        stats = token_stats(logits)
        self._first_prob[slots] = stats.prob
        self._first_entropy[slots] = stats.entropy

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B], and judge their first tokens."""
        self._layers = []
        self._alive = torch.ones(slots.shape, dtype=torch.bool, device=slots.device)
        self._num_kept = torch.zeros(slots.shape, dtype=torch.int32, device=slots.device)
        self._judge(TokenStats(self._first_prob[slots], self._first_entropy[slots]))

    def observe(self, logits: Tensor) -> None:
        """Judge the next drafted layer from its draft ``logits`` [B, V]."""
        self._judge(token_stats(logits))

    def any_alive(self) -> bool:
        """Whether any chain may still grow. Reads the host: eager mode only."""
        return bool(self._alive.any())

    @property
    def verify_lens(self) -> Tensor:
        """[B] int32 in [1, D + 1]: rows to verify, root included."""
        return self._num_kept + 1

    @property
    def layers(self) -> list[DraftLayer]:
        """The layers judged in this step, shallowest first."""
        return self._layers

    def _judge(self, stats: TokenStats) -> None:
        joint = stats.prob * self._layers[-1].joint if self._layers else stats.prob
        layer = DraftLayer(
            depth=len(self._layers) + 1,
            prob=stats.prob,
            joint=joint,
            entropy=stats.entropy,
            alive=self._alive,
        )
        keep = (self._policy.keep(layer) & self._alive).to(torch.uint8)
        self._alive = self._agree(keep).bool()
        self._num_kept = self._num_kept + self._alive
        self._layers.append(layer)


def truncated_chains(retrieve_next_token: Tensor, verify_lens: Tensor) -> Tensor:
    """Chains in SGLang's linked form, cut: nothing follows row verify_lens - 1.

    ``retrieve_next_token`` is [B, N] int64, the row after each row or -1; so is the result.
    The verify kernels walk it, so a cut chain ends there and its bonus token comes from
    that row. A copy, because SGLang may share one constant chain between steps.
    """
    rows = torch.arange(retrieve_next_token.shape[1], device=verify_lens.device)
    return retrieve_next_token.masked_fill(rows >= verify_lens[:, None] - 1, -1)


def packed_rows(verify_lens: Tensor, width: int) -> Tensor:
    """[T] int64: numbers of the surviving rows in a [B * width] layout, in order.

    verify_lens [3, 1], width 4 -> [0, 1, 2, 4].
    """
    rows = torch.arange(width, device=verify_lens.device)
    # nonzero reads the host to size its result: ragged verification is eager here.
    return (rows < verify_lens[:, None]).flatten().nonzero().flatten()


def unpack_rows(packed: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...]: row i of ``packed`` [T, ...] lands at ``rows[i]``, the rest is 0."""
    full = packed.new_zeros((num_rows, *packed.shape[1:]))
    full[rows] = packed
    return full


def verified_rows(
    layers: Sequence[DraftLayer], verify_lens: Tensor, accept_lens: Tensor, request: Tensor
) -> dict[str, Tensor]:
    """Columns for the verified tokens of one step.

    ``layers`` are the judged layers, depth 1 first; ``verify_lens`` [B] and
    ``accept_lens`` [B] count the root and the bonus token; ``request`` [B] int64.
    A chain of 3 drafts whose first is accepted gives accept 1, 0, 0.
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
    verify_lens, accept_lens = verify_lens.cpu(), accept_lens.cpu()
    for layer in layers:
        verified = verify_lens > layer.depth  # [B]
        num_rows = int(verified.sum())
        columns["joint"].append(layer.joint.cpu()[verified])
        columns["entropy"].append(layer.entropy.cpu()[verified])
        columns["prob"].append(layer.prob.cpu()[verified])
        columns["depth"].append(torch.full((num_rows,), layer.depth, dtype=torch.uint8))
        columns["accept"].append((accept_lens > layer.depth)[verified].to(torch.uint8))
        columns["request"].append(request[verified])
    return {name: torch.cat(parts) for name, parts in columns.items()}
