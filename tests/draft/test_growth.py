"""Growing trees against one request and one node at a time.

The draft model is a function of the tokens it has read, as real ones are. Its probabilities
and confidences are multiples of 1/8: products down to four layers are exact, and ties are
common.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval.baselines import EntropyWidth, Fork, StaticTree
from sglang_c2t import tree
from sglang_c2t.draft.growth import TreeGrowth, node_margins
from sglang_c2t.draft_layer import PLACES, DraftLayer, measure
from sglang_c2t.kernels.beams import Beams
from sglang_c2t.policies.base import TreePolicy, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree
from tests import oracles
from tests.draft.own_rules import ByMark

NEVER = float("-inf")

#: Entropies of this file's drafts, and the widths that the paper gives them.
WIDTHS = {
    0.0: 1, 0.01: 1, 0.02: 2, 0.5: 2, 0.75: 2, 1.0: 4, 1.01: 5, 1.3: 6, 1.5: 6, 1.75: 7, 9.0: 7
}  # fmt: skip

# -- a draft model ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The draft's distribution after one path."""

    tokens: list[int]  # distinct, by falling probability
    probs: list[float]
    marks: list[float]  # one free number per child, which gates of this file read
    entropy: float
    secret: float  # one number per row


@dataclass(frozen=True)
class Draft:
    """A batch of requests; equal seeds are equal models."""

    seed: int
    topk: int
    steps: int
    batch: int
    max_nodes: int
    fine: bool = False
    """Probabilities of 24 random bits instead of multiples of 1/8."""

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.topk, self.steps, self.max_nodes)

    def __call__(self, request: int, text: tuple[int, ...]) -> Row:
        rng = random.Random(repr((self.seed, request, text)))
        chance = rng.random if self.fine else lambda: rng.randint(1, 8) / 8
        return Row(
            tokens=rng.sample(range(50), self.topk),
            probs=sorted((chance() for _ in range(self.topk)), reverse=True),
            marks=[rng.randint(0, 8) / 8 for _ in range(self.topk)],
            entropy=rng.choice(list(WIDTHS)),
            secret=rng.random(),
        )

    def root(self, request: int) -> int:
        return 100 + request


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Every size of tree that K, D <= 4 allow, cuts of it, and more room; K is mostly above 1."""
    topk, steps = draw(st.sampled_from([2, 2, 3, 4, 1])), draw(st.integers(1, 4))
    most = TreeShape(topk, steps, 0).num_candidates + 1
    max_nodes = draw(st.one_of(st.just(most), st.integers(1, most + 3)))
    return Draft(draw(st.integers(0, 2**20)), topk, steps, draw(st.integers(1, 3)), max_nodes)


@dataclass
class Run:
    """A batch of trees grown from a draft, and what was seen on the way."""

    draft: Draft
    growth: TreeGrowth
    beams: list[Beams] = field(default_factory=list)  # behind each layer
    texts: list[list[list[tuple[int, ...]]]] = field(default_factory=list)  # [layer][b][row]
    trees: tree.Trees = None  # type: ignore[assignment]
    keys: Tensor = None  # type: ignore[assignment]


def grown(draft: Draft, policy: TreePolicy, layers: int | None = None) -> Run:
    """Drafts so many layers with the policy, or all. What a dead row reads is nonsense, and must
    not be read.
    """
    run = Run(draft, TreeGrowth(policy, draft.shape, draft.batch, "cpu"))
    texts: list[list[tuple[int, ...]]] = [[()] for _ in range(draft.batch)]
    alive = [[True]] * draft.batch
    nonsense = Row([-7] * draft.topk, [float("nan")] * draft.topk, [9.0] * draft.topk, -1, -1)
    for _ in range(draft.steps if layers is None else layers):
        rows = [
            [
                draft(b, text) if live else nonsense
                for text, live in zip(texts[b], alive[b], strict=True)
            ]
            for b in range(draft.batch)
        ]
        flat = [row for request in rows for row in request]
        beams = run.growth.add(
            torch.tensor([[row.tokens for row in request] for request in rows]),
            torch.tensor([[row.probs for row in request] for request in rows]),
            {
                "entropy": torch.tensor([row.entropy for row in flat]),
                "margin": torch.tensor([row.marks for row in flat]).flatten(),
                "hidden": torch.tensor([[row.secret, -row.secret] for row in flat]),
            },
        )
        texts = [
            [
                (*texts[b][parent], token)
                for parent, token in zip(
                    beams.parent_row[b].tolist(), beams.tokens[b].tolist(), strict=True
                )
            ]
            for b in range(draft.batch)
        ]
        alive = beams.alive.tolist()
        run.beams.append(beams)
        run.texts.append(texts)
    roots = torch.tensor([draft.root(b) for b in range(draft.batch)])
    trees, run.keys = run.growth.finish()
    run.trees = trees.rooted(roots)
    return run


# -- the same trees, node by node ---------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A drafted token of one request."""

    parent: Node | None
    rank: int
    token: int
    prob: float
    mark: float
    entropy: float
    secret: float
    number: int = -1  # among all candidates, dead ones included
    closed: float = NEVER

    @property
    def path(self) -> list[Node]:
        return [*(self.parent.path if self.parent else []), self]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(node.rank for node in self.path)

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(node.token for node in self.path)

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def joint(self) -> float:
        product = 1.0
        for node in self.path:
            product *= node.prob
        return product


