"""``compare`` beside a stand-in for SGLang's server; ``tests/e2e`` has it with real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.checks import ConfigError
from sglang_c2t.offline import compare as compare_module
from sglang_c2t.offline.client import Streamed
from sglang_c2t.offline.compare import MIXED, Load, answer_lengths, arms, arrivals
from sglang_c2t.offline.compared import Arm, Run, goodput, ratio, verdict
from sglang_c2t.offline.prompts import read_prompts
from sglang_c2t.offline.turns import Turns

DRAFTING = ["--model-path", "m", "--speculative-algorithm", "EAGLE3"]

#: Runs the command line with the stand-in as SGLang's launcher.
COMMAND = """
import subprocess, sys
from sglang_c2t.offline import compare
real = compare.start
def start(argv, env, log):
    return real([sys.executable, "-m", "tests.offline.fake_sglang", *argv[3:]], env, log)
compare.start = start
compare.ARRIVE_SECONDS = 0.1
from sglang_c2t.cli import main
sys.exit(main(["compare", *sys.argv[1:]]))
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"text": letter * 9}) for letter in "abc"]
    path.write_text("\n".join(rows))
    return path


def command(prompts: Path, *launch: str, options: tuple[str, ...] = ()) -> list[str]:
    out = prompts.parent / "out"
    given = ["--data", str(prompts), "--out", str(out), "--at-once", "1", "2", "--repeats", "2"]
    return [sys.executable, "-c", COMMAND, *given, *options, "--", *launch]


def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    argv = command(*args, **kwargs)
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("options", [(), ("--side-by-side",)])
def test_compare_prints_each_server_at_each_load_and_that_outputs_agree(
    prompts: Path, options: tuple[str, ...]
) -> None:
    done = run(prompts, *DRAFTING, options=options)
    assert done.returncode == 0, done.stderr
    for name in ("no speculation", "as-is", "adaptive", "--c2t"):
        assert done.stdout.count(f"\n  {name}  ") == 3, "two loads, and the summary"
    assert "2.00" in done.stdout, "four further tokens in two verifications"
    assert "Fastest at 1: " in done.stdout
    assert "Fastest at all: " in done.stdout
    assert "All outputs are equal." in done.stdout
    assert "--c2t expected 0.97 [0.90, 1.00] of the time of a step" in done.stdout
    found = json.loads((prompts.parent / "out" / "compare.json").read_text())
    assert [len(one["loads"]["2"]["tokens_per_second"]) for one in found] == [2] * 4
    assert [len(one["planners"]) for one in found] == [0, 0, 0, 1]


def test_compare_open_loops_print_requests_within_limits_and_goodput(prompts: Path) -> None:
    open_loops = ("--rates", "100", "50", "--goodput", "ttft:9000", "tpot:9000", "--at-once")
    done = run(prompts, *DRAFTING, options=(*open_loops, "--against", "1", "--side-by-side"))
    assert done.returncode == 0, done.stderr
    assert "% of requests within ttft 9000 ms, tpot 9000 ms" in done.stdout
    for name in ("no speculation", "1 draft", "--c2t"):
        assert re.search(rf"\n  {name} +100 \[100, 100\] +100 \[100, 100\] +100\.00/s", done.stdout)
    assert "All outputs are equal." in done.stdout
    found = json.loads((prompts.parent / "out" / "compare.json").read_text())
    assert [one["rates"]["50.0"]["within_limits"] for one in found] == [[1.0, 1.0]] * 3
    assert not found[0]["loads"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rates", "2"), "--rates and --goodput need each other"),
        (("--goodput", "tpot:9"), "--rates and --goodput need each other"),
        (
            ("--rates", "0", "--goodput", "tpot:9"),
            "--rates must be above 0 and at most 1000, got 0",
        ),
        (("--rates", "nan", "--goodput", "tpot:9"), "--rates must be above 0 and at most 1000"),
        (("--burstiness", "inf"), "--burstiness must be above 0 and at most 1000, got inf"),
        (("--at-once",), "--at-once must name a load, unless --rates does"),
        (("--rates", "2", "--goodput", "itl:9"), "'itl:9' is not ttft, tpot or e2el"),
        (
            ("--rates", "2", "--goodput", "tpot:fast"),
            "'tpot:fast' is not ttft, tpot or e2el, a colon",
        ),
    ],
)
def test_compare_wrong_rate_or_limit_is_an_error_that_names_it(
    prompts: Path, options: tuple[str, ...], message: str
) -> None:
    done = run(prompts, *DRAFTING, options=options)
    assert done.returncode == 2
    assert message in done.stderr


