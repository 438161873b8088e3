"""Imports point one way, and importing the package loads neither torch nor sglang."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sglang_c2t"

# Each part may import from the parts named behind it, itself included, and nothing else of
# the package. Leaves come first.
MAY_IMPORT = {
    "checks": set(),
    "hints": set(),
    "files": set(),
    "tree": set(),
    "guides": set(),
    "plan": set(),
    "draft_layer": set(),
    "config": {"checks", "files", "hints"},
    "cpu": {"tree"},
    "kernels": {"draft_layer", "tree"},
    "classifier": {"checks", "config", "draft_layer", "files"},
    "policies": {"checks", "config", "hints", "draft_layer", "classifier", "kernels", "plan"},
    "draft": {
        "checks",
        "config",
        "draft_layer",
        "classifier",
        "kernels",
        "plan",
        "policies",
        "tree",
    },
    "offline": {
        "checks",
        "config",
        "draft_layer",
        "files",
        "classifier",
        "policies",
        "plan",
        "tree",
    },
    "srt": {
        "checks",
        "config",
        "hints",
        "files",
        "draft_layer",
        "tree",
        "classifier",
        "policies",
        "draft",
        "plan",
        "kernels",
        "cpu",
    },
    "cli": {"config", "hints", "files", "classifier", "policies", "offline", "srt"},
    "plugin": {"config", "srt"},
    "__main__": {"cli"},
    "__init__": set(),
}


def part(path: Path) -> str:
    """First component below the package: a folder's name or a module's."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, at any level."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))

#: Names of the package itself, not of a part.
OWN_NAMES = {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_layers_below_it(path: Path) -> None:
    """And SGLang below ``srt`` alone."""
    here = part(path)
    for name in imports(path):
        package, *below = name.split(".")
        assert package != "sglang" or here in {"srt", "plugin"}, f"{path} imports {name}"
        if package != "sglang_c2t" or not below or below[0] in OWN_NAMES:
            continue
        there = below[0]
        assert there in MAY_IMPORT, f"{path} imports {name}, of which no layer is known"
        assert there == here or there in MAY_IMPORT[here], f"{path} imports {name}"


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part(path) for path in FILES} == MAY_IMPORT.keys()


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_c2t, sglang_c2t.config, sglang_c2t.plan.step;"
        "assert not {'torch', 'sglang'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
