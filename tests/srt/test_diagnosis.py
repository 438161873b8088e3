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
        monkeypatch.setattr(seams, "broken_seams", lambda probed: list(defects))
        monkeypatch.setattr(seams, "missing_hooks", list)
        monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", device)
        code = main(["check"])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_check_of_a_tested_release_is_ok(check: Callable) -> None:
    code, lines = check()
    assert code == diagnosis.OK == 0
    assert lines[-1] == "ok: a server with --c2t will start"


def test_check_with_a_missing_seam_is_not_ok(check: Callable) -> None:
    for sglang in (versions.TESTED[-1], "0.5.16"):
        code, lines = check(sglang=sglang, defects=("SGLang does not offer the seam x.y",))
        assert code == diagnosis.NOT_OK == 1
        assert "PROBLEM: SGLang does not offer the seam x.y" in lines
        assert lines[-1] == "NOT ok: a server with --c2t will not start"
    assert any("0.5.16 is not tested" in line for line in lines)


def test_check_of_an_untested_release_is_untested(check: Callable) -> None:
    code, lines = check(sglang="0.5.16")
    assert code == diagnosis.UNTESTED == 3
    assert "SGLang 0.5.16 is not tested with this version; tested: 0.5.17, 0.5.18" in lines[-1]
    assert "All seams are there" in lines[-1]


def test_check_without_a_device_is_not_ok(check: Callable) -> None:
    """A server would load SGLang and end; the CPU engine is on only when asked for."""
    code, lines = check(device="0")
    assert code == 1
    (problem,) = [line for line in lines if line.startswith("PROBLEM")]
    assert "SGLANG_USE_CPU_ENGINE=1" in problem
    assert diagnosis.device_problems(cuda=True, cpu_engine=False) == []


def test_check_without_sglang_says_what_to_install(check: Callable) -> None:
    code, lines = check(sglang=None)
    assert code == 1
    assert "PROBLEM: SGLang is not installed: run `pip install 'sglang-c2t[tested]'`" in lines[1]


def test_check_probes_cpu_seams_with_the_cpu_engine(
    check: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "CPU_SEAMS", seams.CPU_SEAMS[:3])
    for device, more in (("1", 3), ("0", 0)):
        _, lines = check(device=device)
        assert f"seams: {len(seams.SEAMS) + more} probed, 0 broken" in lines
