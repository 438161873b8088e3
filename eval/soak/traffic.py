"""Well-formed requests of a soak: every kind of them, and what a reply to one says.

A fixed pool, made from a seed. Requests with a ``key`` are deterministic: a server without
speculation answers them once, and every later answer must be the same. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval.prompts import demo_mix
from eval.soak.malformed import CHAT, COMPLETIONS, CONTEXT_LENGTH

#: How a request ends: with its answer, aborted by its name, or because its client goes away.
End = Literal["answer", "abort", "leave"]

#: Answers in the order of their prompts and choices.
Outputs = tuple["Output", ...]

#: Tokens of the context that a server keeps to itself: SGLang six, and the longest draft.
RESERVED = 6 + 16
#: Tokens by which an aborted answer may run past its own end: one verification accepts several,
#: and SGLang looks for the abort before it looks for the end of the answer among them.
OVERRUN = 16
LOG_PROB_TOLERANCE = 1e-3
"""Nats, float32: the same sums in another order."""


#: The kind of request that the server's time limit is there for.
LONGEST = "longest answer"


@dataclass(frozen=True)
class Job:
    """One request to send."""

    kind: str
    path: str
    body: dict[str, Any]
    key: str = ""  # of its expected outputs; empty when it is sampled
    end: End = "answer"
    stream: bool = False


@dataclass(frozen=True)
class Output:
    """One generated sequence. OpenAI endpoints tell no tokens, only text."""

    text: str
    finish: str  # "stop", "length", "abort"; empty while it is not finished
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # nats, one per token
    message: str = ""  # why it was aborted; OpenAI endpoints do not tell


def outputs_of(path: str, reply: Any) -> Outputs:
    """What a whole, non-streamed reply says; ValueError when it is not of the path's form."""
    try:
        if path == "/generate":
            rows = reply if isinstance(reply, list) else [reply]
            return tuple(_generated(row) for row in rows)
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return tuple(Output(_choice_text(choice), choice["finish_reason"]) for choice in choices)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} answered in another form: {str(reply)[:200]}") from error


def _generated(row: Mapping[str, Any]) -> Output:
    meta = row["meta_info"]
    log_probs = tuple(entry[0] for entry in meta.get("output_token_logprobs", ()))
    reason = meta["finish_reason"] or {}
    tokens, message = tuple(row["output_ids"]), reason.get("message") or ""
    return Output(row["text"], reason.get("type", ""), tokens, log_probs, message)


def _choice_text(choice: Mapping[str, Any]) -> str:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text or ""


def streamed_outputs(path: str, chunks: Sequence[Any]) -> Outputs:
    """What a stream of one sequence said so far. /generate repeats all text in each chunk,
    OpenAI endpoints send pieces.
    """
    if not chunks:
        return (Output("", ""),)
    if path == "/generate":
        return outputs_of(path, chunks[-1])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = (choice["delta"].get("content") if "delta" in choice else choice["text"]
              for choice in choices)  # fmt: skip
    finish = next((c["finish_reason"] for c in reversed(choices) if c.get("finish_reason")), "")
    return (Output("".join(piece or "" for piece in pieces), finish),)


def same(got: Outputs, expected: Outputs) -> bool:
    """Whether whole answers are equal, log-probabilities within :data:`LOG_PROB_TOLERANCE`."""
    return len(got) == len(expected) and all(map(_same, got, expected))


def _same(got: Output, expected: Output) -> bool:
    return (
        (got.text, got.finish, got.tokens) == (expected.text, expected.finish, expected.tokens)
        and len(got.log_probs) == len(expected.log_probs)
        and all(
            abs(a - b) <= LOG_PROB_TOLERANCE
            for a, b in zip(got.log_probs, expected.log_probs, strict=True)
        )
    )


def begins(got: Outputs, expected: Outputs) -> bool:
    """Whether answers that were cut short are the beginnings of the expected ones.

    Text is compared only where there are no tokens: the last character of a cut answer may be
    half a character.
    """
    return len(got) <= len(expected) and all(
        _begins(g, e) or _ran_past_the_end(g, e) for g, e in zip(got, expected, strict=False)
    )


