"""The demo's arithmetic and its verdict, without servers."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.demo import Row, arguments, methods, mismatches, summarise
from sglang_c2t.offline.client import Answer, LoadResult


def row(method: str, outputs: list[tuple[int, ...]]) -> Row:
    return Row(method, 16, 100.0, None, None, 0, 0, outputs)


def test_one_differing_token_is_found_and_named_and_a_lost_answer_is_an_error() -> None:
    plain, other = row("plain", [(1, 2), (3,)]), row("c2t", [(1, 2), (4,)])
    assert mismatches([plain, plain, other]) == [
        "c2t at concurrency 16: 1 of 2 outputs differ, first at prompt 1"
    ]
    with pytest.raises(ValueError, match="shorter"):
        mismatches([plain, row("c2t", [(1, 2)])])


def test_a_row_sums_tokens_rows_and_ratios() -> None:
    meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4}
    result = LoadResult([Answer((1, 2, 3), meta), Answer((4,), {})], seconds=2.0)
    work = Counter(target_decode_rows=1, verify_rows=6, draft_forwards=5)
    summary = summarise("c2t", 16, result, work)
    assert summary.tokens_per_second == 2.0
    assert summary.accept_length == (2 + 3) / 2
    assert summary.gamma == 4 / 2
    assert summary.target_rows == 7
    assert summary.draft_forwards == 5
    assert summary.outputs == [(1, 2, 3), (4,)]


def names(*argv: str) -> list[str]:
    return [launch.name for launch in methods(arguments(argv))]


def test_the_short_demo_starts_three_servers_and_the_full_one_makes_the_readmes_table() -> None:
    assert names() == ["no speculation", "fixed 5", "c2t"]
    assert names("--full") == ["no speculation", "fixed 3", "fixed 5", "c2t", "c2t-plus"]


def test_what_is_typed_wins_over_both() -> None:
    assert names("--fixed", "2") == ["no speculation", "fixed 2", "c2t"]
    args = arguments(["--full", "--num-prompts", "7"])
    assert (args.num_prompts, args.max_new_tokens, args.concurrency) == (7, 96, [16, 64])
