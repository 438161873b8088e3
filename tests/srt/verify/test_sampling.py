"""Sampling over draft trees: one token per row from the target, then greedy matching.

Everything is enumerated and every probability is a fraction, so that laws are equal or not:
no random numbers, no tolerance. `Draft` trees hold at most five nodes under the root.

What verification emits may be of any length. The claim is about the text: if the target goes on
by itself behind what was emitted, the text follows the target's own law.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_c2t import tree
from sglang_c2t.cpu.tree_verify import verify_tree

VOCABULARY = 3
MAX_DRAFTS = 5
MAX_DEPTH = 3
SHARES = 6
"""All probabilities of the target are multiples of 1 / SHARES."""

Tokens = tuple[int, ...]
Emissions = Mapping[Tokens, Fraction]
"""How likely each sequence is to be emitted by one verification."""


# -- drafts and the target ----------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """One request's drafted nodes, parents before children; node 0 is the root in front."""

    parents: tuple[int, ...] = ()  # of nodes 1, 2, ...; 0 is the root
    tokens: tuple[int, ...] = ()

    def path(self, node: int) -> list[int]:
        """The drafted nodes from below the root down to the node."""
        return [] if node == 0 else [*self.path(self.parents[node - 1]), node]

    def text(self, node: int) -> Tokens:
        """The drafted tokens up to the node: what its row conditions on."""
        return tuple(self.tokens[i - 1] for i in self.path(node))


ROOT_ONLY = Draft()
CHAIN = Draft((0, 1, 2), (0, 1, 2))
TWINS = Draft((0, 0), (0, 0))
TWIN_FAMILIES = Draft((0, 0, 1, 2, 2), (0, 0, 1, 1, 2))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Bushes and chains of depth up to 3; siblings may be equal."""
    parents: list[int] = []
    depth = [0]
    for _ in range(draw(st.integers(0, MAX_DRAFTS))):
        above = [i for i, here in enumerate(depth) if here < MAX_DEPTH]
        parents.append(draw(st.sampled_from(above)))
        depth.append(depth[parents[-1]] + 1)
    tokens = [draw(st.integers(0, VOCABULARY - 1)) for _ in parents]
    return Draft(tuple(parents), tuple(tokens))


class Target:
    """A model: what it would say next after a text, some tokens perhaps never."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @functools.cache  # noqa: B019 - lives as long as one test
    def shares(self, text: Tokens) -> list[int]:
        """How many of the SHARES of the probability each token has."""
        rng = random.Random(f"{self._seed} {text}")
        cuts = sorted(rng.randint(0, SHARES) for _ in range(VOCABULARY - 1))
        return [right - left for left, right in itertools.pairwise([0, *cuts, SHARES])]

    def prob(self, token: int, text: Tokens) -> Fraction:
        return Fraction(self.shares(text)[token], SHARES)

    def prob_of_rest(self, text: Tokens, start: int) -> Fraction:
        """That the text is continued as it is from place ``start`` on."""
        places = range(start, len(text))
        return math.prod((self.prob(text[i], text[:i]) for i in places), start=Fraction(1))

    def said(self, text: Tokens, ticket: int) -> int:
        """The token that ticket 0 .. SHARES - 1 draws."""
        return bisect.bisect_right(list(itertools.accumulate(self.shares(text))), ticket)


# -- the rule under test ------------------------------------------------------------------


Rule = Callable[[Draft, Tokens], list[bool]]
"""Which drafted nodes stay, given the draft and what the rows (would) say."""


def verify(
    requests: Sequence[Draft],
    samples: Sequence[Tokens],  # per request: one token per node of its draft, root included
    keep: Sequence[Sequence[bool]] | None = None,  # per request: which drafted nodes may stay
    width: int = MAX_DRAFTS + 2,  # of accept_index
) -> list[Tokens]:
    """Tokens that each request emits, with all requests in one batch of packed rows."""
    batch = len(requests)
    parents = torch.full((batch, MAX_DRAFTS), -1)
    tokens, depth = torch.zeros_like(parents), torch.zeros_like(parents)
    kept = torch.zeros_like(parents, dtype=torch.bool)
    for b, draft in enumerate(requests):
        size = len(draft.parents)
        parents[b, :size] = torch.tensor(draft.parents) - 1
        tokens[b, :size] = torch.tensor(draft.tokens)
        depth[b, :size] = torch.tensor([len(draft.path(i)) for i in range(1, size + 1)])
        kept[b, :size] = torch.tensor(keep[b] if keep else [True] * size)
    closed = tree.closed_keys(torch.zeros(batch, MAX_DRAFTS), kept, parents, MAX_DEPTH)
    chosen = tree.best_per_request(closed, MAX_DRAFTS)
    roots = torch.full((batch,), VOCABULARY)
    trees = tree.grow(roots, tokens, parents, depth, chosen, MAX_DRAFTS + 1)

    nodes = [
        [candidate + 1 for candidate in source[:size]]  # -1, the root's, becomes 0
        for source, size in zip(trees.source.tolist(), trees.num_nodes.tolist(), strict=True)
    ]
    target_predict = torch.tensor(
        [sample[node] for sample, live in zip(samples, nodes, strict=True) for node in live]
    )
    predicts = torch.full((batch * (MAX_DRAFTS + 1),), -1, dtype=torch.int32)
    accept_index = torch.full((batch, width), -1, dtype=torch.int32)
    accept_token_num = torch.zeros(batch, dtype=torch.int32)
    verify_tree(
        predicts, accept_index, accept_token_num, trees.tokens, trees.retrieve_index(),
        *tree.child_links(trees.parents), target_predict,
    )  # fmt: skip
    said = predicts.tolist()
    return [
        tuple(said[row] for row in rows[: count + 1])
        for rows, count in zip(accept_index.tolist(), accept_token_num.tolist(), strict=True)
    ]


