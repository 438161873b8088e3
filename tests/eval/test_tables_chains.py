"""The tables: what they print of small made-up recordings, and which prompts go into them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from eval.bench.provenance import conditions
from eval.prompts import (
    EVALUATION_SETS,
    OTHER_SETS,
    TRAINING_SETS,
    Prompt,
    long_mix,
    other_mix,
    public_mix,
)
from eval.recordings import MANIFEST, manifest, prompts, record
from eval.tables import chains as tables
from eval.tables import thresholds
from eval.tables.__main__ import arguments, per_draft
from eval.tables.markdown import bracket, difference, signed
from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.offline.compare import Curve, sweep
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from tests.recordings import random_chains, recording, write

EXTRA = ("topk_prob", "hidden", "entropy_top100", "entropy_top500")


def measured(monkeypatch: pytest.MonkeyPatch) -> tables.Measured:
    """A draft model whose tokens are accepted exactly as often as it says."""
    monkeypatch.setattr(tables, "NUM_RESAMPLES", 10)
    train = recording(random_chains(30, 12, 6, seed=1), roots="every", extra=EXTRA)
    halves = random_chains(20, 12, 6, seed=2)
    for number, chain in enumerate(halves):
        if number % 24 >= 12:  # every other request
            halves[number] = replace(chain, request=chain.request.replace("math", "code"))
    test = recording(halves, roots="every", extra=EXTRA)
    return tables.Measured.of("EAGLE", train, test)


def test_a_rule_that_was_swept_over_some_prompts_is_right_about_others() -> None:
    """As many tokens of other prompts, and other numbers of them."""
    classifier = load_classifier("c2t-plus")
    remembering = tables.gate("c2t-plus", classifier)
    forgetful = partial(C2T, classifier)
    for seed, requests in ((1, 20), (2, 20), (3, 9)):
        roots = random_chains(requests, 12, 6, seed=seed)
        chains = Chains.from_recording(recording(roots, roots="every"))
        for beta in (0.2, 0.6):
            found, right = (replay(rule(beta), chains) for rule in (remembering, forgetful))
            for name, values in vars(right).items():
                assert vars(found)[name].tolist() == values.tolist(), (seed, beta, name)


def test_every_rule_has_a_row_at_equal_accept_length(monkeypatch: pytest.MonkeyPatch) -> None:
    about, quiet = measured(monkeypatch), Console(quiet=True)
    classifiers = tables.classifiers_of(about, quiet)
    curves = tables.swept(tables.threshold_rules(classifiers), about.chains, quiet)
    lines = tables.headline_table({"EAGLE": (about, curves)})
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert rows[1:] == [f"| EAGLE: {name} - {rival}" for name, rival in tables.HEADLINES]

    lines += tables.draft_report(about, classifiers, curves)
    lines += tables.variant_table(about, about.dyjoint)
    start = lines.index("### EAGLE: at equal accept length")
    rows = [line.split(" | ")[0] for line in lines[start : start + 20] if line.startswith("| ")]
    assert rows[1:] == [f"| {name}" for name in ("fixed", *tables.DEFAULTS)]
    assert not [line for line in lines if "nan" in line or "not reached" in line]


def test_a_difference_is_taken_resample_by_resample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowly: gamma of both rules at the accept length of that very resample."""
    about = measured(monkeypatch)
    mine, rival = (sweep(rule, about.chains) for rule in (DyJoint, DyMax))
    once, drawn = about.difference(mine, rival, 3)
    assert once.shape == (1,)
    for weights, found in zip(about.drawn, drawn, strict=True):
        tau = about.fixed(3).tau(weights[None])[:, 0]
        gammas = [curve.gamma_at(tau, weights[None])[0] for curve in (mine, rival)]
        assert found == pytest.approx(100 * (gammas[0] / gammas[1] - 1))
    assert len(set(drawn)) == len(drawn), "resamples differ, so do their differences"
    assert drawn.min() < once[0] < drawn.max()


