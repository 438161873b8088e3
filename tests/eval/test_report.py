"""The report of a benchmark run: its numbers are those of the raw records, recomputed slowly."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from eval.bench.records import Cell, read_cell, write_cell
from eval.report import __main__ as command
from eval.report.charts import THEME
from eval.report.intervals import paired_ratio
from eval.report.page import FOLDER
from eval.report.verdict import span
from sglang_c2t.offline.client import Streamed
from sglang_c2t.offline.compared import C2T, NONE, Arm, Run, facts
from tests.eval.bench_runs import BASELINE, Edit, failing, made_methods, write_made_run

FEW = (made_methods()[0], made_methods()[2], made_methods()[-1])
ONE_LOAD = ((0.0, (4,)),)
LOADS = (1, 4, 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten methods, and its report."""
    folder = write_made_run(tmp_path_factory.mktemp("runs") / "a run")
    assert command.main([str(folder)]) == 0
    return folder


class Page(HTMLParser):
    """A page's tables by caption as rows of texts, its text, and its tags with attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._rows: list[list[str]] = []
        self._where = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("caption", "td", "th", "tr", "svg", "style", "p", "li", "main"):
            self._where = tag
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._where = "" if tag in ("td", "th", "caption", "svg", "style") else self._where

    def handle_data(self, data: str) -> None:
        if self._where == "caption":
            self.tables.setdefault(data.strip(), self._rows) if data.strip() else None
        elif self._where in ("td", "th"):
            self._rows[-1][-1] += data.strip("\n")
        elif self._where not in ("svg", "style"):
            self.text += data


def page_table(folder: Path, title: str) -> dict[str, dict[str, str]]:
    """Texts of a table of the page by row and column."""
    head, *rows = Page(folder / "report.html").tables[title]
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
    """A run of three methods at one load, and its report."""
    folder = write_made_run(folder / "run", **{"methods": FEW, "loads": ONE_LOAD, **kwargs})
    assert command.main([str(folder)]) == 0
    return folder


# -- numbers --------------------------------------------------------------------------------


def test_work_table_equals_slow_loops_over_raw_records(run: Path) -> None:
    rows = page_table(run, "Work, temperature 0")
    assert list(rows) == [made.method.name for made in made_methods()]
    for name, row in rows.items():
        total: dict[str, int] = {}
        for head, requests in raw(run, method=name, temperature=0.0):
            for request in requests:
                meta = request["meta"]
                for key in ("verify_ct", "num_correct_drafts", "num_proposed_drafts"):
                    for family in ("", request["family"]):
                        at = f"{family}{key}"
                        total[at] = total.get(at, 0) + meta.get(f"spec_{key}", 0)
                total["tokens"] = total.get("tokens", 0) + len(request["output_ids"])
            for key, value in head["work"].items():
                total[key] = total.get(key, 0) + value
        drafts, target = total["draft_forwards"], total["target_decode_rows"] + total["verify_rows"]
        assert row["draft forwards per token"] == f"{drafts / total['tokens']:.3f}"
        assert row["target rows per token"] == f"{target / total['tokens']:.3f}"
        if name == BASELINE:
            assert row["tau"] == row["gamma"] == row["accept rate"] == "-"
            continue
        for family in ("", "math", "instruction", "summary"):
            correct = total[f"{family}num_correct_drafts"]
            tau = row[f"{family} tau".strip()].split(" ")[0]
            assert tau == f"{1 + correct / total[f'{family}verify_ct']:.2f}"
        if name == "adaptive":  # SGLang's own count is wrong, so verified rows are counted
            gamma, expected = row["gamma"], total["verify_rows"] / total["verify_ct"] - 1
        else:
            gamma = row["gamma"].split(" ")[0]
            expected = total["num_proposed_drafts"] / total["verify_ct"]
            assert row["drafts verified"] == str(total["num_proposed_drafts"])
        assert gamma == f"{expected:.2f}"


def test_speedups_are_ratios_within_repeats_with_the_noise_of_a_block_design(run: Path) -> None:
    """Ten methods, three repeats: 18 degrees of freedom, quantile from a printed table."""
    rows = page_table(run, "Speed-up over no speculation, temperature 0")
    for load in LOADS:
        logs = {}
        for name in rows:
            for head, _ in raw(run, method=name, temperature=0.0, concurrency=load):
                logs[name, head["repeat"]] = math.log(head["tokens_per_second"])
        grand = sum(logs.values()) / 30
        squares = 0.0
        for (name, repeat), log in logs.items():
            of_method = sum(logs[name, r] for r in range(3)) / 3
            of_repeat = sum(logs[n, repeat] for n in rows) / 10
            squares += (log - of_method - of_repeat + grand) ** 2
        half = 2.10092 * math.sqrt(2 * squares / 18 / 3)
        for name in set(rows) - {BASELINE}:
            mean = sum(logs[name, r] - logs[BASELINE, r] for r in range(3)) / 3
            low, high = math.exp(mean - half), math.exp(mean + half)
            word = "" if low > 1 else " loss" if high < 1 else " tie"
            expected = f"{math.exp(mean):.2f} [{low:.2f}, {high:.2f}]{word}"
            assert rows[name][f"c = {load}"] == expected, name


def test_tokens_per_second_and_latency_percentiles_equal_raw_records(run: Path) -> None:
    rates = page_table(run, "Output tokens per second, temperature 0")
    rows = page_table(run, "Every load, temperature 0")
    for load in LOADS:
        for name, row in rates.items():
            cells = raw(run, method=name, temperature=0.0, concurrency=load)
            speeds = [head["tokens_per_second"] for head, _ in cells]
            numbers = (statistics.geometric_mean(speeds), min(speeds), max(speeds))
            digits = 0 if numbers[0] >= 100 else 1
            mean, low, high = (f"{number:.{digits}f}" for number in numbers)
            assert row[f"c = {load}"] == f"{mean} [{low}, {high}]"
            told = rows[f"{load}, {name}"]
            first = [1e3 * r["ttft_s"] for _, requests in cells for r in requests]
            each = [1e3 * (r["latency_s"] - r["ttft_s"]) / (r["output_len"] - 1)
                    for _, requests in cells for r in requests]  # fmt: skip
            for label, values in (("first token", first), ("per token", each)):
                assert told[f"{label}, ms, 50%"] == f"{statistics.median(values):.1f}"
                assert told[f"{label}, ms, 99%"] == f"{np.quantile(values, 0.99):.1f}"


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6, unique=True))
def test_two_methods_have_students_paired_t_interval(pairs: list[tuple[float, float]]) -> None:
    ratio = paired_ratio(pd.DataFrame(pairs, columns=["ours", "theirs"]), "ours", "theirs")
    assert ratio is not None
    differences = [a - b for a, b in pairs]
    deviation = statistics.stdev(differences) / math.sqrt(len(pairs))
    half = float(student.ppf(0.975, len(pairs) - 1)) * deviation
    assert ratio.value == pytest.approx(math.exp(statistics.fmean(differences)))
    assert math.log(ratio.high / ratio.low) == pytest.approx(2 * half, rel=1e-6, abs=1e-6)


def test_intervals_of_two_repeats_hold_the_truth_as_often_as_they_say() -> None:
    """500 simulated runs of eight methods whose repeats share a slow-down: six standard errors."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(500):
        logs = rng.normal(0, 0.5, 2)[:, None] + np.arange(8) + rng.normal(0, 0.1, (2, 8))
        ratio = paired_ratio(pd.DataFrame(logs, columns=list("abcdefgh")), "d", "a")
        assert ratio is not None
        held += ratio.low <= math.exp(3) <= ratio.high
    assert abs(held / 500 - 0.95) < 0.06


