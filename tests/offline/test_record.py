"""Driving a recording server, here a fake one: the happy path, and one line for each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_c2t.classifier.request_names import names_in, recorded_id
from sglang_c2t.cli import main
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.prompts import PromptRow
from sglang_c2t.offline.record import record_prompts
from tests.offline.servers import FakeServer, serving

ROWS = [
    PromptRow("math", text="a"),
    PromptRow("chat", messages=[{"role": "user", "content": "b"}]),
    PromptRow("math", text="c"),
]


class Recording(FakeServer):
    """Records three drafts a request; whoever asks how far it is finds all of them written."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.state = {"directory": "/drafts", "drafts": 0, "drafts_written": 0, "stopped": None,
                      "id_key": "00" * 16}  # fmt: skip
        self.info: Any = {"internal_states": [{"c2t": {"recording": self.state}}]}
        self.failing: tuple[int, str] = 200, "{}"
        self.key: str | None = None
        self.stops_after: int | None = None  # requests
        self.got: list[tuple[str, dict[str, Any]]] = []

    def reply(self, path: str, body: Any, key: str | None) -> tuple[int, str]:
        """As SGLang with --api-key, and a recorder."""
        if key != (None if self.key is None else f"Bearer {self.key}"):
            return 401, "{}"
        if body is None:
            assert path == "/server_info"
            self.state["drafts_written"] = self.state["drafts"]
            return 200, json.dumps(self.info)
        self.got.append((path, body))
        self.state["drafts"] += 3
        if len(self.got) == self.stops_after:
            self.state["stopped"] = "No space left on device"
        return self.failing


@pytest.fixture
def server() -> Iterator[Recording]:
    with serving(Recording) as fake:
        yield fake


def drive(url: str) -> dict[str, Any]:
    return record_prompts(url, ROWS, max_new_tokens=16, concurrency=2)


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as error:
        drive(url)
    assert "\n" not in str(error.value)
    assert url in str(error.value)
    return str(error.value)


def test_record_sends_every_prompt_once(server: Recording) -> None:
    """The run follows the number, so that two runs into one directory stay apart."""
    drive(server.url)
    first_run = list(server.got)
    sent = sorted((body["rid"].split("-")[0], path, body.get("text")) for path, body in first_run)
    assert sent == [
        ("chat/0", "/v1/chat/completions", None),
        ("math/0", "/generate", "a"),
        ("math/1", "/generate", "c"),
    ]
    drive(server.url)
    assert len({body["rid"] for _, body in server.got}) == 2 * len(first_run)


def test_record_counts_drafts_of_all_schedulers(server: Recording, tmp_path: Path) -> None:
    """Each has drafts and a key of its own, and SGLang lists them in any order."""
    other = {"drafts": 5, "drafts_written": 5, "stopped": None, "id_key": "11" * 16}
    server.state["directory"] = str(tmp_path)
    recordings = [server.state, server.state | other]
    server.info = {"internal_states": [{"c2t": {"recording": of}} for of in recordings]}
    state = drive(server.url)
    assert (state["new_drafts"], state["drafts_written"], state["named"]) == (9, 14, True)
    names = names_in(tmp_path)
    for key in ("00" * 16, "11" * 16):
        for _, body in server.got:
            assert names[recorded_id(body["rid"], key)] == body["rid"]
    recordings[1]["stopped"] = "No space left on device"
    assert "has stopped recording: No space left on device" in refusal(server.url)


@pytest.mark.parametrize(("key", "said"), [(None, "wants its key"), ("no", "wants another key")])
def test_record_without_the_api_key_is_refused(
    server: Recording, key: str | None, said: str
) -> None:
    server.key = "secret"
    with pytest.raises(ConfigError, match=f"{said}: set SGLANG_API_KEY") as error:
        record_prompts(server.url, ROWS, max_new_tokens=16, concurrency=2, api_key=key)
    assert "secret" not in str(error.value)
    assert server.got == []


@pytest.mark.parametrize("by", ["flag", "environment", "flag over environment"])
def test_record_sends_the_key_of_flag_or_environment(
    server: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    server.key = "secret"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n{"turns": ["b"]}\n{"text": "c"}\n')
    monkeypatch.setenv("SGLANG_API_KEY", {"flag": "", "environment": "secret"}.get(by, "wrong"))
    flag = [] if by == "environment" else ["--api-key", "secret"]
    assert main(["record", str(prompts), "--url", server.url, *flag]) == 0
    assert len(server.got) == 3


def test_record_key_that_no_header_can_hold_is_refused(
    server: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n')
    assert main(["record", str(prompts), "--url", server.url, "--api-key", "se\ncret"]) == 2
    err = capsys.readouterr().err
    assert "the API key must be ASCII without spaces" in err
    assert "cret" not in err


def test_record_names_requests_of_a_local_recording(server: Recording, tmp_path: Path) -> None:
    """The server records hashes; who sent the prompts knows what they stand for."""
    assert drive(server.url)["named"] is False
    server.state["directory"] = str(tmp_path)
    for runs in (1, 2):
        server.got.clear()
        assert drive(server.url)["named"] is True
        names = names_in(tmp_path)
        rids = {body["rid"] for _, body in server.got}
        assert {recorded_id(rid, "00" * 16): rid for rid in rids}.items() <= names.items()
        assert len(names) == 3 * runs


NOT_RECORDING = "does not record: start it with --c2t --c2t-record DIR"


@pytest.mark.parametrize(
    ("info", "said"),
    [
        *(({"internal_states": [state]}, NOT_RECORDING) for state in (
            {}, {"c2t": {"enabled": True}}, {"c2t": {"recording": {"directory": None}}})),
        (None, "has stopped recording: /drafts holds 9 MB"),
        *((info, "no SGLang server answers at") for info in (
            {}, [], 3, {"internal_states": []}, {"internal_states": [1]})),
    ],
)  # fmt: skip
def test_record_server_that_does_not_record_is_refused(
    server: Recording, info: Any, said: str
) -> None:
    server.state["stopped"] = "/drafts holds 9 MB, the limit is 8 MB"
    server.info = server.info if info is None else info
    assert said in refusal(server.url)
    assert server.got == []


def test_record_server_that_stops_midway_is_refused(server: Recording) -> None:
    server.stops_after = 2
    assert "has stopped recording: No space left on device" in refusal(server.url)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "ftp://127.0.0.1:1"])
def test_record_url_that_is_invalid_is_refused(url: str) -> None:
    assert "no SGLang server answers at" in refusal(url)


@pytest.mark.parametrize(("status", "reply"), [(400, "{}"), (500, "oops"), (200, "no json")])
def test_record_request_that_fails_is_refused(server: Recording, status: int, reply: str) -> None:
    server.failing = status, reply
    assert "failed a request: " in refusal(server.url)
