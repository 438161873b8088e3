"""A cell through SGLang's real client, against a made-up server in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from eval.bench.client import Measured, measure, parse_series
from eval.bench.config import RequestConfig
from eval.bench.datasets import Sample
from eval.server import TARGET


class FakeServer:
    """Answers prompt ``"p3 t5"`` with 5 tokens 300, 301, ...; longer answers come later.

    Prompts with other words fail: ``refuse`` with a 400, ``abort`` with SGLang's abort,
    ``break`` in the middle, ``error`` with an error in the stream.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(request, body)
        finally:
            self.under_way -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first, second = body["text"].split()
        if second == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        count = int(second[1:]) if second[0] == "t" else 3
        for done in range(1, count + 1):
            await asyncio.sleep(0.01)
            if done == 2 and second in ("break", "error"):
                if second == "error":
                    await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
                return response
            last = done == count
            reason = {"type": "abort", "message": "gone"} if second == "abort" else {"type": "stop"}
            answer = {
                "text": "x" * done if done > 1 else "",  # half a character has no text yet
                "output_ids": [int(first[1:]) * 100 + i for i in range(done)],
                "meta_info": {
                    "completion_tokens": done,
                    "prompt_tokens": 7,
                    "finish_reason": reason if last else None,
                    "spec_verify_ct": done,
                    "cached_tokens": 6,
                    "id": "left out",
                },
            }
            await response.write(f"data: {json.dumps(answer)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"internal_states": [{}]})


@pytest.fixture
def fake() -> Iterator[tuple[FakeServer, str]]:
    server, ready, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()
    urls: list[str] = []

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", server.generate)
        app.router.add_get("/server_info", server.info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    yield server, urls[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def run(
    url: str,
    folder: Path,
    prompts: list[str],
    concurrency: int = 8,
    on_answer: Any = lambda: None,
) -> Measured:
    samples = [Sample("math", prompt, 7) for prompt in prompts]
    bodies = [
        {"sampling_params": {"temperature": 0.0, "max_new_tokens": 10 + i}, "stream": True}
        for i in range(len(prompts))
    ]
    log = folder / "logs" / "client.log"
    config = RequestConfig()
    return measure(url, str(TARGET), samples, concurrency, bodies, config, log, on_answer)


def test_answers_are_in_the_order_of_prompts_whoever_ends_first(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = fake
    answered: list[None] = []
    lengths = [9, 1, 5, 3, 7, 2]
    prompts = [f"p{i} t{n}" for i, n in enumerate(lengths)]
    result = run(url, tmp_path, prompts, 3, lambda: answered.append(None))

    assert [r.output_ids for r in result.requests] == [
        tuple(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)
    ]
    assert [r.output_len for r in result.requests] == lengths
    assert result.output_tokens == sum(lengths)
    assert [r.meta["spec_verify_ct"] for r in result.requests] == lengths
    assert set(result.requests[0].meta) == {"spec_verify_ct", "finish_reason", "cached_tokens"}
    assert all(r.success and r.prompt_len == 7 for r in result.requests)
    assert all(0 < r.ttft_s <= r.latency_s <= result.duration_s for r in result.requests)
    assert min(r.start_s for r in result.requests) == 0
    assert len(answered) == len(prompts)
    assert server.most_under_way == 3

    assert [b["text"] for b in sorted(server.bodies, key=lambda b: b["text"])] == prompts
    sent = {b["text"]: b["sampling_params"]["max_new_tokens"] for b in server.bodies}
    assert sent == {prompt: 10 + i for i, prompt in enumerate(prompts)}
    assert all(set(b) == {"text", "sampling_params", "stream"} for b in server.bodies)

    # SGLang's own figures are about the same requests, and its prints are in the log.
    assert result.client["completed"] == len(prompts)
    assert result.client["total_output_tokens"] == sum(lengths)
    assert json.loads(json.dumps(result.client)) == result.client
    assert capsys.readouterr().out == ""
    assert "Serving Benchmark Result" in (tmp_path / "logs" / "client.log").read_text()


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("refuse", "answered 400: .*no"),
        ("abort", "aborted: gone"),
        ("break", "broke off"),
        ("error", "out of memory"),
    ],
)
def test_request_that_fails_is_told_and_the_others_are_kept(
    fake: tuple[FakeServer, str], tmp_path: Path, word: str, error: str
) -> None:
    result = run(fake[1], tmp_path, ["p0 t4", f"p1 {word}", "p2 t2"])
    (failed,) = result.failures
    assert failed.index == 1
    assert [r.output_len for r in result.requests if r.success] == [4, 2]
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(failed.error)


def test_only_our_series_are_read_with_their_labels() -> None:
    text = """
# TYPE c2t:draft_stops_total counter
c2t:draft_stops_total{reason="policy",tp_rank="0"} 3.0
c2t:draft_stops_created{reason="policy",tp_rank="0"} 1.7e+09
c2t:proposed_length_bucket{le="1.0"} 2.0
sglang:num_requests_total 9.0
"""
    assert parse_series(text) == {
        "c2t:draft_stops_total{reason='policy',tp_rank='0'}": 3.0,
        "c2t:proposed_length_bucket{le='1.0'}": 2.0,
    }
