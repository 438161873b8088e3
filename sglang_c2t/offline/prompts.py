"""Prompt files: JSON lines of text, turns or chat messages, as requests for a server.

One object a line, with one of

    {"prompt": "..."} or {"text": "..."}        sent to /generate unchanged
    {"turns": ["...", ...]}                     the first turn, as one user message
    {"messages": [{"role": ..., "content": ...}]}

and optionally ``"dataset"`` (or ``"family"``), which groups requests in reports. Messages go to
/v1/chat/completions, so that the server applies its chat template.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_c2t.checks import ConfigError, parse_json, shown
from sglang_c2t.files import read_text

#: Most bytes of a prompt file.
LARGEST_FILE = 1 << 30

KEYS = ("prompt", "text", "turns", "messages")


@dataclass(frozen=True)
class PromptRow:
    """A future request, with either ``text`` or ``messages``."""

    group: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[PromptRow]:
    """Read all rows of a JSONL file; :class:`ConfigError` names the first invalid line."""
    path = Path(path)
    try:
        # Not splitlines(): it also splits at U+2028 and similar characters, which JSON may hold.
        lines = read_text(path, LARGEST_FILE).split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prompt file {path}: {error}") from error
    rows = [
        _row(line, where=f"{path}:{number}", default_group=path.stem)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise ConfigError(f"prompt file {path} is empty: one JSON object a line is expected")
    return rows


def _row(line: str, *, where: str, default_group: str) -> PromptRow:
    try:
        row = parse_json(line, source="the line")
    except ConfigError as error:
        raise ConfigError(f"{where} is not JSON: {error}; one JSON object a line") from error
    keys = [key for key in KEYS if key in row] if isinstance(row, dict) else []
    if len(keys) != 1:
        raise ConfigError(f"{where} needs exactly one of the keys {', '.join(KEYS)}")
    value = row[keys[0]]
    group = str(row.get("dataset", row.get("family", ""))).strip() or default_group
    if keys[0] in ("prompt", "text") and isinstance(value, str) and value:
        return PromptRow(group, text=value)
    listed = isinstance(value, list) and bool(value)
    if keys[0] == "turns" and listed and isinstance(value[0], str) and value[0]:
        return PromptRow(group, messages=[{"role": "user", "content": value[0]}])
    if keys[0] == "messages" and listed and all(isinstance(m, dict) for m in value):
        return PromptRow(group, messages=value)
    wanted = {"turns": "a list of texts", "messages": "a list of objects"}.get(keys[0], "a text")
    raise ConfigError(f"{where}: {keys[0]!r} must be {wanted}, not empty, got {shown(value)}")


def request(row: PromptRow, rid: str, max_new_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a greedy request."""
    if row.text is not None:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens}
        return "/generate", {"text": row.text, "sampling_params": params, "rid": rid}
    body = {"messages": row.messages, "temperature": 0, "max_tokens": max_new_tokens}
    return "/v1/chat/completions", {**body, "model": "default", "rid": rid}