def test_an_accept_length_that_whole_drafts_miss_is_lowered_to_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It happens by chance; no rule could reach it. Such resamples are counted."""
    about = measured(monkeypatch)
    short = about.fixed(3)
    assert about.num_lowered(3, [None]) == 0
    about._fixed[3] = replace(short, num_correct=short.num_correct * 4)
    whole = about.fixed(6).tau(about.drawn)[:, 0]
    assert (about.target(3, about.drawn) == whole).all()
    assert about.num_lowered(3, [None]) == about.num_lowered(3, ["code", "math"]) == 10
    curve = sweep(DyJoint, about.chains)
    assert np.isfinite(curve.gamma_at(whole, about.drawn)).all()


def test_the_mean_over_families_weighs_them_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its own accept length; compared with each family measured by itself."""
    about = measured(monkeypatch)
    mine, rival = (sweep(rule, about.chains) for rule in (DyJoint, DyMax))
    once, drawn = about.mean_difference(mine, rival, 3)
    alone = []
    for family in ("code", "math"):
        rows = [name == family for name in about.groups]
        own = [Curve(*(getattr(c, f)[:, rows] for f in vars(c))) for c in (mine, rival)]
        tau = np.array([about.fixed(3).tau(np.array([rows], dtype=float))[0, 0]])
        ones = np.ones((1, sum(rows)))
        gammas = [curve.gamma_at(tau, ones)[0] for curve in own]
        alone.append(100 * (gammas[0] / gammas[1] - 1))
    assert once[0] == pytest.approx(sum(alone) / 2)
    assert len(set(drawn)) == len(drawn)


def test_a_default_threshold_accepts_what_the_published_rule_accepts() -> None:
    """On recordings of two draft models, counted as one; linear between thresholds."""
    tables_ = [recording(random_chains(20, 12, 6, seed=s), roots="every") for s in (3, 4)]
    chains = [Chains.from_recording(table) for table in tables_]
    published = C2T(load_classifier("c2t"))
    beta = thresholds.equal_accept_length(published, C2TPlus, thresholds.Traffic(chains))
    assert beta == round(beta, 2)

    def accept_length(policy: C2T) -> float:
        found = [replay(policy, some, max_length=5) for some in chains]
        steps, correct = (sum(float(getattr(o, n).sum()) for o in found)
                          for n in ("num_steps", "num_correct"))  # fmt: skip
        return 1 + correct / steps

    plus = load_classifier("c2t-plus")
    wanted = accept_length(published)
    assert accept_length(C2TPlus(plus, beta - 0.03)) >= wanted
    assert accept_length(C2TPlus(plus, beta + 0.03)) <= wanted
    lines = thresholds.table({"EAGLE": chains[0]}, {"EAGLE": chains[1]})
    assert sum(line.startswith("| `c2t") for line in lines) == 3


def test_the_conditions_of_a_table_hide_where_folders_lie(tmp_path: Path) -> None:
    told = conditions("eval.tables", ["--test-sets", str(tmp_path), "--num-test", "3"])
    assert "`python -m eval.tables --test-sets DIR --num-test 3`" in told
    assert str(tmp_path) not in told
    for named in ("sglang 0", "torch 2", "cores", "20"):
        assert named in told


def test_resamples_without_a_value_are_counted_instead_of_an_interval() -> None:
    drawn = np.array([1.0, np.nan, 2.0, np.nan])
    assert bracket(drawn) == " (not reached in 2 of 4)"
    assert difference(np.array([-1.0]), drawn) == "-1.0 (not reached in 2 of 4)"
    assert difference(np.array([-1.0]), np.array([-2.0, -1.0])).startswith("**-1.0 [-2.0")


def test_only_an_interval_off_zero_is_marked() -> None:
    assert signed(-3.0, -5.0, -1.0) == "**-3.0 [-5.0, -1.0]**"
    assert signed(+3.0, +1.0, +5.0) == "*+3.0 [+1.0, +5.0]*"
    assert signed(-3.0, -5.0, +1.0) == "-3.0 [-5.0, +1.0]"


def test_numbers_of_prompts_may_differ_by_draft() -> None:
    assert per_draft(["80", "EAGLE=40"]) == {"STANDALONE": 80, "EAGLE": 40, "EAGLE3": 80}
    for wrong in ("EAGLE4=3", "many", "EAGLE=0", "-3"):
        with pytest.raises(ValueError, match="is no number of prompts"):
            per_draft([wrong])
    with pytest.raises(ValueError, match="begin with a number"):
        per_draft(["EAGLE=40"])


