"""Live servers attacked as an outsider, a client or a web page would: over HTTP, and only refused.

One server has no keys, the other both. What is tried must be answered with 4xx, run no code, tell
of no file, and leave a server that answers as before. Then hundreds of malformed requests.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from eval.server import DRAFTS, TARGET, Launch, Server, running, speculative_flags
from eval.soak.malformed import FATAL, HANGING, Malformed
from sglang_c2t.offline.client import greedy
from tests.e2e.conftest import REPOSITORY, settings_of
from tests.e2e.mutants import mutants, request_fields

API = "for-clients"
REST = "and-admins"
ADMIN = f"{API}-{REST}"  # hiding the shorter one by its text would show the rest
#: One token's, of the demo target.
EMBEDDING = json.dumps([0.5] * 256).encode()
JSON = {"Content-Type": "application/json"}
SECRET = "nobody may read this"

CANARY = """
from pathlib import Path
Path({sung!r}).write_text("imported")
class Policy:
    name, needs = "canary", frozenset()
    def keep(self, layer): return layer.alive
"""


@dataclass(frozen=True)
class Attacked:
    """A server, what it was started with, and where code that ran would leave a trace."""

    server: Server
    keys: bool
    folder: Path

    @property
    def client(self) -> dict[str, str]:
        """Headers of every client."""
        return {**JSON, **({"Authorization": f"Bearer {API}"} if self.keys else {})}

    @property
    def owner(self) -> dict[str, str]:
        """Headers of the sender that may change the server."""
        return {**JSON, **({"Authorization": f"Bearer {ADMIN}"} if self.keys else {})}

    def post(self, path: str, body: Any, headers: dict[str, str]) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(f"{self.server.url}{path}", data=data, headers=headers, timeout=60)

    def outputs(self) -> list[Any]:
        """Greedy answers, which no attack may change; raises if the server is gone."""
        bodies = [greedy(text, 12) for text in ("Question: What is 7 plus 5?", "A", "Once upon")]
        return [self._answered(body)["output_ids"] for body in bodies]

    def _answered(self, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post("/generate", body, self.client)
        response.raise_for_status()
        told: dict[str, Any] = response.json()
        return told

    def settings(self) -> dict[str, Any]:
        return settings_of(self.server.url, self.client)

    def sung(self) -> list[str]:
        """Traces of code that ran."""
        return [path.name for path in self.folder.glob("sung-*")]


#: `tests/srt/hooks/test_http_guard.py` has all combinations, without a server.
COMBINATIONS = {
    "no key, loopback": ("--c2t-loopback-control",),
    "both keys": ("--api-key", API, "--admin-api-key", ADMIN),
}


@pytest.fixture(scope="module", params=COMBINATIONS)
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "canary.py").write_text(CANARY.format(sung=str(folder / "sung-import")))
    (folder / "secret.safetensors").write_text(SECRET)
    (folder / "secret.json").write_text(json.dumps({"format": SECRET}))
    (folder / "classifiers").mkdir()
    keys = COMBINATIONS[request.param]
    flags = (*speculative_flags("EAGLE3"), "--context-length", "256", *keys,
             "--c2t", "--c2t-classifier-dir", str(folder / "classifiers"))  # fmt: skip
    env = {"PYTHONPATH": f"{REPOSITORY}:{folder}"}
    launch = Launch(request.param.replace(" ", "-"), flags, env=env, control=False)
    with running(launch, folder) as server:
        yield Attacked(server, API in keys, folder)


def bodies_of_attacks(folder: Path) -> list[Any]:
    """One body of each kind; `tests/srt/hooks` has the others, without a server."""
    secret = str(folder / "secret.safetensors")
    return [
        {"policy": "os:system", "policy_options": {"command": f"touch {folder}/sung-system"}},
        {"policy": "canary:Policy"},
        {"policy": "canary:Policy-eagle2"},
        {"policy": "\ud800"},
        {"classifier": secret},
        {"classifier": "/proc/self/environ"},
        {"policy": "dyjoint", "policy_options": {"beta": 7}},
        {"policy": "c2t", "policy_options": {"classifier": secret}},
        {"record": str(folder / "sung-record")},
        {"loopback_control": True},
        b"[" * 1_000_000,
        b'{"beta": NaN}',
        b"\xff\xfe",
    ]


def test_nothing_that_is_posted_runs_code_or_opens_files(attacked: Attacked) -> None:
    """By a client that may change the server."""
    before, in_force = attacked.outputs(), attacked.settings()
    for body in bodies_of_attacks(attacked.folder):
        response = attacked.post("/c2t", body, attacked.owner)
        assert 400 <= response.status_code < 500, (str(body)[:80], response.text)
        assert SECRET not in response.text
        assert "root:" not in response.text
        assert len(response.text) < 1000
    assert attacked.sung() == []
    assert attacked.settings() == in_force
    assert attacked.outputs() == before


def test_only_who_may_changes_the_server(attacked: Attacked) -> None:
    """The one who may, last: so that the others were refused and not only late."""
    change, in_force = {"policy": "fixed"}, attacked.settings()
    for token in (None, "wrong", API, f"{ADMIN}x", "") if attacked.keys else ():
        headers = {**JSON} if token is None else {**JSON, "Authorization": f"Bearer {token}"}
        status = attacked.post("/c2t", change, headers).status_code
        assert status in (401, 403), token
    assert attacked.settings() == in_force
    assert attacked.post("/c2t", change, attacked.owner).status_code == 200
    assert attacked.settings()["policy"] == "fixed"
    assert attacked.post("/c2t", {"policy": "c2t"}, attacked.owner).status_code == 200


def test_sglangs_own_endpoint_does_not_change_the_policy(attacked: Attacked) -> None:
    """It asks for other keys than we do, so it must not lead to the same place."""
    in_force = attacked.settings()
    command = {"policy": "os:system", "policy_options": {"command": "true"}}
    names = ["c2t {}", 'c2t {"policy": "fixed"}', "c2t " + json.dumps(command), "c2t " + "[" * 5000,
             "c2t", "c2t \0"]  # fmt: skip
    for name in names:
        for sender in (attacked.owner, attacked.client):
            response = attacked.post("/set_internal_state", {"server_args": {name: 1}}, sender)
            assert 400 <= response.status_code < 500, response.text
    assert attacked.settings() == in_force
    attacked.outputs()


def test_no_key_is_told_to_anybody(attacked: Attacked) -> None:
    paths = "/server_info", "/get_server_info", "/model_info", "/v1/models", "/v1/loads", "/c2t"
    for path in paths:
        response = requests.get(f"{attacked.server.url}{path}", headers=attacked.client, timeout=60)
        assert response.ok, path
        assert REST not in response.text, path
        assert API not in response.text, path
    assert str(attacked.folder) not in response.text


def test_a_slow_client_keeps_nobody_waiting(attacked: Attacked) -> None:
    host, port = attacked.server.url.removeprefix("http://").split(":")
    lines = [f"{name}: {value}" for name, value in attacked.owner.items()]
    head = "\r\n".join(["POST /c2t HTTP/1.1", "Host: localhost", "Content-Length: 30", *lines])
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(f"{head}\r\n\r\n{{".encode())
        time.sleep(0.3)
        started = time.monotonic()
        assert attacked.post("/c2t", {"policy": "c2t"}, attacked.owner).status_code == 200
        assert time.monotonic() - started < 8
        assert b" 408 " in slow.recv(100)


# -- malformed requests -----------------------------------------------------------------------

#: Mutants of requests, to chains and to trees: each field of SGLang's requests twice.
NUM_MUTANTS, NUM_TO_TREES = 500, 120

TREES = speculative_flags("EAGLE", num_steps=4, topk=4, num_draft_tokens=16)


def answered(attacked: Attacked, case: Malformed) -> int:
    """The status; 0 for no answer."""
    headers: dict[str, Any] = {
        **attacked.owner,
        **{name: value.encode("latin-1") for name, value in case.headers.items()},
    }
    try:
        return requests.request(
            case.method, f"{attacked.server.url}{case.path}", data=case.raw, headers=headers,
            timeout=60,
        ).status_code  # fmt: skip
    except requests.RequestException:
        return 0


def refused_or_served(attacked: Attacked, made: Sequence[Malformed]) -> list[int]:
    """The status of each, none of them the server's fault; it then answers as before."""
    before = attacked.outputs()
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda case: answered(attacked, case), made))
    failed = [
        (case.name, case.raw[:300], case.headers, status)
        for case, status in zip(made, statuses, strict=True)
        if not (200 <= status < 300 or 400 <= status < 500)
    ]
    assert failed == []
    attacked.post("/c2t", {"policy": "c2t"}, JSON)
    assert attacked.outputs() == before
    assert attacked.sung() == []
    return statuses


