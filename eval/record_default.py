"""``make classifier``: record the demo models behind real servers, train the default classifier.

Each draft kind drafts full chains of ten on prompts that no demo run uses; all rows are
pooled, so that the default has seen three calibrations.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from eval.load import greedy, run_load
from eval.prompts import classifier_mix
from eval.server import DRAFTS, Launch, running, speculative_flags
from sglang_c2t.classifier.checkpoint import DEFAULT_PATH
from sglang_c2t.cli import main as c2t

CONCURRENCY = 32
FLUSH_SECONDS = 5.0  # an idle server has written its last rows by then


def record(algorithm: str, directory: Path, args: argparse.Namespace, progress: Progress) -> None:
    """Serve the classifier's prompts with full drafts and record every token."""
    flags = (
        *speculative_flags(algorithm, args.num_steps),
        "--c2t", "--c2t-policy", "fixed", "--c2t-record", str(directory),
    )  # fmt: skip
    bodies = [greedy(p.text, args.max_new_tokens) for p in classifier_mix(args.num_prompts)]
    task = progress.add_task(f"recording {algorithm}", total=len(bodies))
    with running(Launch(f"record-{algorithm}", flags), args.work) as server:
        run_load(server.url, bodies, concurrency=CONCURRENCY,
                 on_answer=lambda: progress.advance(task))  # fmt: skip
        time.sleep(FLUSH_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Record, train, write the shipped files."""
    parser = argparse.ArgumentParser(prog="python -m eval.record_default", description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=600, help="per draft kind")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-steps", type=int, default=10, help="drafted tokens per step")
    parser.add_argument("--work", type=Path, default=Path("runs/default-classifier"))
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    args = parser.parse_args(argv)

    recording = args.work / "recording"
    shutil.rmtree(recording, ignore_errors=True)  # rows of other weights must not mix in
    with Progress(console=Console()) as progress:
        for algorithm in sorted(DRAFTS):
            record(algorithm, recording, args, progress)
    return c2t(["train", str(recording), "--out", str(args.out)])


if __name__ == "__main__":
    sys.exit(main())
