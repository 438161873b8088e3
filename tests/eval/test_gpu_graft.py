"""A grafted model computes what the small model computes: in plain torch, by SGLang's names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eval.demo_models.modeling import ChainCache, Eagle3Head
from eval.gpu.graft import CONSTANT, Graft
from eval.gpu.models import SHAPES, Pair, Shape, trained, write
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


def checkpoint(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The names of a checkpoint, for SGLang's fused matrices."""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    heads, kv, size = (config[name] for name in names)
    found = {}
    for name, tensor in weights.items():
        before, fused, _ = name.rpartition("qkv_proj.weight")
        if fused:
            parts = zip("qkv", tensor.split([heads * size, kv * size, kv * size]), strict=True)
            found |= {f"{before}{part}_proj.weight": rows for part, rows in parts}
            continue
        before, fused, _ = name.rpartition("gate_up_proj.weight")
        parts = zip(("gate", "up"), tensor.chunk(2), strict=True) if fused else ()
        found |= {f"{before}{part}_proj.weight": rows for part, rows in parts} or {name: tensor}
    return found


def logits(pair: Pair, weights: list[dict[str, Tensor]], ids: Tensor) -> list[Tensor]:
    """Logits of the target and of its head, and the head's input; configurations from ``pair``."""
    target_config, config = (json.loads((path / "config.json").read_text()) for path in pair)
    target = LlamaForCausalLM(LlamaConfig(**target_config)).float().eval()
    target.load_state_dict(checkpoint(weights[0], target_config), strict=False)
    target.tie_weights()
    head = Eagle3Head(config)
    renamed = {
        name.replace("model.layers.0", "midlayer").removeprefix("model."): tensor.float()
        for name, tensor in checkpoint(weights[1], config).items()
        if name not in ("d2t", "t2d", "model.embed_tokens.weight")
    }
    head.load_state_dict(renamed)
    out = target(ids[None], use_cache=False, output_hidden_states=True)
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    aux = torch.cat([out.hidden_states[n + 1] for n in layers], -1)
    state, _ = head(target.model.embed_tokens(ids[None]), aux, ChainCache())
    return [out.logits[0], head.lm_head(state)[0], head.fc(aux)[0]]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_graft_of_a_larger_shape_keeps_the_pairs_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within float32's rounding: relative error, argmax, and probability of unknown tokens."""
    shape = CASES[case]
    monkeypatch.setitem(SHAPES, case, shape)
    try:
        pair = trained(case.partition(",")[0])
    except TargetError as error:
        pytest.skip(str(error))
    small = [load_file(folder / "model.safetensors") for folder in pair]
    wide = Model(shape, draft=False), Model(shape, draft=True)
    for model, tensors, folder in zip(wide, small, pair, strict=True):
        config = json.loads((folder / "config.json").read_text())
        Graft(model, tensors, config).write(draft=model is wide[1])
    ids = torch.randint(2, 2048, (40,), generator=torch.Generator().manual_seed(1))
    grafted = [model.weights for model in wide]
    *made, entered = logits(write(case, tmp_path, pair), grafted, ids)
    assert torch.allclose(entered[:, -1], torch.tensor(CONSTANT)), "the head's input keeps it"
    for wanted, found in zip(logits(pair, small, ids)[:2], made, strict=True):
        tokens = wanted.shape[1]
        assert (found[:, :tokens] - wanted).norm() / wanted.norm() < 1e-4
        # Never drawn: the largest is the first token's, whose residuals are ten times the others'.
        assert found.softmax(-1)[:, tokens:].sum(-1).max() < 1e-6
        assert (found.argmax(-1) == wanted.argmax(-1)).all()
    mapped = wide[1].hot_token_id.tolist()
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
