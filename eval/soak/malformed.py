"""Requests that no client should send. Knows nothing of how a server answers them.

What is right is not written here: a server without speculation answers each of them first. Where
it refuses (4xx) or fails (5xx) a ``--c2t`` server must refuse; what it takes, ``--c2t`` may take,
and the summary says so. :data:`FATAL` ones end a stock SGLang 0.5.23 server on the CPU
(``--fatal`` shows it, on servers of their own); ``--c2t`` must refuse them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

#: Tokens of a prompt and its answer, of the servers that are soaked.
CONTEXT_LENGTH = 1024
#: No model has so many tokens.
NO_TOKEN = 10**9
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Malformed:
    """One request; ``raw`` goes out as it is."""

    name: str
    path: str = "/generate"
    raw: bytes = b"{}"
    method: str = "POST"
    content_type: str = "application/json"


def _generate(name: str, **body: Any) -> Malformed:
    return Malformed(name, raw=json.dumps(body).encode())


def _sampling(name: str, **params: Any) -> Malformed:
    params = {"temperature": 0, "max_new_tokens": 4, **params}
    return _generate(name, text="A", sampling_params=params)


def _option(name: str, **fields: Any) -> Malformed:
    return _generate(name, text="A", sampling_params={"max_new_tokens": 2}, **fields)


def _post(name: str, path: str, body: Any) -> Malformed:
    return Malformed(name, path, json.dumps(body).encode())


def _completion(name: str, **fields: Any) -> Malformed:
    return _post(f"completion, {name}", COMPLETIONS, {"model": "m", "max_tokens": 2, **fields})


def _chat(name: str, **fields: Any) -> Malformed:
    messages = [{"role": "user", "content": "A"}]
    body = {"model": "m", "max_tokens": 2, "messages": messages, **fields}
    return _post(f"chat, {name}", CHAT, body)


def _without(name: str, path: str, field: str) -> Malformed:
    body = {"model": "m", "max_tokens": 2}
    return _post(f"{name}, no {field}", path, body)


_ODD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}

BODIES = (
    Malformed("JSON cut short", raw=b'{"text": "A"'),
    Malformed("no body", raw=b""),
    Malformed("a list", raw=b"[]"),
    Malformed("a string", raw=b'"A"'),
    Malformed("null", raw=b"null"),
    Malformed("bytes that are not UTF-8", raw=b'{"text": "\xff\xfe"}'),
    Malformed("5,000 brackets deep", raw=b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    Malformed("content type text/plain", raw=b'{"text": "A"}', content_type="text/plain"),
)

PROMPTS = (
    _generate("no prompt"),
    _generate("text is a number", text=7),
    _generate("text is a list of numbers", text=[7]),
    _generate("text is an empty list", text=[]),
    _generate("text is null", text=None),
    _generate("text and input_ids", text="A", input_ids=[2], sampling_params={"max_new_tokens": 2}),
    _generate("input_ids is empty", input_ids=[]),
    _generate("input_ids is a string", input_ids="abc"),
    _generate("input_ids holds a fraction", input_ids=[1.5]),
    _generate("input_ids holds a string", input_ids=["a"]),
    _generate("input_ids holds a boolean", input_ids=[True]),
    _generate("input_ids holds 2**70", input_ids=[2**70]),
    _generate("one of two input_ids is wrong", input_ids=[[1], ["x"]]),
    _generate("far longer than the context", text="a b c d " * 4 * CONTEXT_LENGTH),
    _generate("as long as the context", input_ids=[5] * CONTEXT_LENGTH),
    _generate("one token short of the context", input_ids=[5] * (CONTEXT_LENGTH - 1)),
    _generate(
        "prompt and answer longer than the context",
        input_ids=[5] * (CONTEXT_LENGTH - 24),
        sampling_params={"max_new_tokens": 100},
    ),
)

SAMPLING = (
    _generate("sampling_params is a string", text="A", sampling_params="hot"),
    _generate("sampling_params is a list for one prompt", text="A", sampling_params=[{}]),
    _sampling("unknown sampling parameter", temprature=0),
    _sampling("max_new_tokens is negative", max_new_tokens=-1),
    _sampling("max_new_tokens is a word", max_new_tokens="many"),
    _sampling("max_new_tokens is a fraction", max_new_tokens=1.5),
    _sampling("max_new_tokens is 10**12", max_new_tokens=10**12),
    _sampling("temperature is NaN", temperature=float("nan")),
    _sampling("temperature is infinite", temperature=float("inf")),
    Malformed("temperature is 1e999", raw=b'{"text":"A","sampling_params":{"temperature":1e999}}'),
    _sampling("temperature is negative", temperature=-1),
    _sampling("temperature is a word", temperature="hot"),
    _sampling("top_p is 0", top_p=0),
    _sampling("top_p is 2", top_p=2),
    _sampling("top_k is 0 at temperature 1", temperature=1, top_k=0),
    _sampling("top_k is -5 at temperature 0", top_k=-5),
    _sampling("top_k is a word", top_k="a"),
    _sampling("min_p is 2", min_p=2),
    _sampling("frequency_penalty is 99", frequency_penalty=99),
    _sampling("repetition_penalty is 0", repetition_penalty=0),
    _sampling("n is 0", n=0),
    _sampling("n is negative", n=-1),
    _sampling("n is a word", n="two"),
    _sampling("stop is a number", stop=7),
    _sampling("stop is a list of numbers", stop=[7]),
    _sampling("5,000 stop strings", stop=[f"x{i}" for i in range(5000)]),
    _sampling("stop_token_ids is a string", stop_token_ids="x"),
    _sampling("stop_token_ids is no token", stop_token_ids=[NO_TOKEN]),
    _sampling("stop_regex does not parse", stop_regex="("),
    _sampling("min_new_tokens above max_new_tokens", min_new_tokens=9),
    _sampling("min_new_tokens is negative", min_new_tokens=-1),
    _sampling("logit_bias names no token", logit_bias={str(NO_TOKEN): 1}),
    _sampling("logit_bias names a word", logit_bias={"x": 1}),
    _sampling("sampling_seed is a string", sampling_seed="x"),
    _sampling("sampling_seed is 2**70", sampling_seed=2**70),
    _sampling("beam_width is 0", beam_width=0),
    _sampling("custom_params is a string", custom_params="x"),
)

GRAMMARS = (
    _sampling("regex does not parse", regex="("),
    _sampling("regex is a number", regex=7),
    _sampling("JSON schema does not parse", json_schema="{"),
    _sampling("JSON schema of no type", json_schema='{"type": "nothing"}'),
    _sampling("JSON schema is an object", json_schema={"type": "object"}),
    _sampling("EBNF without a right-hand side", ebnf="root ::= "),
    _sampling("EBNF without a root", ebnf="a ::= b"),
    _sampling("two grammars", regex="a", ebnf='root ::= "a"'),
    _sampling("structural tag does not parse", structural_tag="{"),
    _sampling("structural tag of no type", structural_tag='{"type": "x"}'),
)

OPTIONS = (
    _option("unknown field", nonsense=1),
    _option("stream is a string", stream="yes"),
    _option("rid is a number", rid=7),
    _option("rid is a list for one prompt", rid=["x"]),
    _generate("fewer sampling_params than prompts", text=["A", "B"], sampling_params=[{}]),
    _generate("fewer return_logprob than prompts", text=["A", "B"], return_logprob=[True]),
    _generate("one rid twice", text=["A", "B"], rid=["x", "x"]),
    _generate("fewer rids than prompts", text=["A", "B"], rid=["x"]),
    _option("logprob_start_len behind the prompt", return_logprob=True, logprob_start_len=10**6),
    _option("logprob_start_len is -9", return_logprob=True, logprob_start_len=-9),
    _option("top_logprobs_num is negative", return_logprob=True, top_logprobs_num=-1),
    _option("top_logprobs_num is a string", return_logprob=True, top_logprobs_num="x"),
    _option("token_ids_logprob is no token", return_logprob=True, token_ids_logprob=[NO_TOKEN]),
    _option("logit processor that is switched off", custom_logit_processor="x"),
    _option("unknown LoRA adapter", lora_path="x"),
    _option("image for a text model", image_data="x"),
    _option("unknown session", session_params={"id": "nobody"}),
    _generate("embeddings that are switched off", input_embeds=[[0.0]]),
    _option("hidden states that are switched off", return_hidden_states=True),
    _option("priority is a word", priority="x"),
    _option("data-parallel rank that does not exist", routed_dp_rank=7),
)

OPENAI = (
    Malformed("completion, JSON cut short", COMPLETIONS, b"{"),
    Malformed("completion, text/plain", COMPLETIONS, b'{"prompt": "A"}', content_type="text/plain"),
    _without("completion", COMPLETIONS, "prompt"),
    _completion("prompt is a number", prompt=7),
    _completion("prompt is an empty list", prompt=[]),
    _completion("prompt is empty", prompt=""),
    _completion("max_tokens is negative", prompt="A", max_tokens=-1),
    _completion("temperature is negative", prompt="A", temperature=-1),
    _completion("n is 0", prompt="A", n=0),
    _completion("best_of is a word", prompt="A", best_of="x"),
    _completion("unknown field", prompt="A", nonsense=1),
    _completion("logprobs is negative", prompt="A", logprobs=-5),
    _completion("JSON schema of no type", prompt="A", response_format=_ODD_SCHEMA),
    _without("chat", CHAT, "messages"),
    _chat("messages is empty", messages=[]),
    _chat("messages is a string", messages="A"),
    _chat("unknown role", messages=[{"role": "nobody", "content": "A"}]),
    _chat("message without content", messages=[{"role": "user"}]),
    _chat("max_tokens is negative", max_tokens=-1),
    _chat("unknown response_format", response_format={"type": "nonsense"}),
    _chat("tools are required and none are given", tool_choice="required"),
    _chat("tools holds a number", tools=[7]),
    _chat("top_logprobs is negative", logprobs=True, top_logprobs=-1),
    _chat("regex does not parse", regex="("),
    _chat("image for a text model", messages=[
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ]),
)  # fmt: skip

ENDPOINTS = (
    Malformed("GET /generate", method="GET", raw=b""),
    Malformed("DELETE a completion", COMPLETIONS, b"", "DELETE"),
    Malformed("unknown endpoint", "/nothing"),
    Malformed("unknown model", "/v1/models/other", b"", "GET"),
    _post("pause in no known way", "/pause_generation", {"mode": "sideways"}),
    _post("abort a number", "/abort_request", {"rid": 7}),
    _post("abort a request that does not exist", "/abort_request", {"rid": "nobody"}),
    Malformed("flush with a negative timeout", "/flush_cache?timeout=-1"),
    Malformed("flush with a word for a timeout", "/flush_cache?timeout=x"),
    _post("encode with a language model", "/encode", {"text": "A"}),
    _post("classify with a language model", "/classify", {"text": "A"}),
    _post("embed with a language model", "/v1/embeddings", {"model": "m", "input": "A"}),
    _post("rank with a language model", "/v1/rerank", {"query": "A", "documents": ["b"]}),
    _post("score without tokens", "/v1/score", {}),
    _post("detokenize a string", "/v1/detokenize", {"tokens": "x"}),
    _post("tokenize nothing", "/v1/tokenize", {}),
    _post("weights that do not exist", "/update_weights_from_disk", {"model_path": "/nowhere"}),
    _post("LoRA that is switched off", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
)

#: All that are sent during a soak.
MALFORMED = (*BODIES, *PROMPTS, *SAMPLING, *GRAMMARS, *OPTIONS, *OPENAI, *ENDPOINTS)

#: What ends a stock server: a prompt of no tokens or of tokens that do not exist fails in the
#: model's forward, more top log-probabilities than tokens in the sampler, a top_k that is no int32
#: where its tensor is made, a start before the prompt's where its log-probabilities are cut out.
FATAL = (
    _generate("empty text", text="", sampling_params={"max_new_tokens": 2}),
    _generate("a batch of an empty prompt", input_ids=[[]], sampling_params={"max_new_tokens": 2}),
    _generate("a token that does not exist", input_ids=[NO_TOKEN]),
    _generate("a negative token", input_ids=[-1]),
    _completion("a token that does not exist", prompt=[NO_TOKEN]),
    _option("10**6 top log-probabilities", return_logprob=True, top_logprobs_num=10**6),
    _sampling("top_k is 2**31", temperature=1, top_k=2**31),
    _completion("top_k is 2**31", prompt="A", top_k=2**31),
    _chat("top_k is 2**31", top_k=2**31),
    _option("logprob_start_len is -5", return_logprob=True, logprob_start_len=-5),
    # By SGLang's code, where the scheduler decodes its messages.
    _option("top_logprobs_num is a list", return_logprob=True, top_logprobs_num=[1]),
)

#: What keeps a stock server busy for minutes: it is valid, and copied in one go.
HANGING = (_sampling("n is 10**5", n=10**5),)
