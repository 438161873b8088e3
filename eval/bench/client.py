"""One measured cell: SGLang's own benchmark client against a running server.

``sglang.benchmark.serving`` sends the requests, bounds how many are running, and computes its
metrics. It has no option for two things, which are ours: the prompts, and a request function that
keeps each answer's token ids and ``meta_info``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import orjson
import requests
from prometheus_client.parser import text_string_to_metric_families

from eval.bench.config import RequestConfig
from eval.bench.datasets import Sample
from eval.bench.records import Request

NAME = "c2t-bench"
"""Our prompts' name among the client's data sets."""

PREFIX = "c2t:"
"""Series that the plugin adds to ``/metrics``."""

READ_BYTES = 10 * 2**20  # a streamed line holds all token ids so far


@dataclass(frozen=True)
class Measured:
    """The answers of a cell, and the figures of SGLang's client."""

    requests: list[Request]
    duration_s: float
    client: dict[str, Any]

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.output_len for request in self.requests)

    @property
    def failures(self) -> list[Request]:
        """Requests without a whole answer."""
        return [request for request in self.requests if not request.success]


def measure(
    url: str,
    tokenizer: str,
    samples: Sequence[Sample],
    concurrency: int,
    bodies: Sequence[dict[str, Any]],
    config: RequestConfig,
    log: Path,
    on_answer: Callable[[], None] = lambda: None,
) -> Measured:
    """Send every sample once with its body, ``concurrency`` at a time, and keep the answers. The
    client prints to ``log``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of quantisation kernels that this machine lacks
        from sglang.benchmark import datasets, serving

    answers = _Answers(config.timeout_s, on_answer)
    rows = _Rows(samples, bodies, config.max_new_tokens)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
        mock.patch.dict(serving.ASYNC_REQUEST_FUNCS, {"sglang": answers.request}),
        mock.patch.dict(datasets.DATASET_MAPPING, {NAME: rows}),
    ):
        args = _arguments(serving, url, tokenizer, len(samples), config.stream)
        args.max_concurrency = concurrency
        result = serving.run_benchmark(args)
    return answers.measured(samples, result)


def _arguments(
    serving: Any, url: str, tokenizer: str, num_prompts: int, stream: bool
) -> argparse.Namespace:
    """The client's own defaults, and what a cell sets."""
    argv = [
        NAME, "--backend", "sglang", "--base-url", url, "--model", tokenizer,
        "--tokenizer", tokenizer, "--num-prompts", str(num_prompts),
        "--warmup-requests", "0", "--disable-tqdm", "--ready-check-timeout-sec", "0",
        "--output-file", "/dev/null", *(() if stream else ("--disable-stream",)),
    ]  # fmt: skip
    # Its parser is built and used in one function, which then runs the benchmark.
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(serving, "run_benchmark") as parsed,
    ):
        serving.cli_main()
    args: argparse.Namespace = parsed.call_args.args[0]
    args.dataset_name = NAME  # the parser admits its own names only
    return args


class _Rows:
    """Our prompts in the place of one of the client's data sets."""

    def __init__(
        self,
        samples: Sequence[Sample],
        bodies: Sequence[dict[str, Any]],
        max_new_tokens: int,
    ) -> None:
        self._rows = list(zip(samples, bodies, strict=True))
        self._max_new_tokens = max_new_tokens

    def from_args(self, args: argparse.Namespace) -> _Rows:
        """The client makes a data set from its arguments; ours is made already."""
        return self

    def load(self, **_: Any) -> list[Any]:
        """The client's rows; the number of each travels with its body."""
        from sglang.benchmark.datasets import DatasetRow

        return [
            DatasetRow(
                prompt=sample.prompt,
                prompt_len=sample.prompt_len,
                output_len=self._max_new_tokens,
                extra_request_body={**body, _INDEX: index},
            )
            for index, (sample, body) in enumerate(self._rows)
        ]


_INDEX = "index"
"""Key of a row's body that is not sent."""


