"""The tables: rules on made-up recordings, against counting by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from eval import recordings
from eval.baselines import logistic
from eval.bench.provenance import conditions
from eval.prompts import EVALUATION_SETS, Prompt, demo_mix, public_mix
from eval.recordings import MANIFEST, Recorded, demo_pair, manifest, record
from eval.server import Launch
from eval.tables import __main__ as command
from eval.tables import report, rules, thresholds
from eval.tables.markdown import difference, signed, with_interval
from eval.tables.tree_replay import Forest, replay_trees
from sglang_c2t.offline.curves import Curve
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.offline.train import RECIPES, TrainSettings, train_classifier
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.gated_tree import GatedTree
from tests.recordings import Draft, random_chains, random_trees, recording, tree_origin, write

FAMILIES = ("code", "math", "talk")
SHAPE = TreeShape(2, 3, 11)


def by_family(drafts: list[Draft]) -> list[Draft]:
    """Requests of three families in turn."""
    numbers = (int(draft.request.split("/")[1]) for draft in drafts)
    named = (f"{FAMILIES[number % 3]}/{number}" for number in numbers)
    return [replace(draft, request=rid) for draft, rid in zip(drafts, named, strict=True)]


@pytest.fixture(scope="module")
def chains() -> rules.Recorded:
    made = by_family(random_chains(30, 12, 6, seed=1))
    return rules.Recorded.of(recording(made, roots="every"))


@pytest.fixture(scope="module")
def trees() -> rules.Recorded:
    made = by_family(random_trees(18, 8, topk=2, num_steps=3, seed=2))
    return rules.Recorded.of(recording(made, roots="every", origin=tree_origin(SHAPE)))


@pytest.fixture(scope="module")
def tables(chains: rules.Recorded, trees: rules.Recorded) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "SETTINGS", TrainSettings(steps=50))
        patch.setattr(report, "TREE_SIZES", (4, 2, 6))
        return command.tables(chains, trees, Console(quiet=True))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("chains", "trees") for name in ("dyjoint", "c2t-plus")]
    + [("chains", "logistic")],  # it is served for chains only
)
def test_tables_rule_replayed_by_its_scores_counts_as_its_policy(
    request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    """Confidences are looked up; the policy computes them layer by layer."""
    recorded: rules.Recorded = request.getfixturevalue(kind)
    data, gate = recorded.recording, DyJoint
    if name == "logistic":
        net = logistic.train(data)
        scores, gate = logistic.path_scores(net, data), partial(logistic.Logistic, net)
    elif name == "c2t-plus":
        # No input that chains lack: what trees read beside them is asked in other tests.
        classifier = train_classifier(data, RECIPES[name], settings=TrainSettings(steps=100))
        scores = classifier.confidence(data.layer(classifier.features.needs))
        gate = partial(C2TPlus, classifier)
    else:
        scores = data.nodes["joint"]
    grid = rules.TREE_GRID if recorded.trees else rules.ODDS_GRID
    replayed = vars(recorded.curve(scores)).values()
    for at in (1, len(grid) // 2, len(grid) - 3):
        policy: Any = gate(grid[at])
        outcome = (
            replay_trees(GatedTree(policy), recorded.replayed)
            if isinstance(recorded.replayed, Forest)
            else replay(policy, recorded.replayed)
        )
        expected = vars(Curve.of([outcome])).values()
        assert [v[at].tolist() for v in replayed] == [v[0].tolist() for v in expected]


def test_tables_classifier_learns_from_its_family_and_is_tested_on_the_others(
    chains: rules.Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "SETTINGS", TrainSettings(steps=1))
    monkeypatch.setattr(rules, "LEARN", {"c2t-log": None})
    joint, *found = chains.rules()
    assert joint.tests(FAMILIES) == list(FAMILIES)
    assert [rule.learnt_on for rule in found] == list(FAMILIES)
    assert found[0].tests(FAMILIES) == ["math", "talk"]
    others = [chains.change(r.curve, joint.curve, 3, "math") for r in (found[0], found[2])]
    mean = report.Comparison(chains, [joint, *found], (3,)).change(
        "c2t-log", "dyjoint", 3, ["math"]
    )
    assert mean == pytest.approx(np.mean(others, axis=0), nan_ok=True)
    # It is the same whatever becomes of the others' drafts.
    accept = chains.recording.nodes["accept"]
    code = torch.tensor([group == "code" for group in chains.recording.groups()])
    of_draft = chains.recording.drafts["request"].long()
    of_code = code[of_draft[chains.recording.nodes["draft"].long()]]
    turned = torch.where(of_code, accept, 1 - accept)
    changed = replace(chains.recording, nodes=chains.recording.nodes | {"accept": turned})
    _, again, another, _ = rules.Recorded.of(changed).rules()
    assert torch.equal(again.scores, found[0].scores)
    assert not torch.equal(another.scores, found[1].scores)


def test_tables_nodes_are_read_where_the_family_accepts_as_fixed_drafts(
    chains: rules.Recorded,
) -> None:
    """Resample by resample, and paired with the rival's."""
    joint = chains.curve(chains.recording.nodes["joint"])
    other = chains.curve(chains.recording.nodes["prob"])
    changes = chains.change(other, joint, 3, "math")
    members = np.array([[float(group == "math") for group in chains.groups]])
    for weights, found in zip(chains.weights[:6, None], changes, strict=False):
        mine = weights * members
        tau = np.minimum(chains.sized(3).tau(mine)[:, 0], chains.sized(6).tau(mine)[:, 0])
        gammas = [curve.gamma_at(tau, mine)[0] for curve in (other, joint)]
        assert found == pytest.approx(100 * (gammas[0] / gammas[1] - 1))
    assert len(set(changes)) > 2


