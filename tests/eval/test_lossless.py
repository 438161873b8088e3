"""The losslessness suite finds altered answers and separates ties from defects."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.lossless import __main__ as command
from eval.lossless import greedy, sampling, seeded, servers
from eval.lossless.__main__ import FULL, Found
from eval.lossless.greedy import Divergence, Output, Wave, compare, first_difference
from eval.lossless.seeded import Reproduced
from eval.lossless.servers import Broken, Models, visit_all
from eval.lossless.workload import KINDS, LONG_PROMPT, LONGEST_ANSWER, Request, mixed
from eval.recordings import Pair
from eval.server import Launch, Server
from tests.eval.fake_server import Choose, fake_server, likeliest
from tests.tiny_llama import VOCAB, tiny_llama

REQUEST = Request(3, "ordinary", {"input_ids": [1, 2], "sampling_params": {}})
PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + i % 4)] for i in range(24)]
NOISE = 0.1


# -- divergences ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "place"),
    [((1, 2, 3), None), ((1, 4, 3), 1), ((1, 2), 2), ((), 0), ((1, 2, 3, 4), 3)],
)
def test_lossless_first_difference_is_a_place_or_the_shorter_length(
    other: tuple[int, ...], place: int | None
) -> None:
    assert first_difference((1, 2, 3), other) == place


def difference(got: Output, expected: tuple[int, ...] = (4, 5)) -> Divergence:
    found = compare(REQUEST, Output(expected), got)
    assert found is not None
    return found


def test_lossless_divergence_holds_the_context_of_the_differing_token() -> None:
    found = difference(Output((4, 7, 6)), expected=(4, 5, 6))
    assert (found.place, found.expected, found.got) == (1, 5, 7)
    assert [*found.prompt_ids, *found.prefix_ids] == [1, 2, 4]
    assert found.verdict == "unclassified"


@pytest.mark.parametrize(
    "got",
    [
        Output((4,)),
        Output((4, 5, 6)),
        Output((4, 5), finish=("stop", 0)),
        Output((4, 5), text="another"),
    ],
    ids=["too short", "too long", "another finish reason", "another text"],
)
def test_lossless_difference_that_rounding_cannot_explain_is_a_defect(got: Output) -> None:
    assert difference(got).verdict == "defect"
    assert difference(got).why


def tied_llama() -> LlamaForCausalLM:
    """Tokens 2 and 5 have equal weights, so that the model cannot prefer either."""
    model = tiny_llama(0)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        weight.data[5] = weight.data[2]
    return model


def the_other_of_a_tie(_prompt: list[int], _answer: list[int], log_probs: Tensor) -> int:
    """Token 5 where the likeliest is 2, as another rounding would choose."""
    best = int(log_probs.argmax())
    return 5 if best == 2 else best


def altered(prompt: list[int], answer: list[int], log_probs: Tensor) -> int:
    """The second best token, at the third place of some answers."""
    third = len(answer) == 2 and sum(prompt) % 3 == 0
    return int(log_probs.topk(2).indices[1]) if third else int(log_probs.argmax())


Suite = Callable[..., Found]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Run the greedy part on servers of ``model``; those that speculate ``choose`` tokens."""

    def run(model: LlamaForCausalLM, choose: Choose, *argv: str) -> Found:
        @contextlib.contextmanager
        def running(launch: Launch, *_: Any) -> Iterator[Server]:
            with fake_server(model, choose if "EAGLE" in launch.name else likeliest) as server:
                yield server

        monkeypatch.setattr(servers, "running", running)
        args = command.parse(["greedy", "--shapes", "chains", "--algorithm", "EAGLE", *argv,
                              "--out", str(tmp_path)])  # fmt: skip
        args.size = args.size._replace(requests=17, max_new_tokens=12)
        return command.Suite(command.models(args), args, PROMPTS, Progress(disable=True)).run()

    return run


