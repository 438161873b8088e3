"""Our workers, as far as that takes no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_c2t import config as settings
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.policies import named, policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt.worker import C2TEagleWorker

CHAIN = TreeShape(1, 5, 6)


@pytest.mark.parametrize(
    ("typed", "packed", "serves"),
    [
        (C2TConfig(), True, "auto"),
        (C2TConfig(), False, "c2t"),
        (C2TConfig("dyjoint"), False, "dyjoint"),
    ],
)
def test_the_gate_follows_the_policy_once_it_is_known_what_can_be_packed(
    monkeypatch: pytest.MonkeyPatch, typed: C2TConfig, packed: bool, serves: str
) -> None:
    """Where a backend cannot pack rows, nothing can be planned, and nobody asked for it."""
    monkeypatch.setenv(settings.CONFIG_ENV, typed.to_json())
    worker = object.__new__(C2TEagleWorker)
    at_first = named(typed, packed=True)
    gate = ChainGate(policy_for(at_first, CHAIN), num_slots=4, device="cpu", exploration=None)
    worker._typed, worker._start, worker._config = typed, at_first, at_first
    worker._draft_worker = SimpleNamespace(gate=gate, packed=packed)
    monkeypatch.setattr(C2TEagleWorker, "_shape", CHAIN)
    worker._settle_policy()
    assert gate.served.policy.name == serves
    assert worker._config.policy == worker._start.policy == serves
    told = settings.active()
    assert told is not None
    assert told.policy == serves
