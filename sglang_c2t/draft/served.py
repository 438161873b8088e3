"""The served policy: how the gate calls it, replaces it and handles its failures. A policy may be a
user's own and may raise anything. Drafts are then verified in full for the rest of the step: the
output is the same, the saving is lost.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sglang_c2t.checks import format_error
from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.pair import Pair, learnt_from, origins_of
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import known_measurement, measure
from sglang_c2t.kernels.gate_program import FusedGate
from sglang_c2t.policies.base import own_measure
from sglang_c2t.policies.fused import fused_gate

logger = logging.getLogger(__name__)


def classifier_of(policy: Any) -> Classifier | None:
    """Return the classifier of a policy; ``None`` without one."""
    classifier = getattr(getattr(policy, "gate", policy), "classifier", None)
    return classifier if isinstance(classifier, Classifier) else None


def classifier_facts(policy: Any, pair: Pair | None) -> dict[str, Any] | None:
    """Return the training data and quality of a policy's classifier; ``None`` without one. It holds
    no paths. ``learnt_from`` compares the training data with the served ``pair``.
    """
    classifier = classifier_of(policy)
    if classifier is None:
        return None
    facts = classifier.training
    names = {f"{origin.get('draft')} for {origin.get('target')}" for origin in origins_of(facts)}
    quality = ("heldout_auc", "heldout_ece", "trained_on")
    return {
        "name": classifier.name,
        "learnt_from": learnt_from(facts, pair),
        "origins": sorted(names),
        **{name: facts.get(name) for name in quality},
    }


class ServedPolicy:
    """A policy and, if it has one, its gate as a program.

    Most gates are programs of :mod:`sglang_c2t.kernels.gate`, which measure and judge at once:
    kernels on a GPU, their torch twin on a CPU. Other policies run in torch.

    Args:
        policy: Has ``name`` and ``needs``, its inputs beyond ``prob`` and ``entropy``.
        device: Device of the draft logits.
        topk: Children per row.
    """

    policy: Any
    program: FusedGate | None
    needs: frozenset[str]

    def __init__(self, policy: Any, *, device: torch.device | str, topk: int) -> None:
        self._device, self._topk = device, topk
        self.capturing = False
        """Whether launches go into a CUDA graph, where a failure belongs to no step."""
        self._failure_told = False
        self.program = fused_gate(policy, device, topk=topk)
        self._adopt(policy)

    def switch(self, policy: Any, *, captured: bool) -> None:
        """Replace the policy from the next step on.

        The stored first tokens were measured for the old policy. Other inputs of the new one are
        missing or stale, so it may decide badly for one step.

        Args:
            policy: As in the constructor.
            captured: CUDA graphs hold the old policy's kernels, so only their data can be replaced.
                The program must read the same features, with a network of the same size.

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
        """Measure ``names`` of the draft's ``logits`` [R, V], and add the policy's own
        measurements. If its ``measure`` raises, its names are missing, and the policy fails when it
        reads them.
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
        """Log that the policy raised ``error``, once per policy; the gate cuts nothing more this
        step. During capture it raises :class:`ConfigError`, because a graph would replay the
        failure.
        """
        name = self.policy.name
        if self.capturing:
            raise ConfigError(
                f"policy {name} fails in a CUDA graph: {format_error(error)}; choose another, or "
                "add --cuda-graph-backend-decode disabled"
            ) from error
        if not self._failure_told:
            self._failure_told = True
            frame = traceback.extract_tb(error.__traceback__)[-1]
            logger.error(
                "C2T: policy %s failed, so the server verifies full drafts there: %s (%s, line %s)",
                name,
                format_error(error),
                frame.filename,
                frame.lineno,
            )

    @property
    def plans(self) -> bool:
        """Whether the policy has a planner."""
        return hasattr(self.policy, "planner")

    def _adopt(self, policy: Any) -> None:
        classifier = classifier_of(policy)
        if classifier is not None:
            classifier.to(self._device)  # its device when it has no program
        self.policy, self.needs = policy, frozenset(policy.needs)
        self._failure_told = False
