"""The gate of a batch: the parts that chains and trees share.

A step calls ``begin``, which judges the relayed first layer, then ``observe`` per drafted layer. At
its end ``relay_first_token`` measures the first layer of the next step. Chains (``chain.py``) and
trees (``tree.py``) define what a judged layer changes.

Legend: B requests, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.draft.served import ServedPolicy
from sglang_c2t.draft.slots import FirstTokens, OptOuts
from sglang_c2t.draft_layer import known_measurement
from sglang_c2t.kernels.gate import judge_layer
from sglang_c2t.kernels.gate_program import FusedGate


class Exploration:
    """Which steps verify full drafts so that they can be recorded. The base class: none. A gate
    that ends drafts hides exactly the tokens it distrusts. Only steps without a gate have
    uncensored labels.
    """

    names: frozenset[str] = frozenset()
    """Measurements of an exploration step beyond the policy's needs."""

    def next_step_explores(self) -> bool:
        """Called once per step, before the first token of the next step is measured."""
        return False


class Gate:
    """Judges the drafts of a batch, layer by layer.

    Args:
        policy: See :class:`~sglang_c2t.draft.served.ServedPolicy`.
        num_slots: Rows of SGLang's ``req_to_token`` table.
        device: Device of the draft logits.
        topk: Children per row.
        exploration: Which steps verify full drafts.
        agree: Returns rank 0's integer tensor on all tensor-parallel ranks, in place or not;
            ``None`` on one rank.
        recording: Whether some rank explores; only one rank knows when.

    Raises:
        ConfigError: The policy cannot be served.
    """

    def __init__(
        self,
        policy: Any,
        *,
        num_slots: int,
        device: torch.device | str,
        topk: int = 1,
        exploration: Exploration | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
        recording: bool = False,
    ) -> None:
        self.served = ServedPolicy(policy, device=device, topk=topk)
        self.first_tokens = FirstTokens(num_slots, device, topk)
        self.opt_outs = OptOuts(num_slots, device)
        self._exploration = exploration or Exploration()
        self._agree = agree
        self._recording = recording
        self._relay_later: Callable[[], None] | None = None
        """Measures the first layer of the next step, if that is delayed until a step reads it."""
        self._topk = topk
        self._reserve()
        self.fell_back = False
        """Whether the policy failed in the current step, so that the gate cuts nothing more."""
        self._names: frozenset[str] = frozenset()  # measured in the current step
        self._logits: tuple[int, torch.dtype] | None = None  # V and dtype of the observed layers
        self.exploring = self._explores()
        """Whether the current step verifies full drafts; after its last token, whether the next
        does.
        """

    @property
    def program(self) -> FusedGate | None:
        """The program that judges this step; ``None``: the policy judges, or the step explores."""
        return None if self.exploring else self.served.program

    @property
    def planned(self) -> bool:
        """Whether the policy's planner decides which drafts are verified."""
        return self.served.plans

    def agreed(self, decision: Tensor) -> Tensor:
        """Return rank 0's ``decision`` on all ranks."""
        return decision if self._agree is None else self._agree(decision)

    def switch(self, policy: Any, *, captured: bool) -> None:
        """Replace the policy; see :meth:`ServedPolicy.switch`."""
        self.served.switch(policy, captured=captured)
        self._reserve()

    def forget_first_layers(self) -> None:
        """Forget all first layers in the next step, after the device has finished the last one."""
        self._relay_later = partial(self.first_tokens.forget, slice(None))

    def join(self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Add requests [B] with the logits [B, V] of the first token after their prompts. The gate
        measures everything, because the kind of the next step is not known yet.
        """
        self.catch_up()
        self._relay(slots, logits, hidden, self._exploration.names)

    def join_unmeasured(self, slots: Tensor) -> None:
        """Add requests [B] whose prompt ran on another server; their first draft is kept."""
        self.catch_up()  # its slots may have been freed and reused
        self.first_tokens.forget(slots)

    def relay_first_token(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None = None, *, later: bool = False
    ) -> None:
        """Store the measurements of each request's next first layer.

        Args:
            slots: [B] (``req_pool_indices``).
            logits: [B, V] of the draft.
            hidden: [B, H], its hidden state.
            later: Delay this until a step reads it: after most uniform steps none does.
        """
        if later and not self._recording and not self._exploration.names:
            self._relay_later = partial(self.relay_first_token, slots, logits, hidden)
            return
        self._relay_later = None
        self.exploring = self._explores()
        self._relay(slots, logits, hidden, self._extra_names)

    def warm_up(self) -> None:
        """Compile the kernel for first tokens, with logits shaped like the observed layers.
        Captured graphs use another kernel, for layers with parents.
        """
        if self.served.program is not None and self._logits is not None:
            columns, dtype = self._logits
            logits = torch.zeros((1, columns), dtype=dtype, device=self.first_tokens.device)
            dummy_slot = torch.zeros(1, dtype=torch.int64, device=logits.device)
            self._judge_first(dummy_slot, logits, self.served.program)

    def first_tokens_complete(self, slots: Tensor) -> Tensor:
        """[B] bool: the first tokens of this step have all measurements that exploration needs."""
        return self.first_tokens.get("complete", slots).bool()

    @property
    def _extra_names(self) -> frozenset[str]:
        return self._exploration.names if self.exploring else frozenset()

    def catch_up(self) -> None:
        """Measure the delayed first layers."""
        if self._relay_later is not None:
            self._relay_later()
            self._relay_later = None

    def _start(self) -> None:
        """Start a step."""
        self.catch_up()
        self.fell_back = False
        self._names = self.served.needs | self._extra_names

    def _measured_first(self, slots: Tensor) -> dict[str, Tensor]:
        """Return torch's measurements of the first tokens of ``slots`` [B], by name."""
        names = ("prob", "entropy", *self._names)
        return {name: self.first_tokens.get(name, slots) for name in names}

    def _fall_back(self, error: Exception) -> None:
        """Cut nothing for the rest of the step, because the policy raised ``error``."""
        self.served.failed(error)
        self.fell_back = True

    def _explores(self) -> bool:
        explores = self._exploration.next_step_explores()
        if self._recording:
            flag = torch.tensor([int(explores)], device=self.first_tokens.device)
            explores = bool(self.agreed(flag))  # once per step, and only while recording
        return explores

    def _relay(
        self, slots: Tensor, logits: Tensor, hidden: Tensor | None, extra: frozenset[str]
    ) -> None:
        program = self.served.program
        if program is not None:
            self._judge_first(slots, logits, program)
        measured: dict[str, Tensor] = {}
        if program is None or extra:
            measured = self.served.measured(logits, self.served.needs | extra, hidden)
            for name, value in measured.items():
                self.first_tokens.put(name, slots, value)
        if self._exploration.names:
            complete = float(self._exploration.names <= measured.keys())
            self.first_tokens.put("complete", slots, torch.full((1,), complete))

    def _judge_first(self, slots: Tensor, logits: Tensor, program: FusedGate) -> None:
        relay = self.first_tokens.relay(slots)
        judge_layer(logits, program, depth=1, topk=self._topk, tokens=False, relay=relay)

    def _reserve(self) -> None:
        """Allocate the table's columns, because a captured CUDA graph must not."""
        for name in ("prob", "entropy", *filter(known_measurement, self.served.needs)):
            self.first_tokens.reserve(name)
