"""Replay against a server in plain loops, for random recordings and every kind of policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.base import ChainPolicy
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.fixed import Fixed
from tests.recordings import Draft, chain, random_chains, recording
from tests.refusals import refused

# -- policies, and the same rules over plain numbers ---------------------------------------


@dataclass
class Token:
    """One drafted token of one request, as the oracle sees it."""

    depth: int
    prob: float
    joint: float
    alive: bool


class Whole:
    """Drafts on while any living sequence of the batch is sure, like MCSD."""

    name = "whole"
    needs: frozenset[str] = frozenset()
    batch_wide = True

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        return ((layer.prob >= 0.4) & layer.alive).any().expand_as(layer.alive)


Rule = Callable[[list[Token]], list[bool]]

RULES: dict[str, tuple[ChainPolicy, Rule]] = {
    "all": (Fixed(), lambda tokens: [True for _ in tokens]),
    "none": (Fixed(length=0), lambda tokens: [False for _ in tokens]),
    "two": (Fixed(length=2), lambda tokens: [t.depth <= 2 for t in tokens]),
    "joint": (DyJoint(beta=0.3), lambda tokens: [t.joint >= 0.3 for t in tokens]),
    "whole": (Whole(), lambda batch: [any(t.alive and t.prob >= 0.4 for t in batch)] * len(batch)),
}


# -- the oracle ----------------------------------------------------------------------------


def serve(
    answers: list[list[Draft]], rule: Rule, batch_size: int, max_length: int
) -> list[list[int]]:
    """Serve ``answers[request][root]``, the next request joining when one is done.

    Per request: steps, correct, verified and drafted tokens.
    """
    served = [[0, 0, 0, 0] for _ in answers]
    root = [0] * len(answers)
    depths = min(max_length, len(answers[0][0].prob))
    while True:
        lane = [q for q in range(len(answers)) if root[q] < len(answers[q])][:batch_size]
        if not lane:
            return served
        drafts = [answers[q][root[q]] for q in lane]
        alive, kept, joint = [True] * len(lane), [0] * len(lane), [1.0] * len(lane)
        for depth in range(1, depths + 1):
            tokens = []
            for i, draft in enumerate(drafts):
                joint[i] *= draft.prob[depth - 1]
                tokens.append(Token(depth, draft.prob[depth - 1], joint[i], alive[i]))
            keep = rule(tokens)
            for i in range(len(lane)):
                alive[i] = alive[i] and keep[i]
                kept[i] += alive[i]
        for i, q in enumerate(lane):
            correct = 0
            while correct < kept[i] and drafts[i].accept[correct]:
                correct += 1
            # The draft that ended the chain was made, too, unless the chain was full.
            drafted = kept[i] if kept[i] == depths else kept[i] + 1
            for column, number in enumerate((1, correct, kept[i], drafted)):
                served[q][column] += number
            root[q] += correct + 1


def replayed(
    policy: ChainPolicy, chains: Chains, *, max_length: int | None, batch_size: int | None
) -> list[list[int]]:
    outcome = replay(policy, chains, max_length=max_length, batch_size=batch_size)
    columns = (outcome.num_steps, outcome.num_correct, outcome.num_proposed, outcome.num_drafted)
    return torch.stack(columns, dim=1).tolist()


# -- replay equals serving -----------------------------------------------------------------


@st.composite
def random_answers(draw: st.DrawFn) -> list[list[Draft]]:
    """1 to 4 requests of 1 to 6 roots, chains of 1 to 4 tokens."""
    depth = draw(st.integers(1, 4))
    probs = st.lists(st.sampled_from([0.1, 0.5, 0.9]), min_size=depth, max_size=depth)
    answers = []
    for request in range(draw(st.integers(1, 4))):
        answer = []
        for root in range(draw(st.integers(1, 6))):
            correct = draw(st.integers(0, depth))
            of_draft = {"request": f"math/{request}", "position": 3 * request + root}
            accept = [1] * correct + [0] * (depth - correct)
            answer.append(chain(draw(probs), accept, **of_draft))
        answers.append(answer)
    return answers


@pytest.mark.parametrize("name", RULES)
@given(
    answers=random_answers(),
    max_length=st.none() | st.integers(1, 6),
    batch_size=st.none() | st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_replay_takes_the_very_steps_that_serving_takes(
    name: str, answers: list[list[Draft]], max_length: int | None, batch_size: int | None, seed: int
) -> None:
    """In whatever order the drafts were recorded; a rule per request ignores the batch size."""
    policy, rule = RULES[name]
    shuffled = [draft for answer in answers for draft in answer]
    random.Random(seed).shuffle(shuffled)
    chains = Chains.from_recording(recording(shuffled, roots="every"))
    ordered = [answers[int(rid.split("/")[1])] for rid in chains.requests]
    lanes = (batch_size or 1) if name == "whole" else 1
    expected = serve(ordered, rule, lanes, max_length or 99)
    got = replayed(policy, chains, max_length=max_length, batch_size=batch_size)
    assert got == expected


def test_replay_leaves_out_requests_without_a_draft() -> None:
    data = recording(random_chains(4, roots=3, depth=2), roots="every")
    chains = Chains.from_recording(data.select(data.drafts["request"] % 2 == 1))
    assert chains.requests == ["math/1", "math/3"]
    assert chains.first_root.tolist() == [0, 3, 6]


def test_replay_keeps_wide_measurements_with_their_tokens() -> None:
    data = recording(random_chains(2, roots=3, depth=4), roots="every", extra=("hidden",))
    chains = Chains.from_recording(data)
    assert chains.stats["hidden"].shape == (6, 4, 8)
    assert torch.equal(chains.stats["hidden"].flatten(0, 1), data.nodes["hidden"])


# -- refusals ------------------------------------------------------------------------------

ANSWER = random_chains(2, roots=4, depth=3)


@pytest.mark.parametrize(
    ("drafts", "left"),
    [(ANSWER[:1] + ANSWER[2:], "math/1"), (ANSWER[:6] + ANSWER[7:], "math/0"),
     (ANSWER + ANSWER[:1], "math/1")],
)  # fmt: skip
def test_replay_leaves_out_requests_that_lack_roots(drafts: list[Draft], left: str) -> None:
    chains = Chains.from_recording(recording(drafts, roots="every"))
    assert (chains.requests, chains.left_out) == ([left], 1)
    alone = Chains.from_recording(
        recording([draft for draft in ANSWER if draft.request == left], roots="every")
    )
    assert torch.equal(chains.num_correct, alone.num_correct)
    assert torch.equal(chains.first_root, alone.first_root)
    assert alone.left_out == 0


@pytest.mark.parametrize(
    ("drafts", "roots", "said"),
    [
        (ANSWER, "visited", "only the roots that its server visited: replay needs one made with"),
        (ANSWER[:1] + ANSWER[2:4], "every", "request math/0 lacks roots, as all of them do: the "),
        (ANSWER[:4] + ANSWER[:1], "every", "request math/0 lacks roots"),
        ([*ANSWER, chain([0.5], [1], request="x/0")], "every", "whole chains of one length"),
        ([replace(ANSWER[0], parents=[-1, -1, 0])], "every", "whole chains of one length"),
    ],
)
def test_replay_of_an_unsuitable_recording_is_refused(
    drafts: list[Draft], roots: str, said: str
) -> None:
    with refused(said):
        Chains.from_recording(recording(drafts, roots=roots))
