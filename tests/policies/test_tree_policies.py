"""Tree policies: each judges a layer as its formula says, node by node; and the menu for trees."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft.growth import TreeGrowth
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.policies import (
    POLICIES,
    TREE_POLICIES,
    TreePolicy,
    build_policy,
    build_tree_policy,
    tree_policy_names,
)
from sglang_c2t.policies.base import Growth, TreeLayer, TreeShape, is_tree_policy
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.entropy_width import EntropyWidth, branching_factor
from sglang_c2t.policies.fork import Fork
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree
from sglang_c2t.policies.static_tree import StaticTree
from sglang_c2t.tree import Trees, visible_nodes
from tests.refusals import refused

NEVER = float("-inf")


@st.composite
def layers(draw: st.DrawFn) -> TreeLayer:
    """One layer of 1 to 3 requests: the first, or a deeper one; values are multiples of 1/8."""
    batch, topk, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = random.Random(draw(st.integers(0, 2**20)))
    rows = batch * (1 if depth == 1 else topk)

    def row_values(choices: Sequence[float]) -> Tensor:
        values = torch.tensor([rng.choice(choices) for _ in range(rows)])
        return values.repeat_interleave(topk)

    prob = torch.tensor(
        [sorted((rng.randint(1, 8) / 8 for _ in range(topk)), reverse=True) for _ in range(rows)]
    ).flatten()
    before = torch.ones(rows * topk) if depth == 1 else row_values([0.125, 0.5, 0.75])
    nodes = DraftLayer(
        depth=depth,
        prob=prob,
        joint=prob * before,
        entropy=row_values([0.0, 0.01, 0.02, 0.5, 1.0, 1.01, 1.3, 1.75, 9.0]),
        alive=row_values([1, 1, 0]).bool() if depth > 1 else torch.ones(rows * topk).bool(),
        measured={"margin": torch.tensor([rng.randint(0, 8) / 8 for _ in range(rows * topk)])},
    )
    return TreeLayer(nodes, batch, topk)


@dataclass(frozen=True)
class GateOutput:
    """One node, and what a policy said about it."""

    request: int
    row: int
    child: int
    joint: float
    entropy: float
    mark: float
    alive: bool
    key: float
    expand: float
    verify: bool


def judged(layer: TreeLayer, policy: TreePolicy) -> list[GateOutput]:
    growth = policy.grow(layer)
    batch, rows, topk = layer.joint.shape
    verify = torch.ones_like(layer.joint) if growth.verify is None else growth.verify
    for values in (growth.key, growth.expand, verify):
        assert values.shape == layer.joint.shape
    assert growth.key.dtype == growth.expand.dtype == torch.float32
    assert not growth.key.isnan().any()
    mark, alive = (layer.grid(v) for v in (layer.nodes.measured["margin"], layer.nodes.alive))
    return [
        GateOutput(
            b, row, child,
            *(
                float(values[b, row, child])
                for values in (layer.joint, layer.entropy, mark)
            ),
            bool(alive[b, row, child]),
            float(growth.key[b, row, child]),
            float(growth.expand[b, row, child]),
            bool(verify[b, row, child]),
        )
        for b in range(batch) for row in range(rows) for child in range(topk)
    ]  # fmt: skip


@dataclass(frozen=True)
class ByMark:
    """A gate whose confidence is a free number of the test."""

    beta: float = 0.5
    name: ClassVar[str] = "by-mark"
    needs: ClassVar[frozenset[str]] = frozenset({"margin"})

    def confidence(self, layer: DraftLayer) -> Tensor:
        return layer.measured["margin"]

    def keep(self, layer: DraftLayer) -> Tensor:
        return self.confidence(layer) >= self.beta


# -- EAGLE-2 and gates --------------------------------------------------------------------


@given(layers())
def test_eagle2_ranks_and_expands_by_joint_probability(layer: TreeLayer) -> None:
    for node in judged(layer, EAGLE2()):
        assert (node.key, node.expand, node.verify) == (node.joint, node.joint, True)


@given(layers(), st.none() | st.integers(1, 6))
def test_a_gated_tree_admits_the_confident_and_of_those_the_best_of_a_layer(
    layer: TreeLayer, limit: int | None
) -> None:
    """Dead nodes take no place from living ones."""
    nodes = judged(layer, GatedTree(ByMark(), limit))
    for b in range(layer.batch):
        passed = [n for n in nodes if n.request == b and n.alive and n.mark >= 0.5]
        passed.sort(key=lambda n: (-n.mark, n.row, n.child))
        admitted = set(passed if limit is None else passed[:limit])
        for node in nodes:
            if node.request == b:
                wanted = node.mark if node in admitted else NEVER
                assert (node.key, node.expand, node.verify) == (wanted, wanted, True)


@given(layers())
def test_a_gate_behind_eagle2_leaves_growth_alone_and_refuses_the_unsure(layer: TreeLayer) -> None:
    for node in judged(layer, GatedEAGLE2(ByMark())):
        assert (node.key, node.expand) == (node.joint, node.joint)
        assert node.verify is (node.mark >= 0.5)


def test_gated_trees_read_what_their_gate_reads_and_bear_its_name() -> None:
    assert GatedTree(ByMark()).needs == GatedEAGLE2(ByMark()).needs == {"margin"}
    assert (GatedTree(ByMark()).name, GatedEAGLE2(ByMark()).name) == ("by-mark", "by-mark-eagle2")


# -- entropy width ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entropy", "width"),
    [(0.0, 1), (0.0199, 1), (0.02, 2), (0.5, 2), (0.9999, 2), (1.0, 4), (1.01, 5), (1.25, 5),
     (1.26, 6), (1.5, 6), (1.51, 7), (1.75, 7), (1.76, 7), (12.0, 7)],
)  # fmt: skip
def test_the_branching_factor_is_the_papers(entropy: float, width: int) -> None:
    factor = branching_factor(torch.tensor([entropy]))
    assert factor.tolist() == [width]
    assert factor.dtype == torch.int64


@given(layers(), st.sampled_from(["fixed", "dynamic"]), st.sampled_from([0.0, 1.0, 1.5]))
def test_entropy_width_keeps_the_first_children_of_each_row(
    layer: TreeLayer, depth: str, stop: float
) -> None:
    for node in judged(layer, EntropyWidth(depth, stop)):
        if node.entropy < torch.tensor(0.02):
            width = 1
        elif node.entropy < 1:
            width = 2
        else:
            width = min(math.ceil(node.entropy * 4), 7)
        if depth == "dynamic" and node.entropy > stop:
            width = 0
        wanted = node.joint if node.child < width else NEVER
        assert (node.key, node.expand, node.verify) == (wanted, wanted, True)


# -- the static tree ----------------------------------------------------------------------


def test_the_default_tree_is_eagle_1s() -> None:
    """25 nodes, 4 8 8 3 2 of them in its five layers; it fits exactly where it says."""
    policy = StaticTree()
    sizes = [sum(len(path) == depth for path in policy.paths) for depth in range(1, 7)]
    assert sizes == [4, 8, 8, 3, 2, 0]
    policy.check(TreeShape(topk=4, num_steps=5, num_draft_tokens=26))


def test_a_static_trees_rows_are_its_nodes_with_children_in_path_order() -> None:
    """Paths [0] [1] [2], [1] and [2] with children: those two are rows 0 and 1 of layer 2."""
    policy = StaticTree([[2, 0], [0], [1], [2], [1, 2], [1, 0]])
    first = policy.grow(blank(depth=1, rows=1))
    assert first.key.tolist() == [[[1.0, 1.0, 1.0]]] * 2
    assert first.expand.tolist() == [[[NEVER, 0.0, -1.0]]] * 2
    second = policy.grow(blank(depth=2, rows=3))
    assert second.key.tolist() == [
        [[1.0, NEVER, 1.0], [1.0, NEVER, NEVER], [NEVER] * 3]
    ] * 2  # fmt: skip
    assert (second.expand == NEVER).all()
    deeper = policy.grow(blank(depth=3, rows=3))
    assert (deeper.key == NEVER).all()
    assert (deeper.expand == NEVER).all()


def blank(depth: int, rows: int, *, batch: int = 2, topk: int = 3) -> TreeLayer:
    """A layer whose numbers do not matter."""
    half = torch.full((batch * rows * topk,), 0.5)
    nodes = DraftLayer(depth, half, half, half, torch.ones_like(half, dtype=torch.bool))
    return TreeLayer(nodes, batch, topk)


def test_static_trees_are_equal_when_their_paths_are() -> None:
    """In whatever order, and after use."""
    policy = StaticTree([[0], [1], [0, 0]])
    policy.grow(blank(depth=1, rows=1))
    assert policy == StaticTree(((0,), (0, 0), (1,)))
    assert hash(policy) == hash(StaticTree(((0,), (0, 0), (1,))))
    assert policy != StaticTree([[0]])


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "paths must be a list of paths such as [[0], [1], [0, 0]], got []"),
        (5, "paths must be a list of paths"),
        ("00", "paths must be a list of paths"),
        (None, "paths must be a list of paths"),
        ([0, 1], "a path is a list of ranks, whole numbers >= 0, got 0"),
        ([[0], []], "a path is a list of ranks, whole numbers >= 0, got []"),
        ([[0], [-1]], "whole numbers >= 0, got [-1]"),
        ([[0], [0.0]], "whole numbers >= 0, got [0.0]"),
        ([[True]], "whole numbers >= 0, got [True]"),
        ([["0"]], "whole numbers >= 0, got ['0']"),
        ([[0], [1], [0]], "path [0] is given twice"),
        ([[0], [0, 1, 2]], "path [0, 1, 2] needs its ancestor [0, 1], which is missing"),
        ([[1, 0]], "path [1, 0] needs its ancestor [1], which is missing"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths: Any, said: str) -> None:
    with refused(said):
        build_tree_policy(C2TConfig("static", policy_options={"paths": paths}))


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        (TreeShape(3, 5, 26), "--speculative-eagle-topk 4"),
        (TreeShape(4, 4, 26), "--speculative-num-steps 5"),
        (TreeShape(4, 5, 25), "--speculative-num-draft-tokens 26"),
        (
            TreeShape(2, 3, 8),
            "--speculative-eagle-topk 4 --speculative-num-steps 5 "
            "--speculative-num-draft-tokens 26",
        ),
    ],
)
def test_a_static_tree_that_does_not_fit_names_the_flags_to_raise(
    shape: TreeShape, flags: str
) -> None:
    with pytest.raises(ConfigError, match=f"needs at least {flags}$"):
        StaticTree().check(shape)


def test_a_layer_with_more_parents_than_beams_does_not_fit() -> None:
    """No rank exceeds 1, but three nodes of layer 2 have children."""
    layer_2 = [[0, 0], [0, 1], [1, 0]]
    policy = StaticTree([[0], [1], *layer_2, *([*path, 0] for path in layer_2)])
    policy.check(TreeShape(3, 3, 9))
    with pytest.raises(ConfigError, match=r"needs at least --speculative-eagle-topk 3$"):
        policy.check(TreeShape(2, 3, 9))


# -- the fork -----------------------------------------------------------------------------


@given(layers(), st.none() | st.integers(1, 4))
def test_a_fork_keeps_first_tokens_then_first_children(layer: TreeLayer, width: int | None) -> None:
    """Ranked by joint probability, forwarded in their order."""
    nodes = judged(layer, Fork(width))
    for node in nodes:
        branches = layer.topk if width is None else width
        kept = node.child < (branches if layer.depth == 1 else 1)
        assert node.key == (node.joint if kept else NEVER)
        assert (node.expand > NEVER) is kept
    for b in range(layer.batch):
        forwarded = [n.expand for n in nodes if n.request == b and n.expand > NEVER]
        assert forwarded == sorted(set(forwarded), reverse=True)


def fork(width: int, depth: int) -> Trees:
    """Forks of two requests, drafted by a model of random probabilities."""
    generator = torch.Generator().manual_seed(depth)
    topk = width + 1
    shape = TreeShape(topk, depth, 1 + width * depth)
    growth = TreeGrowth(Fork(width), shape, 2, "cpu")
    for layer in range(depth):
        rows = topk if layer else 1
        prob = torch.rand((2, rows, topk), generator=generator).sort(descending=True).values
        growth.add(torch.ones_like(prob).long(), prob, {"entropy": torch.zeros(2 * rows)})
    return growth.finish(torch.tensor([7, 8]))[0]


@pytest.mark.parametrize("width", [1, 3])
def test_the_mask_of_a_fork_is_the_leading_block_of_a_deeper_forks(width: int) -> None:
    """The paper's sliced mask: built once, cut where drafting stops."""
    full = visible_nodes(fork(width, 4).parents, 4)
    assert full.shape == (2, 1 + width * 4, 1 + width * 4)
    for depth in range(1, 5):
        size = 1 + width * depth
        trees = fork(width, depth)
        assert (trees.num_nodes == size).all()
        assert torch.equal(visible_nodes(trees.parents, depth), full[:, :size, :size])


