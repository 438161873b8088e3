"""Real servers on the CPU, shared by as many tests as possible: starting one takes a while."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from eval.lossless.seeded import FLAGS
from eval.prompts import demo_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import Answer, LoadResult, differing, greedy, run_load
from tests.e2e.server_policies import FAILS, MODES, Switchable
from tests.e2e.verify_recorder import VerifyRecorder

if TYPE_CHECKING:
    from tests.e2e.mixed_load import LosslessnessSuite

REPOSITORY = Path(__file__).parents[2]
CONCURRENCY = 16
#: Longest that a server may take to end after one of its processes was killed.
END_SECONDS = 30.0

# Lengths differ so that requests leave the batch at different steps and others join.
BODIES: list[dict[str, Any]] = [
    greedy(prompt.text, max_new_tokens=(7, 64, 24, 1, 48, 2)[i % 6])
    for i, prompt in enumerate(demo_mix(36))
] + [
    greedy("A", 40),  # one prompt token
    greedy(" ".join(prompt.text for prompt in demo_mix(12, seed=1)), 40),  # chunked, several pages
]


LOGPROB_BODIES: list[dict[str, Any]] = [
    {**greedy(prompt.text, 24), "return_logprob": True, "top_logprobs_num": 2}
    for prompt in demo_mix(8, seed=7)
]

_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}
_CONSTRAINTS: list[dict[str, str]] = [
    {"regex": "(yes|no|maybe)( and (yes|no|maybe)){2,5}"},
    {},
    {"json_schema": json.dumps(_SCHEMA)},
    {"regex": "[a-c]{3,12}"},
    {},
    {"regex": "[0-9]{2}(-[0-9]{4}){1,3}"},
]


def _constrained(number: int, text: str) -> dict[str, Any]:
    body = greedy(text, 40)
    body["sampling_params"].update(_CONSTRAINTS[number % len(_CONSTRAINTS)])
    return body


#: Constrained requests, and free ones among them.
CONSTRAINED_BODIES = [_constrained(i, prompt.text) for i, prompt in enumerate(demo_mix(12, seed=8))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts servers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)


def replace_text(path: Path, text: str) -> None:
    """Write a file that a running server may be reading: it sees the old text or the new."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def plain(logs: Path) -> Iterator[Server]:
    """Start the one server without speculation: it reads seeds, and sleeps while idle."""
    with running(Launch("reference", FLAGS), logs) as server:
        yield server


@pytest.fixture(scope="session")
def greedy_answers(plain: Server) -> LoadResult:
    """Answers to BODIES without speculation, one request at a time."""
    plain.flush_cache()
    return run_load(plain.url, BODIES, concurrency=1)


@pytest.fixture(scope="session")
def expected(greedy_answers: LoadResult) -> list[tuple[int, ...]]:
    """Greedy outputs of BODIES without speculation."""
    return greedy_answers.outputs


@pytest.fixture(scope="session")
def suite(plain: Server, greedy_answers: LoadResult) -> LosslessnessSuite:
    """Greedy and seeded requests for the demo target, and their answers without speculation."""
    from tests.e2e.mixed_load import PROMPTS, LosslessnessSuite

    return LosslessnessSuite.of(plain, BODIES, PROMPTS, greedy_answers)


@dataclass(frozen=True)
class GatedServer:
    """A ``--c2t`` server whose gate a test can switch while it runs."""

    server: Server
    algorithm: str
    control: Path

    def run(self, mode: str, bodies: list[dict[str, Any]] = BODIES,
            concurrency: int = CONCURRENCY) -> LoadResult:  # fmt: skip
        """Serve ``bodies`` under the gate ``mode``, from an empty cache."""
        assert mode in (*MODES, FAILS) or mode.startswith("{")
        replace_text(self.control, mode)
        self.server.flush_cache()
        return run_load(self.server.url, bodies, concurrency=concurrency)


