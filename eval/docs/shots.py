"""Pictures of pages as people see them: ``make shots``, after which runs/shots is there to look at.

    python -m eval.docs.shots --out DIR PAGE.html ...

Each page is taken whole, for every one of :data:`VIEWS`, by a Chromium that reaches no network.
Exit code 1 where a page is wider than its view: something in it would be cut.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

SECONDS = 60.0
#: A page that is longer is cut off.
MOST_PIXELS = 12_000
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip


class View(NamedTuple):
    """How a page is looked at."""

    width: int
    scheme: str


VIEWS = {
    "desktop": View(1280, "light"), "phone": View(375, "light"), "dark": View(1280, "dark"),
    "phone-dark": View(375, "dark"),
}  # fmt: skip


class Tab:
    """A page of Chromium, and what is said to it in its protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer; events that come before it are passed over."""
        mine = next(self._ids)
        await self._socket.send_json({"id": mine, "method": method, "params": params})
        while (told := await self._socket.receive_json(timeout=SECONDS)).get("id") != mine:
            pass
        result: dict[str, Any] = told["result"]
        return result

    async def shot(self, page: Path, view: View) -> tuple[bytes, int]:
        """A PNG of all of it, and how wide it wants to be."""
        media = [{"name": "prefers-color-scheme", "value": view.scheme}]
        await self.ask("Emulation.setEmulatedMedia", features=media)
        size = {"width": view.width, "deviceScaleFactor": 1, "mobile": view.width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", height=900, **size)
        await self.ask("Page.navigate", url=page.resolve().as_uri())
        ready = "new Promise(r => { const look = () => document.readyState == 'complete' ? r() : "
        ready += "setTimeout(look, 50); look(); })"
        await self.ask("Runtime.evaluate", expression=ready, awaitPromise=True)
        content = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(int(content["height"]), MOST_PIXELS)
        await self.ask("Emulation.setDeviceMetricsOverride", height=height, **size)
        told = await self.ask("Page.captureScreenshot", format="png")
        return base64.b64decode(told["data"]), int(content["width"])


@asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Tab]:
    """A tab of a browser that is ended behind the block."""
    with tempfile.TemporaryDirectory() as profile:
        browser = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert browser.stderr is not None
            async with asyncio.timeout(SECONDS):
                while not (line := await browser.stderr.readline()).startswith(b"DevTools"):
                    if not line:
                        raise RuntimeError(f"{program} ended before it listened")
            port = line.decode().split(":")[-1].split("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json()
                address = next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            browser.terminate()
            await browser.wait()


async def take(program: str, pages: Sequence[Path], out: Path) -> list[str]:
    """Write the pictures; what is too wide, in words."""
    wide = []
    for name, view in VIEWS.items():
        async with chromium(program) as tab:  # anew: pages may keep what they were last seen in
            for page in pages:
                png, width = await tab.shot(page, view)
                path = out / f"{'-'.join(page.with_suffix('').parts[-2:])}-{name}.png"
                path.write_bytes(png)
                print(path, flush=True)
                if width > view.width:
                    wide.append(f"{page} is {width} pixels wide, of {view.width} ({name})")
    return wide


def main(argv: Sequence[str] | None = None) -> int:
    """Take all of them."""
    parser = argparse.ArgumentParser(prog="python -m eval.docs.shots", description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if missing := [str(page) for page in args.pages if not page.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        parser.error("this needs Chromium: apt-get install chromium, for instance")
    args.out.mkdir(parents=True, exist_ok=True)
    wide = asyncio.run(take(program, args.pages, args.out))
    for line in wide:
        print(line, file=sys.stderr)
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
