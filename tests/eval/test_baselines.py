"""The baselines of other papers: each does what its formula says, and learns what it reads."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.baselines import (
    MCSD,
    EntropyWidth,
    Fork,
    Logistic,
    MCSDHidden,
    MCSDInputs,
    StaticTree,
    logistic,
    mcsd,
)
from eval.baselines.__main__ import main
from eval.baselines.entropy import branching_factor
from eval.baselines.estimators import reached, save
from eval.baselines.logistic import DepthLogistic
from eval.baselines.mcsd import TOPK_PROBS, topk_prob
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.offline.train import TrainSettings
from sglang_c2t.policies import build_policy, build_tree_policy, policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.trial import try_policy
from tests.recordings import HIDDEN_SIZE, chain, random_chains, recording, write
from tests.refusals import refused


def layer(
    prob: list[float],
    entropy: list[float] | None = None,
    *,
    depth: int = 1,
    alive: list[bool] | None = None,
    parent: DraftLayer | None = None,
    **measured: Any,
) -> DraftLayer:
    return DraftLayer(
        depth=depth,
        prob=torch.tensor(prob),
        joint=torch.tensor(prob),
        entropy=torch.tensor([1.0] * len(prob) if entropy is None else entropy),
        alive=torch.tensor([True] * len(prob) if alive is None else alive, dtype=torch.bool),
        measured={name: torch.tensor(values) for name, values in measured.items()},
        parent=parent,
    )


# -- chains -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"), [({}, [True, True, False]), ({"max_entropy": 0.5}, [False, True, False])]
)
def test_entropy_keeps_tokens_up_to_its_threshold(options: dict, kept: list[bool]) -> None:
    policy = build_policy(C2TConfig("eval.baselines:Entropy", policy_options=options))
    assert policy.keep(layer([0.9, 0.2, 0.3], [1.0, 0.5, 1.5])).tolist() == kept


def test_logistic_keeps_while_the_product_of_its_estimates_reaches_beta(tmp_path: Path) -> None:
    """Against a loop over each chain; two chains, four depths, parameters for three."""
    net = DepthLogistic(3)
    net.weight.data, net.bias.data = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.5, -1.0, 0.0])
    save(net, tmp_path / "mine.safetensors")
    options = {"weights": str(tmp_path / "mine.safetensors")}
    policy = build_policy(C2TConfig("eval.baselines:Logistic", policy_options=options))
    margins = [[3.0, 2.0, 4.0, 0.1], [1.0, 0.0, 0.2, 3.0]]  # [chain][depth]
    products = [1.0, 1.0]
    parent = None
    for depth in range(1, 5):
        column = [row[depth - 1] for row in margins]
        parent = layer([0.5, 0.5], depth=depth, parent=parent, margin=column)
        for i, margin in enumerate(column):
            w, b = [(1.0, 0.5), (2.0, -1.0), (0.5, 0.0), (0.5, 0.0)][depth - 1]
            products[i] *= 1 / (1 + math.exp(-(w * margin + b)))
        assert policy.keep(parent).tolist() == [product >= 0.3 for product in products]
    assert products[0] > 0.3 > products[1], "the two chains end differently"


@pytest.mark.parametrize(
    ("alive", "per_request", "kept"),
    [
        # Only the first token is likely, by the paper's threshold of 0.4.
        ([True, True, True], True, [True, False, False]),
        ([True, True, True], False, [True, True, True]),
        ([True, False, False], False, [True, True, True]),
        # The first sequence has ended: it keeps no other sequence in the draft.
        ([False, True, True], False, [False, False, False]),
    ],
)
def test_mcsd_stops_when_no_living_sequence_is_likely(
    tmp_path: Path, alive: list[bool], per_request: bool, kept: list[bool]
) -> None:
    """The decision model here is sigmoid(4 p - 2), p the largest probability: 0.83, 0.31, 0.17."""
    net = ConfidenceNet(TOPK_PROBS + 1, [1])
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    net.hidden[0].weight.data[0, 0] = 1.0
    net.out.weight.data[0, 0], net.out.bias.data[0] = 4.0, -2.0
    save(net, tmp_path / "mine.safetensors")
    options = {"weights": str(tmp_path / "mine.safetensors"), "per_request": per_request}
    policy: Any = build_policy(C2TConfig("eval.baselines:MCSD", policy_options=options))
    probs = [[p] + [0.01] * (TOPK_PROBS - 1) for p in (0.9, 0.3, 0.1)]
    assert policy.keep(layer([0.5] * 3, topk_prob=probs, alive=alive)).tolist() == kept
    assert policy.batch_wide is not per_request


@pytest.mark.parametrize("vocabulary", [4, 50])
def test_the_largest_probabilities_fall_and_are_padded_with_zeros(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary)
    logits[1, 0] = -torch.inf
    expected = torch.zeros(3, TOPK_PROBS)
    ordered = logits.softmax(1).sort(descending=True).values[:, :TOPK_PROBS]
    expected[:, : ordered.shape[1]] = ordered
    torch.testing.assert_close(topk_prob(logits), expected)


def test_a_decision_model_of_hidden_states_measures_them_and_names_a_draft_without() -> None:
    policy = MCSDHidden(ConfidenceNet(4, [3, 2]), beta=0.5)
    hidden = torch.randn(3, 4)
    assert policy.measure(torch.zeros(3, 9), hidden) == {"hidden": hidden}
    expected = policy.weights(hidden).sigmoid().amax() >= 0.5
    kept = policy.keep(layer([0.5] * 3, hidden=hidden.tolist()))
    assert kept.tolist() == [bool(expected)] * 3
    with pytest.raises(ValueError, match="returns no hidden state"):
        policy.measure(torch.zeros(3, 9), None)


NATS = "must be a number of nats >= 0, got"
DEPTHS = "depth must be one of fixed, dynamic, got"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("MCSD", {"weights": "absent.safetensors"}, "cannot read weights"),
        ("MCSD", {"weights": "LOGISTIC"}, "holds no decision model"),
        ("MCSD", {"weights": "MCSD", "per_request": 1}, "per_request must be true or false, got 1"),
        ("Logistic", {"weights": "MCSD"}, "holds no logistic per depth"),
        *(("Entropy", {"max_entropy": x}, f"max_entropy {NATS} {x!r}")
          for x in (-1, math.nan, "1")),
        ("StaticTree", {"_tables": {}}, "does not take these options"),
        *(("EntropyWidth", {"depth": x}, f"{DEPTHS} {x!r}") for x in ("deep", ["fixed"])),
        *(("EntropyWidth", {"stop_entropy": x}, f"stop_entropy {NATS} {x!r}")
          for x in (-0.1, math.nan, True)),
        *(("Fork", {"width": w}, f"width must be a whole number >= 1, got {w!r}")
          for w in (0, 1.5, True, "3")),
    ],
)  # fmt: skip
def test_an_option_that_a_baseline_cannot_use_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    save(DepthLogistic(3), tmp_path / "LOGISTIC")
    save(ConfidenceNet(TOPK_PROBS + 1), tmp_path / "MCSD")
    if (tmp_path / options.get("weights", "-")).exists():
        options = options | {"weights": str(tmp_path / options["weights"])}
    build = build_tree_policy if name in ("StaticTree", "EntropyWidth", "Fork") else build_policy
    with refused(said):
        build(C2TConfig(f"eval.baselines:{name}", policy_options=options))


def test_a_gate_with_a_path_of_its_own_is_served_for_chains_only(tmp_path: Path) -> None:
    save(DepthLogistic(3), tmp_path / "mine.safetensors")
    config = C2TConfig(
        "eval.baselines:Logistic",
        policy_options={"weights": str(tmp_path / "mine.safetensors")},
    )
    assert isinstance(policy_for(config, TreeShape(1, 3, 4)), Logistic)
    with refused("cuts chains only"):
        policy_for(config, TreeShape(2, 3, 8))


# -- what they learn ----------------------------------------------------------------------


def test_a_label_counts_where_the_target_reached_the_token() -> None:
    """Children of the root, and those of accepted tokens."""
    drafts = [chain([0.5] * 4, [1, 1, 0, 0]), chain([0.5] * 2, [0, 0])]
    assert reached(recording(drafts)).tolist() == [True, True, True, False, True, False]


def test_the_logistic_is_fitted_to_its_optimum() -> None:
    """Where the mean estimate of each depth is the share that the target accepted."""
    data = recording(random_chains(40, roots=30, depth=3))
    net = logistic.train(data)
    known = reached(data)
    prompt = data.drafts["prompt"][data.nodes["draft"].long()]
    for depth in (1, 2, 3):
        rows = known & (data.nodes["depth"] == depth)
        estimates = net(data.nodes["margin"], data.nodes["depth"].float()).sigmoid()[rows]
        accepted = data.nodes["accept"][rows].float()
        assert estimates.mean().item() == pytest.approx(accepted.mean().item(), abs=0.02)
        assert net.weight[depth - 1] > 0, "a larger margin is a surer token"
    assert len(prompt.unique()) == 40


def test_path_scores_are_products_along_each_path() -> None:
    data = recording([chain([0.9, 0.5, 0.2], [1, 0, 0]), chain([0.4, 0.3], [0, 0])])
    net = DepthLogistic(3)
    net.weight.data, net.bias.data = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.5, -1.0, 0.0])
    net.requires_grad_(False)
    alone = net(data.nodes["margin"], data.nodes["depth"].float()).sigmoid().tolist()
    products = [alone[0], alone[0] * alone[1], math.prod(alone[:3]), alone[3], alone[3] * alone[4]]
    assert logistic.path_scores(net, data).tolist() == pytest.approx(products)


@pytest.mark.parametrize("rule", ["logistic", "mcsd", "mcsd-hidden"])
def test_a_trained_baseline_is_served_and_replayed_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """A larger share is accepted of the drafts that it leaves."""
    drafts, extra = random_chains(20, roots=40, depth=4), ("topk_prob", "hidden")
    write(tmp_path / "recorded", drafts, extra=extra, roots="every")
    out = tmp_path / "mine.safetensors"
    of_little = partial(TrainSettings, steps=2_500, batch_size=128, learning_rate=3e-3)
    monkeypatch.setattr(mcsd, "TrainSettings", of_little)
    assert main([rule, str(tmp_path / "recorded"), "--out", str(out)]) == 0
    kind: Any = {"logistic": Logistic, "mcsd": MCSD, "mcsd-hidden": MCSDHidden}[rule]
    each = {} if kind is Logistic else {"per_request": True}
    chains = Chains.from_recording(recording(drafts, extra=extra, roots="every"))
    betas = [0.0, *torch.linspace(0.3, 0.95, 27).tolist()]
    full, *others = (replay(kind(str(out), beta, **each), chains) for beta in betas)
    cut = min(others, key=lambda outcome: abs(outcome.gamma() - 2.5))
    assert full.gamma() == 4
    assert 1 < cut.gamma() < 3.7
    accepted = [float(of.num_correct.sum() / of.num_proposed.sum()) for of in (cut, full)]
    assert accepted[0] > 1.1 * accepted[1]


def test_a_recording_without_the_inputs_names_the_policy_that_records_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, random_chains(4, roots=3, depth=2))
    assert main(["mcsd", str(tmp_path), "--out", str(tmp_path / "out.safetensors")]) == 2
    assert "lacks topk_prob: record with eval.baselines:MCSDInputs" in capsys.readouterr().err


def test_the_policy_for_recordings_keeps_everything_and_measures_the_inputs() -> None:
    logits, hidden = torch.randn(2, 30), torch.randn(2, HIDDEN_SIZE)
    policy = MCSDInputs()
    assert policy.measure(logits, hidden).keys() == policy.needs == {"topk_prob", "hidden"}
    assert MCSDInputs(hidden=False).measure(logits, None).keys() == {"topk_prob"}
    assert policy.keep(layer([0.1, 0.9])).all()


# -- trees --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [EntropyWidth(), Fork(2), StaticTree([[0], [1], [1, 0]])])
def test_a_tree_baseline_is_asked_before_it_serves(policy: Any) -> None:
    try_policy(policy, TreeShape(2, 3, 9))


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


# -- the static tree ----------------------------------------------------------------------


def test_the_default_tree_is_eagle_1s() -> None:
    """25 nodes, 4 8 8 3 2 of them in its five layers; it fits exactly where it says."""
    policy = StaticTree()
    sizes = [sum(len(path) == depth for path in policy.paths) for depth in range(1, 7)]
    assert sizes == [4, 8, 8, 3, 2, 0]
    policy.check(TreeShape(topk=4, num_steps=5, num_draft_tokens=26))


def test_static_trees_are_equal_when_their_paths_are() -> None:
    """In whatever order, from JSON too, and after use."""
    text = json.dumps(
        {"policy": "eval.baselines:StaticTree", "policy_options": {"paths": [[1], [0], [0, 0]]}}
    )
    policy: Any = build_tree_policy(C2TConfig.from_json(text, source="test"))
    try_policy(policy, TreeShape(2, 2, 4))
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
        StaticTree(paths)


#: No rank exceeds 1, but three nodes of layer 2 have children.
NARROW = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("policy", "shape", "flags"),
    [
        (StaticTree(), TreeShape(3, 5, 26), "at least --speculative-eagle-topk 4$"),
        (StaticTree(), TreeShape(4, 4, 26), "at least --speculative-num-steps 5$"),
        (StaticTree(), TreeShape(4, 5, 25), "at least --speculative-num-draft-tokens 26$"),
        (StaticTree(), TreeShape(2, 3, 8), "--speculative-eagle-topk 4 --speculative-num-steps 5 "
         "--speculative-num-draft-tokens 26$"),
        (NARROW, TreeShape(2, 3, 9), "at least --speculative-eagle-topk 3$"),
        (Fork(4), TreeShape(3, 1, 5), "--speculative-eagle-topk 4 or more, got 3"),
    ],
)  # fmt: skip
def test_a_tree_that_does_not_fit_names_the_flags_to_raise(
    policy: Any, shape: TreeShape, flags: str
) -> None:
    with pytest.raises(ConfigError, match=f"needs .*{flags}"):
        policy.check(shape)
    NARROW.check(TreeShape(3, 3, 9))
    Fork(4).check(TreeShape(4, 1, 2))
    Fork().check(TreeShape(2, 1, 2))
