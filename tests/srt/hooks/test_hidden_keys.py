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


@pytest.mark.parametrize(
    "command",
    [
        "--api-key K --admin-api-key K-S3 --enable-KV --ssl-keyfile F --port 1",
        "--admin-api-key K-S3 --api-key=K --enable-KV --ssl-keyfile F --port 1",
        "--admin_api_key=K-S3 --api-k K --enable-KV --ssl-keyfile F --port 1",
        "--api-key old-S3 --api-key K --admin K-S3 --enable-KV --ssl-keyfile F --port 1",
    ],
)
def test_hidden_keys_of_the_command_line(command: str) -> None:
    """And a short key hides no letters of other arguments, which would tell it."""
    args = SimpleNamespace(
        api_key="K", admin_api_key="K-S3", ssl_keyfile="F", ssl_keyfile_password=None
    )
    told = hide_command({"launch_command": command}, args, {})["launch_command"]
    assert "S3" not in told
    assert told.endswith(f"{HIDDEN} --enable-KV --ssl-keyfile F --port 1")


@pytest.mark.parametrize("equals", [" ", "="])
def test_hidden_keys_of_several_words(equals: str) -> None:
    args = SimpleNamespace(api_key="a b", admin_api_key="one --two three", ssl_keyfile_password="")
    command = f"--admin-api-key{equals}one --two three --api-key{equals}a b --port 1"
    told = hide_command({"launch_command": command}, args, {})["launch_command"]
    assert told == f"--admin-api-key{equals}{HIDDEN} --api-key{equals}{HIDDEN} --port 1"


def test_hidden_keys_of_an_engine_call() -> None:
    command = "Engine(api_key='clients', model_path='m')"
    assert hide_command({"launch_command": command}, None, {}) == {"launch_command": HIDDEN}


def test_hidden_keys_without_c2t_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_keys, "active", lambda: None)
    told = {"api_key": "clients", "launch_command": "--api-key clients"}
    assert hide_fields(told, None) == told
    assert hide_command(told, SimpleNamespace(api_key="clients"), {}) == told


def test_hidden_keys_are_arguments_of_this_sglang() -> None:
    """One that was renamed would show again."""
    assert all(hasattr(ServerArgs, name) for name in hidden_keys.KEYS)
    assert seams.can_hide_keys()
