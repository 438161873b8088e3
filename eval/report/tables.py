"""The report's tables and texts, in its order."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from eval.bench.records import CellKey
from eval.report.cells import UNTOLD_DRAFTS, Measured, Rate, Results, promptness, steady, whole
from eval.report.document import (
    ABSENT,
    Block,
    Bullets,
    Entry,
    Heading,
    Mark,
    Table,
    Text,
)
from eval.report.intervals import LEVEL, NUM_RESAMPLES, Acceptance, Estimate, Ratio
from eval.report.verdict import (
    answer,
    failure_sentence,
    metric_sentence,
    output_sentence,
    rungs,
)

TARGET_ROWS = ("target_decode_rows", "verify_rows")
DRAFT_FORWARDS = ("draft_forwards",)
MAX_LISTED = 20
POOLED = "All concurrencies and repeats together."
FAILED = " †"

WORDS = {Mark.LOSS: " loss", Mark.TIE: " tie"}


def ratio_entry(ratio: Ratio | None, words: Mapping[Mark, str] = WORDS) -> Entry:
    """A speed-up: a loss or a tie says so, a win is bold."""
    if ratio is None:
        return ABSENT
    return Entry(ratio.text() + words.get(ratio.mark, ""), ratio.mark)


def number(value: float | None, digits: int = 2) -> Entry:
    """A number, or a dash."""
    return ABSENT if value is None else Entry(f"{value:.{digits}f}")


def rate_digits(value: float) -> int:
    """Three figures or more of a rate."""
    return 0 if value >= 100 else 1


def soundness(results: Results) -> list[Text]:
    """Whether the run can be believed: outputs, metrics, what failed."""
    failures = failure_sentence(results, len(missing(results)))
    return [output_sentence(results), metric_sentence(results), failures]


def load_table(results: Results, temperature: float, base: str) -> Table:
    """What the headline's method and the best of the others reach at each load, and who loses."""
    found = answer(results, temperature)
    leaders: dict[str, Callable[[float, int], str | None]] = {"best static": results.best_static,
               "fastest": partial(results.fastest, results.names)}  # fmt: skip
    rows = []
    for r in rungs(results):
        if r.temperature != temperature:
            continue
        at = (temperature, r.concurrency)
        entries = [rate_entry(results, base, *at, best=False)]
        if found is not None:
            entries.append(ratio_entry(found.ratios.get(r.concurrency)))
        entries += [_named(results, pick(*at), base, *at) for pick in leaders.values()]
        entries.append(Entry(", ".join(r.losers), Mark.LOSS) if r.losers else ABSENT)
        rows.append((str(r.concurrency), entries))
    return Table(
        f"Speed-up by load, temperature {temperature:g}",
        ["at once", f"{base}, tokens/s",
         *([] if found is None else [found.method]), *leaders, "losses"],
        rows,
        "Times the tokens/s of no speculation, 95 % intervals. Static: no speculation or one fixed "
        "length. Losses: slower than no speculation beyond the interval, which takes two repeats. "
        "The best of several is picked from the same numbers that it is shown with, so that its "
        "lead is told somewhat too large.",
    )  # fmt: skip


def _named(
    results: Results, name: str | None, base: str, temperature: float, concurrency: int
) -> Entry:
    """A method with its speed-up."""
    if name in (None, base):
        return Entry(name or ABSENT.text)
    ratio = ratio_entry(results.ratio(str(name), base, temperature, concurrency))
    return Entry(f"{name} {ratio.text}", ratio.mark)


def fastest_table(results: Results, temperature: float) -> Table:
    """Who is the fastest at each load, and who may be as fast."""
    return Table(
        f"The fastest method at each concurrency, temperature {temperature:g}",
        ["at once", "fastest", "tokens/s", "over no speculation", "not told apart from it",
         "slower than no speculation"],
        [
            (
                str(r.concurrency),
                [
                    Entry(r.best, Mark.BEST),
                    number(r.speed, rate_digits(r.speed)),
                    ratio_entry(r.ratio),
                    Entry(", ".join(r.level_with) or "-"),
                    Entry(", ".join(r.losers), Mark.LOSS) if r.losers else ABSENT,
                ],
            )
            for r in rungs(results)
            if r.temperature == temperature
        ],
        "The last two columns need two repeats.",
        numeric=False,
    )  # fmt: skip


