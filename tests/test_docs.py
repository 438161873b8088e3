"""README and guides name what exists, and all of it; figures equal those of the results."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from sglang_c2t.srt.versions import TESTED

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "sglang_c2t" / "guides"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
CHINESE = (GUIDES / "README.zh.md").read_text()
PRODUCTION = (GUIDES / "production.md").read_text()
LIMITS = (GUIDES / "limits.md").read_text()
PAGES = [
    *(
        ROOT / page
        for page in ("README.md", "CONTRIBUTING.md", "eval/README.md", "eval/RESULTS.md")
    ),
    *sorted(GUIDES.rglob("*.md")),
]


def test_the_pages_name_every_flag_and_no_other() -> None:
    from sglang_c2t.srt.hooks.args import add_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(None, parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert flags == set(re.findall(r"--c2t(?:-[a-z]+)*", PRODUCTION))
    for page in PAGES:
        assert set(re.findall(r"--c2t(?:-[a-z]+)*", page.read_text())) <= flags, page


def test_the_guide_names_every_setting_and_its_default() -> None:
    """A flag under its name, what has none as a key of the file."""
    import dataclasses

    from sglang_c2t.config import C2TConfig

    rows = re.findall(r"^\| `([\w-]+)[^|]*\| (.*?) \|", PRODUCTION, re.MULTILINE)
    told = {name.removeprefix("--c2t-").replace("-", "_"): default for name, default in rows}
    for field in dataclasses.fields(C2TConfig):
        assert field.name in told
        if isinstance(field.default, (str, float)) and not isinstance(field.default, bool):
            assert told[field.name].strip("`") == f"{field.default}"


def test_the_page_of_requests_names_every_field_that_a_request_may_have() -> None:
    """SGLang sets the fields in ``own`` by itself."""
    import dataclasses

    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len",
           "is_normalized", "ebnf_full_assistant"}  # fmt: skip
    fields = {*SamplingParams.__struct_fields__} - own
    fields |= {field.name for field in dataclasses.fields(GenerateReqInput)}
    assert fields <= set(re.findall(r"`(\w+)`", (GUIDES / "requests.md").read_text()))


def test_flags_and_series_have_one_row_in_all_pages() -> None:
    row = re.compile(r"^\| `(--c2t-[\w-]+|c2t:\w+)", re.MULTILINE)
    names = Counter(name for page in PAGES for name in row.findall(page.read_text()))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_file_tree_matches_the_disk() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Files")[1].split("```")[1]
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "sglang_c2t" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name


def test_limits_list_every_refused_combination_and_its_remedy() -> None:
    from sglang_c2t.srt.hooks.refusals import REFUSALS

    rows = re.findall(r"^\| (.*) \| (.*) \|$", LIMITS.split("---|")[-1], re.MULTILINE)
    refusals = [tuple(text.replace("|", "\\|") for text in (r.what, r.instead)) for r in REFUSALS]
    assert rows == refusals


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_make_help_lists_every_target_and_what_it_may_be_given() -> None:
    """A variable that a recipe reads from the command line stands in the target's line."""
    makefile = (ROOT / "Makefile").read_text()
    listed = dict(re.findall(r"^([a-z0-9-]+):.*?## (.*)$", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(listed) == set(phony[1].replace("\\", "").split())
    for target, line in listed.items():
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        assert recipe is not None
        taken = set(re.findall(r"\b(ARGS|PORT|CONFIG|OUT|DATA|TEST|TRAIN|OTHER)\b\)", recipe[1]))
        assert {name for name in taken if name not in line} == set(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in map(anchor_of, heads)


def anchor_of(head: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_a_page_runs_exists(page: Path) -> None:
    for module in re.findall(r"python -m (eval[\w.]*|sglang_c2t[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", sorted(GUIDES.rglob("*.md")), ids=lambda page: page.name)
def test_an_installed_guide_says_which_commands_need_a_checkout(page: Path) -> None:
    """In the paragraph of the first, or before: eval/ and the Makefile are not installed."""
    said = False
    for paragraph in page.read_text().split("\n\n"):
        said = said or "in a checkout" in " ".join(paragraph.split()).lower()
        assert said or not re.search(r"python -m eval|(?:`|^)make \w", paragraph, re.MULTILINE)


PACKAGE = (GUIDES / "package.md").read_text()


def test_the_page_of_an_index_leads_nowhere_but_to_the_web() -> None:
    """An index shows no other file of the repository."""
    assert PROJECT["readme"] == "sglang_c2t/guides/package.md"
    assert all("://" in target for target in re.findall(r"\]\(([^)\s]+)\)", PACKAGE))


def test_the_page_of_an_index_shows_figures_of_the_readme() -> None:
    measured = PACKAGE.split("Measured on")[1].split("## Install")[0]
    for figure in re.findall(r"\d+\.\d+|\d+ %", measured):
        assert figure in README, figure
    assert f"SGLang {TESTED[0]} to {TESTED[-1]}" in PACKAGE


def test_the_guide_names_every_policy_and_no_other() -> None:
    from sglang_c2t.policies import POLICIES, tree_policy_names

    tables = PRODUCTION.split("## Policies")[1].split("## Sizing")[0]
    chains, trees = tables.split("Trees (")
    assert set(first_column(chains)) == set(POLICIES)
    named = set(first_column(trees))
    assert named <= set(tree_policy_names())
    # Gates that prune EAGLE-2's tree are named by example.
    assert {name for name in tree_policy_names() if not name.endswith("-eagle2")} <= named


def first_column(table: str) -> list[str]:
    """Names in backquotes of the first column of Markdown rows."""
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_guide_names_every_series_and_no_other() -> None:
    dashboard = (GUIDES / "grafana.json").read_text()
    drawn = {name.removesuffix("_bucket") for name in re.findall(r"c2t:\w+", dashboard)}
    rows = PRODUCTION.split("## Watch it")[1].split("tau is")[0]
    assert set(re.findall(r"\| `(c2t:\w+)", rows)) == drawn


def test_tested_releases_are_listed_and_locked() -> None:
    """The tables of pages, the locks, and the extra for empty machines name the same releases."""
    oldest, newest = TESTED[0], TESTED[-1]
    listed = re.findall(r"\| [0-9.]+ \| ([0-9., ]+) \| CPU engine", LIMITS)
    assert sorted(", ".join(listed).split(", ")) == sorted(TESTED)
    assert (listed[0], listed[-1]) == (newest, oldest)
    assert f"| SGLang | {oldest} to {newest}," in README
    assert f"| SGLang | {oldest} 到 {newest}，" in CHINESE
    for version, lock in ((newest, "requirements.lock"), (oldest, f"requirements-{oldest}.lock")):
        assert f"sglang=={version}" in (ROOT / lock).read_text().splitlines()
    assert PROJECT["optional-dependencies"]["tested"] == [f"sglang=={newest}"]
    assert f"\nOLD       := {oldest}\n" in (ROOT / "Makefile").read_text()


def test_installing_the_plugin_replaces_nothing_that_a_server_runs_on() -> None:
    """Bare names: any bound could make pip replace the SGLang or torch of a running service."""
    assert set(PROJECT["dependencies"]) == {"sglang", "torch", "numpy", "safetensors"}


def test_the_guide_names_the_default_threshold_of_every_gate() -> None:
    from sglang_c2t.policies import PLAIN, TRAINED, plans

    chains = PRODUCTION.split("## Policies")[1].split("Trees (")[0]
    told = dict(re.findall(r"^\| `([a-z0-9-]+)` \|.*\| ([0-9.]+) \| `--c2t-beta`", chains, re.M))
    gates = [kind for kind in (*TRAINED, *PLAIN) if hasattr(kind, "beta") and not plans(kind)]
    assert told == {kind.name: f"{kind.beta:g}" for kind in gates}


def test_default_thresholds_are_those_that_the_tables_chose() -> None:
    from eval.tables.thresholds import CHOSEN

    tables = (ROOT / "eval" / "TABLES.md").read_text()
    chosen = {name: float(beta) for beta, name in re.findall(r"([0-9.]+) for `(c2t-\w+)`", tables)}
    assert chosen == {kind.name: kind.beta for kind in CHOSEN}


@pytest.mark.parametrize(
    ("page", "status", "condition"),
    [(README, "never run on a GPU", "no GPU"), (CHINESE, "从未在 GPU 上运行过", "没有 GPU")],
    ids=["English", "Chinese"],
)  # fmt: skip
def test_readme_names_the_hardware_before_its_figures(
    page: str, status: str, condition: str
) -> None:
    opening, results = page.split("\n\n|")[0].split("\n## ")
    assert status in opening
    assert condition in results


def test_readmes_show_the_figures_of_the_results() -> None:
    """English and Chinese tables have equal cells, and these are rows of `make demo`."""
    demo = (ROOT / "eval" / "RESULTS.md").read_text().split("### `make demo`")[1].split("###")[0]
    measured = [row[1:] for row in rows_of(demo)]
    for page in (README, CHINESE):
        assert [row[1:] for row in rows_of(page)] == measured
    assert re.findall(r"\d+ %", README) == re.findall(r"\d+ %", CHINESE)


def rows_of(page: str) -> list[list[str]]:
    """Cells of the rows of a page's first table, without bold."""
    rows = page.split("\n\n|")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]


def test_the_walk_of_a_planned_step_takes_at_most_eight_files_and_names_their_functions() -> None:
    guide = (GUIDES / "developing.md").read_text()
    walk = guide.split("## A walk through one planned step")[1].split("\n## ")[0]
    steps = re.findall(r"^\| \d \| `([\w/]+\.py)` (.*?) \|", walk, re.MULTILINE)
    assert len({file for file, _ in steps}) <= len(steps) == 8
    for file, functions in steps:
        code = (ROOT / "sglang_c2t" / file).read_text()
        for name in re.findall(r"`([\w.]+)`", functions):
            for part in name.split("."):
                assert re.search(rf"^ *(def|class) {part}\b", code, re.MULTILINE), (file, name)