def children(draft: Draft, request: int, parent: Node | None) -> list[Node]:
    row = draft(request, parent.text if parent else ())
    return [
        Node(parent, rank, row.tokens[rank], row.probs[rank], row.marks[rank], row.entropy,
             row.secret)
        for rank in range(draft.topk)
    ]  # fmt: skip


Score = Callable[[Node], float]


@dataclass(frozen=True)
class Oracle:
    """A tree rule, one node at a time. Of equals the first, everywhere."""

    enters: Callable[[Node], bool]
    key: Score
    expand: Score | None = None  # by key
    limit: int | None = None  # nodes of one layer, by key
    after: Callable[[Node], bool] | None = None  # second look, behind the cap

    def layers(self, draft: Draft, request: int) -> tuple[list[list[Node]], list[list[Node]]]:
        """Entered and forwarded nodes, layer by layer."""
        topk = draft.topk
        all_entered, all_beams = [], []
        beams: list[Node | None] = [None]
        first = 0
        for _ in range(draft.steps):
            entered = []
            for row, parent in enumerate(beams):
                for node in children(draft, request, parent):
                    node.number = first + row * topk + node.rank
                    if self.enters(node):
                        entered.append(node)
            if self.limit is not None:
                best = sorted(entered, key=lambda node: -self.key(node))[: self.limit]
                entered = [node for node in entered if node in best]
            expand = self.expand or self.key
            going_on = [node for node in entered if expand(node) > NEVER]
            beams = sorted(going_on, key=lambda node: -expand(node))[:topk]
            first += topk * (topk if all_entered else 1)
            all_entered.append(entered)
            all_beams.append(beams)
        return all_entered, all_beams

    def tree(self, draft: Draft, request: int) -> list[Node]:
        """The nodes to verify, in order, root left out."""
        nodes = [node for layer in self.layers(draft, request)[0] for node in layer]
        for node in nodes:
            node.closed = min(self.key(other) for other in node.path)
        best = sorted(nodes, key=lambda node: (-node.closed, node.number))[: draft.max_nodes - 1]
        after = self.after
        if after is not None:
            best = [node for node in best if all(after(other) for other in node.path)]
        return sorted(best, key=lambda node: node.number)


def grown_as(oracle: Oracle, draft: Draft, policy: TreePolicy) -> Run:
    """Drafts with the policy; trees and rows are the oracle's."""
    run = grown(draft, policy)
    assert_trees(run, oracle)
    assert_beams(run, oracle)
    return run


def assert_trees(run: Run, oracle: Oracle) -> None:
    """The trees hold exactly these nodes, in this order; and say so in every field."""
    size = run.draft.max_nodes
    for b in range(run.draft.batch):
        nodes = oracle.tree(run.draft, b)
        pad = size - 1 - len(nodes)
        number = {None: 0, **{node: i for i, node in enumerate(nodes, start=1)}}
        assert run.trees.num_nodes[b] == len(nodes) + 1
        assert run.trees.tokens[b].tolist() == [
            run.draft.root(b), *(node.token for node in nodes), *[0] * pad
        ]  # fmt: skip
        assert run.trees.parents[b].tolist() == [
            -1, *(number[node.parent] for node in nodes), *[-1] * pad
        ]  # fmt: skip
        assert run.trees.depth[b].tolist() == [0, *(node.depth for node in nodes), *[0] * pad]
        assert run.trees.source[b].tolist() == [-1, *(n.number for n in nodes), *[-1] * pad]
        assert run.keys[b].tolist() == [
            float("inf"), *(node.closed for node in nodes), *[NEVER] * pad
        ]  # fmt: skip