def test_malformed_requests_are_refused_or_served_and_never_fail(attacked: Attacked) -> None:
    """On the one server that lets everybody in everywhere."""
    if attacked.keys:
        return
    statuses = refused_or_served(
        attacked, [*mutants(request_fields(), NUM_MUTANTS), *FATAL, *HANGING]
    )
    assert not any(200 <= status < 300 for status in statuses[NUM_MUTANTS:]), "these end servers"
    tally = Counter(status // 100 for status in statuses[:NUM_MUTANTS])
    assert tally[4] > NUM_MUTANTS / 2, tally
    assert tally[2] > NUM_MUTANTS / 20, tally


NOWHERE = {"master_address": "127.0.0.1", "ports": "1", "world_size": 2, "group_name": "x"}

#: SGLang's own endpoints, with what ends or spoils a stock server, or might.
ENDPOINTS: tuple[tuple[str, Any, int], ...] = (
    ("/update_weights_from_disk", {"model_path": str(TARGET)}, 200),
    ("/update_weights_from_disk", {"model_path": str(DRAFTS["STANDALONE"])}, 400),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400),
    ("/begin_weight_update", {"selector": "nothing"}, 400),
    ("/begin_weight_update", {}, 200),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["eA=="]}, 400),
    (
        "/update_weights_from_distributed",
        {"names": ["lm_head.weight"], "dtypes": ["x"], "shapes": [[1]]},
        400,
    ),
    ("/end_weight_update", {}, 200),
    ("/configure_logging", {"log_requests": True, "log_requests_level": 9}, 400),
    ("/configure_logging", {"log_level": "nothing"}, 400),
    ("/start_expert_distribution_record", {}, 400),
    ("/stop_expert_distribution_record", {}, 400),
    ("/dump_expert_distribution_record", {}, 400),
    ("/init_weights_update_group", {**NOWHERE, "master_port": 1, "rank_offset": 0}, 400),
    ("/init_weights_send_group_for_remote_instance", {**NOWHERE, "group_rank": 0}, 400),
    ("/send_weights_to_remote_instance", NOWHERE, 400),
)


def test_no_endpoint_of_sglang_ends_the_server(attacked: Attacked) -> None:
    """Where anybody may call them, as there are no keys."""
    if attacked.keys:
        return
    before = attacked.outputs()
    for path, body, status in ENDPOINTS:
        answer = attacked.post(path, body, JSON)
        assert answer.status_code == status, (path, body, answer.text)
        assert attacked.outputs() == before, (path, body)


def test_a_server_of_trees_survives_malformed_requests_too(tmp_path: Path) -> None:
    """And prompts that are embeddings, which SGLang takes where it caches no prefixes."""
    flags = (*TREES, "--c2t", "--context-length", "256", "--disable-radix-cache")
    embeddings = Malformed("embeddings", raw=b'{"input_embeds": ' + b"[" + EMBEDDING + b"]}")
    with running(Launch("attacked-trees", flags), tmp_path) as server:
        attacked = Attacked(server, keys=False, folder=tmp_path)
        made = [*mutants(request_fields(), NUM_TO_TREES, seed=1), *FATAL]
        statuses = refused_or_served(attacked, [*made, embeddings])
        assert statuses[-1] == 400
