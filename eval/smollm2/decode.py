"""Many answers of the target at once on a CPU, and its inner states on the way.

The head learns from what the target itself says, and from its states while it says it. Here both
come out of one pass: each request holds a slot of one key-value table; when it ends, the next
prompt takes its slot. Llama in bfloat16, written out so that a step is few and large operations:
some 4 times the tokens/s of ``transformers.generate`` on two cores.

Legend: B slots, T tokens of a prompt, D hidden size, S states per token, L longest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

#: Outputs of these layers are kept, and the state that the target's own head reads.
AUX_LAYERS = (2, 15, 27)


@dataclass(frozen=True)
class Request:
    """A prompt and how it is answered; ``key`` comes back with the answer."""

    key: int
    prompt: Sequence[int]
    new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """``tokens`` [N] of prompt and answer; ``states`` [N - 1, S * D], none of the last token."""

    request: Request
    tokens: Tensor
    states: Tensor


class Llama:
    """The target's weights, projections that read the same input side by side."""

    def __init__(self, folder: Path) -> None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.config = config = model.config
        self.embed = model.model.embed_tokens.weight.detach()
        self.head, self.norm = model.lm_head.weight.detach(), model.model.norm.weight.detach()
        self.layers = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach()
            gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight]).detach()
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            rest = a.o_proj.weight, m.down_proj.weight
            self.layers.append((qkv, gate_up, *(w.detach() for w in (*rest, *norms))))
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.group = config.num_attention_heads // self.kv_heads
        theta, half = config.rope_parameters["rope_theta"], self.head_dim // 2
        angle = torch.outer(
            torch.arange(config.max_position_embeddings).float(),
            theta ** (-torch.arange(half).float() / half),
        )
        self.cos, self.sin = (f(torch.cat([angle, angle], -1)).bfloat16() for f in (torch.cos, torch.sin))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of [N, heads, head_dim] at ``positions`` [N]."""
        a, b = x.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
        return x * self.cos[positions, None] + turned * self.sin[positions, None]

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.head)


class Decoder:
    """``slots`` requests at a time, each of up to ``longest`` tokens."""

    def __init__(self, model: Llama, slots: int, longest: int) -> None:
        self.model, self.longest = model, longest
        width = model.config.hidden_size
        shape = len(model.layers), slots, model.kv_heads, longest, model.head_dim
        self._keys = torch.zeros(shape, dtype=torch.bfloat16)
        self._values = torch.zeros(shape, dtype=torch.bfloat16)
        self._tokens = torch.zeros(slots, longest, dtype=torch.long)
        self._states = torch.zeros(
            slots, longest, (len(AUX_LAYERS) + 1) * width, dtype=torch.bfloat16
        )
        self._lengths = torch.ones(slots, dtype=torch.long)  # tokens known; the last was not fed
        self._requests: list[Request | None] = [None] * slots

    @torch.inference_mode()
    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """Answer all ``requests``, in the order in which they end."""
        while True:
            for slot, held in enumerate(self._requests):
                if held is None and (request := next(requests, None)) is not None:
                    self._prefill(slot, request)
            if not any(self._requests):
                return
            self._step()
            yield from self._ended()

    def _prefill(self, slot: int, request: Request) -> None:
        size = len(request.prompt)
        if size + request.new_tokens > self.longest:
            raise ValueError(f"{size} + {request.new_tokens} tokens are more than {self.longest}")
        self._requests[slot] = request
        self._tokens[slot, :size] = torch.tensor(request.prompt)
        self._lengths[slot] = size
        if size > 1:
            self._forward(self._tokens[slot, : size - 1], torch.arange(size - 1), slot)

    def _step(self) -> None:
        rows = torch.arange(len(self._requests))
        fed = self._lengths - 1
        state = self._forward(self._tokens[rows, fed], fed, None)
        logits = self.model.logits(state).float()
        for row, request in enumerate(self._requests):
            if request and request.temperature:  # Gumbel noise: the largest is then a sample
                noise = torch.empty_like(logits[row]).exponential_().log_()
                logits[row] -= request.temperature * noise
        self._tokens[rows, self._lengths.clamp(max=self.longest - 1)] = logits.argmax(-1)
        self._lengths += 1

    def _ended(self) -> Iterator[Answer]:
        ends = set(self.model.config.eos_token_id if isinstance(self.model.config.eos_token_id, list) else [self.model.config.eos_token_id])
        for slot, request in enumerate(self._requests):
            size = int(self._lengths[slot])
            if request is None:
                self._lengths[slot] = 1
            elif int(self._tokens[slot, size - 1]) in ends or size == len(request.prompt) + request.new_tokens:
                self._requests[slot] = None
                self._lengths[slot] = 1
                yield Answer(request, self._tokens[slot, :size].clone(), self._states[slot, : size - 1].clone())

    def _forward(self, tokens: Tensor, positions: Tensor, slot: int | None) -> Tensor:
        """States behind the last layer, [N, D]; keys, values and kept states go to the tables.

        One token of each slot, or the first ones of the prompt in ``slot``.
        """
        model, eps = self.model, self.model.config.rms_norm_eps
        kv_width = model.kv_heads * model.head_dim
        x = model.embed[tokens]
        rows = torch.arange(len(tokens)) if slot is None else torch.full_like(tokens, slot)
        kept = []
        end = int(positions.max()) + 1
        masked = None
        if slot is None:
            seen = torch.arange(end) <= positions[:, None]
            masked = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))[:, None, None]
        for i, (qkv, gate_up, out, down, norm, second) in enumerate(model.layers):
            parts = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv)
            q, k, v = parts.split([model.group * kv_width, kv_width, kv_width], -1)
            q = model.rotate(q.unflatten(-1, (-1, model.head_dim)), positions)
            k = model.rotate(k.unflatten(-1, (-1, model.head_dim)), positions)
            self._keys[i, rows, :, positions] = k
            self._values[i, rows, :, positions] = v.unflatten(-1, (-1, model.head_dim))
            if slot is None:
                q = q.unflatten(1, (model.kv_heads, model.group))  # [B, kv heads, group, head_dim]
                read = F.scaled_dot_product_attention(
                    q, self._keys[i, :, :, :end], self._values[i, :, :, :end], masked.expand(-1, 1, model.group, -1)
                ).flatten(1)
            else:
                read = F.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], k.transpose(0, 1)[None],
                    v.unflatten(-1, (-1, model.head_dim)).transpose(0, 1)[None],
                    is_causal=True, enable_gqa=True,
                )[0].transpose(0, 1).flatten(1)  # fmt: skip
            x = x + F.linear(read, out)
            gate, up = F.linear(F.rms_norm(x, second.shape, second, eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
            if i in AUX_LAYERS:
                kept.append(x)
        last = F.rms_norm(x, model.norm.shape, model.norm, eps)
        self._states[rows, positions] = torch.cat([*kept, last], -1)
        return last