def roots_visited(first_root: list[int], accepted: list[float]) -> list[float]:
    """Return the accepted drafts at each root that a server visits."""
    found = []
    for at, end in pairwise(first_root):
        root = at
        while root < end:
            found.append(accepted[root])
            root += int(accepted[root]) + 1
    return found


def test_tables_acceptance_is_counted_where_a_server_comes_by(chains: rules.Recorded) -> None:
    replayed = chains.replayed
    assert isinstance(replayed, Chains)
    survival = report.survival(replayed, range(replayed.num_requests))
    visited = roots_visited(replayed.first_root.tolist(), replayed.num_correct.tolist())
    whole = chains.sized(6).tau(chains.weights)[0, 0]
    assert 1 + sum(survival) == pytest.approx(1 + sum(visited) / len(visited))
    assert 1 + sum(survival) == pytest.approx(whole)
    assert report.conditional([0.5, 0.25, 0.2, 0.0, 0.0]) == ["0.50", "0.50", "0.80", "0.00", "-"]


def test_tables_name_every_rule_and_every_loss(tables: list[str]) -> None:
    text = "\n".join(tables)
    for kind, rivals in (("chains", 2), ("trees", 3)):
        told = [line for line in tables if line.startswith(f"- {kind}, ")]
        assert [line.split("`")[1] for line in told] == list(rules.OURS)
        assert all(line.count("against") == rivals for line in told)
        start = tables.index(f"### {kind}: trained on one family, tested on the others")
        rows = [line.split(" | ")[0] for line in tables[start:] if line.startswith("| ")]
        learnt = [f"| `{name}`, {family}" for family in FAMILIES for name in rules.LEARN]
        first = 2 if kind == "chains" else 3  # the rival, in trees `dyjoint` too
        assert rows[first : first + len(learnt)] == learnt
    assert "nan" not in text
    assert len(tables) + 6 <= 150


@pytest.mark.parametrize(
    ("drawn", "verdict"),
    [((9, -3, -2, -1), "fewer"), ((-9, 1, 2, 3), "more"), ((9, -1, 0, 1), "no difference"),
     ((9, np.nan, 2, 3), "no difference")],
)  # fmt: skip
def test_tables_verdict_needs_an_interval_off_zero(drawn: Any, verdict: str) -> None:
    assert rules.verdict(np.array(drawn, dtype=float)) == verdict


def test_thresholds_equal_accept_length_accepts_what_the_published_rule_does() -> None:
    made = Chains.from_recording(recording(random_chains(40, 12, 6, seed=3), roots="every"))
    published = C2T(thresholds.shipped(C2T))
    beta = thresholds.equal_accept_length(published, C2TPlus, made)
    assert beta == round(beta, 2)
    plus = thresholds.shipped(C2TPlus)

    def accept_length(policy: C2T) -> float:
        return replay(policy, made, max_length=5).accept_length()

    assert accept_length(C2TPlus(plus, beta - 0.03)) >= accept_length(published)
    assert accept_length(C2TPlus(plus, beta + 0.03)) <= accept_length(published)


def test_tables_conditions_hide_where_folders_lie(tmp_path: Path) -> None:
    told = conditions("eval.tables", ["--data", str(tmp_path), "--chains", "3"])
    assert "`python -m eval.tables --data DIR --chains 3`" in told
    for named in ("sglang 0", "torch 2", "cores", "20"):
        assert named in told