def short_conditions(results: Results) -> Text:
    """What the numbers depend on, in a paragraph; :func:`conditions` has all of it."""
    provenance, config, dataset = results.run.provenance, results.run.config, results.run.dataset
    machine = provenance.get("hardware") or {}
    versions = provenance.get("versions") or {}
    model, requests = config.get("model") or {}, config.get("requests") or {}
    gpus = machine.get("gpus") or ()
    parts = [
        ", ".join(_flat(gpu) for gpu in gpus)
        or f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown processor')}",
        ", ".join(f"{name} {versions[name]}" for name in ("sglang-c2t", "sglang", "torch")
                  if name in versions),
        f"revision {provenance['revision']}" if provenance.get("revision") else "",
        f"target {model['target']}, draft {model.get('draft')}, {model.get('algorithm')}"
        if model.get("target") else "",
        f"{dataset.get('n', len(results.prompts))} prompts of {dataset.get('name', 'a data set')}"
        f" ({', '.join(results.families)})",
        f"at most {requests['max_new_tokens']} new tokens" if "max_new_tokens" in requests else "",
        f"repeats: {len(results.repeats)}; started {results.run.started}",
    ]  # fmt: skip
    return Text("Measured on " + "; ".join(part for part in parts if part) + ".")


def conditions(results: Results) -> Iterator[Block]:
    """What was measured, on what, how."""
    run, provenance = results.run, results.run.provenance
    cells = Counter((key.method, key.temperature, key.concurrency) for key in results.cells)
    repeats = Counter(cells.values())
    items = [
        f"started: {run.started}",
        f"methods: {', '.join(results.names)}",
        *(
            f"requests at once, temperature {t:g}: {', '.join(map(str, results.concurrencies(t)))}"
            for t in results.temperatures
        ),
        *(
            "this is the top of a ramp of Poisson arrivals, prompts at so many a second: "
            + ", ".join(f"{phase['prompts']} at {phase['rate']:g}" for phase in phases)
            for t in results.temperatures
            if (phases := results.phases(t))
        ),
        "repeats: " + ", ".join(f"{n} of {count} cells" for n, count in sorted(repeats.items())),
        *(f"{name}: {_flat(provenance[name])}" for name in ("hardware", "versions", "revision")
          if name in provenance),
        *([f"command: `{command}`"] if (command := _command(provenance)) else []),
    ]  # fmt: skip
    yield Bullets(items)
    dataset = run.dataset
    yield Table(
        f"Prompts: {dataset.get('name', 'data set')}",
        ["part", "family", "n", "sha256, 16 digits", "source"],
        [(str(part.get("name", "")), _facts(part)) for part in dataset.get("parts", ())]
        + [("all", _facts(dataset))],
        numeric=False,
    )
    yield Table(
        "Methods",
        ["method", "kind", "beta", "flags of its own"],
        [
            (
                method.name + (" (baseline)" if method.baseline else ""),
                [
                    Entry(method.kind),
                    Entry("-" if method.beta is None else f"{method.beta:g}"),
                    Entry(shlex.join(method.flags) or "-"),
                ],
            )
            for method in results.methods
        ],
        numeric=False,
    )


def _facts(part: Mapping[str, Any]) -> list[Entry]:
    told = [str(part.get(name, "-")) for name in ("family", "n", "sha256", "source")]
    told[2] = told[2][:16]
    return [Entry(text) for text in told]


def _command(provenance: Mapping[str, Any]) -> str:
    return str(provenance.get("command") or shlex.join(provenance.get("argv", ())))


