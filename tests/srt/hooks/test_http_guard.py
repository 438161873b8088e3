"""Access to POST /c2t under every combination of keys, over real HTTP routes."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_c2t.config import C2TConfig
from sglang_c2t.srt import compat, seams
from sglang_c2t.srt.hooks import control, http_guard
from sglang_c2t.srt.hooks.http_guard import MOST_BYTES
from tests.srt.hooks.test_control import Schedulers

API, ADMIN = "clients", "sesame"
JSON = {"Content-Type": "application/json"}


class Manager(Schedulers):
    """SGLang's manager as far as ``/c2t`` knows it, with one scheduler that takes everything."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        super().__init__(0)
        self.server_args.api_key, self.server_args.admin_api_key = api_key, admin_api_key
        self.sent: list[Any] = []

    async def set_internal_state(self, message: Any) -> list[bool]:
        self.sent.append(message)
        return await super().set_internal_state(message)


def served(
    monkeypatch: pytest.MonkeyPatch, *, api: bool = False, admin: bool = False,
    loopback: bool = False, middleware: bool = True, hidden: bool = True,
) -> tuple[FastAPI, Manager]:  # fmt: skip
    """SGLang's app with our routes."""
    app = FastAPI()
    manager = Manager(API if api else None, ADMIN if admin else None)
    monkeypatch.setitem(
        control.sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=app)
    )
    monkeypatch.setattr(control, "active", lambda: C2TConfig(loopback_control=loopback))
    monkeypatch.setattr(seams, "keys_are_hidden", lambda: hidden)
    monkeypatch.setattr(compat, "resolved", lambda server_args: server_args)
    control.add_routes(None, manager)
    if middleware and (api or admin):
        add_api_key_middleware(app, api_key=API if api else None,
                               admin_api_key=ADMIN if admin else None)  # fmt: skip
    return app, manager


def client(app: FastAPI, peer: str = "127.0.0.1", host: str = "localhost:30000") -> TestClient:
    return TestClient(app, base_url=f"http://{host}", client=(peer, 5000))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def post(http: TestClient, headers: dict[str, str] | None = None, body: Any = None) -> int:
    content = json.dumps(body or {"beta": 0.4})
    return http.post("/c2t", content=content, headers={**JSON, **(headers or {})}).status_code


@pytest.mark.parametrize(
    ("api", "admin", "loopback", "middleware"), list(itertools.product([False, True], repeat=4))
)
def test_http_guard_post_under_every_combination_of_keys(
    monkeypatch: pytest.MonkeyPatch, api: bool, admin: bool, loopback: bool, middleware: bool
) -> None:
    """With several tokenizer workers SGLang has no middleware that would ask for keys."""
    may = {
        (key, peer): (
            key == ADMIN if admin
            else loopback and peer == "127.0.0.1" and (key == API or not api)
        )
        for key in (None, "wrong", API, ADMIN)
        for peer in ("127.0.0.1", "10.0.0.7")
    }  # fmt: skip
    app, manager = served(monkeypatch, api=api, admin=admin, loopback=loopback,
                          middleware=middleware)  # fmt: skip
    for (key, peer), allowed in may.items():
        before = len(manager.sent)
        status = post(client(app, peer), bearer(key))
        assert status == 200 if allowed else status in (401, 403), (key, peer, status)
        assert len(manager.sent) - before == allowed, (key, peer)
    told = client(app, "127.0.0.1").get("/c2t", headers=bearer(API if api else None))
    said = "admin key" if admin else "this machine" if loopback else "nobody"
    assert told.json()["changed_by"] == said
    if not (admin or loopback):
        headers = bearer(API if api else None)
        answer = client(app).post("/c2t", json={"beta": 0.4}, headers=headers).text
        assert "--admin-api-key" in answer
        assert "--c2t-loopback-control" in answer


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:30000"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "x"}],
)  # fmt: skip
def test_http_guard_refuses_browsers(
    monkeypatch: pytest.MonkeyPatch, admin: bool, headers: dict[str, str]
) -> None:
    app, manager = served(monkeypatch, admin=admin, loopback=True)
    assert post(client(app), {**headers, **bearer(ADMIN)}) == 403
    assert manager.sent == []


#: Headers that tell of one.
PROXIES = {
    "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "a", "X-Forwarded-Proto": "http",
    "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1", "Via": "1.1 proxy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "host", "local"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "localhost:30000", True),
        ("127.8.9.1", "127.0.0.1:1", True),
        ("::1", "[::1]:30000", True),
        ("::ffff:127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "0.0.0.0", False),
        ("127.0.0.1", "10.0.0.7", False),
        ("127.0.0.1", "[", False),
        ("127.0.0.1", "", False),
        ("10.0.0.7", "localhost", False),
        ("::ffff:10.0.0.7", "localhost", False),
        ("testclient", "localhost", False),
    ],
)
def test_http_guard_loopback_needs_local_peer_and_host_without_proxy(
    monkeypatch: pytest.MonkeyPatch, peer: str, host: str, local: bool
) -> None:
    unix_socket: Any = SimpleNamespace(getlist=lambda _: ["localhost"])
    assert not http_guard._is_local(SimpleNamespace(client=None, headers=unix_socket))
    app, _ = served(monkeypatch, loopback=True)
    assert post(client(app, peer), {"Host": host}) == (200 if local else 403)
    for header, value in PROXIES.items():
        assert post(client(app, peer), {"Host": host, header: value}) == 403, header


