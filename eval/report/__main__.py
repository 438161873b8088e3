"""What a benchmark run shows, as one HTML page and as Markdown with its plots beside it.

    python -m eval.report DIR [--out FOLDER] [--ceilings FILE]    report.html, report.md, plots/
    python -m eval.report compare A B [--out FOLDER]              compare.html, compare.md, plots/

Reads what ``python -m eval.run`` wrote, also while it still runs. Every number is made from the
records; nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from eval.bench.records import RecordError
from eval.gpu.roofline import Ceilings
from eval.report.cells import Results, load
from eval.report.compare import compare
from eval.report.report import report, write
from sglang_c2t.config import ConfigError

CONSOLE = Console(stderr=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; 0, or 2 where there is nothing to report on."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        paths = _compare(argv[1:]) if argv[:1] == ["compare"] else _report(argv)
    except (RecordError, ConfigError, OSError) as error:
        print(f"eval.report: error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(f"wrote {path}")
    return 0


def _report(argv: Sequence[str]) -> list[Path]:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("run", type=Path, metavar="DIR", help="folder of a benchmark run")
    add("--out", type=Path, metavar="FOLDER", help="where to write; default: DIR")
    add("--ceilings", type=Path, help="of the GPU, from python -m eval.gpu.roofline --out")
    args = parser.parse_args(argv)
    results = _load(args.run)
    ceilings = Ceilings.read(args.ceilings) if args.ceilings else None
    with CONSOLE.status("tables and plots"):
        return write(report(results, ceilings), args.out or args.run)


def _compare(argv: Sequence[str]) -> list[Path]:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report compare", description="What differs between two runs."
    )
    add = parser.add_argument
    add("before", type=Path, metavar="A", help="folder of a benchmark run")
    add("after", type=Path, metavar="B", help="folder of another")
    add("--out", type=Path, metavar="FOLDER", help="where to write; default: compare in B")
    args = parser.parse_args(argv)
    before, after = _load(args.before), _load(args.after)
    with CONSOLE.status("tables and plots"):
        document = compare(before, after, (str(args.before), str(args.after)))
        return write(document, args.out or args.after / "compare", stem="compare")


def _load(folder: Path) -> Results:
    told = partial(track, description=f"reading {folder}", console=CONSOLE, transient=True)
    return load(folder, told)


if __name__ == "__main__":
    sys.exit(main())
