"""What a run comes to, in sentences made of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eval.report.cells import Results
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
    winners: tuple[str, ...]
    candidates: tuple[str, ...]  # speculative methods with an interval


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
    best = max(means, key=means.__getitem__)
    beside = {name: results.ratio(best, name, *at) for name in means if name != best}
    marks = {}
    if (base := results.baseline) is not None:
        ratios = {name: results.ratio(name, base, *at) for name in means if name != base}
        marks = {name: r.mark for name, r in ratios.items() if r is not None and r.has_interval}
    return Rung(
        *at,
        best,
        means[best],
        results.ratio(best, base, *at) if base is not None and best != base else None,
        tuple(name for name, r in beside.items() if r is not None and r.mark is Mark.TIE),
        tuple(name for name, mark in marks.items() if mark is Mark.LOSS),
        tuple(name for name, mark in marks.items() if mark is Mark.WIN),
        tuple(marks),
    )


def speed_sentences(results: Results) -> list[str]:
    """Where speculation gains and where it loses, per temperature."""
    if results.baseline is None:
        return ["No method without speculation was run, so there are no speed-ups."]
    sentences = []
    for temperature in results.temperatures:
        here = [r for r in rungs(results) if r.temperature == temperature and r.candidates]
        head = f"Temperature {temperature:g}"
        if not here:
            sentences.append(
                f"{head}: no speed-up has an interval, because that takes two repeats of a method "
                "and of no speculation. What is faster here may be chance."
            )
            continue
        sentences.append(f"{head}: {'; '.join(_gains_and_losses(here))}.")
    return sentences


def _gains_and_losses(rungs: list[Rung]) -> Iterator[str]:
    """Each part names the concurrencies it is about; parts about none are left out."""
    clear = {
        "a method or more is faster than no speculation": [r for r in rungs if r.winners],
        "none is faster": [r for r in rungs if not r.winners],
        "some are slower": [r for r in rungs if 0 < len(r.losers) < len(r.candidates)],
        "**all of them are slower**": [r for r in rungs if len(r.losers) == len(r.candidates)],
    }
    for what, where in clear.items():
        if where:
            yield f"at {listed([r.concurrency for r in where])} at once {what}"


def listed(numbers: list[int]) -> str:
    """``1, 2 and 8``."""
    texts = [str(number) for number in numbers]
    if len(texts) < 2:
        return "".join(texts)
    return ", ".join(texts[:-1]) + " and " + texts[-1]


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


def replay_sentence(results: Results) -> Text:
    """Whether requests of a run that replays traces took the steps that these say."""
    if wrong := len(results.replay_disagreements):
        return Text(f"Replay: in {wrong} cells it DID NOT WORK, and nothing here counts.", Mark.BAD)
    return Text(
        "Replay: in every cell all requests took as many verifications as their traces say; up to "
        "a quarter more where a gated server may draft fewer layers than its policy would verify."
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
