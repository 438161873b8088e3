"""A random model so small that all its continuations can be listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.lossless.sampling import NextTokens, Tokens

VOCAB = 8


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """A model over 8 tokens, float32, ready to be saved where SGLang can load it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def next_tokens(
    model: LlamaForCausalLM, prompt: Sequence[int]
) -> Callable[[Sequence[Tokens]], list[NextTokens]]:
    """Distributions after prefixes of equal length that follow ``prompt``."""

    @torch.inference_mode()
    def ask(prefixes: Sequence[Tokens]) -> list[NextTokens]:
        logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1]
        best = torch.log_softmax(logits.double(), dim=-1).sort(descending=True, stable=True)
        return list(zip(best.indices.numpy(), best.values.numpy(), strict=True))

    return ask
