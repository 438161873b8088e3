"""What is known about a request's next first token, from one step to the next.

SGLang drafts the first token (in trees: the first layer) of a step at the end of the step
before, in draft extend. What was measured there waits in a table with one row per request
slot, because between two steps requests come, go and change places.

On a GPU most gates are kernels (:mod:`sglang_c2t.kernels.gate`) that measure and judge at
once. In exploring steps, on a CPU, and where the policy has no such kernel, measuring and
the policy are torch. Both read and write the same table.

A policy may be anybody's and may raise anything while it serves. Then the drafts of the step
go on whole: the same output, and no saving (:meth:`FirstTokenRelay._fall_back`).

Knows nothing of SGLang.

Legend: B requests, V draft vocabulary.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.checks import told
from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import HISTORY, measure, unknown
from sglang_c2t.kernels.gate import GateProgram, judge_layer
from sglang_c2t.policies.fused import fused_gate

logger = logging.getLogger(__name__)

#: What a :class:`GateProgram` says about a first token.
JUDGED = ("prob", "entropy", "margin", "confidence")


class Exploration:
    """Which steps verify full drafts so that they can be recorded. Here: none.

    A gate that ends drafts hides exactly the tokens it distrusts; labels are only
    uncensored in steps it does not touch.
    """

    names: frozenset[str] = frozenset()
    """What to measure in an exploring step beyond the policy's needs."""

    def next_step_explores(self) -> bool:
        """Asked once per step, before the first token of the next step is measured."""
        return False


