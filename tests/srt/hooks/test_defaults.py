"""Default of ``--max-running-requests``."""

from __future__ import annotations

import pytest

from eval.server import TARGET
from sglang_c2t import config
from sglang_c2t.srt import compat
from tests.srt.hooks.test_refusals import EAGLE3, TREES, launch, plugin

__all__ = ["plugin"]  # a fixture

#: What SGLang reads on a CPU in place of the size of the largest CUDA graph.
LARGEST = "--torch-compile-max-bs"
GRAPHS = (LARGEST, "200")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, "")


def running(*flags: str) -> int:
    number: int = compat.resolved(launch(*flags)).max_running_requests
    return number


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the launcher logs."""
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "requests run at once" in x]
    assert line.endswith("--max-running-requests sets another number")
    return line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([*EAGLE3, *GRAPHS], 200),
        ([*EAGLE3, *GRAPHS, "--chunked-prefill-size", "600"], 100),
        ([*TREES, *GRAPHS, "--chunked-prefill-size", "2048"], 128),
        ([*EAGLE3, *GRAPHS, "--chunked-prefill-size", "-1", "--max-prefill-tokens", "720"], 120),
    ],
    ids=["as graphs hold", "as a chunk has rows", "trees, likewise", "unchunked"],
)
def test_max_running_requests_default_is_what_memory_holds(
    capsys, flags: list[str], expected: int
) -> None:
    assert running(*flags, "--c2t") == expected
    assert f"up to {expected} requests run at once, in place of the 48 that SGLang" in said(capsys)


def test_max_running_requests_default_is_never_below_sglangs(capsys) -> None:
    assert running(*EAGLE3, "--c2t", LARGEST, "32") == 48
    assert "up to 48 requests run at once, as SGLang sets: memory is kept for 32" in said(capsys)


@pytest.mark.parametrize(
    ("flags", "expected"), [(["--c2t", "--max-running-requests", "7"], 7), ([], 48)]
)
def test_max_running_requests_typed_or_without_c2t_stays(
    capsys, flags: list[str], expected: int
) -> None:
    assert running(*EAGLE3, *GRAPHS, *flags) == expected
    assert "requests run at once" not in capsys.readouterr().err


def test_max_running_requests_with_recurrent_state_stays(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def recurrent(model_config) -> bool:
        asked.append(model_config.model_path)
        return True

    monkeypatch.setattr(compat, "has_recurrent_state", recurrent)
    assert running(*EAGLE3, *GRAPHS, "--c2t") == 48
    assert asked == [str(TARGET)]
    assert "each needs recurrent states" in said(capsys)
