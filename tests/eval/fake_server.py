"""A server without speculation in a thread: a tiny random model behind SGLang's /generate."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.server import Server

#: Changes an answer: from (prompt, answer so far, log-probabilities [V]) to the next token.
Choose = Callable[[list[int], list[int], Tensor], int]


def likeliest(_prompt: list[int], _answer: list[int], log_probs: Tensor) -> int:
    return int(log_probs.argmax())


@contextlib.contextmanager
def fake_server(model: LlamaForCausalLM, choose: Choose = likeliest) -> Iterator[Server]:
    """Serve ``model`` greedily, as ``choose`` does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            reply = json.dumps(_answer(model, choose, body) if "input_ids" in body else {})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *_: Any) -> None:
            """Silent."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        process = mock.create_autospec(subprocess.Popen, instance=True)
        yield Server(f"http://127.0.0.1:{http.server_address[1]}", process, Path("/dev/null"))
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@torch.inference_mode()
def _answer(model: LlamaForCausalLM, choose: Choose, body: dict[str, Any]) -> dict[str, Any]:
    prompt, params = body["input_ids"], body["sampling_params"]
    most, ids = body.get("top_logprobs_num", 0), body.get("token_ids_logprob", [])
    answer: list[int] = []
    tops, asked = [], []
    for _ in range(params["max_new_tokens"]):
        log_probs = _log_probs(model, [*prompt, *answer])[-1]
        tops.append(_top(log_probs, most))
        asked.append([(float(log_probs[token]), token, None) for token in ids])
        answer.append(choose(prompt, answer, log_probs))
    before = [None, *(_top(row, most) for row in _log_probs(model, prompt)[:-1])]
    meta = {
        "finish_reason": {"type": "length"},
        "output_top_logprobs": tops,
        "output_token_ids_logprobs": asked,
        "input_top_logprobs": before,
    }
    return {"output_ids": answer, "text": " ".join(map(str, answer)), "meta_info": meta}


def _log_probs(model: LlamaForCausalLM, ids: list[int]) -> Tensor:
    """[T, V] natural logarithms."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)


def _top(log_probs: Tensor, most: int) -> list[tuple[float, int, None]]:
    values, tokens = log_probs.topk(min(most, len(log_probs)))
    return [(v, t, None) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]
