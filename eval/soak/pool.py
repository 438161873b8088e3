"""Well-formed requests of a soak, and what their replies must equal.

:func:`make_jobs` returns the same pool for the same seed. A server without speculation answers the
deterministic jobs first; every later reply must equal that answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from eval.prompts import demo_mix
from eval.soak.malformed import CONTEXT_LENGTH

#: How a request ends: with its answer, aborted by its id, or because its client disconnects.
End = Literal["answer", "abort", "disconnect"]

#: Context tokens that a server reserves: six for SGLang, and the largest draft.
RESERVED = 6 + 16
#: Tokens by which an aborted answer may pass its end: SGLang checks for aborts before it checks for
#: the end of the answer among the tokens of one verification.
OVERRUN = 16
LOG_PROB_TOLERANCE = 1e-3  # nats, float32


@dataclass(frozen=True)
class Job:
    """One request to /generate; ``key`` names its expected outputs, empty for a sampled one."""

    kind: str
    body: Mapping[str, Any]
    key: str = ""
    end: End = "answer"
    stream: bool = False


@dataclass(frozen=True)
class Output:
    """One generated sequence."""

    text: str = ""
    finish: str = ""  # "stop", "length", "abort"; empty while unfinished
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # nats, one per token


Outputs = tuple[Output, ...]  # in the order of prompts and choices


def outputs_of(reply: Any) -> Outputs:
    """Outputs of a reply, or of the last chunk of a stream; ValueError for an unknown form."""
    try:
        return tuple(_generated(row) for row in (reply if isinstance(reply, list) else [reply]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer in another form: {str(reply)[:200]}") from error


def _generated(row: Mapping[str, Any]) -> Output:
    meta = row["meta_info"]
    log_probs = tuple(entry[0] for entry in meta.get("output_token_logprobs", ()))
    finish = (meta["finish_reason"] or {}).get("type", "")
    return Output(row["text"], finish, tuple(row["output_ids"]), log_probs)


def same(got: Outputs, expected: Outputs) -> bool:
    """Whether outputs are equal, log-probabilities within :data:`LOG_PROB_TOLERANCE`."""
    return len(got) == len(expected) and all(
        (g.text, g.finish, g.tokens) == (e.text, e.finish, e.tokens)
        and len(g.log_probs) == len(e.log_probs)
        and np.allclose(g.log_probs, e.log_probs, rtol=0, atol=LOG_PROB_TOLERANCE)
        for g, e in zip(got, expected, strict=True)
    )


def begins(got: Outputs, expected: Outputs) -> bool:
    """Whether interrupted outputs have the expected tokens as far as they go."""
    return len(got) <= len(expected) and all(map(_agrees, got, expected))


def _agrees(got: Output, expected: Output) -> bool:
    shared = min(len(got.tokens), len(expected.tokens))
    overrun = OVERRUN if got.finish == "abort" else 0
    return (
        got.tokens[:shared] == expected.tokens[:shared]
        and len(got.tokens) <= len(expected.tokens) + overrun
    )


# -- the pool -------------------------------------------------------------------------------

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_LOG_PROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
_NO_C2T = {"custom_params": {"c2t": False}}

#: kind, prompts that take it, tokens, sampling parameters, top-level fields.
_GENERATE: tuple[tuple[str, slice, int, dict[str, Any], dict[str, Any]], ...] = (
    *(("mixed lengths", slice(i, 24, 6), n, {}, {}) for i, n in enumerate((1, 2, 7, 24, 48, 96))),
    ("streaming", slice(0, 6), 60, {}, {}),
    ("n of one prompt", slice(6, 9), 24, {"n": 3}, {}),
    ("log-probabilities", slice(0, 4), 24, {}, _LOG_PROBS),
    ("log-probabilities", slice(5, 6), 16, {}, {**_LOG_PROBS, "logprob_start_len": 0}),
    ("stop", slice(0, 1), 96, {"stop": ["\n"]}, {}),
    ("stop", slice(1, 2), 96, {"stop": [" a", "the "], "no_stop_trim": True}, {}),
    ("stop", slice(2, 3), 96, {"stop_token_ids": [34, 40, 200]}, {}),
    ("stop", slice(3, 4), 96, {"stop_regex": "[0-9]+"}, {}),
    ("token bias", slice(4, 5), 32, {"logit_bias": {"40": 4.0}}, {}),
    ("opted out", slice(8, 12), 48, _NO_C2T, {}),
    ("grammar: regex", slice(0, 24, 12), 48, {"regex": r"[A-Z][a-z]{2,8} is [0-9]{1,3}\."}, {}),
    ("grammar: regex", slice(1, 24, 12), 48, {"regex": "(yes|no|perhaps)"}, {}),
    ("grammar: JSON", slice(2, 24, 12), 48, {"json_schema": json.dumps(_SCHEMA)}, {}),
    ("grammar: EBNF", slice(3, 24, 12), 48,
     {"ebnf": 'root ::= greeting " " name\ngreeting ::= "Hi"\nname ::= [A-Z] [a-z]+'}, {}),
    # Only the form of a sampled answer is checked: seeds do not reproduce in a mixed batch.
    ("sampled", slice(0, 1), 40, {"temperature": 0.9}, {}),
    ("sampled", slice(1, 2), 40, {"temperature": 0.9, "top_p": 0.9}, {}),
    ("sampled", slice(2, 3), 40, {"temperature": 0.9, "top_k": 20, "min_p": 0.05}, {}),
    ("sampled", slice(3, 4), 40, {"temperature": 0.9, "sampling_seed": 7}, {}),
    ("sampled", slice(4, 5), 40, {"temperature": 0.9, "n": 2, "frequency_penalty": 0.5}, {}),
    ("sampled", slice(5, 6), 40, {"temperature": 0.9, **_NO_C2T}, {}),
    ("aborted", slice(12, 16), 240, {"ignore_eos": True}, {}),
    ("client disconnects", slice(16, 20), 240, {"ignore_eos": True}, {}),
    ("longer than the time limit", slice(20, 21), 900, {"ignore_eos": True}, {}),
)  # fmt: skip
_ENDS: dict[str, End] = {"aborted": "abort", "client disconnects": "disconnect"}


def make_jobs(seed: int) -> list[Job]:
    """The pool, the same for the same seed."""
    texts = [prompt.text for prompt in demo_mix(24, seed=seed)]
    jobs = [
        _job(kind, {"text": text, **fields}, tokens, params, number)
        for kind, some, tokens, params, fields in _GENERATE
        for number, text in enumerate(texts[some])
    ]
    ids = random.Random(0).choices(range(2, 2000), k=CONTEXT_LENGTH - RESERVED)
    jobs += [
        *(_job("several prompts", {"text": texts[i : i + 3]}, 24) for i in (0, 3, 6)),
        *(_job("long shared prefix", {"text": " ".join(texts[:8]) + t}, 32) for t in texts[8:14]),
        _job("one-token prompt", {"text": "A"}, 40),
        _job("prompt fills the context", {"input_ids": ids[:-6]}, 6),
        _job("answer fills the context", {"input_ids": ids[:-124]}, 124),
    ]
    return [
        job if job.kind == "sampled" else replace(job, key=str(number))
        for number, job in enumerate(jobs)
    ]


def _job(
    kind: str, fields: dict[str, Any], tokens: int, params: Mapping[str, Any] | None = None,
    number: int = 0,
) -> Job:  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": tokens, **(params or {})}
    end = _ENDS.get(kind, "answer")
    stream = kind == "streaming" or (end != "answer" and number % 2 == 1)
    return Job(kind, {**fields, "sampling_params": sampling}, end=end, stream=stream)