# -- verdict --------------------------------------------------------------------------------


def by_load(factors: dict[int, tuple[float, float, float]]) -> Edit:
    """Speeds of no speculation, fixed 3 and c2t-plus by load, with a little noise."""

    def edit(cell: Cell) -> Cell:
        name = [BASELINE, "fixed 3", "c2t-plus"].index(cell.method)
        drift = 1 + 0.003 * (cell.repeat if cell.method == BASELINE else -cell.repeat)
        return replace(cell, tokens_per_second=100 * factors[cell.concurrency][name] * drift)

    return edit


GAINS = {1: (1, 1.5, 2.0), 4: (1, 1.2, 1.5), 16: (1, 1.0, 1.3)}
MIXED = {1: (1, 1.5, 2.0), 4: (1, 1.2, 1.0), 16: (1, 1.0, 0.6)}
LOSSES = {1: (1, 1.5, 0.8), 4: (1, 1.2, 0.7), 16: (1, 1.0, 0.6)}
HEADLINES = {
    "win": (GAINS, 3, r"c2t-plus pays at every load measured: 1\.\d\d \[.*\] times the tokens/s of "
            r"no speculation over all loads, from 1\.99 \[.*\] at 1 at once to 1\.29 \[.*\] at 16"),
    "win, tie and loss": (MIXED, 3, "c2t-plus pays at 1 at once, is not distinguishable from no "
                          "speculation at 4 at once and is slower than no speculation at 16 at "),
    "loss": (LOSSES, 3, r"c2t-plus is slower than no speculation at every load measured: 0\.69"),
    "one repeat": (GAINS, 1, r"c2t-plus ran once, so without an interval, at every load"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADLINES)
def test_headline_states_verdict_with_its_interval(case: str, tmp_path: Path) -> None:
    factors, repeats, sentence = HEADLINES[case]
    edit = by_load(factors)  # type: ignore[arg-type]
    folder = small(tmp_path, loads=((0.0, LOADS),), edit=edit, repeats=repeats)
    lines = [line for line in Page(folder / "report.html").text.splitlines() if line.strip()]
    first = next(line for line in lines if "c2t-plus" in line)
    assert re.match(sentence, first)
    rows = page_table(folder, "Speed-up by load, temperature 0")
    at = 16 if case in ("win, tie and loss", "loss") else 1
    losers = rows[str(at)]["slower than no speculation"]
    assert losers == ("c2t-plus" if at == 16 else "-")
    if case == "win, tie and loss":
        assert rows["1"]["fastest"].startswith("c2t-plus 1.99 [")
        assert rows["4"]["best static"].startswith("fixed 3 1.19 [")
        assert rows["4"]["c2t-plus"].endswith(" tie")
        assert rows["16"]["c2t-plus"].endswith(" loss")


def test_neighbouring_loads_are_a_span() -> None:
    every = [1, 2, 4, 8, 16]
    assert [span(some, every) for some in ([1, 2, 4], [2, 4], [1, 2, 8], every)] == [
        "1 to 4 at once", "2 and 4 at once", "1, 2 and 8 at once", "every load measured"
    ]  # fmt: skip


# -- checks ---------------------------------------------------------------------------------


def on(method: str, edit: Edit, repeat: int | None = None) -> Edit:
    """Edit cells of one method only, or one of its repeats."""
    return lambda c: edit(c) if c.method == method and repeat in (None, c.repeat) else c


def other_token(cell: Cell) -> Cell:
    first, *rest = cell.requests
    return replace(cell, requests=(replace(first, output_ids=(-1, *first.output_ids[1:])), *rest))


def one_more(cell: Cell) -> Cell:
    return replace(cell, metrics={name: value + 1 for name, value in cell.metrics.items()})


#: How a run was made, and sentences of its report.
SAID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, [
        "Outputs: all 96 compared are identical",  # three methods, three repeats, 12 prompts
        "agree exactly with the requests' counts in 3 cells",
        "Completeness: 9 cells measured, 0 missing, 0 of 108 requests failed, 0 files unusable."]),
    "missing cells": ({"edit": on("fixed 3", lambda _: None, repeat=1)}, [
        "8 cells measured, 1 missing", "missing: fixed 3, temperature 0, 4 at once, repeat 1"]),
    "failed requests": ({"edit": on("fixed 3", lambda cell: failing(cell, [0]))}, [
        "3 of 108 requests failed", "1 of 12 requests failed, the first with: 503 busy"]),
    "different outputs": ({"edit": on("c2t-plus", other_token, repeat=1)}, [
        "Outputs: 1 of 96 compared DIFFER", "repeat 1: 1 of 12 outputs differ"]),
    "different metrics": ({"edit": on("c2t-plus", one_more, repeat=2)}, [
        "Metrics: 1 of 3 cells DISAGREE", "repeat 2: c2t:verifications_total grew by"]),
    "no baseline": ({"methods": FEW[1:]}, [
        "No method without speculation was run", "Outputs: nothing to compare"]),
    "only the baseline": ({"methods": FEW[:1]}, ["there is nothing to compare"]),
}  # fmt: skip


