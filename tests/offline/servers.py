"""A server that answers what a test says, and metrics that a real one gave."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

DATA = Path(__file__).parent / "data"

#: ``/metrics`` of a server with 48 demo requests at once, 3 seconds apart: what is read of it.
METRICS = [(DATA / f"metrics-{number}.prom").read_text() for number in range(2)]

SERVING: dict[str, Any] = {
    "packed": True, "unpacked_because": None, "num_steps": 5, "topk": 1, "num_draft_tokens": 6,
    "max_running_requests": 48, "plans": True, "row_ms": None, "beta": 0.0, "classifier": None,
}  # fmt: skip

TOLD: dict[str, Any] = {
    "policy": "auto", "serving": [SERVING], "planner": [], "changed_by": "this machine",
}  # fmt: skip

F = TypeVar("F", bound="FakeServer")


class FakeServer:
    """Answers by path with a status and a body; 404 to all else."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, tuple[int, str]] = {
            "/c2t": (200, json.dumps(TOLD)),
            "/metrics": (200, METRICS[0]),
            "/server_info": (200, json.dumps({"internal_states": [{}]})),
        }

    def reply(self, path: str, body: Any, key: str | None) -> tuple[int, str]:
        """Answer a GET, or a POST with its body, from the sender of ``key``."""
        return self.answers.get(path, (404, ""))


@contextmanager
def serving(kind: type[F] = FakeServer) -> Iterator[F]:  # type: ignore[assignment]
    """A server of that kind, which runs inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self, body: Any = None) -> None:
            status, answer = fake.reply(self.path, body, self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer.encode())))
            self.end_headers()
            self.wfile.write(answer.encode())

        def do_POST(self) -> None:
            self.do_GET(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = kind(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    http.shutdown()
    thread.join()
    http.server_close()
