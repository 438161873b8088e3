"""A running server whose child dies ends; one whose classifier file goes away continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from eval.server import Launch, Server, running, speculative_flags
from eval.soak.faults import ClassifierFile
from sglang_c2t.offline.client import run_load
from tests.e2e.conftest import BODIES, CONCURRENCY, END_SECONDS, settings_of


@pytest.fixture(scope="module")
def classifier(logs: Path) -> ClassifierFile:
    return ClassifierFile.copied(logs / "losable", "c2t")


@pytest.fixture(scope="module")
def serving(logs: Path, classifier: ClassifierFile) -> Iterator[Server]:
    """A server whose classifier file the tests may harm."""
    flags = (*speculative_flags("EAGLE3"), "--c2t", "--c2t-classifier", str(classifier.path))
    with running(Launch("losable", flags), logs) as server:
        yield server


def reload(server: Server, classifier: ClassifierFile) -> requests.Response:
    body = {"policy": "c2t", "classifier": str(classifier.path)}
    return requests.post(f"{server.url}/c2t", json=body, timeout=60)


HARMS: dict[str, Callable[[ClassifierFile], contextlib.AbstractContextManager[None]]] = {
    "lost": ClassifierFile.lost,
    "corrupt": ClassifierFile.corrupt,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_server_outlives_its_classifier_file_and_takes_no_broken_one(
    serving: Server, classifier: ClassifierFile, expected: list[tuple[int, ...]], harm: str
) -> None:
    """The file is overwritten where it lies: a server that had only mapped it would fall over."""
    before = settings_of(serving.url)
    with HARMS[harm](classifier):
        outputs = run_load(serving.url, BODIES[:16], concurrency=CONCURRENCY).outputs
        assert outputs == expected[:16]
        refused = reload(serving, classifier)
        assert refused.status_code == 400
        told = refused.json()["error"]["message"]
        assert f"{classifier.path.name!r} cannot be used: the server's log says why" in told
        assert str(classifier.path.parent) not in told
        assert settings_of(serving.url) == before
        assert run_load(serving.url, BODIES[:6], concurrency=6).outputs == expected[:6]
    assert reload(serving, classifier).status_code == 200


def test_a_server_whose_scheduler_is_killed_ends_and_leaves_nothing_behind(serving: Server) -> None:
    """It ends with an exit code that is not 0. The last test of this server."""
    children = serving.processes()[1:]
    (scheduler,) = (child for child in children if "sglang::scheduler" in " ".join(child.cmdline()))
    scheduler.kill()
    assert serving.process.wait(timeout=END_SECONDS) != 0
    _, left = psutil.wait_procs(children, timeout=5)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
    assert "crash diagnostics" not in serving.log.read_text(), "it waited for dumps of a GPU"