class FirstTokenRelay:
    """Keeps the measurements of each request's next first token.

    Args:
        policy: Has ``name`` and ``needs``, what it reads beyond ``prob`` and ``entropy``.
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Where draft logits live.
        topk: Children per row.
        program: The policy's gate as a kernel program. ``None``: on CUDA
            :func:`~sglang_c2t.policies.fused.fused_gate`'s, if it has one; elsewhere none.
        exploration: Which steps are left whole.
        agree: Makes an integer tensor equal on all tensor-parallel ranks, in place or not,
            and returns it. Identity on one rank.
        recording: Whether some rank explores; only one of them knows when.

    Raises:
        ConfigError: The policy reads a request's history, which only replay supplies.
    """

    def __init__(
        self,
        policy: Any,
        *,
        num_slots: int,
        device: torch.device | str,
        topk: int = 1,
        program: GateProgram | None = None,
        exploration: Exploration | None = None,
        agree: Callable[[Tensor], Tensor] = lambda decision: decision,
        recording: bool = False,
    ) -> None:
        _refuse_history(policy)
        self._exploration = exploration or Exploration()
        self._agree = agree
        self._recording = recording
        self._topk = topk
        self._table = _SlotTable(num_slots, device)
        self._needs: frozenset[str] = frozenset()
        self._fuses = program is not None or torch.device(device).type == "cuda"
        self._program = program or self._fused(policy)
        self._adopt(policy)
        self.fell_back = False
        """Whether the policy failed in the step in progress, so that nothing more is cut."""
        self.capturing = False
        """Whether what is launched goes into a CUDA graph: a failure there is no step's."""
        self._opted_out: set[int] = set()
        self._whole = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._names: frozenset[str] = frozenset()  # measured in the step in progress
        self.exploring = self._explores()
        """Whether the step in progress, or behind its last token the next one, verifies full
        drafts."""

    @property
    def program(self) -> GateProgram | None:
        """What judges the step in progress; ``None``: the policy, or nobody as it explores."""
        return None if self.exploring else self._program

    def switch(self, policy: Any, *, captured: bool) -> None:
        """Ask another policy from the next step on.

        First tokens that wait in the table were measured for the old one. What the new one
        reads beyond that is unknown of them, or stale: for one step it may decide badly.

        Args:
            policy: As in the constructor.
            captured: CUDA graphs hold the kernels of the old one, so that only their data
                can be replaced: the program must read the same features, with a network of
                the same size.

        Raises:
            ConfigError: The policy cannot be served; the old one stays.
        """
        _refuse_history(policy)
        program = self._fused(policy)
        fits = program is not None and self._program is not None and program.fits(self._program)
        if captured and not fits:
            raise ConfigError(
                f"policy {policy.name} cannot take over in captured CUDA graphs, whose gate reads "
                f"{', '.join(self._program.names) if self._program else 'what its policy does'}: "
                "choose a policy that reads the same, or start the server with it"
            )
        self._adopt(policy)
        if captured and program is not None and self._program is not None:
            self._program.buffer.copy_(program.buffer)
        else:
            self._program = program

    def opt(self, slots: Sequence[int], out: Sequence[bool]) -> None:
        """Requests take ``slots`` [B]; the drafts of those that opt ``out`` [B] stay whole.

        Writes to the device only where a slot's answer changes: hardly ever, and then at the
        prefill of its request.
        """
        changed = {s: o for s, o in zip(slots, out, strict=True) if o != (s in self._opted_out)}
        if not changed:
            return
        self._opted_out = (self._opted_out | changed.keys()) - {
            s for s, o in changed.items() if not o
        }
        rows = torch.tensor(list(changed), device=self._whole.device)
        self._whole[rows] = torch.tensor(list(changed.values()), device=self._whole.device)

    @property
    def anyone_opted_out(self) -> bool:
        """Whether some slot's last request opted out; its request may have ended."""
        return bool(self._opted_out)

    def join(self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Requests [B] enter with the logits [B, V] of the first token behind their prompt.

        Everything is measured, because it is not known yet which kind of step comes next.
        """
        self._relay(slots, logits, hidden, self._exploration.names)

    def relay_first_token(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None
    ) -> None:
        """Remember the statistics of each request's next first token.

        ``slots`` is [B] (``req_pool_indices``), ``logits`` [B, V] of the draft, ``hidden``
        [B, H] its hidden state.
        """
        self.exploring = self._explores()
        extra = self._exploration.names if self.exploring else frozenset()
        self._relay(slots, logits, hidden, extra)

    def first_tokens_complete(self, slots: Tensor) -> Tensor:
        """[B] bool: the first tokens of this step carry all that exploration measures."""
        return self._table.get("complete", slots).bool()

    def _whole_of(self, slots: Tensor) -> Tensor | None:
        """[B] bool: whose drafts stay whole; ``None``: nobody's.

        A CUDA graph is captured once for all, hence never ``None`` there.
        """
        return self._whole[slots] if self._opted_out or self._whole.is_cuda else None

    def _fused(self, policy: Any) -> GateProgram | None:
        """The policy's program where gates are kernels."""
        device = self._table.device
        return fused_gate(policy, device, topk=self._topk) if self._fuses else None

    def _adopt(self, policy: Any) -> None:
        """Bring what the policy reads to where the logits are."""
        classifier = getattr(getattr(policy, "gate", policy), "classifier", None)
        if isinstance(classifier, Classifier):
            classifier.to(self._table.device)  # torch asks it there, program or not
        needs = frozenset(policy.needs)
        for name in needs - {"hidden"}:
            self._table.reserve(name)  # a captured CUDA graph must not make them
        self._needs = needs
        self._failure_told = False

    def _begin(self, slots: Tensor) -> dict[str, Tensor]:
        """A step starts: what was relayed for the requests in ``slots`` [B], by name."""
        self.fell_back = False
        extra = self._exploration.names if self.exploring else frozenset()
        self._names = self._needs | extra
        if self.program is not None:
            return self._table.get_judged(slots)
        return {name: self._table.get(name, slots) for name in ("prob", "entropy", *self._names)}

    def _fall_back(self, policy: Any, error: Exception) -> None:
        """The policy failed: for the rest of the step nothing is cut.

        One log line per policy. In a captured graph the failure would be replayed for ever, so
        there it is a :class:`ConfigError`.
        """
        if self.capturing:
            raise ConfigError(
                f"policy {policy.name} fails in a CUDA graph: {told(error)}; choose another, or "
                "add --cuda-graph-backend-decode disabled"
            ) from error
        self.fell_back = True
        if not self._failure_told:
            self._failure_told = True
            frames = traceback.extract_tb(error.__traceback__)
            logger.error(
                "C2T: policy %s failed, and drafts stay whole where it does: %s (%s, line %s)",
                policy.name,
                told(error),
                frames[-1].filename,
                frames[-1].lineno,
            )

    def _explores(self) -> bool:
        explores = self._exploration.next_step_explores()
        if self._recording:
            flag = torch.tensor([int(explores)], device=self._table.device)
            explores = bool(self._agree(flag))  # once per step, and only while recording
        return explores

    def _relay(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None, extra: frozenset[str]
    ) -> None:
        if self._program is not None:
            said = judge_layer(logits, self._program, depth=1, topk=1)
            self._table.put_judged(
                slots, said.prob[:, 0], said.entropy, said.margin[:, 0], said.confidence[:, 0]
            )
        measured: dict[str, Tensor] = {}
        if self._program is None or extra:
            measured = measure(logits, self._needs | extra, hidden=hidden)
            for name, value in measured.items():
                self._table.put(name, slots, value)
        if self._exploration.names:
            complete = float(self._exploration.names <= measured.keys())
            self._table.put("complete", slots, torch.full((1,), complete))


def _refuse_history(policy: Any) -> None:
    if history := policy.needs & HISTORY:
        raise ConfigError(
            f"policy {policy.name} reads {', '.join(sorted(history))}: experimental, in replay "
            "only; choose another --c2t-policy"
        )


class _SlotTable:
    """One row per request slot and name, made when the name is first seen.

    Except :data:`JUDGED`: these stand together, so that one launch writes or reads them all.
    """

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._num_slots = num_slots
        self.device = device
        certain = torch.cat([unknown(name) for name in JUDGED]).to(device)
        self._judged = certain[:, None].repeat(1, num_slots)  # [names, num_slots]
        # [num_slots] or [num_slots, width]
        self._columns: dict[str, Tensor] = dict(zip(JUDGED, self._judged, strict=True))

    def put_judged(self, slots: Tensor, *columns: Tensor) -> None:
        """Write :data:`JUDGED`, each [B] float32, to the rows ``slots`` [B]."""
        self._judged[:, slots] = torch.stack(columns)

    def get_judged(self, slots: Tensor) -> dict[str, Tensor]:
        """:data:`JUDGED` by name, each [B] float32, contiguous and the caller's own."""
        return dict(zip(JUDGED, self._judged.index_select(1, slots), strict=True))

    def reserve(self, name: str) -> None:
        """Make the column of one number per request, or of a known width."""
        self._column(name, 1)

    def put(self, name: str, slots: Tensor, value: Tensor) -> None:
        """Write ``value`` [B, ...] (or [1, ...] for all) to the rows ``slots`` [B]."""
        self._column(name, value.shape[-1])[slots] = value.to(self.device, torch.float32)

    def get(self, name: str, slots: Tensor) -> Tensor:
        """[B, ...] float32; what :func:`unknown` says where nobody ever wrote."""
        return self._column(name, 1)[slots]

    def _column(self, name: str, width: int) -> Tensor:
        if name not in self._columns:
            row = unknown(name, width).to(self.device)
            self._columns[name] = row.repeat(self._num_slots, *([1] * (row.dim() - 1)))
        return self._columns[name]
