"""The report of a benchmark run: its numbers are those of the records, in both renderings."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.bench.records import Cell, Method, write_cell
from eval.report import __main__ as command
from eval.report import cells as reporting_cells
from eval.report.cells import load
from eval.report.charts import THEME, _spread, policy_lines, styles
from eval.report.document import Bullets, Document, Entry, Mark, Table, Text
from eval.report.intervals import Counts
from eval.report.markdown import markdown
from eval.report.page import STYLE, page
from eval.report.report import report, write
from eval.report.verdict import span
from tests.eval.bench_runs import BASELINE, Edit, Made, failing, made_methods, write_made_run

FEW = (made_methods()[0], made_methods()[2], made_methods()[-1])
ONE_RUNG = ((0.0, (4,)),)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run and its report."""
    folder = write_made_run(tmp_path_factory.mktemp("runs") / "a run")
    assert command.main([str(folder)]) == 0
    return folder


class Page(HTMLParser):
    """What a page holds: tables as lists of rows of texts, its text, tags with attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.order: list[str] = []  # headline, figures, tables and folds
        self.boxed: list[bool] = []  # of each table, whether it scrolls within a box of its own
        self._rows: list[list[str]] = []
        self._where = [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.boxed += [self.tags[-1][1].get("class") == "scroll"] if tag == "table" else []
        self.tags.append((tag, dict(attrs)))
        if tag in ("figure", "table", "details") or ("class", "headline") in attrs:
            self.order.append(tag)
        if tag == "span" and ("class", "hint") in attrs:
            self._where.append(tag)
        if tag in ("svg", "style", "title", "caption", "td", "th", "main"):
            self._where.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._where[-1]:
            self._where.pop()

    def handle_data(self, data: str) -> None:
        where = self._where[-1]
        if where == "caption":
            self.tables[data] = self._rows
        elif where in ("td", "th"):
            self._rows[-1][-1] += data
        if where not in ("svg", "style", "title", "span"):
            self.text += f"{data} "


def markdown_tables(text: str) -> dict[str, list[list[str]]]:
    """Tables by the bold line above them, marks taken away."""
    tables: dict[str, list[list[str]]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("**") and line.endswith("**"):
            title = line.strip("*")
        elif line.startswith("| "):
            entries = re.split(r"(?<!\\) \| ", line[2:-2])
            plain = [re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)\*\*", "", e)) for e in entries]
            tables.setdefault(title, []).append(plain)
    return tables


def table(folder: Path, title: str, name: str = "report.md") -> dict[str, dict[str, str]]:
    """A table of the Markdown report: texts by row and column."""
    head, *rows = markdown_tables((folder / name).read_text())[title]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def raw(folder: Path, **wanted: Any) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Heads and requests of the cells' files, read without any code of ours."""
    found = []
    for path in sorted((folder / "cells").iterdir()):
        head, *requests = [json.loads(line) for line in path.read_text().splitlines()]
        if all(head[key] == value for key, value in wanted.items()):
            found.append((head, requests))
    return found


def small(folder: Path, **kwargs: Any) -> Path:
    """A run of three methods at one concurrency, and its report."""
    folder = write_made_run(folder / "run", **{"methods": FEW, "loads": ONE_RUNG, **kwargs})
    assert command.main([str(folder)]) == 0
    return folder


def texts(folder: Path) -> str:
    """The Markdown report."""
    return (folder / "report.md").read_text()


# -- numbers --------------------------------------------------------------------------------


