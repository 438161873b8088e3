"""What a tree gains whose first layer is drawn from the target, beside one behind its sample.

Two ways to serve one request with the same draft trees behind the same texts, each token drawn once
from the target's distribution, by the noise of its position. Of MCSD's target-initialised tree
(arXiv:2409.10644, section 3.1) the lossless form is tried, see ``policies/fork.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 4
LENGTH = 4

Text = tuple[int, ...]
Draw = Callable[[Text], int]


class Tree(dict[int, "Tree"]):
    """Drafts behind a text: by token what is drafted behind it in turn."""

    @property
    def size(self) -> int:
        return sum(1 + behind.size for behind in self.values())


@dataclass(frozen=True)
class Models:
    """A target and a draft, each a function of the text; equal seeds are equal models."""

    seed: int

    def target(self, text: Text) -> list[Fraction]:
        """How likely every token is."""
        shares = [random.Random(repr((self.seed, text, x))).randint(0, 3) for x in range(VOCAB)]
        shares[0] += sum(shares) == 0
        return [Fraction(share, sum(shares)) for share in shares]

    def draft(self, text: Text, layers: int = 2) -> Tree:
        rng = random.Random(repr((self.seed, "draft", text, layers)))
        tokens = rng.sample(range(VOCAB), rng.randint(0, 2)) if layers else []
        return Tree({x: self.draft((*text, x), layers - 1) for x in tokens})

    def likeliest(self, text: Text, k: int) -> list[int]:
        p = self.target(text)
        return sorted(range(VOCAB), key=lambda x: -p[x])[:k]


@dataclass
class Served:
    """An answer, and what it took."""

    text: Text = ()
    forwards: int = 0
    rows: int = 0
    missed: int = 0
    """Forwards whose sample at the root was none of the first layer's tokens."""


def accepted(run: Served, tree: Tree, draw: Draw) -> bool:
    """Draw tokens as long as they are drafted; says whether the last one is a sample that was
    drafted nowhere, and not a leaf.
    """
    while tree:
        token = draw(run.text)
        run.text += (token,)
        if token not in tree:
            return True
        tree = tree[token]
    return False


def committed(models: Models, draw: Draw) -> Served:
    """As SGLang: behind the last accepted token the sample is drawn, and is the next root."""
    run = Served((draw(()),))  # with the prompt
    while len(run.text) < LENGTH:
        tree = models.draft(run.text)
        run.forwards, run.rows = run.forwards + 1, run.rows + 1 + tree.size
        if not accepted(run, tree, draw):
            run.text += (draw(run.text),)
    return run


def deferred(models: Models, draw: Draw, k: int) -> Served:
    """Behind a leaf nothing is drawn: it is the next root, and its children the target's own
    likeliest k. A sample that nobody drafted is committed, or the distribution would change.
    """
    run, known = Served(), True  # the distribution behind the text
    while len(run.text) < LENGTH:
        tree, at = models.draft(run.text), len(run.text)
        if known:
            first = models.likeliest(run.text, k)
            tree = Tree({x: models.draft((*run.text, x)) for x in first})
        run.forwards, run.rows = run.forwards + 1, run.rows + 1 + tree.size
        undrafted = accepted(run, tree, draw)
        run.missed += known and run.text[at] not in tree
        known = not undrafted
    return run


def every_answer(
    models: Models, serve: Callable[[Draw], Served]
) -> Iterator[tuple[Text, Fraction]]:
    """The first tokens of all answers there can be, and how likely each is."""

    def draws(told: Text) -> tuple[Text | None, Text]:
        """The answer where all its draws are told, or the text behind which one is asked for."""

        def draw(text: Text) -> int:
            if len(text) >= len(told):
                raise LookupError(text)
            return told[len(text)]

        try:
            return serve(draw).text, ()
        except LookupError as error:
            return None, error.args[0]

    open_ends: list[tuple[Text, Fraction]] = [((), Fraction(1))]
    while open_ends:
        told, chance = open_ends.pop()
        answer, text = draws(told)
        if answer is not None:
            yield answer[:LENGTH], chance
            continue
        open_ends += [((*text, x), chance * p) for x, p in enumerate(models.target(text)) if p > 0]


@given(st.integers(0, 2**20), st.integers(1, VOCAB))
def test_answers_are_as_likely_as_the_target_says(seed: int, k: int) -> None:
    models = Models(seed)
    for serve in (
        lambda draw: committed(models, draw),
        lambda draw: deferred(models, draw, k),
    ):
        found: dict[Text, Fraction] = {}
        for text, chance in every_answer(models, serve):
            found[text] = found.get(text, Fraction(0)) + chance
        for text, chance in found.items():
            expected = Fraction(1)
            for at, token in enumerate(text):
                expected *= models.target(text[:at])[token]
            assert chance == expected
        assert sum(found.values()) == 1


@given(st.integers(0, 2**20), st.integers(1, VOCAB), st.integers(0, 2**20))
def test_a_first_layer_from_the_target_costs_rows_and_saves_no_forward(
    seed: int, k: int, noise: int
) -> None:
    """It takes as many forwards more as samples are outside of it, and each has the rows of the
    root and of the branches that were not sampled besides.
    """
    models = Models(seed)

    def draw(text: Text) -> int:
        chance = random.Random(repr((noise, len(text)))).random()
        p = models.target(text)
        return next(x for x in range(VOCAB) if chance < sum(p[: x + 1]))

    one, other = committed(models, draw), deferred(models, draw, k)
    shared = min(len(one.text), len(other.text))
    assert one.text[:shared] == other.text[:shared]
    at_the_end = other.forwards - one.forwards - other.missed
    assert at_the_end in {0, 1}, "the sample behind the last leaf is still to come"
    if k == VOCAB:
        assert other.missed == 0
    assert other.rows >= one.rows + other.forwards - one.forwards


@pytest.mark.parametrize("k", [1, 2, 4])
def test_greedy_it_is_a_row_a_forward_and_nothing_else(k: int) -> None:
    """The likeliest token is the sample, and no other child is ever accepted."""
    for seed in range(20):
        models = Models(seed)

        def greedy(text: Text, models: Models = models) -> int:
            return models.likeliest(text, 1)[0]

        one, other = committed(models, greedy), deferred(models, greedy, k)
        assert other.missed == 0
        assert other.forwards >= one.forwards
        assert other.rows > one.rows
