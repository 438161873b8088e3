"""Existing clients report speculation: the openai package, gauges.

The server is the real pair as `make serve` starts it, so that answers can be read. But it does not
plan: on a slow machine a planner may leave out the drafts of a short answer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from eval.prompts import real_classifier_mix
from eval.server import Launch, Server, environment, running, speculative_flags
from eval.smollm2 import HEAD
from eval.smollm2.target import TargetError, target_folder
from sglang_c2t.offline.client import greedy, run_load
from tests.e2e.conftest import REPOSITORY, counted

EXAMPLE = REPOSITORY / "sglang_c2t" / "guides" / "openai_client.py"


@pytest.fixture(scope="module")
def target() -> Path:
    try:
        return target_folder()
    except TargetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(logs: Path, target: Path) -> Iterator[Server]:
    flags = (*speculative_flags("EAGLE3", draft=HEAD), "--c2t", "--c2t-policy", "c2t",
             "--enable-metrics", "--tool-call-parser", "qwen25")  # fmt: skip
    with running(Launch("clients", flags, target), logs) as found:
        yield found


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False,
        cwd=folder, env=environment({"PYTHONPATH": str(REPOSITORY)}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_package_is_told_what_was_verified(server: Server, logs: Path) -> None:
    """In an answer, at the end of a stream, and where a grammar has a tool called."""
    told = run(logs, str(EXAMPLE), server.url)
    answer, stream = (re.findall(rf"^{what}: (.*)", told, re.M)[0] for what in ("answer", "stream"))
    assert answer == stream
    assert "scatter" in answer.lower(), "it was asked why the sky is blue"
    # A model of this size calls the tool and fills its arguments with anything.
    assert re.findall("^tool: weather ", told, re.M)
    facts = re.findall(
        r"(\d+) verifications of (\d+) drafts, (\d+) of them right: ([\d.]+) tokens", told
    )
    assert len(facts) == 3
    for verifications, drafts, right, length in facts:
        assert int(drafts) >= int(right) > 0
        # No verification gives the first token of an answer; the example prints two decimals.
        about = 1 + int(right) / int(verifications), 1 / int(verifications) + 0.0051
        assert float(length) == pytest.approx(about[0], abs=about[1])


def test_the_gauge_of_accept_lengths_says_what_the_answers_say(server: Server) -> None:
    """AIPerf and dashboards read it, SGLang's benchmark the server's own average."""
    server.flush_cache()
    bodies = [greedy(prompt.text, 40) for prompt in real_classifier_mix(12)]
    sums = counted(run_load(server.url, bodies, concurrency=4).answers)
    right = sums["c2t:correct_drafts_total"] / sums["c2t:verifications_total"]
    gauge = value(server.url, "sglang:spec_accept_length")
    assert gauge == pytest.approx(1 + right, rel=0.35)  # it averages the last steps only


def value(url: str, name: str) -> float:
    families = text_string_to_metric_families(requests.get(f"{url}/metrics", timeout=60).text)
    return next(s.value for family in families for s in family.samples if s.name == name)
