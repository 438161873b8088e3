"""Distribution tests: samples of a ``--c2t`` server against the target's exact probabilities.

The probability of a continuation is the product of next-token probabilities, restricted as the
request asks. Rare continuations share a cell with the others of their prefix. Pearson's chi-square
over the cells, summed over prompts, tests the samples of a server.

Power: among deviations of a total variation distance d, the least visible one shifts d from one
half of the probability to the other in proportion, with noncentrality 4 n d^2. So any deviation of
at least ``detectable`` is found with the stated power.

N next tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from eval.lossless.greedy import logprobs
from eval.metrics import SpecTotals
from eval.server import Server
from sglang_c2t.offline.client import post_all

Array = NDArray[np.float64]
Tokens = tuple[int, ...]

#: False alarms of a run, shared by its tests (Bonferroni).
FAMILY_ALPHA = 1e-3
#: The stated power, and the computed one: chi-square is an approximation and flatters a little.
POWER, COMPUTED_POWER = 0.99, 0.999
#: Cells with a smaller expected count are pooled.
LEAST_EXPECTED = 5.0
#: Quantiles of the entropy of the first token, over candidate prompts: one prompt each is sampled.
QUANTILES = (0.5, 0.7, 0.85, 0.97)
CANDIDATES = 24
NUM_TOKENS = 4
COPIES = 50  # of a prompt in one HTTP request; SGLang samples them independently
#: Tokens whose probabilities are asked at each place; the demo models have no more, and the others
#: of a larger vocabulary are less likely than any detectable deviation.
LIKELIEST = 2048
#: Policies under which equal parts of the samples are drawn: pruned drafts and full ones.
SAMPLED_UNDER = {"chains": ("c2t", "fixed"), "trees": ("c2t", "eagle2")}
#: Stands for every token without a cell of its own after a prefix.
REST = -1
#: Sums of probabilities are exact within this.
ROUNDING = 1e-9

#: Tokens [N] and log-probabilities [N], likeliest first; N < V where the rest is rare.
NextTokens = tuple[NDArray[np.int64], Array]


@dataclass(frozen=True)
class Cut:
    """Which part of the target's distribution a request samples, by SGLang's parameters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def params(self) -> dict[str, float]:
        """Sampling parameters of the request."""
        return asdict(self)

    def probabilities(self, log_probs: Array) -> Array:
        """Probabilities [N] from log-probabilities [N], likeliest first.

        Each bound applies to the distribution at this temperature, as in SGLang's sampler. The
        other V - N tokens keep their share of temperature 1 below it.
        """
        probs = np.exp(log_probs / self.temperature)
        if self.temperature != 1.0:
            probs /= probs.sum() + max(0.0, 1.0 - np.exp(log_probs).sum())
        keep = np.cumsum(probs) - probs <= self.top_p
        keep &= probs >= probs[0] * self.min_p
        if self.top_k > 0:
            keep &= np.arange(len(probs)) < self.top_k
        return probs if keep.all() else np.where(keep, probs, 0.0) / probs[keep].sum()


CUTS = {
    "temperature 1": Cut(),
    "temperature 0.7": Cut(temperature=0.7),
    "top-p 0.9": Cut(top_p=0.9),
    "top-k 20": Cut(top_k=20),
    "min-p 0.05": Cut(min_p=0.05),
}


