"""The tables of long prompts and answers: which drafts a row is of."""

from __future__ import annotations

import torch

from eval.tables import long
from eval.tables import trees as tree_tables
from tests.recordings import random_trees, recording, tree_origin

SHAPE = tree_tables.FULL


def answers(roots: int):
    """Two requests with a tree behind each of so many tokens."""
    return recording(
        random_trees(2, roots, topk=SHAPE.topk, num_steps=SHAPE.num_steps),
        roots="every",
        origin=tree_origin(SHAPE),
    )


def test_parts_of_answers_hold_every_draft_once_by_its_token(monkeypatch) -> None:
    monkeypatch.setattr(long, "PARTS", (2, 5, 6))
    whole = answers(6)
    found = dict(long.parts(whole))
    assert list(found) == ["answers, tokens 1 to 2", "answers, tokens 3 to 5",
                           "answers, tokens 6 to 6"]  # fmt: skip
    assert [part.num_drafts for part in found.values()] == [4, 6, 2]
    start = int(whole.drafts["position"].min())
    last = list(found.values())[-1]
    assert last.drafts["position"].tolist() == [start + 5] * 2
    nodes = torch.cat([part.nodes["joint"] for part in found.values()])
    assert sorted(nodes.tolist()) == sorted(whole.nodes["joint"].tolist())


def test_each_rule_is_judged_and_compared_with_eagle2_on_its_own_set(monkeypatch) -> None:
    monkeypatch.setattr(tree_tables, "GRID", tree_tables.GRID[::4])
    draft = tree_tables.Draft.of("EAGLE", answers(3), {})
    rows, curves = long.comparison(draft, "short")
    assert [name for name, _ in rows] == ["short: joint threshold"]
    (_, cells), rival = rows[0], curves["EAGLE-2, N"]
    assert cells[0].startswith(f"{rival.tau(draft.once)[0, tree_tables.SIZES.index(26)]:.2f} [")
    assert 0 <= float(cells[1]) <= 1
    lines = long.comparison_table("EAGLE", rows)
    assert len([line for line in lines if line.startswith("| short")]) == 1
