"""The command without servers: its arguments, its verdict, its tables and its file."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.lossless import __main__ as command
from eval.lossless import kits, summary
from eval.lossless.diverge import Divergence, Noise, Output, compare
from eval.lossless.greedy import POLICIES, Wave
from eval.lossless.outcome import NOT_RUN, Outcome
from eval.lossless.sampling import Fit, SampleTest
from eval.lossless.seeded import Reproduced
from eval.lossless.servers import Broken, Models, visit_all
from eval.lossless.suite import SAMPLED_UNDER, Found, Suite
from eval.lossless.workload import Asked, mixed
from eval.recordings import Pair
from eval.server import TARGET

# -- the verdict ----------------------------------------------------------------------------


def parted(verdict: str) -> Divergence:
    request = Asked(3, "ordinary", {"input_ids": [1, 2], "sampling_params": {}})
    found = compare(request, Output((4,)), Output((5,)))
    assert found is not None
    return replace(found, verdict=verdict, lead=0.5, bound=0.1, why="because")


def wave(*verdicts: str) -> Wave:
    return Wave("EAGLE chains", "c2t", 64, 100, 5000, 2.0, 3.0, [parted(v) for v in verdicts])


def sample_test(p_value: float) -> SampleTest:
    return SampleTest(
        "EAGLE trees", "top-p 0.9", Fit(50.0, 45, p_value, 3000), 1e-5, 0.07, 2.0, 3.0
    )


def clean() -> Found:
    return Found(
        control=[wave("tie", "defect")],  # of the plain server with itself: not ours
        waves=[wave(), wave("tie")],
        noise=Noise(0.05, 0.01, 900),
        tests=[sample_test(0.3)],
        seeded=[Reproduced("EAGLE trees", "whole", 16, 24, 500, 90, [])],
        kits=[Outcome("EAGLE3 chains", "json_mode_kit", "test_json", True, 1.0)],
    )


WRONG: dict[str, dict[str, Any]] = {
    "a defect": {"waves": [wave("tie", "defect")]},
    "a divergence that could not be classified": {"waves": [wave("unclassified")]},
    "a sampler that deviates": {"tests": [sample_test(1e-7)]},
    "a seed that gives other tokens": {"seeded": [Reproduced("s", "whole", 1, 24, 5, 9, [7])]},
    "a kit that fails": {"kits": [Outcome("s", "json_mode_kit", "t", False, 1.0, "no JSON")]},
    "a server that dies": {"broken": [Broken("s", "ServerError: ended with -9")]},
}


def test_ties_are_no_defects() -> None:
    assert clean().defects == 0
    assert summary.verdict(clean()).startswith("lossless: yes (200 greedy requests, 1 parted")


@pytest.mark.parametrize("what", WRONG)
def test_one_wrong_thing_of_any_kind_is_a_defect(what: str) -> None:
    found = replace(clean(), **WRONG[what])
    assert found.defects == 1
    assert "NO, 1 defect" in summary.verdict(found)


def test_what_nobody_promises_to_repeat_is_counted_and_no_defect() -> None:
    """Seeded requests in batches of several kinds; stock gives them other tokens as well."""
    mixed = Reproduced("EAGLE trees", "top_p, mixed", 16, 24, 500, 90, [1, 2, 3], promised=False)
    found = replace(clean(), seeded=[*clean().seeded, mixed])
    assert found.defects == 0
    console = Console(file=io.StringIO(), width=160, record=True)
    summary.show(found, decode, console)
    assert "3 (not promised)" in console.export_text()


def decode(ids: Any) -> str:
    return " ".join(f"t{token}" for token in ids)


def test_tables_tell_all_counts_and_each_divergence() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    summary.show(replace(clean(), **WRONG["a defect"]), decode, console)
    text = console.export_text()
    for shown in (
        "100 (64)",
        "10000",
        "0.070",
        "45",
        "24 (16)",
        "0.500",
        "json_mode_kit",
        "NO, 1 defect",
    ):
        assert shown in text
    assert "DEFECT: EAGLE chains, c2t, 64 at once, request 3 (ordinary), token 0: 't5' (5)" in text
    assert "Prompt: ...'t1 t2'" in text


def test_the_file_holds_everything_found(tmp_path: Path) -> None:
    path = summary.write(clean(), {"seed": 0}, {"revision": "abc"}, decode, tmp_path)
    told = json.loads(path.read_text())
    assert told["lossless"] is True
    assert told["provenance"] == {"revision": "abc"}
    assert told["greedy"]["rounding_noise"]["bound"] == 0.1
    (divergence,) = told["greedy"]["waves"][1]["divergences"]
    assert (divergence["place"], divergence["verdict"], divergence["prompt"]) == (0, "tie", "t1 t2")
    (test,) = told["sampling"]["tests"]
    assert (test["fit"]["statistic"], test["fit"]["p_value"], test["fit"]["n"]) == (50, 0.3, 3000)
    assert (test["detectable"], test["passed"]) == (0.07, True)


# -- the command line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "m"], "--model needs --draft and one --algorithm"),
        (["--draft", "d"], "--draft goes with --model"),
        (["kits", "--model", "m", "--draft", "d", "--algorithm", "EAGLE"], "leave --model away"),
        (["--policies", "nonsense"], "nonsense"),
        (["--policies", "eagle2", "--shapes", "chains"], "grows trees"),
        (["--policies", "eagle2"], "none of eagle2 is for chains"),
        (["--algorithm", "NEXTN"], "has no demo draft"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--pair", "smollm2", "--draft", "d"], "--pair brings its models"),
        (["kits", "--pair", "smollm2"], "--pair brings its models"),
    ],
)
def test_arguments_that_make_no_sense_end_with_2_and_say_why(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--requests", "0"], ["nothing"], ["--samples", "few"]])
def test_argparse_ends_with_2_as_well(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("found", "code"), [(clean(), 0), (replace(clean(), waves=[wave("defect")]), 1)]
)
def test_a_defect_ends_with_1_and_is_written(
    found: Found, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suite, "run", lambda _: found)
    assert command.main(["--out", str(tmp_path)]) == code
    assert json.loads((tmp_path / summary.SUMMARY_FILE).read_text())["lossless"] is (code == 0)


def test_shipped_policies_are_known_for_their_shape() -> None:
    for shape, names in (*POLICIES.items(), *SAMPLED_UNDER.items()):
        assert command.policies(names, [shape], 4) == {shape: tuple(names)}


def test_a_full_run_asks_two_thousand_requests_and_more() -> None:
    args = command.parser().parse_args([])
    what = command.settings(args, demo=True)
    assert what.requests >= 2000
    num_servers = len(Models.of_the_demo().kinds(what.shapes))
    assert num_servers == 6
    assert what.requests / num_servers >= 350


def test_lossless_real_pair_is_asked_less_and_shorter_unless_told() -> None:
    args = command.parser().parse_args(["--pair", "smollm2"])
    what = command.settings(args, demo=False)
    assert (what.requests, what.samples, what.seeded_prompts, what.longest) == (500, 300, 8, 32)
    assert what.parts == ("greedy", "sampling", "seeded")
    assert {request.body["sampling_params"]["max_new_tokens"] for request in
            mixed([[1, 2], [3]], 400, 0, what.longest)} == set(range(1, 33))  # fmt: skip
    told = ["--max-new-tokens", "9", "--seeded-prompts", "3", "--requests", "7", "--samples", "40"]
    what = command.settings(command.parser().parse_args(["--pair", "smollm2", *told]), demo=False)
    assert (what.requests, what.samples, what.seeded_prompts, what.longest) == (7, 40, 3, 9)


# -- servers --------------------------------------------------------------------------------


def test_lossless_real_pair_is_served_in_float32_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair("a pair", Path("target"), Path("head"), "EAGLE3", {"OMP_NUM_THREADS": "2"})
    monkeypatch.setattr(command, "smollm2", lambda: pair)
    models = command.models(command.parser().parse_args(["--pair", "smollm2"]))
    assert models.kinds(("chains", "trees")) == [("EAGLE3", "chains"), ("EAGLE3", "trees")]
    launch = models.gated("EAGLE3", "trees")
    argv = " ".join(launch.argv(30000))
    for flags in ("--model-path target", "--speculative-draft-model-path head", "--device cpu",
                  "--dtype float32", "--speculative-num-draft-tokens 8"):  # fmt: skip
        assert flags in argv
    # Two of them run at once, the one without speculation by itself.
    assert (launch.env, models.plain().env) == ({}, {"OMP_NUM_THREADS": "2"})


def test_own_models_get_no_flags_for_a_cpu() -> None:
    own = Models("m", {"EAGLE3": "d"}, ("--tp-size", "2"))
    argv = own.gated("EAGLE3", "trees").argv(30000)
    assert argv[argv.index("--model-path") + 1] == "m"
    assert argv[argv.index("--tp-size") + 1] == "2"
    assert argv[argv.index("--speculative-eagle-topk") + 1] == "4"
    assert "--device" not in argv
    assert "--dtype" not in argv
    exact = own.float32().argv(30000)
    assert exact[exact.index("--dtype") + 1] == "float32"
    assert "--speculative-algorithm" not in exact


def test_chains_have_one_node_a_step_and_the_root() -> None:
    argv = Models.of_the_demo().gated("EAGLE", "chains").argv(30000)
    assert argv[argv.index("--speculative-num-draft-tokens") + 1] == "6"
    assert argv[argv.index("--speculative-eagle-topk") + 1] == "1"


def test_stock_speculation_is_the_same_but_for_the_flag() -> None:
    models = Models.of_the_demo()
    for kind in models.kinds(("chains", "trees")):
        gated = models.gated(*kind).argv(30000)
        assert models.stock(*kind).argv(30000) == [flag for flag in gated if flag != "--c2t"]


def test_a_server_that_does_not_start_is_found_and_keeps_no_other_from_running(
    tmp_path: Path,
) -> None:
    launches = [Models.of_the_demo().plain("refused", "--no-such-flag")]
    (broken,) = visit_all(launches, lambda *_: None, tmp_path)
    assert isinstance(broken, Broken)
    assert broken.server == "refused"
    assert "no-such-flag" in broken.message


# -- kits -----------------------------------------------------------------------------------


def test_every_kit_of_the_wheel_is_run_or_left_out_for_a_reason() -> None:
    """So that a new SGLang's new kits are looked at."""
    spec = find_spec("sglang.test.kits")
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    names = {path.stem for path in folder.iterdir() if not path.name.startswith("__")}
    hosts = (kits.ServingKits, kits.RunningTimeoutKits, kits.WaitingTimeoutKits)
    bases = {base.__module__.rsplit(".", 1)[1] for host in hosts for base in host.__mro__
             if base.__module__.startswith("sglang.test.kits")}  # fmt: skip
    called = {"cache_hit_kit", "radix_cache_server_kit"}  # functions, not classes
    named = {name for name in names if any(name in left_out for left_out in NOT_RUN)}
    assert names == bases | called | named


def test_tests_are_told_by_the_kit_they_come_from() -> None:
    homes = Counter(kits._home(type(t), t._testMethodName) for t in kits.tests_of(kits.ServingKits))
    assert homes["regex_constrained_kit"] == 7
    assert homes["cache_hit_kit"] == 1
    assert sum(homes.values()) > 50


def test_a_failing_kit_is_told_with_its_message() -> None:
    class Failing(kits.DemoKit):
        def test_it(self) -> None:
            raise AssertionError("not as promised")

    (test,) = kits.tests_of(Failing)
    ended: list[bool] = []
    outcome = kits.run_test("here", test, lambda: ended.append(True))
    assert not outcome.passed
    assert "not as promised" in outcome.message
    assert (outcome.server, outcome.test, ended) == ("here", "test_it", [True])


def test_scaled_kits_draw_tokens_of_the_demo_models_only() -> None:
    assert TARGET.is_dir()
    drawn = kits.demo_token_ids(50, 40)
    assert max(map(max, drawn)) < kits.VOCAB
    assert len({ids[0] for ids in drawn}) > 25
