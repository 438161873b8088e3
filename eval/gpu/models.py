"""Model folders without weights: a real model's shape, which a trained pair is written into.

SGLang's ``--load-format dummy`` draws the weights, and the plugin ``graft.py`` writes the pair into
them, so that a machine without a network serves a model of real size. The sizes are those that the
models' makers publish; everything else is the pair's, tokenizer included. A configuration of the
benchmark names pair and shape as ``target = "smollm2:8b"``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from eval.server import DRAFTS, TARGET
from eval.smollm2 import HEAD

#: Trained pairs: the tiny one of this repository, and SmolLM2-135M-Instruct with its head.
DEMO, SMOLLM2 = PAIRS = "demo", "smollm2"

#: Keys of ``config.json`` that all shapes have.
LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,  # the graft writes both matrices
}

#: Keys that a folder takes from the trained model that is written into it.
FROM_TRAINED = (
    "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id", "eagle_config",
    "max_position_embeddings",
)  # fmt: skip


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
    draft_vocab_size: int

    def configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``config.json`` of the target, and of the EAGLE-3 head: one layer, its own vocabulary."""
        target = LLAMA3 | asdict(self) | {"architectures": ["LlamaForCausalLM"]}
        draft = target | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
        del target["draft_vocab_size"]
        return target, draft


#: A shape that a CPU can serve: two copies of the demo's hidden state, two empty layers.
SMALL = Shape(512, 7, 8, 2, 64, 1024, 4096, draft_vocab_size=2048)

#: Llama-3.1-8B, and EXAONE-4.0-1.2B, which has layers enough for SmolLM2's 30; EAGLE-3 heads as
#: published for the Llama. Then two for the demo pair that start within seconds, with heads of 64
#: and of 128, and one for SmolLM2.
SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, draft_vocab_size=32000),
    "1b": Shape(2048, 30, 32, 8, 64, 4096, 102400, draft_vocab_size=32000),
    "small": SMALL,
    "small128": replace(SMALL, head_dim=128),
    "deep": Shape(768, 31, 12, 4, 64, 2048, 65536, draft_vocab_size=10240),
}


class Pair(NamedTuple):
    """Folders of a target and its draft head."""

    target: Path
    draft: Path


def trained(name: str) -> Pair:
    """Folders of :data:`PAIRS`; SmolLM2 is made if need be, or ``TargetError`` says why not."""
    if name == DEMO:
        return Pair(TARGET, DRAFTS["EAGLE3"])
    from eval.smollm2.target import target_folder

    return Pair(target_folder(), HEAD)


def copies(wide: int, hidden_size: int) -> int:
    """How often a hidden state of ``wide`` holds a smaller one, with a coordinate left over.

    A power of two, so that bfloat16 holds a copy's share of a weight exactly; 0 if it has no room.
    """
    return 1 << (most.bit_length() - 1) if (most := (wide - 1) // hidden_size) else 0


def pair(name: str, folder: Path) -> Pair:
    """Where :func:`write` puts the shape ``name``."""
    return Pair(folder / name / "target", folder / name / "draft")


def write(name: str, folder: Path, small: Pair) -> Pair:
    """Write the folders of ``SHAPES[name]`` for ``small``; ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"no model shape {name}; there are {', '.join(SHAPES)}")
    shape, written = SHAPES[name], pair(name, folder)
    for path, config, source in zip(written, shape.configs(), small, strict=True):
        given = json.loads((source / "config.json").read_text())
        config |= {key: given[key] for key in FROM_TRAINED if key in given}
        hidden = given["hidden_size"]
        share = copies(shape.hidden_size, hidden) * hidden / shape.hidden_size
        config["rms_norm_eps"] = given["rms_norm_eps"] * share  # as the mean square is
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for file in small.target.glob("tokenizer*"):
            shutil.copy(file, path)
    return written
