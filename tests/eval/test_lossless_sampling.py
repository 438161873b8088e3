"""The distribution test itself: its cells, its false alarms and its stated power, by simulation.

All draws have fixed seeds, so that nothing here is left to chance.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eval.lossless.sampling import (
    CUTS,
    LEAST_EXPECTED,
    REST,
    Array,
    Cells,
    Cut,
    Exact,
    Plan,
    Tokens,
    detectable,
    exact_cells,
    fit,
    pooled,
)
from tests.eval.fake_server import fake_server
from tests.tiny_llama import VOCAB, next_tokens, tiny_llama

PROMPT = [3, 1, 4, 1, 5]


def listed(prompt: list[int], num_tokens: int) -> dict[Tokens, float]:
    """Oracle: the probability of every continuation, token by token."""
    ask = next_tokens(tiny_llama(0), prompt)
    follows = functools.cache(lambda prefix: ask([prefix])[0])
    found = {}
    for continuation in itertools.product(range(VOCAB), repeat=num_tokens):
        probability = 1.0
        for end, token in enumerate(continuation):
            tokens, log_probs = follows(continuation[:end])
            probability *= math.exp(log_probs[list(tokens).index(token)])
        found[continuation] = probability
    return found


# -- exact probabilities --------------------------------------------------------------------


def test_cells_without_a_floor_are_all_continuations_with_their_probabilities() -> None:
    cells = exact_cells(next_tokens(tiny_llama(0), PROMPT), Cut(), num_tokens=2).probabilities
    wanted = listed(PROMPT, 2)
    assert {cell: p for cell, p in cells.items() if p > 0} == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("floor", [0.0, 0.003, 0.05, 0.5])
@pytest.mark.parametrize("name", CUTS)
def test_cells_share_the_whole_probability(name: str, floor: float) -> None:
    cells = exact_cells(next_tokens(tiny_llama(0), PROMPT), CUTS[name], 3, floor)
    assert sum(cells.probabilities.values()) == pytest.approx(1.0)
    own = [p for cell, p in cells.probabilities.items() if cell[-1] != REST]
    assert min(own, default=1.0) >= floor


def test_every_continuation_falls_into_the_cell_of_its_longest_known_prefix() -> None:
    cells = exact_cells(next_tokens(tiny_llama(0), PROMPT), Cut(), 3, floor=0.02)
    summed: Counter[Tokens] = Counter()
    for continuation, probability in listed(PROMPT, 3).items():
        summed[cells.of(continuation)] += probability  # type: ignore[assignment]
    assert dict(summed) == pytest.approx(
        {c: p for c, p in cells.probabilities.items() if p > 0}, abs=1e-6
    )


def slowly_cut(log_probs: list[float], cut: Cut) -> list[float]:
    """Oracle: token by token, likeliest first."""
    scaled = [math.exp(value / cut.temperature) for value in log_probs]
    probs = [value / sum(scaled) for value in scaled]
    kept: list[float] = []
    for number, prob in enumerate(probs):
        enough = sum(probs[:number]) > cut.top_p or (cut.top_k > 0 and number >= cut.top_k)
        kept.append(0.0 if enough or prob < probs[0] * cut.min_p else prob)
    return [value / sum(kept) for value in kept]


@given(
    st.lists(st.floats(-8, 0), min_size=1, max_size=12),
    st.floats(0.3, 2.0), st.floats(0.05, 1.0), st.integers(-1, 12), st.floats(0, 0.9),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_cuts_keep_what_an_oracle_keeps(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    cut = Cut(temperature, top_p, top_k or -1, min_p)
    values = np.sort(np.array(logits))[::-1]
    log_probs = values - np.log(np.exp(values).sum())
    probs = np.exp(log_probs / temperature) / np.exp(log_probs / temperature).sum()
    # On a bound rounding decides, and both orders of sums are right.
    assume(not np.isclose(np.cumsum(probs)[:-1], top_p, rtol=1e-12).any())
    assume(not np.isclose(probs / probs[0], min_p, rtol=1e-12, atol=0).any())
    assert cut.probabilities(log_probs) == pytest.approx(slowly_cut(list(log_probs), cut))


@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.7"])
def test_tokens_that_were_not_listed_keep_their_share(name: str) -> None:
    """A part of a large vocabulary is listed; the rest can be sampled all the same."""
    listed_part = np.log([0.6, 0.3, 0.09])
    cells = exact_cells(lambda prefixes: [(np.arange(3), listed_part)], CUTS[name], 1)
    assert 0 < cells.probabilities[(REST,)] < 0.02
    assert fit([Counter({(0,): 60, (1,): 30, (2,): 9, (77,): 1})], [cells]).p_value > 0.01


def test_probabilities_asked_from_a_server_are_the_models() -> None:
    model = tiny_llama(0)
    with fake_server(model) as server:
        asked = exact_cells(Exact(server.url, PROMPT), Cut(), 2)
    wanted = exact_cells(next_tokens(model, PROMPT), Cut(), 2)
    assert dict(asked.probabilities) == pytest.approx(dict(wanted.probabilities), abs=1e-6)


# -- false alarms and power -----------------------------------------------------------------

N = 3000
ALPHA = 1e-3 / 35


def uneven(num_cells: int, seed: int) -> Array:
    """Probabilities over a wide range."""
    drawn = np.random.default_rng(seed).exponential(size=num_cells) ** 1.5
    return drawn / drawn.sum()


def as_cells(probabilities: Array) -> Cells:
    return Cells({(token,): float(p) for token, p in enumerate(probabilities)})


def p_values(exact: list[Array], drawn_from: list[Array], n: int, trials: int) -> list[float]:
    """P-values of ``trials`` runs that draw ``n`` samples in all, evenly from each distribution."""
    rng = np.random.default_rng(0)
    cells = [as_cells(p) for p in exact]
    found = []
    for _ in range(trials):
        draws = [rng.multinomial(n // len(exact), p) for p in drawn_from]
        counts = [Counter({(t,): int(c) for t, c in enumerate(draw)}) for draw in draws]
        found.append(fit(counts, cells).p_value)
    return found


def tilted(probabilities: Array, distance: float) -> Array:
    """The least visible deviation of that total variation distance: see the module's head."""
    order = np.argsort(-probabilities)
    upper = np.zeros(len(probabilities), dtype=bool)
    upper[order[np.cumsum(probabilities[order]) <= 0.5]] = True
    share = probabilities[upper].sum()
    factor = np.where(upper, 1 + distance / share, 1 - distance / (1 - share))
    return probabilities * factor


