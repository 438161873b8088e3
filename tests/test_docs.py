"""The README keeps its promises: flags, files and targets it names exist, and the reverse."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_names_every_flag_and_no_other() -> None:
    from sglang_c2t.srt.args import add_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(None, parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert flags == set(re.findall(r"--c2t(?:-[a-z]+)*", README))


def test_the_readme_names_every_setting_of_the_config_file() -> None:
    import dataclasses

    from sglang_c2t.config import C2TConfig

    row = next(line for line in README.splitlines() if line.startswith("| `--c2t-config FILE`"))
    for field in dataclasses.fields(C2TConfig):
        assert f"`{field.name}`" in row


def test_the_file_tree_of_the_readme_matches_the_disk() -> None:
    tree = README.split("## Files")[1].split("```")[1]
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "sglang_c2t" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets


def test_the_readme_table_of_versions_lists_what_is_admitted_and_locked() -> None:
    """The newest and the oldest SGLang, and none between them."""
    admitted = re.search(
        r'"sglang>=([0-9.]+),<=([0-9.]+)((?:,![^,"]+)+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert admitted is not None
    oldest, newest, excluded = admitted.groups()
    assert re.findall(r"\| [0-9.]+ \| ([0-9.]+) \| CPU engine", README) == [newest, oldest]
    series, last = newest.rsplit(".", 1)
    between = range(int(oldest.rsplit(".", 1)[1]) + 1, int(last))
    assert excluded == "".join(f",!={series}.{number}.*" for number in between)
    for version, lock in ((newest, "requirements.lock"), (oldest, f"requirements-{oldest}.lock")):
        assert f"sglang=={version}" in (ROOT / lock).read_text().splitlines()
