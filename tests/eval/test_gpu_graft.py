"""A grafted model computes what the small model computes: in plain torch, by SGLang's names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eval.gpu.graft import CONSTANT, Graft
from eval.gpu.models import SHAPES, Shape, copies, trained
from eval.server import TARGET
from eval.smollm2.target import TargetError

#: Fewer numbers to compute, as many as the demo pair needs at least.
LESS = {
    "num_hidden_layers": 5,
    "intermediate_size": 1024,
    "vocab_size": 4096,
    "draft_vocab_size": 2048,
}
CASES = {
    "demo, small": SHAPES["small"],
    "demo, small128": SHAPES["small128"],
    "demo, no multiple": replace(SHAPES["small"], hidden_size=640),
    "demo, widths of 8b": replace(SHAPES["8b"], **LESS),
    "smollm2, deep": SHAPES["deep"],
}


class Model:
    """Random parameters of SGLang's Llama, or of its EAGLE-3 head."""

    def __init__(self, shape: Shape, draft: bool) -> None:
        torch.manual_seed(0)
        wide, size, units = shape.hidden_size, shape.head_dim, shape.intermediate_size
        layers = 1 if draft else shape.num_hidden_layers
        self.config = SimpleNamespace(**{**vars(shape), "num_hidden_layers": layers})
        self.hot_token_id: Any = None
        rows = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * size
        sizes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (shape.vocab_size, wide),
            "model.norm": (wide,),
            "lm_head": (shape.draft_vocab_size if draft else shape.vocab_size, wide),
        }
        for i in range(layers):
            of_layer = {
                "self_attn.qkv_proj": (rows, wide * (2 if draft else 1)),
                "self_attn.o_proj": (wide, shape.num_attention_heads * size),
                "mlp.gate_up_proj": (2 * units, wide),
                "mlp.down_proj": (wide, units),
                "input_layernorm": (wide,),
                "post_attention_layernorm": (wide,),
            }
            sizes |= {f"model.layers.{i}.{name}": size for name, size in of_layer.items()}
        if draft:
            sizes |= {"model.fc": (wide, 3 * wide), "model.layers.0.hidden_norm": (wide,)}
        self.weights = {
            f"{name}.weight": torch.nn.Parameter(torch.empty(size).uniform_(-0.035, 0.035))
            for name, size in sizes.items()
        }

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return self.weights.items()


class Sizes(NamedTuple):
    """Sizes and constants of a forward."""

    layers: int
    heads: tuple[int, int, int]
    theta: float
    eps: float

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * weight


def rope(x: Tensor, theta: float) -> Tensor:
    """[T, heads, D], rotated by place."""
    tokens, _, size = x.shape
    angle = torch.arange(tokens)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(qkv: Tensor, sizes: Sizes) -> Tensor:
    tokens, (heads, kv, size) = len(qkv), sizes.heads
    q, k, v = qkv.split([heads * size, kv * size, kv * size], -1)
    q, k, v = (
        rope(q.view(tokens, heads, size), sizes.theta),
        rope(k.view(tokens, kv, size), sizes.theta),
        v.view(tokens, kv, size),
    )
    k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -1e30)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(tokens, -1)