@pytest.mark.parametrize("num_cells", [6, 40, 200])
def test_a_faithful_sampler_raises_as_many_false_alarms_as_stated(num_cells: int) -> None:
    """At 0.05, where they can be counted: 50 of 1,000 expected, 3 sigma are 21."""
    exact = uneven(num_cells, seed=1)
    alarms = sum(p < 0.05 for p in p_values([exact], [exact], N, 1000))
    assert 29 <= alarms <= 71


@pytest.mark.parametrize("num_cells", [6, 40, 200])
def test_the_least_visible_detectable_deviation_is_found_with_the_stated_power(
    num_cells: int,
) -> None:
    """0.99 stated. The share found over 1,000 runs may lie 3 sigma, 0.01, below."""
    exact = uneven(num_cells, seed=2)
    cells = as_cells(exact)
    dof = fit([Counter({(0,): N})], [cells]).dof
    distance = detectable(N, dof, ALPHA)
    biased = tilted(exact, distance)
    assert np.abs(biased - exact).sum() / 2 == pytest.approx(distance)
    found = [p < ALPHA for p in p_values([exact], [biased], N, 1000)]
    assert np.mean(found) >= 0.98
    half = [p < ALPHA for p in p_values([exact], [tilted(exact, distance / 2)], N, 1000)]
    assert np.mean(half) < 0.6, "were half of it found as well, the statement would be idle"


def test_over_several_prompts_the_mean_of_their_deviations_counts() -> None:
    exact = [uneven(30, seed) for seed in (3, 4, 5, 6)]
    dof = fit([Counter({(0,): N // 4})] * 4, [as_cells(p) for p in exact]).dof
    distance = detectable(N, dof, ALPHA)
    scales = (0.0, 0.5, 1.5, 2.0)
    biased = [tilted(p, distance * scale) for p, scale in zip(exact, scales, strict=True)]
    assert np.mean([p < ALPHA for p in p_values(exact, biased, N, 500)]) >= 0.98


def test_a_sample_that_cannot_be_fails_whatever_the_others_are() -> None:
    cells = Cells({(0,): 0.5, (1,): 0.5, (REST,): 0.0})
    faithful = Counter({(0,): 500, (1,): 500})
    assert fit([faithful], [cells]).p_value > 0.5
    assert fit([faithful + Counter({(7,): 1})], [cells]).p_value == 0.0


@given(st.lists(st.floats(0, 60), min_size=1, max_size=40), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_pooling_keeps_the_totals_and_leaves_no_small_cell(
    expected: list[float], seed: int
) -> None:
    counts = np.array(expected)
    observed = np.random.default_rng(seed).poisson(counts).astype(float)
    large, seen = pooled(counts, observed)
    assert large.sum() == pytest.approx(counts.sum())
    assert seen.sum() == observed.sum()
    assert len(large) == 1 or (large >= LEAST_EXPECTED - 1e-9).all()


def test_the_tests_of_a_run_share_one_false_alarm_in_a_thousand_runs() -> None:
    """Neither more, or alarms would be noise, nor less, or deviations would pass."""
    with fake_server(tiny_llama(0)) as server:
        plan = Plan.of(server.url, [PROMPT, [2, 7, 1]], samples=400, num_tests=35)
    assert plan.alpha == ALPHA


def test_more_samples_and_fewer_cells_find_smaller_deviations() -> None:
    assert detectable(4000, 50, ALPHA) < detectable(2000, 50, ALPHA)
    assert detectable(2000, 20, ALPHA) < detectable(2000, 50, ALPHA)
    assert detectable(2000, 0, ALPHA) == 1.0
