"""What a run comes to, in sentences made of its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from eval.report.cells import STATIC, Rate, Results, promptness, whole
from eval.report.document import Mark, Text
from eval.report.intervals import Ratio


@dataclass(frozen=True)
class Rung:
    """Who won at one temperature and concurrency."""

    temperature: float
    concurrency: int
    best: str
    speed: float
    ratio: Ratio | None  # of the best to no speculation
    level_with: tuple[str, ...]  # methods that the interval does not tell from the best
    losers: tuple[str, ...]  # slower than no speculation


def rungs(results: Results) -> Iterator[Rung]:
    """One for each temperature and concurrency at which anything answered."""
    for temperature in results.temperatures:
        for concurrency in results.concurrencies(temperature):
            found = rung(results, temperature, concurrency)
            if found is not None:
                yield found


def rung(results: Results, temperature: float, concurrency: int) -> Rung | None:
    """Who won here."""
    at = (temperature, concurrency)
    speeds = {name: results.speed(name, *at) for name in results.names}
    means = {name: speed.mean for name, speed in speeds.items() if speed is not None}
    if not means:
        return None
    best, base = max(means, key=means.__getitem__), results.baseline
    beside = {name: results.ratio(best, name, *at) for name in means if name != best}
    losing = {name: results.ratio(name, base, *at) for name in means if base not in (None, name)}
    return Rung(
        *at,
        best,
        means[best],
        results.ratio(best, base, *at) if base is not None and best != base else None,
        tuple(name for name, r in beside.items() if r is not None and r.mark is Mark.TIE),
        tuple(name for name, ratio in losing.items() if ratio and ratio.mark is Mark.LOSS),
    )


@dataclass(frozen=True)
class Answer:
    """Whether speculation pays at one temperature, told of one method."""

    temperature: float
    method: str
    unit: str  # what the ratios are times of
    ratios: dict[int, Ratio]  # to no speculation, by concurrency
    overall: Ratio | None  # over several concurrencies

    def at(self, mark: Mark) -> list[int]:
        """Where its ratio has this mark."""
        return [c for c, ratio in self.ratios.items() if ratio.mark is mark]


def rate_of(results: Results, temperature: float) -> tuple[Rate, str]:
    """By what methods are compared at a temperature, and what a ratio of it is times of.

    A ramp gives every method the same requests at the same moments, so there it is their time.
    """
    if results.phases(temperature):
        return promptness, "as fast as no speculation (mean time of a request)"
    return whole, "the tokens/s of no speculation"


def answer(results: Results, temperature: float) -> Answer | None:
    """Of C2T's methods, or without any of all that speculate, the fastest over all loads.

    None without no speculation, and where nothing else was measured.
    """
    base, name = results.baseline, best_of(results, candidates(results), temperature)
    if base is None or name is None:
        return None
    rate, unit = rate_of(results, temperature)
    concurrencies = results.concurrencies(temperature)
    ratios = {
        c: ratio
        for c in concurrencies
        if (ratio := results.ratio(name, base, temperature, c, rate)) is not None
    }
    if not ratios:
        return None
    overall = results.overall_ratio(name, base, temperature) if len(ratios) > 1 else None
    return Answer(temperature, name, unit, ratios, overall)


def best_of(results: Results, names: Iterable[str], temperature: float) -> str | None:
    """The fastest over all loads; None where none of them answered.

    Who has not been measured at all loads yet may only have been measured where it is fast.
    """
    rate, _ = rate_of(results, temperature)
    lead = {}
    for name in names:
        speeds = (results.speed(name, temperature, c, rate)
                  for c in results.concurrencies(temperature))  # fmt: skip
        logs = [math.log(speed.mean) for speed in speeds if speed is not None]
        if logs:
            lead[name] = (len(logs), sum(logs))
    return max(lead, key=lead.__getitem__, default=None)


def candidates(results: Results) -> list[str]:
    """Whom the headline may be about."""
    speculative = [name for name in results.names if name != results.baseline]
    return [name for name in speculative if results.kind(name).startswith("c2t")] or speculative


def headline(results: Results, temperature: float) -> str:
    """Whether it pays, where, and by how much."""
    if results.baseline is None:
        return "No method without speculation was run, so whether speculation pays is not known."
    found = answer(results, temperature)
    if found is None:
        return "No speculation alone was measured, so there is nothing to compare it with."
    return f"**{_verdict(found)}**: {_extent(found)}."


def _verdict(found: Answer) -> str:
    """Gains and losses in words; a method that only loses does not pay."""
    name, every = found.method, list(found.ratios)
    wins, losses, ties = (found.at(mark) for mark in (Mark.WIN, Mark.LOSS, Mark.TIE))
    unknown = found.at(Mark.PLAIN)
    if unknown == every:
        return (
            f"Whether {name} pays is not known: no speed-up has an interval, because that takes "
            "two repeats"
        )
    where = "at every load measured" if len(every) > 1 else f"at {every[0]} at once"
    if wins == every:
        return f"{name} pays {where}"
    if losses == every:
        return f"{name} does not pay: it is slower than no speculation {where}"
    if ties == every:
        return f"{name} is not told apart from no speculation {where}"
    clauses = [
        f"{what} at {span(concurrencies, every)}"
        for what, concurrencies in (
            ("pays", wins),
            ("is not told apart from no speculation", ties),
            ("is slower than no speculation", losses),
            ("has no interval", unknown),
        )
        if concurrencies
    ]
    return f"{name} {joined(clauses)} requests at once"


def _extent(found: Answer) -> str:
    """The ratio over all loads, the largest and the smallest."""
    most, least = (pick(found.ratios, key=lambda c: found.ratios[c].value) for pick in (max, min))
    if most == least:
        return f"{found.ratios[most].text()} times {found.unit}"
    ends = (
        f"from {found.ratios[most].text()}{{}} ({most} at once) down to "
        f"{found.ratios[least].text()} ({least} at once)"
    )
    if found.overall is None:
        return ends.format(f" times {found.unit}")
    return f"{found.overall.text()} times {found.unit} over all loads, {ends.format('')}"


def standing(results: Results, temperature: float) -> list[str]:
    """How the headline's method stands to the other methods."""
    found = answer(results, temperature)
    if found is None:
        return []
    sentences = [*_against_static(results, found), *_beaten(results, found)]
    if (number := len(candidates(results))) > 1:
        sentences.append(
            f"{found.method} was chosen because it is the fastest over all loads of {number} "
            "methods, by these same numbers, so that its lead is told somewhat too large."
        )
    return sentences