def switchable_flags(
    control: Path, config_dir: Path, measured: Sequence[str] = ()
) -> tuple[str, ...]:
    """``--c2t`` with the test policy; its options travel in a config file."""
    options = {"control": str(control), "measured": list(measured)}
    return own_policy_flags(Switchable, control, config_dir, options)


def own_policy_flags(
    policy: type, control: Path, config_dir: Path, options: dict[str, Any], **settings: Any
) -> tuple[str, ...]:
    """``--c2t`` with a policy class of the tests and further settings."""
    control.write_text("c2t")
    config = config_dir / f"{control.name}.json"
    name = f"{policy.__module__}:{policy.__name__}"
    config.write_text(json.dumps({"policy": name, "policy_options": options, **settings}))
    return ("--c2t", "--c2t-config", str(config))


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def gated(request: pytest.FixtureRequest, logs: Path) -> Iterator[GatedServer]:
    """One gated server per draft kind."""
    algorithm: str = request.param
    control = logs / f"gate-{algorithm}"
    flags = (*speculative_flags(algorithm), *FLAGS, *switchable_flags(control, logs))
    launch = Launch(f"gated-{algorithm}", flags, env={"PYTHONPATH": str(REPOSITORY)})
    with running(launch, logs) as server:
        yield GatedServer(server, algorithm, control)


TREE = {"num_steps": 5, "topk": 4, "num_draft_tokens": 28}
"""Trees large enough for the static tree of EAGLE-1, which has 26 nodes."""


def tree_launch(
    name: str, logs: Path, *flags: str, algorithm: str = "EAGLE3",
    env: dict[str, str] | None = None,
) -> tuple[Launch, Path]:  # fmt: skip
    """A ``--c2t`` server whose tree policy a test can switch, and its control file.

    Tests that make the folder ``<control>.notes`` find notes there, see :class:`VerifyRecorder`.
    """
    control = logs / f"tree-{name}"
    options = {"control": str(control), "notes": str(notes_of(control))}
    every = (
        *speculative_flags(algorithm, **TREE),
        *own_policy_flags(VerifyRecorder, control, logs, options),
        *flags,
    )
    environment = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
    return Launch(f"tree-{name}", every, env=environment), control


def notes_of(control: Path) -> Path:
    """The folder in which the server of this control file leaves its notes."""
    return control.with_suffix(".notes")


