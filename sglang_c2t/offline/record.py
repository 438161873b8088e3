"""``python -m sglang_c2t record``: drive a prompt file through a recording server.

The server does the recording (``--c2t-record``); this sends the prompts, shows progress
and has the server write what is pending.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import aiohttp
from rich.console import Console

from sglang_c2t.classifier.request_names import name_requests
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.client import c2t_states, key_wanted, post_all
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.prompts import PromptRow, request


def record_prompts(
    url: str,
    rows: Sequence[PromptRow],
    *,
    max_new_tokens: int,
    concurrency: int,
    api_key: str | None = None,
) -> dict[str, Any]:
    """Send ``rows`` and return the server's recording state, all drafts written.

    Request ids are ``GROUP/NUMBER-RUN``, so that reports can tell groups apart, and replay the
    runs that went into one directory. The server records hashes of them; the names are put
    beside, where the directory is on this machine (``named`` in the state that is returned).
    ``api_key`` is the server's ``--api-key``, if it has one.
    Raises :class:`ConfigError` when the server does not record or stops recording.
    """
    before = _recording_state(url, api_key)
    run = uuid.uuid4().hex[:8]
    numbers: Counter[str] = Counter()
    requests = []
    for row in rows:
        rid = f"{row.group}/{numbers[row.group]}-{run}"
        numbers[row.group] += 1
        requests.append(request(row, rid, max_new_tokens))
    with progress_on(Console()) as progress:
        task = progress.add_task("recording", total=len(requests))
        try:
            post_all(
                url,
                requests,
                concurrency=concurrency,
                on_answer=lambda: progress.advance(task),
                api_key=api_key,
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"the server at {url} failed a request: {why}") from error
    state = _recording_state(url, api_key)  # a server that is asked writes what is pending
    named = _name(state, [body["rid"] for _, body in requests])
    new_drafts = state["drafts_written"] - before["drafts_written"]
    return {**state, "new_drafts": new_drafts, "named": named}


def _name(state: dict[str, Any], rids: list[str]) -> bool:
    """Whether the names of the requests could be put into the recording."""
    try:
        for key in state["id_keys"]:
            name_requests(Path(state["directory"]), key, rids)
    except OSError:  # the server's directory, and perhaps another machine's
        return False
    return True


def _recording_state(url: str, api_key: str | None) -> dict[str, Any]:
    """Sum the recording states of all schedulers; each writes the drafts of its own requests."""
    try:
        states = [state.get("recording", {}) for state in c2t_states(url, api_key)]
        recording: dict[str, Any] = {**states[0]}
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(key_wanted(url, api_key)) from error
        raise ConfigError(f"no SGLang server answers at {url}: {error}") from error
    except (OSError, HTTPException, LookupError, TypeError, AttributeError, ValueError) as error:
        why = str(error).strip()
        raise ConfigError(f"no SGLang server answers at {url}: {why}") from error
    if not recording.get("directory"):
        raise ConfigError(
            f"the server at {url} does not record: start it with --c2t --c2t-record DIR "
            "--c2t-record-roots every"
        )
    if stopped := next(filter(None, (state["stopped"] for state in states)), None):
        raise ConfigError(f"the server at {url} has stopped recording: {stopped}")
    for count in ("drafts", "drafts_written"):
        recording[count] = sum(state[count] for state in states)
    del recording["id_key"]
    return recording | {"id_keys": [state["id_key"] for state in states]}
