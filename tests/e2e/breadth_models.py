"""Random targets of architectures beside Llama's, each with a draft that mostly agrees with it.

Their windows are shorter than what the tests ask about, and their tokenizer is the demo models'.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eval.server import TARGET

WINDOW = 16

_SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": WINDOW,
    "max_position_embeddings": 2048, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def _gemma2() -> Any:
    """Capped scores, every other layer with a window, all in one pool."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**_SHAPE, query_pre_attn_scalar=32))
    with torch.no_grad():  # else a token mostly says itself, as embeddings are the head, too
        model.get_input_embeddings().weight.mul_(0.1)
    return model


def _gpt_oss() -> Any:
    """Sinks, experts, and a pool of its own for layers with a window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**_SHAPE, **experts, rope_parameters=rope))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(2.0)  # of about the weight of some keys
    return model


MODELS: dict[str, Callable[[], Any]] = {"gemma2": _gemma2, "gpt-oss": _gpt_oss}

#: SGLang serves gpt-oss on a CPU with this flag.
FLAGS = {
    "gemma2": (),
    "gpt-oss": ("--attention-backend", "intel_amx", "--moe-runner-backend", "triton"),
}


def save(name: str, folder: Path) -> None:
    """Write ``folder``/target and ``folder``/draft, which is the target with noise."""
    torch.manual_seed(0)
    model = MODELS[name]().float()
    _save(model, folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.03 * weight.std() * torch.randn_like(weight))
    _save(model, folder / "draft")


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, folder / file)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # SGLang reads Gemma's activation by the name that published checkpoints have it under, too.
    config.setdefault("hidden_act", config.get("hidden_activation"))
    path.write_text(json.dumps(config))