def test_lossless_altered_outputs_are_defects(suite: Suite) -> None:
    """Those of stock speculation are counted, but not as defects."""
    found = suite(tiny_llama(0), altered, "--stock")
    bodies = {r.index: r.body for r in mixed(PROMPTS, 17, longest=12)}
    wrong = {
        i for i, body in bodies.items()
        if sum(body["input_ids"]) % 3 == 0 and body["sampling_params"]["max_new_tokens"] > 2
    }  # fmt: skip
    assert {wave.policy for wave in found.waves} == set(greedy.POLICIES["chains"])
    assert sum(wave.requests for wave in found.waves) == 17
    assert found.defects == len(wrong) > 1
    assert [(w.server, w.requests, len(w.divergences)) for w in found.control] == [
        ("no speculation", 17, 0), ("EAGLE chains, stock", 17, len(wrong)),
    ]  # fmt: skip
    divergences = [d for wave in found.waves for d in wave.divergences]
    assert {d.index for d in divergences} == wrong
    assert {(d.place, d.verdict) for d in divergences} == {(2, "defect")}
    assert all(d.lead is not None and d.lead > 1e-3 for d in divergences)


def test_lossless_other_token_of_a_constructed_tie_is_a_tie(suite: Suite) -> None:
    found = suite(tied_llama(), the_other_of_a_tie)
    divergences = [d for wave in found.waves for d in wave.divergences]
    assert divergences
    assert {(d.expected, d.got, d.verdict) for d in divergences} == {(2, 5, "tie")}
    assert found.defects == 0


def test_lossless_faithful_servers_differ_nowhere_and_need_no_score(suite: Suite) -> None:
    found = suite(tied_llama(), likeliest)
    assert (found.defects, found.noise, found.broken) == (0, None, [])
    assert not any(wave.divergences for wave in found.waves)


def test_lossless_tie_is_a_lead_within_twice_the_measured_noise() -> None:
    """A grammar may forbid the likeliest token: the likelier of the two counts then."""
    clear = [difference(Output((token,)), (2,)) for token in (5, 6)]
    constrained = replace(clear[0], constrained=True)
    with fake_server(tied_llama()) as exact:
        greedy.classify(exact.url, [*clear, constrained], 1e-5)
        assert (constrained.verdict, constrained.lead) == ("tie", pytest.approx(0, abs=1e-5))
        leads = sorted(d.lead for d in clear if d.lead is not None)
        assert len(leads) == 2
        assert leads[0] > 1, "a third token is the likeliest by more than both differ"
        again = [replace(d, verdict="unclassified") for d in clear]
        greedy.classify(exact.url, again, sum(leads) / 4)
    assert {d.verdict: d.lead for d in again} == {"tie": leads[0], "defect": leads[1]}


def test_lossless_noise_is_the_error_of_served_leads() -> None:
    """A served lead shifted by 0.05 nats at near ties is measured as such."""
    with fake_server(tiny_llama(0)) as plain:
        served = greedy.served_answers(plain.url, PROMPTS, 12)
        exact = greedy.rounding_noise(plain.url, served)
        for _, reply in served:
            for place in reply["meta_info"]["output_top_logprobs"]:
                place[0][0] += 0.05
        noise = greedy.rounding_noise(plain.url, served)
        for _, reply in served:
            reply["output_ids"], reply["meta_info"]["output_top_logprobs"] = [], []
        with pytest.raises(ValueError, match="are empty"):
            greedy.rounding_noise(plain.url, served)
    assert exact < 1e-5
    assert noise == pytest.approx(0.05, abs=1e-5)


# -- workload -------------------------------------------------------------------------------


def test_lossless_workload_holds_every_kind_and_repeats_for_a_seed() -> None:
    requests = mixed(PROMPTS, 20 * len(KINDS))
    assert requests == mixed(PROMPTS, 20 * len(KINDS))
    assert requests != mixed(PROMPTS, 20 * len(KINDS), seed=2)
    lengths = {r.body["sampling_params"]["max_new_tokens"] for r in requests}
    assert {1, LONGEST_ANSWER} <= lengths <= set(range(1, LONGEST_ANSWER + 1))
    by_kind = {request.kind: request for request in requests}
    assert by_kind.keys() == set(KINDS)
    assert len(by_kind["one-token prompt"].body["input_ids"]) == 1
    assert LONG_PROMPT // 2 <= len(by_kind["long prompt"].body["input_ids"]) <= LONG_PROMPT
    assert {k for k, r in by_kind.items() if r.constrained} == {"regex", "JSON schema"}