@pytest.mark.parametrize("token", [b"Bearer s\xc3\xa9same", b"Bearer \xff", b"Bearer", b"sesame",
                                   b"Basic sesame", b"Bearer  sesame", b""])  # fmt: skip
def test_http_guard_token_of_any_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    app, _ = served(monkeypatch, admin=True, middleware=False)
    headers: Any = {"Authorization": token, **JSON}
    assert client(app).post("/c2t", content='{"beta": 0.4}', headers=headers).status_code == 401


@pytest.mark.parametrize(("api", "status"), [(False, 403), (True, 200)])
def test_http_guard_admin_key_that_is_shown_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, api: bool, status: int
) -> None:
    app, _ = served(monkeypatch, admin=True, api=api, middleware=False, hidden=False)
    assert post(client(app), bearer(ADMIN)) == status
    assert "shows --admin-api-key on /server_info" in caplog.text


# -- the body ---------------------------------------------------------------------------------


@pytest.fixture
def open_server(monkeypatch: pytest.MonkeyPatch) -> tuple[TestClient, Manager]:
    app, manager = served(monkeypatch, loopback=True)
    return client(app), manager


@pytest.mark.parametrize(
    ("content_type", "status"),
    [*((kind, 415) for kind in (
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
        "application/jsonx", "text/json", "application/json-patch+json",
     )), ("Application/JSON; charset=utf-8", 200)],
)  # fmt: skip
def test_http_guard_needs_json_content_type(
    open_server: Any, content_type: str, status: int
) -> None:
    """Browsers send some of these without a preflight."""
    http, manager = open_server
    assert post(http, {"Content-Type": content_type}) == status
    assert len(manager.sent) == (status == 200)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"null", 400), (b"[]", 400), (b"\xff\xfe", 400),
        ('{"beta": 0.4}'.encode("utf-16"), 400),
        (b"[" * 16_000, 400), (b'{"a":' * 3000, 400), (b"[" * 100_000, 413),
        (b'{"beta": NaN}', 400), (b'{"beta": 0.4, "beta": 0.5}', 400), (b'{"beta": 1e999}', 400),
        (b'{"beta": ' + b"1" * 5000 + b"}", 400), (b'{"policy": "\\u0000"}', 400),
        (b'{"policy": "\\ud800"}', 400), (b'{"policy": "' + b"x" * 5000 + b'"}', 400),
        (b'{"policy": ":x"}', 400), (b'{"policy": "sys:exit"}', 400), (b"x" * MOST_BYTES, 400),
        (b" " * (MOST_BYTES + 1), 413), (b'{"policy_options": {"' + b"k" * 300 + b'": 1}}', 400),
    ],
)  # fmt: skip
def test_http_guard_hostile_body_is_refused(open_server: Any, body: bytes, status: int) -> None:
    http, manager = open_server
    answer = http.post("/c2t", content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    assert answer.text.isascii()
    assert len(answer.text) < 1000
    assert manager.sent == []


def test_http_guard_endless_body_is_cut_off(open_server: Any) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100:
            sent += 1
            yield b" " * 4096

    answer = open_server[0].post("/c2t", content=endless(), headers=JSON)
    assert answer.status_code == 413


def request_of(chunks: list[tuple[float, bytes]]) -> SimpleNamespace:
    """A request whose body comes in pieces, each after so many seconds."""

    async def stream() -> Any:
        for seconds, chunk in chunks:
            await asyncio.sleep(seconds)
            yield chunk

    return SimpleNamespace(headers={"content-type": "application/json"}, stream=stream)


def test_http_guard_slow_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "MOST_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(http_guard.RefusedError, match="did not come within") as refused:
        asyncio.run(http_guard.read_body(request_of([(0.05, b"{")] * 100)))
    assert refused.value.status == 408
    assert time.monotonic() - started < 2


# -- SGLang's own door ------------------------------------------------------------------------


def through_stock(name: str) -> Any:
    async def original(_manager: Any, obj: Any) -> str:
        return "stock"

    obj = SimpleNamespace(server_args={name: 1})
    return asyncio.run(control.refuse_our_names(original, None, obj))


@pytest.mark.parametrize("name", ['c2t {"beta": 0.5}', "c2t ", "c2t", "c2t\t{}"])
def test_http_guard_sglangs_endpoint_refuses_our_names(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from fastapi import HTTPException

    monkeypatch.setattr(control, "active", C2TConfig)
    with pytest.raises(HTTPException) as refused:
        through_stock(name)
    assert refused.value.status_code == 400
    posting = contextvars.copy_context()
    posting.run(control._posting.set, True)
    assert posting.run(through_stock, name) == "stock"


def test_http_guard_sglangs_endpoint_keeps_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "active", C2TConfig)
    assert through_stock("pp_max_micro_batch_size") == "stock"
    monkeypatch.setattr(control, "active", lambda: None)
    assert through_stock("c2t {}") == "stock"