def forward(
    weights: dict[str, Tensor], sizes: Sizes, x: Tensor, embeds: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The normed output, and the residual before each layer; with ``embeds`` an EAGLE-3 head."""
    seen, norm = [], sizes.norm
    for i in range(sizes.layers):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        seen.append(x)
        if embeds is None:
            h = norm(x, layer["input_layernorm"])
        else:
            h = norm(x, layer["hidden_norm"])
            h = torch.cat((norm(embeds, layer["input_layernorm"]), h), -1)
        x = x + attention(h @ layer["self_attn.qkv_proj"].T, sizes) @ layer["self_attn.o_proj"].T
        gate, up = (norm(x, layer["post_attention_layernorm"]) @ layer["mlp.gate_up_proj"].T).chunk(
            2, -1
        )
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"]), seen


def by_sglangs_names(small: dict[str, Tensor]) -> dict[str, Tensor]:
    """The small checkpoint with SGLang's fused matrices."""
    found = {}
    for name, tensor in small.items():
        name = name.replace("midlayer", "model.layers.0")
        known = name.startswith(("model.", "lm_head", "d2t", "t2d"))
        found[name if known else "model." + name] = (
            tensor.float() if tensor.is_floating_point() else tensor
        )
    for fused, parts in (("qkv_proj", ("q", "k", "v")), ("gate_up_proj", ("gate", "up"))):
        first = f"{parts[0]}_proj"
        for name in [n for n in found if n.endswith(f"{first}.weight")]:
            found[name.replace(first, fused)] = torch.cat(
                [found[name.replace(first, f"{part}_proj")] for part in parts]
            )
    return found


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_graft_of_a_larger_shape_keeps_the_pairs_logits(case: str) -> None:
    """Within float32's rounding: relative error, argmax, and probability of unknown tokens."""
    shape = CASES[case]
    try:
        pair = trained(case.partition(",")[0])
    except TargetError as error:
        pytest.skip(str(error))
    small = [load_file(folder / "model.safetensors") for folder in pair]
    configs = [json.loads((folder / "config.json").read_text()) for folder in pair]
    target, draft = (by_sglangs_names(tensors) for tensors in small)
    models = Model(shape, draft=False), Model(shape, draft=True)
    for model, tensors, config in zip(models, small, configs, strict=True):
        Graft(model, tensors, config).write(draft=model is models[1])
    ids = torch.randint(2, 2048, (40,), generator=torch.Generator().manual_seed(1))
    aux = [n + 1 for n in configs[1]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    names = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
    layers, *heads = (configs[0][name] for name in names)
    sizes = Sizes(layers, (heads[0], heads[1], heads[2]), configs[0]["rope_theta"], 1e-5)
    layers, *heads = (getattr(shape, name) for name in names)
    hidden = configs[0]["hidden_size"]
    share = copies(shape.hidden_size, hidden) * hidden / shape.hidden_size
    wide = Sizes(layers, (heads[0], heads[1], heads[2]), sizes.theta, sizes.eps * share)
    logits = []
    for of_target, of_draft, known in (
        (target, draft, sizes),
        (models[0].weights, models[1].weights, wide),
    ):
        embeds = of_target["model.embed_tokens.weight"][ids]
        out, seen = forward(of_target, known, embeds)
        logits.append(
            out @ of_target.get("lm_head.weight", of_target["model.embed_tokens.weight"]).T
        )
        x = torch.cat([seen[n] for n in aux], -1) @ of_draft["model.fc.weight"].T
        out, _ = forward(of_draft, known._replace(layers=1), x, embeds)
        logits.append(out @ of_draft["lm_head.weight"].T)
    assert torch.allclose(x[:, -1], torch.tensor(CONSTANT)), "the draft's input keeps the constant"
    for wanted, found in zip(logits[:2], logits[2:], strict=True):
        tokens = wanted.shape[1]
        assert (found[:, :tokens] - wanted).norm() / wanted.norm() < 1e-4
        # Never drawn: the largest is the first token's, whose residuals are ten times the others'.
        assert found.softmax(-1)[:, tokens:].sum(-1).max() < 1e-6
        assert (found.argmax(-1) == wanted.argmax(-1)).all()
    mapped = models[1].hot_token_id.tolist()
    assert max(mapped) < shape.vocab_size
    assert len(set(mapped)) == shape.draft_vocab_size, "each draft token is another target token"


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 256}, {"head_dim": 96}, {"num_attention_heads": 2}, {"num_hidden_layers": 4},
     {"num_attention_heads": 8, "num_key_value_heads": 1}, {"vocab_size": 2000}],
)  # fmt: skip
def test_graft_into_a_shape_that_does_not_hold_the_demo_pair_is_refused(
    changes: dict[str, int],
) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    wide = SimpleNamespace(**{**vars(SHAPES["small"]), **changes})
    model = SimpleNamespace(named_parameters=list, config=wide)
    with pytest.raises(ValueError, match=r"4 heads, 2 KV heads of 64, .* does not fit in this one"):
        Graft(model, {}, config)
