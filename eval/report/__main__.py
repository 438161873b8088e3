"""Report of a benchmark run: one HTML page, and Markdown with its plots.

    python -m eval.report DIR [--out FOLDER]                      report.html, report.md, plots/
    python -m eval.report compare A B [--out FOLDER]              compare.html, compare.md, plots/

Reads what ``python -m eval.run`` wrote, also while it still runs. Every number is computed from
the records; nothing is measured here. FOLDER is DIR, or compare in B, unless given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.bench.records import RecordError
from eval.report.compare import compare
from eval.report.report import report
from eval.report.results import load


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; 0, or 2 if there is nothing to report on."""
    argv = list(sys.argv[1:] if argv is None else argv)
    comparing = argv[:1] == ["compare"]
    parser = argparse.ArgumentParser(
        "python -m eval.report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name in ("A", "B") if comparing else ("DIR",):
        parser.add_argument(name, type=Path, help="folder of a benchmark run")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write")
    args = parser.parse_args(argv[comparing:])
    try:
        if comparing:
            made = compare(load(args.A), load(args.B), (str(args.A), str(args.B)))
            written = made.write(args.out or args.B / "compare", "compare")
        else:
            written = report(load(args.DIR)).write(args.out or args.DIR, "report")
    except (RecordError, OSError) as error:
        print(f"eval.report: error: {error}", file=sys.stderr)
        return 2
    print(*(f"wrote {path}" for path in written), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
