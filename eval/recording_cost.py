"""What ``--c2t-record`` costs: the same load on two servers in turn, one of them recording.

Both servers are up all the time and idle while the other works, so that each round compares
neighbouring moments of one machine. Prints the ratio of their times: wall time, and processor
time of the server's processes, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eval.prompts import classifier_mix
from eval.server import DRAFTS, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.progress import progress_on


def seconds(server: Server, num_prompts: int, max_new_tokens: int) -> tuple[float, float]:
    """Wall and processor time of one load: as many requests at once as there are prompts."""
    bodies = [greedy(prompt.text, max_new_tokens) for prompt in classifier_mix(num_prompts)]
    for body in bodies:
        body["sampling_params"]["ignore_eos"] = True  # mostly decoding, few prefills
    server.flush_cache()
    before = server.cpu_seconds()
    wall = run_load(server.url, bodies, concurrency=num_prompts).seconds
    return wall, server.cpu_seconds() - before


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m eval.recording_cost", description=__doc__)
    parser.add_argument("--algorithm", choices=sorted(DRAFTS), default="EAGLE3")
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(argv)

    flags = (*speculative_flags(args.algorithm, args.num_steps), "--c2t", "--c2t-policy", "c2t")
    with tempfile.TemporaryDirectory() as folder:
        recording = ("--c2t-record", f"{folder}/rec", "--c2t-record-share", str(args.share))
        logs = Path(folder)
        with (
            running(Launch("plain", flags), logs) as plain,
            running(Launch("recording", (*flags, *recording)), logs) as recorder,
        ):
            load = (args.num_prompts, args.max_new_tokens)
            for server in (plain, recorder):
                seconds(server, *load)  # warm-up
            ratios: list[tuple[float, ...]] = []
            with progress_on(Console(stderr=True)) as progress:
                for round_ in progress.track(range(args.rounds), description="rounds"):
                    order = (plain, recorder) if round_ % 2 == 0 else (recorder, plain)
                    times = {server.url: seconds(server, *load) for server in order}
                    pairs = zip(times[recorder.url], times[plain.url], strict=True)
                    ratios.append(tuple(with_it / without for with_it, without in pairs))
            drafts = recorder.c2t_state()["recording"]["drafts"]
    print(
        f"share {args.share:g}, {args.num_prompts} requests at once, {args.rounds} rounds, "
        f"{drafts} drafts recorded; with recording / without:"
    )
    for name, values in zip(("wall", "processor"), zip(*ratios, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name} time: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
