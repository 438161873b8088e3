"""Decode throughput of every method at constant batch sizes, on the same replayed traces.

    python -m eval.gpu.throughput runs/gpu/h100.jsonl --budget-s 540
    python -m eval.gpu.report runs/gpu/h100.jsonl

All requests of a batch start together, with prompts of one length, and generate the same number
of tokens. Measured is the stretch in which all of them decode, on the scheduler's own clock
(``step_clock.py``). A window is such a stretch for each group of traces; every window of a cell
and every method walks the same traces, so that the spread is the machine's.

One server at a time. Each cell (method, batch) is one line of the file as soon as it is there:
a call that runs out of its budget ends with code 3, and the next one goes on. Code 1: cells
failed. Conditions stand on the first line, and a file of other conditions is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import requests
import torch

from eval.gpu import launch, methods, models, traces
from eval.gpu.launch import GPULaunch
from eval.gpu.methods import POLICIES, Host, Method
from eval.gpu.step_clock import KEY, Span, full_batch
from eval.gpu.trace_replay import LANE_SHIFT, Settings, lengths_of, prompt
from eval.server import Server, ServerError, running
from sglang_c2t.files import write_whole

BATCHES = (1, 8, 32, 64, 128, 256)
UNFINISHED = 3


class Budget:
    """Seconds a call may take, and what its parts took so far."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def allows(self, part: str, guess: float) -> bool:
        """Whether as much is left as the longest ``part`` so far took, or ``guess`` seconds."""
        return self._end - time.monotonic() > 1.2 * self._longest.get(part, guess)

    def took(self, part: str, seconds: float) -> None:
        """Remember how long a part took."""
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))


class Results:
    """The JSON lines of a run: its conditions first, then one line per cell."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self._path = path
        if path.exists():
            found, self.cells = read(path)
            differing = sorted(
                key for key in {*found, *conditions} if found.get(key) != conditions.get(key)
            )
            if differing:
                raise ValueError(
                    f"{path} was measured with other {', '.join(differing)}: choose another file"
                )
            # Without a last line that was cut off: the next one would end up behind it.
            whole = [{"conditions": found}, *self.cells]
            text = "".join(json.dumps(line) + "\n" for line in whole)
            write_whole({path: lambda tmp: tmp.write_text(text)})
        else:
            self.cells = []
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"conditions": conditions})

    def has(self, method: Method, batch: int) -> bool:
        """Whether the cell is measured; a failed one is tried again."""
        return any(
            cell["method"] == method.name and cell["batch"] == batch and "error" not in cell
            for cell in self.cells
        )

    def add(self, cell: dict[str, Any]) -> None:
        """Keep a cell, on the disk at once."""
        self.cells.append(cell)
        self._append(cell)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Conditions and cells; a last line that was cut off is dropped.

    Raises ValueError when the first line is none of ours.
    """
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    if not lines or "conditions" not in lines[0]:
        raise ValueError(f"{path} holds no results of eval.gpu.throughput")
    return lines[0]["conditions"], lines[1:]


# -- one cell -----------------------------------------------------------------------------


