"""Costs of a step on this machine in ms: by rows, by batch size and by draft depth.

Legend: T rows of a target forward, B requests, d draft layers.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_c2t.plan.restored import numbers
from sglang_c2t.plan.step import StepTimes
from sglang_c2t.plan.survival import Array

#: Measurements kept per size.
MEMORY = 9

#: Measurements of a size after which its seed and its neighbours no longer correct them.
SEED = 3

#: Default quantile of the measurements that a curve uses.
LOW = 0.25

#: Standard deviations between the quartiles of a normal distribution.
QUARTILES = 1.35

#: A measurement expires after as many steps as the server had made when it was taken, within
#: these bounds. The first ones of a process may be far off. Later, the slowdown factor covers a
#: slower machine, and a load that returns need not measure its sizes again.
STALE = 400
STALE_AT_LAST = 4000

#: Most sizes in a restored curve.
LARGEST = 10_000

#: Least milliseconds of a forward in a restored curve: a nanosecond.
SHORTEST = 1e-6

#: Deviations that the slope over contexts averages, and forwards that a size's means average.
REMEMBERED = 20_000
LATELY = 100

#: A slope over contexts, and a size's distance from the line between its neighbours, count only as
#: far as their square exceeds the variance of their noise by this factor.
SURE = 16.0

#: Least share of a forward's time that its rows take, at any context.
LEAST = 0.1

#: Tokens of context to which the milliseconds of a saved state refer.
STATE_TOKENS = 1000

#: Draft-free steps whose draft extends are averaged.
REMEMBERED_STEPS = 1024

#: Forwards that the slowdown factor averages.
MOMENT = 5

#: Share of a slowdown attributed to the machine, not to the size. Below 1, so that costs by size
#: still adapt. Otherwise costs and factor could drift apart, and idle sizes would keep old costs.
EXPLAINED = 0.9


class Curve:
    """Milliseconds by size: the low quartile of the latest measurements of each size.

    The low quartile, because the first forwards of a process and pauses of the machine take much
    longer. Of up to four measurements the curve uses the least.

    Fewer than :data:`SEED` measurements of a size can only lower it below the line between its
    neighbours. If a pause could raise it, no plan would choose that size again. The curve falls
    only where the measurements agree. Kernels change with the size: on some CPUs 16 rows take two
    thirds of the time of 10. A size is pooled with a larger one if it has few measurements or was
    ever as fast. Both then get the quartile of their joint measurements. Last, each size is moved
    towards the line between its neighbours, as far as noise may explain its distance.

    Between sizes the curve interpolates. Beyond them it continues with the slope from the smallest
    to the largest size, though no size costs less than its share of a larger one.

    The first new measurement replaces expired ones. Seeds come from before serving and count as
    expired. Until there are :data:`SEED` new measurements, the curve uses the least of these and
    the seed. Sizes with one :func:`size_bucket` share a cost.

    Args:
        share: Quantile of a size's measurements that the curve uses.
    """

    def __init__(self, *, share: float = LOW) -> None:
        self._share = share
        self._samples: dict[int, deque[float]] = {}
        self._seeds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self.measurements = 0
        self._steps = 0
        self._sizes: list[int] = []  # measured, increasing
        self._alone: dict[int, tuple[float, list[float]]] = {}  # quantile and measurements, by size
        self._noise: dict[int, float] = {}  # relative deviation of a measurement, by size
        self._values: list[float] | None = None  # by size, fitted together; None: to be fitted
        self._drawn: dict[float, float] = {}  # results since the last fit

    def observe(self, size: int, milliseconds: float) -> None:
        """Add a measurement."""
        self.measurements += 1
        size = size_bucket(size)
        if size in self._samples and not self.measured(size):
            self._samples[size].clear()
            self._seeds.pop(size, None)
        self._samples.setdefault(size, deque(maxlen=MEMORY)).append(milliseconds)
        self._changed(size, at=self._steps)

    def step(self) -> None:
        """Count a step, so that measurements expire, even if the step measured nothing here."""
        self._steps += 1

    def seed(self, points: Mapping[int, float], *, anew: bool = False) -> None:
        """Add measurements from before serving; of several of one size, keep the least. ``anew``:
        without the earlier ones.
        """
        if anew:
            self._seeds.clear()
        for size, milliseconds in points.items():
            size = size_bucket(size)
            if size not in self._samples:
                self._seeds[size] = min(milliseconds, self._seeds.get(size, milliseconds))
                self._changed(size, at=-STALE - 1)

    @property
    def known(self) -> bool:
        """Whether the curve has any measurement."""
        return bool(self._sizes)

    def measured(self, size: int) -> bool:
        """Whether serving measured this size and that measurement has not expired."""
        at = self._measured_at.get(size_bucket(size), -STALE - 1)
        return self._steps - at <= min(max(at, STALE), STALE_AT_LAST)

    def measured_near(self, size: int, times: int = 1) -> bool:
        """Whether there are so many measurements of this size and of those from two thirds to three
        halves of it; see :meth:`measured`.
        """
        near = {size_bucket(size)}.union(n for n in self._sizes if 2 * size <= 3 * n <= 4.5 * size)
        return sum(len(self._samples[n]) for n in near if self.measured(n)) >= times

    def sure(self, size: int) -> bool:
        """Whether serving measured this size at least :data:`SEED` times."""
        return len(self._samples.get(size_bucket(size), ())) >= SEED

    @property
    def seeded(self) -> bool:
        """Whether some sizes were measured before serving."""
        return bool(self._seeds)

    @property
    def points(self) -> dict[int, float]:
        """The curve at the measured sizes."""
        return dict(zip(self._sizes, self._fitted(), strict=True))

    def __call__(self, size: float) -> float:
        """Return milliseconds at ``size``; 0 if nothing was ever measured."""
        found = self._drawn.get(size)  # a step asks for the same few sizes many times
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
        """Return those of the sizes whose measurements have expired."""
        known = [size for size in among if size_bucket(size) in self._measured_at]
        return [size for size in known if not self.measured(size)]

    def unknown(self, among: Iterable[int]) -> list[int]:
        """Return those of the sizes that were never measured; their cost is interpolated."""
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
            self._values = self._shrunk([v for v, _, sizes in pools for _ in range(sizes)])
        return self._values

    def _shrunk(self, values: list[float]) -> list[float]:
        """Return the ``values`` of all sizes without what is noise by James and Stein's estimator:
        else sizes that were lucky a few times would be chosen.
        """
        if not self._noise:
            return values
        found, noise = values.copy(), median(self._noise.values())
        for i in range(1, len(values) - 1):
            left, size, right = self._sizes[i - 1 : i + 2]
            share = (size - left) / (right - left)
            line = (1.0 - share) * values[i - 1] + share * values[i + 1]
            least = SURE * (noise * values[i]) ** 2 / max(len(self._samples.get(size, ())), 1)
            away = values[i] - line
            found[i] = line if away**2 <= least else values[i] - least / away
        return found

    def _believed(self) -> list[tuple[float, list[float]]]:
        """Quantile and measurements by increasing size, capped where a size has few of them."""
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
        """Update a size measured at step ``at``."""
        if size not in self._measured_at:
            bisect.insort(self._sizes, size)
        self._measured_at[size] = at
        measured = list(self._samples.get(size, ()))
        if size in self._seeds and len(measured) < SEED:
            measured = [min([self._seeds[size], *measured])] * SEED
        if len(measured) > SEED:
            low, middle, high = (quantile(measured, share) for share in (LOW, 0.5, 1.0 - LOW))
            self._noise[size] = (high - low) / QUARTILES / max(middle, SHORTEST)
        self._alone[size] = quantile(measured, self._share), measured
        self._values = None
        self._drawn.clear()


class SlowdownFactor:
    """Ratio of the time of current forwards to their cost; 1 if nothing changed.

    Other work on the machine, its clock and longer contexts slow all sizes down together. Learnt as
    the cost of the sizes in use, such a slowdown would distort the comparison with other sizes.

    It is the same low quartile as in :class:`Curve`, over the last forwards. With another quantile,
    costs and factor would chase each other.
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
    """Milliseconds that forwards of all sizes gain with the tokens of context in their batch.

    Attention reads the keys and values of every request, however many of its rows are verified.
    A :class:`SlowdownFactor` would charge that time to each row.

    The slope compares forwards of one size whose batches held more or fewer tokens than their mean.
    James and Stein's positive-part estimator shrinks it by its noise, so that short contexts, which
    make no difference, give 0.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, float]] = {}  # forwards, tokens, ms, by size
        # Number of deviations from these means, and the sums of tokens^2, tokens * ms, ms^2.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._seeded = 0.0

    def observe(self, size: int, tokens: float, milliseconds: float) -> None:
        """Add a forward of ``size`` rows over ``tokens`` of context in the whole batch."""
        size = size_bucket(size)
        seen, mean_tokens, mean_ms = self._means.get(size, (0.0, 0.0, 0.0))
        more, longer = tokens - mean_tokens, milliseconds - mean_ms
        kept, new = 1.0 - 1.0 / REMEMBERED, seen / (seen + 1.0)
        products = 1.0, more * more, more * longer, longer * longer
        self._sums = tuple(kept * s + new * p for s, p in zip(self._sums, products, strict=True))
        seen = min(seen + 1.0, LATELY)
        self._means[size] = seen, mean_tokens + more / seen, mean_ms + longer / seen

    def seed(self, per_token: float) -> None:
        """Set the slope that holds until forwards give one."""
        self._seeded = per_token

    @property
    def per_token(self) -> float:
        """Milliseconds per token; 0 if they do not exceed the noise."""
        forwards, tokens, both, ms = self._sums
        if both <= 0.0 or forwards < SEED:
            return self._seeded
        slope = both / tokens
        noise = max(ms - slope * both, 0.0) / forwards / tokens  # of the slope, squared
        return slope * max(1.0 - SURE * noise / slope**2, 0.0) or self._seeded

    def __call__(self, tokens: float) -> float:
        """Return milliseconds for ``tokens``, without the slowdown factor."""
        return self.per_token * tokens


class StepCost:
    """Milliseconds of a step: verify(T) + request * B + context(tokens) + draft(B, d) + rest(B).

    SGLang drafts the first layer at the end of the previous step, in draft extend, so d layers need
    d - 1 draft forwards. The rest is the time of the host and draft extend; it grows with the
    batch. Its curve uses the median: a low quantile would hide what short steps lose to the
    machine, and plans would take too many of them.

    Uniform steps, in which no gate scores a draft, have separate curves for layers and rest.
    Draft-free steps have one for their rest, and one for a draft extend of up to D + 1 of them.

    ``request`` is what one more request adds to a forward of as many rows, without its context. It
    is measured before serving. Without it, rows measured in a few requests would seem cheap to a
    large batch.

    ``verify``, ``request`` and ``context`` hold costs without the current :class:`SlowdownFactor`,
    which multiplies them.
    """

    def __init__(self) -> None:
        self.slowdown = SlowdownFactor()
        self.context = Context()
        self.request = 0.0
        # Least ms of a forward of dummy requests, by rows, then by B and tokens of context.
        self._dummies: dict[int, dict[tuple[int, int], float]] = {}
        self.curves = {
            "verify": Curve(),
            "layer": Curve(),
            "rest": Curve(share=0.5),
            "uniform_layer": Curve(),
            "uniform_rest": Curve(share=0.5),
            "draft_free_rest": Curve(share=0.5),
            "draft_free_extend": Curve(share=0.5),
        }
        self.verify, self.layer, self.rest, *_ = self.curves.values()
        self._draft_free_steps = self._extends = 0.0  # decayed

    def observe(
        self,
        times: StepTimes,
        *,
        batch: int,
        layers: int,
        context: int = 0,
        uniform: bool = False,
        dummy: bool = False,
    ) -> None:
        """Learn from the ``times`` of a step of B requests that drafted d ``layers``. Steps of
        ``dummy`` requests seed the curves.
        """
        per_layer = {batch: times.draft_ms / (layers - 1)} if layers > 1 else {}
        if dummy:
            self._seed(times, batch, context)
            self.layer.seed(per_layer)
            return
        for curve in self.curves.values():
            curve.step()
        longer = self.context(context) + self.request * batch
        if self.verify.sure(times.rows):
            self.slowdown.observe(times.verify_ms, self.verify(times.rows) + longer)
        usual_ms = times.verify_ms / self.slowdown.now
        self.verify.observe(times.rows, max(usual_ms - longer, LEAST * usual_ms))
        self.context.observe(times.rows, context, times.verify_ms)
        layer, rest = self._host_curves(uniform)
        if layers == 0:
            rest = self.curves["draft_free_rest"]
            kept = 1.0 - 1.0 / REMEMBERED_STEPS
            self._draft_free_steps = kept * self._draft_free_steps + 1.0
            self._extends = kept * self._extends + times.extends
            if times.extends:
                self.curves["draft_free_extend"].observe(batch, times.draft_ms / times.extends)
        if times.step_ms is not None:
            rest.observe(batch, max(times.step_ms - times.verify_ms - times.draft_ms, 0.0))
        for size, milliseconds in per_layer.items():
            layer.observe(size, milliseconds)

    def one(
        self,
        rows: int,
        batch: int,
        layers: int,
        *,
        context: int = 0,
        uniform: bool = False,
        as_measured: bool = False,
    ) -> float:
        """Return milliseconds of a step. A kind that was never measured costs the same as the
        other. A uniform step costs at most what a planned one does, because it does less, unless
        it is wanted ``as_measured``. It computes scalars, not arrays, because a step calls it
        several times.
        """
        verify = self.target(rows, batch, context)
        layer, rest = self._draft(batch, uniform)
        if uniform and not as_measured:
            layer, rest = map(min, (layer, rest), self._draft(batch))
        return verify + max(layers - 1, 0) * layer + rest

    def target(self, rows: int, batch: int, context: int) -> float:
        """Return milliseconds of the target's forward."""
        longer = self.request * batch + self.context(context)
        return (self.verify(rows) + longer) * self.slowdown.now

    def extends_per_step(self, burst: int) -> float:
        """Return draft extends per draft-free step, lately. Every ``burst`` of D + 1 needs one, but
        requests that end before need none. One full burst is assumed in addition.
        """
        return (self._extends + 1.0) / (self._draft_free_steps + burst)

    def draft_free(self, rows: int, batch: int, *, context: int, extends: float) -> float:
        """Return milliseconds of a draft-free step with ``extends`` draft extends. What was never
        measured counts as 0.
        """
        rest, extend = self.curves["draft_free_rest"], self.curves["draft_free_extend"]
        return self.target(rows, batch, context) + rest(batch) + extends * extend(batch)

    def draft_free_measured(self, batch: int) -> bool:
        """Whether a burst of about B requests was measured, and the measurement has not expired."""
        names = "draft_free_rest", "draft_free_extend"
        return all(self.curves[name].measured_near(batch) for name in names)

    def __call__(
        self, rows: NDArray[np.int64], batch: int, depths: Sequence[int], *, context: int = 0
    ) -> Array:
        """Return [d, n] milliseconds of steps with T of ``rows`` [n] after each of d ``depths``."""
        longer = self.request * batch + self.context(context)
        verify = np.array([self.verify(size) for size in rows.tolist()]) + longer
        verify *= self.slowdown.now
        layer, rest = self._draft(batch)
        return np.array([[max(d - 1, 0) * layer + rest] for d in depths]) + verify

    def uniform_measured(self, batch: int) -> bool:
        """Whether enough uniform steps of about B requests were measured, and have not expired. One
        slow step would hide for long that uniform steps do less.
        """
        return self.curves["uniform_rest"].measured_near(batch, SEED)

    def state(self) -> dict[str, Any]:
        """Return the curves' points at the current slowdown, for JSON."""
        points = {name: curve.points for name, curve in self.curves.items()}
        points["verify"] = {size: ms * self.slowdown.now for size, ms in points["verify"].items()}
        longer = self.context(STATE_TOKENS) * self.slowdown.now
        points["context"] = {STATE_TOKENS: longer} if longer else {}
        points["request"] = {1: self.request * self.slowdown.now} if self.request else {}
        return points

    def restore(self, state: Mapping[str, Any]) -> None:
        """Seed the curves; ValueError if ``state`` holds no points for them."""
        for name, curve in self.curves.items():
            # Costs from another machine may cover one kind of step only.
            points = state[name] if name in {"verify", "layer", "rest"} else state.get(name, {})
            curve.seed(_points(name, points))
        self.request = _points("request", state.get("request", {})).get(1, 0.0)
        points = _points("context", state.get("context", {}))
        self.context.seed(max((ms / tokens for tokens, ms in points.items()), default=0.0))

    def _seed(self, times: StepTimes, batch: int, context: int) -> None:
        """Learn from a forward of ``batch`` dummy requests. Of forwards of as many rows, one over
        more ``context`` shows what a token costs, and one of more requests what a request adds.
        """
        mine, sizes = self._dummies.setdefault(times.rows, {}), (batch, context)
        mine[sizes] = min(times.verify_ms, mine.get(sizes, times.verify_ms))
        (few, tokens), (many, most) = min(mine), max(mine)
        short = min(tokens for requests, tokens in mine if requests == many)
        if short < most:
            longer = mine[many, most] - mine[many, short]
            self.context.seed(max(longer / (most - short), 0.0))
        each = self.context(1)
        if few < many:
            more = mine[many, most] - mine[few, tokens] - each * (most - tokens)
            self.request = max(more / (many - few), 0.0)
        alone = {
            rows: min(
                max(ms - self.request * b - each * c, LEAST * ms) for (b, c), ms in of.items()
            )
            for rows, of in self._dummies.items()
        }
        self.verify.seed(alone, anew=True)

    def _draft(self, batch: int, uniform: bool = False) -> tuple[float, float]:
        """Return milliseconds of a draft layer and of the rest."""
        layer, rest = self._host_curves(uniform)
        layer, rest = layer if layer.known else self.layer, rest if rest.known else self.rest
        return layer(batch), rest(batch)

    def _host_curves(self, uniform: bool) -> tuple[Curve, Curve]:
        """Return the curves of a layer and of the rest for a kind of step."""
        if uniform:
            return self.curves["uniform_layer"], self.curves["uniform_rest"]
        return self.layer, self.rest


def _points(name: str, state: Any) -> dict[int, float]:
    """Return milliseconds by size from a saved state; ValueError if invalid. A target forward of 0
    ms would make every rate infinite.
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
    """Round to the nearest size with ``bits`` significant bits. Four bits give eight sizes between
    a power of two and the next. Where every size can occur, each bucket then gets many
    measurements. All tiers of CUDA graphs are such sizes.
    """
    step = _step(size, bits)
    return (size + step // 2) // step * step


def next_bucket(size: int) -> int:
    """Return the next larger size for which a :class:`Curve` keeps a separate cost."""
    step = _step(size)
    return size // step * step + step


def _step(size: int, bits: int = 4) -> int:
    """Return the distance between numbers with ``bits`` significant bits around ``size``."""
    return 1 << max(size.bit_length() - bits, 0)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the element of ``values`` at quantile ``share``."""
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * share)]


def _mistaken(measured: list[float], larger: float) -> bool:
    """Whether a size only seems slower than a ``larger`` one."""
    return len(measured) < SEED or min(measured) <= larger
