"""What tests of the server's side share."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a state of its own; importing it loads SGLang."""
    from sglang_c2t.srt import recorder
    from sglang_c2t.srt.hooks import reporting

    monkeypatch.setattr(recorder, "RECORDING", reporting.RecordingState())
    monkeypatch.setattr(recorder, "BEFORE_REPORT", [])
    return recorder
