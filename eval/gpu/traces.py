"""Traces: what a trained draft proposed behind every token of some answers, and what was accepted.

A small file made from a recording of every root: numbers only, no token and no text. On a GPU
machine models of real size have random weights; traces give them the acceptance and the draft
statistics of a trained pair (``trace_replay.py``)::

    python -m eval.gpu.traces runs/gpu/record --record --out eval/gpu/demo-traces.safetensors

Legend: Q traces (one per answer), R roots of all traces, D drafted tokens behind each root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_c2t.classifier.recording import MEASURED, Recording, read_recording
from sglang_c2t.classifier.tensors import require_safetensors
from sglang_c2t.config import ConfigError
from sglang_c2t.files import write_whole
from sglang_c2t.offline.replay import Chains, refuse_unrecorded
from sglang_c2t.policies.base import ChainPolicy

FORMAT = "c2t-traces"
VERSION = 1

#: Of the demo models' EAGLE-3 pair on the test prompts of ``eval/TABLES.md``; MODEL_CARD.md there.
DEMO = Path(__file__).with_name("demo-traces.safetensors")

#: Measurements a trace carries; more than any shipped policy reads.
STATS = ("prob", "entropy", *sorted(MEASURED))

#: Answers shorter than this repeat too often to stand for a long one.
MIN_ROOTS = 32


@dataclass(frozen=True)
class Traces:
    """Chains of one length behind every token of Q answers."""

    chains: Chains
    provenance: dict[str, Any]

    @property
    def num_traces(self) -> int:
        """Q: recorded answers."""
        return self.chains.num_requests

    def lengths(self, policy: ChainPolicy) -> Tensor:
        """[R] int64 in [0, D]: drafts the policy would verify behind each root."""
        refuse_unrecorded(policy, self.chains.stats)
        roots = torch.arange(len(self.chains.num_correct))
        return self.chains.lengths(policy, roots)

    def tiled(self, per_root: Tensor, positions: int) -> Tensor:
        """[Q, positions]: values [R] along each trace, which starts again at its end.

        Traces of 2 and 3 roots, values a b | c d e, 4 positions: a b a b, c d e c.
        """
        first = self.chains.first_root
        sizes = first[1:] - first[:-1]
        return per_root[first[:-1, None] + torch.arange(positions) % sizes[:, None]]


def from_recording(recording: Recording, *, depth: int, num_traces: int, source: str) -> Traces:
    """``num_traces`` answers of a recording, its groups taking turns, chains cut at ``depth`` = D.

    Raises :class:`ConfigError` for trees, roots that are missing, drafts shorter than ``depth``,
    or too few answers of at least :data:`MIN_ROOTS` tokens.
    """
    chains = Chains.from_recording(recording)
    if chains.max_length < depth:
        raise ConfigError(f"{source} holds chains of {chains.max_length}, asked for {depth}")
    sizes = (chains.first_root[1:] - chains.first_root[:-1]).tolist()
    by_group: dict[str, list[int]] = defaultdict(list)
    for q, rid in enumerate(chains.requests):
        if sizes[q] >= MIN_ROOTS:
            by_group[rid.rsplit("/", 1)[0]].append(q)
    turns = max((len(members) for members in by_group.values()), default=0)
    order = [m[i] for i in range(turns) for _, m in sorted(by_group.items()) if i < len(m)]
    if len(order) < num_traces:
        raise ConfigError(
            f"{source} holds {len(order)} answers of {MIN_ROOTS} tokens or more, asked for "
            f"{num_traces}"
        )
    chosen = order[:num_traces]
    starts = chains.first_root.tolist()
    roots = torch.cat([torch.arange(starts[q], starts[q + 1]) for q in chosen])
    ends = torch.tensor([0, *(sizes[q] for q in chosen)]).cumsum(0)
    groups = Counter(chains.requests[q].rsplit("/", 1)[0] for q in chosen)
    return Traces(
        Chains(
            stats={name: chains.stats[name][roots, :depth].float() for name in STATS},
            num_correct=chains.num_correct[roots].clamp(max=depth),
            first_root=ends,
            requests=[chains.requests[q] for q in chosen],
            draft_row=torch.arange(len(roots)),
        ),
        {
            "source": source,
            "origins": recording.origins,
            "groups": dict(sorted(groups.items())),
            "num_traces": num_traces,
            "num_roots": len(roots),
            "depth": depth,
        },
    )


def save(traces: Traces, path: Path) -> None:
    """Write one ``.safetensors`` file; its metadata says where the numbers come from."""
    chains = traces.chains
    tensors = {
        "num_correct": chains.num_correct.to(torch.uint8),
        "first_root": chains.first_root.to(torch.int32),
        **{name: chains.stats[name].contiguous() for name in STATS},
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "requests": json.dumps(chains.requests),
        "provenance": json.dumps(traces.provenance, sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole({path: lambda tmp: save_file(tensors, tmp, metadata=metadata)})


def load(path: Path) -> Traces:
    """Raises :class:`ConfigError`, one line, for what is no file of ours."""
    try:
        require_safetensors(path, largest=1 << 32, largest_header=1 << 24)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, str(VERSION)):
                raise ConfigError(f"{path} is not a {FORMAT} file of version {VERSION}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        return Traces(
            Chains(
                stats={name: tensors[name] for name in STATS},
                num_correct=tensors["num_correct"].long(),
                first_root=tensors["first_root"].long(),
                requests=json.loads(metadata["requests"]),
                draft_row=torch.arange(len(tensors["num_correct"])),
            ),
            json.loads(metadata["provenance"]),
        )
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read traces {path}: {error}") from error


def fingerprint(path: Path) -> str:
    """First 12 hexadecimal digits of the file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _record(args: argparse.Namespace) -> Recording:
    """Serve the demo pair on this machine's CPU and record it; minutes."""
    from eval.recordings import Recorded, prompts, record

    texts = prompts("test", args.per_family, args.test_sets)
    what = Recorded(num_steps=args.depth, max_new_tokens=args.max_new_tokens)
    return record(args.algorithm, texts, args.recording, what)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a recording, after making it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu.traces", description=__doc__)
    parser.add_argument("recording", type=Path, help="made with --c2t-record-roots every, topk 1")
    parser.add_argument("--out", type=Path, required=True, help="the traces, .safetensors")
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens behind each root")
    parser.add_argument("--num-traces", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="record the demo pair first")
    parser.add_argument("--algorithm", default="EAGLE3", help="with --record: the demo draft")
    parser.add_argument("--per-family", type=int, default=12, help="with --record: prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="with --record")
    parser.add_argument("--test-sets", type=Path, help="with --record: folder of public prompts")
    args = parser.parse_args(argv)
    try:
        recording = _record(args) if args.record else read_recording(args.recording)
        source = args.recording.name
        traces = from_recording(
            recording, depth=args.depth, num_traces=args.num_traces, source=source
        )
    except (ConfigError, ValueError) as error:
        print(f"eval.gpu.traces: error: {error}", file=sys.stderr)
        return 2
    save(traces, args.out)
    accept = 1 + float(traces.chains.num_correct.double().mean())
    print(
        f"{args.out}: {traces.num_traces} traces, {traces.provenance['num_roots']} roots, "
        f"{args.out.stat().st_size / 1e6:.2f} MB; mean tokens per verification of {args.depth} "
        f"drafts, over all roots: {accept:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
