"""Report of a benchmark run: one HTML page, and Markdown with its plots.

    python -m eval.report DIR [--out FOLDER]                      report.html, report.md, plots/
    python -m eval.report figure compare.json                     compare.svg, beside it

Reads what ``python -m eval.run`` wrote, also while it still runs; ``figure`` reads what ``python -m
sglang_c2t compare`` wrote. Every number is computed from the records; nothing is measured here.
FOLDER is DIR unless given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from eval.bench.records import RecordError
from eval.report.charts import pareto_chart
from eval.report.report import report
from eval.report.results import load
from sglang_c2t.files import write_texts
from sglang_c2t.offline.compared import C2T, NONE


def figure(results: Path) -> list[Path]:
    """Draw the tokens/s of servers over those of their requests; RecordError without results."""
    try:
        series = {
            server["server"]: [
                (int(load), 1e3 / median(run["tpot_ms"][0] for run in runs["repeats"]),
                 median(runs["tokens_per_second"]))
                for load, runs in server["loads"].items()
            ]
            for server in json.loads(results.read_text()) if server["loads"]
        }  # fmt: skip
    except (ValueError, LookupError, TypeError) as error:
        raise RecordError(f"{results} holds no results of compare: {error!r}") from error
    drawn = pareto_chart("compare", series, (C2T, NONE), "Throughput and speed of each request")
    out = results.with_suffix(".svg")
    write_texts({out: drawn.wide + "\n"})
    return [out]


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; 0, or 2 if there is nothing to report on."""
    argv = list(sys.argv[1:] if argv is None else argv)
    drawing = argv[:1] == ["figure"]
    parser = argparse.ArgumentParser(
        "python -m eval.report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("DIR", type=Path, help="what was measured")
    if not drawing:
        parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write")
    args = parser.parse_args(argv[drawing:])
    try:
        if drawing:
            written = figure(args.DIR)
        else:
            written = report(load(args.DIR)).write(args.out or args.DIR)
    except (RecordError, OSError) as error:
        print(f"eval.report: error: {error}", file=sys.stderr)
        return 2
    print(*(f"wrote {path}" for path in written), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
