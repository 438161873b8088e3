"""The demo target with the weight of a larger model, and the very same outputs.

The demo target is so small that a forward costs what Python costs, so nothing about time can be
seen on it. Here every MLP is widened: its new gate and up rows are random, and the new columns of
its down projection are zero, so that what they compute is multiplied, added and worth nothing. A
forward then reads so many megabytes and multiplies so many numbers; one row costs almost what a few
cost, and many cost in proportion: a floor, a knee and a slope as on a GPU, in small. (The idea of
function-preserving expansion: Net2Net, arXiv:1511.05641.)

    python -m eval.demo_models.weighted 130      # makes it, checks it, says where it is

Made at first use, in seconds, in the cache folder of the user (``XDG_CACHE_HOME``); its name holds
the size and a checksum of the target it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.prompts import demo_mix
from eval.server import TARGET

#: Millions of parameters of the target that tables about time are made on. A layer of the demo
#: drafts then costs 4 to 8 % of a forward of it at the same batch, as beside a model of 8B.
STANDARD = 130

#: Scale of the random rows, that of fresh weights.
SCALE = 0.02

SMALLEST, LARGEST = 5, 2000


class WeightError(RuntimeError):
    """The weighted target cannot be made, or does not say what the target says."""


def weighted_target(millions: int = STANDARD, *, target: Path = TARGET) -> Path:
    """Folder of the ``target`` with so many ``millions`` of parameters, made if need be.

    Raises :class:`WeightError` for a size out of range, or where outputs differ.
    """
    if not SMALLEST <= millions <= LARGEST:
        raise WeightError(
            f"a weighted target has {SMALLEST} to {LARGEST} million parameters, not {millions}"
        )
    weights = (target / "model.safetensors").read_bytes()
    name = f"target-{millions}M-{hashlib.sha256(weights).hexdigest()[:12]}"
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, whoever else is making it.
    making = Path(tempfile.mkdtemp(prefix=name, dir=folder.parent))
    try:
        _write(target, millions, making)
        check_same(target, making)
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where weighted targets are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sglang-c2t"


def widened(tensors: dict[str, Tensor], width: int, seed: int = 0) -> dict[str, Tensor]:
    """The same network with MLPs of ``width``: random gate and up rows behind zero down columns.

    Names and the [out, in] order are those of ``LlamaForCausalLM``; ``width`` is at least that
    of the network.
    """
    drawn = torch.Generator().manual_seed(seed)
    wide = {}
    for name, values in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            shape = width - values.shape[0], values.shape[1]
            more = torch.randn(shape, generator=drawn).mul_(SCALE).to(values.dtype)
            wide[name] = torch.cat((values, more))
        elif name.endswith("down_proj.weight"):
            wide[name] = torch.nn.functional.pad(values, (0, width - values.shape[1]))
        else:
            wide[name] = values
    return wide


def _write(target: Path, millions: int, folder: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    rest = sum(t.numel() for name, t in tensors.items() if ".mlp." not in name)
    per_unit = 3 * config["hidden_size"] * config["num_hidden_layers"]
    # Whole vectors for the CPU's kernels.
    width = max(round((millions * 1e6 - rest) / per_unit / 64) * 64, config["intermediate_size"])
    save_file(widened(tensors, width), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)


@torch.inference_mode()
def check_same(target: Path, weighted: Path, *, prompts: int = 3, tokens: int = 16) -> None:
    """Raise :class:`WeightError` where greedy answers of the two, in float32, differ."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (target, weighted)
    ]
    for prompt in demo_mix(prompts, seed=1):
        ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        answers = [
            model.generate(ids, max_new_tokens=tokens, do_sample=False).tolist() for model in models
        ]
        if answers[0] != answers[1]:
            raise WeightError(f"the weighted target answers otherwise than {target}: {prompt.text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make one; 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.demo_models.weighted", description=__doc__
    )
    parser.add_argument("millions", type=int, nargs="?", default=STANDARD, help="of parameters")
    try:
        print(weighted_target(parser.parse_args(argv).millions))
    except WeightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