def _against_static(results: Results, found: Answer) -> Iterator[str]:
    rate, _ = rate_of(results, found.temperature)
    if results.kind(found.method) in STATIC:
        return
    ratios = {}
    for c in found.ratios:
        best = results.best_static(found.temperature, c, rate)
        ratio = best and results.ratio(found.method, best, found.temperature, c, rate)
        if ratio:
            ratios[c] = ratio
    against = Answer(found.temperature, found.method, "", ratios, None)
    parts = []
    for mark, words, pick in (
        (Mark.WIN, "ahead", max),
        (Mark.LOSS, "behind", min),
        (Mark.TIE, "not told apart from it", None),
    ):
        if not (where := against.at(mark)):
            continue
        parts.append(f"{words} at {span(where, list(ratios))}")
        if pick is not None:
            extreme = pick(where, key=lambda c: ratios[c].value)
            most = f" at most, at {extreme}" if len(where) > 1 else ""
            parts[-1] += f" ({ratios[extreme].text()}{most})"
    if parts:
        yield (
            "Over the best static choice at each load (no speculation or one fixed length, known "
            f"only afterwards) {found.method} is {joined(parts)}."
        )


def _beaten(results: Results, found: Answer) -> Iterator[str]:
    """By whom, where the interval says so."""
    rate, _ = rate_of(results, found.temperature)
    for c in found.ratios:
        best = results.fastest(results.names, found.temperature, c, rate)
        if best in (None, found.method):
            continue
        ratio = results.ratio(best, found.method, found.temperature, c, rate)
        if ratio is not None and ratio.mark is Mark.WIN:
            yield f"At {c} at once {best} is faster: {ratio.text()} times {found.method}."


def span(some: Sequence[int], every: Sequence[int]) -> str:
    """``1 to 8`` where ``some`` are neighbours among ``every``, which ascend; else each one."""
    start = every.index(some[0])
    if len(some) > 2 and list(some) == list(every[start : start + len(some)]):
        return f"{some[0]} to {some[-1]}"
    return listed(some)


def listed(numbers: Sequence[int]) -> str:
    """``1, 2 and 8``."""
    return joined([str(number) for number in numbers])


def joined(texts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]]) if len(texts) > 1 else "".join(texts)


def output_sentence(results: Results) -> Text:
    """Whether every output that must be is the one without speculation."""
    total = sum(entry.compared for entry in results.outputs.values())
    if not total:
        return Text("Outputs: nothing to compare (needs no speculation at temperature 0).")
    wrong = [one for entry in results.outputs.values() for one in entry.differences]
    if not wrong:
        return Text(f"Outputs: all {total} compared are identical to those without speculation.")
    number = sum(len(difference.prompts) for difference in wrong)
    return Text(
        f"Outputs: {number} of {total} compared DIFFER from those without speculation; see Checks.",
        Mark.BAD,
    )


def metric_sentence(results: Results) -> Text:
    """Whether the server's counters agree with its answers."""
    told = [cell.disagreements for cell in results.cells.values()]
    checked = [sentences for sentences in told if sentences is not None]
    if not checked:
        return Text("Metrics: no cell has the `c2t:` series of `/metrics`, so none was compared.")
    if wrong := sum(map(bool, checked)):
        return Text(
            f"Metrics: {wrong} of {len(checked)} cells DISAGREE with their requests; see Checks.",
            Mark.BAD,
        )
    return Text(
        f"Metrics: the `c2t:` series of `/metrics` agree exactly with the requests' own counts in "
        f"all {len(checked)} cells that have them."
    )


def grafted(pair: str, shape: str) -> Text:
    """What is real in a run on a shape of ``eval/gpu/models.py``, and what is not."""
    return Text(
        f"Acceptance, confidences and answers are those of the small pair {pair}, written into "
        f"models of the shape {shape} (eval/gpu/graft.py), which are random otherwise. Kernels, "
        "graphs and copies have that shape's sizes.",
        Mark.BEST,
    )


def failure_sentence(results: Results, num_missing: int) -> Text:
    """How much of the run is not there."""
    failed = sum(len(cell.errors) for cell in results.cells.values())
    requests = sum(cell.num_requests for cell in results.cells.values())
    parts = [f"{len(results.cells)} cells measured, {num_missing} missing",
             f"{failed} of their {requests} requests failed"]  # fmt: skip
    if results.problems:
        parts.append(f"{len(results.problems)} cells or files are unusable")
    bad = failed or num_missing or results.problems
    text = f"Completeness: {', '.join(parts)}"
    return Text(text + ("; see Checks." if bad else "."), Mark.BAD if bad else Mark.PLAIN)
