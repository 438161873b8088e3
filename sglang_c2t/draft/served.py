"""The policy that a server asks, and what becomes of the one before and of one that fails.

A policy may be anybody's and may raise anything while it serves. Then the drafts of the step
go on whole: the same output, and no saving.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.checks import told
from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.pair import Pair, learnt_from, origins_of
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import known_measurement, measure
from sglang_c2t.kernels.gate_program import FusedGate
from sglang_c2t.policies.base import own_measure
from sglang_c2t.policies.fused import fused_gate

logger = logging.getLogger(__name__)


def classifier_of(policy: Any) -> Classifier | None:
    """The classifier that a policy asks, if it does."""
    classifier = getattr(getattr(policy, "gate", policy), "classifier", None)
    return classifier if isinstance(classifier, Classifier) else None


def classifier_facts(policy: Any, pair: Pair | None) -> dict[str, Any] | None:
    """What a policy's classifier was trained on, and its quality there; ``None`` without one.

    Holds no paths. ``learnt_from`` says whether it was trained on the ``pair`` that is served.
    """
    classifier = classifier_of(policy)
    if classifier is None:
        return None
    facts = classifier.training
    names = {f"{origin.get('draft')} for {origin.get('target')}" for origin in origins_of(facts)}
    quality = ("heldout_auc", "heldout_ece", "calibration", "trained_on")
    return {
        "name": classifier.name,
        "learnt_from": learnt_from(facts, pair),
        "origins": sorted(names),
        **{name: facts.get(name) for name in quality},
    }


class ServedPolicy:
    """A policy and, where it has one, its gate as a program.

    Most gates are programs of :mod:`sglang_c2t.kernels.gate`, which measure and judge at once:
    kernels on a GPU, their torch twin on a CPU. Other policies are asked in torch.

    Args:
        policy: Has ``name`` and ``needs``, what it reads beyond ``prob`` and ``entropy``.
        device: Where draft logits live.
        topk: Children per row.
    """

    policy: Any
    program: FusedGate | None
    needs: frozenset[str]

    def __init__(self, policy: Any, *, device: torch.device | str, topk: int) -> None:
        self._device, self._topk = device, topk
        self.capturing = False
        """Whether what is launched goes into a CUDA graph: a failure there is no step's."""
        self._failure_told = False
        self.program = fused_gate(policy, device, topk=topk)
        self._adopt(policy)

    def switch(self, policy: Any, *, captured: bool) -> None:
        """Ask another policy from the next step on.

        First tokens that wait were measured for the old one. What the new one reads beyond that
        is unknown of them, or stale: for one step it may decide badly.

        Args:
            policy: As in the constructor.
            captured: CUDA graphs hold the kernels of the old one, so that only their data
                can be replaced: the program must read the same features, with a network of
                the same size.

        Raises:
            ConfigError: The policy cannot be served; the old one stays.
        """
        program = fused_gate(policy, self._device, topk=self._topk)
        fits = program is not None and self.program is not None and program.fits(self.program)
        if captured and not fits:
            raise ConfigError(
                f"policy {policy.name} cannot take over in captured CUDA graphs, whose gate reads "
                f"{', '.join(self.program.names) if self.program else 'what its policy does'}: "
                "choose a policy that reads the same, or start the server with it"
            )
        self._adopt(policy)
        if captured and program is not None and self.program is not None:
            self.program.buffer.copy_(program.buffer)
        else:
            self.program = program

    def measured(
        self, logits: Tensor, names: Collection[str], hidden: Tensor | None
    ) -> dict[str, Tensor]:
        """``names`` of the draft's ``logits`` [R, V], and what the policy itself measures.

        Where its ``measure`` raises, its names are missing; it then fails when it reads them.
        """
        stats = measure(logits, [name for name in names if known_measurement(name)])
        own = own_measure(self.policy)
        if own is not None:
            try:
                stats |= own(logits, hidden)
            except Exception as error:
                self.failed(error)
        return stats

    def failed(self, error: Exception) -> None:
        """The policy raised ``error``: for the rest of the step nothing may be cut.

        One log line per policy. In a captured graph the failure would be replayed for ever, so
        there it is a :class:`ConfigError`.
        """
        name = self.policy.name
        if self.capturing:
            raise ConfigError(
                f"policy {name} fails in a CUDA graph: {told(error)}; choose another, or "
                "add --cuda-graph-backend-decode disabled"
            ) from error
        if not self._failure_told:
            self._failure_told = True
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.error(
                "C2T: policy %s failed, and drafts stay whole where it does: %s (%s, line %s)",
                name,
                told(error),
                frame.filename,
                frame.lineno,
            )

    @property
    def plans(self) -> bool:
        """Whether the policy brings a planner."""
        return hasattr(self.policy, "planner")

    def _adopt(self, policy: Any) -> None:
        classifier = classifier_of(policy)
        if classifier is not None:
            classifier.to(self._device)  # torch asks it there where it has no program
        self.policy, self.needs = policy, frozenset(policy.needs)
        self._failure_told = False