def all_samples(draft: Draft) -> list[Tokens]:
    """Everything that the rows of the draft, the root's included, can say together."""
    return list(itertools.product(range(VOCABULARY), repeat=len(draft.parents) + 1))


def weight(draft: Draft, sample: Tokens, target: Target) -> Fraction:
    """That the rows say this, each for itself."""
    probs = (target.prob(token, draft.text(node)) for node, token in enumerate(sample))
    return math.prod(probs, start=Fraction(1))


def laws(
    batch: Sequence[Draft], target: Target, rule: Rule | None = None, width: int = MAX_DRAFTS + 2
) -> list[Emissions]:
    """Outcome of each draft; one packed batch has every possible outcome."""
    pairs = [(draft, sample) for draft in batch for sample in all_samples(draft)]
    requests, samples = zip(*pairs, strict=True)
    keep = rule and [rule(draft, sample) for draft, sample in pairs]
    results = iter(verify(requests, samples, keep, width))
    return [
        law((weight(draft, sample, target), next(results)) for sample in all_samples(draft))
        for draft in batch
    ]


def law(outcomes: Iterable[tuple[Fraction, Tokens]]) -> Emissions:
    emissions: dict[Tokens, Fraction] = defaultdict(Fraction)
    for probability, emitted in outcomes:
        emissions[emitted] += probability
    return emissions


def text_law(emissions: Emissions, target: Target, length: int) -> dict[Tokens, Fraction]:
    """Law of the first ``length`` tokens if the target goes on behind what was emitted."""
    return {
        text: sum(
            (
                probability * target.prob_of_rest(text, len(emitted))
                for emitted, probability in emissions.items()
                if emitted[:length] == text[: len(emitted)]
            ),
            start=Fraction(0),
        )
        for text in itertools.product(range(VOCABULARY), repeat=length)
    }


def is_lossless(emissions: Emissions, target: Target) -> bool:
    """Whether texts, up to one token after the longest emission, are the target's; the law of a
    shorter text is a sum of theirs.
    """
    found = text_law(emissions, target, MAX_DEPTH + 2)
    return all(probability == target.prob_of_rest(text, 0) for text, probability in found.items())


# -- what holds ---------------------------------------------------------------------------

seeds = st.integers(0, 2**20)


@settings(max_examples=40)
@given(
    st.lists(drafts(), min_size=1, max_size=3),
    seeds,
    st.sampled_from([0.7, 1.0]),
    st.integers(1, MAX_DRAFTS + 2),
)
@example([ROOT_ONLY, CHAIN, TWINS, TWIN_FAMILIES], 1, 1.0, MAX_DRAFTS + 2)
def test_tree_sampling_is_lossless(batch: list[Draft], seed: int, kept: float, width: int) -> None:
    """Also where the accepted path is cut at ``width`` rows, and where nodes are pruned: by
    anything that the draft knows, and by what the rows above said, of which nothing is lost.
    """

    def known(draft: Draft, sample: Tokens) -> list[bool]:
        paths = [[0, *draft.path(node)] for node in range(1, len(draft.parents) + 1)]
        told = [(node, [sample[above] for above in path]) for *path, node in paths]
        return [random.Random(f"{seed} {draft} {of}").random() < kept for of in told]

    target = Target(seed)
    for emissions in laws(batch, target, known, width):
        assert sum(emissions.values()) == 1
        assert is_lossless(emissions, target)


@settings(max_examples=30)
@given(drafts(), seeds)
@example(CHAIN, 1)
@example(TWIN_FAMILIES, 1)
def test_tree_sampling_with_seeded_noise_is_lossless(draft: Draft, seed: int) -> None:
    """Seeded sampling: the noise of a row depends on its place in the sequence alone."""
    target = Target(seed)
    noises = list(itertools.product(range(SHARES), repeat=MAX_DEPTH + 1))
    alone: list[Tokens] = []
    samples: list[Tokens] = []
    for noise in noises:
        text: Tokens = ()
        for ticket in noise:
            text += (target.said(text, ticket),)
        alone.append(text)
        texts = [draft.text(node) for node in range(len(draft.parents) + 1)]
        samples.append(tuple(target.said(text, noise[len(text)]) for text in texts))
    results = verify([draft] * len(noises), samples)
    for text, emitted in zip(alone, results, strict=True):
        assert emitted == text[: len(emitted)]
    even = Fraction(1, len(noises))
    assert is_lossless(law((even, emitted) for emitted in results), target)
