"""Apply, take back, or check the patches of this folder on an installed SGLang or FlashInfer.

``git apply`` does the work. It changes all files or, where something does not fit, none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent


def find_patches(site_packages: Path, folder: Path = HERE) -> list[Path]:
    """The patches for what is installed, from the folders named after package and version."""
    known = sorted(path.name for path in folder.glob("*-*"))
    found = []
    for package in sorted({name.rpartition("-")[0] for name in known}):
        for installed in metadata.distributions(name=package, path=[str(site_packages)]):
            name = f"{package}-{installed.version}"
            if name not in known:
                raise LookupError(f"there are no patches for {name}, only for {', '.join(known)}")
            found += sorted((folder / name).glob("*.patch"))
    if not found:
        raise LookupError(f"none of {', '.join(known)} is installed in {site_packages}")
    return found


def changed_paths(patch: Path) -> list[str]:
    """The files that a patch changes, below site-packages."""
    lines = patch.read_text().splitlines()
    return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


def git_apply(patches: Sequence[Path], root: Path, *options: str) -> str:
    """Run ``git apply`` on the files below a folder; what git says if they do not fit."""
    # A .venv may lie in a checkout, and a user's settings for git must not decide what fits.
    alone = {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options],
        input=b"".join(patch.read_bytes() for patch in patches),
        cwd=root,
        env=os.environ | alone,
        umask=0o022,  # readable for all, as packages are
        capture_output=True,
    )
    said = done.stderr.decode().replace("error: ", "").splitlines()
    return "; ".join(said) if done.returncode else ""


def look_at(patch: Path, root: Path) -> tuple[str, str]:
    """A patch's state (absent, applied, half or conflict), and what stands in its way."""
    states = {}
    for path in changed_paths(patch):
        check = "--check", f"--include={path}"
        if not git_apply([patch], root, *check, "--reverse"):
            states[path] = "applied"
        elif refusal := git_apply([patch], root, *check):
            return "conflict", refusal
        else:
            states[path] = "absent"
    if len(set(states.values())) != 1:
        return "half", ", ".join(f"{path} is {state}" for path, state in states.items())
    return states.popitem()[1], ""


def run(command: str, root: Path, patches: Sequence[Path]) -> list[str]:
    """Run one command and print the patches' states; what stands in the way."""
    target, *options = ("absent", "--reverse") if command == "reverse" else ("applied",)
    due, problems = [], []
    for patch in patches:
        name = f"{patch.parent.name} {patch.stem}"
        state, problem = look_at(patch, root)
        print(f"{name}: {state}. {patch.read_text().splitlines()[0]}")
        if problem:
            problems.append(f"{name} ({state}): {problem}")
        elif state != target:
            due.append(patch)
    check = ["--check"] if command in ("status", "check") else []
    if due and not problems and (problem := git_apply(due, root, *options, *check)):
        problems = [f"the patches do not fit together: {problem}"]
    if not check:
        print("nothing was changed" if problems or not due else f"now all are {target}")
    return problems


def main(argv: Sequence[str] | None = None, folder: Path = HERE) -> int:
    """Run one command; 0 on success, 1 when a patch does not fit, 2 on nothing to patch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "command",
        choices=("status", "check", "apply", "reverse"),
        help="print states; the same, failing unless all fit; apply all; take all back",
    )
    site_packages = Path(sysconfig.get_path("purelib"))
    parser.add_argument("--site-packages", type=Path, metavar="DIR", default=site_packages)
    args = parser.parse_args(argv)
    root = args.site_packages.resolve()
    try:
        problems = run(args.command, root, find_patches(root, folder))
    except (LookupError, OSError) as error:  # nothing to patch; no git
        parser.error(str(error))  # exits with 2
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems and args.command != "status" else 0


if __name__ == "__main__":
    sys.exit(main())