def _flat(value: Any) -> str:
    """A mapping as ``name value, name value``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(_flat(item) for item in value) or "none"
    return str(value)


def reading(results: Results) -> Iterator[Block]:
    """What the words mean."""
    percent = f"{100 * LEVEL:.0f} %"
    items = [
        "**tau**: tokens gained per verification, the bonus token included: (verifications + "
        "accepted drafts) / verifications. 1 is no gain. The C2T paper leaves the bonus token "
        "out, so its tau is smaller by 1.",
        "**gamma**: draft tokens that the target verified per verification, the root not counted. "
        "The C2T paper gives their sum over the data set. The work table has both.",
        "**target rows per token**: rows of the target's decode and verify forwards per output "
        "token, prefill left out. **draft forwards per token**: forwards of the draft loop, each "
        "of the whole batch at once, per output token; the first layer of drafts comes with the "
        "draft model's extend pass, which all methods have and which is not counted. Both are "
        "counted inside the server, also without `--c2t`.",
        "**tokens/s**: output tokens of a cell over the time in which a request was under way, "
        "which but for a ramp is from the first request sent to the last answer read; where "
        "servers had a step clock, those of the steps in which the whole batch "
        "decoded, by that clock. The geometric mean over repeats, in brackets the slowest and the "
        "fastest.",
        "**speed-up**: ratio of tokens/s to no speculation, the geometric mean of ratios within "
        f"repeats; n = {len(results.repeats)} repeats at most, whose methods ran interleaved. Its "
        f"interval is a {percent} t interval on logarithms. The noise is estimated from all "
        "methods at that concurrency together, each repeat a block, and so taken to be alike for "
        "them; with one repeat there is none. A win (interval above 1) is bold, a loss (below 1) "
        "and a tie (1 inside) say so. Intervals are for each entry alone: among twenty ties, one "
        "is expected to look like a win or a loss.",
        f"Intervals of tau and gamma: {percent}, from {NUM_RESAMPLES} resamples of the prompts "
        "within their families; repeats of a prompt are drawn together. They tell how far other "
        "prompts of the same kind would move the number, not how far other kinds would.",
        f"{FAILED.strip()} marks speeds of cells in which requests failed.",
    ]
    yield Bullets(items)


Value = Callable[[str, int], Entry]


def by_concurrency(
    title: str, names: Iterable[str], concurrencies: Sequence[int], value: Value, note: str = "",
    **last: Callable[[str], Entry],
) -> Table:  # fmt: skip
    """Methods down, concurrencies across; behind them columns that are about all of these."""
    return Table(
        title,
        ["method", *(f"c = {concurrency}" for concurrency in concurrencies), *last],
        [
            (name, [*(value(name, c) for c in concurrencies),
                    *(column(name) for column in last.values())])
            for name in names
        ],
        note,
    )  # fmt: skip


def speed_tables(results: Results, temperature: float) -> Iterator[Table]:
    """Speed-ups and tokens per second at one temperature."""
    if (base := results.baseline) is not None:
        yield speedup_table(results, temperature, base)
    if any(results.kind(name) == "fixed" for name in results.names):
        yield best_static_table(results, temperature)
    yield rate_table(results, temperature)
    yield fastest_table(results, temperature)


def rate_table(results: Results, temperature: float) -> Table:
    """Tokens per second of every method."""
    fastest = {r.concurrency: r.best for r in rungs(results) if r.temperature == temperature}
    return by_concurrency(
        f"Output tokens per second, temperature {temperature:g}", results.names,
        results.concurrencies(temperature),
        lambda name, c: rate_entry(results, name, temperature, c, fastest.get(c) == name),
        "c: requests at once. Geometric mean [slowest, fastest repeat]. Bold: the fastest.",
    )  # fmt: skip


def rate_entry(
    results: Results, name: str, temperature: float, concurrency: int, best: bool
) -> Entry:
    """Tokens per second with its spread; marked where requests failed."""
    speed = results.speed(name, temperature, concurrency)
    if speed is None:
        failed = results.of(name, temperature, concurrency)
        return Entry("failed", Mark.BAD) if failed else ABSENT
    text = speed.spread.text(rate_digits(speed.mean)) + (FAILED if speed.num_failed else "")
    return Entry(text, Mark.BEST if best else Mark.PLAIN)


def speedup_table(results: Results, temperature: float, base: str) -> Table:
    """Ratios to no speculation."""
    return by_concurrency(
        f"Speed-up over no speculation, temperature {temperature:g}",
        [name for name in results.names if name != base],
        results.concurrencies(temperature),
        lambda name, c: ratio_entry(results.ratio(name, base, temperature, c)),
        "all: geometric mean over all concurrencies, its interval over repeats.",
        all=lambda name: ratio_entry(results.overall_ratio(name, base, temperature)),
    )


def best_static_table(results: Results, temperature: float) -> Table:
    """Ratios to what was the fastest at that concurrency of no speculation and fixed lengths."""
    return by_concurrency(
        f"Speed-up over the best static method, temperature {temperature:g}", results.names,
        results.concurrencies(temperature),
        lambda name, c: over(results, name, results.best_static(temperature, c), temperature, c),
        "No speculation or a fixed length, the best of those measured at that concurrency: a "
        "choice nobody can make beforehand.",
    )  # fmt: skip


def over(
    results: Results, name: str, other: str | None, temperature: float, concurrency: int,
    rate: Rate = whole,
) -> Entry:  # fmt: skip
    """Speed-up over another method; 1 over itself."""
    if name == other:
        return Entry("1")
    at = (temperature, concurrency, rate)
    return ratio_entry(None if other is None else results.ratio(name, other, *at))


def ramp_tables(results: Results, temperature: float) -> Iterator[Table]:
    """What became of requests that arrived when they did; nothing of a ladder."""
    for concurrency in results.concurrencies(temperature) if results.phases(temperature) else ():
        at = (temperature, concurrency)
        others = [(other, rate) for rate in (promptness, whole)
                  for other in (results.baseline, results.best_static(*at, rate))]  # fmt: skip
        yield Table(
            f"Ramp, temperature {temperature:g}",
            ["method", "request, s", "its 95 %", "all, s", "request, over none",
             "request, over best static", "tokens/s, over none", "tokens/s, over best static"],
            [
                (name, [*_request_times(results.of(name, *at)),
                        *(over(results, name, other, *at, rate) for other, rate in others)])
                for name in results.names
            ],
            "request: mean time from its arrival to its last token, waiting included, and how many "
            "times shorter it is. all: from the first arrival to the last answer. Where a server "
            "keeps up it is busy as long as requests come, so there tokens/s differ less than "
            "times of requests do.",
        )  # fmt: skip


def _request_times(cells: Sequence[Measured]) -> list[Entry]:
    """Of all requests the mean and the 95th percentile of their times; mean time for all."""
    answered = [cell for cell in cells if cell.answered]
    if not answered:
        return [ABSENT] * 3
    times = np.concatenate([cell.latency_s for cell in answered])
    ends = [cell.duration_s for cell in answered]
    told = (times.mean(), np.quantile(times, 0.95), np.mean(ends))
    return [number(float(value)) for value in told]


def work_table(results: Results, temperature: float) -> Table:
    """Accept length tau and gamma in the papers' form, over all concurrencies and repeats."""
    rows = []
    for name in results.names:
        counts = results.counts(results.of(name, temperature))
        told = counts is not None and results.kind(name) not in UNTOLD_DRAFTS
        proposed = counts.proposed.sum() if told and counts is not None else 0.0
        rate = counts.correct.sum() / proposed if proposed and counts is not None else None
        entries = [
            *tau_gamma(results.acceptance(name, temperature)),
            Entry(f"{proposed:.0f}") if proposed else ABSENT,
            number(rate),
            *work_entries(results, name, temperature),
        ]
        rows.append((name, entries))
    return Table(
        f"Work, temperature {temperature:g}",
        ["method", "tau", "gamma", "drafts verified", "accept rate", "draft forwards per token",
         "target rows per token"],
        rows,
        POOLED + _incomplete_note(results) + _adaptive_note(results),
    )  # fmt: skip


