"""Apply, take back, or check the patches of this folder on an installed SGLang or FlashInfer.

A hunk is looked for by its content: its context and removed lines must stand in the file
exactly once, or its context and added lines if it is applied already. Line numbers only
help the reader. Nothing is written unless everything fits. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
FILE_HEADER = re.compile(rb"--- a/(\S+).*\n\+\+\+ b/\1(\s|$)")
HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")

State = Literal["absent", "applied", "half", "conflict"]


class PatchError(Exception):
    """A sentence for the user; nothing was changed."""


@dataclass(frozen=True)
class Hunk:
    """One change: the same place of a file, without it and with it."""

    line: int
    before: list[bytes]
    after: list[bytes]


@dataclass(frozen=True)
class Patch:
    """A patch file, and the directory its paths start from."""

    package: str
    name: str
    title: str
    root: Path
    hunks: list[tuple[str, Hunk]]  # path below root, change

    def __str__(self) -> str:
        return f"{self.package} {self.name}"


def parse(text: bytes) -> tuple[str, list[tuple[str, Hunk]]]:
    """Split a unified diff into its title, the first line, and its hunks with their paths.

    Raises:
        PatchError: It is no diff, its counts do not add up, or it adds or deletes files.
    """
    lines = text.removesuffix(b"\n").split(b"\n")
    path: str | None = None
    hunks: list[tuple[str, Hunk]] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith(b"--- "):
            names = FILE_HEADER.match(b"\n".join(lines[at : at + 2]))
            if names is None:
                raise PatchError(f"line {at + 1}: only changes within a file are supported")
            path, at = names[1].decode(), at + 2
        elif path and (header := HUNK_HEADER.match(lines[at])):
            hunk, at = _read_hunk(lines, at + 1, header)
            hunks.append((path, hunk))
        elif path:
            raise PatchError(f"line {at + 1}: neither a hunk nor a file")
        else:
            at += 1  # the comment on top
    if not hunks:
        raise PatchError("no hunk in it")
    return lines[0].decode(), hunks


def _read_hunk(lines: list[bytes], at: int, header: re.Match[bytes]) -> tuple[Hunk, int]:
    """The hunk whose first line is ``at``, and the number of the line after it."""
    first, old_count, new_count = (int(number or 1) for number in header.groups())
    hunk = Hunk(first, [], [])
    while len(hunk.before) < old_count or len(hunk.after) < new_count:
        sign = lines[at][:1] if at < len(lines) else b"the end"
        if sign not in (b"", b" ", b"-", b"+"):  # editors strip a blank line's space
            raise PatchError(f"line {at + 1}: the hunk ends too early")
        if sign != b"+":
            hunk.before.append(lines[at][1:])
        if sign != b"-":
            hunk.after.append(lines[at][1:])
        at += 1
    counted = (len(hunk.before), len(hunk.after)) == (old_count, new_count)
    if not (counted and hunk.before and hunk.after):
        raise PatchError(f"line {at}: the hunk does not have the lines its header counts")
    return hunk, at


def load(site_packages: Path | None, patches: Path = HERE) -> list[Patch]:
    """The patches for what is installed.

    Args:
        site_packages: Where to look; None for the running interpreter.
        patches: Has one folder per package and version.

    Raises:
        PatchError: No package is installed, or a version has no folder.
    """
    known: dict[str, dict[str, Path]] = {}
    for folder in sorted({file.parent for file in patches.glob("*-*/*.patch")}):
        package, version = folder.name.rsplit("-", 1)
        known.setdefault(package, {})[version] = folder
    found = []
    for package, versions in known.items():
        where = sys.path if site_packages is None else [str(site_packages)]
        installed = next(iter(metadata.distributions(name=package, path=where)), None)
        if installed is None:
            continue
        if installed.version not in versions:
            raise PatchError(
                f"there are no patches for {package} {installed.version}, "
                f"only for {', '.join(versions)}"
            )
        root = Path(str(installed.locate_file("")))
        for file in sorted(versions[installed.version].glob("*.patch")):
            try:
                title, hunks = parse(file.read_bytes())
            except PatchError as error:
                raise PatchError(f"{file}: {error}") from None
            found.append(Patch(f"{package} {installed.version}", file.stem, title, root, hunks))
    if not found:
        raise PatchError(
            f"none of {', '.join(known)} is installed in {site_packages or sys.prefix}"
        )
    return found


def find(lines: list[bytes], block: list[bytes]) -> list[int]:
    """Where a block of lines stands in a file."""
    starts = range(len(lines) - len(block) + 1)
    return [at for at in starts if lines[at] == block[0] and lines[at : at + len(block)] == block]


def look_up(lines: list[bytes], hunk: Hunk) -> tuple[list[int], list[int]]:
    """Where a hunk stands in a file: not applied, and applied."""
    before, after = find(lines, hunk.before), find(lines, hunk.after)
    # At a file's end one block can lie inside the other; then only the longer one counts.
    longer = len(hunk.after) - len(hunk.before)
    if longer > 0:
        before = [at for at in before if not any(0 <= at - whole <= longer for whole in after)]
    else:
        after = [at for at in after if not any(0 <= at - whole <= -longer for whole in before)]
    return before, after


class Tree:
    """Files in memory, read once, written together."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[bytes, list[bytes]]] = {}  # newline, lines
        self._changed: dict[Path, None] = {}

    def _lines(self, path: Path) -> list[bytes] | None:
        if path not in self._files:
            if not path.is_file():
                return None
            data = path.read_bytes()
            newline = b"\r\n" if b"\r\n" in data else b"\n"
            self._files[path] = newline, data.split(newline)
        return self._files[path][1]

    def state(self, patch: Patch) -> tuple[State, list[str]]:
        """A patch's state, and a sentence for each hunk that stands in the way."""
        absent: list[str] = []
        applied: list[str] = []
        problems: list[str] = []
        for path, hunk in patch.hunks:
            name = f"{path}, hunk of line {hunk.line}"
            lines = self._lines(patch.root / path)
            if lines is None:
                problems.append(f"{path} is not in {patch.root}")
                continue
            before, after = look_up(lines, hunk)
            if len(before) + len(after) == 1:
                (absent if before else applied).append(name)
            elif before or after:
                problems.append(f"{name}: fits {len(before) + len(after)} places")
            else:
                problems.append(f"{name}: fits nowhere, the file is another one")
        if problems:
            return "conflict", problems
        if absent and applied:
            return "half", [f"{name}: not applied, unlike other hunks" for name in absent]
        return ("absent" if absent else "applied"), []

    def rewrite(self, patch: Patch, *, reverse: bool) -> None:
        """Apply an absent patch, or take back an applied one."""
        places: dict[Path, list[tuple[int, Hunk]]] = {}
        for path, hunk in patch.hunks:
            file = patch.root / path
            (at,) = look_up(self._files[file][1], hunk)[reverse]
            places.setdefault(file, []).append((at, hunk))
        for file, hunks in places.items():
            lines = self._files[file][1]
            for at, hunk in sorted(hunks, key=lambda place: -place[0]):  # from below: none moves
                old, new = (hunk.after, hunk.before) if reverse else (hunk.before, hunk.after)
                lines[at : at + len(old)] = new
            self._changed[file] = None

    def write(self) -> None:
        """Put the changed files in place, all of them prepared first; modes are kept."""
        with ExitStack() as cleanup:
            prepared = []
            for path in self._changed:
                newline, lines = self._files[path]
                tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                cleanup.callback(tmp.unlink, missing_ok=True)
                tmp.write_bytes(newline.join(lines))
                shutil.copymode(path, tmp)
                prepared.append((tmp, path))
            for tmp, path in prepared:
                os.replace(tmp, path)


