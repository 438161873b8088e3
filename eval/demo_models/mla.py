"""A DeepSeek-V3 of a few MB with a draft layer in its checkpoint: MLA and NEXTN on a CPU.

    python -m eval.demo_models.train --data DIR --out DIR --work DIR --stage corpus mla mtp

Latent attention, experts, and a multi-token prediction layer (MTP) behind the last one, as stock
SGLang loads them: parameter names are the checkpoint's. What is mirrored:

* The MTP layer reads the embedding of token t + 1 beside the target's *post-norm* hidden state of
  token t, each through a norm of its own. Its own post-norm state goes to the target's head, and on
  to the next draft step.
* Rotary frequencies are YaRN's of factor 1, which change nothing: SGLang's CPU engine has no others
  for this architecture.

B sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from eval.demo_models.modeling import CONFIGS
from eval.server import MLA

NAME = "mla"
#: The first layer is dense; the others, and the MTP layer, have experts.
CONFIG = CONFIGS[NAME]
LAYERS: int = CONFIG["num_hidden_layers"]


def new_target() -> DeepseekV3ForCausalLM:
    """Untrained."""
    return DeepseekV3ForCausalLM(DeepseekV3Config.from_pretrained(MLA))


class MtpHead(nn.Module):
    """The MTP layer of a trained target; named as in ``model.layers.LAYERS``."""

    def __init__(self, target: DeepseekV3ForCausalLM) -> None:
        super().__init__()
        config = target.config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(width, eps)
        self.hnorm = DeepseekV3RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, LAYERS)
        # The last layer knows most of what a draft must; at first the state it is given passes.
        self.layer.load_state_dict(target.model.layers[-1].state_dict())
        self.norm = DeepseekV3RMSNorm(width, eps)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            self.eh_proj.weight.zero_()
            self.eh_proj.weight[:, width:] = torch.eye(width)
        self._rotary = target.model.rotary_emb

    def forward(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """[B, T, D] of tokens t + 1, and states of tokens t -> states for the target's head."""
        x = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1))
        places = torch.arange(x.shape[1], device=x.device)[None]
        return self.norm(self.layer(x, position_embeddings=self._rotary(x, places)))

    def weights(self) -> dict[str, Tensor]:
        """By their names in the target's checkpoint."""
        return published({placed(name): value for name, value in self.state_dict().items()})


def placed(name: str) -> str:
    """Where a weight of :class:`MtpHead` stands in the target's checkpoint."""
    first, _, rest = name.partition(".")
    place = {"layer": rest, "norm": f"shared_head.norm.{rest}"}.get(first, name)
    return f"model.layers.{LAYERS}.{place}"


def published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as DeepSeek publishes them: transformers keeps all experts of a layer in one tensor,
    gate and up projections behind each other.
    """
    found = {}
    for name, value in weights.items():
        layer, stacked, which = name.partition(".experts.")
        if not stacked:
            found[name] = value
            continue
        for number, one in enumerate(value.unbind()):
            expert = f"{layer}.experts.{number}."
            if which == "down_proj":
                found[f"{expert}down_proj.weight"] = one
            else:
                gate, up = one.chunk(2)
                found |= {f"{expert}gate_proj.weight": gate, f"{expert}up_proj.weight": up}
    return found


@torch.no_grad()
def states(model: DeepseekV3ForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T] -> post-norm hidden states [B, T, D] and logits [B, T, V]."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    return hidden, model.lm_head(hidden)
