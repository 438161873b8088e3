"""A command that takes SGLang's flags and serves the endpoints that a sprint reads, in no time.

    python fake_sglang_server.py --port N [SGLang's flags]

``FAKE_SGLANG`` holds JSON: ``memory``, the most requests it starts with; ``broken``, attention
backends it dies with; ``refused``, policies that POST /c2t does not take; ``hangs_after``, the
number of answered requests after which it answers none; ``wrong``, whether speculation changes
answers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SETTINGS: dict[str, Any] = json.loads(os.environ.get("FAKE_SGLANG", "{}"))
STEPS: list[list[float]] = []
ANSWERED = threading.Semaphore(SETTINGS.get("hangs_after", 1_000_000))


def flag(name: str) -> str:
    """The value of a flag that was given last; empty if none was."""
    places = [i for i, word in enumerate(sys.argv) if word == name]
    return sys.argv[places[-1] + 1] if places else ""


SPECULATES = bool(flag("--speculative-algorithm"))


def answer(text: str, body: dict[str, Any]) -> dict[str, Any]:
    """Tokens that depend on the text alone, the second best 3 nats below."""
    tokens = [
        (len(text) + place) % 97 for place in range(body["sampling_params"]["max_new_tokens"])
    ]
    if SPECULATES and SETTINGS.get("wrong"):
        tokens[1] += 1
    meta: dict[str, Any] = {"completion_tokens": len(tokens)}
    if SPECULATES:
        meta["spec_verify_ct"] = len(tokens) // 2
    if body.get("top_logprobs_num"):
        meta["output_top_logprobs"] = [[(-0.1, t, None), (-3.1, t + 1, None)] for t in tokens]
    return {"output_ids": tokens, "meta_info": meta}


def generate(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers, and a prefill and three decode steps on the clock."""
    replies = [answer(text, body) for text in body["text"]]
    size, tokens = len(replies), sum(len(reply["output_ids"]) for reply in replies)
    STEPS.append([time.perf_counter(), 0, 0, 0])
    for _ in range(3):
        STEPS.append([time.perf_counter(), size, tokens // 3, size])
    return replies


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints."""

    def do_GET(self) -> None:
        state = {"step_clock": STEPS, "c2t": {"planner": {"steps": len(STEPS)}}}
        serving = {"serving": [{"packed": True, "unpacked_because": None}], "planner": {}}
        self._reply(serving if self.path == "/c2t" else {"internal_states": [state]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/c2t":
            refused = body["policy"] in SETTINGS.get("refused", ())
            self._reply(
                {"error": "start the server with it"} if refused else {}, 400 if refused else 200
            )
            return
        ANSWERED.acquire()
        self._reply(generate(body))

    def _reply(self, document: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: Any) -> None:
        """Silent."""


def main() -> int:
    """Serve until killed; 1 where SGLang would die."""
    if int(flag("--max-running-requests")) > SETTINGS.get("memory", 1_000_000):
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        return 1
    if flag("--attention-backend") in SETTINGS.get("broken", ()):
        print("Exception: Capture cuda graph failed: no such kernel")
        print("Possible solutions:\n1. set --mem-fraction-static to a smaller value")
        return 1
    server = ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler)
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