def assert_beams(run: Run, oracle: Oracle) -> None:
    """The rows that live are the oracle's, in its order; the last layer forwards nothing."""
    for b in range(run.draft.batch):
        _, layers = oracle.layers(run.draft, b)
        for beams, nodes in zip(run.beams[:-1], layers[:-1], strict=True):
            dead = run.draft.topk - len(nodes)
            live = len(nodes)
            assert beams.alive[b].tolist() == [True] * live + [False] * dead
            assert beams.tokens[b, :live].tolist() == [node.token for node in nodes]
            assert beams.candidate[b, :live].tolist() == [node.number for node in nodes]


# -- gates of this file -------------------------------------------------------------------


def mark(node: Node) -> float:
    return node.mark


def joint(node: Node) -> float:
    return node.joint


betas = st.integers(0, 9).map(lambda eighths: eighths / 8)

# -- every rule against its oracle --------------------------------------------------------


@given(drafts(), betas, st.none() | st.integers(1, 5))
def test_growth_of_a_gated_tree_equals_algorithm_1(
    draft: Draft, beta: float, limit: int | None
) -> None:
    """Pruned by confidence, expanded by confidence, capped by confidence."""
    oracle = Oracle(lambda node: node.mark >= beta, key=mark, limit=limit)
    grown_as(oracle, draft, GatedTree(ByMark(beta), limit))


@given(drafts())
def test_growth_of_eagle2_holds_the_most_likely_nodes(draft: Draft) -> None:
    run = grown_as(Oracle(lambda node: True, key=joint), draft, EAGLE2())
    size = min(draft.max_nodes, draft.shape.num_candidates + 1)
    assert (run.trees.num_nodes == size).all(), "every tree has the same size"


@given(drafts(), betas)
def test_growth_of_gated_eagle2_prunes_its_tree_without_replacement(
    draft: Draft, beta: float
) -> None:
    oracle = Oracle(lambda node: True, key=joint, after=lambda node: node.mark >= beta)
    grown_as(oracle, draft, GatedEAGLE2(ByMark(beta)))


PATHS = (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)
#: Baselines: the policy, what enters, and which nodes are expanded, by what key.
BASELINES: dict[str, tuple[TreePolicy, Oracle]] = {
    "static": (
        StaticTree([list(path) for path in PATHS]),
        Oracle(
            lambda node: node.ranks in PATHS,
            key=lambda node: 1.0,
            expand=lambda node: 1.0 if any(p[:-1] == node.ranks for p in PATHS) else NEVER,
        ),
    ),
    "fork": (
        Fork(2),
        Oracle(
            lambda node: node.rank < (2 if node.depth == 1 else 1),
            key=joint,
            expand=lambda node: -node.number,
        ),
    ),
    "fixed widths": (
        EntropyWidth("fixed", 1.0),
        Oracle(lambda node: node.rank < WIDTHS[node.entropy], key=joint),
    ),
    "dynamic widths": (
        EntropyWidth("dynamic", 1.0),
        Oracle(lambda node: node.rank < WIDTHS[node.entropy] and node.entropy <= 1.0, key=joint),
    ),
}


@pytest.mark.parametrize("name", BASELINES)
@given(drafts())
def test_growth_of_baselines_equals_their_rules(name: str, draft: Draft) -> None:
    policy, oracle = BASELINES[name]
    room = 1 + len(PATHS) if name == "static" else draft.max_nodes
    draft = replace(
        draft, topk=max(draft.topk, 2), steps=max(draft.steps, 3),
        max_nodes=max(room, draft.max_nodes),
    )  # fmt: skip
    policy.check(draft.shape)
    grown_as(oracle, draft, policy)


# -- the books ----------------------------------------------------------------------------


@given(drafts(), betas)
def test_growth_ancestor_rows_hold_the_tokens_of_the_path(draft: Draft, beta: float) -> None:
    """A draft writes a row's KV when it forwards the row; attention must find its own path."""
    run = grown(draft, GatedTree(ByMark(beta)))
    fresh = TreeGrowth(GatedTree(ByMark(beta)), draft.shape, draft.batch, "cpu")
    assert fresh.beams.ancestor_rows.shape == (draft.batch, 1, 0)
    forwards = run.beams[:-1]  # behind the last layer nothing is forwarded
    if not forwards:
        return
    rows = run.growth.beams.ancestor_rows
    assert rows.shape == (draft.batch, draft.topk, len(forwards))
    for b in range(draft.batch):
        for k, text in enumerate(run.texts[len(forwards) - 1][b]):
            written = [
                int(beams.tokens[b, row])
                for beams, row in zip(forwards, rows[b, k].tolist(), strict=True)
            ]
            assert written == list(text)
            assert rows[b, k, -1] == k


