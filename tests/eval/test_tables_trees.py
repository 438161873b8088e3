"""The tree tables: what they print of small made-up trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eval.tables import trees as tree_tables
from sglang_c2t.offline.compare import Curve, resamples
from tests.recordings import random_trees, recording, tree_origin


@pytest.fixture(scope="module")
def draft() -> tree_tables.Draft:
    """Five requests of four roots behind trees of the shape that the tables record."""
    shape = tree_tables.FULL
    tables = [
        recording(
            random_trees(5, 4, topk=shape.topk, num_steps=shape.num_steps, seed=seed),
            roots="every",
            origin=tree_origin(shape),
        )
        for seed in (1, 2)
    ]
    draft = tree_tables.Draft.of("EAGLE", tables[1], tree_tables.learn(tables[0]))
    return replace(draft, drawn=resamples(draft.groups, 10))


@pytest.fixture(scope="module")
def curves(draft: tree_tables.Draft) -> dict[str, Curve]:
    return {
        name: draft.sweep(make, grid if make is tree_tables.of_size else grid[::4])
        for name, (make, grid) in tree_tables.curves_of(draft).items()
    }


def first_cells(lines: list[str]) -> list[str]:
    """Of the rows under the header."""
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]


def test_every_rule_has_a_row_at_its_own_setting(draft: tree_tables.Draft) -> None:
    lines = tree_tables.settings_table(draft)
    assert first_cells(lines) == list(tree_tables.settings(draft))
    assert "nan" not in "".join(lines)


def test_eagle2_verifies_as_many_nodes_as_the_table_says(draft: tree_tables.Draft) -> None:
    for size in (8, 60):
        assert draft.replay(tree_tables.of_size(size)).gamma() == size


def test_eagle2_is_the_measure_at_equal_accept_length(
    draft: tree_tables.Draft, curves: dict[str, Curve]
) -> None:
    """Its own row shows its sizes; the others show how far off they are."""
    lines = tree_tables.equal_tau_table(draft, curves)
    rows = [line for line in lines if line.startswith("| ")]
    assert first_cells(lines) == list(curves)
    assert rows[1] == "| EAGLE-2, N | " + " | ".join(f"{n:.2f}" for n in tree_tables.TARGETS) + " |"
    assert all("[" in row or "not reached in" in row for row in rows[2:])


def test_each_family_has_a_column_and_all_have_one(
    draft: tree_tables.Draft, curves: dict[str, Curve]
) -> None:
    """Where there is one family, both say the same, and what the table of all says."""
    assert set(draft.groups) == {"math"}
    lines = tree_tables.family_table(draft, curves)
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert rows[0] == ["method", "math", "all"]
    assert all(of_family == of_all for _, of_family, of_all in rows[1:])
    pooled = {line.split(" | ")[0]: line for line in tree_tables.equal_tau_table(draft, curves)}
    assert all(cell in pooled[f"| {name}"] for name, cell, _ in rows[1:])


def test_a_looser_second_pruning_verifies_no_less(draft: tree_tables.Draft) -> None:
    lines = tree_tables.variation_table(draft)
    for line in [line for line in lines if line.startswith("| 0")]:
        gammas = [float(cell.split(" / ")[1]) for cell in line.strip("| ").split(" | ")[1:]]
        assert gammas == sorted(gammas)


def test_each_confidence_is_scored_on_the_same_nodes(
    draft: tree_tables.Draft, curves: dict[str, Curve]
) -> None:
    lines = tree_tables.classifier_table(draft, curves)
    assert first_cells(lines) == ["joint threshold", *draft.classifiers]


def test_live_counts_are_those_of_meta_info() -> None:
    """Two verifications of 3 and 5 rows, three drafts accepted; and a request without any."""
    histogram = [0, 0, 0, 1, 0, 1]
    curve = tree_tables._live_curve([
        {"spec_verify_ct": 2, "spec_num_correct_drafts": 3, "spec_cap_lens_histogram": histogram},
        {},
    ])  # fmt: skip
    once = np.ones((1, 2))
    assert curve.tau(once)[0, 0] == 2.5
    assert curve.gamma(once)[0, 0] == 3.0