def in_force(told: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of ``/c2t`` without the costs, which a server keeps measuring."""
    serving = [{k: v for k, v in one.items() if k != "row_ms"} for one in told["serving"]]
    return {**told, "serving": serving}


def settings_of(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Get the settings in force from ``/c2t``."""
    return in_force(requests.get(f"{url}/c2t", headers=headers, timeout=60).json())


def series(url: str, **labels: str) -> dict[str, float]:
    """Value of each series of ours, and of the accept rate's gauge, by name and the one label that
    is ours; of those that have these ``labels``, and no two by the same name.
    """
    told: dict[str, float] = {}
    text = requests.get(f"{url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ours = sample.name.startswith("c2t:") or sample.name == "sglang:spec_accept_rate"
            if ours and labels.items() <= sample.labels.items():
                name = sample.name + "".join(sample.labels.get(own, "") for own in ("reason", "le"))
                assert name not in told, f"{name} is there twice"
                told[name] = sample.value
    return told


def counted(answers: list[Answer]) -> dict[str, int]:
    """Sum the answers' `meta_info` by the series that counts it."""
    metas = [answer.meta_info for answer in answers if verified(answer)]
    sums = {
        "c2t:verifications_total": sum(meta["spec_verify_ct"] for meta in metas),
        "c2t:proposed_drafts_total": sum(meta["spec_num_proposed_drafts"] for meta in metas),
        "c2t:correct_drafts_total": sum(meta["spec_num_correct_drafts"] for meta in metas),
    }
    at_most: dict[int, int] = {}
    for meta in metas:
        for rows, times in enumerate(meta["spec_cap_lens_histogram"]):
            at_most[rows - 1] = at_most.get(rows - 1, 0) + times
    for length in sorted(at_most):
        if 0 <= length <= 16:
            below = sum(times for other, times in at_most.items() if other <= length)
            sums[f"c2t:proposed_length_bucket{float(length)}"] = below
    sums["c2t:proposed_length_count"] = sums["c2t:verifications_total"]
    sums["c2t:proposed_length_sum"] = sums["c2t:proposed_drafts_total"]
    return sums


def assert_counted(
    url: str, before: dict[str, float], answers: list[Answer], **labels: str
) -> None:
    """The series that have these ``labels`` have grown by these answers, and by no other."""
    after, expected = series(url, **labels), counted(answers)
    assert expected["c2t:proposed_drafts_total"] > 0
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected


def verified(answer: Answer) -> bool:
    """Whether the request lived long enough to be verified."""
    return "spec_verify_ct" in answer.meta_info


def run_beside_aborts(
    server: Server, bodies: list[dict[str, Any]] = BODIES, concurrency: int = CONCURRENCY,
    tokens: int = 400,
) -> LoadResult:  # fmt: skip
    """Serve ``bodies`` while other requests, for so many ``tokens``, come and vanish."""
    server.flush_cache()  # before the others come: a busy server refuses
    stop = threading.Event()
    victims = threading.Thread(target=abort_in_a_loop, args=(server.url, stop, tokens))
    victims.start()
    try:
        return run_load(server.url, bodies, concurrency=concurrency)
    finally:
        stop.set()
        victims.join(timeout=60)


def assert_same_logprobs(got: LoadResult, wanted: LoadResult, rounding: float = 1e-4) -> None:
    """The same tokens, and log-probabilities but for rounding."""
    assert differing(got.outputs, wanted.outputs) == []
    for ours, theirs in zip(got.answers, wanted.answers, strict=True):
        for name in ("output_token_logprobs", "output_top_logprobs"):
            pairs = zip(_flat(ours.meta_info[name]), _flat(theirs.meta_info[name]), strict=True)
            for (logprob, token), (other, same_token) in pairs:
                assert token == same_token
                assert logprob == pytest.approx(other, abs=rounding)


def _flat(logprobs: list[Any]) -> list[tuple[float, int]]:
    """(log-probability, token) of every entry, whether listed per position or not."""
    if logprobs and isinstance(logprobs[0][0], list):
        return [pair for position in logprobs for pair in _flat(position)]
    return [(logprob, token) for logprob, token, _ in logprobs]


def abort_in_a_loop(url: str, stop: threading.Event, tokens: int = 400) -> None:
    """Start requests for so many ``tokens`` and end each after a moment; at most 200.

    Every other one is aborted by name, the rest lose their client.
    """
    text = demo_mix(1, seed=9)[0].text
    for number in range(200):
        if stop.is_set():
            return
        rid = f"victim-{number}"
        body: dict[str, Any] = {**greedy(text, tokens), "rid": rid}
        body["sampling_params"]["ignore_eos"] = True
        patience = 60.0 if number % 2 else 0.05
        sender = threading.Thread(target=_post_patiently, args=(url, body, patience))
        sender.start()
        time.sleep(0.05)
        if number % 2:
            requests.post(f"{url}/abort_request", json={"rid": rid}, timeout=60)
        sender.join(timeout=60)


def _post_patiently(url: str, body: dict[str, Any], seconds: float) -> None:
    with contextlib.suppress(requests.Timeout):
        requests.post(f"{url}/generate", json=body, timeout=seconds)


def verified_rows_reported(answers: list[Answer]) -> int:
    """Rows the target verified for these requests, from their own histograms."""
    return sum(
        length * count
        for answer in answers
        for length, count in enumerate(answer.meta_info.get("spec_cap_lens_histogram", []))
    )
