"""Two runs beside each other: what differs in their conditions, speeds, tau and gamma.

A is before, B is after: ratios are B / A, differences B less A. Only methods, temperatures and
concurrencies that both have are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eval.report.cells import UNTOLD_DRAFTS, Measured, Results
from eval.report.charts import ratio_figure
from eval.report.document import (
    ABSENT,
    Block,
    Bullets,
    Document,
    Entry,
    Figure,
    Fold,
    Headline,
    Mark,
    Table,
    Text,
)
from eval.report.intervals import Ratio, acceptance, difference
from eval.report.tables import by_concurrency, difference_entry, ratio_entry, short_conditions

#: Conditions by the start of their name, and what their difference leaves of the comparison.
MOOT = {
    "dataset.sha256": "The prompts differ: tau, gamma and tokens/s are of different work.",
    "hardware": "The hardware differs: tokens/s say more of the machines than of the code.",
    "config.model": "The models differ: nothing here is comparable.",
    "config.requests": "Requests differ: tokens/s and outputs are of different work.",
    "config.server": "Servers were started differently: tokens/s may differ for that alone.",
    "versions.sglang": "SGLang differs: methods without C2T may have changed too.",
    "versions.torch": "torch differs: methods without C2T may have changed too.",
}
#: Told elsewhere in the document, or the same thing in other words.
UNTOLD = ("config.methods", "config.load", "config.name")


WORDS = {Mark.LOSS: " slower", Mark.WIN: " faster", Mark.TIE: " tie"}

Ratios = dict[str, dict[int, Ratio]]  # by method and concurrency


def compare(before: Results, after: Results, names: tuple[str, str]) -> Document:
    """The whole comparison; ``names`` says which run is which."""
    return Document("Two benchmark runs", list(_blocks(before, after, names)))


def _blocks(before: Results, after: Results, names: tuple[str, str]) -> Iterator[Block]:
    common = [name for name in before.names if name in after.names]
    rungs = _rungs(before, after)
    ratios = {t: _ratios(before, after, common, t, rungs[t]) for t in rungs}
    differing = _differing(before, after)
    yield Headline(_verdict(ratios))
    yield from _warnings(differing)
    yield Bullets(
        [f"{which}: `{name}`, started {results.run.started}"
         for which, name, results in zip("AB", names, (before, after), strict=True)]
    )  # fmt: skip
    yield from _only_one(before, after)
    shared = any(found for table in ratios.values() for found in table.values())
    for temperature, concurrencies in rungs.items() if shared else ():
        table = ratios[temperature]
        if any(table.values()):
            yield _chart(before, table, temperature, concurrencies)
        yield _speed_table(table, temperature, concurrencies)
    yield from _conditions(after, differing)
    if not shared:
        return
    for temperature, concurrencies in rungs.items():
        yield Fold(
            f"Speed-up, tau and gamma, temperature {temperature:g}",
            "of each run, and their differences",
            [
                _speedup_table(before, after, common, temperature, concurrencies),
                _acceptance_table(before, after, common, temperature, concurrencies),
            ],
        )
    yield Fold("How to read it", "ratios, differences, intervals", [_reading(before, after)])


def _chart(before: Results, ratios: Ratios, temperature: float, concurrencies: list[int]) -> Figure:
    return ratio_figure(
        before, temperature, list(ratios), lambda name, c: ratios[name].get(c), concurrencies,
        kind="ratio", label="tokens/s, B / A", title="Output tokens per second of B over A",
        reference="A", where="table on tokens/s of B over A",
    )  # fmt: skip


def _verdict(ratios: Mapping[float, Ratios]) -> str:
    """How many speeds changed."""
    every = [r for table in ratios.values() for found in table.values() for r in found.values()]
    if not every:
        return "**The runs share no method, or none at the same concurrency.**"
    counts = Counter(ratio.mark for ratio in every)
    clear = counts[Mark.WIN] + counts[Mark.LOSS] + counts[Mark.TIE]
    if not clear:
        return "No ratio of speeds has an interval: that takes two repeats of each run."
    return (
        f"Of {clear} speeds with an interval, **B is faster in {counts[Mark.WIN]}, slower in "
        f"{counts[Mark.LOSS]}, tied in {counts[Mark.TIE]}**. Between equal runs, one in twenty is "
        "expected to look faster or slower."
    )


def _rungs(before: Results, after: Results) -> dict[float, list[int]]:
    """Concurrencies that both have, by temperature."""
    shared = {
        t: [c for c in before.concurrencies(t) if c in after.concurrencies(t)]
        for t in before.temperatures
    }
    return {t: concurrencies for t, concurrencies in shared.items() if concurrencies}


def _only_one(before: Results, after: Results) -> Iterator[Block]:
    for which, ours, theirs in (("A", before, after), ("B", after, before)):
        only = [name for name in ours.names if name not in theirs.names]
        if only:
            yield Text(f"Only in {which}, and left out: {', '.join(only)}.")


def told_conditions(results: Results) -> dict[str, str]:
    """What a run depends on, as flat names and texts."""
    run = results.run
    provenance = {name: run.provenance.get(name) for name in ("hardware", "versions", "revision")}
    dataset = {name: run.dataset.get(name) for name in ("name", "n", "sha256")}
    every = {**provenance, "dataset": dataset, "config": run.config}
    flat = dict(_flat(every, ""))
    return {name: text for name, text in flat.items() if not name.startswith(UNTOLD)}


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _differing(before: Results, after: Results) -> dict[str, tuple[str, str]]:
    ours, theirs = told_conditions(before), told_conditions(after)
    return {
        name: (ours.get(name, "-"), theirs.get(name, "-"))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    }


def _warnings(differing: Iterable[str]) -> Iterator[Text]:
    names = list(differing)
    for prefix, warning in MOOT.items():
        if any(name == prefix or name.startswith(f"{prefix}.") for name in names):
            yield Text(warning, Mark.BAD)


def _conditions(after: Results, differing: Mapping[str, tuple[str, str]]) -> Iterator[Block]:
    yield short_conditions(after)
    if not differing:
        yield Text(
            "None of the recorded conditions differs: revision, versions, hardware, prompts, "
            "configuration."
        )
        return
    yield Table(
        "Conditions that differ",
        ["condition", "A", "B"],
        [(name, [Entry(a), Entry(b)]) for name, (a, b) in differing.items()],
        numeric=False,
    )


def _reading(before: Results, after: Results) -> Block:
    paired = _same_prompts(before, after)
    how = "the same prompts drawn of both" if paired else "prompts of each run drawn for itself"
    return Bullets(
        [
            "Ratios of tokens/s are B / A, geometric means over repeats. The runs were not "
            "interleaved, so a machine that was slower on one day counts as a difference of the "
            "runs; the speed-ups over each run's own baseline are free of that. Intervals: 95 %, "
            "Welch's t on logarithms, two repeats of each run or more. n is the smaller number "
            "of repeats.",
            f"Differences of tau and gamma are B less A, 95 % over resampled prompts ({how}).",
        ]
    )


def _same_prompts(before: Results, after: Results) -> bool:
    hashes = [results.run.dataset.get("sha256") for results in (before, after)]
    return hashes[0] == hashes[1] and before.prompts == after.prompts


def _ratios(
    before: Results, after: Results, names: list[str], temperature: float, concurrencies: list[int]
) -> Ratios:
    """Tokens per second of B over A, where both have them."""
    found: Ratios = {name: {} for name in names}
    for name in names:
        for concurrency in concurrencies:
            below = before.speed(name, temperature, concurrency)
            above = after.speed(name, temperature, concurrency)
            if above is not None and below is not None:
                speeds = list(above.repeats.values()), list(below.repeats.values())
                found[name][concurrency] = Ratio.unpaired(*speeds)
    return found


def _speed_table(
    ratios: Mapping[str, Mapping[int, Ratio]], temperature: float, concurrencies: list[int]
) -> Table:
    return by_concurrency(
        f"tokens/s of B over A, temperature {temperature:g}",
        ratios,
        concurrencies,
        lambda name, c: ratio_entry(ratios[name].get(c), WORDS),
        n=lambda name: Entry(str(min((r.n for r in ratios[name].values()), default=0))),
    )


def _speedup_table(
    before: Results, after: Results, common: list[str], temperature: float,
    concurrencies: list[int],
) -> Table:  # fmt: skip
    def entry(results: Results, name: str, concurrency: int) -> Entry:
        if (base := results.baseline) is None:
            return ABSENT
        return ratio_entry(results.ratio(name, base, temperature, concurrency))

    baselines = {before.baseline, after.baseline}
    return Table(
        f"Speed-up over each run's own baseline, temperature {temperature:g}",
        ["method", *(f"c = {c}, {which}" for c in concurrencies for which in "AB")],
        [
            (name, [entry(results, name, c) for c in concurrencies for results in (before, after)])
            for name in common
            if name not in baselines
        ],
    )


def _acceptance_table(
    before: Results, after: Results, common: list[str], temperature: float,
    concurrencies: list[int],
) -> Table:  # fmt: skip
    def cells(results: Results, name: str) -> list[Measured]:
        return [cell for c in concurrencies for cell in results.of(name, temperature, c)]

    paired = _same_prompts(before, after)
    rows = []
    for name in common:
        ours, theirs = (results.counts(cells(results, name)) for results in (before, after))
        if ours is None or theirs is None:
            continue
        found = acceptance(ours), acceptance(theirs)
        if None in found:
            continue
        entries = []
        for which in ("tau", "gamma"):
            if which == "gamma" and before.kind(name) in UNTOLD_DRAFTS:
                entries += [ABSENT] * 3
                continue
            entries += [Entry(getattr(one, which).text()) for one in found]
            entries.append(difference_entry(difference(theirs, ours, which, paired=paired)))
        rows.append((name, entries))
    return Table(
        f"tau and gamma, temperature {temperature:g}",
        ["method", "tau, A", "tau, B", "B - A", "gamma, A", "gamma, B", "B - A"],
        rows,
        "Concurrencies that both have, all repeats together.",
    )
