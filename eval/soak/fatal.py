"""Malformed requests that end a stock server: what becomes of it, and of a ``--c2t`` server.

They cannot be part of a soak. Each is sent to two servers of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests
from rich.table import Table

from eval import terminal
from eval.server import Launch, Server, running
from eval.soak.malformed import FATAL, HANGING, Malformed
from eval.soak.sender import send_malformed
from eval.soak.storm import connect
from sglang_c2t.offline.client import greedy

#: A server that is going down has gone by then.
SECONDS = 15.0


@dataclass(frozen=True)
class Fate:
    """What a server answered, and how it was some seconds later."""

    request: str
    server: str
    status: int  # 0: no answer
    lives: bool
    answers: bool


def fates(launches: Sequence[Launch], log_dir: Path, advance: Callable[[], None]) -> list[Fate]:
    """One server per launch and request."""
    found = []
    for number, case in enumerate((*FATAL, *HANGING)):
        for launch in launches:
            fresh = Launch(f"fatal-{number}-{launch.name}", launch.flags, env=launch.env)
            with running(fresh, log_dir) as server:
                found.append(_fate(launch.name, server, case))
                advance()
    return found


def _fate(name: str, server: Server, case: Malformed) -> Fate:
    status = asyncio.run(_ask(server.url, case))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        time.sleep(0.5)
    lives = server.process.poll() is None
    return Fate(case.name, name, status, lives, lives and _answers(server))


async def _ask(url: str, case: Malformed) -> int:
    async with connect() as session:
        return (await send_malformed(session, url, case, SECONDS)).status


def _answers(server: Server) -> bool:
    try:
        return bool(server.generate(timeout=SECONDS, **greedy("A", 2)))
    except requests.RequestException:
        return False


def table(found: Sequence[Fate]) -> Table:
    """One line per request and server."""
    result = terminal.table(None, "request", "server", "answer", "afterwards")
    for fate in found:
        after = "serves" if fate.answers else "hangs" if fate.lives else "has ended"
        result.add_row(fate.request, fate.server, str(fate.status or "none"), after)
    return result
