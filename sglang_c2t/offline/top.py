"""``python -m sglang_c2t top``: a running server, live.

Counters of ``/metrics`` are read once an interval, settings of ``GET /c2t`` now and then. On a
terminal they fill the screen; into a pipe goes a line an interval. A policy is switched by its
number, where the server lets whoever asks do that.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_c2t.offline.observe import NoAnswerError, Sample, Server, Window

#: Intervals between two looks at the settings, which cost the server more than its counters do.
SETTINGS_EVERY = 5

#: Policies that have a number, of servers of chains and of trees.
CHAINS = (
    "auto", "c2t", "c2t-log", "c2t-plus", "dyjoint", "dymax", "entropy", "rows-only", "fixed",
)  # fmt: skip
TREES = (
    "auto", "c2t", "c2t-log", "c2t-plus", "dyjoint", "entropy-width", "fork", "static", "eagle2",
)  # fmt: skip

#: Why drafts end, and why steps are planned as they are, by the series that counts them.
STOPS = ("policy", "full", "depth", "budget")
PLANS = ("plan", "uniform", "explore", "unknown", "failed")

#: Tokens a second that are drawn: so many intervals.
DRAWN = 30
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class View:
    """What is shown of an interval; ``None``: there was nothing to divide by."""

    replicas: int
    running: float
    queued: float
    kv_used: float
    tokens: float
    """A second, like the next ones."""
    steps: float
    verified: float
    accepted: float
    padding: float
    drafted: float | None
    """Of planned steps; of others nobody counts it."""
    accept_length: float | None
    drafts: float | None
    """Per verification."""
    rows: float | None
    """Per step, padding included."""
    layers: float | None
    """Per planned step, like the next ones."""
    predicted_ms: float | None
    measured_ms: float | None
    plans: Mapping[str, float]
    """Shares."""
    stops: Mapping[str, float]
    """Shares."""
    restarted: bool = False


def view_of(window: Window) -> View:
    """Rates and means of what was counted in an interval."""
    verifications, steps = window["c2t:verifications_total"], window["c2t:steps_total"]
    plans = {why: window[f"c2t:plans_total{{{why}}}"] for why in PLANS}
    stops = {why: window[f"c2t:draft_stops_total{{{why}}}"] for why in STOPS}
    planned, rows = sum(plans.values()), window["c2t:verify_rows_total"]
    layers = _over(window["c2t:planned_layers_total"], planned)
    drafted = None
    if layers is not None and abs(planned - steps) < 0.5:
        drafted = layers * verifications / window.seconds
    padding = window["c2t:verify_padding_rows_total"]
    return View(
        replicas=window.after.replicas,
        running=window.after["sglang:num_running_reqs"],
        queued=window.after["sglang:num_queue_reqs"],
        kv_used=window.after.fullest,
        tokens=(verifications + window["c2t:correct_drafts_total"]) / window.seconds,
        steps=steps / window.seconds,
        verified=rows / window.seconds,
        accepted=window.rate("c2t:correct_drafts_total"),
        padding=padding / window.seconds,
        drafted=drafted,
        accept_length=_over(verifications + window["c2t:correct_drafts_total"], verifications),
        drafts=_over(window["c2t:proposed_drafts_total"], verifications),
        rows=_over(rows + padding, steps),
        layers=layers,
        predicted_ms=_over(1e3 * window["c2t:predicted_step_seconds_total"], planned),
        measured_ms=_over(1e3 * window["c2t:measured_step_seconds_total"], planned),
        plans=_shares(plans),
        stops=_shares(stops),
        restarted=window.restarted,
    )


def _over(count: float, by: float) -> float | None:
    return count / by if by else None


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items() if count}


# -- as text -----------------------------------------------------------------------------------


def line_of(view: View, told: Mapping[str, Any], clock: str) -> str:
    """One line, of names and values."""
    values = {
        "policy": told["policy"],
        "replicas": f"{view.replicas}",
        "tokens/s": f"{view.tokens:.0f}",
        "running": f"{view.running:.0f}",
        "queued": f"{view.queued:.0f}",
        "accept_length": _number(view.accept_length, 2),
        "drafts": _number(view.drafts, 2),
        "drafted/s": _number(view.drafted, 0),
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


# -- as a screen -------------------------------------------------------------------------------


@dataclass
class Screen:
    """What is on the terminal, and what was typed so far."""

    url: str
    read_only: str | None
    """Why no policy can be switched here; ``None``: it can."""
    told: Mapping[str, Any]
    view: View | None = None
    clock: str = ""
    status: str = ""
    """What is wrong with what is shown."""
    note: str = ""
    """What came of the last key."""
    asked_for: str | None = None
    """The policy that waits for a yes."""
    history: deque[float] = field(default_factory=lambda: deque(maxlen=DRAWN))

    @property
    def menu(self) -> tuple[str, ...]:
        """Policies by number."""
        return CHAINS if self.told["serving"][0]["topk"] == 1 else TREES

    def show(self, view: View, clock: str) -> None:
        """An interval has passed."""
        self.view, self.clock = view, clock
        self.history.append(view.tokens)
        self.status = "the server has restarted" if view.restarted else ""

    def key(self, typed: str, switch: Callable[[str], str]) -> bool:
        """A key was typed; ``switch`` has the server serve a policy and says what came of it.
        Returns whether to go on.
        """
        self.note = ""
        if self.asked_for is not None:
            asked, self.asked_for = self.asked_for, None
            self.note = switch(asked) if typed in "yY" else f"policy stays {self.told['policy']}"
        elif typed in "qQ":
            return False
        elif typed in "123456789" and int(typed) <= len(self.menu):
            if self.read_only is None:
                self.asked_for = self.menu[int(typed) - 1]
            else:
                self.note = f"read-only: {self.read_only}"
        return True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fits into 80 columns and 24 lines; of a lower terminal what can be typed is on top."""
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        replicas = self.view.replicas if self.view else 0
        several = f", {replicas} replicas" if replicas > 1 else ""
        policy = f"policy {self.told['policy']}{several}"
        head.add_row(Text(f"sglang-c2t  {self.url}", style="bold"), Text(f"{policy}  {self.clock}"))
        yield head
        yield from self._asks()
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
            "drafted/s": "-" if view.drafted is None else f"{view.drafted:,.0f}",
            "verified rows/s": f"{view.verified:,.0f}",
            "accepted/s": f"{view.accepted:,.0f}",
            "padding rows/s": f"{view.padding:,.0f}",
        }
        return _beside(("requests", left), ("drafts", right))

    def _plan(self, view: View) -> RenderableType:
        one = self.told["serving"][0]
        depth = f"{_number(view.layers, 2)} of {one['num_steps']}"
        left = {"layers": depth, "rows a step": _number(view.rows, 1)}
        left["step predicted"] = f"{_number(view.predicted_ms, 1)} ms"
        left["step measured"] = f"{_number(view.measured_ms, 1)} ms"
        kinds = [f"{why} {share:.0%}" for why, share in view.plans.items()]
        left |= {"steps": ", ".join(kinds[:2]) or "-", "": ", ".join(kinds[2:])}
        if not one["plans"]:
            left = {"layers": f"up to {one['num_steps']}", "rows a step": _number(view.rows, 1)}
            left["steps"] = "not planned"
        left["packed"] = "yes" if one["packed"] else f"no: {one['unpacked_because']}"
        width = 12
        right = {
            why: f"{share:4.0%} {'#' * round(share * width)}" for why, share in view.stops.items()
        }
        return _beside(("plan", left), ("why drafts end", right or {"": "no draft ended"}))

    def _asks(self) -> list[RenderableType]:
        numbers = "  ".join(f"{n} {name}" for n, name in enumerate(self.menu, start=1))
        if self.asked_for is not None:
            asks = Text(f"switch to {self.asked_for}? y: yes, any other key: no", style="bold")
        elif self.read_only is None:
            asks = Text(f"switch to: {numbers}")
        else:
            asks = Text(f"read-only: {self.read_only}")
        said = ("q: quit", self.status, self.note)
        return [asks, Text("  ".join(filter(None, said)), style="bold" if self.status else "")]


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