def test_a_fork_wider_than_the_draft_is_refused() -> None:
    Fork(4).check(TreeShape(4, 1, 2))
    Fork().check(TreeShape(2, 1, 2))
    with pytest.raises(
        ConfigError, match="width 4 needs --speculative-eagle-topk 4 or more, got 3"
    ):
        Fork(4).check(TreeShape(3, 1, 5))


# -- the menu -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", tree_policy_names())
def test_every_tree_policy_is_built_under_its_name_and_accepts_eagle_1s_shape(name: str) -> None:
    policy = build_tree_policy(C2TConfig(policy=name))
    assert policy.name == name
    assert is_tree_policy(policy)
    assert isinstance(policy.needs, frozenset)
    policy.check(TreeShape(topk=4, num_steps=5, num_draft_tokens=26))


def test_trees_offer_the_tree_rules_and_every_gate_with_a_confidence() -> None:
    gates = ["c2t", "c2t-log", "c2t-plus", "dyjoint", "dymax", "logistic"]
    assert tree_policy_names() == sorted([*TREE_POLICIES, *gates, *(f"{g}-eagle2" for g in gates)])


@pytest.mark.parametrize("name", ["fixed", "entropy", "mcsd", "entropy-eagle2"])
def test_a_rule_without_a_confidence_cuts_chains_only(name: str) -> None:
    with refused(f"policy {name} cuts chains only: set --speculative-eagle-topk 1"):
        build_tree_policy(C2TConfig(policy=name))


