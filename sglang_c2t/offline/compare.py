"""``python -m sglang_c2t compare -- LAUNCH FLAGS``: what speculation gains with one's own models.

The command starts a user's server without speculation, with SGLang's own speculation, and with
``--c2t``. It sends each the same prompts at the same loads, and times them as a client does.
"""

from __future__ import annotations

import json
import os
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
import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from sglang_c2t.checks import ConfigError
from sglang_c2t.offline.client import Streamed, c2t_states, full_load_rate, stream_all
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

#: Names of the servers.
NONE, AS_IS, ADAPTIVE, C2T = "no speculation", "as-is", "adaptive", "--c2t"

#: Results in the folder of the logs.
RESULTS = "compare.json"

#: Our own prompts, of several kinds.
MIXED = Path(__file__).with_name("mixed.jsonl")

#: Multiples of it, modulo 1, are spread evenly.
GOLDEN = (5**0.5 - 1) / 2

#: Share by which two servers must differ for one to be called faster.
ALIKE = 0.02


@dataclass(frozen=True)
class Settings:
    """The load, its repeats, and how to start the servers."""

    prompts: Sequence[PromptRow]
    against: Sequence[str] = (AS_IS, ADAPTIVE)
    at_once: Sequence[int] = (1, 8, 32)
    max_new_tokens: int = 64
    repeats: int = 3
    side_by_side: bool = False
    start_seconds: float = 600.0
    folder: Path = Path("c2t-compare")


@dataclass(frozen=True)
class Run:
    """One load, sent once."""

    load: int
    answers: list[Streamed]

    @property
    def rate(self) -> float:
        """Tokens per second while so many requests ran at once, prefill included."""
        times = ((a.began, a.began + a.first_seconds, a.began + a.seconds, a.tokens)
                 for a in self.answers)  # fmt: skip
        return full_load_rate(times, self.load)

    @property
    def tokens(self) -> int:
        """Tokens over all requests."""
        return sum(answer.tokens for answer in self.answers)

    def percentiles(self) -> dict[str, list[float]]:
        """Return p50 and p99 in ms of the time to the first token, and of the time per further
        token.
        """
        first = [answer.first_seconds for answer in self.answers]
        each = [answer.token_seconds for answer in self.answers if answer.tokens > 1]
        found = {"ttft_ms": first, "tpot_ms": each or [float("nan")]}
        return {name: (1e3 * np.percentile(s, (50, 99))).tolist() for name, s in found.items()}


@dataclass
class Arm:
    """One server and its runs."""

    name: str
    flags: list[str]
    needed: bool = False  # nothing can be compared without it
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """By the number of requests at once."""
    failed: str = ""
    """Why it did not start, or ended."""
    start_seconds: float = 0.0
    memory_gib: float = 0.0
    """Host memory of its processes alone."""
    cache_tokens: int = 0
    """Tokens that its KV cache holds."""
    planners: list[dict[str, Any]] = field(default_factory=list)
    """The planner's report of each scheduler, after all loads."""

    def tokens_per_verification(self, load: int) -> float | None:
        """Return the accept length, bonus tokens included; ``None`` without speculation."""
        metas = [(a.tokens, a.meta_info) for run in self.runs[load] for a in run.answers]
        verified = [(n, m["spec_verify_ct"]) for n, m in metas if m.get("spec_verify_ct")]
        if not verified:
            return None
        # The first token of an answer comes from the prefill.
        return sum(n - 1 for n, _ in verified) / sum(count for _, count in verified)


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
    bodies = requests(settings, flags)
    with interrupted_by_sigterm(), progress_on(Console(stderr=True), transient=True) as progress:
        total = len(servers) * (1 + len(settings.at_once) * settings.repeats)
        task = progress.add_task("starts and loads", total=total)
        step = lambda: progress.advance(task)  # noqa: E731
        try:
            measure = _side_by_side if settings.side_by_side else _in_turn
            measure(servers, bodies, settings, step)
        except KeyboardInterrupt:
            code = 130
    measured = [server for server in servers if server.runs]
    (settings.folder / RESULTS).write_text(json.dumps(facts(servers), indent=1))
    for server in servers:
        if server.failed:
            console.print(f"{server.name}: {server.failed}", markup=False)
    if len(measured) < 2:
        console.print("Too little was measured to compare.")
        return code or 1
    loads = [load for load in settings.at_once if any(load in one.runs for one in measured)]
    for load in loads:
        console.print(table(measured, load))
    columns = [*([load] for load in loads), *([loads] if len(loads) > 1 else [])]
    console.print(summary(measured, columns))
    for column in columns:
        console.print(verdict(measured, column), markup=False)
    console.print(prices(measured), markup=False)
    for told in predictions(servers[-1].planners):
        console.print(told, markup=False)
    console.print(conditions(settings), markup=False)
    differing = {server.name: differences(server, measured[0]) for server in measured}
    console.print(agreement(differing), markup=False)
    console.print(f"All figures and logs: {settings.folder}", markup=False)
    stock = [count for name, count in differing.items() if name != C2T]
    changed = differing.get(C2T, 0) > max(stock)
    return code or int(changed or bool(servers[-1].failed))


