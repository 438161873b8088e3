"""Two runs: what differs in their conditions, speeds, tau and gamma.

A is before, B is after: ratios are B / A, differences B less A. Only methods, temperatures and
concurrencies that both have are compared.
"""

from __future__ import annotations

from collections import Counter

from eval.report.charts import ratio_chart
from eval.report.intervals import Estimate, tau_gamma, unpaired_ratio
from eval.report.page import Fold, Report
from eval.report.report import bullets, short_conditions
from eval.report.results import UNKNOWN_DRAFTS, Results
from eval.report.tables import ABSENT, conditions, markdown, over, ratio_text
from eval.report.verdict import escaped, highlighted

#: Conditions by the start of their name, and what their difference leaves of the comparison.
WARNINGS = {
    "dataset.sha256": "The prompts differ: tau, gamma and tokens/s are of different work.",
    "hardware": "The hardware differs: tokens/s say more of the machines than of the code.",
    "config.model": "The models differ: nothing here is comparable.",
    "versions.sglang": "SGLang differs: methods without C2T may have changed too.",
    "versions.torch": "torch differs: methods without C2T may have changed too.",
}
NOTE = (
    "Ratios are geometric means over repeats, with Welch's t interval of 95 % on logarithms; n is "
    "the smaller number of repeats. The runs were not interleaved, so a slower machine on one day "
    "counts as a difference. The speed-ups over each run's own baseline are free of that."
)


def compare(before: Results, after: Results, folders: tuple[str, str]) -> Report:
    """The whole comparison; ``folders`` says which run is which."""
    runs = (before, after)
    found, sections, every = Report("Two benchmark runs"), [], []
    for temperature in [t for t in before.temperatures if t in after.temperatures]:
        ratios = _ratios(before, after, temperature)
        if not any(ratios.values()):
            continue
        every += [ratio for row in ratios.values() for ratio in row.values()]
        sections.append(found.show(ratio_chart(
            f"ratio-t{temperature:g}", ratios, highlighted(before, temperature), "A",
            "tokens/s, B / A",
            f"Tokens/s of B over A by requests at once, temperature {temperature:g}",
        )))  # fmt: skip
        sections.append(_speed_table(before, after, ratios, temperature))
        title = f"tau and gamma, temperature {temperature:g}"
        found.folds.append(
            Fold(title, "and differences", [_acceptance_table(before, after, ratios, title)])
        )
    ours, theirs = (conditions(results) for results in runs)
    differing = {
        name: {"A": ours.get(name, ABSENT), "B": theirs.get(name, ABSENT)}
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
        and not name.startswith(("config.methods", "config.load", "config.name", "dataset.parts"))
    }
    found.answer = [
        _verdict(every),
        *(f"**{warning}**" for prefix, warning in WARNINGS.items()
          if any(f"{name}.".startswith(f"{prefix}.") for name in differing)),
        bullets([f"{which}: {escaped(folder)}, started {results.run.started}"
                 for which, folder, results in zip("AB", folders, runs, strict=True)]),
        *(f"Only in {which}, and left out: {', '.join(map(escaped, only))}."
          for which, only in (("A", [n for n in before.kinds if n not in after.kinds]),
                              ("B", [n for n in after.kinds if n not in before.kinds])) if only),
        *sections,
        short_conditions(after),
        markdown("Conditions that differ", {
            escaped(name): {which: escaped(text) for which, text in row.items()}
            for name, row in differing.items()
        }, head="condition", align="left") if differing
        else "None of the recorded conditions differs.",
    ]  # fmt: skip
    return found


def _ratios(before: Results, after: Results, temperature: float) -> dict[str, dict[int, Estimate]]:
    """Tokens per second of B over A by method and concurrency, where both have them."""
    found: dict[str, dict[int, Estimate]] = {}
    for name in [name for name in before.kinds if name in after.kinds]:
        for c in before.loads(temperature):
            below, above = (results.of(name, temperature, c).speed.dropna()
                            for results in (before, after))  # fmt: skip
            if len(below) and len(above):
                found.setdefault(name, {})[c] = unpaired_ratio(above, below)
    return found


def _verdict(ratios: list[Estimate]) -> str:
    """How many speeds changed."""
    if not ratios:
        return "**The runs share no method, or none at the same concurrency.**"
    counts = Counter(ratio.verdict for ratio in ratios)
    if len(ratios) == counts[""]:
        return "No ratio of speeds has an interval: that takes two repeats of each run."
    return (
        f"Of {len(ratios) - counts['']} speeds with an interval, **B is faster in {counts['win']}, "
        f"slower in {counts['loss']}, tied in {counts['tie']}**. Between equal runs, one in twenty "
        "is expected to look faster or slower."
    )


def _speed_table(
    before: Results, after: Results, ratios: dict[str, dict[int, Estimate]], temperature: float
) -> str:
    rows = {
        f"{escaped(name)}, c = {c}": {
            "B / A": ratio_text(ratio, win="faster", loss="slower"),
            "n": str(ratio.n),
            **{f"speed-up, {which}": over(results, name, results.baseline, temperature, c)
               for which, results in (("A", before), ("B", after))},
        }
        for name, row in ratios.items() for c, ratio in row.items()
    }  # fmt: skip
    return markdown(f"tokens/s of B over A, temperature {temperature:g}", rows, NOTE)


def _acceptance_table(
    before: Results, after: Results, ratios: dict[str, dict[int, Estimate]], title: str
) -> str:
    temperature = float(title.split()[-1])
    hashes = [results.run.dataset.get("sha256") for results in (before, after)]
    paired = hashes[0] == hashes[1] and before.prompts.equals(after.prompts)
    rows = {}
    for name, row in ratios.items():
        a, b = (results.counts(name, temperature, row) for results in (before, after))
        found = tau_gamma(a), tau_gamma(b), tau_gamma(b, a, paired=paired)
        if None not in found:
            known = before.kinds[name] not in UNKNOWN_DRAFTS
            rows[escaped(name)] = {
                f"{which}, {column}": one[i].text(sign="+" * (column == "B - A"))
                if known or which == "tau" else ABSENT
                for i, which in enumerate(("tau", "gamma"))
                for column, one in zip(("A", "B", "B - A"), found, strict=True) if one
            }  # fmt: skip
    how = "the same prompts drawn of both" if paired else "prompts of each run drawn for itself"
    note = f"Concurrencies that both have, all repeats together; 95 % over prompts ({how})."
    return markdown(title, rows, note) if rows else note