def _incomplete_note(results: Results) -> str:
    if not missing(results):
        return ""
    return " Cells are missing, so methods may be told over different ones."


def _adaptive_note(results: Results) -> str:
    if not UNTOLD_DRAFTS & {method.kind for method in results.methods}:
        return ""
    return (
        " SGLang reports an adaptive method's drafts as if all had the length of its flags; its "
        "gamma is taken from counted target rows, without interval, and only where all prompts "
        "are taken together."
    )


def tau_gamma(found: Acceptance | None) -> list[Entry]:
    """Both with their intervals."""
    if found is None:
        return [ABSENT, ABSENT]
    return [Entry(found.tau.text()), ABSENT if found.gamma is None else Entry(found.gamma.text())]


def work_entries(
    results: Results, name: str, temperature: float, concurrency: int | None = None
) -> list[Entry]:
    """Draft forwards and target rows per token."""
    return [
        number(results.per_token(counters, name, temperature, concurrency), 3)
        for counters in (DRAFT_FORWARDS, TARGET_ROWS)
    ]


def family_table(results: Results, temperature: float) -> Table:
    """Accept length tau and gamma of each family of prompts."""
    names = [name for name in results.names if results.acceptance(name, temperature) is not None]
    return Table(
        f"tau and gamma by family, temperature {temperature:g}",
        ["method", *(f"{family} {which}" for family in results.families for which in
                     ("tau", "gamma"))],
        [
            (name, [entry for family in results.families
                    for entry in tau_gamma(results.acceptance(name, temperature, family=family))])
            for name in names
        ],
        POOLED + _incomplete_note(results),
    )  # fmt: skip