@pytest.mark.parametrize("name", [*TREE_POLICIES, "c2t-eagle2"])
def test_a_tree_rule_is_refused_for_chains(name: str) -> None:
    with pytest.raises(ConfigError, match=f"policy {name} grows trees: set --speculative-eagle-t"):
        build_policy(C2TConfig(policy=name))


def test_the_same_gate_cuts_chains_and_prunes_trees() -> None:
    config = C2TConfig(policy="dyjoint", beta=0.2)
    gate = build_policy(config)
    assert gate == DyJoint(0.2)
    assert build_tree_policy(config) == GatedTree(gate)
    assert build_tree_policy(replace(config, policy="dyjoint-eagle2")) == GatedEAGLE2(gate)


def test_the_default_policy_prunes_trees_with_its_shipped_classifier() -> None:
    default, after = build_tree_policy(C2TConfig()), build_tree_policy(C2TConfig("c2t-eagle2"))
    assert isinstance(default, GatedTree)
    assert isinstance(after, GatedEAGLE2)
    assert default.gate.name == after.gate.name == "c2t"
    assert default.gate.beta == after.gate.beta == POLICIES["c2t"].beta


def test_layer_limit_belongs_to_the_tree_and_other_options_to_the_gate() -> None:
    options = {"layer_limit": 3}
    policy = build_tree_policy(C2TConfig(policy="dymax", beta=0.7, policy_options=options))
    assert isinstance(policy, GatedTree)
    assert (policy.layer_limit, policy.gate.beta) == (3, 0.7)
    assert options == {"layer_limit": 3}, "the configuration stays as it was"


