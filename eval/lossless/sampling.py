"""Distribution tests: samples of a ``--c2t`` server against the target's exact probabilities.

The exact probability of a continuation is the product of next-token probabilities, cut as the
request asks (temperature, top-p, top-k, min-p). Continuations that are too rare to be tested
one by one share a cell with what else follows their prefix. Pearson's chi-square over the
cells, summed over prompts, then tells whether samples of a server follow.

Power: of all deviations with a total variation distance of d from a distribution, the least
visible shifts d from one half of the probability to the other in proportion, and has a
noncentrality of 4 n d^2. So any deviation of at least ``detectable`` is found with the power
stated, whatever its form; most are found much earlier.

N next tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from eval.metrics import SpecTotals
from eval.server import Server
from sglang_c2t.offline.client import post_all

Array = NDArray[np.float64]
Tokens = tuple[int, ...]

#: False alarms of a whole run, shared by its tests (Bonferroni).
FAMILY_ALPHA = 1e-3
#: Of a deviation that is stated as detectable.
POWER = 0.99
#: What is computed for it: chi-square is an approximation, and here it flatters a little.
COMPUTED_POWER = 0.999

#: Cells expected less often are pooled: chi-square is an approximation for large counts.
LEAST_EXPECTED = 5.0

#: Of the entropy of the first token, over candidate prompts: one prompt each is sampled.
QUANTILES = (0.5, 0.7, 0.85, 0.97)
CANDIDATES = 24

NUM_TOKENS = 4
COPIES = 50  # of a prompt in one HTTP request; SGLang samples them independently

#: Tokens [N] and log-probabilities [N], likeliest first; N < V where the rest is rare.
NextTokens = tuple[NDArray[np.int64], Array]

#: Sums of probabilities are right within this.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Cut:
    """Which part of the target's distribution a request samples from, in SGLang's words."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def params(self) -> dict[str, float]:
        """Sampling parameters of the request."""
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "min_p": self.min_p,
        }  # fmt: skip

    def probabilities(self, log_probs: Array) -> Array:
        """[N] float64 of the tokens with these log-probabilities [N], likeliest first.

        Each bound is taken on the distribution at this temperature, as SGLang's sampler does.
        What the N tokens leave to the others at temperature 1, the others keep below it.
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

#: Stands for every token that has no cell of its own behind a prefix.
REST = -1


@dataclass(frozen=True)
class Cells:
    """Disjoint sets of continuations and their probabilities, which sum to 1.

    A cell is a whole continuation, or ``(*prefix, REST)``: what else begins with that prefix.
    """

    probabilities: Mapping[Tokens, float]

    def of(self, sample: Tokens) -> Tokens:
        """The cell that a sample falls into; raises KeyError for one that cannot be."""
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
    """Cells of all continuations by ``num_tokens`` tokens; prefixes below ``floor`` stay whole.

    Args:
        next_tokens: What may follow each of some prefixes, without any cut.
        cut: What the request asks for.
        num_tokens: Of a continuation.
        floor: Smallest probability of a cell of its own.
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


