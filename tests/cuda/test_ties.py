"""The criterion itself, without a GPU."""

from __future__ import annotations

from tests.cuda.ties import Reference, excused, parting

CLEAR = [(-0.1, 7), (-3.0, 8)]
TIED = [(-0.7, 7), (-0.8, 8)]


def test_equal_answers_need_no_excuse() -> None:
    reference = Reference((7, 7), [CLEAR, CLEAR])
    assert parting(reference, (7, 7)) is None
    assert excused(reference, (7, 7))


def test_the_other_token_of_a_tie_is_excused_and_what_follows_is_not_looked_at() -> None:
    reference = Reference((7, 7, 7), [CLEAR, TIED, CLEAR])
    assert parting(reference, (7, 8, 1)) == 1
    assert excused(reference, (7, 8, 1))


def test_a_third_token_or_a_clear_place_is_not() -> None:
    reference = Reference((7, 7), [CLEAR, TIED])
    assert not excused(reference, (7, 9))
    assert not excused(reference, (8, 7))


def test_an_answer_that_ends_too_early_or_too_late_is_not() -> None:
    reference = Reference((7, 7), [TIED, TIED])
    assert not excused(reference, (7,))
    assert not excused(reference, (7, 7, 7))


def test_a_reply_is_read_with_the_best_token_first() -> None:
    reply = {
        "output_ids": [4],
        "meta_info": {"output_top_logprobs": [[[-2.0, 3, None], [-0.1, 4, None]]]},
    }
    assert Reference.of(reply) == Reference((4,), [[(-0.1, 4), (-2.0, 3)]])