def waves(batch: int, min_lanes: int) -> list[list[int]]:
    """Lanes of the batches of one window: each of ``batch`` requests, ``min_lanes`` in all.

    Batch 2, 3 lanes: [0, 1], [2, 3].
    """
    num = -(-max(batch, min_lanes) // batch)
    return [list(range(i * batch, (i + 1) * batch)) for i in range(num)]


def expected_steps(
    correct: Sequence[int], verified: Sequence[int] | int, num_tokens: int, shift: int = 0
) -> int:
    """Verifications an answer takes: the first token comes from the prefill.

    ``correct`` [R] of one trace, ``verified`` drafts [R] or everywhere; both start again at the
    end. Correct 2 0 1, 2 verified, 5 tokens: 1 -> 4 (behind root 0) -> 5 (root 3 = 0): 2.
    """
    tokens, root, steps = 1, shift, 0
    while tokens < num_tokens:
        at = root % len(correct)
        limit = verified if isinstance(verified, int) else verified[at]
        accepted = min(correct[at], limit) + 1
        tokens, root, steps = tokens + accepted, root + accepted, steps + 1
    return steps


class Bench:
    """Measures cells on a running server."""

    def __init__(self, args: argparse.Namespace, loaded: traces.Traces) -> None:
        self._args = args
        first = loaded.chains.first_root.tolist()
        spans = list(itertools.pairwise(first))
        wanted = Settings(str(args.traces), POLICIES, num_steps=args.gated_steps)
        kept = lengths_of(loaded, wanted)
        self._correct = [loaded.chains.num_correct[a:b].tolist() for a, b in spans]
        self._kept = [[row[a:b].tolist() for a, b in spans] for row in kept]

    def cell(self, server: Server, method: Method, batch: int) -> dict[str, Any]:
        """Windows [seconds, tokens, steps, rows] of one method at one batch size."""
        groups = waves(batch, self._args.min_lanes)
        self._wave(server, method, groups[0])  # warm-up
        windows, right, total = [], 0, 0
        verify_ct = output = 0
        for _ in range(self._args.windows):
            spans = []
            for lanes in groups:
                span, answers = self._wave(server, method, lanes)
                spans.append(span)
                for lane, meta in zip(lanes, answers, strict=True):
                    verify_ct += meta.get("spec_verify_ct", 0)
                    output += meta["completion_tokens"]
                    total += 1
                    right += self._as_predicted(method, lane, meta.get("spec_verify_ct", 0))
            windows.append([sum(column) for column in zip(*spans, strict=True)])
        return {
            "method": method.name,
            "batch": batch,
            "num_steps": method.num_steps,
            "windows": windows,
            "accept_length": output / verify_ct if verify_ct else None,
            "as_predicted": [right, total] if method.predictable and method.num_steps else None,
        }

    def _wave(
        self, server: Server, method: Method, lanes: list[int]
    ) -> tuple[Span, list[dict[str, Any]]]:
        """One batch of requests, from its first token to its last."""
        args = self._args
        server_info(server)  # forget older steps
        answers = server.generate(
            timeout=args.wave_seconds,
            input_ids=[prompt(lane, method.policy or 0, args.prompt_len) for lane in lanes],
            sampling_params={
                "temperature": 0, "max_new_tokens": args.output_len, "ignore_eos": True,
            },
        )  # fmt: skip
        steps = server_info(server)["internal_states"][0][KEY]
        span = full_batch(steps, len(lanes))
        return span, [answer["meta_info"] for answer in answers]

    def _as_predicted(self, method: Method, lane: int, verifications: int) -> bool:
        """Whether a request took the steps its trace says; true where the traces do not say.

        A gated server may draft fewer layers than its policy would verify, so it may need some
        more.
        """
        if not method.predictable or not method.num_steps:
            return True
        shift, trace = divmod(lane, len(self._correct))
        verified = method.num_steps if method.policy is None else self._kept[method.policy][trace]
        steps = expected_steps(
            self._correct[trace], verified, self._args.output_len, shift * LANE_SHIFT
        )
        most = steps if method.policy is None else 1.25 * steps + 2
        return steps <= verifications <= most


def server_info(server: Server) -> dict[str, Any]:
    """GET /server_info."""
    response = requests.get(f"{server.url}/server_info", timeout=60)
    response.raise_for_status()
    info: dict[str, Any] = response.json()
    return info


# -- the run ------------------------------------------------------------------------------


def host_launch(host: Host, args: argparse.Namespace, pair: models.Pair) -> GPULaunch:
    """The server of a host."""
    most = max(args.batches)
    gated = any(method.policy is not None for method in host.methods)
    replay = Settings(
        str(args.traces.resolve()),
        POLICIES if gated else (),
        args.gated_steps,
        max_positions=args.context,
    )
    more = replay.to_env() if "trace_replay" in host.plugins else {}
    flags = (
        *models.SERVING_FLAGS,
        "--context-length", str(args.context),
        "--max-running-requests", str(most),
        "--cuda-graph-bs-decode", *(str(batch) for batch in sorted(args.batches)),
        *host.flags,
        *args.server_flags,
    )  # fmt: skip
    env = launch.environment(args.work, only=host.plugins, site=args.site, more=more)
    return GPULaunch(host.name.replace(" ", "-").replace(",", ""), flags, pair.target, env)


def run(args: argparse.Namespace, results: Results) -> int:
    """Measure what is missing while the budget lasts; the exit code."""
    budget = Budget(args.budget_s)
    bench = Bench(args, traces.load(args.traces))
    pair = models.write(args.shape, args.work / "models")
    failed = False
    for host in methods.hosts(pair, gated_steps=args.gated_steps):
        chosen = [m for m in host.methods if not args.methods or m.name in args.methods]
        todo = [(m, b) for b in sorted(args.batches) for m in chosen if not results.has(m, b)]
        if not todo:
            continue
        if not budget.allows("server", 120.0):
            return UNFINISHED
        begin = time.monotonic()
        try:
            with running(host_launch(host, args, pair), args.work / "logs") as server:
                budget.took("server", time.monotonic() - begin)
                print(f"{host.name}: up after {time.monotonic() - begin:.0f} s", flush=True)
                for cell in _cells(server, todo, bench, budget):
                    results.add(cell)
                    failed |= "error" in cell
                    print(_line(cell), flush=True)
        except OutOfTime:
            return UNFINISHED
        except ServerError as error:
            failed = True
            for method, batch in todo:
                results.add({"method": method.name, "batch": batch, "error": str(error)[-2000:]})
            print(f"{host.name}: {error}", flush=True)
    return int(failed)


class OutOfTime(Exception):
    """The budget does not hold another cell."""


def _cells(
    server: Server, todo: Sequence[tuple[Method, int]], bench: Bench, budget: Budget
) -> Iterator[dict[str, Any]]:
    """One result per cell of ``todo``; a dead server ends it, a bad answer does not."""
    for method, batch in todo:
        if not budget.allows(f"cell {batch}", 20.0):
            raise OutOfTime
        begin = time.monotonic()
        try:
            yield bench.cell(server, method, batch)
        except (requests.RequestException, ValueError, KeyError) as error:
            if server.process.poll() is not None:
                raise ServerError(f"server died at {method.name}, batch {batch}") from error
            yield {
                "method": method.name,
                "batch": batch,
                "error": f"{type(error).__name__} {error}",
            }
        budget.took(f"cell {batch}", time.monotonic() - begin)


def _line(cell: dict[str, Any]) -> str:
    head = f"{cell['method']:40} batch {cell['batch']:4}"
    if "error" in cell:
        return f"{head} FAILED {cell['error'][:200]}"
    rates = [tokens / seconds for seconds, tokens, *_ in cell["windows"]]
    told = f" accept {cell['accept_length']:.2f}" if cell["accept_length"] else ""
    right = "" if cell["as_predicted"] is None else " predicted {}/{}".format(*cell["as_predicted"])
    return f"{head} {statistics.median(rates):9.0f} tok/s [{min(rates):.0f}, {max(rates):.0f}]" + (
        told + right
    )


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """All that must not change within one file."""
    made_from = traces.load(args.traces).provenance
    return {
        "gpu": gpu_name(),
        "host": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {name: _version(name) for name in ("sglang", "torch", "flashinfer-python")},
        "revision": args.revision or revision(),
        "shape": args.shape,
        "traces": {"sha256": traces.fingerprint(args.traces), **made_from},
        "batches": sorted(args.batches),
        "windows": args.windows,
        "min_lanes": args.min_lanes,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "gated_steps": args.gated_steps,
        "server_flags": list(args.server_flags),
        "temperature": 0,
        "policies": list(POLICIES),
    }


def gpu_name() -> str:
    """As the driver tells it, without opening a CUDA context."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "no GPU"
    return found.stdout.strip()


def revision() -> str:
    """The checkout's, marked where files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(launch.ROOT)]
    try:
        sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True,
                             text=True, check=True).stdout.strip()  # fmt: skip
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True,
                               check=True).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{sha}, changed" if dirty else sha


