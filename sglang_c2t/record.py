"""``python -m sglang_c2t record``: drive a prompt file through a recording server.

The server does the recording (``--c2t-record``); this sends the prompts, shows progress
and has the server write what is pending.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

import aiohttp
from rich.progress import Progress

from sglang_c2t.client import c2t_state, post_all
from sglang_c2t.config import ConfigError
from sglang_c2t.prompts import PromptRow, request


def record_prompts(
    url: str, rows: Sequence[PromptRow], *, max_new_tokens: int, concurrency: int
) -> dict[str, Any]:
    """Send ``rows`` and return the server's recording state, all drafts written.

    Request ids are ``GROUP/NUMBER-RUN``, so that reports can tell groups apart, and replay the
    runs that went into one directory.
    Raises :class:`ConfigError` when the server does not record or stops recording.
    """
    before = _recording_state(url)
    run = uuid.uuid4().hex[:8]
    numbers: Counter[str] = Counter()
    requests = []
    for row in rows:
        rid = f"{row.group}/{numbers[row.group]}-{run}"
        numbers[row.group] += 1
        requests.append(request(row, rid, max_new_tokens))
    with Progress() as progress:
        task = progress.add_task("recording", total=len(requests))
        try:
            post_all(
                url,
                requests,
                concurrency=concurrency,
                on_answer=lambda: progress.advance(task),
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"the server at {url} failed a request: {why}") from error
    state = _recording_state(url)  # a server that is asked writes what is pending
    return {**state, "new_drafts": state["drafts_written"] - before["drafts_written"]}


def _recording_state(url: str) -> dict[str, Any]:
    try:
        state = c2t_state(url)
    except (OSError, HTTPException, LookupError, TypeError, AttributeError, ValueError) as error:
        why = str(error).strip()
        raise ConfigError(f"no SGLang server answers at {url}: {why}") from error
    recording: dict[str, Any] = state.get("recording", {})
    if not recording.get("directory"):
        raise ConfigError(
            f"the server at {url} does not record: start it with --c2t --c2t-record DIR "
            "--c2t-record-roots every"
        )
    if recording["stopped"]:
        raise ConfigError(f"the server at {url} has stopped recording: {recording['stopped']}")
    return recording
