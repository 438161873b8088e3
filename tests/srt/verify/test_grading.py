"""First drafts are graded by what the gate said of them when they were drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.policies import policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt.verify import grading
from sglang_c2t.srt.verify.grading import FirstDrafts

SLOTS = torch.tensor([2, 5, 1])


def gate_of(policy: str) -> Any:
    gate = ChainGate(policy_for(C2TConfig(policy), TreeShape(1, 5, 6)), num_slots=8, device="cpu")
    gate.relay_first_token(SLOTS, torch.randn(3, 50, generator=torch.manual_seed(1)) * 4)
    return gate


def graded(policy: str, steps: int) -> list[list[float]]:
    """Of three requests one is cut to its root, one has its first draft rejected."""
    first, gate = FirstDrafts(), gate_of(policy)
    rows = torch.tensor([1, 3, 6], dtype=torch.int32)
    for _ in range(steps):
        first.verified(gate, SLOTS, rows, torch.tensor([1, 1, 4]))
    told = first.grades.to_dict()
    return [told[name] for name in ("drafts", "promised", "survived")]


def test_first_drafts_are_counted_once_in_so_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step sent to the host is looked at in the next one."""
    drafts, _, _ = graded("c2t-plus", grading.EVERY)
    assert sum(drafts) == 0
    drafts, promised, survived = graded("c2t-plus", grading.EVERY + 1)
    assert (sum(drafts), sum(survived)) == (2, 1)
    sure = gate_of("c2t-plus").first_tokens.judged(SLOTS).confidence[0]
    assert sum(promised) == pytest.approx(float(sure[1] + sure[2]))


def test_first_drafts_of_constrained_requests_are_left_out() -> None:
    first, gate = FirstDrafts(), gate_of("c2t-plus")
    rows, accepted = torch.tensor([2, 3, 6], dtype=torch.int32), torch.tensor([2, 1, 4])
    for _ in range(grading.EVERY + 1):
        first.verified(gate, SLOTS, rows, accepted, lambda: [0, 2])
    told = first.grades.to_dict()
    assert (sum(told["drafts"]), sum(told["survived"])) == (1, 0)


@pytest.mark.parametrize("policy", ["fixed", "dyjoint", "eval.baselines:Entropy"])
def test_first_drafts_of_policies_without_a_classifier_are_left_out(policy: str) -> None:
    assert sum(graded(policy, grading.EVERY + 1)[0]) == 0
