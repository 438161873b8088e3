"""A request's parameters mean what they mean without speculation, or the server answers 400.

The server without speculation runs without SGLang's overlap scheduler, under which it counts each
token one step late, and the prompt's last token with the answer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from eval.prompts import demo_mix
from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import LoadResult, differing, greedy, run_load
from tests.e2e.conftest import REPOSITORY, TREE, assert_same_logprobs, verified_rows_reported
from tests.e2e.processors import EveryOther, NoPairTwice

FLAGS = (
    "--enable-deterministic-inference", "--enable-custom-logit-processor",
    "--enable-return-hidden-states", "--reasoning-parser", "deepseek-r1",
)  # fmt: skip

SERVERS: dict[str, tuple[str, ...]] = {
    "planned chains, EAGLE3": (*speculative_flags("EAGLE3"), "--c2t"),
    "gated trees, EAGLE3": (*speculative_flags("EAGLE3", **TREE), "--c2t", "--c2t-policy", "c2t"),
    "static trees, STANDALONE": (
        *speculative_flags("STANDALONE", **TREE), "--c2t", "--c2t-policy", "c2t", "--c2t-verify",
        "static",
    ),
}  # fmt: skip

#: What requests of a batch ask for in turn. None asks for an additive penalty and a scaling one:
#: without overlap SGLang applies the members of a set in their order, which a start decides.
ASKED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 40},
    {},
    {"frequency_penalty": -0.5, "presence_penalty": 0.7, "min_new_tokens": 20,
     "stop_token_ids": [11, 13, 262]},
    {"processor": NoPairTwice},
    {"processor": DisallowedTokensLogitsProcessor, "token_ids": [11, 13, 198, 262, 290],
     "presence_penalty": 0.4},
]  # fmt: skip


def bodies(count: int = 16, **drawn: Any) -> list[dict[str, Any]]:
    """A batch whose requests ask for different things; ``drawn``: sampled so, each by its seed."""
    made = []
    for number, prompt in enumerate(demo_mix(count)):
        body, asked = greedy(prompt.text, 48), dict(ASKED[number % len(ASKED)])
        if processor := asked.pop("processor", None):
            body["custom_logit_processor"] = processor.to_str()
            asked["custom_params"] = {"token_ids": asked.pop("token_ids", [])}
        body["sampling_params"] |= asked
        if drawn:
            body["sampling_params"] |= {**drawn, "sampling_seed": 1000 + number}
        made.append(body)
    return made


def with_logprobs(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**body, "return_logprob": True, "top_logprobs_num": 2} for body in asked]


#: Beside a request that is cut otherwise SGLang draws otherwise, so that all are cut.
DRAWN = {"temperature": 0.9, "top_p": 0.95}
LOADS = {
    "greedy": bodies(),
    "seeded": bodies(**DRAWN),
    "greedy, log-probabilities": with_logprobs(bodies(8)),
    "seeded, log-probabilities": with_logprobs(bodies(8, **DRAWN)),
}


def launch(name: str, *flags: str) -> Launch:
    """A server that finds the processors of the tests."""
    return Launch(name, (*FLAGS, *flags), env={"PYTHONPATH": str(REPOSITORY)})


@pytest.fixture(scope="module")
def alone(logs: Path) -> Iterator[Server]:
    with running(launch("parameters-plain", "--disable-overlap-schedule"), logs) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(alone: Server) -> dict[str, LoadResult]:
    found = {}
    for name, load in LOADS.items():
        alone.flush_cache()
        found[name] = run_load(alone.url, load, concurrency=8)
    return found


@pytest.fixture(scope="module", params=SERVERS)
def drafting(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    flags = SERVERS[request.param]
    name = request.param.replace(",", "").replace(" ", "-")
    with running(launch(f"parameters-{name}", *flags), logs) as server:
        yield server


@pytest.mark.parametrize("load", LOADS)
def test_penalties_minimum_lengths_and_processors_give_the_tokens_of_plain_decoding(
    drafting: Server, wanted: dict[str, LoadResult], load: str
) -> None:
    """In one batch with ordinary requests, of which some come as others leave."""
    drafting.flush_cache()
    before = drafting.c2t_state()["counters"]["verify_rows"]
    found = run_load(drafting.url, LOADS[load], concurrency=12)
    rows = drafting.c2t_state()["counters"]["verify_rows"] - before
    reported = verified_rows_reported(found.answers)
    verifications = sum(a.meta_info.get("spec_verify_ct", 0) for a in found.answers)
    padded = "static" in drafting.log.name
    assert rows == (TREE["num_draft_tokens"] * verifications if padded else reported)
    assert reported < rows or not padded, "no tree was cut"
    assert differing(found.outputs, wanted[load].outputs) == []
    if "log" in load:
        assert_same_logprobs(found, wanted[load])
    drafts = sum(a.meta_info.get("spec_num_correct_drafts", 0) for a in found.answers)
    assert drafts > len(found.answers), "little was drafted right, so little was shown"


def test_processor_that_counts_its_calls_is_answered_400(drafting: Server) -> None:
    """Whoever asks beside it has an answer."""
    body = {**bodies(1)[0], "custom_logit_processor": EveryOther.to_str()}
    body["sampling_params"] = {**body["sampling_params"], "custom_params": {"calls": 0}}
    answer = requests.post(f"{drafting.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "EveryOther writes into custom_params or __req__" in answer.text
    assert drafting.generate(**bodies(1)[0])["output_ids"]


TEXTS = [prompt.text for prompt in demo_mix(6)]
SEEDED = {"temperature": 0.7, "top_p": 0.9, "sampling_seed": 5}


def field(number: int, tokens: int, *, top: dict[str, Any] | None = None, **params: Any) -> Any:
    """A greedy body with further ``params`` and ``top`` level fields."""
    body = greedy(TEXTS[number], tokens)
    body["sampling_params"] |= params
    return {**body, **(top or {})}


#: Given as by the server without speculation.
EXACT: dict[str, dict[str, Any]] = {
    "max_new_tokens 0": field(0, 0),
    "max_new_tokens 0, logprobs": field(0, 0, top={"return_logprob": True}),
    "max_new_tokens 1": field(0, 1, top={"return_logprob": True, "top_logprobs_num": 2}),
    "logprob_start_len": field(
        0, 5, top={"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5, 6]}
    ),
    "flat top logprobs": field(
        0, 9,
        top={"return_logprob": True, "top_logprobs_num": 2,
             "return_flat_raw_output_top_logprobs": True},
    ),
    "require_reasoning": field(1, 7, top={"require_reasoning": True}),
    "require_reasoning, stop": field(2, 40, stop=["e "], top={"require_reasoning": True}),
    "ignore_eos": field(2, 40, ignore_eos=True),
    "stop": field(2, 40, stop=["e "]),
    "no_stop_trim": field(2, 40, stop=["e "], no_stop_trim=True),
    "stop_regex": field(2, 40, stop_regex="[aeiou]{2}"),
    "stop_token_ids": field(2, 40, stop_token_ids=[11, 13, 262]),
    "skip_special_tokens": field(2, 60, skip_special_tokens=False),
    "logit_bias": field(2, 30, logit_bias={"5": 3.0, "11": -9.0}),
    "regex": field(2, 30, regex="[a-c]{3,9}"),
    "regex, penalty": field(2, 30, regex="[a-c]{3,9}", frequency_penalty=0.9),
    "n": field(1, 6, n=3, **SEEDED),
    "top_k": field(1, 20, **SEEDED, top_k=7),
    "return_prompt_token_ids": field(1, 6, top={"return_prompt_token_ids": True}),
    "custom_params": field(1, 6, custom_params={"a": 1}),
    "stream_interval": field(1, 6, stream_interval=3),
    "labels": field(
        1, 6, top={"extra_key": "k", "custom_labels": {"a": "b"}, "conversation_id": "c"}
    ),
}  # fmt: skip

#: Answered with 400, and what the answer says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "return_hidden_states": (field(0, 5, top={"return_hidden_states": True}), "hidden states"),
    "min_p with seeds": (field(0, 5, temperature=0.9, min_p=0.2), "min_p"),
    "beam_width": (field(0, 5, beam_width=2, n=2), ""),
    "return_sampling_mask": (
        field(0, 5, temperature=0.9, top_k=5, top={"return_sampling_mask": True}),
        "return_sampling_mask",
    ),
    "a whole context": (field(0, 2030), "maximum context length"),
}

#: What an answer says of itself that has no meaning beside another server.
ITS_OWN = {"id", "cached_tokens", "cached_tokens_details", "dp_rank", "response_sent_to_client_ts"}


def told(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers, and of what they say of themselves all but times, drafts and the cache."""
    answers = requests.post(f"{server.url}/generate", json=body, timeout=120)
    answers.raise_for_status()
    found = []
    for answer in answers.json() if isinstance(answers.json(), list) else [answers.json()]:
        meta = {
            name: value
            for name, value in answer["meta_info"].items()
            if name not in ITS_OWN and not name.startswith("spec_") and "time" not in name
            and "latency" not in name and not name.endswith("_ts")
        }  # fmt: skip
        found.append({"text": answer["text"], "ids": answer["output_ids"], **meta})
    return found


