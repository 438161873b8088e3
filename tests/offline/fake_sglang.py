"""Stands in for ``python -m sglang.launch_server``: streams letters, one per token.

Flags that it knows: ``--wrong`` ends it as a wrong flag does, ``--speculative-adaptive`` as one
that does not fit, ``--changes`` answers otherwise, ``--dies`` ends it with the second request.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FLAGS = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    asked = 0

    def do_GET(self) -> None:
        """Health, or server_info."""
        ratios = {"predicted_over_measured": 0.97, "predicted_over_measured_quartiles": [0.9, 1.0]}
        states = [{"c2t": {"planner": ratios}}]
        self._reply({"max_total_num_tokens": 1000, "internal_states": states})

    def do_POST(self) -> None:
        """A cache to flush, or a prompt to answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith("/generate"):
            return self._reply({})
        Handler.asked += 1
        if "--dies" in FLAGS and Handler.asked > 1:
            os._exit(1)
        asked: dict[str, Any] = json.loads(body)
        text = "other" if "--changes" in FLAGS else asked["text"][:5]
        meta = {"completion_tokens": len(text)}
        if "--speculative-algorithm" in FLAGS:
            meta["spec_verify_ct"] = 2
        self.send_response(200)
        self.end_headers()
        for end in range(1, len(text) + 1):
            chunk = {"text": text[:end], "meta_info": {**meta, "completion_tokens": end}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    if "--wrong" in FLAGS:
        sys.exit("sglang serve: error: unrecognized arguments: --wrong")
    if "--speculative-adaptive" in FLAGS and "--speculative-eagle-topk" in FLAGS:
        sys.exit("ValueError: adaptive needs a topk of 1")
    port = int(FLAGS[FLAGS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
