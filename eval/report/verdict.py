"""The verdict: whether speculation pays, in sentences made of the run's numbers (Markdown)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from eval.report.intervals import Estimate
from eval.report.results import Results

#: Unit of a ratio to no speculation.
UNIT = "the tokens/s of no speculation"

#: Verdict of a ratio to no speculation, in words.
WORDS = {
    "win": "pays",
    "tie": "is not distinguishable from no speculation",
    "loss": "is slower than no speculation",
    "": "ran once, so without an interval,",
}


def escaped(text: object) -> str:
    """``text`` with the signs escaped that Markdown or HTML would read."""
    return re.sub(r"([\\`*_<>|&\[\]])", r"\\\1", str(text))


def best_of(results: Results, names: Iterable[str], temperature: float) -> str | None:
    """The fastest over all loads; ``None`` if none of them answered.

    A method measured at more loads comes first: others may lack the loads where they are slow.
    """
    lead = {}
    for name in names:
        speeds = [results.speed(name, temperature, c) for c in results.loads(temperature)]
        if logs := [math.log(speed.value) for speed in speeds if speed is not None]:
            lead[name] = (len(logs), sum(logs))
    return max(lead, key=lead.__getitem__, default=None)


def leader(results: Results, temperature: float) -> str | None:
    """The method of the headline: the best of C2T's, or without any of all that speculate."""
    speculative = [name for name in results.kinds if name != results.baseline]
    ours = [name for name in speculative if results.kinds[name].startswith("c2t")]
    return best_of(results, ours or speculative, temperature)


def highlighted(results: Results, temperature: float) -> list[str]:
    """The headline's method, the best fixed length, and SGLang's own adaptive rule."""
    kinds = ([n for n, kind in results.kinds.items() if kind == k] for k in ("fixed", "adaptive"))
    found = leader(results, temperature), *(best_of(results, k, temperature) for k in kinds)
    return [name for name in dict.fromkeys(found) if name is not None]


def speedups(results: Results, method: str, temperature: float) -> dict[int, Estimate]:
    """Ratios to no speculation by concurrency, where both were measured."""
    loads = results.loads(temperature)
    found = {c: results.ratio(method, results.baseline, temperature, c) for c in loads}
    return {c: ratio for c, ratio in found.items() if ratio is not None}


def headline(results: Results, temperature: float) -> str:
    """Whether speculation pays, where, and by how much."""
    if results.baseline is None:
        return "No method without speculation was run, so whether speculation pays is not known."
    name = leader(results, temperature)
    ratios = speedups(results, name, temperature) if name else {}
    if not ratios:
        return "Only no speculation was measured, so there is nothing to compare."
    clauses = [
        f"{words} at {span(loads, list(ratios))}"
        for verdict, words in WORDS.items()
        if (loads := [c for c, ratio in ratios.items() if ratio.verdict == verdict])
    ]
    most, least = (pick(ratios, key=lambda c: ratios[c].value) for pick in (max, min))
    extent = f"{ratios[most].text()} times {UNIT}"
    overall = results.ratio(name, results.baseline, temperature, None)
    if most != least:
        ends = f"{ratios[most].text()} at {most} at once to {ratios[least].text()} at {least}"
        extent = f"{ends} times {UNIT}"
        if overall is not None:
            extent = f"{overall.text()} times {UNIT} over all loads, from {ends}"
    return f"**{escaped(name)} {joined(clauses)}**: {extent}."


def span(some: Sequence[int], every: Sequence[int]) -> str:
    """``1 to 8`` if ``some`` are neighbours among ``every``, which ascend; else each one."""
    if len(some) == len(every) > 1:
        return "every load measured"
    start = every.index(some[0])
    if len(some) > 2 and list(some) == list(every[start : start + len(some)]):
        return f"{some[0]} to {some[-1]} at once"
    return joined([str(number) for number in some]) + " at once"


def joined(texts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]]) if len(texts) > 1 else "".join(texts)


# -- soundness ------------------------------------------------------------------------------


def output_sentence(results: Results) -> str:
    """Whether every output that must equal the one without speculation does; bold if not."""
    total = sum(one.compared for one in results.outputs)
    wrong = sum(len(one.prompts) for one in results.outputs)
    if not total:
        return "Outputs: nothing to compare (needs no speculation at temperature 0)."
    if not wrong:
        return f"Outputs: all {total} compared are identical to those without speculation."
    return f"**Outputs: {wrong} of {total} compared DIFFER from those without speculation.**"


def metric_sentence(results: Results) -> str:
    """Whether the server's counters agree with its answers; bold if not."""
    checked = results.cells.disagreements.dropna()
    if checked.empty:
        return "Metrics: no cell has the `c2t:` series of `/metrics`, so none was compared."
    if wrong := sum(map(bool, checked)):
        return f"**Metrics: {wrong} of {len(checked)} cells DISAGREE with their requests.**"
    return f"Metrics: `/metrics` agree exactly with the requests' counts in {len(checked)} cells."


def failure_sentence(results: Results) -> str:
    """How much of the run is absent; bold if anything is."""
    failed, missing = int((~results.requests.success).sum()), len(results.missing)
    text = (
        f"Completeness: {len(results.cells)} cells measured, {missing} missing, {failed} of "
        f"{len(results.requests)} requests failed, {len(results.problems)} files unusable."
    )
    return f"**{text}**" if failed or missing or results.problems else text
