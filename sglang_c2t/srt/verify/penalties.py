"""Penalties and minimum lengths for each verified row, as in decoding token by token.

SGLang applies the counts of a verification's first row to all rows, and counts one token a step.
Here row i counts the request's output and the drafts on its own path, itself included. So the row
samples the same token as plain decoding. Counts come from the device, because the host learns a
step's tokens after it has launched the next step.

Legend: B requests, N most rows of a request, R verified rows, L output tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from torch import Tensor

from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.requests import asks
from sglang_c2t.srt.verify.packing import sent
from sglang_c2t.tree import visible_nodes

#: First capacity of the table, in output tokens.
ROOM = 256


class Rows(NamedTuple):
    """The rows of a verification, and the tokens on their paths."""

    request: Tensor
    """[R] int64: the request of each row."""

    tokens: Tensor
    """[R, N] int64: the root, the drafts before it and the row's own token; V elsewhere."""

    lengths: Tensor
    """[R] int64: output tokens of its request before the token that the row samples."""

    @classmethod
    def of(cls, verify_input: Any, prompts: Tensor, vocab: int) -> Rows:
        """Collect the rows of a target forward; ``prompts`` [B] are the prompts' lengths."""
        packing, width = verify_input.packing, verify_input.draft_token_num
        drafts = verify_input.draft_token.long().view(-1, 1, width)
        parents = None if packing is None else packing.parents
        if parents is None:
            sees = torch.ones(1, width, width, dtype=torch.bool, device=drafts.device).tril()
        else:
            sees = visible_nodes(parents, verify_input.max_tree_depth - 1)
        tokens = torch.where(sees, drafts, vocab).flatten(0, 1)
        positions = verify_input.positions
        if packing is None:
            request = torch.arange(len(tokens), device=tokens.device) // width
        else:
            request, rows = packing.request, packing.rows
            tokens, positions = tokens[rows], positions[rows]
        return cls(request, tokens, positions - prompts[request] + 1)


class Penalties(NamedTuple):
    """Penalties of B requests; ``None`` if no request has this one."""

    frequency: Tensor | None  # [B] float32, as the next two
    presence: Tensor | None
    repetition: Tensor | None
    min_new_tokens: Tensor | None  # [B] int64
    stop_tokens: Tensor | None  # [B, S] int64, padded with -1

    @classmethod
    def of(cls, reqs: list[Any], vocab: int, device: Any) -> Penalties:
        """Read the penalties from SGLang's requests."""
        params = [req.sampling_params for req in reqs]

        def asked(name: str, neutral: float) -> Tensor | None:
            values = [getattr(each, name) for each in params]
            if all(value == neutral for value in values):
                return None
            return sent(torch.tensor(values, dtype=torch.float32), device)

        least = [each.min_new_tokens for each in params]
        # The host's outputs may lag by a step, so a minimum may apply too long but never too short.
        short = any(n > len(req.output_ids) for n, req in zip(least, reqs, strict=True))
        asking = zip(least, reqs, strict=True) if short else ()
        stops = [_stop_tokens(req, vocab) if n else [] for n, req in asking]
        most = max(map(len, stops), default=0)
        padded = torch.tensor([[*each, *[-1] * (most - len(each))] for each in stops])
        return cls(
            asked("frequency_penalty", 0.0),
            asked("presence_penalty", 0.0),
            asked("repetition_penalty", 1.0),
            sent(torch.tensor(least), device) if short else None,
            sent(padded.long(), device) if short else None,
        )

    def apply(self, logits: Tensor, rows: Rows, before: Tensor) -> None:
        """Apply the penalties to logits [R, V] in place, in the order of SGLang's plain sampler.
        ``before`` [B, L] int64 are the tokens before each root, padded with V.
        """
        request = rows.request
        counts = self._counts(rows, before, logits.shape[1])
        if counts is not None and (self.frequency is not None or self.presence is not None):
            added = torch.zeros_like(counts)
            if self.frequency is not None:
                added -= counts * self.frequency[request, None]
            if self.presence is not None:
                added -= torch.where(counts > 0, self.presence[request, None], 0.0)
            logits.add_(added)
        if self.min_new_tokens is not None and self.stop_tokens is not None:
            stops = self.stop_tokens[request]
            masked = (rows.lengths < self.min_new_tokens[request])[:, None] & (stops >= 0)
            away = torch.zeros_like(stops, dtype=logits.dtype).masked_fill_(masked, -torch.inf)
            logits.scatter_add_(1, stops.clamp(min=0), away)
        if counts is not None and self.repetition is not None:
            scaling = torch.where(counts > 0, self.repetition[request, None], 1.0)
            apply_scaling_penalties(logits, scaling)

    def _counts(self, rows: Rows, before: Tensor, vocab: int) -> Tensor | None:
        """[R, V] float32: count of each token before the one to sample."""
        if self.frequency is None and self.presence is None and self.repetition is None:
            return None

        def add(counts: Tensor, tokens: Tensor) -> Tensor:
            return counts.scatter_add_(1, tokens, counts.new_ones(()).expand_as(tokens))

        # Column V counts the padding.
        zeros = torch.zeros(len(before), vocab + 1, dtype=torch.float32, device=before.device)
        return add(add(zeros, before)[rows.request], rows.tokens)[:, :vocab]