@given(drafts(), betas)
def test_growth_shows_every_live_node_with_its_measurements(draft: Draft, beta: float) -> None:
    """Every node that lives."""
    oracle = Oracle(lambda node: node.mark >= beta, key=mark)

    @dataclass(frozen=True)
    class Curious(ByMark):
        needs = ByMark.needs | PLACES

    run = grown(draft, GatedTree(Curious(beta)))
    assert len(run.growth.layers) == draft.steps
    for depth, layer in enumerate(run.growth.layers, start=1):
        assert layer.depth == depth
        rows = layer.joint.shape[1]
        for b in range(draft.batch):
            beams: list[Node | None] = [None]
            if depth > 1:
                beams = list(oracle.layers(draft, b)[1][depth - 2])
            assert layer.grid(layer.nodes.alive)[b, :, 0].tolist() == [
                row < len(beams) for row in range(rows)
            ]
            for row, parent in enumerate(beams):
                for node in children(draft, b, parent):
                    at = (b * rows + row) * draft.topk + node.rank
                    assert layer.joint[b, row, node.rank] == node.joint
                    assert layer.entropy[b, row, node.rank] == torch.tensor(node.entropy)
                    assert layer.nodes.measured["rank"][at] == node.rank
                    assert layer.nodes.measured["parent_rank"][at] == row
                    assert_is(layer.nodes, at, node)


def assert_is(layer: DraftLayer, at: int, node: Node) -> None:
    """The token at this place is that node."""
    assert layer.depth == node.depth
    assert (layer.prob[at], layer.joint[at]) == (node.prob, node.joint)
    assert layer.measured["margin"][at] == node.mark
    assert layer.entropy[at] == torch.tensor(node.entropy)
    assert torch.equal(layer.measured["hidden"][at], torch.tensor([node.secret, -node.secret]))
    assert bool(layer.alive[at])


@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 2**16))
def test_node_margins_are_to_the_best_sibling(rows: int, topk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 6, (rows, 8), generator=generator).float()
    prob = logits.softmax(dim=1).topk(topk).values
    margins = node_margins(prob).view(rows, topk)
    for row in range(rows):
        for child in range(topk):
            rival = max(prob[row, other] for other in range(topk) if other != child)
            expected = prob[row, child].log() - rival.log()
            assert margins[row, child] == pytest.approx(float(expected), abs=1e-6)
    first = measure(logits, ["margin"])["margin"]
    assert torch.allclose(margins[:, 0], first, atol=1e-5), "a chain's margin"


def test_node_margins_are_finite_for_probability_zero() -> None:
    assert node_margins(torch.tensor([[1.0, 0.0, 0.0]])).isfinite().all()


# -- SGLang's own tree --------------------------------------------------------------------


@settings(max_examples=25)
@given(drafts())
def test_growth_of_eagle2_equals_sglangs_tree(draft: Draft) -> None:
    """Its loop and its reranking, wherever no two joint probabilities are equal."""
    pytest.importorskip("sglang", reason="SGLang is not installed")
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    room = min(draft.max_nodes, draft.shape.num_candidates + 1)
    draft = replace(draft, max_nodes=room, fine=True)
    texts: list[list[tuple[int, ...]]] = [[()] for _ in range(draft.batch)]
    scores: Any = None
    lists: tuple[list[Tensor], ...] = ([], [], [])
    with torch.compiler.set_stance("force_eager"):
        for step in range(draft.steps):
            rows = [draft(b, text) for b in range(draft.batch) for text in texts[b]]
            probs = torch.tensor([row.probs for row in rows])
            tokens = torch.tensor([row.tokens for row in rows])
            ids, _, scores, info = select_top_k_tokens(
                step, probs, tokens, None, scores, draft.topk
            )
            for values, new in zip(lists, info, strict=True):
                values.append(new)
            if step == 0:
                rows_of = torch.zeros((draft.batch, draft.topk), dtype=torch.long)
            else:
                first = draft.topk + (step - 1) * draft.topk**2
                rows_of = (info[2] - first) // draft.topk
            texts = [
                [
                    (*texts[b][row], token)
                    for row, token in zip(rows_of[b].tolist(), new_ids, strict=True)
                ]
                for b, new_ids in enumerate(ids.view(draft.batch, -1).tolist())
            ]
    for row in torch.cat([s.flatten(1) for s in lists[0]], dim=1).tolist():
        assume(len(set(row)) == len(row))
    parent_list, selected, tokens = organize_draft_results(*lists, draft.max_nodes)
    run = grown(draft, EAGLE2())
    assert torch.equal(run.trees.source[:, 1:], selected)
    assert torch.equal(run.trees.tokens[:, 1:], tokens)
    for b in range(draft.batch):
        parents, *_ = oracles.tree_from_candidates(
            parent_list[b].tolist(), selected[b].tolist(), draft.topk
        )
        assert run.trees.parents[b].tolist() == parents
