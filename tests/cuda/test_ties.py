"""The criterion itself, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from eval.gpu.ties import Reference, excused, parting

CLEAR = [(-0.1, 7), (-3.0, 8)]
TIED = [(-0.7, 7), (-0.8, 8)]
EQUAL = [(-0.7, 8), (-0.7, 7)]  # sorted by token: the reference took the second one


@pytest.mark.parametrize(
    ("top", "answer", "place", "fine"),
    [
        pytest.param([CLEAR, CLEAR], (7, 7), None, True, id="equal answers need no excuse"),
        pytest.param([CLEAR, TIED, CLEAR], (7, 8, 1), 1, True,
                     id="the other token of a tie is one, and what follows is not looked at"),
        pytest.param([CLEAR, EQUAL], (7, 8), 1, True, id="of two equal tokens either comes first"),
        pytest.param([CLEAR, TIED], (7, 9), 1, False, id="a third token is none"),
        pytest.param([CLEAR, TIED], (8, 7), 0, False, id="at a clear place there is none"),
        pytest.param([TIED, TIED], (7,), 1, False, id="to end too early is none"),
        pytest.param([TIED, TIED], (7, 7, 7), 2, False, id="to end too late is none"),
    ],
)  # fmt: skip
def test_what_excuses_an_answer(top: Any, answer: tuple[int, ...], place: Any, fine: bool) -> None:
    reference = Reference((7,) * len(top), top)
    assert parting(reference, answer) == place
    assert excused(reference, answer) is fine


def test_a_reply_is_read_with_the_best_token_first() -> None:
    reply = {
        "output_ids": [4],
        "meta_info": {"output_top_logprobs": [[[-2.0, 3, None], [-0.1, 4, None]]]},
    }
    assert Reference.of(reply) == Reference((4,), [[(-0.1, 4), (-2.0, 3)]])