def read_only_because(told: Mapping[str, Any], url: str, admin_key: str | None) -> str | None:
    """Why whoever asks may not switch policies; ``None``: they may."""
    changed_by = told.get("changed_by", "nobody")
    if changed_by == "admin key":
        return None if admin_key else "give --admin-api-key to switch policies"
    if changed_by == "this machine":
        here = _is_loopback(urlsplit(url).hostname or "")
        return None if here else "the server takes changes from its own machine only"
    return "the server has no admin key, and no --c2t-loopback-control"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def watch(
    server: Server,
    *,
    interval: float,
    once: bool = False,
    admin_key: str | None = None,
    console: Console | None = None,
) -> None:
    """Show a server until somebody types ``q`` or ctrl-C; ``once``: a line of one interval.

    Raises :class:`~sglang_c2t.config.ConfigError` where it does not tell what is shown, at first;
    one that does not answer later is waited for.
    """
    console = console or Console()
    follow = _Follower(server, interval, server.told(), server.sample())
    with contextlib.suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            _print_lines(follow, once)
        else:
            _fill_screen(follow, console, admin_key)


class _Follower:
    """Looks at a server once an interval."""

    def __init__(
        self, server: Server, interval: float, told: Mapping[str, Any], first: Sample
    ) -> None:
        self.server, self.interval = server, interval
        self.told, self._last = told, first
        self._looks = 0
        self._lost: str | None = None  # since when

    def look(self) -> View | str:
        """What an interval brought, or that nobody answered."""
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

    def switch(self, policy: str, admin_key: str | None) -> str:
        """Have the server serve another policy; what came of it."""
        said = self.server.switch(policy, admin_key)
        with contextlib.suppress(NoAnswerError):
            self.told = self.server.told()
        return said