def test_markdown_marks_only_an_interval_off_zero_and_counts_resamples_without_a_value() -> None:
    assert signed(-3.0, -5.0, -1.0) == "**-3.0 [-5.0, -1.0]**"
    assert signed(+3.0, +1.0, +5.0) == "*+3.0 [+1.0, +5.0]*"
    assert signed(-3.0, -5.0, +1.0) == "-3.0 [-5.0, +1.0]"
    values = np.array([-1.0, 1.0, np.nan, 2.0, np.nan])
    assert with_interval(values) == "-1.00 (not reached in 2 of 4)"
    assert difference(values) == "-1.0 (not reached in 2 of 4)"
    assert difference(np.array([-1.0, -2.0, -1.0])).startswith("**-1.0 [-2.0")


# -- recordings ----------------------------------------------------------------------------------


def test_recording_of_other_prompts_models_or_settings_is_refused(tmp_path: Path) -> None:
    """Recordings are kept between runs; an old one must not pass for a new one."""
    asked, pair = demo_mix(2), demo_pair("EAGLE")
    write(tmp_path / "kept", random_chains(2, 3, 4), roots="every")
    kept = tmp_path / "kept" / MANIFEST
    for other in (
        manifest(pair, demo_mix(1)),
        manifest(demo_pair("EAGLE3"), asked),
        manifest(pair, asked, Recorded(3)),
        manifest(pair, asked, recordings.CHAINS._replace(topk=2)),
    ):
        kept.write_text(json.dumps(other))
        with pytest.raises(ValueError, match="recording of other prompts"):
            record(pair, asked, tmp_path / "kept")
    kept.write_text(json.dumps(manifest(pair, asked)))
    assert record("EAGLE", asked, tmp_path / "kept").num_drafts == 6


def test_recording_serves_the_pair_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []

    def refuse(launch: Launch, _: Path) -> None:
        launched.append(launch)
        raise RuntimeError("seen")

    monkeypatch.setattr(recordings, "running", refuse)
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    pair = recordings.Pair("a pair", target, draft, "EAGLE3", {"OMP_NUM_THREADS": "2"})
    what = Recorded(5, topk=4)
    with pytest.raises(RuntimeError, match="seen"):
        record(pair, [Prompt("a", "b")], tmp_path / "made", what)
    argv = " ".join(launched[0].argv(30000))
    assert f"--model-path {target}" in argv
    assert f"--speculative-draft-model-path {draft}" in argv
    assert "--speculative-num-draft-tokens 69" in argv
    assert launched[0].env == {"OMP_NUM_THREADS": "2"}
    assert not (tmp_path / "made").exists(), "complete or absent"


def test_real_prompts_take_public_sets_of_the_folder_and_ours_as_one_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [Prompt(("chat", "humaneval", "arithmetic")[i % 3], f"ours {i}") for i in range(40)]
    monkeypatch.setattr(recordings, "real_mix", lambda n: ours[:n])
    monkeypatch.setattr(
        recordings, "asked", lambda sets: {name: (file, str) for name, (file, _) in sets.items()}
    )
    for family, (name, _) in recordings.EVALUATION_SETS.items():
        lines = (json.dumps({"turns": [f"{family} {i}"]}) for i in range(9))
        (tmp_path / name).write_text("\n".join(lines))
    found = recordings.real_prompts(4, tmp_path)
    families = [prompt.family for prompt in found]
    assert sorted(set(families)) == ["gsm8k", "humaneval", "mt_bench", "own"]
    assert all(families.count(name) == 4 for name in families)
    of_set = {prompt.text for prompt in found if prompt.family == "humaneval"}
    assert of_set == {f"humaneval {i}" for i in range(4)}
    alone = [prompt.family for prompt in recordings.real_prompts(4, None)]
    assert sorted(alone) == ["humaneval"] * 4 + ["own"] * 4


def test_public_set_leaves_out_prompts_that_do_not_fit_and_names_a_missing_file(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"must hold gsm8k_eagle80\.jsonl"):
        public_mix(tmp_path, EVALUATION_SETS, 3)
    for name, _ in EVALUATION_SETS.values():
        rows = [{"turns": ["x" * 5000]}, *({"turns": [f"{name} {i}"]} for i in range(5))]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    mix = public_mix(tmp_path, EVALUATION_SETS, 3)
    assert [prompt.family for prompt in mix].count("gsm8k") == 3
    assert max(len(prompt.text) for prompt in mix) < 100
