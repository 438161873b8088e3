"""The comparison of two runs: ratios, differences, and conditions that differ."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from eval.bench.records import Cell
from eval.report import __main__ as command
from eval.report.intervals import tau_gamma
from tests.eval.bench_runs import BASELINE, made_methods, write_made_run
from tests.eval.test_report import Page, page_table, raw

FEW = (made_methods()[0], made_methods()[2], made_methods()[4], made_methods()[-1])
SPEEDS = "tokens/s of B over A, temperature 0"


def pair(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Path:
    """Two runs and the comparison of them, in ``folder``."""
    for name, own in (("A", before), ("B", after)):
        write_made_run(folder / name, **{"methods": FEW, "loads": ((0.0, (4,)),), **own})
    argv = ["compare", str(folder / "A"), str(folder / "B"), "--out", str(folder)]
    assert command.main(argv) == 0
    return folder


def test_ratios_are_welch_intervals_and_tau_differs_as_in_raw_records(tmp_path: Path) -> None:
    folder = pair(tmp_path, {}, {"seed": 1})
    rows = page_table(folder, SPEEDS, "compare")
    acceptance = page_table(folder, "tau and gamma, temperature 0", "compare")
    for name in (made.method.name for made in FEW):
        logs, taus = [], []
        for run in "AB":
            cells = raw(folder / run, method=name)
            logs.append([math.log(head["tokens_per_second"]) for head, _ in cells])
            metas = [r["meta"] for _, requests in cells for r in requests]
            verified = sum(meta.get("spec_verify_ct", 0) for meta in metas)
            correct = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
            taus.append(1 + correct / max(verified, 1))
        interval = ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval()
        mean = math.exp(statistics.fmean(logs[1]) - statistics.fmean(logs[0]))
        low, high = math.exp(interval.low), math.exp(interval.high)
        assert rows[f"{name}, c = 4"]["B / A"].startswith(f"{mean:.2f} [{low:.2f}, {high:.2f}]")
        assert rows[f"{name}, c = 4"]["n"] == "3"
        if name != BASELINE:
            row = acceptance[name]
            told = [row[f"tau, {column}"].split(" ")[0] for column in ("A", "B", "B - A")]
            assert told == [f"{taus[0]:.2f}", f"{taus[1]:.2f}", f"{taus[1] - taus[0]:+.2f}"]
    assert acceptance["adaptive"]["gamma, A"] == "-", "SGLang's own count is wrong"


def test_equal_runs_are_ties_and_faster_or_slower_methods_say_so(tmp_path: Path) -> None:
    def edit(cell: Cell) -> Cell:
        factor = {"c2t-plus": 2.0, "fixed 3": 0.5}.get(cell.method, 1.0)
        return replace(cell, tokens_per_second=factor * cell.tokens_per_second)

    folder = pair(tmp_path, {}, {"edit": edit})
    text = Page(folder / "compare.html").text
    assert "None of the recorded conditions differs" in text
    assert "B is faster in 1, slower in 1, tied in 2" in text
    rows = page_table(folder, SPEEDS, "compare")
    words = {name.split(",")[0]: row["B / A"].split(" ")[-1] for name, row in rows.items()}
    assert words == {BASELINE: "tie", "fixed 3": "slower", "adaptive": "tie", "c2t-plus": "faster"}
    taus = page_table(folder, "tau and gamma, temperature 0", "compare")
    assert all(row["tau, B - A"] == "+0.00 [+0.00, +0.00]" for row in taus.values())


def test_different_prompts_hardware_and_versions_are_warned_of(tmp_path: Path) -> None:
    other = {
        "versions": {"sglang": "0.5.17", "torch": "2.9"},
        "revision": "def5678",
        "hardware": {"cpu": "another", "cores": 2, "gpus": []},
    }
    folder = pair(tmp_path, {}, {"provenance": other, "sha256": "0" * 64})
    text = Page(folder / "compare.html").text
    for warning in ("The prompts differ", "The hardware differs", "SGLang differs"):
        assert warning in text
    assert "torch differs" not in text
    rows = page_table(folder, "Conditions that differ", "compare")
    assert rows["versions.sglang"] == {"A": "0.5.23", "B": "0.5.17"}
    assert set(rows) == {"versions.sglang", "revision", "hardware.cpu", "dataset.sha256"}
    assert "prompts of each run drawn for itself" in text


def test_only_shared_methods_and_loads_are_compared(tmp_path: Path) -> None:
    folder = pair(tmp_path, {"loads": ((0.0, (1, 4)),)}, {"methods": FEW[:2], "repeats": 1})
    text = Page(folder / "compare.html").text
    assert "Only in A, and left out: adaptive, c2t-plus." in text
    assert "No ratio of speeds has an interval" in text
    assert list(page_table(folder, SPEEDS, "compare")) == [f"{BASELINE}, c = 4", "fixed 3, c = 4"]


def test_runs_that_share_nothing_have_no_tables(tmp_path: Path) -> None:
    folder = pair(tmp_path, {"methods": FEW[:1]}, {"methods": FEW[1:]})
    page = Page(folder / "compare.html")
    assert "share no method" in page.text
    assert SPEEDS not in page.tables


def test_comparison_is_written_into_the_second_run_by_default(tmp_path: Path) -> None:
    for name in "AB":
        write_made_run(tmp_path / name, methods=FEW[:2], loads=((0.0, (4,)),), repeats=1)
    before = json.loads((tmp_path / "B" / "run.json").read_text())
    assert command.main(["compare", str(tmp_path / "A"), str(tmp_path / "B")]) == 0
    assert (tmp_path / "B" / "compare" / "compare.html").exists()
    assert (tmp_path / "B" / "compare" / "plots" / "ratio-t0.svg").exists()
    assert json.loads((tmp_path / "B" / "run.json").read_text()) == before


def test_pairing_prompts_cancels_their_common_difficulty() -> None:
    """One run gains one more draft per verification on every prompt, easy or hard."""
    correct = np.random.default_rng(0).integers(0, 50, 40).astype(float)
    before = pd.DataFrame({"family": "a", "verify": 10.0, "correct": correct, "proposed": correct})
    after = before.assign(correct=correct + 10)
    paired, apart = (tau_gamma(after, before, paired=paired) for paired in (True, False))
    assert paired is not None
    assert apart is not None
    assert (paired[0].low, paired[0].high) == pytest.approx((1.0, 1.0))
    assert paired[0].value == apart[0].value == pytest.approx(1.0)
    assert apart[0].high - apart[0].low > 0.5