def test_trees_have_numbers_and_files_of_their_own() -> None:
    chains, trees = arguments([]), arguments(["--trees", "--num-test", "9"])
    assert (chains.num_test["EAGLE"], chains.num_train["EAGLE"]) == (80, 100)
    assert (trees.num_test["EAGLE"], trees.num_train["EAGLE"]) == (9, 20)
    assert (chains.out.name, trees.out.name) == ("TABLES.md", "TREES.md")
    assert chains.work != trees.work
    long = arguments(["--long"])
    assert (long.num_train, long.out.name) == (arguments(["--trees"]).num_train, "LONG.md")
    with pytest.raises(SystemExit):
        arguments(["--num-test", "many"])


def write_sets(folder: Path, sets: dict) -> None:
    for name, _ in sets.values():
        rows = [{"turns": [f"{name} {i}"]} for i in range(5)] + [{"turns": ["x" * 5000]}]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))


def test_public_prompts_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    write_sets(tmp_path, EVALUATION_SETS)
    mix = public_mix(tmp_path, EVALUATION_SETS, 3)
    assert [p.family for p in mix].count("gsm8k") == 3
    assert max(len(p.text) for p in mix) < 100


def test_long_public_prompts_bring_the_answers_their_set_gives(tmp_path: Path) -> None:
    for name, _ in EVALUATION_SETS.values():
        rows = [{"turns": [f"task {i} of {name}"], "reference": f"done {i}"} for i in range(3)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    found = long_mix(1, tmp_path, len, 400)
    (of_set,) = [prompt.text for prompt in found if prompt.family == "mt_bench"]
    assert of_set.endswith("\n\nUser: task 0 of mt_bench.jsonl\nAssistant:")
    assert "User: task 2 of mt_bench.jsonl\nAssistant: done 2\n\n" in of_set
    assert "done 0" not in of_set


def test_a_missing_public_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold gsm8k_eagle80\.jsonl"):
        public_mix(tmp_path, EVALUATION_SETS, 3)


def test_other_sets_leave_out_what_the_first_pool_holds(tmp_path: Path) -> None:
    """A prompt that shares thirteen words in a row; twelve are not yet a copy."""
    words = " ".join(f"w{i}" for i in range(13))
    rows = [
        {"turns": ["first", f"and {words} too"], "text": f"a {words} b"},
        {"turns": ["first", words.rsplit(" ", 1)[0]], "text": "free"},
    ]
    for name in {name for name, _ in OTHER_SETS.values()}:
        folder = tmp_path / ("a" if name.startswith("gsm8k") else "b")
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [tmp_path / "a", tmp_path / "b"]
    whole = other_mix(folders, 5, [])
    apart = other_mix(folders, 5, [Prompt("x", f"so {words}"), Prompt("y", rows[0]["turns"][0])])
    assert [p.family for p in whole].count("mt_bench_second") == 2
    second = [p.text for p in apart if p.family == "mt_bench_second"]
    assert len(second) == 1
    assert "w12" not in second[0]
    assert [p.text for p in apart if p.family == "shakespeare"] == ["free"]
    with pytest.raises(ValueError, match=r"must hold gsm8k_test\.jsonl"):
        other_mix([tmp_path / "b"], 5, [])


def test_no_prompt_is_learnt_from_and_measured_on(tmp_path: Path) -> None:
    """Generated ones by their split, public ones by coming from different files."""
    write_sets(tmp_path, EVALUATION_SETS | TRAINING_SETS)
    test = {p.text for p in prompts("test", 5, tmp_path)}
    train = {p.text for p in prompts("train", 5, tmp_path)}
    assert len(test) == len(train) == 35
    assert not test & train


def test_a_recording_of_other_prompts_is_not_taken_for_these(tmp_path: Path) -> None:
    """Recordings are kept between runs; an old one must not pass for a new one."""
    asked = prompts("test", 2, None)
    write(tmp_path / "kept", random_chains(2, 3, 4), roots="every")
    made_from = manifest("EAGLE", prompts("test", 1, None))
    (tmp_path / "kept" / MANIFEST).write_text(json.dumps(made_from))
    with pytest.raises(ValueError, match="recording of other prompts"):
        record("EAGLE", asked, tmp_path / "kept")
    (tmp_path / "kept" / MANIFEST).write_text(json.dumps(manifest("EAGLE", asked)))
    assert record("EAGLE", asked, tmp_path / "kept").num_drafts == 6