@pytest.mark.parametrize(("n", "parts"), [(1, 3), (7, 1), (100, 7), (102, 6)])
def test_lossless_blocks_and_batches_hold_every_request_once(n: int, parts: int) -> None:
    by_block = [number for block in greedy.blocks(n, parts) for number in range(n)[block]]
    by_batch = [number for _, part in greedy.by_batch_size(n) for number in range(n)[part]]
    assert by_block == by_batch == list(range(n))


def test_lossless_full_run_fills_the_largest_batch() -> None:
    """Six servers with five policies get more requests than run at once, so that some join."""
    each = FULL.requests // 6
    for names in greedy.POLICIES.values():
        least = min(len(range(each)[b]) for b in greedy.blocks(each, len(names)))
        concurrency, part = greedy.by_batch_size(least)[-1]
        assert concurrency == 64 < len(range(least)[part])


def test_lossless_seeded_requests_are_compared_alone_and_in_a_mixed_batch() -> None:
    """Only greedy requests of the mixed batch are promised to repeat."""
    some = PROMPTS[:3]
    with fake_server(tiny_llama(0)) as server:
        expected = {**seeded.expect(server, some), "top_p": [(99,)] * len(some)}
        runs = seeded.check(server, "s", some, expected, (16, 1))
    assert {(run.kind, run.concurrency): (len(run.differing), run.promised) for run in runs} == {
        ("whole", 16): (0, True), ("whole", 1): (0, True),
        ("top_p", 16): (3, True), ("top_p", 1): (1, True),
        ("top_k", 16): (0, True), ("top_k", 1): (0, True),
        ("greedy, mixed", 16): (0, True), ("whole, mixed", 16): (0, False),
        ("top_p, mixed", 16): (3, False), ("top_k, mixed", 16): (0, False),
    }  # fmt: skip


# -- verdict --------------------------------------------------------------------------------


def wave(*verdicts: str) -> Wave:
    found = [
        replace(difference(Output((5,)), (4,)), verdict=v, lead=0.5, why="because")
        for v in verdicts
    ]
    return Wave("EAGLE chains", "c2t", 100, 5000, 2.0, 3.0, found)


def sample_test(p_value: float) -> sampling.SampleTest:
    fit = sampling.Fit(50.0, 45, p_value, 3000)
    return sampling.SampleTest("EAGLE trees", "top-p 0.9", fit, 1e-5, 0.07, 2.0)


def clean() -> Found:
    """Divergences of servers without ``--c2t``, ties and unpromised repeats are no defects."""
    runs = [
        Reproduced("EAGLE trees", "whole", 16, 24, 500, 90, []),
        Reproduced("EAGLE trees", "top_p, mixed", 16, 24, 500, 90, [1, 2, 3], promised=False),
    ]
    waves = [wave(), wave("tie")]
    return Found([wave("tie", "defect")], waves, NOISE, [sample_test(0.3)], runs)


WRONG: dict[str, dict[str, Any]] = {
    "none": {},
    "a defect": {"waves": [wave("tie", "defect")]},
    "an unclassified divergence": {"waves": [wave("unclassified")]},
    "a sampler that deviates": {"tests": [sample_test(1e-7)]},
    "a seed that gives other tokens": {"seeded": [Reproduced("s", "whole", 1, 24, 5, 9, [7])]},
    "a server that dies": {"broken": [Broken("s", "ServerError: ended with -9")]},
}


def decode(ids: Any) -> str:
    return " ".join(f"t{token}" for token in ids)