def test_the_work_table_is_what_slow_loops_over_the_raw_records_give(run: Path) -> None:
    rows = table(run, "Work, temperature 0")
    assert list(rows) == [made.method.name for made in made_methods()]
    for name, row in rows.items():
        verify = correct = proposed = tokens = drafts = decode = 0
        for head, requests in raw(run, method=name, temperature=0.0):
            for request in requests:
                verify += request["meta"].get("spec_verify_ct", 0)
                correct += request["meta"].get("spec_num_correct_drafts", 0)
                proposed += request["meta"].get("spec_num_proposed_drafts", 0)
                tokens += len(request["output_ids"])
            drafts += head["work"]["draft_forwards"]
            decode += head["work"]["target_decode_rows"] + head["work"]["verify_rows"]
        assert row["draft forwards per token"] == f"{drafts / tokens:.3f}"
        assert row["target rows per token"] == f"{decode / tokens:.3f}"
        if name == BASELINE:
            assert row["tau"] == row["gamma"] == row["accept rate"] == "-"
            continue
        assert row["tau"].split(" ")[0] == f"{(verify + correct) / verify:.2f}"
        if name != "adaptive":
            assert row["gamma"].split(" ")[0] == f"{proposed / verify:.2f}"
            assert row["drafts verified"] == str(proposed)
            assert row["accept rate"] == f"{correct / proposed:.2f}"


def test_speed_ups_are_ratios_within_repeats_with_the_noise_of_a_block_design(run: Path) -> None:
    """Ten methods, three repeats: 18 degrees of freedom, quantile from a printed table."""
    rows = table(run, "Speed-up over no speculation, temperature 0")
    names = [BASELINE, *rows]
    for concurrency in (1, 4, 16):
        logs = {}
        for name in names:
            for head, _ in raw(run, method=name, temperature=0.0, concurrency=concurrency):
                logs[name, head["repeat"]] = math.log(head["tokens_per_second"])
        grand = sum(logs.values()) / 30
        squares = 0.0
        for (name, repeat), log in logs.items():
            of_method = sum(logs[name, r] for r in range(3)) / 3
            of_repeat = sum(logs[n, repeat] for n in names) / 10
            squares += (log - of_method - of_repeat + grand) ** 2
        half = 2.10092 * math.sqrt(2 * squares / 18 / 3)
        for name, row in rows.items():
            mean = sum(logs[name, r] - logs[BASELINE, r] for r in range(3)) / 3
            low, high = math.exp(mean - half), math.exp(mean + half)
            word = "" if low > 1 else " loss" if high < 1 else " tie"
            expected = f"{math.exp(mean):.2f} [{low:.2f}, {high:.2f}]{word}"
            assert row[f"c = {concurrency}"] == expected, name


def test_tau_by_family_counts_only_that_family(run: Path) -> None:
    row = table(run, "tau and gamma by family, temperature 0")["c2t-plus"]
    for family in ("math", "instruction", "summary"):
        metas = [
            request["meta"]
            for _, requests in raw(run, method="c2t-plus", temperature=0.0)
            for request in requests
            if request["family"] == family
        ]
        verify = sum(meta["spec_verify_ct"] for meta in metas)
        correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
        assert row[f"{family} tau"].split(" ")[0] == f"{1 + correct / verify:.2f}"


def test_draft_lengths_leave_the_root_out_and_fixed_chains_have_one(run: Path) -> None:
    rows = table(run, "Lengths per verification, temperature 0")
    work = table(run, "Work, temperature 0")
    for name, row in rows.items():
        assert row["accept mean"] == work[name]["tau"].split(" ")[0], name
        if name != "adaptive":
            assert row["draft mean"] == work[name]["gamma"].split(" ")[0], name
    assert rows["fixed 3"]["draft longest"] == rows["fixed 3"]["draft 10\u00a0%"] == "3"
    assert rows["adaptive"]["draft mean"] == "-"


def test_an_adaptive_method_has_the_gamma_that_was_counted_not_the_one_that_is_told(
    tmp_path: Path,
) -> None:
    adaptive = made_methods()[4]
    assert adaptive.method.kind == "adaptive"

    def fewer_rows(cell: Cell) -> Cell:
        rows = {"verify_rows": 2 * cell.totals.verify_ct}
        return replace(cell, work={**cell.work, **rows}) if cell.totals.verify_ct else cell

    folder = small(tmp_path, methods=(FEW[0], adaptive), edit=fewer_rows)
    row = table(folder, "Work, temperature 0")["adaptive"]
    assert (row["gamma"], row["drafts verified"]) == ("1.00", "-")


