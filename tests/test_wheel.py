"""The wheel, as somebody installs it beside their SGLang, without this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; it must end with 0."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment in ``env``: the wheel, and what SGLang brings."""
    folder = tmp_path_factory.mktemp("outside")
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--quiet", "--no-build-isolation", "--python", sys.executable,
        "--out-dir", folder, ROOT, cwd=folder)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    run(uv, "pip", "install", "--quiet", "--no-deps", "--python", folder / "env/bin/python", wheel,
        cwd=folder)  # fmt: skip
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    # As a path alone: the .pth files there, ours for this checkout among them, are not read.
    (site / "sglang.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_check_says_of_the_wheel_that_a_server_will_start(outside: Path) -> None:
    python = outside / "env/bin/python"
    told = run(python, "-m", "sglang_c2t", "check", cwd=outside, SGLANG_USE_CPU_ENGINE="1")
    assert "will start" in told
    where = run(python, "-c", "import sglang_c2t; print(sglang_c2t.__file__)", cwd=outside)
    assert Path(where.strip()).is_relative_to(outside)


@pytest.mark.parametrize(
    "pattern",
    ["py.typed", "guides/production.md", "guides/grafana.json", "classifier/default/*.json"],
)
def test_what_is_no_code_is_in_the_wheel(outside: Path, pattern: str) -> None:
    (installed,) = outside.glob("env/lib/python*/site-packages/sglang_c2t")
    assert list(installed.glob(pattern))