NATS = "stop_entropy must be a number of nats >= 0, got"
DEPTHS = "depth must be one of fixed, dynamic, got"
WHOLE = "must be a whole number >= 1, got"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dymax", {"layer_limit": 0}, f"layer_limit {WHOLE} 0"),
        ("dymax", {"layer_limit": 1.5}, f"layer_limit {WHOLE} 1.5"),
        ("dymax", {"layer_limit": True}, f"layer_limit {WHOLE} True"),
        ("dymax-eagle2", {"layer_limit": 2}, "does not take these options (['layer_limit'])"),
        ("dymax", {"width": 2}, "policy dymax does not take these options (['width'])"),
        ("eagle2", {"width": 2}, "policy eagle2 does not take these options (['width'])"),
        ("static", {"_tables": {}}, "policy static does not take these options"),
        ("entropy-width", {"depth": "deep"}, f"{DEPTHS} 'deep'"),
        ("entropy-width", {"depth": 4}, f"{DEPTHS} 4"),
        ("entropy-width", {"depth": ["fixed"]}, f"{DEPTHS} ['fixed']"),
        ("entropy-width", {"stop_entropy": -0.1}, f"{NATS} -0.1"),
        ("entropy-width", {"stop_entropy": math.nan}, f"{NATS} nan"),
        ("entropy-width", {"stop_entropy": True}, f"{NATS} True"),
        ("entropy-width", {"stop_entropy": "1"}, f"{NATS} '1'"),
        *(("fork", {"width": w}, f"width {WHOLE} {w!r}") for w in (0, -1, 1.5, True, "3")),
        ("nonsense", {}, "unknown c2t policy 'nonsense'; known: c2t, c2t-eagle2, "),
        ("no_such_module:Rule", {}, "cannot load c2t policy"),
    ],
)
def test_what_a_tree_policy_does_not_take_is_refused_in_one_line(
    name: str, options: dict[str, Any], said: str
) -> None:
    with refused(said):
        build_tree_policy(C2TConfig(policy=name, policy_options=options))