@pytest.mark.parametrize("problem", SAID)
def test_report_states(problem: str, tmp_path: Path) -> None:
    how, sentences = SAID[problem]
    text = Page(small(tmp_path, **how) / "report.html").text
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_failed_speeds_are_marked(tmp_path: Path) -> None:
    edits = {"fixed 3": [0], "c2t-plus": range(12)}
    folder = small(tmp_path, edit=lambda cell: failing(cell, edits.get(cell.method, ())))
    rows = page_table(folder, "Output tokens per second, temperature 0")
    assert rows["fixed 3"]["c = 4"].endswith(" †")
    assert rows["c2t-plus"]["c = 4"] == "failed"
    assert page_table(folder, "Speed-up over no speculation, temperature 0")["c2t-plus"] == {
        "c = 4": "-", "all": "-"
    }  # fmt: skip


def test_unusable_files_are_named_and_the_others_count(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path, methods=FEW, loads=ONE_LOAD)
    cut, unknown, failed = sorted((folder / "cells").glob("fixed-3.*"))
    write_cell(folder, replace(read_cell(unknown), method="unheard of"))
    write_cell(folder / "failed", failing(read_cell(failed), [3, 5], error="503 busy\nand more"))
    failed.unlink()
    cut.write_text("\n".join(cut.read_text().splitlines()[:-2]))
    assert command.main([str(folder)]) == 0
    text = Page(folder / "report.html").text
    assert f"{cut} is cut short" in text
    assert "unheard of, temperature 0, 4 at once, repeat 1: not in run.json" in text
    assert (
        "failed and not measured again; 2 of 12 requests failed, the first with: 503 busy" in text
    )
    assert "3 files unusable" in text


