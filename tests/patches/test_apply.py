"""The patch script: on packages made up here, and on copies of the installed ones."""

from __future__ import annotations

import difflib
import io
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path

import pytest

from patches.apply import HERE, changed_paths, main

OLD = "import a\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 1\n\n\nlast = 0\n"
NEW = OLD.replace("f():\n    return 1", "f():\n    return 2").replace(
    "last = 0\n", "last = 3\nx = 4\n"
)


def diff(path: str, old: str, new: str, context: int = 2) -> str:
    """A patch of one file, as it stands in the folder."""
    sides = old.splitlines(), new.splitlines()
    lines = difflib.unified_diff(*sides, f"a/{path}", f"b/{path}", n=context, lineterm="")
    return "\n".join(lines) + "\n"


class World:
    """A site-packages with package ``demo`` 1.0, and a folder of patches for it."""

    def __init__(self, root: Path) -> None:
        self.patches = root / "patches"
        self.site = root / "site"
        self.install("demo", "1.0")

    def install(self, package: str, version: str) -> None:
        info = self.site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")

    def file(self, name: str, text: str) -> Path:
        path = self.site / "demo" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def patch(self, name: str, *diffs: str, folder: str = "demo-1.0") -> None:
        path = self.patches / folder / f"{name}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("What it does.\n\n" + "".join(diffs))

    def __call__(self, command: str) -> int:
        self.out, self.err = io.StringIO(), io.StringIO()
        with redirect_stdout(self.out), redirect_stderr(self.err):
            return main([command, "--site-packages", str(self.site)], self.patches)

    def says_nothing_to_patch(self, command: str) -> str:
        """How a command ends that has nothing to work on: with exit status 2 and one line."""
        with pytest.raises(SystemExit) as exit_:
            self(command)
        assert exit_.value.code == 2
        return self.err.getvalue().splitlines()[-1]

    @property
    def states(self) -> list[str]:
        """The states that the last command printed."""
        lines = self.out.getvalue().splitlines()
        return [line.split()[2].rstrip(".") for line in lines if "What it does." in line]

    def bytes(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.site.rglob("*") if path.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One patch, of which two hunks are in one file and one in another."""
    world = World(tmp_path)
    world.file("x.py", OLD)
    world.file("y.py", "only\n")
    world.patch("one", diff("demo/x.py", OLD, NEW), diff("demo/y.py", "only\n", "only\nmore\n"))
    return world


def test_applying_and_taking_back_leaves_every_byte(world: World) -> None:
    before = world.bytes()
    assert world("apply") == 0
    assert (world.site / "demo/x.py").read_text() == NEW
    assert (world.site / "demo/y.py").read_text() == "only\nmore\n"
    assert world("reverse") == 0
    assert world.bytes() == before


def test_a_hard_linked_cache_keeps_the_original_and_all_users_can_read_the_patched(
    world: World, tmp_path: Path
) -> None:
    x, cached = world.site / "demo/x.py", tmp_path / "cached.py"
    x.chmod(0o644)
    cached.hardlink_to(x)
    usual = os.umask(0o077)
    try:
        assert world("apply") == 0
    finally:
        os.umask(usual)
    assert cached.read_text() == OLD
    assert x.stat().st_mode & 0o777 == 0o644


def test_neither_a_checkout_around_it_nor_the_settings_of_a_git_user_matter(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    config = tmp_path / "config"
    config.write_text("[apply]\n\tignoreWhitespace = change\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert world("apply") == 0
    assert (world.site / "demo/x.py").read_text() == NEW
    assert world("reverse") == 0
    world.file("x.py", OLD.replace("return 1", "return  1"))
    assert world("apply") == 1


@pytest.mark.parametrize("command", ["apply", "reverse"])
def test_doing_it_twice_changes_nothing_the_second_time(world: World, command: str) -> None:
    world("apply")
    world(command)
    once = world.bytes()
    assert world(command) == 0
    assert world.out.getvalue().endswith("nothing was changed\n")
    assert world.bytes() == once


def test_status_and_check_tell_states_without_touching_files(world: World) -> None:
    for state in ("absent", "applied"):
        before = world.bytes()
        for command in ("status", "check"):
            assert world(command) == 0
            assert world.states == [state]
        assert world.bytes() == before
        world("apply")


def test_a_hunk_is_found_where_other_lines_moved_it(world: World) -> None:
    file = world.file("x.py", "# added\n" * 7 + OLD)
    assert world("apply") == 0
    assert file.read_text() == "# added\n" * 7 + NEW


def half_applied(world: World) -> None:
    world.file("y.py", "only\nmore\n")


def changed_by_someone(world: World) -> None:
    world.file("x.py", OLD.replace("import a", "import b").replace("return 1", "return 0"))


def file_gone(world: World) -> None:
    (world.site / "demo/y.py").unlink()


def patch_damaged(world: World) -> None:
    patch = world.patches / "demo-1.0/one.patch"
    patch.write_text(patch.read_text().replace(" def f():\n", ""))


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (half_applied, "(half): demo/x.py is absent, demo/y.py is applied"),
        (changed_by_someone, "(conflict): patch failed: demo/x.py:3; "),
        (file_gone, "(conflict): demo/y.py: No such file"),
        (patch_damaged, "(conflict): corrupt patch at line "),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    world: World, break_it: Callable[[World], None], sentence: str
) -> None:
    break_it(world)
    world.file("z.py", "z\n")
    world.patch("other", diff("demo/z.py", "z\n", "zz\nz\n"))  # fits, and is held back all the same
    before = world.bytes()
    for command in ("status", "check", "apply", "reverse"):
        assert world(command) == (command != "status")
        out = world.out.getvalue()
        assert f"error: demo-1.0 one {sentence}" in world.err.getvalue()
        assert "demo-1.0 other: absent. What it does.\n" in out
        assert out.endswith("nothing was changed\n") == (command in ("apply", "reverse"))
    assert world.bytes() == before


def test_patches_that_exclude_each_other_are_refused_together(world: World) -> None:
    world.patch("two", diff("demo/y.py", "only\n", "one\n"))
    before = world.bytes()
    for command in ("check", "apply"):
        assert world(command) == 1
        assert "do not fit together: patch failed: demo/y.py" in world.err.getvalue()
    assert world.bytes() == before


def test_a_version_without_patches_is_named_beside_those_that_have_some(world: World) -> None:
    world.install("other-thing", "3.1")
    world.patch("p", diff("x", "1\n2\n", "1\n"), folder="other-thing-3.0.post1")
    said = world.says_nothing_to_patch("apply")
    assert said.endswith("patches for other-thing-3.1, only for demo-1.0, other-thing-3.0.post1")


def test_a_folder_without_the_packages_is_an_error(world: World, tmp_path: Path) -> None:
    world.site = tmp_path / "nowhere"
    assert "none of demo-1.0 is installed in" in world.says_nothing_to_patch("check")


def test_a_machine_without_git_is_told_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "No such file or directory: 'git'" in world.says_nothing_to_patch("apply")


@pytest.mark.parametrize("package", ["sglang", "flashinfer-python"])
def test_the_installed_version_takes_its_patches_and_gives_them_back(
    package: str, tmp_path: Path
) -> None:
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    folder = HERE / f"{package}-{installed.version}"
    if not folder.is_dir():
        pytest.skip(f"there are no patches for {package} {installed.version}")

    world = World(tmp_path)
    world.patches, site = HERE, world.site
    world.install(package, installed.version)
    paths = {path for patch in folder.iterdir() for path in changed_paths(patch)}
    for path in paths:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(installed.locate_file(path)), site / path)

    assert world("reverse") == 0  # should they be applied to the installed one
    before = world.bytes()
    assert world("check") == world("apply") == 0
    for path in paths:
        patched = (site / path).read_bytes()
        assert patched != before[site / path]
        compile(patched, path, "exec")
    assert world("reverse") == 0
    assert world.bytes() == before