@dataclass
class _Answers:
    """The request function, and what it keeps by number of the prompt."""

    timeout_s: float
    on_answer: Callable[[], None]
    outputs: dict[int, Any] = field(default_factory=dict)
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    meta: dict[int, dict[str, Any]] = field(default_factory=dict)
    latest: dict[int, float] = field(default_factory=dict)  # when the last new token came

    async def request(self, request_func_input: Any, pbar: Any = None) -> Any:
        """POST one request and fill in SGLang's ``RequestFuncOutput``."""
        from sglang.benchmark.serving import RequestFuncOutput

        given = request_func_input
        body = dict(given.extra_request_body)
        index = body.pop(_INDEX)
        key = "text" if isinstance(given.prompt, str) else "input_ids"
        output = self.outputs[index] = RequestFuncOutput.init_new(given)
        output.output_len = 0
        output.start_time = time.perf_counter()
        try:
            async for answer in self._stream(given.api_url, {key: given.prompt, **body}):
                self._take(index, output, answer)
            output.success, output.error = _verdict(self.meta.get(index, {}))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            output.success, output.error = False, f"{type(error).__name__}: {error}"
        output.latency = time.perf_counter() - output.start_time
        self.on_answer()
        return output

    async def _stream(self, url: str, body: dict[str, Any]) -> Any:
        """The answer so far, each time it grows."""
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=READ_BYTES) as session,
            session.post(url, json=body) as response,
        ):
            if response.status != 200:
                text = (await response.text())[:300]
                raise ValueError(f"the server answered {response.status}: {text}")
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield orjson.loads(data)

    def _take(self, index: int, output: Any, answer: dict[str, Any]) -> None:
        """Note the times of the tokens that are new in ``answer``."""
        if "error" in answer:
            raise ValueError(str(answer["error"])[:300])
        now = time.perf_counter() - output.start_time
        meta = answer["meta_info"]
        new = meta["completion_tokens"] - output.output_len
        self.meta[index], self.ids[index] = meta, tuple(answer["output_ids"])
        output.generated_text = answer.get("text", "")  # none without a tokenizer
        output.prompt_len = meta["prompt_tokens"]
        if new <= 0:
            return
        if output.output_len == 0:
            output.ttft = now
        else:  # tokens of one step arrive together: each gets its share of the wait
            output.itl.extend([(now - self.latest[index]) / new] * new)
        output.output_len += new
        self.latest[index] = now

    def measured(self, samples: Sequence[Sample], result: dict[str, Any]) -> Measured:
        """All answers in the order of their prompts, and the client's own ``result``."""
        outputs = [self.outputs[index] for index in range(len(samples))]
        start = min(output.start_time for output in outputs)
        end = max(output.start_time + output.latency for output in outputs)
        rows = [
            Request(
                index=index,
                family=sample.family,
                prompt_len=output.prompt_len,
                output_len=output.output_len,
                output_ids=self.ids.get(index, ()),
                start_s=output.start_time - start,
                latency_s=output.latency,
                ttft_s=output.ttft,
                success=output.success,
                error=output.error,
                meta=_kept(self.meta.get(index, {})),
            )
            for index, (sample, output) in enumerate(zip(samples, outputs, strict=True))
        ]
        return Measured(rows, end - start, _scalars(result))


def _verdict(meta: dict[str, Any]) -> tuple[bool, str]:
    """Whether a request ended as requests should, and what was wrong."""
    reason = meta.get("finish_reason")
    if not reason:
        return False, "the answer broke off"
    if reason.get("type") == "abort":
        return False, f"aborted: {reason.get('message', '')}"
    return True, ""


def _kept(meta: dict[str, Any]) -> dict[str, Any]:
    kept = {"finish_reason", "cached_tokens"}
    return {k: v for k, v in meta.items() if k.startswith("spec_") or k in kept}


def _scalars(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers and texts; numpy's as Python's, and none that JSON cannot hold."""
    plain = {k: v.item() if hasattr(v, "item") else v for k, v in result.items()}
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in plain.items()
        if v is None or isinstance(v, str | int | float)
    }


# -- the server's books ---------------------------------------------------------------------


def scrape(url: str) -> dict[str, float]:
    """The plugin's series on ``/metrics`` by name and labels; {} where there are none."""
    reply = requests.get(f"{url}/metrics/", timeout=30)
    reply.raise_for_status()
    return parse_series(reply.text)


def parse_series(text: str) -> dict[str, float]:
    """Series of ours in Prometheus' text format, those that only say when they began left out."""
    return {
        f"{sample.name}{{{','.join(f'{k}={v!r}' for k, v in sorted(sample.labels.items()))}}}": (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The growth of each number."""
    return {key: value - before.get(key, 0) for key, value in after.items()}
