"""Model folders that hold nothing but a ``config.json``: shapes to time, weights to be drawn.

SGLang's ``--load-format dummy`` fills them with random numbers, so that a machine without a
network can serve a model of real size. Sizes are those that the models' makers publish. There is
no tokenizer: serve with ``--skip-tokenizer-init`` and send ``input_ids``. A configuration of the
benchmark names them: ``target = "shape:8b"``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

BYTES_PER_WEIGHT = 2  # bfloat16


#: What all of them have in ``config.json`` beside their shape.
LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Shape:
    """A Llama and an EAGLE-3 head for it; the names are those of ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool  # one matrix for embedding and output
    draft_vocab_size: int

    def target_config(self) -> dict[str, Any]:
        """``config.json`` of the target."""
        config = self.draft_config() | asdict(self) | {"architectures": ["LlamaForCausalLM"]}
        del config["draft_vocab_size"]
        return config

    def draft_config(self) -> dict[str, Any]:
        """``config.json`` of the EAGLE-3 head: one layer, a vocabulary of its own."""
        return {
            **LLAMA3,
            **asdict(self),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "bos_token_id": min(128000, self.vocab_size - 2),
            "eos_token_id": min(128001, self.vocab_size - 1),
        }

    # -- what a forward reads and computes, for roofline.py --

    def layer_weights(self, inputs: int = 1) -> int:
        """Weights of one decoder layer, its norms left out; ``inputs`` 2: an EAGLE-3 layer's."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (inputs * (queries + 2 * keys) + queries)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def target_weights(self) -> int:
        """Weights that each forward of the target reads: all but the embedding's rows."""
        return self.num_hidden_layers * self.layer_weights() + self.vocab_size * self.hidden_size

    @property
    def draft_weights(self) -> int:
        """The same of one draft forward; the projection of three target layers left out."""
        return self.layer_weights(inputs=2) + self.draft_vocab_size * self.hidden_size

    @property
    def layer_kv_bytes(self) -> int:
        """Keys and values of one token in one layer; the draft has but one."""
        return 2 * self.num_key_value_heads * self.head_dim * BYTES_PER_WEIGHT


#: Llama-3.1-8B and Llama-3.2-1B with EAGLE-3 heads as those published for them have; and one
#: that starts within seconds.
SHAPES = {
    "8b": Shape(
        4096, 32, 32, 8, 128, 14336, 128256, tie_word_embeddings=False, draft_vocab_size=32000
    ),
    "1b": Shape(
        2048, 16, 32, 8, 64, 8192, 128256, tie_word_embeddings=True, draft_vocab_size=32000
    ),
    "toy": Shape(256, 8, 4, 2, 64, 512, 4096, tie_word_embeddings=False, draft_vocab_size=1024),
}


class Pair(NamedTuple):
    """Folders of a target and its draft head."""

    target: Path
    draft: Path


def pair(name: str, folder: Path) -> Pair:
    """Where :func:`write` puts the shape ``name``."""
    return Pair(folder / name / "target", folder / name / "draft")


def write(name: str, folder: Path) -> Pair:
    """Make the folders of :data:`SHAPES` [name] under ``folder``; ValueError for no such name."""
    if name not in SHAPES:
        raise ValueError(f"no model shape {name}; there are {', '.join(SHAPES)}")
    shape, written = SHAPES[name], pair(name, folder)
    for path, config in zip(written, (shape.target_config(), shape.draft_config()), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return written
