"""``check``: what it says and with which code it ends, on machines and releases we do not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_c2t.cli import main
from sglang_c2t.srt import diagnosis, seams, versions


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command beside this SGLang, of which a test says what is different."""

    def run(
        sglang: str | None = versions.TESTED[-1], defects: tuple[str, ...] = (), device: str = "1"
    ) -> tuple[int, list[str]]:
        monkeypatch.setattr(versions, "installed", lambda: sglang)
        monkeypatch.setattr(seams, "broken_seams", lambda: list(defects))
        monkeypatch.setattr(seams, "missing_hooks", list)
        monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", device)
        code = main(["check"])
        return code, capsys.readouterr().out.splitlines()

    return run


UNTESTED = "SGLang 0.5.20 is not tested with this version; tested: 0.5.17, 0.5.23"
OK, NOT_OK = "ok: a server with --c2t will start", "NOT ok: a server with --c2t will not start"


@pytest.mark.parametrize(
    ("different", "code", "said"),
    [
        pytest.param({}, 0, [OK], id="a tested release with all seams is ok"),
        pytest.param(
            {"defects": ("SGLang does not offer the seam x.y",)}, 1,
            ["PROBLEM: SGLang does not offer the seam x.y", NOT_OK],
            id="a missing seam is named and not ok",
        ),
        pytest.param(
            {"sglang": "0.5.20"}, 3, [UNTESTED, "All seams are there"],
            id="an untested release with all seams is said to be just that",
        ),
        pytest.param(
            {"sglang": "0.5.20", "defects": ("x.y",)}, 1, [UNTESTED, "PROBLEM: x.y", NOT_OK],
            id="an untested release without a seam is not ok",
        ),
        # A server would load SGLang and end; the CPU engine is on only when asked for.
        pytest.param(
            {"device": "0"}, 1, ["SGLANG_USE_CPU_ENGINE=1", NOT_OK],
            id="a machine without a device is not ok and told what to do",
        ),
        pytest.param(
            {"sglang": None}, 1,
            ["PROBLEM: SGLang is not installed: run `pip install 'sglang-c2t[tested]'`", NOT_OK],
            id="without SGLang there is one problem and what to install",
        ),
    ],
)  # fmt: skip
def test_check(check: Callable, different: dict, code: int, said: list[str]) -> None:
    """Each code in words: 0 ok, 1 not ok, 3 untested."""
    found, lines = check(**different)
    assert (diagnosis.OK, diagnosis.NOT_OK, diagnosis.UNTESTED) == (0, 1, 3)
    assert found == code
    for words in said:
        assert any(words in line for line in lines)
    assert said[-1] in lines[-1]
    assert sum(line.startswith("PROBLEM") for line in lines) == (code == 1)


def test_a_gpu_needs_no_cpu_engine() -> None:
    assert diagnosis.device_problems(cuda=True, cpu_engine=False) == []


def test_the_slow_part_is_announced_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports take up to a minute, in which a silent command looks hung."""
    said: list[str] = []

    def slow(what: str) -> Callable[[], bool]:
        return lambda: bool(said.append(what))

    monkeypatch.setattr("torch.cuda.is_available", slow("torch"))
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", slow("SGLang"))
    monkeypatch.setattr(seams, "broken_seams", list)
    monkeypatch.setattr(seams, "missing_hooks", list)
    diagnosis.diagnose(said.append)
    assert said[said.index("torch") - 1] == "loading torch ..."
    assert said[said.index("SGLang") - 1].startswith("loading SGLang and looking at ")
