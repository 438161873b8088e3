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
from typing import NamedTuple

from eval.server import DRAFTS, TARGET
from eval.smollm2 import HEAD

#: Trained pairs: the tiny one of this repository, and SmolLM2-135M-Instruct with its head.
DEMO, SMOLLM2 = PAIRS = "demo", "smollm2"


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
    sizes, written = asdict(SHAPES[name]), pair(name, folder)
    for path, source in zip(written, small, strict=True):
        given = json.loads((source / "config.json").read_text())
        if source == small.draft:
            sizes["num_hidden_layers"] = 1
        config = given | {key: size for key, size in sizes.items() if key in given}
        config["tie_word_embeddings"] = False  # the graft writes both matrices
        hidden = given["hidden_size"]
        share = copies(sizes["hidden_size"], hidden) * hidden / sizes["hidden_size"]
        config["rms_norm_eps"] *= share  # as the mean square is
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for file in small.target.glob("tokenizer*"):
            shutil.copy(file, path)
    return written
