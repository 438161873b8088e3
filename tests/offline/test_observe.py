"""A server's metrics are read unchanged, and one line names what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_c2t.cli import main
from sglang_c2t.offline.advise import facts_of, watch
from sglang_c2t.offline.observe import Sample, Server, Window, sample_of
from tests.offline.servers import METRICS, SERVING, TOLD, FakeServer, serving

BEFORE, AFTER = (sample_of(text, at=3.0 * number) for number, text in enumerate(METRICS))
NOTHING = Sample(0.0, {}, 0, 0.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def test_observe_reads_counters_by_name_and_label() -> None:
    assert BEFORE["c2t:steps_total"] == 451
    assert BEFORE["c2t:draft_stops_total{depth}"] == 15604
    assert BEFORE["sglang:num_queue_reqs"] == 15
    assert BEFORE["c2t:nothing"] == 0
    assert (BEFORE.replicas, BEFORE.fullest) == (1, 0.24)


def test_observe_sums_replicas() -> None:
    """Each has a rank; SGLang labels its gauges in the same way."""
    fuller = METRICS[0].replace("} 0.24", "} 0.5")
    other = METRICS[0].replace('tp_rank="0"', 'tp_rank="0",dp_rank="1"')
    series = [line for line in other.splitlines() if not line.startswith("#")]
    both = sample_of(fuller + "\n".join(series) + "\n", at=0.0)
    assert both.replicas == 2
    assert both["c2t:steps_total"] == 902
    assert both.fullest == 0.5


def test_observe_window_of_a_restarted_server_counts_from_its_start() -> None:
    young = sample_of(METRICS[0].replace("} 451.0", "} 7.0"), at=3.0)
    window = Window(AFTER, young)
    assert window.restarted
    assert window["c2t:steps_total"] == 7


def test_observe_histogram_counts_lengths_at_least() -> None:
    at_least = Window(NOTHING, BEFORE).at_least("c2t:proposed_length")
    assert list(at_least) == [1, 2, 3, 4, 5]
    assert sum(at_least.values()) == BEFORE["c2t:proposed_length_sum"]
    assert list(at_least.values()) == sorted(at_least.values(), reverse=True)


def test_observe_facts_are_of_all_replicas(server: FakeServer) -> None:
    told = TOLD | {"serving": [SERVING, SERVING]}
    facts = facts_of(told, {}, Window(NOTHING, BEFORE), [BEFORE, AFTER])
    assert (facts.replicas, facts.max_running) == (2, 96)
    assert facts.running == pytest.approx(2 * 21413 / 451)
    assert facts.queued == (15 + AFTER["sglang:num_queue_reqs"]) / 2
    assert facts.planned == 440
    assert facts.accepted_at_least[1] > facts.accepted_at_least[5] > 0


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", ["advise", "top"])
@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/c2t", (404, ""), "runs without --c2t: start it with that flag"),
        ("/metrics", (404, ""), "counts nothing: start it with --enable-metrics"),
        ("/metrics", (200, "no series {"), "holds no Prometheus series"),
        ("/c2t", (401, ""), "wants its key: set SGLANG_API_KEY"),
        ("/c2t", (200, '{"policy": "c2t"}'), "install this version of sglang-c2t there"),
        ("/c2t", (200, "<html>"), "no SGLang server answers"),
        ("/c2t", (500, ""), "answered 500"),
    ],
)
def test_observe_server_without_metrics_or_c2t_is_refused_in_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str], command: str, path: str,
    answer: tuple[int, str], said: str,
) -> None:  # fmt: skip
    server.answers[path] = answer
    assert said in refusal(capsys, command, server.url)


def test_observe_server_that_restarts_is_refused(server: FakeServer) -> None:
    def restart() -> None:
        server.answers["/metrics"] = 200, METRICS[0].replace("} 451.0", "} 7.0")

    with pytest.raises(Exception, match="restarted while it was watched"):
        watch(Server(server.url), 2.1, restart)


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--seconds", "nan"], ["--seconds", "1e9"]])
def test_advise_seconds_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert "--seconds must be from 1 to 3600" in refusal(capsys, "advise", *flags)
