"""A server hides keys where it shows its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_c2t.config import C2TConfig
from sglang_c2t.srt import seams
from sglang_c2t.srt.hooks import hidden_keys
from sglang_c2t.srt.hooks.hidden_keys import HIDDEN, hide_command, hide_fields


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_keys, "active", C2TConfig)


def test_hidden_keys_of_the_arguments() -> None:
    told: dict[str, Any] = {
        "api_key": "clients", "admin_api_key": "sesame", "ssl_keyfile_password": "x", "port": 1,
    }  # fmt: skip
    assert hide_fields(told, None) == {
        "api_key": HIDDEN, "admin_api_key": HIDDEN, "ssl_keyfile_password": HIDDEN, "port": 1,
    }  # fmt: skip
    assert told["api_key"] == "clients", "SGLang's own copy stays"
    assert hide_fields({"api_key": None}, None) == {"api_key": None}


@pytest.mark.parametrize("name", hidden_keys.KEYS)
def test_hidden_keys_of_the_command_line(name: str) -> None:
    """Shown as it was typed, it would hold each key that is set."""
    told = {"launch_command": "--api-k S3 --port 1", "port": 1}
    assert hide_command(told, SimpleNamespace(**{name: "S3"}), {}) == {
        "launch_command": HIDDEN, "port": 1,
    }  # fmt: skip
    assert hide_command(told, SimpleNamespace(**{name: None}), {}) == told


def test_hidden_keys_without_c2t_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_keys, "active", lambda: None)
    told = {"api_key": "clients", "launch_command": "--api-key clients"}
    assert hide_fields(told, None) == told
    assert hide_command(told, SimpleNamespace(api_key="clients"), {}) == told


def test_hidden_keys_are_arguments_of_this_sglang() -> None:
    """One that was renamed would show again."""
    assert all(hasattr(ServerArgs, name) for name in hidden_keys.KEYS)
    assert seams.can_hide_keys()