def _version(name: str) -> str:
    if name == "torch":
        return torch.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def parser() -> argparse.ArgumentParser:
    """Options of a run."""
    options = argparse.ArgumentParser(prog="python -m eval.gpu.throughput", description=__doc__)
    options.add_argument("results", type=Path, help="JSON lines; continued if it is there")
    options.add_argument("--budget-s", type=float, default=1e9, help="seconds this call may take")
    options.add_argument("--shape", default="8b", choices=sorted(models.SHAPES))
    options.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options.add_argument("--methods", nargs="*", help="names as in the table; default: all")
    options.add_argument("--windows", type=int, default=5)
    options.add_argument("--min-lanes", type=int, default=8, help="traces per window, at least")
    options.add_argument("--prompt-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=96)
    options.add_argument("--context", type=int, default=2048, help="longest request, in tokens")
    options.add_argument("--gated-steps", type=int, default=methods.MAX_STEPS)
    options.add_argument("--traces", type=Path, default=traces.DEMO)
    options.add_argument("--site", type=Path, help="folder with SGLang, if it is not installed")
    options.add_argument("--work", type=Path, default=Path("runs/gpu"), help="logs, model folders")
    options.add_argument("--revision", help="of this code, where there is no git")
    options.add_argument("--wave-seconds", type=float, default=120.0, help="one batch, at most")
    options.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="last: SGLang's own flags"
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, as far as the budget goes."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the server on the way out
    args.work = args.work.resolve()
    try:
        code = run(args, Results(args.results, conditions(args)))
    except ValueError as error:
        print(f"eval.gpu.throughput: error: {error}", file=sys.stderr)
        return 2
    if code == UNFINISHED:
        print("budget spent: call again to go on")
    return code


if __name__ == "__main__":
    sys.exit(main())
