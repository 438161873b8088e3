"""SmolLM2-135M-Instruct with the weight of a larger model, and the very same outputs.

Every MLP is widened: its new gate and up rows are random, and the new columns of its down
projection are zero. A forward reads and multiplies the new weights, and their result is zero. So a
machine whose forwards of the model itself cost little more than Python does has a forward with a
floor, a knee and a slope, as on a GPU. The idea of function-preserving expansion is Net2Net's
(arXiv:1511.05641).

    python -m eval.smollm2.weighted 400      # makes it, checks it, prints its folder

It is made at first use, in the user's cache folder, beside the model itself. Models of 1B and 8B
parameters are made in a GPU's memory instead: ``eval/gpu/graft.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.smollm2.target import NAME, SHA256, TargetError, cached, target_folder

#: Scale of the random rows, that of fresh weights.
SCALE = 0.02

#: Millions of parameters.
SMALLEST, LARGEST = 150, 2000

#: Texts that the heavier model must continue as the model itself does.
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)


def weighted_target(millions: int) -> Path:
    """Folder of the target with so many ``millions`` of parameters, made if need be.

    Raises :class:`TargetError` for a size out of range, or where outputs differ.
    """
    if not SMALLEST <= millions <= LARGEST:
        raise TargetError(
            f"a weighted target has {SMALLEST} to {LARGEST} million parameters, not {millions}"
        )
    target = target_folder()

    def write(folder: Path) -> None:
        _write(target, millions, folder)
        check_same(target, folder)

    return cached(f"{NAME}-{millions}M-{SHA256[:12]}", write)


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
    shutil.copytree(
        target, folder, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True
    )
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    rest = sum(t.numel() for name, t in tensors.items() if ".mlp." not in name)
    per_unit = 3 * config["hidden_size"] * config["num_hidden_layers"]
    # Whole vectors for the CPU's kernels.
    width = max(round((millions * 1e6 - rest) / per_unit / 64) * 64, config["intermediate_size"])
    save_file(widened(tensors, width), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))


@torch.inference_mode()
def check_same(target: Path, weighted: Path, *, tokens: int = 16) -> None:
    """Raise :class:`TargetError` where greedy answers of the two, in float32, differ."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (target, weighted)
    ]
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        answers = [
            model.generate(**inputs, max_new_tokens=tokens, do_sample=False).tolist()
            for model in models
        ]
        if answers[0] != answers[1]:
            raise TargetError(f"the weighted target answers otherwise than {target}: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make one; 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m eval.smollm2.weighted", description=__doc__)
    parser.add_argument("millions", type=int, help="of parameters")
    try:
        print(weighted_target(parser.parse_args(argv).millions))
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
