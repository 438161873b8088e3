"""Whether this machine can be measured: versions, plugins, GPU, and one server of each kind.

    python -m eval.gpu.check [--no-servers]

Costs a minute or two, and finds out what would otherwise end a long run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from eval.gpu import methods, models, plugins, throughput, traces
from eval.gpu.methods import Host
from eval.server import running


def gpu() -> str:
    """Name and capability."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    return f"{throughput.gpu_name()}, sm_{major}{minor}, {free:.0f} of {total:.0f} GiB free"


def versions() -> str:
    """What will be measured."""
    names = ("sglang", "torch", "triton", "flashinfer-python", "transformers")
    return ", ".join(f"{name} {version(name)}" for name in names)


def seams() -> str:
    """Whether C2T fits this SGLang; raises where it does not."""
    from sglang_c2t.srt import compat

    compat.require_seams()
    return f"{len(compat.SEAMS)} seams in place"


def recorded() -> str:
    """The traces that ship with the code."""
    loaded = traces.load(traces.DEMO)
    return f"{loaded.num_traces} traces, {traces.fingerprint(traces.DEMO)}"


def short_run(host: Host, args: argparse.Namespace, pair: models.Pair) -> str:
    """Start a server on a small model, walk a few traces at batches 1 and 4."""
    bench = throughput.Bench(args, traces.load(args.traces))
    begin = time.monotonic()
    with running(throughput.host_launch(host, args, pair), args.work / "logs") as server:
        told = [f"up after {time.monotonic() - begin:.0f} s"]
        for method in host.methods:
            for batch in args.batches:
                cell = bench.cell(server, method, batch)
                right = cell["as_predicted"]
                if right is not None and right[0] != right[1]:
                    raise RuntimeError(
                        f"{method.name}, batch {batch}: {right[0]} of {right[1]} requests took as "
                        "many steps as their traces say"
                    )
                told.append(f"{method.name} x{batch} {cell['windows'][0][1]:.0f} tokens")
    return "; ".join(told)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; the exit code is the number of failures."""
    options = argparse.ArgumentParser(prog="python -m eval.gpu.check", description=__doc__)
    options.add_argument("--no-servers", action="store_true")
    options.add_argument("--site", type=Path, help="folder with SGLang, if it is not installed")
    options.add_argument("--work", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    options.add_argument("--shape", default="1b", choices=sorted(models.SHAPES))
    args = options.parse_args(argv)
    run = throughput.parser().parse_args([
        "unused", "--shape", args.shape, "--batches", "1", "4", "--windows", "1",
        "--min-lanes", "4", "--prompt-len", "16", "--output-len", "48", "--context", "512",
        "--work", str(args.work), *(("--site", str(args.site)) if args.site else ()),
    ])  # fmt: skip
    run.work = run.work.resolve()
    checks: dict[str, Callable[[], str]] = {
        "versions": versions,
        "gpu": gpu,
        "seams": seams,
        "plugins": lambda: str(plugins.write(run.work / "plugins")),
        "traces": recorded,
    }
    if not args.no_servers:
        pair = models.write(args.shape, run.work / "models")
        wanted = (methods.BASELINE, "fixed 3", "c2t")
        for host in methods.hosts(pair):
            if host.name in wanted:
                checks[f"server, {host.name}"] = lambda host=host: short_run(  # type: ignore[misc]
                    host, run, pair
                )
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Exception as error:  # the next check may say why
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
