"""The demo target as an architecture that serves data-parallel attention.

GLM-4.5 whose layers are all dense: the same weights, and the same texts. Behind its attention it
gathers the rows of all ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from eval.server import TARGET

#: Of experts that no layer has.
_NO_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
               "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
               "norm_topk_prob": True, "routed_scaling_factor": 1.0}  # fmt: skip


def save(folder: Path) -> None:
    """Write it into ``folder``."""
    folder.mkdir(parents=True)
    settings: dict[str, Any] = json.loads((TARGET / "config.json").read_text())
    settings |= _NO_EXPERTS
    settings |= {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"],
        "first_k_dense_replace": settings["num_hidden_layers"], "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False, "use_qk_norm": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings["rope_theta"],
                            "partial_rotary_factor": 1.0},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    weights = load_file(TARGET / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
