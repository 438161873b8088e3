"""Who may change a running server over HTTP, and how much of what is sent is read.

Three things make ``POST /c2t`` worth guarding: whoever may post decides what the server spends on
every request; SGLang's keys are optional, its CORS answers any origin, and with several tokenizer
workers it checks no key at all. So nothing here leans on SGLang's middleware.

=========================  ==================================================================
keys of the server         who may post
=========================  ==================================================================
an admin key               whoever sends it as a bearer token; the API key is not enough
none, or an API key alone  nobody; with ``--c2t-loopback-control`` whoever is on the machine
                           itself (and sends the API key, if there is one)
=========================  ==================================================================

Browsers are turned away everywhere: no page has a reason to post here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 16 * 1024
MOST_SECONDS = 10.0

#: A proxy's: whoever is behind it is not on this machine.
_FORWARDED = ("forwarded", "via", "x-real-ip", "x-forwarded-")


class RefusedError(Exception):
    """A request that goes no further: its status, and the sentence for the client."""

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
    """Who may change the server, as ``GET /c2t`` tells it."""
    if admin_api_key:
        return "admin key"
    return "this machine" if loopback else "nobody"


async def read_body(request: Any) -> bytes:
    """The body, if it is JSON by its header, small, and here soon; else :class:`RefusedError`."""
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
    # Bytes, because texts that are not ASCII cannot be compared; headers are Latin-1.
    right = secrets.compare_digest(token.encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise RefusedError(401, "Unauthorized")


def _is_local(request: Any) -> bool:
    """Whether the peer is this machine, asked for by that name and by nobody in between.

    The name, because a page may have a name of its own lead to 127.0.0.1.
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
