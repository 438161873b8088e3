"""Two runs beside each other: ratios, differences, and conditions that make them moot."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_ind

from eval.bench.records import Cell
from eval.report import __main__ as command
from eval.report.document import Mark
from eval.report.intervals import Counts, Noise, Ratio, difference
from tests.eval.bench_runs import BASELINE, made_methods, write_made_run
from tests.eval.test_report import Page, markdown_tables, raw, table

FEW = (made_methods()[0], made_methods()[2], made_methods()[4], made_methods()[-1])
ONE_RUNG = ((0.0, (4,)),)

speeds = st.lists(st.floats(1.0, 1e4), min_size=2, max_size=6, unique=True)


def pair(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Path:
    """Two runs and the comparison of them, in ``folder``."""
    common: dict[str, Any] = {"methods": FEW, "loads": ONE_RUNG}
    for name, own in (("A", before), ("B", after)):
        write_made_run(folder / name, **{**common, **own})
    assert command.main(["compare", str(folder / "A"), str(folder / "B"), "--out",
                         str(folder)]) == 0  # fmt: skip
    return folder


def text(folder: Path) -> str:
    """The Markdown comparison."""
    return (folder / "compare.md").read_text()


def test_ratios_of_speeds_are_welch_intervals_on_logarithms(tmp_path: Path) -> None:
    folder = pair(tmp_path, {}, {"seed": 1})
    rows = table(folder, "tokens/s of B over A, temperature 0", "compare.md")
    assert list(rows) == [made.method.name for made in FEW]
    for name, row in rows.items():
        logs = [
            [math.log(head["tokens_per_second"]) for head, _ in raw(folder / run, method=name)]
            for run in "AB"
        ]
        welch = ttest_ind(logs[1], logs[0], equal_var=False)
        interval = welch.confidence_interval()
        mean = math.exp(statistics.fmean(logs[1]) - statistics.fmean(logs[0]))
        low, high = math.exp(interval.low), math.exp(interval.high)
        assert row["c = 4"].startswith(f"{mean:.2f} [{low:.2f}, {high:.2f}] ")
        assert row["n"] == "3"


def test_differences_of_tau_are_those_of_the_raw_records(tmp_path: Path) -> None:
    folder = pair(tmp_path, {}, {"seed": 1})
    row = table(folder, "tau and gamma, temperature 0", "compare.md")["c2t-plus"]
    taus = []
    for run in "AB":
        metas = [r["meta"] for _, rs in raw(folder / run, method="c2t-plus") for r in rs]
        correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
        taus.append(1 + correct / sum(meta["spec_verify_ct"] for meta in metas))
    assert [row["tau, A"].split(" ")[0], row["tau, B"].split(" ")[0]] == [f"{t:.2f}" for t in taus]
    header, *lines = markdown_tables(text(folder))["tau and gamma, temperature 0"]
    change = next(line for line in lines if line[0] == "c2t-plus")[header.index("B - A")]
    assert change.split(" ")[0] == f"{taus[1] - taus[0]:+.2f}"


def test_a_run_and_itself_do_not_differ_and_gamma_of_an_adaptive_method_is_not_compared(
    tmp_path: Path,
) -> None:
    folder = pair(tmp_path, {}, {})
    assert "None of the recorded conditions differs" in text(folder)
    assert "B is faster in 0, slower in 0, tied in 4" in text(folder)
    rows = table(folder, "tokens/s of B over A, temperature 0", "compare.md")
    assert all(row["c = 4"].startswith("1.00 [") for row in rows.values())
    header, *lines = markdown_tables(text(folder))["tau and gamma, temperature 0"]
    assert all("+0.00 [+0.00, +0.00]" in line[header.index("B - A")] for line in lines)
    adaptive = table(folder, "tau and gamma, temperature 0", "compare.md")["adaptive"]
    assert (adaptive["gamma, A"], adaptive["gamma, B"]) == ("-", "-"), "which is not what it says"
    assert adaptive["tau, A"] != "-"


def test_faster_and_slower_are_told_in_words(tmp_path: Path) -> None:
    def twice(cell: Cell) -> Cell:
        factor = {"c2t-plus": 2.0, "fixed 3": 0.5}.get(cell.method, 1.0)
        return replace(cell, tokens_per_second=factor * cell.tokens_per_second)

    rows = table(pair(tmp_path, {}, {"edit": twice}), "tokens/s of B over A, temperature 0",
                 "compare.md")  # fmt: skip
    assert rows["c2t-plus"]["c = 4"].endswith(" faster")
    assert rows["fixed 3"]["c = 4"].endswith(" slower")
    assert rows[BASELINE]["c = 4"].endswith(" tie")


def test_other_prompts_hardware_and_versions_are_warned_of(tmp_path: Path) -> None:
    other = {
        "versions": {"sglang": "0.5.17", "torch": "2.9"},
        "revision": "def5678",
        "hardware": {"cpu": "another", "cores": 2, "gpus": []},
        "argv": ["python", "-m", "eval.run", "made-up.toml"],
    }
    folder = pair(tmp_path, {}, {"provenance": other, "sha256": "0" * 64})
    for warning in ("The prompts differ", "The hardware differs", "SGLang differs"):
        assert f"**{warning}" in text(folder)
    assert "torch differs" not in text(folder)
    rows = table(folder, "Conditions that differ", "compare.md")
    assert rows["versions.sglang"] == {"A": "0.5.23", "B": "0.5.17"}
    assert set(rows) == {"versions.sglang", "revision", "hardware.cpu", "dataset.sha256"}
    assert "prompts of each run drawn for itself" in text(folder)


def test_methods_and_concurrencies_of_one_run_only_are_left_out(tmp_path: Path) -> None:
    folder = pair(tmp_path, {"loads": ((0.0, (1, 4)),)}, {"methods": FEW[:2]})
    assert "Only in A, and left out: adaptive, c2t-plus." in text(folder)
    rows = table(folder, "tokens/s of B over A, temperature 0", "compare.md")
    assert list(rows) == [BASELINE, "fixed 3"]
    assert list(rows["fixed 3"]) == ["c = 4", "n"]


def test_runs_that_share_nothing_are_told_apart_without_tables(tmp_path: Path) -> None:
    folder = pair(tmp_path, {"methods": FEW[:1]}, {"methods": FEW[1:]})
    assert "share no method" in text(folder)
    assert "tokens/s of B over A" not in text(folder)


def test_one_repeat_gives_ratios_without_intervals(tmp_path: Path) -> None:
    folder = pair(tmp_path, {"repeats": 1}, {})
    assert "No ratio of speeds has an interval" in text(folder)
    rows = table(folder, "tokens/s of B over A, temperature 0", "compare.md")
    assert all("[" not in row["c = 4"] and row["n"] == "1" for row in rows.values())


def test_the_comparison_has_the_same_tables_as_page_and_as_markdown(tmp_path: Path) -> None:
    folder = pair(tmp_path, {}, {"seed": 1})
    shown = Page((folder / "compare.html").read_text()).tables
    assert len(shown) == 3
    assert shown == markdown_tables(text(folder))
    assert (folder / "plots" / "ratio-t0.svg").exists()


def test_the_comparison_lies_in_the_second_run_by_default(tmp_path: Path) -> None:
    for name in "AB":
        write_made_run(tmp_path / name, methods=FEW[:2], loads=ONE_RUNG, repeats=1)
    before = json.loads((tmp_path / "B" / "run.json").read_text())
    assert command.main(["compare", str(tmp_path / "A"), str(tmp_path / "B")]) == 0
    assert (tmp_path / "B" / "compare" / "compare.html").exists()
    assert json.loads((tmp_path / "B" / "run.json").read_text()) == before


# -- intervals ------------------------------------------------------------------------------


@given(speeds, speeds)
def test_unpaired_ratios_equal_scipys_welch_interval(
    above: list[float], below: list[float]
) -> None:
    ratio = Ratio.unpaired(above, below)
    interval = ttest_ind(np.log(above), np.log(below), equal_var=False).confidence_interval()
    assert math.log(ratio.low) == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert math.log(ratio.high) == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


pairs_of_logs = st.lists(
    st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6, unique=True
)


@given(pairs_of_logs)
def test_ratios_of_two_methods_are_students_paired_t_interval(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = (dict(enumerate(column)) for column in zip(*pairs, strict=True))
    ratio = Ratio.paired(ours, theirs, Noise.of({"ours": ours, "theirs": theirs}))
    assert ratio is not None
    differences = [a - b for a, b in pairs]
    deviation = statistics.stdev(differences) / math.sqrt(len(pairs))
    half = float(student.ppf(0.975, len(pairs) - 1)) * deviation
    assert ratio.value == pytest.approx(math.exp(statistics.fmean(differences)))
    assert math.log(ratio.high / ratio.low) == pytest.approx(2 * half, rel=1e-6, abs=1e-6)


def test_intervals_of_two_repeats_hold_the_truth_as_often_as_they_say() -> None:
    """2,000 simulated runs of eight methods whose repeats share a slow-down; six standard
    errors of a 95 % coverage are 0.03.
    """
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        shared = rng.normal(0, 0.5, 2)
        logs = {str(i): {r: i + shared[r] + rng.normal(0, 0.1) for r in range(2)} for i in range(8)}
        ratio = Ratio.paired(logs["3"], logs["0"], Noise.of(logs))
        assert ratio is not None
        held += ratio.low <= math.exp(3) <= ratio.high
    assert abs(held / 2000 - 0.95) < 0.03


def test_methods_that_lack_repeats_do_not_spoil_the_noise_of_the_others() -> None:
    """The third method has no repeat that another has too, so it tells nothing of noise."""
    whole = {"a": {0: 1.0, 1: 1.3, 2: 0.9}, "b": {0: 2.0, 1: 2.1, 2: 2.2}}
    expected, found = Noise.of(whole), Noise.of({**whole, "c": {7: 5.0}, "d": {}})
    assert expected is not None
    assert found is not None
    assert (found.variance, found.freedom) == pytest.approx((expected.variance, expected.freedom))
    assert Noise.of({"a": {0: 1.0}, "b": {0: 2.0}}) is None


def test_a_ratio_wins_or_loses_only_where_its_interval_excludes_one() -> None:
    assert Ratio(1.2, 1.01, 1.4, n=3).mark is Mark.WIN
    assert Ratio(0.8, 0.7, 0.99, n=3).mark is Mark.LOSS
    assert Ratio(1.2, 0.99, 1.4, n=3).mark is Mark.TIE
    assert Ratio(1.6).mark is Mark.PLAIN


def test_pairing_prompts_makes_a_common_difficulty_cancel() -> None:
    """One run gains one more draft per verification on every prompt, easy or hard."""
    rng = np.random.default_rng(0)
    correct = rng.integers(0, 50, 40).astype(float)
    verify = np.full(40, 10.0)
    before = Counts(("a",) * 40, verify, correct, correct)
    after = Counts(("a",) * 40, verify, correct + 10, correct)
    paired = difference(after, before, "tau", paired=True)
    apart = difference(after, before, "tau", paired=False)
    assert (paired.low, paired.high) == pytest.approx((1.0, 1.0))
    assert paired.value == apart.value == pytest.approx(1.0)
    assert apart.high - apart.low > 0.5
