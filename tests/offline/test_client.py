"""The client of ``compare`` and of the benchmark: its figures of a load."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.offline.client import full_load_rate, stream_all

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)
SPEEDS = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=6)


@given(LENGTHS, SPEEDS)
def test_rate_at_full_load_is_the_sum_of_what_requests_get_however_long_they_are(
    lengths: list[int], speeds: list[float]
) -> None:
    load = len(speeds)
    lengths = [*lengths, *[7] * load]
    free = [(0.0, worker) for worker in range(load)]
    spans = []
    for tokens in lengths:
        now, worker = heapq.heappop(free)
        ended = now + tokens / speeds[worker]
        spans.append((now, now, ended, tokens))
        heapq.heappush(free, (ended, worker))
    assert full_load_rate(spans, load) == pytest.approx(sum(speeds))
    assert sum(lengths) / max(ended for *_, ended, _ in spans) <= sum(speeds) * (1 + 1e-9)


def test_rate_at_full_load_counts_the_time_to_the_first_token() -> None:
    assert full_load_rate([(0.0, 1.0, 3.0, 8)], 1) == pytest.approx(8 / 3)
    assert full_load_rate([(0.0, 1.0, 3.0, 8), (0.0, 2.0, 5.0, 30)], 2) == pytest.approx(18 / 3)


@pytest.fixture
def streaming() -> Iterator[tuple[str, list[int]]]:
    """A server that keeps connections open, and the ports from which requests came."""
    ports = []

    class Keeps(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            ports.append(self.client_address[1])
            self.rfile.read(int(self.headers["Content-Length"]))
            said = b'data: {"text": "a", "meta_info": {"completion_tokens": 1}}\n\n'
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Keeps) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", ports
        server.shutdown()


def test_each_request_has_a_connection_of_its_own(streaming: tuple[str, list[int]]) -> None:
    """A server closes idle connections, and one that was stopped does so when it runs again, while
    the next request may be on its way.
    """
    url, ports = streaming
    assert [a.text for a in stream_all(url, [{}] * 3, concurrency=1)] == ["a"] * 3
    assert len(set(ports)) == 3


def test_requests_arrive_at_their_times_of_a_clock_that_stood_still(
    streaming: tuple[str, list[int]],
) -> None:
    began = time.perf_counter()

    def clock() -> float:
        """Stands still from 0.1 s to 0.4 s."""
        real = time.perf_counter() - began
        return min(real, 0.1) + max(real - 0.4, 0.0)

    answers = stream_all(
        streaming[0], [{}] * 3, concurrency=3, clock=clock, arrivals=[0.0, 0.05, 0.3]
    )
    first, second, third = (answer.began for answer in answers)
    assert first + 0.05 <= second <= 0.1
    assert first + 0.3 <= third < 0.5