@pytest.mark.parametrize("what", WRONG)
def test_lossless_report_counts_one_defect_of_any_kind(what: str) -> None:
    found = replace(clean(), **WRONG[what])
    assert found.defects == (what != "none")
    summary = json.loads(json.dumps(command.as_json(found, decode)))
    assert summary["lossless"] is (what == "none")
    assert summary["control"][0]["divergences"][0]["prompt"] == "t1 t2"
    console = Console(file=io.StringIO(), width=160, record=True)
    command.show(found, decode, console)
    text = console.export_text()
    assert ("NO, 1 defects" if found.defects else "lossless: yes (200 greedy") in text
    if what == "a defect":
        assert "DEFECT: EAGLE chains, c2t, 1 at once, request 3 (ordinary), token 0: 't5'" in text


# -- arguments and servers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m"], "--model needs --draft"),
        (["--draft", "d"], "--draft goes with --model"),
        (["--algorithm", "NEXTN"], "no demo draft"),
        (["--pair", "smollm2", "--model", "m"], "--pair brings its models"),
        (["--model", "/nowhere", "--draft", "d", "--algorithm", "EAGLE3"], "/nowhere"),
    ],
)
def test_lossless_bad_arguments_exit_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    assert message in capsys.readouterr().err


def test_lossless_sizes_depend_on_quick_pair_and_model() -> None:
    assert command.parse([]).size == (2952, 3000, 60, 96, 16, 2)
    assert command.parse(["--quick"]).size == (408, 800, 60, 96, 16, 2)
    assert command.parse(["--pair", "smollm2"]).size == (500, 300, 8, 32, 8, 2)
    own = command.parse(["--model", "m", "--num-draft-tokens", "9"])
    assert own.size == (2952, 3000, 60, 96, 9, 1)


def argv_of(models: Models, algorithm: str, shape: str, **how: Any) -> str:
    return " ".join(models.speculative(algorithm, shape, **how).argv(30000))


def test_lossless_servers_have_the_flags_of_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own pairs run in float32 on the CPU, the user's models with the user's flags only."""
    pair = Pair("a pair", Path("target"), Path("head"), "EAGLE3", {"OMP_NUM_THREADS": "2"})
    monkeypatch.setattr(command, "smollm2", lambda: pair)
    models = command.models(command.parse(["--pair", "smollm2"]))
    assert models.kinds(("chains", "trees")) == [("EAGLE3", "chains"), ("EAGLE3", "trees")]
    for flags in ("--model-path target", "--speculative-draft-model-path head", "--device cpu",
                  "--dtype float32", "--speculative-num-draft-tokens 8"):  # fmt: skip
        assert flags in argv_of(models, "EAGLE3", "trees")
    assert models.plain().env == {"OMP_NUM_THREADS": "2"}, "it runs alone"
    own = command.models(command.parse(
        ["--model", "m", "--draft", "d", "--algorithm", "EAGLE3", "--flags", "--tp-size 2"]
    ))  # fmt: skip
    argv = argv_of(own, "EAGLE3", "trees")
    assert "--model-path m " in argv
    assert "--tp-size 2 --speculative-algorithm" in argv
    assert "--speculative-eagle-topk 4" in argv
    assert "--device" not in argv
    assert "--dtype" not in argv
    assert "--dtype float32" in " ".join(own.float32().argv(30000))
    demo = command.models(command.parse([]))
    assert "--speculative-num-draft-tokens 6" in argv_of(demo, "EAGLE", "chains")
    assert len(demo.kinds(("chains", "trees"))) == 6
    stock = argv_of(demo, "EAGLE", "chains", c2t=False)
    assert argv_of(demo, "EAGLE", "chains").replace(" --c2t", "") == stock


def test_lossless_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    launch = command.models(command.parse([])).plain("refused", "--no-such-flag")
    (broken,) = visit_all([(launch, lambda _: None)], tmp_path)
    assert isinstance(broken, Broken)
    assert broken.server == "refused"
    assert "no-such-flag" in broken.message
