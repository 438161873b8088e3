"""A running server: its series, its policy changed over HTTP, requests that opt out."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.offline.client import Answer, LoadResult, post_all, run_load
from sglang_c2t.policies import policy_for, policy_names
from sglang_c2t.policies.base import TreeShape
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    REPOSITORY,
    TREE,
    assert_counted,
    counted,
    in_force,
    series,
    settings_of,
    verified,
)

KEY = "sesame"
ADMIN = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Controlled:
    """A ``--c2t`` server that anyone with the key may change."""

    server: Server
    shape: TreeShape

    @property
    def full(self) -> int:
        """Rows of a full draft, root included."""
        return self.shape.num_draft_tokens

    def post(self, **settings: Any) -> dict[str, Any]:
        """Change settings; raises unless they were taken."""
        response = requests.post(f"{self.server.url}/c2t", json=settings, headers=ADMIN, timeout=60)
        assert response.status_code == 200, response.text
        told: dict[str, Any] = response.json()
        return told

    def settings(self) -> dict[str, Any]:
        return settings_of(self.server.url)

    def flush_cache(self) -> None:
        url = f"{self.server.url}/flush_cache?timeout=20"
        requests.post(url, headers=ADMIN, timeout=60).raise_for_status()

    def serve(self, bodies: list[dict[str, Any]] = BODIES) -> LoadResult:
        self.flush_cache()
        return run_load(self.server.url, bodies, concurrency=CONCURRENCY)

    def series(self) -> dict[str, float]:
        return series(self.server.url)

    def accept_rates(self) -> tuple[float, float, float]:
        """The gauge; of the last step in SGLang's log, the rate of drafts verified, and its own."""
        gauge = self.series()["sglang:spec_accept_rate"]
        log = self.server.log.read_text(errors="replace")
        last = re.findall(r"accept len: (\S+), accept rate: (\S+), cap len: (\S+),", log)[-1]
        accept, of_whole_drafts, cap = map(float, last)
        return gauge, (accept - 1) / (cap - 1) if cap > 1 else of_whole_drafts, of_whole_drafts


SHAPES = {
    "chains": ("EAGLE3", TreeShape(topk=1, num_steps=5, num_draft_tokens=6)),
    "trees": ("EAGLE", TreeShape(**TREE)),
}

#: Requests that run at any time.
CLIENTS = 6


@pytest.fixture(scope="module", params=sorted(SHAPES))
def controlled(request: pytest.FixtureRequest, logs: Path) -> Iterator[Controlled]:
    algorithm, shape = SHAPES[request.param]
    flags = (*speculative_flags(algorithm, **shape._asdict()), "--c2t", "--c2t-policy", "c2t",
             "--enable-metrics", "--admin-api-key", KEY, "--decode-log-interval", "1")  # fmt: skip
    with running(Launch(f"controlled-{request.param}", flags), logs) as server:
        yield Controlled(server, shape)


def test_series_agree_exactly_with_what_requests_say_of_themselves(controlled: Controlled) -> None:
    controlled.post(policy="c2t")
    before = controlled.series()
    answers = controlled.serve().answers
    after = controlled.series()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    expected = counted(answers)
    assert expected["c2t:proposed_drafts_total"] > 0
    assert {name: grown[name] for name in expected} == expected
    # This engine verifies one step at a time, so that no row is verified for nothing.
    rows = expected["c2t:verifications_total"] + expected["c2t:proposed_drafts_total"]
    assert grown["c2t:verify_rows_total"] == rows
    assert grown["c2t:verify_padding_rows_total"] == 0
    stops = {name: value for name, value in grown.items() if "draft_stops_total" in name}
    assert sum(stops.values()) == expected["c2t:verifications_total"]
    assert stops["c2t:draft_stops_totalpolicy"] > 0


def test_the_accept_rate_gauge_divides_by_drafts_that_were_verified(controlled: Controlled) -> None:
    controlled.post(policy="c2t")
    # With an interval of one step the gauge shows the last one, and an answer is on its way
    # before SGLang reports the step that ended it. The log has two decimals.
    for number in range(1, 12):
        controlled.serve([copy.deepcopy(BODIES[1]) | {"text": BODIES[number]["text"]}])
        deadline = time.monotonic() + 10
        gauge, of_verified, of_whole = controlled.accept_rates()
        while abs(gauge - of_verified) > 0.02 and time.monotonic() < deadline:
            time.sleep(0.1)
            gauge, of_verified, of_whole = controlled.accept_rates()
        assert gauge == pytest.approx(of_verified, abs=0.02)
        if of_verified - of_whole > 0.04:
            return  # a draft was cut and part of it accepted: the two rates differ
    raise AssertionError("no answer ended with a step whose draft was cut and in part accepted")


def test_a_changed_policy_verifies_other_drafts_and_answers_the_same(
    controlled: Controlled, expected: list[tuple[int, ...]]
) -> None:
    proposed = {}
    for policy, beta in (("c2t", None), ("c2t-plus", None), ("c2t-plus", 0.9), ("dyjoint", 0.2)):
        told = controlled.post(policy=policy, beta=beta)
        assert (told["policy"], told["beta"]) == (policy, beta)
        now = controlled.settings()
        assert {**in_force(told), "switches": now["switches"]} == now
        result = controlled.serve(BODIES[:16])
        assert result.outputs == expected[:16]
        proposed[policy, beta] = counted(result.answers)["c2t:proposed_drafts_total"]
    assert len(set(proposed.values())) == len(proposed)
    assert proposed["c2t-plus", 0.9] < proposed["c2t-plus", None]


