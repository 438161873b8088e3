"""``python -m sglang_c2t top``: watch a running server. Reads the counters of ``/metrics`` once an
interval, and the settings of ``GET /c2t`` now and then. Fills a terminal; writes one line per
interval into a pipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_c2t.offline.observe import NoAnswerError, Sample, Server, Window

#: Intervals between two reads of the settings, which cost the server more than its counters do.
SETTINGS_EVERY = 5

#: Intervals whose tokens per second are drawn.
DRAWN = 30
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class View:
    """The numbers of one interval; ``None`` if there was nothing to divide by."""

    replicas: int
    running: float  # requests, like the next one
    queued: float
    kv_used: float
    tokens: float  # per second, like the next four
    steps: float
    verified: float  # rows
    accepted: float  # drafts
    padding: float  # rows
    accept_length: float | None
    drafts: float | None  # per verification
    rows: float | None  # per step, padding included
    layers: float | None  # per planned step, like the next two
    predicted_ms: float | None
    measured_ms: float | None
    plans: Mapping[str, float]  # shares of the planned steps
    stops: Mapping[str, float]  # shares of the drafts
    restarted: bool = False


def view_of(window: Window) -> View:
    """Compute the rates and means of an interval."""
    verifications, steps = window["c2t:verifications_total"], window["c2t:steps_total"]
    plans, stops = window.by_label("c2t:plans_total"), window.by_label("c2t:draft_stops_total")
    planned, rows = sum(plans.values()), window["c2t:verify_rows_total"]
    padding = window["c2t:verify_padding_rows_total"]
    decoded = verifications + window["c2t:correct_drafts_total"]
    return View(
        replicas=window.after.replicas,
        running=window.after["sglang:num_running_reqs"],
        queued=window.after["sglang:num_queue_reqs"],
        kv_used=window.after.fullest,
        tokens=decoded / window.seconds,
        steps=steps / window.seconds,
        verified=rows / window.seconds,
        accepted=window.rate("c2t:correct_drafts_total"),
        padding=padding / window.seconds,
        accept_length=_over(decoded, verifications),
        drafts=_over(window["c2t:proposed_drafts_total"], verifications),
        rows=_over(rows + padding, steps),
        layers=_over(window["c2t:planned_layers_total"], planned),
        predicted_ms=_over(1e3 * window["c2t:predicted_step_seconds_total"], planned),
        measured_ms=_over(1e3 * window["c2t:measured_step_seconds_total"], planned),
        plans={why: count / planned for why, count in plans.items()},
        stops={why: count / sum(stops.values()) for why, count in stops.items()},
        restarted=window.restarted,
    )


def _over(count: float, by: float) -> float | None:
    return count / by if by else None


def line_of(view: View, told: Mapping[str, Any], clock: str) -> str:
    """Format an interval as one line of name=value."""
    values = {
        "policy": told["policy"],
        "replicas": f"{view.replicas}",
        "tokens/s": f"{view.tokens:.0f}",
        "running": f"{view.running:.0f}",
        "queued": f"{view.queued:.0f}",
        "accept_length": _number(view.accept_length, 2),
        "drafts": _number(view.drafts, 2),
        "verified_rows/s": f"{view.verified:.0f}",
        "accepted/s": f"{view.accepted:.0f}",
        "padding_rows/s": f"{view.padding:.0f}",
        "rows": _number(view.rows, 1),
        "layers": _number(view.layers, 2),
        "predicted_ms": _number(view.predicted_ms, 1),
        "measured_ms": _number(view.measured_ms, 1),
    }
    line = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{clock} {line}" + (" restarted" if view.restarted else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass
class Screen:
    """The numbers that a terminal shows."""

    url: str
    told: Mapping[str, Any]  # GET /c2t
    view: View | None = None
    clock: str = ""
    status: str = ""  # what is wrong with the numbers
    history: deque[float] = field(default_factory=lambda: deque(maxlen=DRAWN))

    def show(self, view: View, clock: str) -> None:
        """Show the numbers of a new interval."""
        self.view, self.clock = view, clock
        self.history.append(view.tokens)
        self.status = "the server has restarted" if view.restarted else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render into 80 columns and 24 lines."""
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        replicas = self.view.replicas if self.view else 0
        several = f", {replicas} replicas" if replicas > 1 else ""
        policy = f"policy {self.told['policy']}{several}"
        head.add_row(Text(f"sglang-c2t  {self.url}", style="bold"), Text(f"{policy}  {self.clock}"))
        yield head
        yield Text(self.status or "ctrl-C ends it", style="bold" if self.status else "")
        if self.view is None:
            yield Text("waiting for a first interval ...")
            return
        yield self._load(self.view, drawn="" if options.ascii_only else _drawn(self.history))
        yield self._plan(self.view)

    def _load(self, view: View, drawn: str) -> RenderableType:
        most = sum(one["max_running_requests"] for one in self.told["serving"])
        left = {
            "running": f"{view.running:.0f} of {most}",
            "queued": f"{view.queued:.0f}",
            "KV cache": f"{view.kv_used:.0%}",
            "steps/s": f"{view.steps:,.1f}",
            "tokens/s": f"{view.tokens:,.0f}",
            "": drawn,
        }
        right = {
            "accept length": _number(view.accept_length, 2),
            "drafts each": _number(view.drafts, 2),
            "verified rows/s": f"{view.verified:,.0f}",
            "accepted/s": f"{view.accepted:,.0f}",
            "padding rows/s": f"{view.padding:,.0f}",
        }
        return _beside(("requests", left), ("drafts", right))

    def _plan(self, view: View) -> RenderableType:
        one = self.told["serving"][0]
        left = {"layers": f"up to {one['num_steps']}", "steps": "not planned"}
        if one["plans"]:
            kinds = [f"{why} {share:.0%}" for why, share in view.plans.items()]
            left = {
                "layers": f"{_number(view.layers, 2)} of {one['num_steps']}",
                "step predicted": f"{_number(view.predicted_ms, 1)} ms",
                "step measured": f"{_number(view.measured_ms, 1)} ms",
                "steps": ", ".join(kinds[:2]) or "-",
                "": ", ".join(kinds[2:]),
            }
        left["rows a step"] = _number(view.rows, 1)
        left["packed"] = "yes" if one["packed"] else f"no: {one['unpacked_because']}"
        stops = {
            why: f"{share:4.0%} {'#' * round(12 * share)}" for why, share in view.stops.items()
        }
        return _beside(("plan", left), ("why drafts end", stops or {"": "no draft ended"}))


