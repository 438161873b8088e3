"""``python -m sglang_c2t record``: sends a prompt file to a recording server. The server records
(``--c2t-record``). This command sends the prompts, shows progress and makes the server write what
is pending.
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
    """Send ``rows`` and return the server's recording state, with all drafts written.

    Request ids are ``GROUP/NUMBER-RUN``, so that reports can separate groups and runs in one
    directory. The server records hashes of them. If the directory is on this machine, this writes
    the names there (``named`` in the result). ``api_key`` is the server's ``--api-key``, if it has
    one. Raises :class:`ConfigError` if the server does not record or stops recording.
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
    state = _recording_state(url, api_key)  # a report makes the server write what is pending
    named = _name(state, [body["rid"] for _, body in requests])
    new_drafts = state["drafts_written"] - before["drafts_written"]
    return {**state, "new_drafts": new_drafts, "named": named}


def _name(state: dict[str, Any], rids: list[str]) -> bool:
    """Write the requests' names into the recording; returns whether it worked."""
    try:
        for key in state["id_keys"]:
            name_requests(Path(state["directory"]), key, rids)
    except OSError:  # the server's directory may be on another machine
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