def _begins(got: Output, expected: Output) -> bool:
    if got.tokens:
        return got.tokens == expected.tokens[: len(got.tokens)]
    return expected.text.startswith(got.text)


def _ran_past_the_end(got: Output, expected: Output) -> bool:
    extra = len(got.tokens) - len(expected.tokens)
    return (
        got.finish == "abort"
        and extra <= OVERRUN
        and (
            got.tokens[: len(expected.tokens)] == expected.tokens
            if got.tokens
            else got.text.startswith(expected.text)
        )
    )


def difference(got: Outputs, expected: Outputs) -> str:
    """Where answers differ, in words, with what surrounds the place."""
    if len(got) != len(expected):
        return f"{len(got)} outputs instead of {len(expected)}"
    told = []
    for number, (g, e) in enumerate(zip(got, expected, strict=True)):
        mine: Sequence[Any] = g.tokens or g.text
        other: Sequence[Any] = e.tokens or e.text
        pairs = enumerate(zip(mine, other, strict=False))
        at = next((i for i, pair in pairs if pair[0] != pair[1]),
                  min(len(mine), len(other)))  # fmt: skip
        if not _same(g, e):
            told.append(
                f"output {number}: {len(mine)} instead of {len(other)}, {g.finish} instead of "
                f"{e.finish}, from {at} on {mine[at : at + 8]} instead of {other[at : at + 8]}"
            )
    return "; ".join(told)


def make_jobs(seed: int) -> list[Job]:
    """The pool, the same for the same seed."""
    texts = [prompt.text for prompt in demo_mix(24, seed=seed)]
    jobs = [
        *_plain(texts),
        *_long(texts),
        *_options(texts),
        *_grammars(texts),
        *_openai(texts),
        *_sampled(texts),
        *_cut_short(texts),
    ]
    return [_keyed(job, number) for number, job in enumerate(jobs)]


def _keyed(job: Job, number: int) -> Job:
    sampled = job.body.get("sampling_params", job.body).get("temperature", 1) > 0
    key = "" if sampled else f"{number}"
    return Job(job.kind, job.path, job.body, key, job.end, job.stream)


def _body(max_new_tokens: int, *, text: Any = None, ids: Any = None, top: Any = None,
          **params: Any) -> dict[str, Any]:  # fmt: skip
    """A greedy /generate body; ``params`` sample, ``top`` are fields beside the sampling."""
    prompt = {"text": text} if ids is None else {"input_ids": ids}
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **params}
    return {**prompt, "sampling_params": sampling, **(top or {})}


def _generate(kind: str, body: dict[str, Any], **how: Any) -> Job:
    return Job(kind, "/generate", body, **how)


def _plain(texts: Sequence[str]) -> list[Job]:
    lengths = (1, 2, 7, 24, 48, 96)
    jobs = [
        _generate("mixed lengths", _body(lengths[i % 6], text=text)) for i, text in enumerate(texts)
    ]
    jobs += [_generate("streaming", _body(60, text=text), stream=True) for text in texts[:6]]
    jobs += [_generate("several prompts", _body(24, text=texts[i : i + 3])) for i in (0, 3, 6)]
    jobs += [_generate("n of one prompt", _body(24, text=text, n=3)) for text in texts[6:9]]
    jobs += [
        _generate("one-token prompt", _body(40, text="A")),
        _generate("one-token prompt", _body(40, ids=[7])),
    ]
    return jobs


def _long(texts: Sequence[str]) -> list[Job]:
    """Prompts in several chunks, some filling the context to its last token."""
    rng = random.Random(0)
    room = CONTEXT_LENGTH - RESERVED
    ids = [rng.randrange(2, 2000) for _ in range(room)]
    shared = " ".join(texts[:8])
    return [
        _generate("prompt fills the context", _body(6, ids=ids[: room - 6])),
        _generate("answer fills the context", _body(124, ids=ids[: room - 124])),
        *(_generate("long shared prefix", _body(32, text=shared + text)) for text in texts[8:14]),
    ]


