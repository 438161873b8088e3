"""Files that no user should name: each is refused in one line, or read as what it is, at once.

Per kind of file a list drawn from valid ones, spoilt in every place, and files that are none.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from sglang_c2t.checks import ConfigError
from sglang_c2t.classifier.checkpoint import SHIPPED, load_classifier
from sglang_c2t.classifier.pair import fingerprint
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.files import write_whole
from sglang_c2t.offline.prompts import read_prompts
from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import BatchView, StepKind, StepPlan, StepRecord, StepTimes
from sglang_c2t.plan.survival import Survival
from sglang_c2t.policies import check_policy
from sglang_c2t.srt.draft.state_file import StateFile
from tests.recordings import random_chains, write

#: Seconds that a file may take.
PATIENCE = 10

NUMBERS = (1e308, -1, 0, 5e-324, 1e-300, 3.5e38, 10**9, 2**31, 2**63, 2**64, 10**400, True, 0.5)
OTHERS = (None, "x", "", "\0", "\ud800", "9" * 5000, [], [None], [[]] * 1000, {}, {"x": 1})
RAW = ("NaN", "Infinity", "1e999", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900)


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise AssertionError(f"not done within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error), error
    assert len(str(error)) < 2000, str(error)[:200]


# -- files that are none -----------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name may not be long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def raw_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo, "socket": _socket, "directory": Path.mkdir, "a terabyte of nothing": _sparse,
    **{f"link to {target}": lambda path, to=target: path.symlink_to(to) for target in (
        "/dev/zero", "/dev/full", "/dev/null", "/dev/urandom", "/proc/self/mem", "/proc/kmsg",
        "nowhere", ".", "/proc/self/fd/0")},
    "link to itself": lambda path: path.symlink_to(path),
    "nothing in it": raw_bytes(b""), "NULs": raw_bytes(b"\0" * 4096),
    "not UTF-8": raw_bytes(b"\xff\xfe{"),
    "a BOM": raw_bytes(b"\xef\xbb\xbf{}"), "brackets": raw_bytes(b"[" * 1_000_000),
    "digits": raw_bytes(b"9" * 1_000_000), "a text": raw_bytes(b'"x"'), "a list": raw_bytes(b"[]"),
}  # fmt: skip


# -- JSON and safetensors, spoilt ---------------------------------------------------------------


def spoilt(valid: Any, count: int, seed: int = 0) -> Iterator[bytes]:
    """The valid value with one place made odd, or gone, or twice; the same for the same seed."""

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        """Each container in the value, with each of its keys."""
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], (dict, list)) and value[key]:
                yield from places(value[key])

    dice = random.Random(seed)
    for number in range(count):
        value = copy.deepcopy(valid)
        holder, key = dice.choice(list(places(value)))
        if number % 5 == 4:
            raw = dice.choice(RAW)
            holder[key] = "HERE"
            yield json.dumps(value).replace('"HERE"', raw).encode()
            continue
        if number % 7 == 6 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = copy.deepcopy(dice.choice(NUMBERS if number % 3 else OTHERS))
        yield json.dumps(value).encode()


def safetensors(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def spoilt_safetensors(data: bytes, count: int) -> Iterator[bytes]:
    """Headers spoilt as JSON, bodies cut, and tensors of odd values."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    for length in (0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1):
        yield safetensors(header, body, length=length)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for entries in (1000, 100_000):
        yield safetensors({**header, **{f"x{i}": empty for i in range(entries)}}, body)
    for cut in (1, 7, len(body) // 2, len(body)):
        yield safetensors(header, body[:-cut])
    yield safetensors(header, body + b"\0" * 100)
    for text in spoilt(header, count):
        yield safetensors(text, body)


ODD_VALUES = (3e38, -3e38, 1e30, float("nan"), float("inf"), -float("inf"), 1e-45, 0.0)


MODELS = {"target": "a", "policy": "auto"}


# -- state ---------------------------------------------------------------------------------------


def record(plan: StepPlan, batch: int, outcome: tuple[np.ndarray, ...]) -> StepRecord:
    times = StepTimes(plan.row_budget, verify_ms=5.0, draft_ms=2.0, step_ms=8.0)
    return StepRecord(plan, batch, outcome=outcome, times=times)


def planner_at_work() -> Planner:
    planner = Planner(3, Survival(3))
    for number in range(40):
        outcome = np.array([[0.9, 0.5, 0.2]]), np.array([3]), np.array([number % 4])
        planner.learn(record(StepPlan(StepKind.PLANNED, 3, 1, 4 + number % 3), 2, outcome))
    return planner


def states() -> list[bytes]:
    content = {"version": 2, "learnt_on": MODELS, "planner": planner_at_work().state()}
    planned = {**content, "planner": {**content["planner"]}}
    cost, counts = planned["planner"]["cost"], planned["planner"]["survival"]["counts"]
    named = []
    for number in NUMBERS:
        for changed in (
            {"cost": {**cost, "verify": {"4": number, "8": 1.0}}},
            {"cost": {**cost, "layer": {"4": number}, "rest": {"2": number}}},
            {"survival": {"counts": [*(np.array(counts) * 0 + 1.0).tolist()[:-1], number]}},
            {"survival": {"counts": [[[number] * 24] * 2] * 3}},
            {"cold_start_budget": number},
        ):
            named.append(json.dumps({**content, "planner": {**content["planner"], **changed}}))
    sizes = {str(2**n): 1.0 for n in range(0, 80, 7)}
    many = {str(n): 1.0 for n in range(1, 40_000)}
    for verify in (sizes, many, {"1" * 5000: 1.0}, {"-4": 1.0}, {"4": 1.0, " 4": 2.0}):
        changed = {**content["planner"], "cost": {**cost, "verify": verify}}
        named.append(json.dumps({**content, "planner": changed}))
    return [text.encode() for text in named] + list(spoilt(content, 80))


def test_no_state_ends_a_planner_or_keeps_it_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [*SPECIAL.values(), *map(raw_bytes, states())]
    assert len(made) >= 60
    refused = restored = cold = 0
    for number, make in enumerate(made):
        path = tmp_path / f"{number}.json"
        make(path)
        caplog.clear()
        planner = Planner(3, Survival(3))
        with in_time(), caplog.at_level(logging.INFO), np.errstate(all="raise", under="ignore"):
            try:
                kept = StateFile(path, planner, MODELS)
            except ConfigError as error:
                one_line(error)
                refused += 1
                continue
            assert len(caplog.messages) == 1
            assert "\n" not in caplog.messages[0]
            restored += "goes on from" in caplog.messages[0]
            cold += "cold" in caplog.messages[0]
            plan_a_while(planner)
            kept.save()
        assert path.is_symlink() or path.is_file()
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert refused >= 10
    assert restored >= 10
    assert cold >= 60


def plan_a_while(planner: Planner) -> None:
    """Steps of small and large batches, whose plans are finite."""
    rng = np.random.default_rng(0)
    for batch in (1, 2, 4, 64) * 3:
        tiers = list(range(batch, batch * 4 + 1))
        chains = np.cumprod(rng.uniform(0.3, 1.0, (batch, 3)), axis=1)
        plan = planner.plan(BatchView(batch, tiers, range(1, 4)))
        assert batch <= plan.row_budget <= batch * 4
        assert plan.expected_ms is None or 0 < plan.expected_ms < float("inf")
        layers = plan.num_layers
        outcome = chains[:, :layers], np.full(batch, layers), np.minimum(1, np.full(batch, layers))
        planner.learn(record(plan, batch, () if plan.kind is StepKind.UNIFORM else outcome))
    planner.catch_up()


# -- settings ------------------------------------------------------------------------------------

SETTINGS = {
    "policy": "c2t", "beta": 0.5, "classifier": "default", "verify": "auto", "record_share": 0.5,
    "max_verify_rows": 8, "policy_options": {"layer_limit": 3}, "record_limit_mb": 10,
    "state": "s.json",
}  # fmt: skip


def test_no_file_of_settings_ends_in_anything_but_settings_or_a_sentence(tmp_path: Path) -> None:
    made = [*SPECIAL.values(), *map(raw_bytes, spoilt(SETTINGS, 120))]
    assert len(made) >= 60
    taken = 0
    for number, make in enumerate(made):
        path = tmp_path / f"{number}.json"
        make(path)
        with in_time():
            try:
                config = C2TConfig.from_file(path)
                check_policy(config)
            except ConfigError as error:
                one_line(error)
            else:
                assert C2TConfig.from_json(config.to_json(), source="itself") == config
                taken += 1
    assert 0 < taken < len(made) / 2


# -- classifiers ---------------------------------------------------------------------------------


def layer(size: int = 64) -> DraftLayer:
    """Measurements from one end to the other."""
    shares = torch.linspace(0, 1, size)
    return DraftLayer(
        depth=torch.arange(size).float() + 1, prob=shares, joint=shares.flip(0),
        entropy=shares * 12, alive=torch.ones(size, dtype=torch.bool),
        measured=dict.fromkeys(("margin", "rank", "parent_place", "entropy_top1000"), shares),
    )  # fmt: skip


def judged(path: Path) -> bool:
    """Whether the classifier is read; its confidences are then ones."""
    try:
        classifier = load_classifier(path)
    except ConfigError as error:
        one_line(error)
        return False
    if classifier.features.needs <= set(layer().measured):
        confidence = classifier.confidence(layer())
        assert bool(((confidence >= 0) & (confidence <= 1)).all())
    return True


def test_no_card_of_a_classifier_ends_in_anything_but_a_classifier_or_a_sentence(
    tmp_path: Path,
) -> None:
    weights = (SHIPPED / "c2t.safetensors").read_bytes()
    card = json.loads((SHIPPED / "c2t.json").read_text())
    sizes = [{**card, "sizes": s} for s in (
        [10**9], [2**63], [10**400], 1e9, [1e9], [True], [48] * 100_000, [[48]], [-1], [0], [],
        [10**9, 10**9], None, "48", {"0": 48})]  # fmt: skip
    names = [{**card, "features": {**card["features"], "names": n}} for n in (
        ["joint"] * 100_000, ["entropy_top" + "9" * 5000], ["entropy_top0"], ["hidden"], [None],
        ["topk_prob"], [["joint"]], {})]  # fmt: skip
    bodies = [json.dumps(odd).encode() for odd in (*sizes, *names)]
    made = [*SPECIAL.values(), *map(raw_bytes, [*bodies, *spoilt(card, 80)])]
    assert len(made) >= 60
    read = 0
    for number, make in enumerate(made):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(weights)
        make(path.with_suffix(".json"))
        with in_time():
            read += judged(path)
    assert 0 < read < len(made) / 2  # what a card says of its training may be anything


@pytest.mark.parametrize("shipped", ["c2t", "c2t-plus"])
def test_no_weights_of_a_classifier_end_in_anything_but_a_classifier_or_a_sentence(
    tmp_path: Path, shipped: str
) -> None:
    source = SHIPPED / f"{shipped}.safetensors"
    tensors = load_file(source)
    bodies = list(spoilt_safetensors(source.read_bytes(), 30))
    for name, tensor in tensors.items():
        bodies += [save({**tensors, name: torch.full_like(tensor, odd)}) for odd in ODD_VALUES]
        bodies += [save({**tensors, name: odd}) for odd in (
            tensor.double(), tensor.half(), tensor.to(torch.int64), tensor[:0], tensor.flatten()[0],
            tensor[None], torch.zeros(1 << 20))]  # fmt: skip
        bodies.append(save({other: t for other, t in tensors.items() if other != name}))
    made = [*SPECIAL.values(), *map(raw_bytes, bodies)]
    assert len(made) >= 60
    read = 0
    for number, make in enumerate(made):
        path = tmp_path / f"{number}.safetensors"
        make(path)
        path.with_suffix(".json").write_bytes(source.with_suffix(".json").read_bytes())
        with in_time():
            read += judged(path)
    assert 0 < read < len(made) / 2


@pytest.mark.parametrize("name", ["/dev/zero", ".", "/", "", "x" * 5000, "a\0b", "/dev/stdin"])
def test_a_classifier_of_an_odd_name_is_a_sentence(name: str) -> None:
    with in_time(), pytest.raises(ConfigError) as error:
        load_classifier(name)
    one_line(error.value)


def test_fingerprint_of_a_large_model_is_fast(tmp_path: Path) -> None:
    """30 files of 5 GB, which hold nothing, so that they take no room."""
    for number in range(30):
        with (tmp_path / f"model-{number:05d}-of-00030.safetensors").open("wb") as file:
            file.truncate(5 << 30)
    with in_time():
        assert fingerprint(tmp_path) is not None


@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_fingerprint_of_a_special_file_is_none(tmp_path: Path, name: str) -> None:
    SPECIAL[name](tmp_path / "model.safetensors")
    with in_time():
        found = fingerprint(tmp_path)
    assert (found is None) == (not (tmp_path / "model.safetensors").is_file())
    assert fingerprint(tmp_path / "absent") is None


# -- recordings and prompts ----------------------------------------------------------------------


def test_no_shard_of_a_recording_ends_in_anything_but_a_recording_or_a_sentence(
    tmp_path: Path,
) -> None:
    write(tmp_path / "valid", random_chains(2, roots=3, depth=3), extra=("hidden",))
    (source,) = (tmp_path / "valid").glob("*.safetensors")
    data = source.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    tensors = load_file(source)
    bodies = list(spoilt_safetensors(data, 60))
    for name, tensor in tensors.items():
        for odd in (tensor[:-1], tensor[None], tensor.double(), tensor * 0 - 1, tensor * 0 + 127):
            bodies.append(save({**tensors, name: odd.contiguous()}, metadata))
    for name, text in metadata.items():
        for raw in ("", "x", "[]", "{}", "null", "9" * 5000, "[" * 5000, '{"topk": "x"}',
                    '{"topk": -3}', "[1]", text[:-1]):  # fmt: skip
            bodies.append(save(tensors, {**metadata, name: raw}))
    made = [*SPECIAL.values(), *map(raw_bytes, bodies)]
    assert len(made) >= 60
    read = 0
    for number, make in enumerate(made):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "shard-1-00000.safetensors")
        with in_time():
            read += recording_read(folder)
    assert 0 < read < len(made) / 3
    for number, make in enumerate(SPECIAL.values()):
        folder = tmp_path / f"names-{number}"
        write(folder, random_chains(1, roots=1, depth=2))
        make(folder / "names-0.json")
        with in_time():
            recording_read(folder)


