"""Each policy of the menu takes over from each other while requests run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.offline.client import Answer
from sglang_c2t.policies import policy_for, policy_names
from sglang_c2t.policies.base import TreeShape
from tests.e2e.conftest import BODIES, TREE, assert_counted, series

SHAPES = {
    "chains": ("EAGLE3", {"num_steps": 5, "topk": 1, "num_draft_tokens": 6}),
    "trees": ("EAGLE", TREE),
}

#: Requests that run at any time.
CLIENTS = 6


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


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_policies_switched_in_every_order_under_load_change_no_output_and_no_count(
    shape: str, logs: Path, expected: list[tuple[int, ...]]
) -> None:
    algorithm, sizes = SHAPES[shape]
    names = menu(TreeShape(sizes["topk"], sizes["num_steps"], sizes["num_draft_tokens"]))
    walk = every_ordered_pair(names)
    assert len({*pairwise(walk)}) >= len(names) * (len(names) - 1)
    flags = (*speculative_flags(algorithm, **sizes), "--c2t", "--enable-metrics")
    with running(Launch(f"switched-{shape}", flags), logs) as server:
        answers = serve_and_switch(server, walk)
        assert len(answers) > CLIENTS
        wrong = [number for number, answer in answers if answer.output_ids != expected[number]]
        assert wrong == []
        (state,) = requests.get(f"{server.url}/c2t", timeout=60).json()["switches"]
        assert state == len(walk)


def serve_and_switch(server: Server, walk: Sequence[str]) -> list[tuple[int, Answer]]:
    """What is answered meanwhile, and counted in the same way by the server's series."""
    before, load = series(server.url), Load(server.url)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.client, 5 * client) for client in range(CLIENTS)]
        try:
            for policy in walk:
                server.switch(policy=policy)
        finally:
            load.stop()
        for client in clients:
            client.result()
    assert_counted(server.url, before, [answer for _, answer in load.answers])
    assert series(server.url)["c2t:policy_failures_total"] == 0
    return load.answers
