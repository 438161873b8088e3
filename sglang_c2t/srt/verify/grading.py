"""Grades a gate's confidence in the first drafts of requests by their outcomes. With a planning
policy the planner grades all drafts. This class samples one step in :data:`EVERY` and only first
drafts, whose confidence is stored anyway. It costs two launches, and no caller waits for the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from sglang_c2t.draft.gate import Gate
from sglang_c2t.draft.served import classifier_of
from sglang_c2t.plan.grades import Grades
from sglang_c2t.srt.verify.packing import HostSizes

#: Steps between two samples.
EVERY = 16


class FirstDrafts:
    """Grades of the first drafts of a server of chains."""

    def __init__(self) -> None:
        self.grades = Grades()
        self._steps = 0
        self._on_their_way: tuple[HostSizes, Collection[int]] | None = None

    def verified(
        self,
        gate: Gate,
        slots: Tensor,
        num_rows: Tensor,
        accept_lens: Tensor,
        constrained: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Grade a step of the requests in ``slots`` [B]. ``num_rows`` [B] rows were verified, roots
        included, and ``accept_lens`` [B] tokens accepted, bonus included. ``constrained`` gives the
        requests to leave out, whose target distribution is changed.
        """
        self._steps += 1
        if self._on_their_way is not None and self._on_their_way[0].arrived:
            sizes, left_out = self._on_their_way
            confidence, rows, accepted = sizes.wait().double().numpy()
            verified = rows > 1
            verified[list(left_out)] = False
            self.grades.observe(confidence[verified], accepted[verified] > 1)
            self._on_their_way = None
        # Without a classifier a confidence is another probability, or does not exist.
        judges = gate.program is not None and classifier_of(gate.served.policy) is not None
        if judges and self._steps % EVERY == 0:
            confidence = gate.first_tokens.judged(slots).confidence[0]
            # Whole numbers of this size are exact in float32.
            told = HostSizes(torch.stack((confidence, num_rows, accept_lens)))
            self._on_their_way = told, constrained()
