"""The shipped demo drafts, in our modules; the checkpoint of latent attention is DeepSeek's."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.demo_models import mla
from eval.demo_models.modeling import (
    CONFIGS,
    VOCAB,
    ChainCache,
    Eagle3Head,
    EagleHead,
    Head,
)
from eval.demo_models.train import Teacher, unroll
from eval.prompts import demo_mix
from eval.server import MLA, TARGET, WEIGHTS


def test_what_is_trained_is_what_is_shipped_and_all_of_it() -> None:
    target = mla.new_target()
    made = mla.published(dict(target.state_dict())) | mla.MtpHead(target).weights()
    with safe_open(MLA / "model.safetensors", "pt") as file:
        shipped = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert {name: list(value.shape) for name, value in made.items()} == shipped


def test_experts_that_stand_in_one_tensor_are_told_apart() -> None:
    both = torch.arange(2 * 6 * 2.0).view(2, 6, 2)  # experts, gate and up, inputs
    down = torch.arange(2 * 2 * 3.0).view(2, 2, 3)
    made = mla.published({"a.experts.gate_up_proj": both, "a.experts.down_proj": down})
    assert made["a.experts.1.gate_proj.weight"].equal(both[1, :3])
    assert made["a.experts.1.up_proj.weight"].equal(both[1, 3:])
    assert made["a.experts.0.down_proj.weight"].equal(down[0])
    assert len(made) == 6


@pytest.mark.parametrize(("name", "kind"), [("eagle", EagleHead), ("eagle3", Eagle3Head)])
@torch.inference_mode()
def test_chains_that_grow_in_parallel_are_those_that_grow_alone(
    name: str, kind: type[Head]
) -> None:
    """Each root's chain is appended to the roots before it, as a server's draft has it."""
    torch.manual_seed(0)
    head, rows, width = kind(CONFIGS[name]), 9, 256
    embeds, hidden = torch.randn(1, rows + 3, width), torch.randn(1, rows, width)
    cache, entered = ChainCache(), [hidden]
    for k in range(3):
        state, carried = head(embeds[:, k : k + rows], entered[-1], cache)
        for root in range(rows):
            chain = [one[:, root : root + 1] for one in entered[1:]]
            alone = torch.cat([hidden[:, : root + 1], *chain], 1)
            wanted, _ = head(embeds[:, : root + k + 1], alone, ChainCache())
            torch.testing.assert_close(state[:, root], wanted[:, -1], atol=1e-5, rtol=1e-4)
        entered.append(carried)


@pytest.mark.parametrize(("name", "kind"), [("eagle", EagleHead), ("eagle3", Eagle3Head)])
@torch.inference_mode()
def test_a_shipped_head_drafts_what_its_target_will_say(name: str, kind: type[Head]) -> None:
    """Seven of ten of the target's choices at each of three steps, after its own states."""
    teacher, head = Teacher(TARGET), kind(CONFIGS[name])
    weights = load_file(WEIGHTS / name / "model.safetensors")
    kept = weights.pop("d2t", torch.zeros(VOCAB, dtype=torch.long))
    kept = kept + torch.arange(len(kept))
    weights.pop("t2d", None)
    head.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    hits: dict[int, list[torch.Tensor]] = {}
    for prompt in demo_mix(6):
        tokens = torch.tensor([tokenizer(prompt.text)["input_ids"][:200]])
        hidden, aux, logits = teacher(tokens)
        inner = aux if name == "eagle3" else hidden
        for k, state in unroll(head, teacher.embed.weight, tokens, inner):
            best = logits[:, k + 1 : k + 1 + state.shape[1]].argmax(-1)
            likely, drafted = head.logits(state, teacher.lm_head).softmax(-1).max(-1)
            found = torch.stack((likely, (kept[drafted] == best).float()))
            hits.setdefault(k, []).append(found.flatten(1))
    for step in hits.values():
        confidence, share = torch.cat(step, 1).mean(1).tolist()
        assert share > 0.7
        assert confidence < share + 0.05, "it is no surer than it is right"


@torch.inference_mode()
def test_the_shipped_draft_layer_knows_what_its_target_will_say() -> None:
    """It predicts a third of the target's choices on training prompts, one token ahead."""
    target = AutoModelForCausalLM.from_pretrained(MLA, dtype=torch.float32)
    head = mla.MtpHead(target)
    with safe_open(MLA / "model.safetensors", "pt") as file:
        head.load_state_dict(_stacked(head, file))
    tokenizer = AutoTokenizer.from_pretrained(MLA)
    said = wanted = 0
    for prompt in demo_mix(6):
        tokens = torch.tensor([tokenizer(prompt.text)["input_ids"][:200]])
        hidden, logits = mla.states(target, tokens)
        drafted = target.lm_head(head(target.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1]))
        said += int((drafted.argmax(-1) == logits[:, 1:].argmax(-1)).sum())
        wanted += tokens.shape[1] - 1
    assert said > wanted / 3, (said, wanted)


def _stacked(head: mla.MtpHead, file: safe_open) -> dict[str, torch.Tensor]:
    """The draft layer's weights, as transformers keeps them."""
    found = {}
    for name in head.state_dict():
        layer, stacked, which = mla.placed(name).partition(".experts.")
        if not stacked:
            found[name] = file.get_tensor(layer).float()
            continue
        parts = ["gate_proj", "up_proj"] if which == "gate_up_proj" else [which]
        found[name] = torch.stack(
            [
                torch.cat(
                    [file.get_tensor(f"{layer}.experts.{e}.{part}.weight") for part in parts]
                ).float()
                for e in range(mla.CONFIG["n_routed_experts"])
            ]
        )
    return found
