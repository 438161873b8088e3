"""Where a decode step's time goes: SGLang's own speculation beside ``--c2t``, by py-spy.

    python -m eval.waterfall --at-once 1 8 32 -- LAUNCH FLAGS

One server after the other gets one load after the other, while py-spy samples the scheduler's
stacks. The table gives each part's time per 100 of the target's forward, so that arms which verify
as many rows can be compared although a machine's speed changes. For equal rows limit both to one
draft: ``--speculative-num-steps 1``.

py-spy stops the process for each sample: a step takes up to a third longer, evenly.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from rich.table import Table

from eval import terminal
from sglang_c2t.checks import ConfigError
from sglang_c2t.offline.client import stream_all
from sglang_c2t.offline.compare import MIXED, Bodies, Settings, arms, requests, running, wanted
from sglang_c2t.offline.compared import AS_IS, Arm
from sglang_c2t.offline.prompts import read_prompts
from sglang_c2t.offline.servers import interrupted_by_sigterm

TARGET, PREFILL, IDLE = "target's forward", "prefill", "idle"

#: The part of all stacks that no other part matches.
SCHEDULER = "scheduler, rest"

#: Parts of a step, by functions and files: a stack belongs to the first part all of whose patterns
#: it matches. Without drafts, the target's forwards have other callers.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (PREFILL, (r"_forward_prefill_batch|extend_prefill|_draft_extend_for_prefill",)),
    (TARGET, (r"\bverify ", r"ModelRunner\.forward ")),
    ("draft layers", (r"\bdraft_forward ", r"ModelRunner\.forward ")),
    ("draft extend", (r"_draft_extend_for_decode", r"ModelRunner\.forward ")),
    (TARGET, (r"_execute_decode",)),
    (PREFILL, (r"_execute_extend",)),
    ("planning", (r"sglang_c2t/plan/|sglang_c2t/srt/draft/planning",)),
    ("gate", (r"sglang_c2t/(kernels/gate|kernels/survival|draft/|draft_layer)",)),
    ("before and after draft extend", (r"_draft_extend_for_decode",)),
    ("before and after draft layers", (r"DraftWorker\.draft ",)),
    ("packing, acceptance", (r"\bverify ",)),
    (IDLE, (r"\bon_idle ",)),
    (SCHEDULER, (r"event_loop",)),
)

#: Parts of a decode step: not prefill, and not waiting.
OF_A_STEP = tuple(dict.fromkeys(part for part, _ in PARTS if part not in {PREFILL, IDLE}))

#: Samples per second; more would slow the server further.
RATE = 100


def part_of(stack: str) -> str | None:
    """Return the part that a ``stack`` belongs to, in py-spy's raw format: frames from the
    outermost on, separated by ``;``. ``None``: it is not of the scheduler's loop.
    """
    for part, patterns in PARTS:
        if all(re.search(pattern, stack) for pattern in patterns):
            return part
    return None


def parts(lines: Iterable[str]) -> Counter[str]:
    """Return the samples of each part in py-spy's raw ``lines``: a stack and its count each."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if part := part_of(stack):
            found[part] += int(count)
    return found


def table(columns: dict[str, Counter[str]]) -> Table:
    """Return each part's time per 100 of the target's forward, by server and load."""
    shown = terminal.table("Time of a decode step, per 100 of the target's forward", "part")
    shown.columns[0].no_wrap = True
    for name in columns:
        shown.add_column(name, justify="right")
    for part in OF_A_STEP:
        shares = [100 * found[part] / max(found[TARGET], 1) for found in columns.values()]
        shown.add_row(part, *(f"{share:.1f}" for share in shares))
    totals = [sum(found[part] for part in OF_A_STEP) for found in columns.values()]
    both = list(zip(totals, columns.values(), strict=True))
    shown.add_row("step", *(f"{100 * n / max(found[TARGET], 1):.1f}" for n, found in both))
    # The deviation of a binomial share, as a percentage of the target's forward.
    noise = [100 * ((n - found[TARGET]) ** 0.5) / max(found[TARGET], 1) for n, found in both]
    shown.add_row("noise of the step, +-", *(f"{each:.1f}" for each in noise))
    shown.add_row("samples", *map(str, totals))
    return shown


def sampled(pid: int, seconds: int) -> Counter[str]:
    """Sample a process for so many ``seconds``. Raises :class:`ConfigError` if py-spy cannot."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise ConfigError("py-spy is missing: pip install py-spy")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stacks")
        argv = [program, "record", "--pid", str(pid), "--duration", str(seconds), "--rate",
                str(RATE), "--format", "raw", "--output", str(out)]  # fmt: skip
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60)
        if ran.returncode:
            raise ConfigError(f"py-spy ended with {ran.returncode}: {ran.stderr[-300:]}")
        return parts(out.read_text().splitlines())


def scheduler(group: int) -> int:
    """Return the scheduler of the server that has process ``group``; ConfigError if none runs."""
    children = psutil.Process(group).children(recursive=True)
    found = [one.pid for one in children if "scheduler" in " ".join(one.cmdline())]
    if not found:
        raise ConfigError(f"the server with process {group} has no scheduler process")
    return found[0]


@contextmanager
def loaded(url: str, load: int, bodies: Bodies) -> Iterator[None]:
    """Keep ``load`` requests at the server inside the block, after a first load."""
    stopped = threading.Event()
    send = partial(stream_all, url, wanted(load, bodies), concurrency=load)

    def go_on() -> None:
        while not stopped.is_set():
            send()

    sender = threading.Thread(target=go_on, daemon=True)
    send()
    sender.start()
    try:
        yield
    finally:
        stopped.set()
        sender.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.waterfall", description=__doc__)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--seconds", type=int, default=30, help="of each load that are sampled")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("runs/waterfall"), help="for the logs")
    parser.add_argument("flags", nargs="+", metavar="-- LAUNCH FLAGS")
    args = parser.parse_args(argv)
    settings = Settings(read_prompts(MIXED), max_new_tokens=args.max_new_tokens, folder=args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Counter[str]] = {}
    try:
        with interrupted_by_sigterm():
            servers, bodies = arms(args.flags, [AS_IS]), requests(settings, args.flags)
            for arm in servers:
                columns |= _measured(arm, settings, bodies, args.at_once, args.seconds)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    terminal.console().print(table(columns))
    return 0


def _measured(
    arm: Arm, settings: Settings, bodies: Bodies, loads: Sequence[int], seconds: int
) -> dict[str, Counter[str]]:
    """Return the samples of one server, by the heading of a column."""
    arm.needed, found = True, {}  # `running` raises if it does not start
    with running(arm, settings) as at:
        assert at is not None
        pid = scheduler(at.group)
        for load in loads:
            print(f"{arm.name}, {load} at once", file=sys.stderr)
            with loaded(at.url, load, bodies):
                found[f"{arm.name}, {load}"] = sampled(pid, seconds)
    return found


if __name__ == "__main__":
    sys.exit(main())
