"""Long commands say how far they are, wherever their output goes."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from sglang_c2t.offline import progress
from sglang_c2t.offline.progress import progress_on


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_progress_in_a_log_prints_lines() -> None:
    file = io.StringIO()
    with progress_on(Console(file=file, width=100)) as shown:
        cells = shown.add_task("cells", total=4)
        shown.advance(cells)
        assert eventually(lambda: file.getvalue().count("cells: 1 of 4, 0:00:0") >= 2)
        shown.advance(cells, 2)
        assert eventually(lambda: "cells: 3 of 4" in file.getvalue())


def test_progress_ends_for_finished_or_hidden_tasks() -> None:
    file = io.StringIO()
    with progress_on(Console(file=file, width=100)) as shown:
        shown.add_task("hidden", total=2, visible=False)
        done = shown.add_task("done", total=1)
        shown.advance(done)
        shown.add_task("servers", total=None)
        assert eventually(lambda: "servers: 0" in file.getvalue())
    assert "hidden" not in file.getvalue()
    assert "done" not in file.getvalue()
    told = file.getvalue()
    time.sleep(0.05)
    assert file.getvalue() == told
