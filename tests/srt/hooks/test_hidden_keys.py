"""Keys do not show in what a server tells of its arguments."""

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


def test_every_key_among_the_arguments_is_hidden() -> None:
    told: dict[str, Any] = {
        "api_key": "clients", "admin_api_key": "sesame", "ssl_keyfile_password": "x", "port": 1,
    }  # fmt: skip
    assert hide_fields(told, None) == {
        "api_key": HIDDEN, "admin_api_key": HIDDEN, "ssl_keyfile_password": HIDDEN, "port": 1,
    }  # fmt: skip
    assert told["api_key"] == "clients", "SGLang's own copy stays"


def test_a_key_that_is_not_set_says_so() -> None:
    assert hide_fields({"api_key": None}, None) == {"api_key": None}


@pytest.mark.parametrize(
    "command",
    ["--api-key clients --admin-api-key sesame --port 1", "--admin-api-key=sesame --port 1",
     "--admin-api sesame --api-k=clients", "sglang serve"],
)  # fmt: skip
def test_no_key_stands_in_the_command_line(command: str) -> None:
    args = SimpleNamespace(api_key="clients", admin_api_key="sesame", ssl_keyfile_password=None)
    told = hide_command({"launch_command": command, "port": 1}, args, {})["launch_command"]
    assert "sesame" not in told
    assert "clients" not in told
    assert ("--port 1" in told) == ("--port 1" in command)


def test_a_stock_server_tells_what_it_always_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_keys, "active", lambda: None)
    told = {"api_key": "clients", "launch_command": "--api-key clients"}
    assert hide_fields(told, None) == told
    assert hide_command(told, SimpleNamespace(api_key="clients"), {}) == told


def test_the_keys_are_arguments_of_this_sglang() -> None:
    """One that was renamed would show again."""
    assert all(hasattr(ServerArgs, name) for name in hidden_keys.KEYS)
    assert len(seams.TOLD_ARGUMENTS) == len(hidden_keys.HOOKS)
    assert seams.can_hide_keys()
