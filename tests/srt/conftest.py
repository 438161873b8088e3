"""What tests of the server's side share."""

from __future__ import annotations

import pytest

from sglang_c2t.srt import recorder
from sglang_c2t.srt.hooks import reporting


@pytest.fixture(autouse=True)
def _recording_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's state is that of a process, which records once."""
    monkeypatch.setattr(recorder, "RECORDING", reporting.RecordingState())
    monkeypatch.setattr(recorder, "BEFORE_REPORT", [])