def _beside(*panels: tuple[str, Mapping[str, str]]) -> RenderableType:
    tall = max(len(rows) for _, rows in panels)
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(title, rows, tall) for title, rows in panels))
    return grid


def _panel(title: str, rows: Mapping[str, str], tall: int) -> Panel:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    for name, value in rows.items():
        grid.add_row(name, value)
    return Panel(grid, title=title, height=tall + 2)


def _drawn(history: deque[float]) -> str:
    most = max(history, default=0.0) or 1.0
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in history)


# -- the loop ----------------------------------------------------------------------------------


def watch(server: Server, *, interval: float, once: bool) -> None:
    """Show a server until ctrl-C is typed; with ``once`` print one line. Raises
    :class:`~sglang_c2t.config.ConfigError` if the server does not answer at first. Later this waits
    for it to come back.
    """
    console = Console()
    follow = _Follower(server, interval, server.told(), server.sample())
    with contextlib.suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            _print_lines(follow, once)
        else:
            _fill_screen(follow, console)


class _Follower:
    """Samples a server once per interval."""

    def __init__(
        self, server: Server, interval: float, told: Mapping[str, Any], first: Sample
    ) -> None:
        self.server, self.interval = server, interval
        self.told, self._last = told, first
        self._looks = 0
        self._lost: str | None = None  # since when

    def look(self) -> View | str:
        """Return the numbers of an interval, or that the server does not answer."""
        self._looks += 1
        try:
            sample = self.server.sample()
            if self._lost is not None or self._looks % SETTINGS_EVERY == 0:
                self.told = self.server.told()
        except NoAnswerError:
            self._lost = self._lost or time.strftime("%H:%M:%S")
            return f"no answer since {self._lost}"
        self._lost = None
        view, self._last = view_of(Window(self._last, sample)), sample
        return view


def _print_lines(follow: _Follower, once: bool) -> None:
    try:
        while True:
            time.sleep(follow.interval)
            seen, clock = follow.look(), time.strftime("%H:%M:%S")
            line = f"{clock} {seen}" if isinstance(seen, str) else line_of(seen, follow.told, clock)
            print(line, flush=True)
            if once:
                return
    except BrokenPipeError:  # `head` reads no further
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_screen(follow: _Follower, console: Console) -> None:
    screen = Screen(follow.server.url, follow.told)
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen, refresh=True)
            time.sleep(follow.interval)
            seen, clock = follow.look(), time.strftime("%H:%M:%S")
            if isinstance(seen, str):
                screen.status, screen.clock = seen, clock
            else:
                screen.show(seen, clock)
            screen.told = follow.told