@pytest.fixture(scope="module")
def plain_fields(alone: Server) -> dict[str, Any]:
    return {name: told(alone, body) for name, body in EXACT.items()}


def test_other_fields_are_given_as_by_plain_decoding(
    drafting: Server, plain_fields: dict[str, Any]
) -> None:
    for name, body in EXACT.items():
        found, wanted = told(drafting, body), plain_fields[name]
        if "max_new_tokens 0" in name:  # plain decoding adds the best of a token that it leaves out
            for answer in (*found, *wanted):
                answer.pop("output_top_logprobs", None)
        assert _rounded(found) == pytest.approx(_rounded(wanted), abs=1e-4), name


def _rounded(answers: Any) -> dict[str, Any]:
    """Every number and text of nested answers by its place, for one comparison."""
    if isinstance(answers, dict):
        return {f".{k}{at}": v for k, each in answers.items() for at, v in _rounded(each).items()}
    if isinstance(answers, list):
        return {
            f".{n}{at}": v for n, each in enumerate(answers) for at, v in _rounded(each).items()
        }
    return {"": answers}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_cannot_be_given_are_answered_400(drafting: Server, name: str) -> None:
    body, says = REFUSED[name]
    answer = requests.post(f"{drafting.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert says in answer.text
    assert drafting.generate(**field(1, 3))["output_ids"]
