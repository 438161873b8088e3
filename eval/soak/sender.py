"""Send one request and end it as planned. Knows nothing of what the right answer is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from eval.soak.malformed import Malformed
from eval.soak.traffic import Job, outputs_of, streamed_outputs
from eval.soak.verdicts import Reply

#: No answer takes as long on a server that lives; a longer wait is a hang.
PATIENCE_SECONDS = 120.0


async def send(session: aiohttp.ClientSession, url: str, job: Job, rid: str, delay: float) -> Reply:
    """Send ``job``; one that is to be aborted or left is ended ``delay`` seconds later.

    ``rid`` names the request where the endpoint lets us.
    """
    body = {**job.body, "rid": rid, "stream": job.stream}
    started = time.monotonic()
    chunks: list[Any] = []
    abort = (
        asyncio.create_task(_abort_later(session, url, rid, delay)) if job.end == "abort" else None
    )
    try:
        async with asyncio.timeout(delay if job.end == "leave" else PATIENCE_SECONDS):
            return await _post(session, url, job, body, chunks, started)
    except TimeoutError:
        left = job.end == "leave"
        outputs = streamed_outputs(job.path, chunks) if job.stream else ()
        return Reply(0, started, time.monotonic(), outputs, left, "" if left else "no answer")
    except aiohttp.ClientError as error:
        return Reply(0, started, time.monotonic(), problem=repr(error)[:300])
    finally:
        if abort is not None:
            await abort


async def _post(
    session: aiohttp.ClientSession, url: str, job: Job, body: dict[str, Any],
    chunks: list[Any], started: float,
) -> Reply:  # fmt: skip
    """The whole answer; ``chunks`` fills while a stream comes in."""
    async with session.post(f"{url}{job.path}", json=body) as response:
        if response.status != 200:
            text = await response.text()
            return Reply(response.status, started, time.monotonic(), problem=text[:300])
        if not job.stream:
            outputs = outputs_of(job.path, await response.json())
            return Reply(200, started, time.monotonic(), outputs)
        async for chunk in _chunks(response):
            if "error" in chunk:
                status = int(chunk["error"].get("code") or 500)
                outputs = streamed_outputs(job.path, chunks)
                problem = str(chunk["error"].get("message"))[:300]
                return Reply(status, started, time.monotonic(), outputs, problem=problem)
            chunks.append(chunk)
    return Reply(200, started, time.monotonic(), streamed_outputs(job.path, chunks))


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """JSON objects of a stream of server-sent events."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


async def _abort_later(session: aiohttp.ClientSession, url: str, rid: str, delay: float) -> None:
    """A failure shows in the request that was not aborted."""
    await asyncio.sleep(delay)
    with contextlib.suppress(aiohttp.ClientError):
        await session.post(f"{url}/abort_request", json={"rid": rid})


async def send_malformed(
    session: aiohttp.ClientSession, url: str, case: Malformed, patience: float = PATIENCE_SECONDS
) -> Reply:
    """Send it as it is; status 0 where no answer came within ``patience`` seconds."""
    started, status, problem = time.monotonic(), 0, "no answer"
    headers = {"Content-Type": case.content_type}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            asyncio.timeout(patience),
            session.request(case.method, url + case.path, data=case.raw, headers=headers) as reply,
        ):
            status, problem = reply.status, (await reply.text())[:300]
    return Reply(status, started, time.monotonic(), problem=problem)