@pytest.mark.parametrize(
    ("cells", "head", "message"),
    [
        (False, None, " holds no run.json"),
        (False, '"format": 1', " holds no measured cell"),
        (True, '"format": 99', "/run.json has format 99, this version reads format 1"),
    ],
)
def test_folder_without_a_run_is_refused(
    cells: bool, head: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_made_run(tmp_path, methods=FEW, loads=ONE_LOAD, edit=lambda c: c if cells else None)
    path = tmp_path / "run.json"
    text = path.read_text()
    path.unlink()
    if head is not None:
        path.write_text(text.replace('"format": 1', head))
    assert command.main([str(tmp_path)]) == 2
    assert not (tmp_path / "report.html").exists()
    assert f"{tmp_path}{message}" in capsys.readouterr().err


# -- page -----------------------------------------------------------------------------------


def test_page_and_markdown_have_the_same_tables_and_plots(run: Path) -> None:
    text, page = (run / "report.md").read_text(), Page(run / "report.html")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    plain = [re.sub(r"\\(.)", r"\1", row.replace("**", "")) for row in rows]
    cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in plain]
    assert len(page.tables) > 8
    assert cells == [row for table in page.tables.values() for row in table]
    plots = re.findall(r"!\[.{40,}\]\((.+?)\)", text)
    assert len(plots) == 3
    assert all((run / plot).read_text().startswith("<svg") for plot in plots)


def test_page_is_complete_without_network(run: Path) -> None:
    text, tags = (run / "report.html").read_text(), Page(run / "report.html").tags
    assert not {"script", "link", "iframe", "object", "embed", "img"} & {tag for tag, _ in tags}
    targets = [a.get(n) or "#" for _, a in tags for n in ("src", "href", "xlink:href", "srcset")]
    assert all(target.startswith("#") for target in targets)
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in targets} <= {*ids, ""}