def worth_sampling(url: str, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Prompts between which the surest and the least sure are spread, see ``QUANTILES``.

    Halves of prompts are candidates as well: what stands in the middle of a text is less sure
    than how an answer begins. Where all is sure, there is nothing to test; where nothing is,
    no draft is accepted.
    """
    candidates = [list(p) for p in prompts] + [list(p[: max(len(p) // 2, 1)]) for p in prompts]
    asked = [Exact(url, prompt, most) for prompt in candidates]
    entropies = [entropy(np.exp(ask([()])[0][1])) for ask in asked]
    order = np.argsort(entropies, kind="stable")
    return [candidates[order[round(q * (len(order) - 1))]] for q in QUANTILES]


def entropy(probs: Array) -> float:
    """Nats of probabilities [N]."""
    return float(stats.entropy(probs))


class Exact:
    """What a server without speculation says may follow a prompt; asked once per prefix."""

    def __init__(self, url: str, prompt_ids: Sequence[int], most: int) -> None:
        """``most``: likeliest tokens asked for at each place."""
        self._url, self._prompt, self._most = url, list(prompt_ids), most
        self._known: dict[Tokens, NextTokens] = {}

    def __call__(self, prefixes: Sequence[Tokens]) -> list[NextTokens]:
        """[N] tokens and log-probabilities behind each prefix."""
        new = [prefix for prefix in prefixes if prefix not in self._known]
        bodies = [("/generate", self._body(prefix)) for prefix in new]
        replies, _ = post_all(self._url, bodies, concurrency=16)
        for prefix, reply in zip(new, replies, strict=True):
            self._known[prefix] = _next_tokens(reply["meta_info"]["output_top_logprobs"][0])
        return [self._known[prefix] for prefix in prefixes]

    def _body(self, prefix: Tokens) -> dict[str, Any]:
        return {
            "input_ids": [*self._prompt, *prefix],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": self._most,
        }


def _next_tokens(place: Sequence[Any]) -> NextTokens:
    tokens = np.array([token for _, token, _ in place])
    log_probs = np.array([value for value, _, _ in place], dtype=np.float64)
    order = np.argsort(-log_probs, kind="stable")
    return tokens[order], log_probs[order]


# -- the test -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of counts over cells, summed over prompts."""

    statistic: float
    dof: int
    p_value: float
    n: int


def fit(counts: Sequence[Counter[Tokens]], cells: Sequence[Cells]) -> Fit:
    """Goodness of fit of the samples of each prompt; p is 0 if one of them cannot be."""
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
    """The counts with cells below ``LEAST_EXPECTED`` in one, and that large enough as well."""
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
    """Total variation distance from which on any deviation is found with probability ``POWER``.

    In [0, 1]; with several prompts, the mean of their distances. See the head of this file.
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
    gamma: float | None

    @property
    def passed(self) -> bool:
        """Whether the samples may be the target's."""
        return self.fit.p_value >= self.alpha


@dataclass(frozen=True)
class Plan:
    """What is sampled, and the exact probabilities of it."""

    prompts: Sequence[Sequence[int]]
    cells: Mapping[str, Sequence[Cells]]  # per cut, those of each prompt
    samples: int  # per test
    alpha: float  # per test

    @classmethod
    def of(
        cls, server: Server, prompts: Sequence[Sequence[int]], samples: int, num_tests: int,
        most: int,
    ) -> Plan:  # fmt: skip
        """Ask the server without speculation for prompts and probabilities."""
        prompts = worth_sampling(server.url, prompts[:CANDIDATES], most)
        floor = LEAST_EXPECTED * len(prompts) / samples
        exact = [Exact(server.url, prompt, most) for prompt in prompts]
        cells = {
            name: [exact_cells(ask, cut, NUM_TOKENS, floor) for ask in exact]
            for name, cut in CUTS.items()
        }
        return cls(prompts, cells, samples, FAMILY_ALPHA / num_tests)

    def test(
        self, server: Server, name: str, cut: str, on_answer: Callable[[], None],
        choices: Sequence[Callable[[], object]] = (),
    ) -> SampleTest:  # fmt: skip
        """Draw the samples of one cut, an equal part behind each choice of policy; test them."""
        counts: list[Counter[Tokens]] = [Counter() for _ in self.prompts]
        metas: list[dict[str, Any]] = []
        choices = choices or (lambda: None,)
        part = self.samples // (len(self.prompts) * len(choices))
        server.flush_cache()
        for choose in choices:
            choose()
            for number, reply in self._replies(server, cut, part, on_answer):
                counts[number][tuple(reply["output_ids"])] += 1
                metas.append(reply["meta_info"])
        found = fit(counts, self.cells[cut])
        totals = SpecTotals.from_meta_infos(metas)
        return SampleTest(
            name, cut, found, self.alpha, detectable(found.n, found.dof, self.alpha),
            totals.accept_length, totals.gamma,
        )  # fmt: skip

    def num_answers(self, num_policies: int) -> int:
        """How many HTTP answers one test waits for."""
        parts = max(num_policies, 1)
        per_prompt = self.samples // (len(self.prompts) * parts)
        return parts * len(self.prompts) * -(-per_prompt // COPIES)

    def _replies(
        self, server: Server, cut: str, per_prompt: int, on_answer: Callable[[], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of the prompt, reply) of each sample; the prompts mixed."""
        rounds = [COPIES] * (per_prompt // COPIES) + [per_prompt % COPIES]
        asked = [(i, copies) for copies in rounds if copies for i in range(len(self.prompts))]
        posts = [("/generate", self._body(i, cut, copies)) for i, copies in asked]
        replies, _ = post_all(server.url, posts, concurrency=2, on_answer=on_answer)
        for (number, _copies), reply in zip(asked, replies, strict=True):
            for one in reply if isinstance(reply, list) else [reply]:
                yield number, one

    def _body(self, number: int, cut: str, copies: int) -> dict[str, Any]:
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": copies}
        return {
            "input_ids": list(self.prompts[number]),
            "sampling_params": {**CUTS[cut].params, **params},
        }
