"""The tables: what they print of small made-up recordings, and which prompts go into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from eval import tables
from eval.markdown import signed
from eval.prompts import EVALUATION_SETS, TRAINING_SETS, public_mix
from eval.recordings import MANIFEST, manifest, prompts, record
from sglang_c2t.classifier.train import RECIPES, train_classifier
from sglang_c2t.compare import sweep
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.replay import Chains
from tests.recordings import random_chains, recording, write

EXTRA = ("topk_prob", "hidden", "entropy_top100", "entropy_top500")


def measured(monkeypatch: pytest.MonkeyPatch) -> tables.Measured:
    """A draft model whose tokens are accepted exactly as often as it says."""
    monkeypatch.setattr(tables, "NUM_RESAMPLES", 10)
    train = recording(random_chains(30, 12, 6, seed=1), roots="every", extra=EXTRA)
    test = recording(random_chains(20, 12, 6, seed=2), roots="every", extra=EXTRA)
    draft = tables.Draft("EAGLE", train, test, Chains.from_recording(test))
    return tables.Measured.of(draft)


def test_every_rule_has_a_row_at_equal_accept_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tables.draft_report(measured(monkeypatch), Console(quiet=True))
    start = lines.index("### EAGLE: at equal accept length")
    rows = [line.split(" | ")[0] for line in lines[start : start + 20] if line.startswith("| ")]
    assert rows[1:] == [f"| {name}" for name in ("fixed", *tables.DEFAULTS)]
    assert not [line for line in lines if "nan" in line and "98 %" not in line]


def test_remembered_confidences_draw_the_same_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short cut of the sweeps changes no figure."""
    draft = measured(monkeypatch).draft
    classifier = train_classifier(draft.train, RECIPES["c2t-log"])
    quick = sweep(tables.gate("c2t-log", classifier), draft.chains)
    slow = sweep(lambda beta: C2T(classifier, beta), draft.chains)
    assert (quick.num_verified == slow.num_verified).all()
    assert (quick.num_correct == slow.num_correct).all()


def test_only_an_interval_off_zero_is_marked() -> None:
    assert signed(-3.0, -5.0, -1.0) == "**-3.0 [-5.0, -1.0]**"
    assert signed(+3.0, +1.0, +5.0) == "*+3.0 [+1.0, +5.0]*"
    assert signed(-3.0, -5.0, +1.0) == "-3.0 [-5.0, +1.0]"


def write_sets(folder: Path, sets: dict) -> None:
    for name, _ in sets.values():
        rows = [{"turns": [f"{name} {i}"]} for i in range(5)] + [{"turns": ["x" * 5000]}]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))


def test_public_prompts_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    write_sets(tmp_path, EVALUATION_SETS)
    mix = public_mix(tmp_path, EVALUATION_SETS, 3)
    assert [p.family for p in mix].count("gsm8k") == 3
    assert max(len(p.text) for p in mix) < 100


def test_a_missing_public_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold gsm8k_eagle80\.jsonl"):
        public_mix(tmp_path, EVALUATION_SETS, 3)


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
