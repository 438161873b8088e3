"""SGLang's own endpoints under ``--c2t``: what would end a server is refused or mended."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    ConfigureLoggingReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_c2t.config import C2TConfig
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks import endpoints
from sglang_c2t.srt.hooks.endpoints import (
    check_logging,
    record_experts,
    survive_update,
    update_target,
    wait_for_another,
)


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "active", C2TConfig)


# -- /update_weights_from_disk -------------------------------------------------------------------


class Updater:
    """A runner's, as far as it is used: remembers what was loaded."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(model_path="old")
        self.loaded: list[str] = []

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        self.loaded.append(model_path)
        return True, ""


def manager(monkeypatch: pytest.MonkeyPatch, *, own_draft: bool = True) -> Any:
    """With the fields of SGLang's."""
    monkeypatch.setattr(compat, "has_own_draft", lambda _args: own_draft)
    fields = {field.name for field in dataclasses.fields(SchedulerWeightUpdaterManager)}
    assert {"tp_worker", "draft_worker"} <= fields
    runner = SimpleNamespace(weight_updater=Updater())
    worker = SimpleNamespace(model_runner=runner, server_args=None)
    return SimpleNamespace(tp_worker=worker, draft_worker="draft")


REQUEST = UpdateWeightFromDiskReqInput(model_path="new", load_format="auto")


@pytest.mark.parametrize("own_draft", [True, False])
def test_update_weights_leaves_a_separate_draft_alone(
    monkeypatch: pytest.MonkeyPatch, own_draft: bool
) -> None:
    """One whose layers are in the target's checkpoint is updated with it."""
    found = manager(monkeypatch, own_draft=own_draft)

    def original(at: Any, recv_req: Any) -> UpdateWeightFromDiskReqOutput:
        assert at.draft_worker == (None if own_draft else "draft")
        at.tp_worker.model_runner.weight_updater.model_config.model_path = recv_req.model_path
        return UpdateWeightFromDiskReqOutput(success=True, message="")

    assert update_target(original, found, REQUEST).success
    assert found.draft_worker == "draft"
    assert found.tp_worker.model_runner.weight_updater.model_config.model_path == "new"


def test_update_weights_that_fail_are_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = manager(monkeypatch)
    updater = found.tp_worker.model_runner.weight_updater

    def original(_at: Any, recv_req: Any) -> None:
        updater.model_config.model_path = recv_req.model_path
        raise AssertionError("shapes differ\nin two lines")

    output = update_target(original, found, REQUEST)
    assert not output.success
    assert output.message == (
        "the weights stay as they are: AssertionError: shapes differ in two lines"
    )
    assert updater.loaded == ["old"]
    assert updater.model_config.model_path == "old"
    assert found.draft_worker == "draft"


def test_update_weights_of_an_absent_checkpoint_keeps_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = manager(monkeypatch)
    updater = found.tp_worker.model_runner.weight_updater

    def original(_at: Any, recv_req: Any) -> UpdateWeightFromDiskReqOutput:
        updater.model_config.model_path = recv_req.model_path
        return UpdateWeightFromDiskReqOutput(success=False, message="no iterator")

    assert update_target(original, found, REQUEST).message == "no iterator"
    assert (updater.model_config.model_path, updater.loaded) == ("old", [])


@pytest.mark.parametrize(
    ("name", "fields"),
    [("Tensor", {"serialized_named_tensors": []}), ("IPC", {"zmq_handles": {}}),
     ("Distributed", {"names": [], "dtypes": [], "shapes": []})],
)  # fmt: skip
def test_update_weights_that_cannot_be_read_are_answered(name: str, fields: dict[str, Any]) -> None:
    request = getattr(io_struct, f"UpdateWeightsFrom{name}ReqInput")(**fields)

    def original(_manager: Any, _recv_req: Any) -> None:
        raise EOFError("Ran out of input")

    output = survive_update(original, None, request)
    assert type(output).__name__ == f"UpdateWeightsFrom{name}ReqOutput"
    assert (output.success, output.message) == (False, "EOFError: Ran out of input")


# -- /configure_logging, expert distribution -----------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [{"log_requests_level": 9}, {"log_requests_level": -1}, {"log_requests_format": "x"},
     {"log_level": "x"}, {"dump_requests_threshold": 0}],
)  # fmt: skip
def test_configure_logging_with_invalid_values_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(HTTPException) as refused:
        check_logging(lambda *_: pytest.fail("passed on"), None, ConfigureLoggingReq(**odd))
    assert refused.value.status_code == 400
    assert next(iter(odd)) in refused.value.detail


@pytest.mark.parametrize(
    "good",
    [{}, {"log_requests": True, "log_requests_level": 3, "log_requests_format": "json"},
     {"log_level": "debug"}, {"dump_requests_threshold": 5}],
)  # fmt: skip
def test_configure_logging_with_valid_values_is_passed_on(good: dict[str, Any]) -> None:
    passed = check_logging(lambda *args: args, "manager", ConfigureLoggingReq(**good))
    assert passed == ("manager", ConfigureLoggingReq(**good))


@pytest.mark.parametrize("mode", [None, "stat"])
def test_expert_distribution_without_a_recorder_is_refused(
    monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    arguments = SimpleNamespace(expert_distribution_recorder_mode=mode)
    monkeypatch.setattr(compat, "resolved", lambda args: args)

    async def original(_manager: Any) -> str:
        return "recording"

    asked = record_experts(original, SimpleNamespace(server_args=arguments))
    if mode is not None:
        assert asyncio.run(asked) == "recording"
        return
    with pytest.raises(HTTPException) as refused:
        asyncio.run(asked)
    assert refused.value.status_code == 400


@pytest.mark.parametrize("key", [None, "sesame"])
def test_endpoints_that_wait_need_an_admin_key(key: str | None) -> None:
    """By a request; ``Engine`` asks for itself."""
    found = SimpleNamespace(server_args=SimpleNamespace(admin_api_key=key))

    async def original(*asked: Any) -> tuple[Any, ...]:
        return asked

    assert asyncio.run(wait_for_another(original, found, "group")) == (found, "group", None)
    asked = wait_for_another(original, found, "group", "request")
    if key is not None:
        assert asyncio.run(asked) == (found, "group", "request")
        return
    with pytest.raises(HTTPException) as refused:
        asyncio.run(asked)
    assert refused.value.status_code == 400


def test_endpoints_without_c2t_are_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "active", lambda: None)
    odd = ConfigureLoggingReq(log_requests_level=9)
    assert check_logging(lambda *args: args, "manager", odd) == ("manager", odd)
    assert update_target(lambda *args: args, "manager", REQUEST) == ("manager", REQUEST)