# -- exact probabilities --------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """Disjoint sets of continuations and their probabilities, which sum to 1.

    A cell is a continuation, or ``(*prefix, REST)``: the other continuations of that prefix.
    """

    probabilities: Mapping[Tokens, float]

    def of(self, sample: Tokens) -> Tokens:
        """The cell of a sample; KeyError for an impossible one."""
        if sample in self.probabilities:
            return sample
        for end in range(len(sample) - 1, -1, -1):
            cell = (*sample[:end], REST)
            if cell in self.probabilities:
                return cell
        raise KeyError(sample)


def exact_cells(
    next_tokens: Callable[[Sequence[Tokens]], Sequence[NextTokens]],
    cut: Cut, num_tokens: int, floor: float = 0.0,
) -> Cells:  # fmt: skip
    """Cells of all continuations by ``num_tokens`` tokens.

    ``next_tokens`` returns the tokens after each prefix, without any cut; ``floor`` is the smallest
    probability of a cell of its own.
    """
    cells: dict[Tokens, float] = {}
    front: dict[Tokens, float] = {(): 1.0}
    for _ in range(num_tokens):
        grown: dict[Tokens, float] = {}
        prefixes = list(front)
        if not prefixes:
            break
        for prefix, (tokens, log_probs) in zip(prefixes, next_tokens(prefixes), strict=True):
            joint = front[prefix] * cut.probabilities(log_probs)
            own = joint > max(floor, ROUNDING)
            kept = zip(tokens[own].tolist(), joint[own].tolist(), strict=True)
            grown |= {(*prefix, token): probability for token, probability in kept}
            rest = front[prefix] - float(joint[own].sum())
            cells[(*prefix, REST)] = rest if rest > ROUNDING else 0.0
        front = grown
    return Cells(cells | front)


class Exact:
    """The next tokens of a prompt by a server without speculation; each prefix is asked once."""

    def __init__(self, url: str, prompt_ids: Sequence[int]) -> None:
        self._url, self._prompt = url, list(prompt_ids)
        self._known: dict[Tokens, NextTokens] = {}

    def __call__(self, prefixes: Sequence[Tokens]) -> list[NextTokens]:
        """Tokens and log-probabilities [N] after each prefix."""
        new = [prefix for prefix in prefixes if prefix not in self._known]
        more = [{"top_logprobs_num": LIKELIEST}] * len(new)
        replies = logprobs(self._url, [[*self._prompt, *p] for p in new], 1, more, concurrency=16)
        for prefix, reply in zip(new, replies, strict=True):
            top = sorted(reply["meta_info"]["output_top_logprobs"][0], key=lambda entry: -entry[0])
            tokens = np.array([token for _, token, *_ in top])
            self._known[prefix] = tokens, np.array([value for value, *_ in top], dtype=np.float64)
        return [self._known[prefix] for prefix in prefixes]


def worth_sampling(url: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts from sure to unsure, by the entropy of their first token, see ``QUANTILES``.

    Half prompts are candidates as well: the middle of a text is less sure than the start of an
    answer. A sure prompt tests nothing; after an unsure one no draft is accepted.
    """
    candidates = [list(p) for p in prompts] + [list(p[: max(len(p) // 2, 1)]) for p in prompts]
    entropies = [stats.entropy(np.exp(Exact(url, p)([()])[0][1])) for p in candidates]
    order = np.argsort(entropies, kind="stable")
    return [candidates[order[round(q * (len(order) - 1))]] for q in QUANTILES]


# -- the test -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of counts over cells, summed over prompts."""

    statistic: float
    dof: int
    p_value: float
    n: int


def fit(counts: Sequence[Counter[Tokens]], cells: Sequence[Cells]) -> Fit:
    """Goodness of fit of the samples of each prompt; p is 0 with an impossible sample."""
    statistic, dof, impossible = 0.0, 0, False
    for drawn, exact in zip(counts, cells, strict=True):
        n = drawn.total()
        by_cell: Counter[Tokens] = Counter()
        for sample, count in drawn.items():
            by_cell[exact.of(sample)] += count
        impossible |= any(exact.probabilities[cell] == 0 for cell in by_cell)
        expected, observed = pooled(
            np.array([probability * n for probability in exact.probabilities.values()]),
            np.array([float(by_cell[cell]) for cell in exact.probabilities]),
        )
        statistic += float(((observed - expected) ** 2 / expected).sum())
        dof += len(expected) - 1
    total = sum(drawn.total() for drawn in counts)
    p_value = 0.0 if impossible else float(stats.chi2.sf(statistic, dof)) if dof else 1.0
    return Fit(statistic, dof, p_value, total)


def pooled(expected: Array, observed: Array) -> tuple[Array, Array]:
    """The counts, with cells below ``LEAST_EXPECTED`` merged into one that is large enough."""
    order = np.argsort(expected)
    expected, observed = expected[order], observed[order]
    small = int((expected < LEAST_EXPECTED).sum())
    if small == 0:
        return expected, observed
    enough = np.searchsorted(np.cumsum(expected), LEAST_EXPECTED) + 1
    pool = min(max(small, int(enough)), len(expected))
    return (
        np.r_[expected[:pool].sum(), expected[pool:]],
        np.r_[observed[:pool].sum(), observed[pool:]],
    )


def detectable(n: int, dof: int, alpha: float) -> float:
    """Smallest total variation distance that is found with probability ``POWER``, in [0, 1].

    With several prompts it is the mean of their distances. See the head of this file.
    """
    if dof == 0:
        return 1.0
    critical = stats.chi2.isf(alpha, dof)

    def missing(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, dof, noncentrality)) - COMPUTED_POWER

    needed = optimize.brentq(missing, 1e-9, 100.0 * (critical + dof))
    return min(1.0, float(np.sqrt(needed / (4 * n))))


# -- a server -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleTest:
    """One distribution test of one server."""

    server: str
    cut: str
    fit: Fit
    alpha: float
    detectable: float  # total variation distance found with probability POWER
    accept_length: float | None

    @property
    def passed(self) -> bool:
        """Whether the samples may be the target's."""
        return self.fit.p_value >= self.alpha


@dataclass(frozen=True)
class Plan:
    """Prompts to sample, and their exact probabilities."""

    prompts: Sequence[Sequence[int]]
    cells: Mapping[str, Sequence[Cells]]  # per cut, those of each prompt
    samples: int  # per test
    alpha: float  # per test

    @classmethod
    def of(cls, url: str, prompts: Sequence[Sequence[int]], samples: int, num_tests: int) -> Plan:
        """Ask the server without speculation at ``url`` for probabilities."""
        prompts = worth_sampling(url, prompts[:CANDIDATES])
        floor = LEAST_EXPECTED * len(prompts) / samples
        exact = [Exact(url, prompt) for prompt in prompts]
        cells = {
            name: [exact_cells(ask, cut, NUM_TOKENS, floor) for ask in exact]
            for name, cut in CUTS.items()
        }
        return cls(prompts, cells, samples, FAMILY_ALPHA / num_tests)

    def test(self, server: Server, name: str, cut: str, policies: Sequence[str]) -> SampleTest:
        """Draw the samples of one cut, an equal part under each policy, and test them."""
        counts: list[Counter[Tokens]] = [Counter() for _ in self.prompts]
        metas: list[dict[str, Any]] = []
        part = self.samples // (len(self.prompts) * max(len(policies), 1))
        rounds = [COPIES] * (part // COPIES) + [part % COPIES] * (part % COPIES > 0)
        asked = [(i, copies) for copies in rounds for i in range(len(self.prompts))]
        server.flush_cache()
        for policy in policies or ("",):
            if policy:
                server.switch(policy=policy)
            posts = [("/generate", self._body(i, cut, copies)) for i, copies in asked]
            replies, _ = post_all(server.url, posts, concurrency=2)
            for (number, _copies), reply in zip(asked, replies, strict=True):
                for one in reply if isinstance(reply, list) else [reply]:
                    counts[number][tuple(one["output_ids"])] += 1
                    metas.append(one["meta_info"])
        found = fit(counts, self.cells[cut])
        length = SpecTotals.from_meta_infos(metas).accept_length
        least = detectable(found.n, found.dof, self.alpha)
        return SampleTest(name, cut, found, self.alpha, least, length)

    def _body(self, number: int, cut: str, copies: int) -> dict[str, Any]:
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": copies}
        return {
            "input_ids": list(self.prompts[number]),
            "sampling_params": {**CUTS[cut].params, **params},
        }