def length_table(results: Results, temperature: float) -> Table | None:
    """Mean and quantiles of accept and draft lengths; None where no server told any."""
    rows = []
    for name in results.names:
        lengths = (results.accept_lengths(name, temperature),
                   results.proposed_lengths(name, temperature))  # fmt: skip
        if any(lengths):
            rows.append((name, [entry for one in lengths for entry in _quantiles(one)]))
    names = ("mean", "10\u00a0%", "median", "90\u00a0%", "longest")  # no line break within
    return Table(
        f"Lengths per verification, temperature {temperature:g}",
        ["method", *(f"{which} {name}" for which in ("accept", "draft") for name in names)],
        rows,
        "accept: tokens gained, bonus included. draft: tokens verified, root left out. Stock "
        "servers tell no draft lengths; fixed chains and trees have one.",
    ) if rows else None  # fmt: skip


def _quantiles(lengths: Counter[int]) -> list[Entry]:
    if not lengths:
        return [ABSENT] * 5
    values, counts = zip(*sorted(lengths.items()), strict=True)
    shares = np.cumsum(counts) / sum(counts)
    mean = float(np.dot(values, counts)) / sum(counts)
    at = [values[int(np.searchsorted(shares, share))] for share in (0.1, 0.5, 0.9)]
    return [number(mean), *(Entry(str(value)) for value in (*at, values[-1]))]


def rung_table(results: Results, temperature: float, concurrency: int) -> Table:
    """Everything at one temperature and concurrency, one line per method."""
    base = results.baseline
    at = (temperature, concurrency)
    speeds = {name: results.speed(name, *at) for name in results.names}
    top = max((speed.mean for speed in speeds.values() if speed is not None), default=0.0)
    rows = []
    for name, speed in speeds.items():
        best = speed is not None and speed.mean == top
        rows.append((name, [
            *tau_gamma(results.acceptance(name, *at)),
            rate_entry(results, name, *at, best),
            *work_entries(results, name, *at),
            Entry("1") if name == base else
            ratio_entry(results.ratio(name, base, *at) if base is not None else None),
        ]))  # fmt: skip
    return Table(
        f"Temperature {temperature:g}, {concurrency} at once",
        ["method", "tau", "gamma", "tokens/s", "draft forwards per token",
         "target rows per token", "speed-up"],
        rows,
    )  # fmt: skip


def latency_table(results: Results, temperature: float, concurrency: int) -> Table:
    """Steady-state throughput beside the whole cell's, and times of requests."""
    base = results.baseline
    at = (temperature, concurrency)
    rows = []
    for name in results.names:
        cells = results.of(name, *at)
        ratio = results.ratio(name, base, *at, steady) if base not in (None, name) else None
        entries = [
            *(_rate(results, name, at, rate) for rate in (whole, steady)),
            Entry("1") if name == base else ratio_entry(ratio),
            _window(cells),
        ]
        for times in ("ttft_s", "per_token_s"):
            values = np.concatenate([getattr(cell, times) for cell in cells] or [np.empty(0)])
            entries += [number(1e3 * float(np.quantile(values, q)), 1) if values.size else ABSENT
                        for q in (0.5, 0.99)]  # fmt: skip
        rows.append((name, entries))
    return Table(
        f"Steady state and latency, temperature {temperature:g}, {concurrency} at once",
        ["method", "tokens/s", "steady tokens/s", "steady speed-up", "steady share",
         "first token, ms", "its 99 %", "per token, ms", "its 99 %"],
        rows,
    )  # fmt: skip


