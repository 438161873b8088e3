"""The client of ``compare`` and of the benchmark: its figures of a load."""

from __future__ import annotations

import heapq
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

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


def test_each_request_has_a_connection_of_its_own() -> None:
    """A server closes idle connections, and one that was stopped does so when it runs again, while
    the next request may be on its way.
    """
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

    with HTTPServer(("127.0.0.1", 0), Keeps) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [a.text for a in stream_all(url, [{}] * 3, concurrency=1)] == ["a"] * 3
        server.shutdown()
    assert len(set(ports)) == 3