def menu(shape: TreeShape) -> list[str]:
    """The policies that serve drafts of this shape with what is shipped."""

    def serves(name: str) -> bool:
        try:
            policy_for(C2TConfig(policy=name), shape)
        except ConfigError:
            return False
        return True

    return [name for name in policy_names() if serves(name)]


def every_ordered_pair(names: Sequence[str]) -> list[str]:
    """A walk in which each of the names is followed by each other one.

    Of a, b, c: a b a c a, b c b, c.
    """
    return [
        step
        for place, one in enumerate(names)
        for step in [*(s for other in names[place + 1 :] for s in (one, other)), one]
    ]


class Load:
    """Clients that send BODIES over and over, until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers: list[tuple[int, Answer]] = []
        """Numbers of bodies, and what was answered."""

    def client(self, first: int) -> None:
        """One request after the other, beginning with that one."""
        number = first
        while not self._stop.is_set():
            reply = requests.post(f"{self._url}/generate", json=BODIES[number], timeout=60)
            reply.raise_for_status()
            told: dict[str, Any] = reply.json()
            self.answers.append((number, Answer(tuple(told["output_ids"]), told["meta_info"])))
            number = (number + 1) % len(BODIES)

    def stop(self) -> None:
        self._stop.set()


def test_policies_switched_in_every_order_under_load_change_no_output_and_no_count(
    controlled: Controlled, expected: list[tuple[int, ...]]
) -> None:
    """Each policy of the menu replaces each other one while requests run."""
    names = menu(controlled.shape)
    walk = every_ordered_pair(names)
    assert len({*pairwise(walk)}) >= len(names) * (len(names) - 1)
    controlled.flush_cache()
    before, load = controlled.series(), Load(controlled.server.url)
    switches = controlled.settings()["switches"]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.client, 5 * client) for client in range(CLIENTS)]
        try:
            for policy in walk:
                controlled.post(policy=policy)
        finally:
            load.stop()
        for client in clients:
            client.result()
    assert len(load.answers) > CLIENTS
    wrong = [number for number, answer in load.answers if answer.output_ids != expected[number]]
    assert wrong == []
    assert controlled.settings()["switches"] == [switches[0] + len(walk)]
    assert_counted(controlled.server.url, before, [answer for _, answer in load.answers])
    assert controlled.series()["c2t:policy_failures_total"] == 0
    controlled.post(policy="c2t")


def test_a_request_that_opts_out_has_its_drafts_verified_whole(
    controlled: Controlled, expected: list[tuple[int, ...]]
) -> None:
    """The very drafts it has on a server that cuts nothing, though the others stop at once."""
    controlled.post(policy="fixed" if controlled.shape.topk == 1 else "eagle2")
    uncut = controlled.serve().answers
    controlled.post(policy="c2t-plus", beta=0.9)
    bodies = copy.deepcopy(BODIES)
    for body in bodies[::2]:
        body["sampling_params"]["custom_params"] = {"c2t": False}
    for body in bodies[1::4]:
        body["sampling_params"]["custom_params"] = {"c2t": True}
    result = controlled.serve(bodies)
    assert result.outputs == expected
    for number, (answer, other) in enumerate(zip(result.answers, uncut, strict=True)):
        if not verified(answer):
            continue
        whole = answer.meta_info["spec_cap_length"] == controlled.full
        assert whole == (number % 2 == 0)
        for count in ("spec_verify_ct", "spec_num_correct_drafts"):
            assert not whole or answer.meta_info[count] == other.meta_info[count], (number, count)


def test_chat_requests_may_opt_out_too(controlled: Controlled) -> None:
    controlled.post(policy="c2t-plus", beta=0.9)
    chat = {"model": "demo", "prompt": BODIES[1]["text"], "max_tokens": 24, "temperature": 0,
            "custom_params": {"c2t": False}}  # fmt: skip
    before = controlled.series()
    post_all(controlled.server.url, [("/v1/completions", chat)], concurrency=1)
    after = controlled.series()
    full, all_of_them = (
        after[name] - before[name]
        for name in ("c2t:draft_stops_totalfull", "c2t:verifications_total")
    )
    assert full == all_of_them > 0


def test_every_series_of_the_dashboard_is_served(controlled: Controlled) -> None:
    """Names and labels: a panel that asks for something else would stay empty for ever."""
    controlled.serve(BODIES[:4])
    text = requests.get(f"{controlled.server.url}/metrics", timeout=60).text
    labels_of: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels_of.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((REPOSITORY / "sglang_c2t/guides/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked: dict[str, set[str]] = {}
    for query in queries:
        for name, matchers in re.findall(r"((?:c2t|sglang):\w+)(?:\{([^}]*)\})?", query):
            asked.setdefault(name, set()).update(re.findall(r"(\w+)\s*=~?", matchers))
    assert {name for name in asked if name.startswith("c2t:")} == {
        name for name in labels_of if name.startswith("c2t:") and not name.endswith(
            ("_created", "_length_sum", "_length_count"))
    }  # fmt: skip
    for name, labels in asked.items():
        assert labels <= labels_of[name], name