def test_intervals_of_tau_hold_the_tau_of_most_other_draws_of_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Coverage of a bootstrap: with 40 prompts about 93 % of 60 runs; below 80 % has odds under
    1 in 1000.
    """
    gated = FEW[2]
    taus = []
    for seed in range(61):
        folder = write_made_run(tmp_path / str(seed), methods=(gated,), loads=ONE_RUNG, repeats=1,
                                num_prompts=40, seed=seed)  # fmt: skip
        found = load(folder).acceptance("c2t-plus", 0.0)
        assert found is not None
        taus.append(found.tau)
    truth = float(np.mean([tau.value for tau in taus]))
    assert sum(tau.low <= truth <= tau.high for tau in taus) >= 0.8 * len(taus)
    assert all(tau.low < tau.value < tau.high for tau in taus)


def test_weights_draw_prompts_with_all_their_verifications() -> None:
    counts = Counts(("a", "a"), np.array([2.0, 1.0]), np.array([4.0, 0.0]), np.array([6.0, 3.0]))
    weights = np.array([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    assert counts.tau(weights).tolist() == pytest.approx([1 + 4 / 3, 3.0, 1.0])
    assert counts.gamma(weights).tolist() == pytest.approx([3.0, 3.0, 3.0])


# -- what it says ---------------------------------------------------------------------------


def with_speeds(factors: dict[str, list[float]]) -> Edit:
    """Cells whose speeds are 100 times the factor of their method and repeat."""

    def edit(cell: Cell) -> Cell:
        return replace(cell, tokens_per_second=100 * factors[cell.method][cell.repeat])

    return edit


def test_loads_that_are_neighbours_are_told_as_a_span() -> None:
    every = [1, 2, 4, 8, 16]
    assert [span(some, every) for some in ([1, 2, 4], [2, 4], [1, 2, 8], every)] == [
        "1 to 4", "2 and 4", "1, 2 and 8", "1 to 16"
    ]  # fmt: skip


def test_losses_and_ties_are_told_in_words_and_wins_are_bold(tmp_path: Path) -> None:
    names = [made.method.name for made in made_methods()[:4]]
    speeds = dict(zip(names, ([1, 1, 1], [0.8, 0.81, 0.79], [0.9, 1.1, 1.0], [1.3, 1.31, 1.29]),
                      strict=True))  # fmt: skip
    folder = small(tmp_path, methods=made_methods()[:4], edit=with_speeds(speeds))
    lines = [line for line in texts(folder).splitlines() if line.startswith("| fixed")]
    told = {line.split(" | ")[0][2:]: line for line in lines if " loss" in line or " tie" in line}
    assert " loss |" in told["fixed 1"]
    assert " tie |" in told["fixed 3"]
    assert any(line.startswith("| fixed 5 | **1.30 [") for line in lines)
    text = (folder / "report.html").read_text()
    interval = r'<span class="interval">\[\d\.\d\d, \d\.\d\d\]</span>'
    assert re.search(rf'<td class="loss">0\.80 {interval} loss</td>', text)
    assert re.search(rf'<td class="win">1\.30 {interval}</td>', text)
    fastest = table(folder, "The fastest method at each concurrency, temperature 0")["4"]
    assert fastest["fastest"] == "fixed 5"
    assert fastest["slower than no speculation"] == "fixed 1"
    by_load = table(folder, "Speed-up by load, temperature 0")["4"]
    assert by_load["losses"] == "fixed 1"
    assert by_load["best static"].startswith("fixed 5 1.30 [")


def by_load(factors: dict[int, dict[str, float]], noise: float = 0.003) -> Edit:
    """Cells whose speeds are 100 times the factor of their concurrency and method.

    From repeat to repeat the baseline gets faster by ``noise``, and the others slower.
    """

    def edit(cell: Cell) -> Cell:
        drift = 1 + noise * (cell.repeat if cell.method == BASELINE else -cell.repeat)
        return replace(cell, tokens_per_second=100 * factors[cell.concurrency][cell.method] * drift)

    return edit


def alone(fixed: float, ours: float) -> dict[str, float]:
    return {BASELINE: 1.0, "fixed 3": fixed, "c2t-plus": ours}


#: Speeds by load, and what the first line of the report then says.
HEADLINES: dict[str, tuple[dict[int, dict[str, float]], str]] = {
    "gains": (
        {1: alone(1.5, 2.0), 4: alone(1.2, 1.5), 16: alone(1.0, 1.3)},
        r"\*\*c2t-plus pays at every load measured\*\*: 1\.\d\d \[.*\] times the tokens/s of no "
        r"speculation over all loads, from 1\.99 \[.*\] \(1 at once\) down to 1\.29 \[.*\] "
        r"\(16 at once\)\.",
    ),
    "gains, a tie and a loss": (
        {1: alone(1.5, 2.0), 4: alone(1.2, 1.0), 16: alone(1.0, 0.6)},
        r"\*\*c2t-plus pays at 1, is not told apart from no speculation at 4 and is slower than no "
        r"speculation at 16 requests at once\*\*: 1\.06 \[.* down to 0\.60 \[.*\] \(16 at once\)\.",
    ),
    "losses, whatever another method gains": (
        {1: alone(1.5, 0.8), 4: alone(1.2, 0.7), 16: alone(1.0, 0.6)},
        r"\*\*c2t-plus does not pay: it is slower than no speculation at every load measured\*\*: "
        r"0\.69 \[.*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADLINES)
def test_the_headline_tells(what: str, tmp_path: Path) -> None:
    factors, said = HEADLINES[what]
    folder = small(tmp_path, loads=((0.0, (1, 4, 16)),), edit=by_load(factors))
    first = texts(folder).split("\n\n")[1]
    assert re.fullmatch(said, first), first


def test_who_beats_the_method_of_the_headline_is_told_beneath_it(tmp_path: Path) -> None:
    factors = {1: alone(2.5, 2.0), 4: alone(0.9, 1.5), 16: alone(1.0, 1.3)}
    text = texts(small(tmp_path, loads=((0.0, (1, 4, 16)),), edit=by_load(factors)))
    assert "- At 1 at once fixed 3 is faster: 1.25 [" in text
    assert re.search(
        r"known only afterwards\) c2t-plus is ahead at 4 and 16 \(1\.49 \[.*\] at "
        r"most, at 4\) and behind at 1 \(0\.80 \[.*\]\)\.", text
    )  # fmt: skip


def test_the_best_static_method_is_told_for_each_concurrency(tmp_path: Path) -> None:
    """No speculation at 4 at once, fixed 3 at 16: what the others gain over it."""
    speeds = {4: {BASELINE: 1.0, "fixed 3": 0.5, "c2t-plus": 1.5},
              16: {BASELINE: 1.0, "fixed 3": 2.0, "c2t-plus": 3.0}}  # fmt: skip

    def edit(cell: Cell) -> Cell:
        drift = 1 + cell.repeat / (1000 if cell.method == BASELINE else 1001)
        speed = 100 * speeds[cell.concurrency][cell.method]
        return replace(cell, tokens_per_second=speed * drift)

    folder = small(tmp_path, loads=((0.0, (4, 16)),), edit=edit)
    rows = table(folder, "Speed-up over the best static method, temperature 0")
    told = {name: [text.split(" ")[0] for text in row.values()] for name, row in rows.items()}
    assert told == {BASELINE: ["1", "0.50"], "fixed 3": ["0.50", "1"], "c2t-plus": ["1.50"] * 2}


def test_a_ramp_is_told_by_the_times_of_its_requests(tmp_path: Path) -> None:
    """A method that answers in half the time gains 2, whatever its tokens per second. The best
    static one is another by time than by tokens per second.
    """
    seconds = {BASELINE: 4.0, "fixed 3": 5.0, "c2t-plus": 2.0}

    def edit(cell: Cell) -> Cell:
        took = seconds[cell.method]
        requests = tuple(replace(r, latency_s=took, ttft_s=0.1) for r in cell.requests)
        speed = 60.0 if cell.method == "fixed 3" else 50.0
        return replace(cell, requests=requests, tokens_per_second=speed, duration_s=30.0)

    folder = write_made_run(tmp_path / "run", methods=FEW, loads=ONE_RUNG, edit=edit)
    assert command.main([str(folder)]) == 0
    assert "Ramp, temperature 0" not in texts(folder)
    told = json.loads((folder / "run.json").read_text())
    told["config"]["load"][0]["phases"] = [{"prompts": 12, "rate": 1.5}]
    (folder / "run.json").write_text(json.dumps(told))
    assert command.main([str(folder)]) == 0
    assert "top of a ramp of Poisson arrivals, prompts at so many a second: 12 at 1.5" in texts(
        folder
    )
    rows = {
        name: [text.split(" ")[0] for text in row.values()]
        for name, row in table(folder, "Ramp, temperature 0").items()
    }
    assert rows[BASELINE] == ["4.00", "4.00", "30.00", "1", "1", "1", "0.83"]
    assert rows["fixed 3"][3:] == ["0.80", "0.80", "1.20", "1"]
    assert rows["c2t-plus"] == ["2.00", "2.00", "30.00", "2.00", "2.00", "1.00", "0.83"]


def on(method: str, edit: Edit, repeat: int | None = None) -> Edit:
    """Changes cells of one method only, or those of one of its repeats."""
    return lambda cell: (
        edit(cell) if cell.method == method and repeat in (None, cell.repeat) else cell
    )


def other_token(cell: Cell) -> Cell:
    first, *rest = cell.requests
    return replace(cell, requests=(replace(first, output_ids=(-1, *first.output_ids[1:])), *rest))


def one_more(cell: Cell) -> Cell:
    return replace(cell, metrics={name: value + 1 for name, value in cell.metrics.items()})


SLOW = {BASELINE: [1, 1, 1], "fixed 3": [0.8, 0.81, 0.79], "c2t-plus": [0.9, 0.91, 0.9]}
SPEED = "Output tokens per second, temperature 0"
SPEED_UP = "Speed-up over no speculation, temperature 0"
OUTPUTS = "Outputs compared with those without speculation"
#: How a run was made; sentences of its report; entries of its tables as regular expressions.
TOLD: dict[str, tuple[dict[str, Any], list[str], dict[tuple[str, str, str], str]]] = {
    "where every method loses": (
        {"edit": with_speeds(SLOW)},
        ["**c2t-plus does not pay: it is slower than no speculation at 4 at once**: 0.90 ["], {},
    ),
    "that one repeat has neither intervals nor losses": (
        {"repeats": 1},
        ["**Whether c2t-plus pays is not known: no speed-up has an interval",
         "One repeat, so there are no intervals."],
        {(SPEED_UP, name, "c = 4"): r"\d\.\d\d" for name in ("fixed 3", "c2t-plus")},
    ),
    "which cells are missing, and what is there": (
        {"edit": on("fixed 3", lambda _: None, repeat=1)},
        ["missing: fixed 3, temperature 0, 4 at once, repeat 1", "8 cells measured, 1 missing"],
        {(SPEED_UP, "fixed 3", "c = 4"): r".*\[.*"},
    ),
    "which rungs a partial run has not reached": (
        {"loads": ((0.0, (1, 4)), (1.0, (4,))), "repeats": 1,
         "edit": lambda cell: cell if cell.concurrency == 1 else None},
        ["missing: fixed 3, temperature 1, 4 at once, repeat 0", "3 cells measured, 6 missing"], {},
    ),
    "which speeds are of cells with failed requests": (
        {"edit": on("fixed 3", lambda cell: failing(cell, [0]))}, [],
        {(SPEED, "fixed 3", "c = 4"): ".* †", (SPEED, "c2t-plus", "c = 4"): "[^†]*"},
    ),
    "that a method of which nothing succeeded has failed, not that it is slow": (
        {"edit": on("fixed 3", lambda cell: failing(cell, range(12)))}, [],
        {(SPEED, "fixed 3", "c = 4"): "failed", (SPEED_UP, "fixed 3", "c = 4"): "-"},
    ),
    "at the top and by cell which outputs differ": (
        {"edit": on("c2t-plus", other_token, repeat=1)}, ["Outputs: 1 of 96 compared DIFFER"],
        {(OUTPUTS, "c2t-plus", "identical"): "1 differ",
         (OUTPUTS, "c2t-plus", "first cell that differs"): ".*repeat 1.*"},
    ),
    # Three methods of three repeats and 12 prompts, less the reference.
    "how many outputs are equal and how many metrics agree": (
        {}, ["Outputs: all 96 compared are identical",
             "agree exactly with the requests' own counts in all 3 cells"], {},
    ),
    "which metrics disagree with the requests": (
        {"edit": on("c2t-plus", one_more, repeat=2)},
        ["Metrics: 1 of 3 cells DISAGREE",
         "c2t-plus, temperature 0, 4 at once, repeat 2: c2t:verifications_total grew by"], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TOLD)
def test_a_report_tells(what: str, tmp_path: Path) -> None:
    how, said, shown = TOLD[what]
    folder = small(tmp_path, **how)
    assert [sentence for sentence in said if sentence not in texts(folder)] == []
    for (title, row, column), pattern in shown.items():
        assert re.fullmatch(pattern, table(folder, title)[row][column])


def test_cells_that_failed_are_told_with_their_first_error(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW, loads=ONE_RUNG)
    path = next((folder / "cells").glob("fixed-3.*.r2.jsonl"))
    cell = reporting_cells.read_cell(path)
    path.unlink()
    write_cell(folder / "failed", failing(cell, [3, 5], error="503 busy\nand more"))
    assert command.main([str(folder)]) == 0
    text = texts(folder)
    assert "2 of 12 requests failed, the first with: 503 busy\n" in text
    assert "missing: fixed 3, temperature 0, 4 at once, repeat 2" in text


def test_without_a_baseline_there_are_no_speed_ups(tmp_path: Path) -> None:
    folder = small(tmp_path, methods=FEW[1:])
    text = texts(folder)
    assert "No method without speculation was run" in text
    assert "Outputs: nothing to compare" in text
    assert "Speed-up over no speculation, temperature 0" not in text
    assert text.count("**Output tokens per second, temperature 0**") == 1
    page = Page((folder / "report.html").read_text())
    assert page.order[:3] == ["p", "table", "details"]
    assert {row["speed-up"] for row in table(folder, "Temperature 0, 4 at once").values()} == {"-"}


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "head", "said"),
    [
        (False, None, " holds no run.json"),
        (False, '"format": 1', " holds no measured cell"),
        (True, '"format": 99', "/run.json has format 99, this version reads format 1"),
    ],
)
def test_a_folder_that_is_no_run_of_this_format_with_cells_is_refused(
    cells: bool, head: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_made_run(tmp_path, methods=FEW, loads=ONE_RUNG, edit=lambda c: c if cells else None)
    path = tmp_path / "run.json"
    text = path.read_text()
    path.unlink()
    if head is not None:
        path.write_text(text.replace('"format": 1', head))
    assert command.main([str(tmp_path)]) == 2
    assert not (tmp_path / "report.html").exists()
    assert f"{tmp_path}{said}" in capsys.readouterr().err


def test_a_cell_that_is_cut_short_is_named_and_the_others_count(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW, loads=ONE_RUNG)
    path = next((folder / "cells").glob("fixed-3.*.r0.jsonl"))
    path.write_text("\n".join(path.read_text().splitlines()[:-2]))
    assert command.main([str(folder)]) == 0
    assert f"{path} is cut short" in texts(folder)
    assert "1 cells or files are unusable" in texts(folder)


def test_a_cell_of_a_method_that_the_run_does_not_name_is_left_out(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW, loads=ONE_RUNG, repeats=1)
    cell = reporting_cells.read_cell(next((folder / "cells").glob("fixed-3.*")))
    write_cell(folder, replace(cell, method="unheard of"))
    assert command.main([str(folder)]) == 0
    assert "method 'unheard of' is not in run.json; left out" in texts(folder)


# -- renderings -----------------------------------------------------------------------------


def test_the_page_and_the_markdown_have_the_same_tables(run: Path) -> None:
    shown = Page((run / "report.html").read_text()).tables
    written = markdown_tables((run / "report.md").read_text())
    assert len(shown) > 10
    assert shown == written


def test_every_number_of_the_markdown_is_in_the_page_in_the_same_order(run: Path) -> None:
    def numbers(text: str) -> list[str]:
        return re.findall(r"\d+(?:\.\d+)?", text)

    text = re.sub(r"!\[.*?\]\(.*?\)", "", (run / "report.md").read_text())
    shown = Page((run / "report.html").read_text()).text
    assert numbers(shown) == numbers(text)


def test_the_page_needs_nothing_from_elsewhere(run: Path) -> None:
    text = (run / "report.html").read_text()
    parsed = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & {t for t, _ in parsed.tags}
    for _, attributes in parsed.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text


def test_the_answer_and_its_plot_come_before_any_table_and_the_rest_is_folded(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    assert page.order[:3] == ["p", "figure", "table"]
    unfolded = page.order[: page.order.index("details")]
    assert unfolded.count("table") == len(load(run).temperatures) == 2
    assert not any("open" in attributes for tag, attributes in page.tags if tag == "details")


def test_a_table_is_never_wider_than_the_page_without_a_box_that_scrolls(run: Path) -> None:
    page = Page((run / "report.html").read_text())
    assert all(page.boxed)
    assert len(page.boxed) > 10
    boxes = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in boxes)
    assert re.search(r"\.scroll \{ overflow-x: auto;", STYLE)


def test_every_line_of_the_main_plot_has_its_name_beside_it(run: Path) -> None:
    """On the wide and on the narrow drawing, and where one load makes it rows of points."""
    figures = {figure.name: figure for figure in report(load(run)).figures}
    for name in ("speedup-t0", "speedup-t1"):
        for svg in (figures[name].svg, figures[name].narrow):
            lines = set(re.findall(rf'id="{name}[a-z-]*?-line-([^"]+)"', svg))
            labels = dict(
                re.findall(rf'id="{name}[a-z-]*?-label-([^"]+)">\s*<text[^>]*>([^<]+)', svg)
            )
            assert lines == set(labels), name
            assert len(lines) == len(made_methods()) - (name == "speedup-t1")
    assert labels["fixed-3"] == "fixed 3"


def test_names_beside_lines_do_not_overlap_and_keep_the_lines_order() -> None:
    wanted = sorted([0.5, 0.5, 0.51, 0.1, 0.99, 1.0, 0.0])
    found = _spread(wanted, 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(found))
    assert found[0] >= 0
    assert found[-1] <= 1 + 1e-9
    assert _spread([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_texts_and_lines_are_legible_in_both_modes() -> None:
    """A contrast of 4.5 to 1, as WCAG 2.1 asks of text; losses stand on a band of their own."""
    light, dark = STYLE.split("prefers-color-scheme: dark")[0], STYLE.split("@media")[1]
    assert {name: colours(light)[name] for name in THEME.values()} == {
        name: colour for colour, name in THEME.items()
    }
    for mode in (colours(light), colours(dark)):
        grounds = {"loss": "loss-band", "bad": "bad-band"}
        for name in {*mode} - {"paper", "rule", "loss-band", "bad-band"}:
            pair = sorted(luminance(mode[n]) for n in (name, grounds.get(name, "paper")))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, name


def test_dark_mode_reaches_every_colour_of_the_plots(run: Path) -> None:
    """What is left of hexadecimal colours in a drawing would stay as it is on white."""
    text = (run / "report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert {colour for svg in drawings for colour in re.findall(r"#[0-9a-f]{6}\b", svg)} <= {
        "#000000"
    }


def test_anchors_and_parts_of_plots_have_ids_of_their_own(run: Path) -> None:
    tags = Page((run / "report.html").read_text()).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a[name] for _, a in tags for name in ("href", "xlink:href") if name in a}
    assert {str(target)[1:] for target in targets} <= set(ids)


def test_tables_and_plots_say_what_they_are_to_who_cannot_see_them(run: Path) -> None:
    tags = Page((run / "report.html").read_text()).tags
    plots = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(plots) == 12 + 2  # the main plots are drawn twice
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in plots)
    assert sum(tag == "caption" for tag, _ in tags) == sum(tag == "table" for tag, _ in tags)
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in tags if tag == "th")


def test_the_markdown_finds_its_plots_beside_it(run: Path) -> None:
    plots = re.findall(r"!\[(.+?)\]\((.+?)\)", (run / "report.md").read_text())
    assert len(plots) == 12
    for alt, path in plots:
        assert len(alt) > 40
        assert (run / path).read_text().startswith("<svg")


def test_the_same_records_give_the_same_files(run: Path, tmp_path: Path) -> None:
    assert command.main([str(run), "--out", str(tmp_path)]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert len(made) > 10
    for path in made:
        assert (tmp_path / path).read_bytes() == (run / path).read_bytes(), path


def test_names_with_signs_of_html_and_markdown_stay_names(tmp_path: Path) -> None:
    name = "a|b <i>*x*</i> `c`_d_"
    document = Document(
        "T", [Table("Numbers", ["method", "value"], [(name, [Entry(f"1 {name}", Mark.BEST)])])]
    )
    write(document, tmp_path)
    rows = [["method", "value"], [name, f"1 {name}"]]
    assert Page((tmp_path / "report.html").read_text()).tables == {"Numbers": rows}
    assert markdown_tables((tmp_path / "report.md").read_text()) == {"Numbers": rows}


def test_text_blocks_keep_their_marks_in_both_renderings() -> None:
    document = Document("T", [Text("no `--c2t` <here>", Mark.BAD), Bullets(["**tau**: 1"])])
    assert "<strong>no <code>--c2t</code> &lt;here&gt;</strong>" in page(document)
    assert "<li><strong>tau</strong>: 1</li>" in page(document)
    assert "**no `--c2t` <here>**" in markdown(document)


# -- plots ----------------------------------------------------------------------------------


def test_no_two_methods_look_alike_and_the_baseline_is_apart() -> None:
    names = [f"method {i}" for i in range(60)]
    looks = styles([BASELINE, *names], BASELINE)
    shown = [(look.color, look.marker) for look in looks.values()]
    assert len(set(shown)) == len(shown)
    assert sum(look.color == looks[BASELINE].color for look in looks.values()) == 1


def test_lines_join_thresholds_of_one_policy_and_fixed_lengths() -> None:
    methods = [made.method for made in made_methods()]
    methods.append(Method("c2t-plus beta 0.1", "c2t", [], 0.1))
    assert policy_lines(methods) == [
        ["fixed 1", "fixed 3", "fixed 5"],
        ["c2t beta 0.2", "c2t beta 0.4", "c2t beta 0.6"],
    ]


def test_throughput_and_latency_over_load_need_two_loads(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW, loads=((0.0, (4,)), (1.0, (1, 4))))
    names = {figure.name for figure in report(load(folder)).figures}
    assert {"throughput-t1", "speedup-t1", "latency-t1"} <= names
    assert not {"throughput-t0", "latency-t0"} & names
    assert {"speedup-t0", "tau-gamma-t0", "accept-lengths-t0", "draft-lengths-t0"} <= names


def test_a_run_without_speculation_has_no_plots_of_drafts(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW[:1], loads=((0.0, (1, 4)),))
    document = report(load(folder))
    assert {figure.name for figure in document.figures} == {"throughput-t0", "latency-t0"}
    assert "nothing to compare it with" in markdown(document)


def test_thresholds_of_a_sweep_fill_many_legends(tmp_path: Path) -> None:
    sweep = [
        Made(Method(f"c2t with a long name beta {i / 20}", "c2t", ["--c2t"], i / 20), 5, 1 - i / 20)
        for i in range(1, 18)
    ]
    folder = write_made_run(tmp_path, methods=[FEW[0], *sweep], loads=ONE_RUNG, repeats=1)
    figures = {figure.name: figure.svg for figure in report(load(folder)).figures}
    assert figures["tau-gamma-t0"].count("<use") > len(sweep)