def _print_lines(follow: _Follower, once: bool) -> None:
    try:
        while True:
            time.sleep(follow.interval)
            seen, clock = follow.look(), time.strftime("%H:%M:%S")
            line = f"{clock} {seen}" if isinstance(seen, str) else line_of(seen, follow.told, clock)
            print(line, flush=True)
            if once:
                return
    except BrokenPipeError:  # who read the lines has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_screen(follow: _Follower, console: Console, admin_key: str | None) -> None:
    url = follow.server.url
    screen = Screen(url, read_only_because(follow.told, url, admin_key), follow.told)
    live = Live(screen, console=console, screen=True, auto_refresh=False)
    with _keys() as next_key, live:
        due = time.monotonic() + follow.interval
        while True:
            live.update(screen, refresh=True)
            typed = next_key(max(due - time.monotonic(), 0.0))
            if typed is not None:
                if not screen.key(typed, lambda policy: follow.switch(policy, admin_key)):
                    return
            else:
                due = time.monotonic() + follow.interval
                seen, clock = follow.look(), time.strftime("%H:%M:%S")
                if isinstance(seen, str):
                    screen.status, screen.clock = seen, clock
                else:
                    screen.show(seen, clock)
            screen.told = follow.told


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """Gives a function that waits so many seconds for a key, without an enter behind it."""
    if not sys.stdin.isatty():  # the screen is somebody's, the keys are not

        def no_key(seconds: float) -> None:
            time.sleep(seconds)

        yield no_key
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def next_key(seconds: float) -> str | None:
        ready, _, _ = select.select([stdin], [], [], seconds)
        return os.read(stdin, 1).decode(errors="replace") if ready else None

    try:
        tty.setcbreak(stdin)
        yield next_key
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
