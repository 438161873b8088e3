"""`top` shows a server's numbers by name, within 80 columns and 24 lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from sglang_c2t.offline import top
from sglang_c2t.offline.observe import Sample, Server, Window, sample_of
from sglang_c2t.offline.top import Screen, line_of, view_of
from tests.offline.servers import METRICS, SERVING, TOLD, FakeServer, serving

BEFORE, AFTER = (sample_of(text, at=3.0 * number) for number, text in enumerate(METRICS))
START = Sample(-100.0, {}, 1, 0.0)

#: Since the server's start, in 100 seconds.
ALL = view_of(Window(START, BEFORE))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def drawn(screen: Screen, **terminal: Any) -> list[str]:
    sink = io.StringIO()
    Console(file=sink, width=80, height=24, force_terminal=True, **terminal).print(screen)
    return sink.getvalue().splitlines()


def of(view: top.View = ALL, **told: Any) -> Screen:
    screen = Screen("http://127.0.0.1:30000", TOLD | told)
    screen.show(view, "14:03:22")
    return screen


def test_top_line_holds_names_and_values(server: FakeServer) -> None:
    line = line_of(view_of(Window(BEFORE, AFTER)), TOLD, "14:03:22")
    clock, *pairs = line.split(" ")
    values = dict(pair.split("=") for pair in pairs)
    assert clock == "14:03:22"
    assert values["policy"] == "auto"
    assert values["running"] == f"{AFTER['sglang:num_running_reqs']:.0f}"
    assert values["layers"] == "-", "nothing was planned in these seconds"


def test_top_screen_of_an_idle_server_has_dashes() -> None:
    idle = view_of(Window(AFTER, replace(AFTER, at=9.0)))
    assert (idle.accept_length, idle.rows, idle.layers) == (None, None, None)
    text = "\n".join(drawn(of(idle, serving=[SERVING | {"plans": False}])))
    assert "not planned" in text
    assert "no draft ended" in text
    assert "accept length   -" in text


def test_top_waits_for_a_server_that_restarts(server: FakeServer) -> None:
    """Its counters begin anew, and its settings may be others."""
    asked = Server(server.url)
    follow = top._Follower(asked, 1.0, asked.told(), asked.sample())
    server.answers["/metrics"] = 503, ""
    said = follow.look()
    assert isinstance(said, str)
    assert said.startswith("no answer since ")
    assert follow.look() == said
    server.answers["/metrics"] = 200, METRICS[0].replace("} 451.0", "} 7.0")
    server.answers["/c2t"] = 200, json.dumps(TOLD | {"policy": "c2t"})
    view = follow.look()
    assert isinstance(view, top.View)
    assert view.restarted
    assert view.rows == pytest.approx(71353 / 7)
    assert follow.told["policy"] == "c2t"
    assert "the server has restarted" in "\n".join(drawn(of(view)))


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_top_interval_out_of_range_is_refused(
    capsys: pytest.CaptureFixture[str], interval: str
) -> None:
    from sglang_c2t.cli import main

    assert main(["top", "--interval", interval]) == 2
    assert "--interval must be from 0.2 to 3600 seconds" in capsys.readouterr().err