# -- servers ------------------------------------------------------------------------------


def _in_turn(
    servers: Sequence[Arm], bodies: Bodies, settings: Settings, step: Callable[[], None]
) -> None:
    """Run one server after the other, so that one has all of the machine's memory."""
    for server in servers:
        with running(server, settings) as at:
            step()
            if at is not None:
                for load in _sequence(settings):
                    if _warmed_up(server, at.url, load, bodies):
                        _send(server, at.url, load, bodies)
                    step()


def _side_by_side(
    servers: Sequence[Arm], bodies: Bodies, settings: Settings, step: Callable[[], None]
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
            for load in _sequence(settings):
                _send_in_turns(there, load, bodies)
                for _ in servers:
                    step()
            return
    _in_turn(servers, bodies, settings, step)


def _send_in_turns(servers: Sequence[tuple[Arm, Address]], load: int, bodies: Bodies) -> None:
    """Send a load to all servers, each with a clock that runs in its turns."""
    ready = [(server, at) for server, at in servers if _warmed_up(server, at.url, load, bodies)]
    turns = Turns({server.name: at.group for server, at in ready})

    def send(server: Arm, at: Address) -> None:
        try:
            _send(server, at.url, load, bodies, turns)
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


def _sequence(settings: Settings) -> list[int]:
    """Return the loads in the order in which they are sent: each repeat is a load that changes."""
    return [*settings.at_once] * settings.repeats


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


def _warmed_up(server: Arm, url: str, load: int, bodies: Bodies) -> bool:
    """Prepare a server for a load: before the first one it answers a few requests, and each finds
    an empty prefix cache. Returns whether it can; a server that failed gets no more.
    """
    if server.failed:
        return False
    with _failures_of(server, load):
        if not server.runs:
            stream_all(url, wanted(load, bodies)[:load], concurrency=load)
        urllib.request.urlopen(f"{url}/flush_cache?timeout=20", data=b"", timeout=60).close()
    return not server.failed


def _send(server: Arm, url: str, load: int, bodies: Bodies, turns: Turns | None = None) -> None:
    """Send a load once, prefill included. What ends after the ``turns`` has no time."""
    clock = partial(turns.clock, server.name) if turns else time.perf_counter
    with _failures_of(server, load):
        answers = stream_all(url, wanted(load, bodies), concurrency=load, clock=clock)
        if not (turns and turns.over):
            server.runs.setdefault(load, []).append(Run(load, answers))


@contextmanager
def _failures_of(server: Arm, load: int) -> Iterator[None]:
    """Note the failure of a request inside the block, and end the block."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        server.failed = f"failed at {load} at once: {str(error) or type(error).__name__}"


def wanted(load: int, bodies: Bodies) -> Bodies:
    """Return the requests of a load."""
    return [bodies[i % len(bodies)] for i in range(max(2 * load, min(4 * load, 24), 8))]


# -- results ------------------------------------------------------------------------------


def rates(server: Arm, loads: Sequence[int]) -> list[float]:
    """Return the tokens per second of each repeat over all of ``loads``."""
    repeats = zip(*(server.runs.get(load, ()) for load in loads), strict=False)
    return [
        sum(run.tokens for run in runs) / sum(run.tokens / run.rate for run in runs)
        for runs in repeats
    ]


def ratio(server: Arm, base: Arm, loads: Sequence[int]) -> tuple[float, float, float]:
    """Return the median, least and largest ratio of tokens per second to those of ``base``."""
    both = zip(rates(server, loads), rates(base, loads), strict=False)
    found = [mine / theirs for mine, theirs in both] or [float("nan")]
    return float(np.median(found)), min(found), max(found)


def summary(servers: Sequence[Arm], columns: Sequence[Sequence[int]]) -> Table:
    """Return the ratios to the first server at each of ``columns``, which are loads."""
    title = f"Tokens/s over those of {servers[0].name}: median and range; * is the fastest"
    found = Table(title=title, title_justify="left", box=box.SIMPLE)
    found.add_column("at once")
    fastest = [_fastest(servers, loads) for loads in columns]
    for loads in columns:
        found.add_column(_named(loads), justify="right")
    for server in servers:
        cells = []
        for loads, best in zip(columns, fastest, strict=True):
            middle, least, most = ratio(server, servers[0], loads)
            mark = "*" if server is best else ""
            cells.append(
                f"{mark}{middle:.2f} [{least:.2f}, {most:.2f}]" if rates(server, loads) else "-"
            )
        found.add_row(server.name, *cells)
    return found


def _named(loads: Sequence[int]) -> str:
    return str(loads[0]) if len(loads) == 1 else "all"


def _fastest(servers: Sequence[Arm], loads: Sequence[int]) -> Arm:
    there = [server for server in servers if rates(server, loads)]
    return max(there, key=lambda server: ratio(server, servers[0], loads)[0])


def table(servers: Sequence[Arm], load: int) -> Table:
    """Return the figures of one load."""
    found = Table(title=f"{load} at once", title_justify="left", box=box.SIMPLE)
    found.add_column("server")
    for name in ("tokens/s", "TTFT ms, p50 p99", "TPOT ms, p50 p99", "accept length"):
        found.add_column(name, justify="right")
    for server in servers:
        if load not in server.runs:
            continue
        runs = server.runs[load]
        every = Run(load, [answer for run in runs for answer in run.answers]).percentiles()
        accepted = server.tokens_per_verification(load)
        found.add_row(
            server.name,
            f"{np.median([run.rate for run in runs]):.1f}",
            *(f"{every[name][0]:.0f} {every[name][1]:.0f}" for name in ("ttft_ms", "tpot_ms")),
            "-" if accepted is None else f"{accepted:.2f}",
        )
    return found


def verdict(servers: Sequence[Arm], loads: Sequence[int]) -> str:
    """Return what was fastest at these ``loads``, and whether ``--c2t`` was."""
    best = _fastest(servers, loads)
    said = f"Fastest at {_named(loads)}: {best.name}."
    mine = next((one for one in servers if one.name == C2T and rates(one, loads)), None)
    if mine is None:
        return said
    rival = _fastest([server for server in servers if server is not mine], loads)
    middle, least, most = ratio(mine, rival, loads)
    against = f"--c2t has {middle:.2f} [{least:.2f}, {most:.2f}] of the tokens of {rival.name}"
    if least <= 1.0 <= most or abs(middle - 1.0) < ALIKE:
        return f"{said} {against}, which is within the noise."
    return f"{said} {against}, which is {'faster' if middle > 1.0 else 'SLOWER'}."


def conditions(settings: Settings) -> str:
    """Return what was measured, with which versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sglang-c2t", "sglang", "torch"))
    together = "side by side" if settings.side_by_side else "one after the other"
    return (
        f"{packages}; {len(settings.prompts)} prompts, greedy, at most "
        f"{-(-settings.max_new_tokens // 4)} to {settings.max_new_tokens} new tokens; tokens/s at "
        f"full load, prefill included; servers {together}; repeats: {settings.repeats}."
    )


def prices(servers: Sequence[Arm]) -> str:
    """Return what each server took to start, and its memory."""
    each = (
        f"{server.name} {server.start_seconds:.0f} s, {server.memory_gib:.1f} GiB of host memory, "
        f"room for {server.cache_tokens} tokens"
        for server in servers
    )
    return f"Start: {'; '.join(each)}."


def predictions(planners: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each scheduler how long its planner expected steps to take."""
    return [
        f"{C2T} expected {middle:.2f} [{low:.2f}, {high:.2f}] of the time of a step (median and "
        "quartiles of the last 512)."
        for planner in planners
        if (middle := planner["predicted_over_measured"]) is not None
        for low, high in [planner["predicted_over_measured_quartiles"]]
    ]


def differences(server: Arm, base: Arm) -> int:
    """Count the answers that differ from the first ones of ``base`` to the same prompts."""
    return sum(
        mine.text != theirs.text
        for load, runs in server.runs.items()
        if load in base.runs
        for run in runs
        for mine, theirs in zip(run.answers, base.runs[load][0].answers, strict=True)
    )


def agreement(differing: Mapping[str, int]) -> str:
    """Return whether outputs agree. In bfloat16 the batch decides ties, without speculation too."""
    if not any(differing.values()):
        return "All outputs are equal."
    each = ", ".join(f"{name} {count}" for name, count in differing.items())
    return (
        f"Answers that differ from the first ones without speculation: {each}. Rounding depends on "
        "the batch, so that a server may differ from itself; float32 shows whether that is all."
    )


def facts(servers: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return all figures, for JSON."""
    return [
        {
            "server": server.name,
            "flags": server.flags,
            "failed": server.failed,
            "start_seconds": server.start_seconds,
            "memory_gib": server.memory_gib,
            "cache_tokens": server.cache_tokens,
            "planners": server.planners,
            "loads": {
                load: {
                    "tokens_per_second": [run.rate for run in runs],
                    "accept_length": server.tokens_per_verification(load),
                    "repeats": [run.percentiles() for run in runs],
                }
                for load, runs in server.runs.items()
            },
        }
        for server in servers
    ]
