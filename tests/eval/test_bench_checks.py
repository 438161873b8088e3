"""Checks of a run: equal outputs, and metrics that agree with the requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.bench.checks import Comparison, compare_outputs, metric_disagreements
from eval.bench.records import Cell, Request

BASELINE = "no speculation"


def cell(
    method: str, outputs: list[tuple[int, ...]], *, temperature: float = 0.0, concurrency: int = 4,
    repeat: int = 0, first: int = 0,
) -> Cell:  # fmt: skip
    requests = tuple(
        Request(i, "math", 5, len(ids), ids, 0.0, 1.0, 0.5, True)
        for i, ids in enumerate(outputs, first)
    )
    return Cell(method, temperature, concurrency, repeat, "", 1.0, 3, 3.0, {}, {}, {}, [],
                requests)  # fmt: skip


def output_differences(
    cells: list[Cell], baseline: str, **how: bool
) -> tuple[list[Comparison], int]:
    """Comparisons that differ, and how many outputs were compared."""
    found = compare_outputs(cells, baseline, **how)
    return [one for one in found if one.prompts], sum(one.compared for one in found)


ONE = [(1, 2), (3,)]
OTHER = [(1, 2), (4,)]


def test_differing_token_is_found_in_every_greedy_repeat_the_baselines_own_included() -> None:
    cells = [cell("c2t", OTHER), cell(BASELINE, ONE), cell("c2t", ONE, repeat=1)]
    found, compared = output_differences([*cells, cell(BASELINE, OTHER, repeat=2)], BASELINE)
    assert [(one.cell.method, one.cell.repeat) for one in found] == [("c2t", 0), (BASELINE, 2)]
    assert (found[0].prompts, compared) == ((1,), 6)
    assert str(found[0]) == (
        "c2t, temperature 0, 4 at once, repeat 0: 1 of 2 outputs differ from the baseline's, "
        "first at prompt 1"
    )
    elsewhere = cell(BASELINE, OTHER, concurrency=8)
    assert output_differences([cell("c2t", ONE), elsewhere], BASELINE) == ([], 0)


def test_repeats_with_prompts_of_their_own_are_compared_with_the_same_prompts() -> None:
    cells = [
        cell(method, outputs, repeat=repeat, first=2 * repeat)
        for repeat, outputs in enumerate([ONE, OTHER])
        for method in (BASELINE, "c2t")
    ]
    assert output_differences(cells, BASELINE, fresh=True) == ([], 4)
    wrong = [*cells[:3], cell("c2t", ONE, repeat=1, first=2)]
    (found,), _ = output_differences(wrong, BASELINE, fresh=True)
    assert (found.cell.repeat, found.prompts) == (1, (3,))


def test_sampled_outputs_are_compared_only_with_seeds_and_within_a_repeat() -> None:
    cells = [
        cell(method, outputs, temperature=1.0, repeat=repeat)
        for repeat, outputs in enumerate([ONE, OTHER])
        for method in (BASELINE, "c2t")
    ]
    assert output_differences(cells, BASELINE) == ([], 0)
    assert output_differences(cells, BASELINE, seeded=True) == ([], 4)
    wrong = [*cells[:3], replace(cells[3], requests=cells[1].requests)]
    (found,), _ = output_differences(wrong, BASELINE, seeded=True)
    assert (found.cell.method, found.cell.repeat) == ("c2t", 1)


def test_lost_answer_is_an_error_not_a_match() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        output_differences([cell(BASELINE, ONE), cell("c2t", ONE[:1])], BASELINE)


#: Two requests. The first: 3 verifications of 1, 2 and 3 rows, so 0, 1 and 2 drafts, 2 of them
#: accepted. The second ended with its first token and was never verified.
META = {
    "spec_verify_ct": 3,
    "spec_num_proposed_drafts": 3,
    "spec_num_correct_drafts": 2,
    "spec_cap_lens_histogram": [0, 1, 1, 1],
}
SERIES = {
    "c2t:verifications_total{tp_rank='0'}": 3.0,
    "c2t:proposed_drafts_total{tp_rank='0'}": 3.0,
    "c2t:correct_drafts_total{tp_rank='0'}": 2.0,
    "c2t:verify_rows_total{tp_rank='0'}": 6.0,
    "c2t:proposed_length_bucket{le='0.0',tp_rank='0'}": 1.0,
    "c2t:proposed_length_bucket{le='1.0',tp_rank='0'}": 2.0,
    "c2t:proposed_length_bucket{le='2.0',tp_rank='0'}": 3.0,
    "c2t:proposed_length_bucket{le='4.0',tp_rank='0'}": 3.0,
    "c2t:proposed_length_bucket{le='+Inf',tp_rank='0'}": 3.0,
    "c2t:proposed_length_count{tp_rank='0'}": 3.0,
    "c2t:proposed_length_sum{tp_rank='0'}": 3.0,
}


def measured(series: dict[str, float]) -> Cell:
    made = cell("c2t", ONE)
    requests = (replace(made.requests[0], meta=META), made.requests[1])
    return replace(made, metrics=series, requests=requests)


def test_metrics_that_sum_up_the_requests_agree() -> None:
    assert metric_disagreements(measured(SERIES)) == []


EXACT = [name for name in SERIES if "verify_rows" not in name]


@pytest.mark.parametrize("series", EXACT)
@pytest.mark.parametrize("error", [1.0, -1.0])
def test_series_that_is_off_by_one_is_found(series: str, error: float) -> None:
    wrong = {**SERIES, series: SERIES[series] + error}
    (sentence,) = metric_disagreements(measured(wrong))
    assert series.split("{")[0] in sentence
    assert f"grew by {SERIES[series] + error:g}, the requests say {SERIES[series]:g}" in sentence


def test_rows_may_be_verified_for_nothing_but_none_may_be_missing() -> None:
    """A request that ends while its next step is under way leaves such rows."""
    rows = "c2t:verify_rows_total{tp_rank='0'}"
    assert metric_disagreements(measured({**SERIES, rows: 9.0})) == []
    (sentence,) = metric_disagreements(measured({**SERIES, rows: 5.0}))
    assert "c2t:verify_rows_total grew by 5, less than 6" in sentence