def test_a_threshold_for_a_tree_rule_without_one_is_refused() -> None:
    with refused("policy eagle2 has no threshold: drop --c2t-beta"):
        build_tree_policy(C2TConfig("eagle2", beta=0.5))


def test_options_arrive_from_json() -> None:
    text = json.dumps({"policy": "static", "policy_options": {"paths": [[1], [0], [0, 0]]}})
    policy = build_tree_policy(C2TConfig.from_json(text, source="test"))
    assert policy == StaticTree(((0,), (0, 0), (1,)))


@dataclass(frozen=True)
class Own:
    """A user's tree rule: so many children of every row."""

    children: int = 1
    name: ClassVar[str] = "own"
    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, shape: TreeShape) -> None:
        """Any shape will do."""

    def grow(self, layer: TreeLayer) -> Growth:
        beyond = torch.arange(layer.topk) >= self.children
        return Growth(*[layer.joint.masked_fill(beyond, NEVER)] * 2)


def test_a_tree_rule_of_the_users_own_is_loaded_by_module_and_class() -> None:
    config = C2TConfig(policy=f"{__name__}:Own", policy_options={"children": 2})
    assert build_tree_policy(config) == Own(2)


def test_a_gate_of_the_users_own_prunes_trees() -> None:
    config = C2TConfig(policy=f"{__name__}:ByMark", beta=0.3, policy_options={"layer_limit": 4})
    assert build_tree_policy(config) == GatedTree(ByMark(0.3), 4)
    after = C2TConfig(policy=f"{__name__}:ByMark-eagle2", beta=0.3)
    assert build_tree_policy(after) == GatedEAGLE2(ByMark(0.3))


# -- what trees use by default ------------------------------------------------------------


@pytest.mark.parametrize("name", ["c2t", "c2t-log", "c2t-plus"])
def test_trees_use_the_shipped_classifier_that_learnt_from_trees(name: str) -> None:
    for_trees = build_tree_policy(C2TConfig(policy=name)).gate.classifier
    for_chains = build_policy(C2TConfig(policy=name)).classifier
    assert {origin["topk"] for origin in for_trees.training["origins"]} == {8}
    assert for_trees.features == for_chains.features
    assert for_trees.training != for_chains.training


def test_a_named_classifier_is_the_one_that_is_used() -> None:
    gate = build_tree_policy(C2TConfig(policy="c2t", classifier="c2t")).gate
    assert gate.classifier.training == build_policy(C2TConfig(policy="c2t")).classifier.training


@pytest.mark.parametrize("name", ["c2t", "c2t-log", "c2t-plus", "dyjoint", "logistic"])
def test_the_default_threshold_of_a_tree_is_its_own(name: str) -> None:
    gate = build_tree_policy(C2TConfig(policy=name)).gate
    assert gate.beta == type(gate).tree_beta
    assert build_tree_policy(C2TConfig(policy=f"{name}-eagle2")).gate.beta == gate.beta
    assert build_tree_policy(C2TConfig(policy=name, beta=0.2)).gate.beta == 0.2
    assert build_policy(C2TConfig(policy=name)).beta == type(gate).beta
