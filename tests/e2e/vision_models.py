"""The demo models as a Qwen2.5-VL target and its EAGLE-3 draft: the same texts, and images.

Qwen's text model is Llama's with biases, here zero, and M-RoPE, which is RoPE where no image
came before. Its eye is random: what a picture means does not matter, only that it is looked at.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from eval.server import DRAFTS, TARGET

#: Tokens that Qwen's processor asks for, behind the demo vocabulary.
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "".join(MARKS[i] for i in (0, 3, 1))
VOCAB, ROOM = 2048, 8
FIRST = dict(zip(MARKS, range(VOCAB, VOCAB + ROOM), strict=False))


def save(folder: Path) -> None:
    """Write ``folder``/target and ``folder``/draft."""
    target, draft = folder / "target", folder / "draft"
    draft.mkdir(parents=True)
    settings = json.loads((DRAFTS["EAGLE3"] / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**settings, "vocab_size": VOCAB + ROOM}))
    save_file(_weights(DRAFTS["EAGLE3"]), draft / "model.safetensors", {"format": "pt"})

    settings = json.loads((TARGET / "config.json").read_text())
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
              "pad_token_id", "tie_word_embeddings")  # fmt: skip
    sections = [settings["head_dim"] // 2 - 24, 12, 12]
    rope = {"rope_type": "default", "rope_theta": settings["rope_theta"], "mrope_section": sections}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **{name: settings[name] for name in shared},
                "vocab_size": VOCAB + ROOM, "bos_token_id": None, "rope_parameters": rope,
            },
            vision_config={
                "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
                "out_hidden_size": settings["hidden_size"], "window_size": 112,
                "fullatt_block_indexes": [0], "in_chans": 3,
            },
            vision_start_token_id=FIRST[MARKS[0]], vision_end_token_id=FIRST[MARKS[1]],
            vision_token_id=FIRST[MARKS[2]], image_token_id=FIRST[MARKS[3]],
            video_token_id=FIRST[MARKS[4]], tie_word_embeddings=settings["tie_word_embeddings"],
        )
    ).float()  # fmt: skip
    state = model.state_dict()
    for name, values in _weights(TARGET).items():
        state[name.replace("model.", "model.language_model.", 1)].copy_(values)
    for name, values in state.items():
        if "language_model" in name and name.endswith(".bias"):
            values.zero_()
    model.save_pretrained(target)
    _save_processor(target)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Tables of the vocabulary with rows of zeros for the new tokens."""
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        if len(values) == VOCAB:
            rows = (0, 0) * (values.dim() - 1) + (0, ROOM)
            weights[name] = torch.nn.functional.pad(values, rows)
    return weights


def _save_processor(folder: Path) -> None:
    tokenizer = json.loads((TARGET / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": token, "content": mark} for mark, token in FIRST.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((TARGET / "tokenizer_config.json").read_text())
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **processor}))
    images = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56,
              "max_pixels": 224 * 224, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
              "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, **processor}))
