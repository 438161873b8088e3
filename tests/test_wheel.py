"""The built package, as a user installs it next to SGLang, without this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_c2t.classifier.checkpoint import SHIPPED

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command, which must exit with 0."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment in ``env``: the wheel, and what SGLang brings. The wheel
    is made of the source distribution, and both lie in the folder.
    """
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
    sglang = find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    (site / "sglang.pth").write_text(f"{Path(sglang.origin).parents[1]}\n")
    return folder


def test_an_index_would_take_both_files_and_show_their_page(outside: Path) -> None:
    built = sorted(path.name for path in outside.glob("sglang_c2t*"))
    assert [re.sub(r"\d+(\.\d+)+", "N", name) for name in built] == [
        "sglang_c2t-N-py3-none-any.whl",
        "sglang_c2t-N.tar.gz",
    ]
    told = run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=outside)
    assert told.count("PASSED") == 2


def test_check_says_of_the_wheel_that_a_server_will_start(outside: Path) -> None:
    python = outside / "env/bin/python"
    told = run(python, "-m", "sglang_c2t", "check", cwd=outside, SGLANG_USE_CPU_ENGINE="1")
    assert "will start" in told
    assert "plugin entry point: registered" in told
    assert "0 broken" in told
    where = run(python, "-c", "import sglang_c2t; print(sglang_c2t.__file__)", cwd=outside)
    assert Path(where.strip()).is_relative_to(outside)


ENTRY_POINT = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="sglang.srt.plugins", name="c2t")
print(plugin.load().__code__.co_filename)
"""


def test_the_entry_point_that_sglang_asks_for_is_the_wheel_s(outside: Path) -> None:
    where = run(outside / "env/bin/python", "-c", ENTRY_POINT, cwd=outside)
    assert Path(where.strip()).is_relative_to(outside)


def test_the_wheel_says_where_its_guides_lie(outside: Path) -> None:
    told = run(outside / "env/bin/python", "-m", "sglang_c2t", "guides", cwd=outside)
    folder, *files = told.splitlines()
    assert Path(folder).is_relative_to(outside)
    named = [line.split()[0] for line in files]
    assert {"production.md", "grafana.json", "deploy/Dockerfile", "deploy/kubernetes.yaml"} <= {
        *named
    }
    assert all((Path(folder) / name).is_file() for name in named)
    source = ROOT / "sglang_c2t" / "guides"
    assert set(named) == {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("pattern", ["py.typed", "guides/production.md", "guides/grafana.json"])
def test_what_is_no_code_is_in_the_wheel(outside: Path, pattern: str) -> None:
    (installed,) = outside.glob("env/lib/python*/site-packages/sglang_c2t")
    assert list(installed.glob(pattern))


def test_all_shipped_classifiers_are_in_the_wheel(outside: Path) -> None:
    """Those of one pair in their folder."""
    (installed,) = outside.glob("env/lib/python*/site-packages/sglang_c2t")
    folders = installed / "classifier" / "default", SHIPPED
    there, here = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    )
    assert len(there) >= 16
    assert there == here