def test_compare_goodput_is_the_rate_up_to_which_requests_keep_their_limits() -> None:
    def taking(*seconds: float) -> Run:
        return Run(9, [Streamed("a", 2, 0.0, s / 2, s, {}) for s in seconds])

    slow, fast = taking(*[1.0] * 18, 3.0, 3.0), taking(*[1.0] * 19, 3.0)
    assert (slow.within({"tpot": 500.0}), fast.within({"tpot": 500.0})) == (0.9, 0.95)
    assert fast.within({"ttft": 1000.0, "e2el": 1000.0}) == 0.95
    assert fast.within({"ttft": 1000.0, "e2el": 999.0}) == 0.0
    server = Arm("a", [], arrived={4.0: [fast], 1.0: [fast], 2.0: [slow, fast, fast]})
    assert goodput(server, {"tpot": 500.0}) == 4.0
    server.arrived[2.0] = [slow, slow, fast]
    assert goodput(server, {"tpot": 500.0}) == 1.0, "it is at 95 % there, and below after it"
    server.arrived[1.0] = [taking(*[1.0] * 20)]
    assert goodput(server, {"tpot": 500.0}) == pytest.approx(1.5), "halfway from 100 to 90 %"
    assert goodput(server, {"tpot": 1.0}) == pytest.approx(0.05), "from 100 % at rate 0"


@given(st.floats(0.1, 50.0), st.integers(0, 99))
def test_compare_requests_arrive_at_their_rate_in_bursts_if_asked(rate: float, seed: int) -> None:
    even, bursty = (np.array(arrivals(rate, 400, shape, seed=seed)) for shape in (1.0, 0.1))
    assert even[0] == 0.0
    assert (np.diff(even) >= 0.0).all()
    assert 0.7 < even[-1] * rate / 399 < 1.4
    assert np.median(np.diff(bursty)) < 0.1 * np.median(np.diff(even)), "most come together"
    assert even.tolist() == arrivals(rate, 400, 1.0, seed=seed) != arrivals(rate, 400, 1.0, seed=-1)


def test_compare_side_by_side_runs_in_turn_where_memory_is_short(prompts: Path) -> None:
    short = "import psutil\npsutil.virtual_memory = lambda: type('M', (), {'available': 1000})"
    argv = command(prompts, *DRAFTING, options=("--side-by-side",))
    argv[2] = f"{short}\n{argv[2]}"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 more servers like no speculation need 0." in done.stderr
    assert "All outputs are equal." in done.stdout


