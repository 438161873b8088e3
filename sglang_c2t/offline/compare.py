"""``python -m sglang_c2t compare -- LAUNCH FLAGS``: what speculation gains with one's own models.

The command starts a user's server without speculation, with SGLang's own speculation, and with
``--c2t``. It sends each the same prompts at the same loads, and times them as a client does;
``compared.py`` says what came out.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from rich.console import Console

from sglang_c2t.checks import ConfigError
from sglang_c2t.offline.client import c2t_states, stream_all
from sglang_c2t.offline.compared import (
    ADAPTIVE,
    AS_IS,
    C2T,
    NONE,
    Arm,
    Run,
    changed,
    facts,
    printed,
)
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.prompts import PromptRow
from sglang_c2t.offline.servers import (
    ServerError,
    free_port,
    interrupted_by_sigterm,
    start,
    stop,
    wait_until_ready,
)
from sglang_c2t.offline.turns import Turns

#: Results in the folder of the logs.
RESULTS = "compare.json"

#: Our own prompts, of several kinds.
MIXED = Path(__file__).with_name("mixed.jsonl")

#: Multiples of it, modulo 1, are spread evenly.
GOLDEN = (5**0.5 - 1) / 2

#: Seconds for which requests arrive, and how many arrive at least.
ARRIVE_SECONDS, ARRIVE_LEAST = 40.0, 24


@dataclass(frozen=True)
class Settings:
    """The load, its repeats, and how to start the servers."""

    prompts: Sequence[PromptRow]
    against: Sequence[str] = (AS_IS, ADAPTIVE)
    at_once: Sequence[int] = (1, 8, 32)
    rates: Sequence[float] = ()
    """Requests per second, in open loops."""
    burstiness: float = 1.0
    """Shape of the gaps between arrivals: 1 is a Poisson process, less is more bursty."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in ms of a request; see :meth:`Run.within`."""
    max_new_tokens: int = 64
    repeats: int = 3
    side_by_side: bool = False
    start_seconds: float = 600.0
    folder: Path = Path("c2t-compare")


def arms(flags: Sequence[str], against: Sequence[str] = (AS_IS, ADAPTIVE)) -> list[Arm]:
    """Return the servers to compare, by the ``flags`` of one with speculation: one without it, one
    for each of ``against``, and one with ``--c2t``. Raises :class:`ConfigError` if the flags start
    no speculation, or ``against`` names something else than a number of drafts, :data:`AS_IS` or
    :data:`ADAPTIVE`.
    """
    if "--speculative-algorithm" not in {flag.partition("=")[0] for flag in flags}:
        raise ConfigError(
            "the flags after -- start no speculation: give those of a server that drafts, such as "
            "--model-path M --speculative-algorithm EAGLE3 --speculative-draft-model-path D"
        )
    # The servers are ours alone, at ports of ours.
    own, _ = parted(flags, "--port", "--host", "--api-key", "--admin-api-key")
    own, of_c2t = parted(own, "--c2t")
    stock, _ = parted(own, "--speculative-adaptive")
    rivals = {AS_IS: stock, ADAPTIVE: [*stock, "--speculative-adaptive"]}
    for name in against:
        if name not in rivals:
            if not name.isdecimal() or int(name) < 1:
                raise ConfigError(
                    f"--against takes {AS_IS}, {ADAPTIVE} and numbers of drafts, got {name!r}"
                )
            rivals[name] = fixed_length(stock, int(name))
    return [
        Arm(NONE, parted(stock, "--speculative-")[0], needed=True),
        *(Arm(_of_drafts(name), rivals[name], needed=name == against[0]) for name in against),
        Arm(C2T, [*stock, *(of_c2t if "--c2t" in of_c2t else ["--c2t"])]),
    ]


def _of_drafts(name: str) -> str:
    return f"{name} draft{'s' * (name != '1')}" if name.isdecimal() else name


def fixed_length(flags: Sequence[str], steps: int) -> list[str]:
    """Return the ``flags`` of a server that drafts so many ``steps``; a chain verifies them all."""
    topk = _value(flags, "--speculative-eagle-topk") or "1"
    given = _value(flags, "--speculative-num-draft-tokens")
    others, _ = parted(
        flags, "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-"
    )
    tokens = given if given and topk != "1" else str(steps + 1)
    lengths = ["--speculative-num-steps", str(steps), "--speculative-num-draft-tokens", tokens]
    return [*others, *lengths, "--speculative-eagle-topk", topk]


def parted(flags: Sequence[str], *prefixes: str) -> tuple[list[str], list[str]]:
    """Return the other ``flags``, and those that begin with a prefix, each with their values."""
    others: list[str] = []
    found: list[str] = []
    part = others
    for flag in flags:
        if flag.startswith("--"):
            part = found if flag.startswith(prefixes) else others
        part.append(flag)
    return others, found