def plan(patches: list[Patch], target: State) -> tuple[Tree, list[Patch], list[str]]:
    """Bring all patches to a state, in memory.

    Returns:
        The files, the patches that were changed in them, and what stands in the way.
    """
    tree = Tree()
    changed: list[Patch] = []
    refusals: list[str] = []
    for patch in reversed(patches) if target == "absent" else patches:
        state, problems = tree.state(patch)
        refusals += [f"{patch} ({state}): {problem}" for problem in problems]
        if not problems and state != target:
            tree.rewrite(patch, reverse=target == "absent")
            changed.append(patch)
    if not refusals:
        beside = (patch for patch in patches if tree.state(patch)[0] != target)
        refusals = [f"{patch}: does not fit beside the other patches" for patch in beside]
    return tree, changed, refusals


def show(patches: list[Patch], *, strict: bool) -> int:
    """Print the patches' states and what stands in the way; if strict, that makes it 1."""
    width = max(len(str(patch)) for patch in patches)
    for patch in patches:
        print(f"{patch!s:{width}}  {Tree().state(patch)[0]:8}  {patch.title}")
    _, _, refusals = plan(patches, "applied")
    for refusal in refusals:
        print(f"error: {refusal}", file=sys.stderr)
    return 1 if strict and refusals else 0


def change(patches: list[Patch], target: State) -> int:
    """Bring all patches to a state. 1, and nothing changed, if one does not fit."""
    tree, changed, refusals = plan(patches, target)
    if refusals:
        for refusal in [*refusals, "nothing was changed"]:
            print(f"error: {refusal}", file=sys.stderr)
        return 1
    tree.write()
    for patch in changed:
        print(f"{patch}: now {target}")
    if not changed:
        print(f"nothing to do: all are {target}")
    return 0


def main(argv: Sequence[str] | None = None, patches: Path = HERE) -> int:
    """Run one command; 0 on success, 1 when a patch does not fit, 2 on nothing to patch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "command", choices=("status", "check", "apply", "reverse"),
        help="print states; the same, failing unless all fit; apply all; take all back",
    )  # fmt: skip
    parser.add_argument(
        "--site-packages", type=Path, metavar="DIR", help="default: of this interpreter"
    )
    args = parser.parse_args(argv)
    try:
        found = load(args.site_packages, patches)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if args.command in ("status", "check"):
            return show(found, strict=args.command == "check")
        return change(found, "absent" if args.command == "reverse" else "applied")
    except OSError as error:  # a file system that is full or not writable
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
