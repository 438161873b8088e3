"""Replay a policy on recorded drafts, without a model.

A recording of every root (``roots: every``) holds the draft after each token of each answer. Greedy
answers do not depend on the policy, so the replay takes the same steps as a live server. At a root
the policy's own code decides how many drafts are verified. The recorded labels give how many are
accepted, and the next root comes after them. Only :mod:`policies` and the gate decide; this file
counts. It replays chains; ``eval/tables/tree_replay.py`` replays trees.

Legend: R roots, D drafted tokens, Q requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sglang_c2t.classifier.recording import MEASURED, NODE_COLUMNS, Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.policies.base import ChainPolicy, Gate, TreePolicy


@dataclass(frozen=True)
class Roots:
    """Roots of a recording, sorted by request and position."""

    first_root: Tensor
    """[Q + 1] int64: the roots of request q are first_root[q] .. first_root[q + 1] - 1."""

    requests: list[str]
    """Ids [Q], in the order of ``first_root``, without requests that have no draft."""

    draft_row: Tensor
    """[R] int64: row of the recording's draft table."""

    left_out: int = field(default=0, kw_only=True)
    """Requests that lack roots: one of their steps had no drafts, or was not recorded."""

    @property
    def num_requests(self) -> int:
        """Q: number of recorded answers."""
        return len(self.requests)

    @classmethod
    def from_recording(cls, recording: Recording) -> Roots:
        """Select requests with a draft after every token; :class:`ConfigError` if there is none."""
        if recording.roots != "every":
            raise ConfigError(
                "this recording holds only the roots that its server visited: replay needs one "
                "made with --c2t-record-roots every"
            )
        drafts = recording.drafts
        # Two stable sorts: by position within request.
        order = drafts["position"].argsort(stable=True)
        order = order[drafts["request"][order].argsort(stable=True)]
        request = drafts["request"][order].long()
        position = drafts["position"][order].long()
        gaps = (position[1:] - position[:-1] != 1) & (request[1:] == request[:-1])
        cut = request[1:][gaps].unique()
        whole = ~torch.isin(request, cut)
        if len(cut) and not bool(whole.any()):
            raise ConfigError(
                f"request {recording.requests[int(cut[0])]} lacks roots, as all of them do: the "
                "recording was cut, record it again"
            )
        order = order[whole]
        roots_of = torch.bincount(request[whole], minlength=len(recording.requests))
        seen = roots_of > 0
        return Roots(
            first_root=torch.cat((torch.zeros(1, dtype=torch.long), roots_of[seen].cumsum(0))),
            requests=[rid for rid, here in zip(recording.requests, seen, strict=True) if here],
            draft_row=order,
            left_out=len(cut),
        )


@dataclass(frozen=True)
class Chains(Roots):
    """Recorded chains as a table."""

    stats: dict[str, Tensor]
    """Measurements by name, each [R, D] or [R, D, width]."""

    num_correct: Tensor
    """[R] int64: leading drafts that the target accepts."""

    @property
    def max_length(self) -> int:
        """D: drafts recorded after each root."""
        return self.stats["prob"].shape[1]

    @classmethod
    def from_recording(cls, recording: Recording) -> Chains:
        """Build the table; :class:`ConfigError` unless the recording holds one chain per token."""
        if recording.topk > 1:
            raise ConfigError(
                f"this recording holds trees (topk {recording.topk}), chains are replayed on a "
                "recording of a server with --speculative-eagle-topk 1"
            )
        roots = Roots.from_recording(recording)
        nodes, order = recording.nodes, roots.draft_row
        lengths = torch.bincount(nodes["draft"].long(), minlength=recording.num_drafts)
        width = int(lengths.max())
        if int(lengths.min()) != width or bool((nodes["rank"] != 0).any()):
            raise ConfigError("replay needs whole chains of one length, got drafts of several")
        names = sorted(set(nodes) - set(NODE_COLUMNS) | MEASURED | {"prob", "entropy"})
        accept = nodes["accept"].view(recording.num_drafts, width)[order]
        return cls(
            stats={
                n: nodes[n].view(recording.num_drafts, width, *nodes[n].shape[1:])[order]
                for n in names
            },
            num_correct=accept.long().cumprod(dim=1).sum(dim=1),
            **vars(roots),
        )

    def lengths(self, policy: ChainPolicy, roots: Tensor) -> Tensor:
        """[len(roots)] int64 in [0, D]: drafts that the policy would verify at these roots."""
        alive = torch.ones(len(roots), dtype=torch.bool)
        kept = torch.zeros(len(roots), dtype=torch.long)
        for layer in self._layers(policy, roots):
            alive = policy.keep(replace(layer, alive=alive)) & alive
            kept = kept + alive
            if not alive.any():
                break
        return kept

    def confidences(self, policy: Gate) -> Tensor:
        """[R, D] float32: confidence of every recorded draft."""
        roots = torch.arange(len(self.num_correct))
        return torch.stack([policy.confidence(layer) for layer in self._layers(policy, roots)], 1)

    def _layers(self, policy: ChainPolicy, roots: Tensor) -> Iterator[DraftLayer]:
        """Yield the recorded drafts of these roots layer by layer, all of them alive."""
        layer: DraftLayer | None = None
        names = {"prob", "entropy"} | policy.needs
        for depth in range(1, self.max_length + 1):
            stats = {name: self.stats[name][roots, depth - 1].float() for name in names}
            layer = DraftLayer(
                depth=depth,
                prob=stats["prob"],
                joint=stats["prob"] if layer is None else stats["prob"] * layer.joint,
                entropy=stats["entropy"],
                alive=torch.ones(len(roots), dtype=torch.bool),
                measured=stats,
                parent=layer,
            )
            yield layer


