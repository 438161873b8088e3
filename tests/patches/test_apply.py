"""The patch script: on packages made up here, and on copies of the installed ones."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.apply import HERE, PatchError, main, parse

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

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.site / "demo" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def patch(self, name: str, *diffs: str, folder: str = "demo-1.0") -> None:
        path = self.patches / folder / f"{name}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("What it does.\n\n" + "".join(diffs))

    def __call__(self, command: str) -> int:
        return main([command, "--site-packages", str(self.site)], self.patches)

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


def states(output: str) -> list[str]:
    """The state column of what ``status`` and ``check`` print."""
    return [line.split()[3] for line in output.splitlines()]


def test_applying_and_taking_back_leaves_every_byte_and_mode(world: World) -> None:
    x = world.site / "demo/x.py"
    x.chmod(0o640)
    before = world.bytes()
    assert world("apply") == 0
    assert x.read_text() == NEW
    assert (world.site / "demo/y.py").read_text() == "only\nmore\n"
    assert x.stat().st_mode & 0o777 == 0o640
    assert world("reverse") == 0
    assert world.bytes() == before


@pytest.mark.parametrize("command", ["apply", "reverse"])
def test_doing_it_twice_changes_nothing_the_second_time(
    world: World, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world("apply")
    world(command)
    once = world.bytes()
    assert world(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert world.bytes() == once


def test_status_and_check_tell_states_without_touching_files(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in ("absent", "applied"):
        before = world.bytes()
        assert world("status") == world("check") == 0
        assert states(capsys.readouterr().out) == [state] * 2
        assert world.bytes() == before
        world("apply")
        capsys.readouterr()


@given(
    edits=st.lists(st.sampled_from(["keep", "drop", "replace", "insert"]), max_size=20),
    newline=st.sampled_from(["\n", "\r\n"]),
    final_newline=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_edit_can_be_applied_and_taken_back(
    edits: list[str], newline: str, final_newline: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new = ["first"], ["first"]
    for i, edit in enumerate([*edits, "insert"]):
        old.append(f"line {i}")
        new += {"keep": [f"line {i}"], "drop": [], "replace": [f"new {i}"]}.get(
            edit, [f"line {i}", f"new {i}"]
        )
    world = World(tmp_path_factory.mktemp("world"))
    world.patch("any", diff("demo/x.py", "\n".join(old), "\n".join(new)))
    before, after = ((newline.join(s) + newline * final_newline).encode() for s in (old, new))
    file = world.file("x.py", before)
    assert world("apply") == 0
    assert file.read_bytes() == after
    assert world("reverse") == 0
    assert file.read_bytes() == before


def test_a_hunk_is_found_where_other_lines_moved_it(world: World) -> None:
    file = world.file("x.py", "# added\n" * 7 + OLD)
    assert world("apply") == 0
    assert file.read_text() == "# added\n" * 7 + NEW


def half_applied(world: World) -> None:
    world.file("y.py", "only\nmore\n")


def changed_by_someone(world: World) -> None:
    world.file("x.py", OLD.replace("import a", "import b").replace("return 1", "return 0"))


def found_twice(world: World) -> None:
    world.file("x.py", OLD + "\n\n" + OLD)


def file_gone(world: World) -> None:
    (world.site / "demo/y.py").unlink()


@pytest.mark.parametrize(
    ("break_it", "state", "sentence"),
    [
        (half_applied, "half", "demo/x.py, hunk of line 3: not applied, unlike other hunks"),
        (changed_by_someone, "conflict", "demo/x.py, hunk of line 3: fits nowhere"),
        (found_twice, "conflict", "demo/x.py, hunk of line 3: fits 2 places"),
        (file_gone, "conflict", "demo/y.py is not in "),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    world: World,
    break_it: Callable[[World], None],
    state: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(world)
    world.file("z.py", "z\n")
    world.patch("other", diff("demo/z.py", "z\n", "zz\nz\n"))  # fits, and is held back all the same
    before = world.bytes()
    assert world("status") == 0
    assert states(capsys.readouterr().out) == [state, "absent"]
    for command in ("check", "apply", "reverse"):
        assert world(command) == 1
        error = capsys.readouterr().err
        assert f"error: demo 1.0 one ({state}): {sentence}" in error
        assert error.endswith("error: nothing was changed\n") == (command != "check")
    assert world.bytes() == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (diff("demo/x.py", OLD, OLD.replace("def f", "def ff")), "two (conflict): demo/x.py, hunk"),
        (diff("demo/y.py", "only\n", "one\n"), "one: does not fit beside the other patches"),
    ],
)
def test_patches_that_exclude_each_other_are_refused_together(
    world: World, change: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.patch("two", change)
    before = world.bytes()
    for command in ("check", "apply"):
        assert world(command) == 1
        assert sentence in capsys.readouterr().err
    assert world.bytes() == before


def test_a_version_without_patches_is_named_beside_those_that_have_some(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.install("other-thing", "3.1")
    world.patch("p", diff("x", "1\n2\n", "1\n"), folder="other-thing-3.0")
    world.patch("p", diff("x", "1\n2\n", "1\n"), folder="other-thing-2.9.post1")
    assert world("apply") == 2
    expected = "error: there are no patches for other-thing 3.1, only for 2.9.post1, 3.0\n"
    assert capsys.readouterr().err == expected


def test_a_folder_without_the_packages_is_an_error(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.site = tmp_path / "nowhere"
    assert world("check") == 2
    assert "none of demo is installed in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Nothing.\n", "no hunk"),
        (diff("x", "1\n", "2\n") + "\\ No newline at end of file\n", "neither a hunk nor a file"),
        (diff("x", "1\n", "2\n").replace("@@ -1 +1 @@", "@@ -1,2 +1,2 @@"), "ends too early"),
        (diff("x", "1\n2\n", "2\n").replace("+1 @@", "+1,0 @@"), "its header counts"),
        (diff("x", "1\n", "2\n").replace("--- a/x", "--- /dev/null"), "within a file"),
    ],
)
def test_a_damaged_patch_is_not_read(text: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        parse(text.encode())


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

    World(tmp_path).install(package, installed.version)
    site = tmp_path / "site"
    paths = {path for patch in folder.iterdir() for path, _ in parse(patch.read_bytes())[1]}
    for path in paths:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(installed.locate_file(path)), site / path)

    def run(command: str) -> int:
        return main([command, "--site-packages", str(site)])

    assert run("reverse") == 0  # should they be applied to the installed one
    before = {path: (site / path).read_bytes() for path in paths}
    assert run("check") == 0
    assert run("apply") == 0
    for path in paths:
        patched = (site / path).read_bytes()
        assert patched != before[path]
        compile(patched, path, "exec")
    assert run("reverse") == 0
    assert {path: (site / path).read_bytes() for path in paths} == before