def test_compare_ends_with_1_where_c2t_changes_outputs(prompts: Path) -> None:
    done = run(prompts, *DRAFTING, "--c2t", "--changes")
    assert done.returncode == 0, "all servers change alike"
    changing = ["--c2t", "--c2t-x", "1"]
    assert arms([*DRAFTING, *changing])[-1].flags == [*DRAFTING, *changing]
    mine = COMMAND.replace("*argv[3:]]", '*argv[3:], *(["--changes"] if "--c2t" in argv else [])]')
    argv = [part.replace(COMMAND, mine) for part in command(prompts, *DRAFTING)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "--c2t 32" in done.stdout, "each of 8 answers, at two loads, twice"


def test_compare_wrong_flag_is_an_error_that_names_it(prompts: Path) -> None:
    done = run(prompts, *DRAFTING, "--wrong")
    assert done.returncode == 2
    assert "unrecognized arguments: --wrong" in done.stderr
    assert "no-speculation.log" in done.stderr


def test_compare_wrong_model_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    settings = compare_module.Settings(read_prompts(MIXED))
    with pytest.raises(ConfigError, match=f"no tokenizer at {tmp_path}: "):
        compare_module.requests(settings, ["--model-path", str(tmp_path)])


def test_compare_goes_on_without_a_server_that_does_not_start_or_dies(prompts: Path) -> None:
    done = run(prompts, *DRAFTING, "--speculative-eagle-topk", "4")
    assert done.returncode == 0
    assert "adaptive: server ended with 1: ValueError: adaptive needs a topk of 1" in done.stdout
    mine = COMMAND.replace("*argv[3:]]", '*argv[3:], *(["--dies"] if "--c2t" in argv else [])]')
    argv = [part.replace(COMMAND, mine) for part in command(prompts, *DRAFTING)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "--c2t: failed at 1 at once: " in done.stdout
    assert "Fastest at 2: " in done.stdout


@pytest.mark.parametrize(
    ("end", "options"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ()),
        (signal.SIGINT, ("--side-by-side",)),
        (signal.SIGINT, ("--side-by-side", "--rates", "1", "--goodput", "tpot:9", "--at-once")),
    ],
)
def test_compare_interrupt_stops_its_servers(
    prompts: Path, end: int, options: tuple[str, ...]
) -> None:
    argv = command(prompts, *DRAFTING, options=("--repeats", "100000", *options))
    # A shell's background job ignores SIGINT, and so would its child.
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    argv[2] = reset + argv[2]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    wanted = psutil.STATUS_STOPPED if options else psutil.STATUS_SLEEPING  # in turns one runs
    children: list[psutil.Process] = []
    while wanted not in [child.status() for child in children]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(1)
    os.kill(process.pid, end)
    assert process.wait(60) == 130
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("over", [True, False])
def test_compare_drops_what_an_interrupt_cut(monkeypatch: pytest.MonkeyPatch, over: bool) -> None:
    """All servers run at once then: it had 120 tokens/s, not 50."""
    monkeypatch.setattr(compare_module, "stream_all", lambda *_args, **_more: [])
    server, turns = Arm("one", []), Turns({"one": 0})
    turns.over = over
    compare_module._send(server, "", Load([{}], 1), turns)
    assert bool(server.runs) != over


@pytest.mark.parametrize(
    "flags", [["--model-path", "m"], ["--model-path=m", "--speculative-num-steps=3"]]
)
def test_compare_needs_a_server_that_drafts(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--speculative-algorithm EAGLE3"):
        arms(flags)


def test_compare_flags_of_each_server() -> None:
    given = ["--tp", "2", "--speculative-num-steps=3", "--port", "30000", *DRAFTING, "--trust"]
    none, as_is, adaptive, c2t = (arm.flags for arm in arms([*given, "--c2t-beta", "0.3"]))
    assert none == ["--tp", "2", "--model-path", "m", "--trust"]
    assert as_is == ["--tp", "2", "--speculative-num-steps=3", *DRAFTING, "--trust"]
    assert adaptive == [*as_is, "--speculative-adaptive"]
    assert c2t == [*as_is, "--c2t"]
    _, two, _ = arms(given, ["2"])
    lengths = ["--speculative-num-draft-tokens", "3", "--speculative-eagle-topk", "1"]
    assert two.flags == [
        "--tp", "2", *DRAFTING, "--trust", "--speculative-num-steps", "2", *lengths,
    ]  # fmt: skip
    trees = ["--speculative-num-draft-tokens", "8", "--speculative-eagle-topk", "4"]
    assert arms([*given, *trees], ["2"])[1].flags[-4:] == trees
    mine = ["--c2t", "--c2t-max-verify-rows", "2"]
    more = [*mine, *given, "--api-key", "secret", "--speculative-adaptive"]
    assert [arm.flags for arm in arms(more)] == [none, as_is, adaptive, [*as_is, *mine]]


@pytest.mark.parametrize("name", ["0", "-1", "two", "as it is"])
def test_compare_against_an_unknown_server_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--against takes .* got '{name}'"):
        arms(DRAFTING, [name])


def made(name: str, *rates: float) -> Arm:
    """A server with these tokens per second at 8 requests."""
    answers = [[Streamed("a", 1, 0.0, 0.1, 1.0 / rate, {})] for rate in rates]
    return Arm(name, [], runs={8: [Run(8, each) for each in answers]})


@pytest.mark.parametrize(
    ("c2t", "said"),
    [
        ((15.0, 16.0), "Fastest at 8: --c2t. --c2t has 1.41 [1.36, 1.45] of the tokens of "
         "as-is, which is faster."),
        ((10.0, 12.0), "which is within the noise."),
        ((8.0, 9.0), "which is SLOWER."),
    ],
)  # fmt: skip
def test_compare_verdict_names_losses_and_noise(c2t: tuple[float, float], said: str) -> None:
    servers = [made("no speculation", 10.0, 10.0), made("as-is", 11.0, 11.0)]
    assert said in verdict([*servers, made("--c2t", *c2t)], [8])


def test_compare_over_all_loads_weighs_them_by_their_time() -> None:
    """Loads are not averages of ratios: a load that takes ten times as long counts ten times."""
    slow, fast = (made(name, *rates) for name, rates in (("a", (1.0, 1.0)), ("b", (2.0, 2.0))))
    for server, rate in ((slow, 10.0), (fast, 10.0)):
        server.runs[1] = made("", rate).runs[8]
    assert ratio(fast, slow, [8, 1]) == (pytest.approx(1.1 / 0.6),) * 3
    assert ratio(fast, slow, [1]) == (1.0, 1.0, 1.0)


def test_compare_own_prompts_are_of_several_kinds() -> None:
    rows = read_prompts(MIXED)
    assert len({row.group for row in rows}) >= 6
    assert len(rows) == len({str(row.messages) for row in rows}) >= 24


@given(st.integers(1, 60), st.integers(1, 500))
def test_compare_answers_are_of_a_quarter_of_the_length_to_all_of_it(count: int, most: int) -> None:
    lengths = answer_lengths(count, most)
    assert min(lengths) >= most / 4
    assert lengths[0] == max(lengths) == most
    assert count < 4 or most < 40 or len(set(lengths)) > count / 2
