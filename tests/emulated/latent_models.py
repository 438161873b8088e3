"""The demo DeepSeek-V3 with heads as large as DeepSeek's own, which FlashInfer's MLA is made for.

The same model but for rounding. Hidden states and latents are repeated, since the norm over copies
is the norm, and so are heads; of the copies one is read. What else is new is zero.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.server import MLA

#: Of DeepSeek-V3; as many heads as FlashInfer launches otherwise for many rows than for few; and a
#: width that SGLang's kernels for draft layers take.
SIZES = {
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 768,
}  # fmt: skip


def save(folder: Path) -> None:
    """Write it into ``folder``, which is not there yet."""
    shutil.copytree(MLA, folder)
    config = json.loads((MLA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SIZES}))
    weights = {
        name: _with_heads(name, _with_hidden(name, value, config["hidden_size"]), config)
        for name, value in load_file(MLA / "model.safetensors").items()
    }
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _with_hidden(name: str, weight: Tensor, hidden: int) -> Tensor:
    """A weight that writes hidden states writes all copies, and one that reads them reads one."""
    copies = SIZES["hidden_size"] // hidden
    if name.endswith("eh_proj.weight"):
        halves = [_grown(half, 1, "hidden_size") for half in weight.chunk(2, dim=1)]
        return torch.cat(halves, dim=1).repeat(copies, 1)
    if name.endswith("embed_tokens.weight"):
        return weight.repeat(1, copies)
    if len(weight) == hidden:
        return weight.repeat(copies, *[1] * (weight.dim() - 1))
    reads = weight.dim() == 2 and weight.shape[1] == hidden
    return _grown(weight, 1, "hidden_size") if reads else weight


def _with_heads(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """A weight of attention with larger heads."""
    heads, sizes = config["num_attention_heads"], ("qk_nope_head_dim", "qk_rope_head_dim")
    latent, plain, turned, values = (config[n] for n in ("kv_lora_rank", *sizes, "v_head_dim"))
    copies, more = SIZES["kv_lora_rank"] // latent, SIZES["num_attention_heads"] // heads
    if name.endswith("kv_a_layernorm.weight"):
        return weight.repeat(copies)
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return torch.cat((weight[:latent].repeat(copies, 1), _turned(weight[latent:], 0)))
    if name.endswith("kv_b_proj.weight"):
        keys, read = weight.view(heads, plain + values, latent).split((plain, values), dim=1)
        both = _grown(keys, 1, "qk_nope_head_dim"), _grown(read, 1, "v_head_dim")
        return _grown(torch.cat(both, dim=1).repeat(more, 1, 1).flatten(0, 1), 1, "kv_lora_rank")
    if name.endswith("o_proj.weight"):
        read = _grown(weight.view(-1, heads, values), 2, "v_head_dim")
        return _grown(read, 1, "num_attention_heads").flatten(1)
    if name.endswith("q_b_proj.weight"):
        still, moved = weight.view(heads, plain + turned, -1).split((plain, turned), dim=1)
        query = torch.cat((_grown(still, 1, "qk_nope_head_dim"), _turned(moved, 1)), dim=1)
        # Scores are divided by the root of a head's size.
        scale = (sum(SIZES[size] for size in sizes) / (plain + turned)) ** 0.5
        return (query * scale).repeat(more, 1, 1).flatten(0, 1)
    return weight


def _grown(weight: Tensor, dim: int, size: str) -> Tensor:
    """With zeros behind, to one of :data:`SIZES`."""
    more = list(weight.shape)
    more[dim] = SIZES[size] - more[dim]
    return torch.cat((weight, weight.new_zeros(more)), dim=dim)


def _turned(weight: Tensor, dim: int) -> Tensor:
    """Pairs go where RoPE turns them as fast, with pairs of zeros between."""
    between = SIZES["qk_rope_head_dim"] // weight.shape[dim] - 1
    pairs = weight.unflatten(dim, (-1, 1, 2))
    zeros = torch.zeros_like(pairs).repeat_interleave(between, dim + 1)
    return torch.cat((pairs, zeros), dim=dim + 1).flatten(dim, dim + 2)
