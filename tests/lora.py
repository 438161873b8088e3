"""Adapters (LoRA) of the demo target, made on the fly."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eval.server import TARGET

RANK = 4
SCALING = 0.5

_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."


def save(folder: Path, seed: int, *, of: Container[str] | None = None) -> None:
    """A random one ``of`` these modules or of all, in PEFT's format; strong enough to change most
    answers.
    """
    config = LlamaConfig.from_pretrained(TARGET)
    hidden, heads = config.hidden_size, config.head_dim * config.num_attention_heads
    keys, inner = config.head_dim * config.num_key_value_heads, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    sizes = {name: size for name, size in sizes.items() if of is None or name in of}
    random, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config.num_hidden_layers):
        for name, (read, written) in sizes.items():
            module = f"{_PREFIX}model.layers.{layer}.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, read, generator=random) / 16
            weights[f"{module}.lora_B.weight"] = torch.randn(written, RANK, generator=random) / 3
    folder.mkdir(parents=True)
    save_file(weights, folder / _FILE)
    settings = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": SCALING * RANK, "bias": "none",
        "target_modules": [name.rpartition(".")[2] for name in sizes],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@torch.no_grad()
def merge(folder: Path, model: torch.nn.Module) -> None:
    """Into a target's weights, in place."""
    weights = load_file(folder / _FILE)
    for name in {name.rpartition(".lora_")[0] for name in weights}:
        a, b = (weights[f"{name}.lora_{which}.weight"] for which in "AB")
        layer = model.get_submodule(name.removeprefix(_PREFIX))
        layer.weight += SCALING * b @ a