class OutputHistory:
    """Output tokens of requests with penalties or logit processors, by request slot.

    It takes four bytes per slot and token of the longest such output, and nothing before the first
    such request. Tokens are indexed by their place in the output, so a retracted request overwrites
    what it wrote.

    Args:
        step: Most tokens that a step accepts: the host learns of them a step late.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._tokens: Tensor | None = None  # [slots, capacity] int32
        self._known: dict[int, tuple[str, int]] = {}  # by slot: request id, retractions

    def before(self, batch: Any, roots: Tensor, prompts: Tensor, vocab: int) -> Tensor:
        """[B, L] int64: each request's tokens before its root, padded with V; also stores the root.

        Args:
            batch: SGLang's, of B requests.
            roots: [B] int64 tokens, the last of each output.
            prompts: [B] int64 lengths.
            vocab: V.
            vocab: V.
        """
        reqs, slots = batch.reqs, batch.req_pool_indices
        said = [len(req.output_ids) for req in reqs if asks(req)]
        longest = max(said, default=0) + self._step
        tokens = self._reserved(batch.req_to_token_pool.req_to_token, longest + self._step + 1)
        for req in reqs:
            self._recall(req, tokens)
        length = self._lengths(batch, prompts)
        tokens[slots, length] = roots.to(torch.int32)
        place = torch.arange(longest, device=tokens.device)
        return tokens[:, :longest][slots].long().masked_fill_(place >= length[:, None], vocab)

    def keep(self, batch: Any, prompts: Tensor, accepted: tuple[Tensor, ...]) -> None:
        """Store the ``accepted`` result of ``eagle_sample``, without the root."""
        assert self._tokens is not None
        predict, _, index = accepted
        place = torch.arange(1, 1 + index.shape[1], device=index.device)
        # Entries after the path are garbage, which the next steps overwrite before it is read.
        places = self._lengths(batch, prompts)[:, None] + place
        self._tokens[batch.req_pool_indices[:, None], places] = predict[index.clamp(min=0).long()]

    def _lengths(self, batch: Any, prompts: Tensor) -> Tensor:
        """[B] int64: tokens before the root, clipped to the table where they do not matter."""
        assert self._tokens is not None
        most = self._tokens.shape[1] - self._step - 1
        return (batch.seq_lens.long() - prompts).clamp_(0, most)

    def _reserved(self, request_table: Tensor, room: int) -> Tensor:
        """Return the table, grown to hold ``room`` tokens per slot."""
        old = self._tokens
        if old is None or old.shape[1] < room:
            room = max(ROOM, 1 << (room - 1).bit_length())
            self._tokens = torch.zeros(
                len(request_table), room, dtype=torch.int32, device=request_table.device
            )
            if old is not None:
                self._tokens[:, : old.shape[1]] = old
        assert self._tokens is not None
        return self._tokens

    def _recall(self, req: Any, tokens: Tensor) -> None:
        """Write the earlier output of a request that was retracted, maybe to another slot."""
        if not asks(req):
            return
        slot, known = compat.request_slot(req), (req.rid, req.retraction_count)
        if self._known.get(slot) == known:
            return
        self._known[slot] = known
        if len(said := req.output_ids):
            tokens[slot, : len(said)] = sent(torch.tensor(said, dtype=torch.int32), tokens.device)


def prompt_lengths(reqs: list[Any], device: Any) -> Tensor:
    """[B] int64."""
    return sent(torch.tensor([len(req.origin_input_ids) for req in reqs]), device)


#: Tokens that may not come before a request's minimum length.
_STOPS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


class _Alone:
    """A batch of one request, for SGLang's penalizers."""

    device = "cpu"

    def __init__(self, req: Any, vocab: int) -> None:
        self._req, self.vocab_size = req, vocab

    def reqs(self) -> list[Any]:
        return [self._req]


def _stop_tokens(req: Any, vocab: int) -> list[int]:
    """Return the stop tokens of SGLang's own penalizer, which differ between its releases."""
    if req not in _STOPS:
        alone: Any = _Alone(req, vocab)
        penalizer = BatchedMinNewTokensPenalizer(alone)
        penalizer._prepare()
        _STOPS[req] = penalizer.stop_token_penalties[0].isinf().nonzero().flatten().tolist()
    return _STOPS[req]
