"""The two draft heads as trainable torch modules: EAGLE and EAGLE-3, as stock SGLang computes them.

Parameter names are those that SGLang's loaders expect, so `state_dict()` is the checkpoint. Target
and standalone draft are `transformers.LlamaForCausalLM`; all must agree on vocabulary and width.

What is mirrored, and would silently cost acceptance if it were not:

* EAGLE reads the target's *post-norm* hidden state, has no input norm and no final norm, and hands
  its raw output both to the target's lm_head and to the next draft step.
* EAGLE-3 reads three hidden states from inside the target, passes the *pre-norm* sum to the next
  step, and has its own lm_head over a reduced vocabulary.
* Both pair the hidden state of position t with the embedding of token t + 1.

B sequences, T roots, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRotaryEmbedding,
)

from eval.server import WEIGHTS

#: ``config.json`` of each model, as shipped; training writes it again. EAGLE's heads must not be
#: tied: SGLang deletes embedding and head one after the other to share the target's, which fails
#: when both names are one module. Tensor parallelism of two needs even numbers of heads, FlashInfer
#: heads of 64.
CONFIGS: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text()) for path in WEIGHTS.glob("*/config.json")
}
VOCAB: int = CONFIGS["target"]["vocab_size"]
END_ID, PAD_ID = (CONFIGS["target"][f"{name}_token_id"] for name in ("eos", "pad"))
DRAFT_VOCAB: int = CONFIGS["eagle3"]["draft_vocab_size"]
#: Outputs of these target layers feed EAGLE-3. SGLang's default (2, n // 2, n - 3) would be the
#: same layer three times in a target of five.
AUX_LAYERS: list[int] = CONFIGS["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

#: Keys and values, [B, kv heads, T, 64] each: of the T roots, then of each step of their chains.
ChainCache: TypeAlias = DynamicCache


class Layer(nn.Module):
    """A Llama layer without the input norm, for T chains that grow in parallel from T roots.

    Row t of step k stands for the draft state k tokens after root t: it sees the root keys 0..t and
    the k chain keys of its own row, exactly what a server's draft sees after accepting token t.
    """

    def __init__(self, config: dict[str, Any], in_features: int) -> None:
        super().__init__()
        llama = LlamaConfig(**config, attn_implementation="sdpa")
        self.self_attn = LlamaAttention(llama, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(in_features, width, bias=False))
        self.mlp = LlamaMLP(llama)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self._rotary = LlamaRotaryEmbedding(llama)

    def forward(self, x: Tensor, hidden: Tensor, cache: ChainCache) -> Tensor:
        """Attention reads [B, T, in_features] and adds to ``hidden`` [B, T, D]."""
        rows = x.shape[1]
        steps = cache.get_seq_length() // rows
        own = torch.eye(rows, dtype=torch.bool, device=x.device)
        seen = torch.cat([torch.ones_like(own).tril(), *[own] * steps], dim=1)  # [T, T * steps]
        places = torch.arange(steps, steps + rows, device=x.device)[None]
        attended, _ = self.self_attn(
            x, self._rotary(x, places), attention_mask=seen[None, None], past_key_values=cache
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """EAGLE: predict the target's next post-norm hidden state; the target's head reads it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config["hidden_size"], config["hidden_size"])
        self.layers = nn.ModuleList([Layer(config, config["hidden_size"])])

    def forward(self, embeds: Tensor, hidden: Tensor, cache: ChainCache) -> tuple[Tensor, Tensor]:
        """One draft step: [B, T, D] twice -> (state that the head reads, state to carry on)."""
        x = self.fc(torch.cat([embeds, hidden], dim=-1))
        x = self.layers[0](x, x, cache)
        return x, x

    def logits(self, state: Tensor, target_head: nn.Linear) -> Tensor:
        """[B, T, D] -> [B, T, V]; the target's own head reads the state."""
        return target_head(state)


class Eagle3Layer(Layer):
    """Attention reads embedding and hidden state side by side."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, 2 * config["hidden_size"])
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.hidden_norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, embeds: Tensor, hidden: Tensor, cache: ChainCache) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return super().forward(both, hidden, cache)


class Eagle3Head(nn.Module):
    """EAGLE-3: three inner hidden states in, logits of a small vocabulary out."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        # "midlayer" is the name in the published checkpoints; every SGLang version knows it.
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["draft_vocab_size"], bias=False)

    def forward(self, embeds: Tensor, hidden: Tensor, cache: ChainCache) -> tuple[Tensor, Tensor]:
        """One draft step; `hidden` is [B, T, 3 D] from the target, [B, T, D] later."""
        if hidden.shape[-1] != embeds.shape[-1]:
            hidden = self.fc(hidden)
        hidden = self.midlayer(embeds, hidden, cache)
        return self.norm(hidden), hidden

    def logits(self, state: Tensor, target_head: nn.Linear) -> Tensor:
        """[B, T, D] -> [B, T, DRAFT_VOCAB]; the target's head is not used."""
        return self.lm_head(state)


Head = EagleHead | Eagle3Head
