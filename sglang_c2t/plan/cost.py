"""Costs of a step on this machine: milliseconds over rows, over batches, by draft depth.

numpy only; knows neither torch nor SGLang.

Legend: T rows of a target forward, B requests, d draft layers.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.restored import numbers
from sglang_c2t.plan.step import StepTimes
from sglang_c2t.plan.survival import Array

#: Measurements kept of a size.
MEMORY = 9

#: Measurements of a size behind which they alone are believed.
SEED = 3

#: The quantile that is believed of measurements, unless said otherwise.
LOW = 0.25

#: Steps after which a measurement says nothing any more: as many as the server was old when it was
#: made, within these bounds. The first ones of a process may be far off; later a
#: slower machine is a slowdown factor, and a load that comes back need not measure its sizes again.
STALE = 400
STALE_AT_LAST = 4000

#: Sizes in a curve that comes from outside.
LARGEST = 10_000

#: Milliseconds of a forward, of a curve that comes from outside: a nanosecond.
SHORTEST = 1e-6

#: Deviations by which the slope over contexts is known, and forwards of a size that they are from.
REMEMBERED = 20_000
LATELY = 100

#: How many times the noise of a slope its square must be, before any of it is believed.
SURE = 16.0

#: Share of a forward's time that its rows take at least, whatever its context.
LEAST = 0.1

#: Tokens of context for which a state holds the milliseconds.
STATE_TOKENS = 1000

#: Forwards that give the slowdown factor.
MOMENT = 5

#: Share of a slowdown attributed to the machine, not to the size. Below 1, so that costs by size
#: still adapt: costs and factor could else drift apart, and sizes without steps keep old costs.
EXPLAINED = 0.9


class Curve:
    """Milliseconds over a size: low quartiles of what was measured last, at each size.

    A low quartile because nothing makes a forward faster than it is, and the first ones of a
    process or a pause of the machine make it much slower: of up to four measurements the least
    counts.

    Less than :data:`SEED` measurements of a size can make it cheaper than the line between its
    neighbours says, but no dearer: no plan would choose it again, to see that the machine paused.
    The curve falls only where that is sure. Kernels change with the size, so that on some CPUs 16
    rows take two thirds of what 10 take; but a size that was measured less often, or ever was as
    fast as a larger one, is pooled with that, and the quartile of all they measured is theirs.

    Between sizes it is interpolated; beyond them it goes on with the slope from the smallest to the
    largest, though no size costs less than its share of a larger one.

    What was measured long ago gives way to the first new measurement. What was measured before
    serving is as good as long ago, but true: until there are enough measurements it or the least of
    them is believed. Sizes that are :func:`size_bucket` the same are one.

    Args:
        memory: Measurements kept of a size.
        share: Of them, which quantile is believed.
    """

    def __init__(self, memory: int = MEMORY, *, share: float = LOW) -> None:
        self._memory, self._share = memory, share
        self._samples: dict[int, deque[float]] = {}
        self._seeds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self.measurements = 0
        self._steps = 0
        self._sizes: list[int] = []  # measured, rising
        self._alone: dict[int, tuple[float, list[float]]] = {}  # of each, quantile and measurements
        self._values: list[float] | None = None  # of each beside the others; None: to be fitted
        self._pooled = False  # whether some sizes share a value
        self._drawn: dict[float, float] = {}  # what it was asked for since

    def observe(self, size: int, milliseconds: float) -> None:
        """One measurement."""
        self.measurements += 1
        size = size_bucket(size)
        if size in self._samples and not self.measured(size):
            self._samples[size].clear()
            self._seeds.pop(size, None)
        self._samples.setdefault(size, deque(maxlen=self._memory)).append(milliseconds)
        self._changed(size, at=self._steps)

    def step(self) -> None:
        """Another step, whether or not it measured anything here: measurements grow old."""
        self._steps += 1

    def seed(self, points: Mapping[int, float]) -> None:
        """Sizes measured before: of several measurements of one, the least."""
        for size, milliseconds in points.items():
            size = size_bucket(size)
            if size not in self._samples:
                self._seeds[size] = min(milliseconds, self._seeds.get(size, milliseconds))
                self._changed(size, at=-STALE - 1)

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._sizes)

    def measured(self, size: int) -> bool:
        """Whether this size was measured while serving, not too long ago."""
        at = self._measured_at.get(size_bucket(size), -STALE - 1)
        return self._steps - at <= min(max(at, STALE), STALE_AT_LAST)

    def sure(self, size: int) -> bool:
        """Whether this size was measured often enough while serving."""
        return len(self._samples.get(size_bucket(size), ())) >= SEED

    @property
    def seeded(self) -> bool:
        """Whether some sizes were measured before."""
        return bool(self._seeds)

    @property
    def points(self) -> dict[int, float]:
        """The curve at the sizes that were measured."""
        return dict(zip(self._sizes, self._fitted(), strict=True))

    def __call__(self, size: float) -> float:
        """Milliseconds at ``size``; 0 where nothing was ever measured."""
        found = self._drawn.get(size)  # a step asks for the same few sizes again and again
        if found is None:
            found = self._drawn[size] = self._draw(size)
        return found

    def _draw(self, size: float) -> float:
        sizes = self._sizes
        if len(sizes) < 2:
            return self._alone[sizes[0]][0] if sizes else 0.0
        values = self._fitted()
        slope = max((values[-1] - values[0]) / (sizes[-1] - sizes[0]), 0.0)
        if size < sizes[0]:
            return max(values[0] - slope * (sizes[0] - size), values[0] * size / sizes[0])
        right = bisect.bisect_right(sizes, size)
        if right == len(sizes):
            return values[-1] + slope * (size - sizes[-1])
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])

    def stale(self, among: Iterable[int]) -> list[int]:
        """Those of the sizes that were measured too long ago."""
        known = [size for size in among if size_bucket(size) in self._measured_at]
        return [size for size in known if not self.measured(size)]

    def unknown(self, among: Iterable[int]) -> list[int]:
        """Those of the sizes that were never measured: their cost is interpolated."""
        return [size for size in among if size_bucket(size) not in self._measured_at]

    def _fitted(self) -> list[float]:
        if self._values is None:
            pools: list[tuple[float, list[float], int]] = []  # quantile, measurements, sizes
            for value, measured in self._believed():
                sizes = 1
                while pools and pools[-1][0] > value and _mistaken(pools[-1][1], value):
                    _, low, more = pools.pop()
                    measured, sizes = low + measured, more + sizes
                    value = quantile(measured, self._share)
                pools.append((value, measured, sizes))
            self._values = [value for value, _, sizes in pools for _ in range(sizes)]
            self._pooled = len(pools) < len(self._values)
        return self._values

    def _believed(self) -> list[tuple[float, list[float]]]:
        """Quantile and measurements of each size, rising, as far as these can be believed."""
        every = [self._alone[size] for size in self._sizes]
        few = [i for i, (_, measured) in enumerate(every) if len(measured) < SEED]
        if 0 < len(few) < len(every):
            sure = self._sizes.copy(), [value for value, _ in every]
            for i in reversed(few):
                del sure[0][i], sure[1][i]
            line = np.interp([self._sizes[i] for i in few], *sure, right=np.inf).tolist()
            for i, most in zip(few, line, strict=True):
                if max(every[i][1]) > most:
                    measured = [min(ms, most) for ms in every[i][1]]
                    every[i] = min(every[i][0], most), measured
        return every

    def _changed(self, size: int, *, at: int) -> None:
        """A size was measured, at that step."""
        if size not in self._measured_at:
            bisect.insort(self._sizes, size)
        self._measured_at[size] = at
        measured = list(self._samples.get(size, ()))
        if size in self._seeds and len(measured) < SEED:
            measured = [min([self._seeds[size], *measured])] * SEED
        last, now = self._alone.get(size), (quantile(measured, self._share), measured)
        self._alone[size] = now
        # Most measurements leave the curve as it is.
        if last is None or self._pooled or _use(last) != _use(now):
            self._values = None
            self._drawn.clear()


def _use(alone: tuple[float, list[float]]) -> tuple[float, ...]:
    """The part of a size's quantile and measurements that a curve without pools depends on."""
    value, measured = alone
    return (value, min(measured)) if len(measured) >= SEED else (value, *measured)