def compare(flags: Sequence[str], settings: Settings, console: Console) -> int:
    """Start the servers, measure, and print what came out. Returns 0; 1 if ``--c2t`` failed, or
    changed more outputs than SGLang's own speculation does; 130 after an interrupt. Raises
    :class:`ConfigError` if the server without speculation, or the first of SGLang's own, does not
    start.
    """
    servers, code = arms(flags, settings.against), 0
    settings.folder.mkdir(parents=True, exist_ok=True)
    loads = _sequence(settings, requests(settings, flags))
    with interrupted_by_sigterm(), progress_on(Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starts and loads", total=len(servers) * (1 + len(loads)))
        step = lambda: progress.advance(task)  # noqa: E731
        try:
            measure = _side_by_side if settings.side_by_side else _in_turn
            measure(servers, loads, settings, step)
        except KeyboardInterrupt:
            code = 130
    (settings.folder / RESULTS).write_text(json.dumps(facts(servers, settings.goodput), indent=1))
    for server in servers:
        if server.failed:
            console.print(f"{server.name}: {server.failed}", markup=False)
    measured = [server for server in servers if server.measured]
    if len(measured) < 2:
        console.print("Too little was measured to compare.")
        return code or 1
    for said in printed(measured, settings.goodput):
        console.print(said, markup=not isinstance(said, str))
    console.print(conditions(settings), markup=False)
    console.print(f"All figures and logs: {settings.folder}", markup=False)
    return code or int(changed(measured) or bool(servers[-1].failed))


# -- servers ------------------------------------------------------------------------------


def _in_turn(
    servers: Sequence[Arm], loads: Sequence[Load], settings: Settings, step: Callable[[], None]
) -> None:
    """Run one server after the other, so that one has all of the machine's memory."""
    for server in servers:
        with running(server, settings) as at:
            step()
            if at is not None:
                for load in loads:
                    if _warmed_up(server, at.url, load):
                        _send(server, at.url, load)
                    step()


def _side_by_side(
    servers: Sequence[Arm], loads: Sequence[Load], settings: Settings, step: Callable[[], None]
) -> None:
    """Start all servers, and send each load to all of them, which take turns; run them one after
    the other if the host's memory does not hold them all.
    """
    with ExitStack() as stack:
        found = {}
        for server in servers:
            found[server.name] = stack.enter_context(running(server, settings))
            step()
            missing = len(servers) - len(found)
            free = psutil.virtual_memory().available / 2**30
            if missing * server.memory_gib > free:
                print(
                    f"{missing} more servers like {server.name} need {server.memory_gib:.1f} GiB "
                    f"of host memory each, and {free:.1f} GiB are free: they run one by one",
                    file=sys.stderr,
                )
                break
        else:
            there = [(server, at) for server in servers if (at := found[server.name]) is not None]
            for load in loads:
                _send_in_turns(there, load)
                for _ in servers:
                    step()
            return
    _in_turn(servers, loads, settings, step)


def _send_in_turns(servers: Sequence[tuple[Arm, Address]], load: Load) -> None:
    """Send a load to all servers, each with a clock that runs in its turns."""
    ready = [(server, at) for server, at in servers if _warmed_up(server, at.url, load)]
    turns = Turns({server.name: at.group for server, at in ready})

    def send(server: Arm, at: Address) -> None:
        try:
            _send(server, at.url, load, turns)
        finally:
            turns.done(server.name)

    threads = ThreadPoolExecutor(max(len(ready), 1))
    try:
        with turns.taken():
            for sent in [threads.submit(send, *each) for each in ready]:
                sent.result()
    finally:
        # After an interrupt they end with the servers.
        threads.shutdown(wait=False)


class Address(NamedTuple):
    """Where a server runs."""

    url: str
    group: int
    """Its process group."""


@contextmanager
def running(server: Arm, settings: Settings) -> Iterator[Address | None]:
    """Start a server, and yield its address; ``None`` if it fails. Raises :class:`ConfigError` if
    one fails that is needed.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = settings.folder / f"{server.name.strip('-').replace(' ', '-')}.log"
    argv = [sys.executable, "-m", "sglang.launch_server", *server.flags]
    began = time.perf_counter()
    process = start([*argv, "--host", "127.0.0.1", "--port", str(port)], os.environ, log)
    try:
        try:
            wait_until_ready(url, process, log, settings.start_seconds)
        except ServerError as error:
            server.failed = f"{_reason(str(error))} (see {log})"
            if server.needed:
                raise ConfigError(f"{server.name}: {server.failed}") from error
            yield None
            return
        server.start_seconds = time.perf_counter() - began
        server.memory_gib = _memory_gib(process.pid)
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as reply:
            server.cache_tokens = json.load(reply).get("max_total_num_tokens", 0)
        yield Address(url, process.pid)
        with suppress(OSError):
            states = c2t_states(url) if server.name == C2T else []
            server.planners = [state["planner"] for state in states if state.get("planner")]
    finally:
        stop(process)


def _reason(message: str) -> str:
    """Return the most useful line of a failed start: the last error in the log's tail."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f"{lines[0]}: {(errors or lines)[-1]}"


def _memory_gib(pid: int) -> float:
    """Return the memory that would be free without a process and its children."""
    main = psutil.Process(pid)
    every = [main, *main.children(recursive=True)]
    return float(sum(process.memory_full_info().uss for process in every) / 2**30)


# -- load ---------------------------------------------------------------------------------

Bodies = Sequence[Mapping[str, Any]]


def requests(settings: Settings, flags: Sequence[str]) -> Bodies:
    """Return greedy /generate bodies; messages get the chat template of the served model."""
    rows = settings.prompts
    texts = [row.text for row in rows]
    if any(row.messages for row in rows):
        from transformers import AutoTokenizer

        path = _value(flags, "--tokenizer-path") or _value(flags, "--model-path", "--model")
        trusted = "--trust-remote-code" in flags
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no tokenizer at {path}: {str(error).splitlines()[0]}") from error
        for at, row in enumerate(rows):
            if row.messages and tokenizer.chat_template:
                texts[at] = tokenizer.apply_chat_template(
                    row.messages, tokenize=False, add_generation_prompt=True
                )
            elif row.messages:
                texts[at] = "\n".join(str(message["content"]) for message in row.messages)
    lengths = answer_lengths(len(texts), settings.max_new_tokens)
    return [
        {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": length}}
        for text, length in zip(texts, lengths, strict=True)
    ]


def answer_lengths(count: int, most: int) -> list[int]:
    """Return so many lengths, from a quarter of ``most`` to ``most``, in no order. Were all equal,
    then without speculation all answers would end together, and the next prompts would be read
    together. Where drafts are accepted answers end one by one, as users' answers do.
    """
    return [most - int(0.75 * most * (n * GOLDEN % 1.0)) for n in range(count)]


def _value(flags: Sequence[str], *names: str) -> str | None:
    """Return the value of a flag; ``None`` if it is not given."""
    for at, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else flags[at + 1] if at + 1 < len(flags) else None
    return None


def wanted(load: int, bodies: Bodies) -> Bodies:
    """Return the requests of so many at once."""
    return _cycled(bodies, max(2 * load, min(4 * load, 24), 8))


def _cycled(bodies: Bodies, count: int) -> Bodies:
    return [bodies[i % len(bodies)] for i in range(count)]


class Load(NamedTuple):
    """Requests that are sent together."""

    bodies: Bodies
    at_once: int
    """Most of them at once."""
    rate: float = 0.0
    """Those that arrive per second, in an open loop."""
    arrivals: Sequence[float] = ()
    """When each is sent, in seconds from the first one."""


def _sequence(settings: Settings, bodies: Bodies) -> list[Load]:
    """Return the loads in the order in which they are sent: each repeat is a load that changes."""
    found = []
    for repeat in range(settings.repeats):
        found += [Load(wanted(load, bodies), load) for load in settings.at_once]
        for rate in settings.rates:
            count = max(math.ceil(rate * ARRIVE_SECONDS), ARRIVE_LEAST)
            moments = arrivals(rate, count, settings.burstiness, seed=repeat)
            found.append(Load(_cycled(bodies, count), count, rate, moments))
    return found


def arrivals(rate: float, count: int, burstiness: float, *, seed: int) -> list[float]:
    """Return the seconds at which ``count`` requests arrive, the first at 0: gaps have a gamma
    distribution of this shape and a mean of 1 / ``rate``, as in vLLM's benchmark.
    """
    draw = random.Random(f"{seed}/{rate}")
    gaps = (draw.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count - 1))
    return [*itertools.accumulate(gaps, initial=0.0)]


def _warmed_up(server: Arm, url: str, load: Load) -> bool:
    """Prepare a server for a load: before the first one it answers a few requests, and each finds
    an empty prefix cache. Returns whether it can; a server that failed gets no more.
    """
    if server.failed:
        return False
    with _failures_of(server, load):
        if not server.measured:
            few = load.bodies[: load.at_once] if not load.rate else load.bodies[:ARRIVE_LEAST]
            stream_all(url, few, concurrency=len(few))
        urllib.request.urlopen(f"{url}/flush_cache?timeout=20", data=b"", timeout=60).close()
    return not server.failed


def _send(server: Arm, url: str, load: Load, turns: Turns | None = None) -> None:
    """Send a load once, prefill included. It does not count if it ends after the ``turns``."""
    clock = partial(turns.clock, server.name) if turns else time.perf_counter
    with _failures_of(server, load):
        answers = stream_all(
            url, load.bodies, concurrency=load.at_once, clock=clock, arrivals=load.arrivals
        )
        if not (turns and turns.over):
            server.add(Run(load.at_once, answers), rate=load.rate)


@contextmanager
def _failures_of(server: Arm, load: Load) -> Iterator[None]:
    """Note the failure of a request inside the block, and end the block."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        at = f"{load.rate:g} per second" if load.rate else f"{load.at_once} at once"
        server.failed = f"failed at {at}: {str(error) or type(error).__name__}"


def conditions(settings: Settings) -> str:
    """Return what was measured, with which versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sglang-c2t", "sglang", "torch"))
    together = "side by side" if settings.side_by_side else "one after the other"
    most = settings.max_new_tokens
    return (
        f"{packages}; {len(settings.prompts)} prompts, greedy, at most {-(-most // 4)} to {most} "
        f"new tokens; tokens/s at full load, prefill included; servers {together}; repeats: "
        f"{settings.repeats}."
    )