def _rate(results: Results, name: str, at: tuple[float, int], rate: Any) -> Entry:
    speed = results.speed(name, *at, rate)
    return ABSENT if speed is None else number(speed.mean, rate_digits(speed.mean))


def _window(cells: Sequence[Any]) -> Entry:
    """Share of the cells' time that was steady."""
    shares = [
        100 * cell.steady["duration"] / cell.duration_s
        for cell in cells
        if cell.steady and cell.steady.get("duration") and cell.duration_s
    ]
    return Entry(f"{sum(shares) / len(shares):.0f} %") if shares else ABSENT


def missing(results: Results) -> list[CellKey]:
    """Cells of the configured grid that have no file."""
    config = results.run.config
    found = [(t, results.concurrencies(t)) for t in results.temperatures]
    loads = [(load["temperature"], load["concurrency"]) for load in config.get("load", ())]
    first = results.repeats[0]
    repeats = range(first, first + config["repeats"]) if "repeats" in config else results.repeats
    return [
        key
        for temperature, concurrencies in loads or found
        for concurrency in concurrencies
        for method in results.names
        for repeat in repeats
        if (key := CellKey(method, temperature, concurrency, repeat)) not in results.cells
    ]


def checks(results: Results) -> Iterator[Block]:
    """Outputs, metrics, failures, holes."""
    yield Heading(3, "Outputs")
    yield output_sentence(results)
    if any(entry.compared for entry in results.outputs.values()):
        yield Text(
            "Each cell is compared with no speculation at the same temperature and concurrency. "
            "Where repeats of no speculation differ among themselves, the batch alone changes "
            "outputs, through the order of floating-point sums."
        )
        yield _output_table(results)
    yield Heading(3, "Metrics and requests")
    yield metric_sentence(results)
    wrong = [s for cell in results.cells.values() for s in cell.disagreements or ()]
    if wrong:
        yield Bullets(_shortened(wrong))
    yield Heading(3, "Failures and missing cells")
    absent = missing(results)
    yield failure_sentence(results, len(absent))
    failures = [
        f"{key}: {len(cell.errors)} of {cell.num_requests} requests failed, the first with: "
        f"{cell.errors[0].strip().splitlines()[0][:200] if cell.errors[0].strip() else 'no word'}"
        for key, cell in results.cells.items()
        if cell.errors
    ]
    for listed in (failures, [f"missing: {key}" for key in absent], results.problems):
        if listed:
            yield Bullets(_shortened(listed))


def _shortened(sentences: Sequence[str]) -> list[str]:
    rest = len(sentences) - MAX_LISTED
    return [*sentences[:MAX_LISTED], *([f"and {rest} more"] if rest > 0 else [])]


def _output_table(results: Results) -> Table:
    rows = []
    for name, entry in results.outputs.items():
        if not entry.compared:
            continue
        wrong = sum(len(difference.prompts) for difference in entry.differences)
        verdict = Entry(f"{wrong} differ", Mark.BAD) if wrong else Entry("yes")
        first = str(entry.differences[0]) if wrong else "-"
        rows.append((name, [Entry(str(entry.compared)), verdict, Entry(first)]))
    return Table(
        "Outputs compared with those without speculation",
        ["method", "compared", "identical", "first cell that differs"],
        rows,
        numeric=False,
    )


def appendix(results: Results) -> Iterator[Block]:
    """Configuration and servers, as recorded."""
    yield Bullets(
        [f"{name}: `{json.dumps(value)}`" for name, value in results.run.config.items()]
        or ["no configuration was recorded"]
    )
    argvs = {key.method: cell.server_argv for key, cell in results.cells.items()}
    yield Bullets(
        [f"{name}: `{shlex.join(argvs[name])}`" for name in results.names if argvs.get(name)]
        or ["no server was recorded"]
    )


def difference_entry(estimate: Estimate, digits: int = 2) -> Entry:
    """A difference with its sign."""
    text = f"{estimate.value:+.{digits}f}"
    if estimate.has_interval:
        text += f" [{estimate.low:+.{digits}f}, {estimate.high:+.{digits}f}]"
    return Entry(text)