def recording_read(folder: Path) -> bool:
    try:
        recording = read_recording(folder)
    except ConfigError as error:
        one_line(error)
        return False
    recording.parent_rows()
    recording.layer()
    recording.groups()
    assert recording.topk >= 1
    return True


def test_no_file_of_prompts_ends_in_anything_but_prompts_or_a_sentence(tmp_path: Path) -> None:
    rows = [{"prompt": "A"}, {"messages": [{"role": "user", "content": "A"}]}, {"turns": ["A"]}]
    for number, make in enumerate([*SPECIAL.values(), *map(raw_bytes, spoilt(rows[1], 60))]):
        path = tmp_path / f"{number}.jsonl"
        make(path)
        with in_time():
            try:
                read_prompts(path)
            except ConfigError as error:
                one_line(error)


# -- what is written -----------------------------------------------------------------------------


def test_a_link_is_written_through_and_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "there" / "state.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # to what is not there yet, and to what is
        StateFile(link, planner_at_work(), MODELS)
        assert link.is_symlink()
        assert json.loads(target.read_text())["version"] == 2
    assert [path.name for path in tmp_path.iterdir() if path.name != "there"] == ["link.json"]


@pytest.mark.parametrize("name", ["FIFO", "socket", "directory", "link to /dev/null"])
def test_nothing_but_a_regular_file_is_ever_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "here"
    SPECIAL[name](path)
    before = os.lstat(path)
    with in_time(), pytest.raises(OSError, match="not a regular file"):
        write_whole({path: lambda tmp: tmp.write_text("x")})
    assert os.lstat(path).st_ino == before.st_ino
    assert [found.name for found in tmp_path.iterdir()] == ["here"]
