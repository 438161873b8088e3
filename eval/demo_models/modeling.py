"""The two draft heads as trainable torch modules: EAGLE and EAGLE-3, as stock SGLang computes them.

Parameter names are those that SGLang's loaders expect, so `state_dict()` is the checkpoint. Target
and standalone draft are `transformers.LlamaForCausalLM`; their configs are here too, because the
four models must agree on vocabulary and width.

What is mirrored, and would silently cost acceptance if it were not:

* EAGLE reads the target's *post-norm* hidden state, has no input norm and no final norm, and hands
  its raw output both to the target's lm_head and to the next draft step.
* EAGLE-3 reads three hidden states from inside the target, passes the *pre-norm* sum to the next
  step, and has its own lm_head over a reduced vocabulary.
* Both pair the hidden state of position t with the embedding of token t + 1.

B sequences, T roots, D hidden, H heads, K unroll steps, V vocabulary. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 2048
END_ID, PAD_ID = 0, 1
DRAFT_VOCAB = 1024
# Outputs of these target layers feed EAGLE-3. SGLang's default (2, n // 2, n - 3) would be the same
# layer three times in a target of five.
AUX_LAYERS = (0, 2, 3)

_SHARED: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "head_dim": 64,  # the smallest that FlashInfer has kernels for
    "num_attention_heads": 4,  # heads must divide by 2, for tensor parallelism of two
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "target": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    "standalone": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 192,
        "num_hidden_layers": 1,
        "intermediate_size": 512,
        "tie_word_embeddings": True,
    },
    # Heads must not be tied: SGLang deletes embedding and head one after the other to share the
    # target's, which fails when both names are one module.
    "eagle": _SHARED
    | {
        "architectures": ["LlamaForCausalLMEagle"],
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "eagle3": _SHARED
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "intermediate_size": 512,
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        },
    },
}


@dataclass
class ChainCache:
    """Keys and values of the roots (every position attends) and of the chain each root grows."""

    root: tuple[Tensor, Tensor] | None = None  # [B, H, T, 64] each
    chain: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # one [B, H, T, 64] per step

    @property
    def step(self) -> int:
        """Index of the draft step that comes next; 0 is the root step."""
        return 0 if self.root is None else 1 + len(self.chain)


class Attention(nn.Module):
    """Grouped-query attention for T chains that grow in parallel from the T roots of a sequence.

    Row t of step k stands for the draft state k tokens after root t: it sees the root keys 0..t and
    the k chain keys of its own row, exactly what a server's draft sees after accepting token t.
    """

    def __init__(self, config: dict[str, Any], in_features: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.theta = config["head_dim"], config["rope_theta"]
        kv_width = self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(in_features, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(in_features, kv_width, bias=False)
        self.v_proj = nn.Linear(in_features, kv_width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config["hidden_size"], bias=False)

    def forward(self, x: Tensor, cache: ChainCache) -> Tensor:  # [B, T, in] -> [B, T, D]
        groups = self.heads // self.kv_heads
        q = rope(self._split(self.q_proj(x)), cache.step, self.theta)
        k = rope(self._split(self.k_proj(x)), cache.step, self.theta).repeat_interleave(groups, 1)
        v = self._split(self.v_proj(x)).repeat_interleave(groups, 1)
        if cache.root is None:
            cache.root = (k, v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            cache.chain.append((k, v))
            out = chain_attention(q, cache.root, cache.chain)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:  # [B, T, heads * 64] -> [B, heads, T, 64]
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


def chain_attention(
    q: Tensor,  # [B, H, T, 64]
    root: tuple[Tensor, Tensor],
    chain: list[tuple[Tensor, Tensor]],
) -> Tensor:  # [B, H, T, 64]
    """Row t attends root keys 0..t and, from each chain step, only row t."""
    (root_k, root_v), rows = root, q.shape[2]
    blocked = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    on_root = (q @ root_k.transpose(-1, -2)).masked_fill(blocked, float("-inf"))  # [B, H, T, T]
    on_chain = torch.stack([(q * k).sum(-1) for k, _ in chain], dim=-1)  # [B, H, T, steps]
    scores = torch.cat([on_root, on_chain.to(on_root.dtype)], dim=-1).float() * q.shape[-1] ** -0.5
    weights = scores.softmax(-1).to(q.dtype)
    out = weights[..., :rows] @ root_v
    for i, (_, v) in enumerate(chain):
        out = out + weights[..., rows + i, None] * v
    return out


def rope(x: Tensor, offset: int, theta: float) -> Tensor:  # [B, H, T, 64]
    """Rotary embedding (first half with second half) of rows at positions offset..offset+T-1."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    position = torch.arange(x.shape[2], dtype=torch.float32, device=x.device) + offset
    angle = position[:, None] * frequency  # [T, 32]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class GatedMLP(nn.Module):
    """Llama's feed-forward block."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A Llama layer without the input norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config, config["hidden_size"])
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, cache: ChainCache) -> Tensor:  # [B, T, D] -> [B, T, D]
        x = x + self.self_attn(x, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """EAGLE: predict the target's next post-norm hidden state; the target's head reads it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config["hidden_size"], config["hidden_size"])
        self.layers = nn.ModuleList([EagleLayer(config)])

    def forward(self, embeds: Tensor, hidden: Tensor, cache: ChainCache) -> tuple[Tensor, Tensor]:
        """One draft step: [B, T, D] twice -> (state that the head reads, state to carry on)."""
        x = self.layers[0](self.fc(torch.cat([embeds, hidden], dim=-1)), cache)
        return x, x

    def logits(self, state: Tensor, target_head: nn.Linear) -> Tensor:
        """[B, T, D] -> [B, T, V]; the target's own head reads the state."""
        return target_head(state)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config, 2 * width)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def forward(self, embeds: Tensor, hidden: Tensor, cache: ChainCache) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


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
