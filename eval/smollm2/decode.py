"""Many answers of the target at once on a CPU, and its inner states on the way.

The head learns from what the target itself says, and from its states while it says it. Here both
come out of one pass: each request holds a slot of one key-value table; when it ends, the next
prompt takes its slot. Llama is written out, so that a step is few and large operations.

Legend: B slots, N tokens of one forward, D hidden size, S states kept per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

#: Layers whose outputs the head reads. Kept besides is the state that the target's own head reads.
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


class Layer(NamedTuple):
    """A layer's weights; projections that read the same input are side by side."""

    qkv: Tensor
    gate_up: Tensor
    out: Tensor
    down: Tensor
    input_norm: Tensor
    second_norm: Tensor


class Llama:
    """The target's weights in ``folder``."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.bfloat16,
        aux_layers: Sequence[int] = AUX_LAYERS,
    ) -> None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).requires_grad_(False)
        self.dtype, self.aux_layers = dtype, aux_layers
        self.config = config = model.config
        self.embed, self.head = model.model.embed_tokens.weight, model.lm_head.weight
        self.norm = model.model.norm.weight
        self.layers = []
        for layer in model.model.layers:
            read, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                Layer(
                    torch.cat([read.q_proj.weight, read.k_proj.weight, read.v_proj.weight]),
                    torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
                    read.o_proj.weight,
                    mlp.down_proj.weight,
                    layer.input_layernorm.weight,
                    layer.post_attention_layernorm.weight,
                )
            )
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.group = config.num_attention_heads // self.kv_heads
        ends = config.eos_token_id
        self.ends = set(ends) if isinstance(ends, list) else {ends}
        self.width = (len(aux_layers) + 1) * config.hidden_size
        half = self.head_dim // 2
        theta: float = config.rope_parameters["rope_theta"]
        angle = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32),
            theta ** (-torch.arange(half, dtype=torch.float32) / half),
        ).repeat(1, 2)[:, None]
        self._cos, self._sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[N, heads * head_dim] -> [N, heads, head_dim], with rotary embedding at ``positions``."""
        x = x.unflatten(-1, (-1, self.head_dim))
        a, b = x.chunk(2, -1)
        return x * self._cos[positions] + torch.cat([-b, a], -1) * self._sin[positions]

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of [N, D]."""
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


#: Slots whose keys are read up to the longest of them; requests in them are of like length.
CHUNK = 16

#: Requests that wait to be chosen from.
WAITING = 64


class Decoder:
    """``slots`` requests at a time, each of up to ``longest`` tokens."""

    def __init__(self, model: Llama, slots: int, longest: int) -> None:
        self._model, self._longest = model, longest
        shape = len(model.layers), slots, model.kv_heads, longest, model.head_dim
        self._keys = torch.zeros(shape, dtype=model.dtype)
        self._values = torch.zeros(shape, dtype=model.dtype)
        self._tokens = torch.zeros(slots, longest, dtype=torch.long)
        self._states = torch.zeros(slots, longest, model.width, dtype=model.dtype)
        self._lengths = torch.ones(slots, dtype=torch.long)  # of which the last was not read yet
        self._requests: list[Request | None] = [None] * slots

    @torch.no_grad()
    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """Answer all ``requests``, in the order in which they end; ValueError for a long one."""
        waiting: list[Request] = []
        while True:
            for slot, held in enumerate(self._requests):
                waiting += islice(requests, WAITING - len(waiting))
                if held is None and waiting:
                    waiting.sort(key=lambda request: len(request.prompt))
                    chosen = len(waiting) * (slot // CHUNK * CHUNK) // len(self._requests)
                    self._begin(slot, waiting.pop(chosen))
            if not any(self._requests):
                return
            self._step()
            yield from self._ended()

    @torch.no_grad()
    def read(self, request: Request, reply: Sequence[int]) -> Answer:
        """The target's states while it reads a ``reply`` that is given, in the first slot."""
        tokens = torch.tensor([*request.prompt, *reply])
        self._forward(tokens[:-1], torch.arange(len(tokens) - 1), 0)
        return Answer(request, tokens, self._states[0, : len(tokens) - 1].clone())

    def _begin(self, slot: int, request: Request) -> None:
        size = len(request.prompt)
        if size + request.new_tokens > self._longest:
            raise ValueError(f"{size} + {request.new_tokens} tokens are more than {self._longest}")
        self._requests[slot] = request
        self._tokens[slot, :size] = torch.tensor(request.prompt)
        self._lengths[slot] = size
        if size > 1:
            self._forward(self._tokens[slot, : size - 1], torch.arange(size - 1), slot)

    def _step(self) -> None:
        """One more token of each slot; those without a request say anything."""
        rows, read = torch.arange(len(self._requests)), self._lengths - 1
        state = self._forward(self._tokens[rows, read], read, None)
        logits = F.linear(state, self._model.head).float()
        for row, request in enumerate(self._requests):
            if request and request.temperature:  # Gumbel noise: the largest is then a sample
                noise = torch.empty_like(logits[row]).exponential_().log_()
                logits[row] -= request.temperature * noise
        self._tokens[rows, self._lengths] = logits.argmax(-1)
        self._lengths += 1

    def _ended(self) -> Iterator[Answer]:
        for slot, request in enumerate(self._requests):
            size = int(self._lengths[slot])
            if request is None:
                self._lengths[slot] = 1
                continue
            full = size == len(request.prompt) + request.new_tokens
            if full or int(self._tokens[slot, size - 1]) in self._model.ends:
                self._requests[slot], self._lengths[slot] = None, 1
                tokens = self._tokens[slot, :size].clone()
                yield Answer(request, tokens, self._states[slot, : size - 1].clone())

    def _forward(self, tokens: Tensor, positions: Tensor, slot: int | None) -> Tensor:
        """[N, D] what the target's head reads; keys, values and kept states go to the tables.

        One token of each slot; or, with ``slot``, the first ones of the prompt in it.
        """
        model = self._model
        rows = torch.arange(len(tokens)) if slot is None else torch.full_like(tokens, slot)
        kv_width = model.kv_heads * model.head_dim
        masks = [] if slot is not None else [self._mask(part) for part in positions.split(CHUNK)]
        x, kept = model.embed[tokens], []
        for i, layer in enumerate(model.layers):
            parts = F.linear(model.normed(x, layer.input_norm), layer.qkv)
            q, k, v = parts.split([model.group * kv_width, kv_width, kv_width], -1)
            q, k = model.rotate(q, positions), model.rotate(k, positions)
            v = v.unflatten(-1, (-1, model.head_dim))
            self._keys[i, rows, :, positions] = k
            self._values[i, rows, :, positions] = v
            if slot is None:  # the heads that share keys are rows of one product
                parts = q.unflatten(1, (model.kv_heads, model.group)).split(CHUNK)
                tables = zip(self._keys[i].split(CHUNK), self._values[i].split(CHUNK), strict=True)
                read = torch.cat([
                    F.scaled_dot_product_attention(
                        part, keys[:, :, : mask.shape[-1]], values[:, :, : mask.shape[-1]], mask
                    )
                    for part, (keys, values), mask in zip(parts, tables, masks, strict=True)
                ])  # fmt: skip
            else:
                q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
                read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                read = read[0].transpose(0, 1)
            x = x + F.linear(read.flatten(1), layer.out)
            gate, up = F.linear(model.normed(x, layer.second_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
            if i in model.aux_layers:
                kept.append(x)
        last = model.normed(x, model.norm)
        self._states[rows, positions] = torch.cat([*kept, last], -1)
        return last

    def _mask(self, positions: Tensor) -> Tensor:
        """[chunk, 1, group, longest] what is added to the scores of tokens not known yet."""
        unseen = torch.arange(int(positions.max()) + 1) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._model.dtype)
        mask.masked_fill_(unseen, float("-inf"))
        return mask[:, None, None].expand(-1, 1, self._model.group, -1)