@dataclass(frozen=True)
class Outcome:
    """Counts per request [Q], float64, which are summed before a division."""

    num_steps: Tensor
    """Verifications."""

    num_correct: Tensor
    """Accepted drafts, including those after the end of an answer, as SGLang counts."""

    num_proposed: Tensor
    """Drafts that the target verified."""

    num_drafted: Tensor
    """Drafts that the draft model made: verified ones, and the one that ended each chain."""

    def accept_length(self) -> float:
        """tau: tokens per verification, the bonus token included."""
        return 1.0 + self._per_step(self.num_correct)

    def gamma(self) -> float:
        """Drafts verified per verification."""
        return self._per_step(self.num_proposed)

    def drafted_length(self) -> float:
        """Drafts made per verification, the papers' average length."""
        return self._per_step(self.num_drafted)

    def _per_step(self, counts: Tensor) -> float:
        return float(counts.sum() / self.num_steps.sum())


def replay(
    policy: ChainPolicy,
    chains: Chains,
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> Outcome:
    """Serve all requests of ``chains`` with ``policy``.

    Args:
        policy: Any chain policy.
        chains: Recorded chains.
        max_length: Drafted tokens per step; all that were recorded by default.
        batch_size: Requests served together; the next one joins when one is done. It affects only a
            policy that stops whole batches, whose default is 1.

    Raises:
        ConfigError: The policy reads measurements that were not recorded.
    """
    refuse_unrecorded(policy, chains.stats)
    whole_batch = getattr(policy, "batch_wide", False)
    if batch_size is None:
        batch_size = 1 if whole_batch else chains.num_requests
    limit = chains.max_length if max_length is None else min(max_length, chains.max_length)
    if not whole_batch:  # then one call decides all roots, and each step is a table look-up
        table = chains.lengths(policy, torch.arange(int(chains.first_root[-1])))

    def step(at: Tensor) -> tuple[Tensor, ...]:
        kept = (chains.lengths(policy, at) if whole_batch else table[at]).clamp(max=limit)
        return torch.minimum(chains.num_correct[at], kept), kept, (kept + 1).clamp(max=limit)

    return Outcome(*walk(chains.first_root, step, batch_size))


def walk(
    first_root: Tensor, step: Callable[[Tensor], tuple[Tensor, ...]], batch_size: int
) -> Tensor:
    """[1 + C, Q] float64: number of steps, and the sums of the counts of ``step``. ``step`` gets
    roots [L] and returns C counts [L] int64, accepted drafts first. ``first_root`` [Q + 1] and
    ``batch_size`` are those of :func:`replay`.
    """
    root, end = first_root[:-1].clone(), first_root[1:]
    num_steps = torch.zeros(len(root), dtype=torch.float64)
    sums: list[Tensor] = []
    while len(lane := (root < end).nonzero().flatten()[:batch_size]):
        at = root[lane]
        counts = step(at)
        sums = sums or [torch.zeros_like(num_steps) for _ in counts]
        num_steps[lane] += 1
        for total, count in zip(sums, counts, strict=True):
            total[lane] += count.double()
        root[lane] = at + counts[0] + 1
    return torch.stack((num_steps, *sums))


def refuse_unrecorded(policy: ChainPolicy | TreePolicy, recorded: Collection[str]) -> None:
    """Raise :class:`ConfigError` if the policy reads measurements that are not in ``recorded``."""
    if missing := sorted(policy.needs - set(recorded)):
        raise ConfigError(
            f"policy {policy.name} reads {', '.join(missing)}, which this recording lacks: record "
            "again with a policy that measures it"
        )
