"""Authorises changes of a running server over HTTP and limits the bodies it reads.

``POST /c2t`` decides what the server spends on every request. SGLang's keys are optional, its CORS
answers any origin, and with several tokenizer workers it checks no key. So this guard does not
depend on SGLang's middleware.

=========================  ==================================================================
keys of the server         clients that may post
=========================  ==================================================================
an admin key               clients that send it as a bearer token; the API key is not enough
none, or an API key alone  none; with ``--c2t-loopback-control`` clients on the machine itself
                           (with the API key, if there is one)
=========================  ==================================================================

It refuses browsers in any case: no page has a reason to post here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 16 * 1024
MOST_SECONDS = 10.0

#: Headers of a proxy, whose client may be on another machine.
_FORWARDED = ("forwarded", "via", "x-real-ip", "x-forwarded-")


class RefusedError(Exception):
    """A refused request: its status, and the sentence for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


def authorise(
    request: Any, *, api_key: str | None, admin_api_key: str | None, loopback: bool
) -> None:
    """Raise :class:`RefusedError` unless this Starlette request may change the server."""
    _refuse_browsers(request)
    if admin_api_key:
        _require_key(request, admin_api_key)
        return
    if not loopback:
        raise RefusedError(
            403,
            "POST /c2t is closed, because this server has no admin key: start it with "
            "--admin-api-key (and --api-key for its clients), or with --c2t-loopback-control to "
            "take changes from the machine itself",
        )
    if not _is_local(request):
        raise RefusedError(
            403, "POST /c2t takes changes from the machine itself only: ask on its loopback"
        )
    if api_key:
        _require_key(request, api_key)


def who_may(*, admin_api_key: str | None, loopback: bool) -> str:
    """Return which clients may change the server, for ``GET /c2t``."""
    if admin_api_key:
        return "admin key"
    return "this machine" if loopback else "nobody"


async def read_body(request: Any) -> bytes:
    """Read the body: JSON by its header, small and in time; otherwise :class:`RefusedError`."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the body must be sent as Content-Type: application/json")
    body = b""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise RefusedError(413, f"the body may have {MOST_BYTES} bytes")
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {MOST_SECONDS:.0f} s") from None
    return body


def _refuse_browsers(request: Any) -> None:
    site = request.headers.get("sec-fetch-site", "none")
    if "origin" in request.headers or site not in ("none", "same-origin"):
        raise RefusedError(403, "POST /c2t takes no requests of web pages")


def _require_key(request: Any, key: str) -> None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # As bytes, because compare_digest rejects strings that are not ASCII; headers are Latin-1.
    right = secrets.compare_digest(token.encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise RefusedError(401, "Unauthorized")


def _is_local(request: Any) -> bool:
    """Whether the peer is this machine, without a proxy, and the Host header names loopback. A web
    page could resolve a host name of its own to 127.0.0.1.
    """
    hosts = request.headers.getlist("host")
    return (
        request.client is not None
        and _is_loopback(request.client.host)
        and len(hosts) == 1
        and _names_loopback(hosts[0])
        and not any(name.startswith(_FORWARDED) for name in request.headers)
    )


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
