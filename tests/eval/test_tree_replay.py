"""Tree replay against a server in plain loops, for random recordings and many kinds of policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.baselines import StaticTree
from eval.tables.tree_replay import Forest, replay_trees
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.replay import Chains
from sglang_c2t.policies.base import Growth, TreeLayer, TreePolicy, TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree
from tests.recordings import ORIGIN, random_chains, random_trees, recording, tree_origin
from tests.refusals import refused


@dataclass(eq=False)
class Node:
    """A recorded node as the oracle sees it."""

    parent: Node | None
    rank: int
    prob: float
    joint: float
    entropy: float
    margin: float
    accept: bool
    number: int = -1  # among the candidates of the tree that is grown

    @property
    def path(self) -> list[Node]:
        return [*(self.parent.path if self.parent else []), self]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(node.rank for node in self.path)


# -- policies, and the same rules node by node ---------------------------------------------


class Timid:
    """Expands the least likely: what EAGLE-2 did not."""

    name = "timid"
    needs: frozenset[str] = frozenset()

    def check(self, shape: TreeShape) -> None: ...

    def grow(self, layer: TreeLayer) -> Growth:
        return Growth(key=layer.joint, expand=-layer.joint)


class Measured:
    """A gate that reads a row's measurement and a child's."""

    name = "measured"
    needs = frozenset({"margin"})
    beta = 0.0

    def confidence(self, layer: DraftLayer) -> torch.Tensor:
        return layer.measured["margin"] - layer.entropy

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        return self.confidence(layer) >= self.beta


def measured(node: Node) -> float:
    return (torch.tensor(node.margin) - torch.tensor(node.entropy)).item()


PATHS = [(0,), (1,), (0, 1), (1, 0), (0, 1, 0)]
SMALLEST = TreeShape(2, 3, 6)  # that holds PATHS


@dataclass(frozen=True)
class Rule:
    """A tree rule, one node at a time. Of equals the first, everywhere."""

    enters: Callable[[Node], bool]
    key: Callable[[Node], float]
    expand: Callable[[Node], float | None] | None = None  # by key; None: not at all
    limit: int | None = None  # nodes of one layer, by key
    after: Callable[[Node], bool] | None = None  # second look, behind the cap


def joint(node: Node) -> float:
    return node.joint


def by_path(node: Node) -> float | None:
    inner = [path for path in PATHS if any(other[:-1] == path for other in PATHS)]
    return -float(sorted(inner).index(node.ranks)) if node.ranks in inner else None


RULES: dict[str, tuple[TreePolicy, Rule]] = {
    "eagle2": (EAGLE2(), Rule(lambda n: True, joint)),
    "joint": (GatedTree(DyJoint(beta=0.25)), Rule(lambda n: n.joint >= 0.25, joint)),
    "own": (
        GatedTree(DyMax(beta=0.5), layer_limit=2),
        Rule(lambda n: n.prob >= 0.5, lambda n: n.prob, limit=2),
    ),
    "filter": (
        GatedEAGLE2(DyMax(beta=0.5)),
        Rule(lambda n: True, joint, after=lambda n: n.prob >= 0.5),
    ),
    "measured": (GatedTree(Measured()), Rule(lambda n: measured(n) >= 0.0, measured)),
    "timid": (Timid(), Rule(lambda n: True, joint, expand=lambda n: -n.joint)),
    "static": (StaticTree(PATHS), Rule(lambda n: n.ranks in PATHS, lambda n: 1.0, by_path)),
    "nothing": (GatedTree(DyMax(beta=0.99), 1), Rule(lambda n: n.prob >= 0.99, joint, limit=1)),
}


# -- the oracle ----------------------------------------------------------------------------

Step = tuple[int, int, int, int]  # accepted and verified nodes, layers drafted, uncovered beams


def nodes_of(data: Recording, row: int) -> list[Node]:
    """The nodes of one recorded draft; what belongs to the row is read off the eldest child."""
    found: list[Node] = []
    eldest: dict[Node | None, float] = {}
    for at in (data.nodes["draft"] == row).nonzero().flatten().tolist():
        column = {name: values[at].item() for name, values in data.nodes.items()}
        parent = found[int(column["parent"])] if column["parent"] >= 0 else None
        entropy = eldest.setdefault(parent, column["entropy"])
        found.append(
            Node(parent, int(column["rank"]), column["prob"], column["joint"], entropy,
                 column["margin"], column["accept"] == 1)
        )  # fmt: skip
    return found


def grow(rule: Rule, recorded: list[Node], shape: TreeShape) -> Step:
    """One step of a server whose draft knows the recorded nodes only."""
    beams: list[Node | None] = [None]
    entered: list[Node] = []
    first = drafted = uncovered = 0
    for depth in range(shape.num_steps):
        if not beams:
            break
        drafted += 1
        layer = []
        for row, beam in enumerate(beams):
            children = [n for n in recorded if n.parent is beam and n.rank < shape.topk]
            uncovered += len(children) < shape.topk
            for node in children:
                node.number = first + row * shape.topk + node.rank
                if rule.enters(node):
                    layer.append(node)
        if rule.limit is not None:
            layer = sorted(layer, key=lambda node: (-rule.key(node), node.number))[: rule.limit]
        first += shape.topk * (shape.topk if depth else 1)
        entered += layer
        scores = {node: (rule.expand or rule.key)(node) for node in layer}
        ranked = [(-score, node.number, node) for node, score in scores.items()
                  if score is not None]  # fmt: skip
        beams = [node for _, _, node in sorted(ranked, key=lambda r: r[:2])[: shape.topk]]
    closed = {node: min(rule.key(other) for other in node.path) for node in entered}
    best = sorted(entered, key=lambda node: (-closed[node], node.number))
    tree = best[: shape.num_draft_tokens - 1]
    if rule.after is not None:
        tree = [node for node in tree if all(rule.after(other) for other in node.path)]
    return sum(node.accept for node in tree), len(tree), drafted, uncovered


def serve(rule: Rule, data: Recording, shape: TreeShape) -> dict[str, list[int]]:
    """By request: steps, and the sums over them."""
    served = {}
    for number, rid in enumerate(data.requests):
        rows = (data.drafts["request"] == number).nonzero().flatten().tolist()
        rows.sort(key=lambda row: int(data.drafts["position"][row]))
        sums, root = [0] * 5, 0
        while root < len(rows):
            step = grow(rule, nodes_of(data, rows[root]), shape)
            sums = [total + count for total, count in zip(sums, (1, *step), strict=True)]
            root += step[0] + 1
        served[rid] = sums
    return served


def replayed(policy: TreePolicy, data: Recording, shape: TreeShape | None) -> dict[str, list[int]]:
    """The same from the replay."""
    forest = Forest.from_recording(data)
    found = replay_trees(policy, forest, shape)
    columns = (found.num_steps, found.num_correct, found.num_proposed, found.num_drafted,
               found.num_uncovered)  # fmt: skip
    rows = torch.stack(columns, dim=1).tolist()
    return dict(zip(forest.requests, rows, strict=True))


# -- replay equals serving -----------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Recording, TreeShape, TreeShape | None]:
    """A recording of 1 to 3 requests in any order, its shape, and one to serve, no larger."""
    topk, num_steps = draw(st.integers(2, 4)), draw(st.integers(3, 4))
    recorded = TreeShape(topk, num_steps, 1 + TreeShape(topk, num_steps, 0).num_candidates)
    if draw(st.booleans()):
        recorded = recorded._replace(num_draft_tokens=draw(st.integers(6, 12)))
    drafts = random_trees(
        draw(st.integers(1, 3)), draw(st.integers(1, 5)), **recorded._asdict(),
        seed=draw(st.integers(0, 999)),
    )  # fmt: skip
    random.Random(draw(st.integers(0, 9))).shuffle(drafts)
    served = None
    if draw(st.booleans()):
        served = TreeShape(*(draw(st.integers(low, high))
                             for low, high in zip(SMALLEST, recorded, strict=True)))  # fmt: skip
    return recording(drafts, roots="every", origin=tree_origin(recorded)), recorded, served


@pytest.mark.parametrize("name", RULES)
@given(case=cases(), roots_at_once=st.sampled_from([2, 999]))
def test_tree_replay_takes_the_very_steps_that_serving_takes(
    name: str, case: tuple[Recording, TreeShape, TreeShape | None], roots_at_once: int
) -> None:
    """However many roots are grown at once. Rows that lost children count as uncovered."""
    policy, rule = RULES[name]
    data, recorded, shape = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.tables.tree_replay.ROOTS_AT_ONCE", roots_at_once)
        assert replayed(policy, data, shape) == serve(rule, data, shape or recorded)


WHOLE = TreeShape(3, 3, 22)


def forest() -> Forest:
    shape = {"topk": WHOLE.topk, "num_steps": WHOLE.num_steps}
    drafts = random_trees(4, 1, **shape)
    return Forest.from_recording(recording(drafts, roots="every", origin=tree_origin(WHOLE)))


def test_wide_measurements_belong_to_the_row() -> None:
    """A gate that reads the hidden state sees the same one for all children of a row."""
    seen: list[torch.Tensor] = []

    class Reader(Timid):
        needs = frozenset({"hidden"})

        def grow(self, layer: TreeLayer) -> Growth:
            seen.append(layer.nodes.measured["hidden"])
            return EAGLE2().grow(layer)

    drafts = random_trees(1, 4, topk=3, num_steps=2)
    origin = tree_origin(TreeShape(3, 2, 13))
    data = recording(drafts, roots="every", extra=("hidden",), origin=origin)
    replay_trees(Reader(), Forest.from_recording(data))
    second = seen[1].view(4, 3, 3, -1)  # [B, W, K, H]
    assert torch.equal(second[:, :, :1].expand_as(second), second)
    # The rows are the layer's three nodes, by probability, of equals the first.
    hidden = data.nodes["hidden"].float().view(4, 12, -1)[:, 3:].view(4, 3, 3, -1)
    recorded_rows = {tuple(row.tolist()) for row in hidden[:, :, 0].flatten(0, 1)}
    assert {tuple(row.tolist()) for row in second[:, :, 0].flatten(0, 1)} == recorded_rows


# -- refusals ------------------------------------------------------------------------------


def test_chains_are_not_replayed_as_trees_nor_trees_as_chains() -> None:
    """Also chains recorded before recordings named a topk."""
    for origin in (ORIGIN, {**ORIGIN, "topk": 1, "num_steps": 3, "num_draft_tokens": 4}):
        data = recording(random_chains(2, roots=3, depth=3), roots="every", origin=origin)
        with refused("holds chains"):
            Forest.from_recording(data)
        Chains.from_recording(data)
    drafts = random_trees(1, 3, topk=2, num_steps=2)
    data = recording(drafts, roots="every", origin=tree_origin(TreeShape(2, 2, 7)))
    with refused("holds trees (topk 2)"):
        Chains.from_recording(data)


def test_trees_of_two_shapes_are_refused() -> None:
    data = recording(random_trees(1, 3, topk=2, num_steps=2), roots="every")
    data.origins[:] = [tree_origin(TreeShape(2, 2, 7)), tree_origin(TreeShape(2, 2, 6))]
    with refused("2 shapes", "(2, 2, 6), (2, 2, 7)"):
        Forest.from_recording(data)


@pytest.mark.parametrize("name", TreeShape._fields)
def test_a_shape_larger_than_the_recorded_one_is_refused(name: str) -> None:
    larger = WHOLE._replace(**{name: getattr(WHOLE, name) + 1})
    recorded = getattr(WHOLE, name)
    with refused(f"cannot replay {name} {recorded + 1} on trees recorded with {recorded}"):
        replay_trees(EAGLE2(), forest(), larger)


class Hungry(Timid):
    needs = frozenset({"topk_prob", "margin"})


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Hungry(), "reads topk_prob, which this"),
        (StaticTree(), "does not fit"),
    ],
)
def test_a_tree_policy_that_cannot_be_replayed_is_refused(policy: TreePolicy, said: str) -> None:
    """It reads what was not recorded, or its trees do not fit."""
    with refused(said):
        replay_trees(policy, forest())
