"""How the models become folders that stock SGLang loads: config, bf16 weights, tokenizer.

Every file appears whole, so a server that starts while a model is being replaced reads either the
old or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from eval.demo_models.modeling import CONFIGS, END_ID, PAD_ID, VOCAB
from sglang_c2t.files import write_whole

END, PAD = "<|end|>", "<|pad|>"
WITH_TOKENIZER = ("target", "standalone")  # heads are always run with the target's
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'Assistant: ' if m.role == 'assistant' else 'User: ' }}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE that splits digits: arithmetic stays regular and no text is out of reach."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB,
        special_tokens=[END, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(END) != END_ID or tokenizer.token_to_id(PAD) != PAD_ID:
        raise RuntimeError("The special tokens did not get the ids that the configs name.")
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"The text gives {tokenizer.get_vocab_size()} tokens, not {VOCAB}.")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, names: Iterable[str] = WITH_TOKENIZER) -> None:
    """`tokenizer.json` and a config that transformers 4 and 5 both read."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name in names:
        (out / name).mkdir(parents=True, exist_ok=True)
        save_json(out / name / "tokenizer_config.json", config)
        write_whole({out / name / "tokenizer.json": lambda tmp: tokenizer.save(str(tmp), False)})


def save_model(
    name: str, weights: dict[str, Tensor], out: Path, config: dict[str, Any] | None = None
) -> None:
    """Write weights and ``config``, by default the one of ``name``; a tied lm_head is left out."""
    config = config or CONFIGS[name]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    tied = config["tie_word_embeddings"]
    kept = {key: _to_bf16(value) for key, value in weights.items()}
    if tied:
        kept.pop("lm_head.weight", None)
    path = folder / "model.safetensors"
    write_whole({path: lambda tmp: save_file(kept, tmp, metadata={"format": "pt"})})
    save_json(folder / "config.json", config)


def _to_bf16(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().clone()


def save_json(path: Path, content: dict[str, Any]) -> None:
    write_whole({path: lambda tmp: tmp.write_text(json.dumps(content, indent=1) + "\n")})


def vocabulary_maps(kept_ids: Tensor, vocab: int = VOCAB) -> dict[str, Tensor]:
    """EAGLE-3's two maps; `d2t` holds *differences*: target id = draft id + d2t[draft id].

    With 4 target ids of which 1 and 3 are kept: d2t = [1, 2], t2d = [no, yes, no, yes].
    """
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept_ids] = True
    return {"d2t": kept_ids - torch.arange(len(kept_ids)), "t2d": t2d}