def test_verdict_comes_first_then_plots_then_table_then_folds(run: Path) -> None:
    tags = Page(run / "report.html").tags
    order = [tag for tag, a in tags if tag in ("figure", "table", "details")
             or a.get("class") == "headline"]  # fmt: skip
    assert order[:4] == ["div", "figure", "figure", "table"]  # speeds, Pareto front
    assert order[: order.index("details")].count("table") == 2  # temperatures
    assert not any("open" in attributes for tag, attributes in tags if tag == "details")
    boxes = [attributes for _, attributes in tags if attributes.get("class") == "scroll"]
    assert len(boxes) == sum(tag == "table" for tag, _ in tags)
    plots = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(plots) == 2 * 3  # two temperatures, one with a Pareto front; wide and narrow
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in plots)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_texts_and_lines_are_legible_in_light_and_dark_mode(run: Path) -> None:
    """Contrast of 4.5 to 1, as WCAG 2.1 asks of text; no colour of a plot stays as on white."""
    style = (FOLDER / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
                   for block in style.split("@media")[:2])  # fmt: skip
    assert all(light[name] in (colour, "#ffffff") for colour, name in THEME.items())
    for mode in (light, dark):
        for name in {*mode} - {"paper", "rule", "loss-band", "bad-band"}:
            ground = f"{name}-band" if f"{name}-band" in mode else "paper"
            pair = sorted(luminance(mode[n]) for n in (name, ground))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, name
    drawings = re.findall(r"<svg.*?</svg>", (run / "report.html").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-f]{6}\b", "".join(drawings))) <= {"#000000"}
    assert re.search(r'<td class="loss" style="[^"]*">0\.91 <span class="interval">',
                     (run / "report.html").read_text())  # fmt: skip


def test_names_with_signs_of_html_and_markdown_stay_names(tmp_path: Path) -> None:
    name = "a|b <i>*x*</i> `c`_d_ [e](f)"
    odd = replace(FEW[2], method=replace(FEW[2].method, name=name))
    folder = small(tmp_path, methods=(FEW[0], odd))
    rows = page_table(folder, "Output tokens per second, temperature 0")
    assert list(rows) == [BASELINE, name]
    assert f"{name} pays at 4 at once" in Page(folder / "report.html").text


def test_same_records_give_the_same_files(run: Path, tmp_path: Path) -> None:
    assert command.main([str(run), "--out", str(tmp_path)]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert len(made) == 5
    assert all((tmp_path / path).read_bytes() == (run / path).read_bytes() for path in made)


def test_ratios_by_cpu_time_and_in_decode_steps_stand_beside_those_of_the_client(
    tmp_path: Path,
) -> None:
    """Each from its own clock; the client's is that of the requests."""

    def timed(cell: Cell) -> Cell:
        faster, n = 1.0 if cell.method == BASELINE else 1.5, cell.output_tokens
        clock = {"seconds": n / 80, "tokens": n * faster**2, "steps": 9, "rows": 9}
        cpu = n / 20 / faster**3
        times = {"start_s": 0.0, "ttft_s": 0.1 / faster, "latency_s": 2.0 / faster}
        requests = tuple(replace(request, **times) for request in cell.requests)
        return replace(cell, requests=requests, clock=clock, cpu_seconds=cpu)

    folder = write_made_run(tmp_path / "r", methods=FEW[:2], loads=ONE_LOAD, repeats=1, edit=timed)
    assert command.main([str(folder)]) == 0
    for by, ratio in (
        ("", "1.50"),
        (" in decode steps, without prefill", "2.25"),
        (" per second of the servers' CPU time", "3.38"),
    ):
        table = page_table(folder, f"Speed-up over no speculation{by}, temperature 0")
        assert table["fixed 3"]["c = 4"].startswith(ratio), by


def test_the_figure_of_a_comparison_names_its_servers_and_loads(tmp_path: Path) -> None:
    answers = [Streamed("", 5, 0.1 * i, 0.2, 1.0, {}) for i in range(8)]
    made = [Arm(name, [], runs={n: [Run(n, answers)] for n in (1, 8)}) for name in (NONE, C2T)]
    (tmp_path / "compare.json").write_text(json.dumps(facts([*made, Arm("failed", [])], {})))
    assert command.main(["figure", str(tmp_path / "compare.json")]) == 0
    drawn = (tmp_path / "compare.svg").read_text()
    for text in (NONE, C2T, "1 at once", "8 at once", "tokens/s of a request (median)"):
        assert f">{text}<" in drawn
    assert "failed" not in drawn
    assert command.main(["figure", str(tmp_path)]) == 2
    (tmp_path / "compare.json").write_text("[{}]")
    assert command.main(["figure", str(tmp_path / "compare.json")]) == 2
