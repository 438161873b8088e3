"""Runs on replayed traces, without a server: what servers are told, requests, budget, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.bench.config import BenchConfig, MethodConfig, as_dict, build, read_config
from eval.bench.methods import hosts, passes, plan, record_of, tokenizer_of, write_files
from eval.bench.records import Cell, Request, Run, read_cells, read_run, write_cell, write_run
from eval.bench.replay import Replay, expected_steps
from eval.bench.runner import Budget, OutOfTime, Runner
from eval.gpu import traces
from eval.gpu.roofline import Ceilings
from eval.gpu.trace_replay import ENV, LANE_SHIFT, MARK
from eval.report.cells import load
from eval.report.markdown import markdown
from eval.report.report import report
from eval.run import flagged, judge, main, shaped
from eval.server import TARGET
from sglang_c2t.config import ConfigError
from tests.eval import bench_configs

CONFIGS = Path(__file__).parents[2] / "eval" / "configs"
CEILINGS = Ceilings("made up", bytes_per_s=4e12, flops_per_s=8e14)


def config(**changes: Any) -> BenchConfig:
    """The check of a GPU machine, with some keys of its tables replaced."""
    return bench_configs.config(as_dict(read_config(CONFIGS / "gpu-check.toml")), **changes)


def method_of(settings: BenchConfig, name: str) -> MethodConfig:
    return next(method for method in settings.methods if method.name == name)


# -- servers ------------------------------------------------------------------------------


def test_every_method_of_the_comparison_has_one_server_and_one_is_the_baseline(
    tmp_path: Path,
) -> None:
    """C2T is loaded where it gates, and where what it costs to have it loaded is measured."""
    whole = read_config(CONFIGS / "gpu-replay.toml")
    servers = hosts(whole, tmp_path)
    names = [method.name for host in servers for method in host.methods]
    assert sorted(names) == sorted(method.name for method in whole.methods)
    assert {"no speculation", "adaptive", "c2t", "c2t-log", "c2t-plus", "dymax", "dyjoint",
            "no speculation, plugin installed, off", "fixed 3, plugin installed, off",
            *(f"fixed {n}" for n in range(1, 8))} == set(names)  # fmt: skip
    kept = [record_of(whole, method, tmp_path) for method in whole.methods]
    assert [method.name for method in kept if method.baseline] == ["no speculation"]
    for host in servers:
        argv = host.launch.argv(1)
        gated = any(method.gated for method in host.methods)
        off = any("plugin installed" in method.name for method in host.methods)
        drafts = any(method.kind != "none" for method in host.methods)
        assert ("--c2t" in argv) == gated
        assert ("--speculative-algorithm" in argv) == drafts
        batches = [str(n) for n in whole.load[0].concurrency]
        at = argv.index("--cuda-graph-bs-decode")
        assert argv[at + 1 : at + 1 + len(batches)] == batches
        loaded = host.launch.env["SGLANG_PLUGINS"].split(",")
        assert loaded == ["c2t"] * (off or gated) + ["step_clock", "trace_replay"]
        told = json.loads(host.launch.env[ENV])
        assert [p["policy"] for p in told["policies"]] == (
            [m.name for m in whole.methods if m.gated] if gated else []
        )


def test_what_servers_are_told_of_is_written(tmp_path: Path) -> None:
    settings = config()
    write_files(settings, tmp_path)
    (host, *_) = hosts(settings, tmp_path)
    assert (host.launch.model / "config.json").is_file()
    assert list((tmp_path / "plugins").glob("*.dist-info/entry_points.txt"))
    assert tokenizer_of(settings.model, tmp_path) == str(TARGET)


def test_large_models_start_once_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    settings = config(repeats=3)
    cells = plan(settings, at_once=[4])
    assert {cell.key.concurrency for cell in cells} == {4}
    turns = passes(settings, cells, hosts(settings, tmp_path))
    assert [host.name for (host,), _ in turns] == ["no-speculation", "fixed-3", "shared-1"]
    assert [len(mine) for _, mine in turns] == [3, 3, 15]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fresh prompts": ({"requests__fresh_prompts": True}, "drop requests.fresh_prompts"),
    "prompts as well": ({"dataset__parts": [{"source": "gsm8k", "n": 9}]}, "drop dataset.parts"),
    "sampling": (
        {"load": [{"temperature": 1.0, "concurrency": [1], "prompts": [1]}]}, "greedy answers",
    ),
    "answers of their own length": ({"requests__ignore_eos": False}, "ignore_eos = true"),
    "trees": (
        {"methods": [{"kind": "tree", "topk": 4, "num_draft_tokens": 8}]}, "replay serves chains",
    ),
    "too long": ({"requests__max_new_tokens": 600}, "max_positions must be above 616"),
    "no such shape": ({"model__target": "shape:9b"}, "no shape shape:9b; there are 8b, 1b, toy"),
    "no tokenizer": ({"model__tokenizer": ""}, "brings no tokenizer"),
    "no prompts": ({"replay": None}, "dataset.parts is empty"),
    "a gate that is off": (
        {"methods": [{"kind": "c2t", "plugin_off": True}]}, "drop plugin_off",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_replayed_is_refused(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_smaller_shape_stands_in_for_another_one_but_for_no_real_model() -> None:
    small = shaped(config(), "toy")
    assert (small.model.target, small.model.draft) == ("shape:toy", "shape:toy")
    assert small.name == "gpu-check, toy", "its report is another one"
    with pytest.raises(ConfigError, match="this run serves demo"):
        shaped(read_config(CONFIGS / "demo.toml"), "toy")


def test_further_flags_stand_behind_the_configurations_own(tmp_path: Path) -> None:
    more = ["--max-running-requests", "2"]
    for host in hosts(flagged(config(), more), tmp_path):
        argv = host.launch.argv(1)
        given = [argv[i + 1] for i, word in enumerate(argv) if word == "--max-running-requests"]
        assert given == ["4", "2"], "the last one holds"


# -- requests -----------------------------------------------------------------------------


def test_prompts_name_their_lane_and_their_policy() -> None:
    assert LANE_SHIFT == 29, "files of other shifts would walk other roots"
    settings = config()
    for policy, name in enumerate(("c2t-plus", "c2t-log", "c2t")):
        for lane, sample in enumerate(Replay(settings).samples(method_of(settings, name), 5)):
            assert sample.prompt[:3] == [MARK, lane, policy]
            assert len(sample.prompt) == sample.prompt_len == 16
    assert Replay(settings).samples(method_of(settings, "fixed 3"), 1)[0].prompt[2] == 0


def test_expected_steps_of_a_trace_by_hand() -> None:
    assert expected_steps([2, 0, 1], 2, 5) == 2
    assert expected_steps([2, 0, 1], 0, 5) == 4  # a token each behind the first
    assert expected_steps([2, 0, 1], [1, 0, 0], 5) == 3  # 2 + 1 + 2 behind roots 0, 2 and 0
    assert expected_steps([5], 5, 1) == 0


def made_cell(settings: BenchConfig, name: str, batch: int, *, late: int = 0) -> Cell:
    """A cell whose requests take the steps of their traces, the first ``late`` more."""
    replay, method = Replay(settings), method_of(settings, name)
    tokens = settings.requests.max_new_tokens
    requests = []
    for lane in range(4):
        meta = {}
        if method.kind != "none":
            lengths = replay._verified[replay._gated.index(method)] if method.gated else None
            verified = lengths[lane] if lengths else method.num_steps
            steps = expected_steps(replay._correct[lane], verified, tokens)
            steps += late * (lane == 0)
            meta = {"spec_verify_ct": steps, "spec_num_correct_drafts": tokens - 1 - steps,
                    "spec_num_proposed_drafts": 3 * steps}  # fmt: skip
        requests.append(Request(lane, "trace", 16, tokens, (1,), 0.0, 1.0, 1.0, True, "", meta))
    rate = {"no speculation": 100.0, "fixed 3": 200.0}.get(name, 150.0)
    clock = {"seconds": 1.0, "tokens": rate, "steps": 10, "rows": 40 * batch}
    return Cell(
        name, 0.0, batch, 0, "2026-01-01T00:00:00+00:00", 2.0, 4 * tokens, rate, None, {}, {}, {},
        [], tuple(requests), clock,
    )  # fmt: skip


def written(folder: Path, settings: BenchConfig, **late: int) -> Path:
    """A whole run of made-up cells."""
    methods = tuple(record_of(settings, method, folder) for method in settings.methods)
    dataset = Replay(settings).dataset().facts
    write_run(folder, Run("2026-01-01", as_dict(settings), {"revision": "1"}, dataset, methods))
    for cell in plan(settings):
        name = cell.key.method
        more = late.get(name.replace(" ", "_"), 0)
        write_cell(folder, made_cell(settings, name, cell.key.concurrency, late=more))
    return folder


def test_requests_that_do_not_walk_their_traces_fail_the_run(tmp_path: Path) -> None:
    settings = config()
    for late, expected in (({}, 0), ({"fixed_3": 1}, 2), ({"c2t": 1}, 0), ({"c2t": 40}, 2)):
        folder = written(tmp_path / str(late), settings, **late)
        verdict = judge(folder, settings, read_run(folder), plan(settings), [])
        assert len(verdict.replay_disagreements) == expected, late
        assert verdict.outputs_compared == 0, "of replayed drafts outputs say nothing"
        assert all("1 of 4 requests" in told for told in verdict.replay_disagreements)


# -- budget -------------------------------------------------------------------------------


def test_a_budget_goes_by_what_parts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("eval.bench.runner.time.monotonic", lambda: now)
    budget = Budget(100.0)
    with budget.part("cell", 20.0):
        now = 60.0
    with budget.part("other", 20.0):
        pass
    for name, guess in (("cell", 20.0), ("server", 35.0)):  # a fifth is kept in reserve
        with pytest.raises(OutOfTime), budget.part(name, guess):
            raise AssertionError("it began")


def test_a_run_out_of_time_starts_no_server(tmp_path: Path, monkeypatch: Any) -> None:
    settings = config()
    monkeypatch.setattr("eval.bench.runner.running", lambda *_: pytest.fail("a server started"))
    servers, console = hosts(settings, tmp_path), Console(quiet=True)
    runner = Runner(settings, tmp_path, [], "", servers, console, Budget(1.0))
    with pytest.raises(OutOfTime):
        runner.run(plan(settings))
    assert runner.failures == []


def test_a_call_out_of_time_ends_with_3_and_keeps_its_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(CONFIGS / "gpu-check.toml"), "--out", str(tmp_path), "--budget-s", "1",
            "--revision", "abc"]  # fmt: skip
    assert main(argv) == main(argv) == 3
    assert "the same command goes on where this one stopped" in capsys.readouterr().out
    run = read_run(tmp_path)
    assert run.provenance["revision"] == "abc", "where there is no git"
    assert run.dataset["sha256"] == traces.fingerprint(traces.DEMO)


# -- the report ---------------------------------------------------------------------------


def test_the_report_says_what_is_real_and_shows_steps_and_floors(tmp_path: Path) -> None:
    results = load(written(tmp_path, config()))
    text = markdown(report(results, CEILINGS))
    head = text.split("## How to read it")[0]
    assert "replayed from recorded traces; weights are random" in head
    assert "answers" in head
    assert "all requests took as many verifications" in head
    assert "| c2t | 0.75 |" in text.split("Speed-up over the best static method")[1]
    steps = text.split("**Per step, batch 4**")[1].split("**")[0]
    assert "| fixed 3 | 16.0 | 20.0 | 100.00 | 6250.0 |" in steps
    rows = [line.strip("| ").split(" | ") for line in steps.splitlines() if line.startswith("| ")]
    drafting = {row[0]: float(row[6]) for row in rows[1:]}
    assert drafting.pop("no speculation") == 0
    assert min(drafting.values()) == drafting["fixed 3"] > 0, "the others draft seven layers"
    assert "measured on made up" in text
    assert "![Milliseconds per output token" not in text, "answers in one piece tell no latency"
    assert steps.count("| -") == 0
    without = markdown(report(results))
    assert "there are no floors" in without
    assert "| - | - | - |" in without.split("**Per step, batch 4**")[1]


def test_a_replay_that_did_not_work_is_told_first(tmp_path: Path) -> None:
    text = markdown(report(load(written(tmp_path, config(), fixed_3=1))))
    assert "**Replay: in 2 cells it DID NOT WORK" in text.split("## What was measured")[0]
    assert "1 of 4 requests took other verifications" in text.split("## Checks")[1]


# -- real servers -------------------------------------------------------------------------


@pytest.mark.server
def test_a_replay_on_cpu_servers_walks_its_traces_and_times_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy shape, one server of a fixed length and one of two gates; exit code 0 says that
    every request took the verifications of its trace.
    """
    table = as_dict(config())
    table["model"] |= {"target": "shape:toy", "draft": "shape:toy"}
    table["server"] |= {
        "device": "cpu",
        "flags": ["--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "512",
                  "--disable-radix-cache", "--grammar-backend", "none"],
        # The CPU's engine is the plugin's.
        "env": {"SGLANG_PLUGINS": "c2t,step_clock,trace_replay"},
    }  # fmt: skip
    table["load"] = [{"temperature": 0.0, "concurrency": [4], "prompts": [4]}]
    table["methods"] = [method for method in table["methods"]
                        if method["name"] in ("fixed 3", "c2t-plus", "dymax")]  # fmt: skip
    monkeypatch.setattr("eval.run.read_config", lambda _: build(BenchConfig, table, ""))
    assert main(["toy", "--out", str(tmp_path / "run")]) == 0
    cells, _ = read_cells(tmp_path / "run")
    assert len(cells) == 3
    for cell in cells:
        assert cell.clock is not None
        assert cell.clock["steps"] > 1, "how many depends on how fast all four are there"
        assert cell.tokens_per_second == cell.clock["tokens"] / cell.clock["seconds"]
    rows = {cell.method: cell.clock["rows"] / cell.clock["steps"] for cell in cells if cell.clock}
    assert rows["fixed 3"] == 16, "four requests of a root and three drafts"
    assert 4 < rows["c2t-plus"] < 32
    assert rows["dymax"] != rows["c2t-plus"], "prompts chose the policies"
