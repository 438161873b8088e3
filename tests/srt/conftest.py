"""Fixtures for tests of the server's side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_c2t.srt import data_parallel, recorder, tensor_parallel
from sglang_c2t.srt.hooks import reporting


@pytest.fixture(autouse=True)
def _recording_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's state is that of a process, which records once."""
    monkeypatch.setattr(recorder, "RECORDING", reporting.RecordingState())
    monkeypatch.setattr(recorder, "BEFORE_REPORT", [])


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """State before any server has started; tests may change it."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
    parallel = SimpleNamespace(attn_dp_size=1, tp_group=alone)
    for module in (data_parallel, tensor_parallel):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
