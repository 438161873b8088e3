"""What is shown of a server: numbers by name, within 80 columns and 24 lines."""

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
from sglang_c2t.offline.top import CHAINS, TREES, Screen, line_of, read_only_because, view_of
from sglang_c2t.policies import POLICIES, tree_policy_names
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


def of(view: top.View = ALL, read_only: str | None = None, **told: Any) -> Screen:
    screen = Screen("http://127.0.0.1:30000", read_only, TOLD | told)
    screen.show(view, "14:03:22")
    return screen


def test_rates_and_means_are_those_of_the_counters() -> None:
    """451 steps with 21,413 verifications, of which 440 were planned with 1,170 layers."""
    assert (ALL.running, ALL.queued, ALL.kv_used) == (47, 15, 0.24)
    assert ALL.steps == 4.51
    assert ALL.tokens == pytest.approx((21413 + 38516) / 100)
    assert (ALL.verified, ALL.accepted) == (713.53, 385.16)
    assert ALL.accept_length == pytest.approx(1 + 38516 / 21413)
    assert ALL.drafts == pytest.approx(49940 / 21413)
    assert ALL.rows == pytest.approx(71353 / 451)
    assert ALL.layers == pytest.approx(1170 / 440)
    assert ALL.predicted_ms == pytest.approx(53215.41 / 440, rel=1e-6)
    assert ALL.measured_ms == pytest.approx(80154.08 / 440, rel=1e-6)
    assert sum(ALL.plans.values()) == pytest.approx(1)
    assert ALL.stops["depth"] == pytest.approx(15604 / 21413)


def test_the_line_holds_names_and_values(server: FakeServer) -> None:
    line = line_of(view_of(Window(BEFORE, AFTER)), TOLD, "14:03:22")
    clock, *pairs = line.split(" ")
    values = dict(pair.split("=") for pair in pairs)
    assert clock == "14:03:22"
    assert values["policy"] == "auto"
    assert values["running"] == f"{AFTER['sglang:num_running_reqs']:.0f}"
    assert values["layers"] == "-", "nothing was planned in these seconds"


@pytest.mark.parametrize("encoding", [{}, {"no_color": True}])
def test_the_screen_fits_into_80_by_24_and_shows_the_numbers(encoding: dict[str, Any]) -> None:
    lines = drawn(of(), **encoding)
    assert len(lines) <= 24
    text = "\n".join(lines)
    for shown in (
        "running  47 of 48", "queued   15", "KV cache 24%", "tokens/s 599", "accept length   2.80",
        "layers         2.66 of 5", "step predicted 120.9 ms", "step measured  182.2 ms",
        "depth   73%", "policy auto", "1 auto", "8 fixed", "14:03:22",
    ):  # fmt: skip
        assert shown in text, text


def test_the_largest_screen_fits_as_well() -> None:
    """Trees, all kinds of steps, a long reason, several replicas, two notes."""
    serving = [SERVING | {"topk": 4, "packed": False, "unpacked_because": "x " * 80}] * 2
    screen = of(
        replace(
            ALL,
            replicas=2,
            plans=dict.fromkeys(("plan", "plain", "explore", "unknown"), 0.25),
            restarted=True,
        ),
        serving=serving,
    )
    screen.note = "y " * 60
    lines = drawn(screen)
    assert len(lines) <= 24
    text = "\n".join(lines)
    for shown in ("2 replicas", "of 96", "explore 25%, unknown 25%", "has restarted"):
        assert shown in text
    assert "6 eagle2" in text


def test_an_idle_server_and_one_without_a_planner_have_dashes_and_no_zeros() -> None:
    idle = view_of(Window(AFTER, replace(AFTER, at=9.0)))
    assert (idle.accept_length, idle.rows, idle.layers) == (None, None, None)
    text = "\n".join(drawn(of(idle, serving=[SERVING | {"plans": False}])))
    assert "not planned" in text
    assert "no draft ended" in text
    assert "accept length   -" in text


def test_a_terminal_without_unicode_gets_none() -> None:
    sink = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=sink, width=80, force_terminal=True).print(of())
    sink.flush()


def test_every_policy_that_has_a_number_is_on_the_menu() -> None:
    assert set(CHAINS) <= set(POLICIES)
    assert set(TREES) <= set(tree_policy_names())
    assert len(set(CHAINS)) == len(CHAINS) <= 9
    assert len(set(TREES)) == len(TREES) <= 9


def test_a_policy_is_switched_by_its_number_and_a_yes() -> None:
    switched: list[str] = []

    def switch(policy: str) -> str:
        switched.append(policy)
        return "done"

    screen = of()
    for keys, asked in (("2n", []), ("2 ", []), ("2y", ["c2t"]), ("x0", ["c2t"])):
        assert all(screen.key(typed, switch) for typed in keys)
        assert switched == asked
    screen.key("3", switch)
    assert "switch to c2t-log? y: yes" in "\n".join(drawn(screen))
    assert screen.key("q", switch), "no answer to the question"
    assert not screen.key("q", switch)


def test_a_server_that_takes_no_changes_is_shown_read_only() -> None:
    screen = of(read_only="the server has no admin key")
    assert screen.key("2", lambda policy: pytest.fail("it was switched"))
    assert screen.key("y", lambda policy: pytest.fail("it was switched"))
    assert "read-only: the server has no admin key" in "\n".join(drawn(screen))


@pytest.mark.parametrize(
    ("changed_by", "url", "key", "may"),
    [
        ("admin key", "http://far", "k", True),
        ("admin key", "http://localhost", None, False),
        ("this machine", "http://127.0.0.1:3", None, True),
        ("this machine", "http://[::1]:3", None, True),
        ("this machine", "http://10.0.0.3:3", None, False),
        ("nobody", "http://localhost", "k", False),
    ],
)
def test_who_may_switch_is_what_the_server_says(
    changed_by: str, url: str, key: str | None, may: bool
) -> None:
    reason = read_only_because({"changed_by": changed_by}, url, key)
    assert (reason is None) == may


def test_a_server_that_goes_and_comes_back_is_waited_for(server: FakeServer) -> None:
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
def test_intervals_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], interval: str
) -> None:
    from sglang_c2t.cli import main

    assert main(["top", "--interval", interval]) == 2
    assert "--interval must be from 0.2 to 3600 seconds" in capsys.readouterr().err