class SlowdownFactor:
    """How much longer every forward takes now than its cost says: 1 where nothing changed.

    Other work on the machine, its clock and longer contexts make forwards of all sizes slower
    together. Were that learnt as the cost of the sizes in use, other sizes would keep the cost of
    another hour, and seem too slow or too fast in comparison.

    It is the same low quartile as that of a :class:`Curve`, over the last forwards. With another
    one, costs would follow the factor and the factor the costs.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=MOMENT)
        self.now = 1.0

    def observe(self, milliseconds: float, expected: float) -> None:
        """Learn from a forward that took ``milliseconds``, where its cost was ``expected``."""
        if milliseconds > 0 and expected > 0:
            self._ratios.append(milliseconds / expected)
            self.now = quantile(self._ratios, LOW) ** EXPLAINED


class Context:
    """Milliseconds by which forwards of all sizes grow with the tokens before them.

    Attention reads the keys and values of every request, however many of its rows are verified.
    Were that taken for a :class:`SlowdownFactor`, each row would seem to cost as much more.

    It is a slope: by how much longer forwards of a size took when the contexts of their batch held
    more tokens than they mostly do. It is believed as far as it stands out of the noise (James and
    Stein's positive part), so that short contexts, which make no difference, are none.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, float]] = {}  # forwards, tokens, ms, by size
        # Number of deviations from these, and the sums of tokens^2, tokens * ms, ms^2.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._seeded = 0.0

    def observe(self, size: int, tokens: float, milliseconds: float) -> None:
        """A forward of ``size`` rows behind so many ``tokens``, of the whole batch."""
        size = size_bucket(size)
        seen, mean_tokens, mean_ms = self._means.get(size, (0.0, 0.0, 0.0))
        more, longer = tokens - mean_tokens, milliseconds - mean_ms
        kept, new = 1.0 - 1.0 / REMEMBERED, seen / (seen + 1.0)
        products = 1.0, more * more, more * longer, longer * longer
        self._sums = tuple(kept * s + new * p for s, p in zip(self._sums, products, strict=True))
        seen = min(seen + 1.0, LATELY)
        self._means[size] = seen, mean_tokens + more / seen, mean_ms + longer / seen

    def seed(self, per_token: float) -> None:
        """Known before: believed while nothing was seen here."""
        self._seeded = per_token

    @property
    def per_token(self) -> float:
        """Milliseconds; 0 where they do not stand out of the noise."""
        forwards, tokens, both, ms = self._sums
        if both <= 0.0 or forwards < SEED:
            return self._seeded
        slope = both / tokens
        noise = max(ms - slope * both, 0.0) / forwards / tokens  # of the slope, squared
        return slope * max(1.0 - SURE * noise / slope**2, 0.0) or self._seeded

    def __call__(self, tokens: float) -> float:
        """Milliseconds without the slowdown factor."""
        return self.per_token * tokens


class StepCost:
    """Milliseconds of a step: verify(T) + context(tokens) + draft(B, d) + rest(B).

    SGLang drafts the first layer at the end of the step before, in draft extend, so that d layers
    are d - 1 draft forwards. The rest is what the host and draft extend take; it grows with the
    batch. Its median is believed: short steps lose as much to the machine as long ones, and a plan
    that did not know would take too many short ones.

    Uniform steps, in which no gate scores a draft, have layers and a rest of their own.

    ``verify`` and ``context`` hold costs without the :class:`SlowdownFactor` of the moment, which
    is multiplied with them.
    """

    def __init__(self) -> None:
        self.slowdown = SlowdownFactor()
        self.context = Context()
        self.curves = {
            "verify": Curve(),
            "layer": Curve(),
            "rest": Curve(share=0.5),
            "uniform_layer": Curve(),
            "uniform_rest": Curve(share=0.5),
        }
        self.verify, self.layer, self.rest, *_ = self.curves.values()

    def observe(
        self, times: StepTimes, *, batch: int, layers: int, context: int = 0, uniform: bool = False
    ) -> None:
        """Learn from the ``times`` of a step of B requests that drafted d ``layers``.

        Steps of dummy requests seed the curves.
        """
        per_layer = {batch: times.draft_ms / (layers - 1)} if layers > 1 else {}
        if times.step_ms is None:
            self.verify.seed({times.rows: times.verify_ms})
            self.layer.seed(per_layer)
            return
        for curve in self.curves.values():
            curve.step()
        longer = self.context(context)
        if self.verify.sure(times.rows):
            self.slowdown.observe(times.verify_ms, self.verify(times.rows) + longer)
        usual_ms = times.verify_ms / self.slowdown.now
        self.verify.observe(times.rows, max(usual_ms - longer, LEAST * usual_ms))
        self.context.observe(times.rows, context, times.verify_ms)
        layer, rest = self._host_curves(uniform)
        rest.observe(batch, max(times.step_ms - times.verify_ms - times.draft_ms, 0.0))
        for size, milliseconds in per_layer.items():
            layer.observe(size, milliseconds)

    def one(
        self, rows: int, batch: int, layers: int, *, context: int = 0, uniform: bool = False
    ) -> float:
        """Milliseconds of a step. A kind that was never measured costs what the other one does.

        In plain numbers, not as one of an array: it is asked several times a step.
        """
        verify = (self.verify(rows) + self.context(context)) * self.slowdown.now
        layer, rest = self._draft(batch, uniform)
        return verify + max(layers - 1, 0) * layer + rest

    def __call__(
        self, rows: NDArray[np.int64], batch: int, depths: Sequence[int], *, context: int = 0
    ) -> Array:
        """[d, n] milliseconds of steps with T of ``rows`` [n] after each of d ``depths``."""
        verify = np.array([self.verify(size) for size in rows.tolist()]) + self.context(context)
        verify *= self.slowdown.now
        layer, rest = self._draft(batch)
        return np.array([[max(d - 1, 0) * layer + rest] for d in depths]) + verify

    def uniform_measured(self, batch: int) -> bool:
        """Whether uniform steps of B requests were measured, not too long ago."""
        return self.curves["uniform_rest"].measured(batch)

    def state(self) -> dict[str, Any]:
        """The curves' points at the slowdown of the moment, for JSON."""
        points = {name: curve.points for name, curve in self.curves.items()}
        points["verify"] = {size: ms * self.slowdown.now for size, ms in points["verify"].items()}
        longer = self.context(STATE_TOKENS) * self.slowdown.now
        points["context"] = {STATE_TOKENS: longer} if longer else {}
        return points

    def restore(self, state: Mapping[str, Any]) -> None:
        """Seed the curves; ValueError for what are no points of them."""
        for name, curve in self.curves.items():
            # Costs that were measured elsewhere may know of one kind of step only.
            points = state[name] if name in {"verify", "layer", "rest"} else state.get(name, {})
            curve.seed(_points(name, points))
        points = _points("context", state.get("context", {}))
        self.context.seed(max((ms / tokens for tokens, ms in points.items()), default=0.0))

    def _draft(self, batch: int, uniform: bool = False) -> tuple[float, float]:
        """Milliseconds of a draft layer, and of the rest."""
        layer, rest = self._host_curves(uniform)
        layer, rest = layer if layer.known else self.layer, rest if rest.known else self.rest
        return layer(batch), rest(batch)

    def _host_curves(self, uniform: bool) -> tuple[Curve, Curve]:
        """A layer and the rest, of a kind of step."""
        if uniform:
            return self.curves["uniform_layer"], self.curves["uniform_rest"]
        return self.layer, self.rest


def _points(name: str, state: Any) -> dict[int, float]:
    """Milliseconds by size, of a state; ValueError for what are none.

    A forward of the target that took no time would make every rate infinite.
    """
    points = dict(state)
    if len(points) > LARGEST:
        raise ValueError(f"{name} holds {len(points)} sizes, of {LARGEST} at most")
    sizes = numbers(name, [int(size) for size in points], 1, 2**31 - 1)
    least = SHORTEST if name == "verify" else 0.0
    costs = numbers(name, list(points.values()), least, 1e6)
    return dict(zip(sizes.astype(int).tolist(), costs.tolist(), strict=True))


@lru_cache(maxsize=4096)
def size_bucket(size: int, *, bits: int = 4) -> int:
    """The nearest size whose first ``bits`` bits say all: with four, of eight between a power of
    two and the next, so that where every size can occur each is measured often. All tiers of CUDA
    graphs are such sizes.
    """
    step = _step(size, bits)
    return (size + step // 2) // step * step


def next_bucket(size: int) -> int:
    """The next larger size of which a :class:`Curve` keeps a cost of its own."""
    step = _step(size)
    return size // step * step + step


def _step(size: int, bits: int = 4) -> int:
    """How far apart numbers are of which, around ``size``, the first ``bits`` bits say all."""
    return 1 << max(size.bit_length() - bits, 0)


def quantile(values: Iterable[float], share: float) -> float:
    """The one of ``values`` that is ``share`` of the way from the least to the largest."""
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * share)]


def _mistaken(measured: list[float], larger: float) -> bool:
    """Whether a size only seems to take longer than a ``larger`` one does."""
    return len(measured) < SEED or min(measured) <= larger


def spread(sizes: Sequence[int], count: int = 8) -> tuple[list[int], list[int]]:
    """Which of the rising ``sizes`` to measure: ``count`` at most that span them, each about as
    many times the one before, and those between, without what is :func:`size_bucket` one of these.

    Round ones, where there are such: kernels are made for these, and a price that is drawn between
    two that are badly served would hide the good ones.
    """
    wanted = [size_bucket(round(goal), bits=2) for goal in np.geomspace(sizes[0], sizes[-1], count)]
    wanted[-1] = sizes[-1]
    span = sorted({min(sizes, key=lambda size: abs(size - goal)) for goal in wanted})
    known = {size_bucket(size) for size in span}
    return span, [size for size in sizes if size_bucket(size) == size and size not in known]