def _options(texts: Sequence[str]) -> list[Job]:
    log_probs = {"return_logprob": True, "top_logprobs_num": 2}
    whole = {**log_probs, "logprob_start_len": 0}
    return [
        *(_generate("log-probabilities", _body(24, text=t, top=log_probs)) for t in texts[:4]),
        _generate("log-probabilities", _body(16, text=texts[5], top=whole)),
        _generate("stop", _body(96, text=texts[0], stop=["\n"])),
        _generate("stop", _body(96, text=texts[1], stop=[" a", "the "], no_stop_trim=True)),
        _generate("stop", _body(96, text=texts[2], stop_token_ids=[34, 40, 200])),
        _generate("stop", _body(96, text=texts[3], stop_regex="[0-9]+")),
        _generate("token bias", _body(32, text=texts[4], logit_bias={"40": 4.0})),
        *(
            _generate("opted out", _body(48, text=text, custom_params={"c2t": False}))
            for text in texts[8:12]
        ),
    ]


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _grammars(texts: Sequence[str]) -> list[Job]:
    rules: tuple[tuple[str, str], ...] = (
        ("regex", r"[A-Z][a-z]{2,8} is [0-9]{1,3}\."),
        ("regex", "(yes|no|perhaps)"),
        ("json_schema", json.dumps(_SCHEMA)),
        ("ebnf", 'root ::= greeting " " name\ngreeting ::= "Hi" | "Hello"\nname ::= [A-Z] [a-z]+'),
    )
    return [
        _generate(f"grammar: {rule}", _body(48, text=texts[i + 4 * turn], **{rule: text}))
        for turn in range(2)
        for i, (rule, text) in enumerate(rules)
    ]


def _openai(texts: Sequence[str]) -> list[Job]:
    common: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 32}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    asked = [[{"role": "user", "content": text}] for text in texts]
    return [
        Job("completion", COMPLETIONS, {**common, "prompt": texts[0]}),
        Job("completion", COMPLETIONS, {**common, "prompt": texts[1], "n": 2}),
        Job("completion", COMPLETIONS, {**common, "prompt": [texts[2], texts[3]], "logprobs": 1}),
        Job("completion", COMPLETIONS, {**common, "prompt": texts[4], "stream": True}, stream=True),
        Job("chat", CHAT, {**common, "messages": asked[5]}),
        Job("chat", CHAT, {**common, "messages": asked[6], "stop": ["\n"]}),
        Job("chat", CHAT, {**common, "messages": asked[7], "response_format": schema}),
        Job("chat", CHAT, {**common, "messages": asked[8], "stream": True}, stream=True),
        Job("chat", CHAT, {**common, "messages": [{"role": "user", "content": ""}]}),
    ]


def _sampled(texts: Sequence[str]) -> list[Job]:
    """Seeds do not reproduce in a batch whose requests cut the distribution differently, so
    these are only checked for their form.
    """
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.05},
        {"sampling_seed": 7},
        {"n": 2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"custom_params": {"c2t": False}},
    )
    jobs = [
        _generate("sampled", _body(40, text=texts[i], **{"temperature": 0.9, **cut}))
        for i, cut in enumerate(cuts)
    ]
    chat = {"model": "m", "temperature": 1.0, "max_tokens": 24, "seed": 3}
    return [
        *jobs,
        Job("sampled", CHAT, {**chat, "messages": [{"role": "user", "content": texts[9]}]}),
    ]


def _cut_short(texts: Sequence[str]) -> list[Job]:
    """Long answers that somebody ends: their client, another client, or the server's clock."""
    endings: tuple[tuple[str, End, bool], ...] = (
        ("aborted by name", "abort", False),
        ("aborted by name", "abort", True),
        ("client gone", "leave", False),
        ("client gone from a stream", "leave", True),
    )
    jobs = [
        _generate(kind, _body(240, text=texts[i], ignore_eos=True), end=end, stream=stream)
        for turn in range(2)
        for i, (kind, end, stream) in enumerate(endings, start=12 + 4 * turn)
    ]
    return [*jobs, _generate(LONGEST, _body(900, text=texts[20], ignore_eos=True))]
