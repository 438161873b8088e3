"""Whether this machine can be measured: versions, GPU, seams, traces, and one server of each kind.

    python -m eval.gpu.check [--no-servers] [--shape NAME]

Costs a minute or two, and finds out what would otherwise end a long run. The servers are those of
``eval/configs/gpu-check.toml``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eval import run
from eval.bench import provenance
from eval.gpu import traces
from eval.gpu.models import SHAPES

CONFIG = Path(__file__).parents[1] / "configs" / "gpu-check.toml"


def gpu() -> str:
    """Name and capability."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    name = ", ".join(provenance.hardware()["gpus"]) or torch.cuda.get_device_name()
    return f"{name}, sm_{major}{minor}, {free:.0f} of {total:.0f} GiB free"


def versions() -> str:
    """What will be measured."""
    return ", ".join(f"{name} {number}" for name, number in provenance.versions().items())


def seams() -> str:
    """Whether C2T fits this SGLang; raises where it does not."""
    from sglang_c2t.srt import seams

    seams.require_seams()
    return f"{len(seams.SEAMS)} seams in place"


def recorded() -> str:
    """The traces that ship with the code."""
    loaded = traces.load(traces.DEMO)
    return f"{loaded.num_traces} traces, {traces.fingerprint(traces.DEMO)}"


def servers(out: Path, shape: str | None = None) -> str:
    """Three servers on a small model walk a few traces; raises unless all is as recorded."""
    shutil.rmtree(out, ignore_errors=True)  # an older check says nothing of this machine
    if run.main([str(CONFIG), "--out", str(out), *(("--shape", shape) if shape else ())]):
        raise RuntimeError(f"see above, {out}/checks.json and {out}/logs")
    return "no speculation, fixed lengths and gates walk their traces"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; the exit code is the number of failures."""
    options = argparse.ArgumentParser(prog="python -m eval.gpu.check", description=__doc__)
    options.add_argument("--no-servers", action="store_true")
    options.add_argument("--out", type=Path, default=Path("runs/gpu/check"), help="logs and cells")
    options.add_argument("--shape", choices=sorted(SHAPES), help="of the servers' models")
    args = options.parse_args(argv)
    checks: dict[str, Callable[[], str]] = {
        "versions": versions,
        "gpu": gpu,
        "seams": seams,
        "traces": recorded,
    }
    if not args.no_servers:
        checks["servers"] = lambda: servers(args.out, args.shape)
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
