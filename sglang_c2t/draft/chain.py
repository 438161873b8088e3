"""Draft chains of a batch: which may still grow and where each ends.

A chain of request b is its root (the committed bonus token, always verified) followed
by up to D drafted tokens. ``verify_lens[b]`` counts the rows the target verifies, root
included, so it lies in [1, D + 1]::

    request 0   root a b c      verify_lens 4
    request 1   root x          verify_lens 2

Legend: B requests, N = D + 1 rows of a full chain, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft.gate import Gate
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.kernels.gate import judge_layer
from sglang_c2t.kernels.gate_program import GateOutput
from sglang_c2t.policies.base import ChainPolicy, kept


class ChainGate(Gate):
    """Asks the policy after each drafted layer and keeps its decisions per request. With a program,
    :func:`~sglang_c2t.kernels.gate.judge_layer` judges a layer in one call and updates the state in
    place. It launches nothing else and makes no :class:`DraftLayer`.
    """

    def __init__(self, policy: ChainPolicy, **parts: Any) -> None:
        super().__init__(policy, **parts)
        self._depth = 0
        self._layers: list[DraftLayer] = []
        self._alive = torch.ones(0, dtype=torch.bool)  # [B]
        self._num_kept = torch.zeros(0, dtype=torch.int32)  # [B]
        self._keeps_all: Tensor | None = None  # [B] bool; None: no request opted out
        self._joint = torch.ones(0)  # [B]; updated only with a program
        self._output: GateOutput
        self.confidences: list[Tensor] = []
        """[B] of each layer judged in this step, for a planner."""

    def begin(self, slots: Tensor) -> None:
        """Start a step for the requests in ``slots`` [B] and judge their first tokens."""
        self._start()
        self._depth = 0
        self._layers, self.confidences = [], []
        self._keeps_all = self.opt_outs.whole(slots) if self.cuts else None
        if self.program is None:
            self._alive = torch.ones(slots.shape, dtype=torch.bool, device=slots.device)
            self._num_kept = torch.zeros(slots.shape, dtype=torch.int32, device=slots.device)
            self._judge(self._measured_first(slots))
            return
        first = self.first_tokens.judged(slots)
        self._depth = 1
        self._joint = first.prob[0]
        if self.planned:
            self.confidences.append(first.confidence[0])
        self._output = GateOutput.empty(len(slots), 1, slots.device)._replace(
            joint=self._joint[:, None], confidence=first.confidence[0][:, None]
        )
        if self.cuts:
            self._alive = first.confidence[0] >= self.program.beta
            self._output = self._output._replace(keep=self._alive[:, None])  # judged in place
            self._num_kept = self._alive.int()

    def observe(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Judge the next drafted layer from its draft ``logits`` [B, V]."""
        self._logits = logits.shape[1], logits.dtype
        if self.program is None:
            self._judge(self.served.measured(logits, self._names, hidden))
            return
        self._depth += 1
        if self.planned:  # each layer has its own tensor
            fresh = torch.empty_like(self._output.confidence)
            self._output = self._output._replace(confidence=fresh)
            self.confidences.append(fresh[:, 0])
        judge_layer(
            logits,
            self.program,
            depth=self._depth,
            topk=1,
            joint=self._joint,
            alive=self._alive if self.cuts else None,
            num_kept=self._num_kept if self.cuts else None,
            out=self._output,
            tokens=False,  # SGLang's loop chooses them
        )

    @property
    def cuts(self) -> bool:
        """Whether the gate ends chains; with a planner it does not. Graphs captured for a planner
        also serve the policies that replace it.
        """
        return not self.planned or self.exploring or self.served.capturing

    def any_alive(self) -> bool:
        """Whether any chain may still grow. Copies to the host: eager mode only. All ranks get the
        same answer, because it decides whether they run a forward.
        """
        alive = self._alive if self._keeps_all is None else self._alive | self._keeps_all
        return bool(self.agreed(alive.to(torch.uint8)).any())

    @property
    def verify_lens(self) -> Tensor:
        """[B] int32 in [1, D + 1]: rows to verify, root included, on this rank. Chains of requests
        that opted out end at the last judged layer. Static shapes and no host read, so a CUDA graph
        may contain it.
        """
        kept = self._num_kept
        if self._keeps_all is not None:
            kept = kept.masked_fill(self._keeps_all, self._depth)
        return kept + 1

    @property
    def depth(self) -> int:
        """Layers judged in this step."""
        return self._depth

    @property
    def layers(self) -> list[DraftLayer]:
        """The layers judged in this step, shallowest first; none if a program judged them."""
        return self._layers

    def _judge(self, stats: dict[str, Tensor]) -> None:
        parent = self._layers[-1] if self._layers else None
        joint = stats["prob"] if parent is None else stats["prob"] * parent.joint
        self._depth += 1
        layer = DraftLayer(
            depth=self._depth,
            prob=stats["prob"],
            joint=joint,
            entropy=stats["entropy"],
            alive=self._alive,
            measured=stats,
            parent=parent,
        )
        self._alive = self._kept(layer)
        self._num_kept = self._num_kept + self._alive
        self._layers.append(layer)

    def _kept(self, layer: DraftLayer) -> Tensor:
        """[B] bool: chains that continue; if the policy failed, all that continue so far."""
        if self.exploring or self.fell_back:
            return self._alive
        try:
            return kept(self.served.policy, layer)
        except Exception as error:
            self._fall_back(error)
            return self._alive


def matched_drafts(draft_tokens: Tensor, target_tokens: Tensor) -> Tensor:
    """[B] int64 in [0, D]: drafts that a greedy target would accept. ``draft_tokens`` [B, D + 1]
    starts with the root. ``target_tokens`` [B, D + 1] is the target's choice after each of them.
    Drafts a b c, target a x c: 1.
    """
    return (draft_tokens[:, 1:] == target_tokens[:, :-1]).long().cumprod(dim=1).sum(dim=1)
