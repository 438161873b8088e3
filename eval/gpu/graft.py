"""An SGLang plugin that writes a trained pair into models of real size, for their real cost.

Random weights (``--load-format dummy``) cost what trained ones cost, but no draft is accepted and
no planner learns. This plugin lets SGLang draw them, then writes a small target and its EAGLE-3
head into them: answers, acceptance and confidences are the small pair's, while matrices, KV cache,
vocabulary and kernels have the sizes of the shape. No weights have to be on the disk.
(Function-preserving expansion is Net2Net's idea, arXiv:1511.05641.)

- The hidden state holds copies: coordinate c stands at c, c + h, c + 2h, ... Matrices that read
  it have a share of their weight at each copy. Other coordinates are zero; norms make up for them.
- The last coordinate is a constant that only the output matrix reads: tokens outside the pair's
  vocabulary have the weight -:data:`UNLIKELY` there.
- Wider heads hold the pair's rotary pairs at their frequencies. Further heads and MLP units are
  random with zero output weights, and so are further layers.

``plugins.py`` declares the entry point; the environment variable :data:`ENV` switches it on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.gpu.models import Pair, copies

ENV = "EVAL_GRAFT"
DUMMY_WEIGHTS = "sglang.srt.model_loader.loader.initialize_dummy_weights"

#: A trained matrix's; SGLang's own choice would make every activation tiny.
STANDARD_DEVIATION = 0.02

#: The constant coordinate, its weight in the norm before the output, and unknown tokens' weight.
#: The constant changes no other norm; their product, which is divided by the size of the last
#: residuals (SmolLM2's: 18 to 255), is how far unknown tokens' logits are below zero.
CONSTANT, OUTPUT_NORM, UNLIKELY = 2.0**-8, 2.0**11, 2.0**11

#: Sizes that may be larger in the shape than in the small model.
GROWN = "num_hidden_layers", "intermediate_size", "vocab_size"

#: The other weights of unknown tokens in the output matrix.
OUTPUT_DEVIATION = 0.002


def to_env(small: Pair) -> dict[str, str]:
    """Environment of a server whose dummy weights hold the pair ``small``."""
    return {ENV: json.dumps({"target": str(small.target), "draft": str(small.draft)})}


def register() -> None:
    """Entry point ``sglang.srt.plugins``. SGLang swallows exceptions, hence ``SystemExit``."""
    if ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        json.loads(os.environ[ENV])["target"]
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"{ENV}: {error!r}")
    HookRegistry.register(DUMMY_WEIGHTS, _dummy_weights, HookType.AROUND)


def _dummy_weights(original: Callable[..., Any], model: Any, *_: Any, **__: Any) -> None:
    """AROUND hook: random weights of realistic size, and the trained model in them."""
    from safetensors.torch import load_file

    half_width = STANDARD_DEVIATION * 3**0.5
    original(model, low=-half_width, high=half_width)
    is_draft = "Eagle" in type(model).__name__
    folder = Path(json.loads(os.environ[ENV])["draft" if is_draft else "target"])
    config = json.loads((folder / "config.json").read_text())
    device = next(model.parameters()).device
    small = {name: t.to(device) for name, t in load_file(folder / "model.safetensors").items()}
    with torch.no_grad():
        Graft(model, small, config).write(draft=is_draft)
    print(f"graft: {folder.name} in {type(model).__name__} on {device}", flush=True)


class Graft:
    """Writes a small Llama, or its EAGLE-3 head, into a large one of SGLang's.

    Args:
        model: SGLang's model of the shape, random.
        small: Tensors of the small checkpoint by their names.
        config: ``config.json`` of the small checkpoint.

    ValueError where it does not fit. Legend: h, n, k, d are hidden size, heads, KV heads and
    head size of the small model; H, N, K, D those of the large one.
    """

    def __init__(self, model: Any, small: dict[str, Tensor], config: dict[str, Any]) -> None:
        self._model, self._small, self._config = model, small, config
        self._big = {name: parameter.data for name, parameter in model.named_parameters()}
        wide = model.config
        self._h, self._H = config["hidden_size"], wide.hidden_size
        self._copies = copies(self._H, self._h)
        self._heads = config["num_attention_heads"], wide.num_attention_heads
        self._kv = config["num_key_value_heads"], wide.num_key_value_heads
        self._d = config["head_dim"], wide.head_dim
        groups = [heads // kv for heads, kv in zip(self._heads, self._kv, strict=True)]
        grown = [(config[name], getattr(wide, name)) for name in GROWN]
        sizes = [(1, self._copies), groups, self._kv, *grown]
        if self._d[1] % self._d[0] or any(less > more for less, more in sizes):
            raise ValueError(
                f"a model of {self._heads[0]} heads, {self._kv[0]} KV heads of {self._d[0]}, and "
                f"{', '.join(f'{name} {config[name]}' for name in ('hidden_size', *GROWN))} does "
                "not fit in this one"
            )

    def write(self, *, draft: bool) -> None:
        """Write all parameters of the target, or of the EAGLE-3 head."""
        for name, data in self._big.items():
            if "norm" in name:
                data.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                data.zero_()
        if draft:
            self._write_draft()
        else:
            self._write_target()

    def _write_target(self) -> None:
        for i in range(self._config["num_hidden_layers"]):
            self._write_layer(f"model.layers.{i}", f"model.layers.{i}")
        embedding = self._small["model.embed_tokens.weight"]
        wide = self._big["model.embed_tokens.weight"]
        wide[: len(embedding)] = self._columns(embedding).to(wide.dtype) * self._copies
        wide[:, -1] = CONSTANT
        self._write_output_norm("model.norm.weight")
        self._write_output(self._small.get("lm_head.weight", embedding))

    def _write_draft(self) -> None:
        self._write_layer("midlayer", "model.layers.0")
        self._put("model.layers.0.hidden_norm.weight", self._vector("midlayer.hidden_norm.weight"))
        halves = self._small["fc.weight"].split(self._h, 1)
        wide = torch.cat([self._columns(self._rows(half)) for half in halves], 1)
        wide[-1, self._H - 1] = 1.0  # the constant, as the first of the target's layers has it
        self._put("model.fc.weight", wide)
        self._write_output_norm("norm.weight")
        self._write_output(self._small["lm_head.weight"])
        self._model.hot_token_id = self._token_map()

    def _write_output_norm(self, name: str) -> None:
        wide = self._vector(name)
        wide[-1] = OUTPUT_NORM
        self._put("model.norm.weight", wide)

    def _write_output(self, known: Tensor) -> None:
        """The output matrix: rows of known tokens, all others unlikely."""
        data = self._big["lm_head.weight"]
        data.mul_(OUTPUT_DEVIATION / STANDARD_DEVIATION)
        data[:, -1] = -UNLIKELY
        data[: len(known)] = self._columns(known).to(data.dtype)

    def _token_map(self) -> Tensor:
        """[draft vocabulary] target tokens: the small draft's, then unknown ones."""
        d2t = self._small["d2t"]
        known = d2t + torch.arange(len(d2t), device=d2t.device)
        first = self._config["vocab_size"]
        more = self._model.config.draft_vocab_size - len(known)
        return torch.cat((known, torch.arange(first, first + more, device=d2t.device)))

    def _write_layer(self, small: str, big: str) -> None:
        """A decoder layer; an EAGLE-3 head's reads the embedding beside the hidden state."""
        self._write_attention(small, big)
        gate, up, down = (
            self._small[f"{small}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        wide = self._big[f"{big}.mlp.gate_up_proj.weight"]
        for half, matrix in zip(wide.chunk(2), (gate, up), strict=True):
            half[: len(matrix)] = self._columns(matrix).to(half.dtype)
        self._big[f"{big}.mlp.down_proj.weight"][:, : len(gate)] = self._rows(down).to(wide.dtype)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._put(f"{big}.{norm}.weight", self._vector(f"{small}.{norm}.weight"))

    def _write_attention(self, small: str, big: str) -> None:
        """Queries, keys, values and their output, each head where its KV group has one."""
        (n, N), (k, K), (d, D) = self._heads, self._kv, self._d
        qkv = self._big[f"{big}.self_attn.qkv_proj.weight"]
        parts = qkv.split([N * D, K * D, K * D])
        queries, keys, values = (part.view(-1, D, part.shape[1]) for part in parts)
        # Rotary pairs (i, i + d / 2) go where the wider head has the same frequencies.
        spread = torch.arange(d // 2, device=qkv.device) * (D // d)
        places = torch.cat((spread, spread + D // 2))
        scale = (D / d) ** 0.5  # the softmax divides by the root of D
        small_q, small_k, small_v = (
            self._reading(self._small[f"{small}.self_attn.{name}_proj.weight"]).view(heads, d, -1)
            for name, heads in (("q", n), ("k", k), ("v", k))
        )
        out = torch.zeros(self._H, N, D, device=qkv.device)
        small_o = self._rows(self._small[f"{small}.self_attn.o_proj.weight"]).view(self._H, n, d)
        for i in range(n):
            at = i // (n // k) * (N // K) + i % (n // k)
            queries[at].zero_()
            queries[at, places] = (small_q[i] * scale).to(qkv.dtype)
            out[:, at, :d] = small_o[:, i]
        for i in range(k):
            keys[i, places] = small_k[i].to(qkv.dtype)
            values[i, :d] = small_v[i].to(qkv.dtype)
        self._put(f"{big}.self_attn.o_proj.weight", out.view(self._H, -1))

    def _vector(self, name: str) -> Tensor:
        """[H]: a norm's weight; smaller, because of the zeros in the mean square."""
        wide = self._small[name].float().repeat(self._copies)
        return pad(wide * (len(wide) / self._H) ** 0.5, (0, self._H - len(wide)), value=1.0)

    def _reading(self, matrix: Tensor) -> Tensor:
        """[out, m * h] -> [out, m * H]: reads each of m hidden states from all its copies."""
        return torch.cat([self._columns(part) for part in matrix.split(self._h, 1)], 1)

    def _columns(self, matrix: Tensor) -> Tensor:
        """[out, h] -> [out, H]: reads all copies, and nothing else."""
        wide = matrix.float().repeat(1, self._copies) / self._copies
        return pad(wide, (0, self._H - wide.shape[1]))

    def _rows(self, matrix: Tensor) -> Tensor:
        """[h, in] -> [H, in]: writes all copies, and nothing else."""
        wide = matrix.float().repeat(self._copies, 1)
        return pad(wide, (0, 0, 0, self._H - len(wide)))

    def _put(self, name: str, value: Tensor) -> None:
        self._big[name].copy_(value)
