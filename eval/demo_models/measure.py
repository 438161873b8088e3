"""How well each demo draft predicts the demo target: an offline simulation of greedy chains.

    python -m eval.demo_models.measure --weights eval/demo_models/weights --prompts 40

Accept length here is the field's tau: tokens per target step, the bonus token included. Greedy
output does not depend on the draft, so the target answers once and each draft is then replayed
along that answer: draft STEPS tokens, keep the matching ones, add the bonus token, go on from
there. It is the walk a server makes, without a server. Computed in float32 from the bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaForCausalLM

from eval.demo_models.corpus import FAMILIES
from eval.demo_models.modeling import END_ID, ChainCache, Head
from eval.demo_models.train import Teacher, greedy, new_head
from eval.prompts import demo_mix

DRAFTS = ("standalone", "eagle", "eagle3")
STEPS = 5


def load_head(weights: Path, name: str) -> tuple[Head, Tensor | None]:
    """An exported head and, for EAGLE-3, the target id of each draft id."""
    head = new_head(name)
    tensors = load_file(weights / name / "model.safetensors")
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    head.load_state_dict({key: value.float() for key, value in tensors.items()})
    ids = None if offsets is None else offsets + torch.arange(len(offsets))
    return head.eval(), ids


@torch.no_grad()
def head_chains(
    head: Head, ids: Tensor | None, teacher: Teacher, tokens: list[int], start: int
) -> list[list[int]]:
    """The STEPS tokens drafted after each bonus token at `start`, `start` + 1, ... ."""
    sequence = torch.tensor([tokens])  # [1, T + 1]
    hidden, aux, _ = teacher(sequence)
    carried = (hidden if ids is None else aux)[:, :-1]
    cache, fed, drafted = ChainCache(), sequence[:, 1:], []
    for _ in range(STEPS):
        state, carried = head(teacher.embed(fed), carried, cache)
        logits = head.logits(state, teacher.lm_head)
        fed = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]  # [1, T]
        drafted.append(fed[0])
    return torch.stack(drafted, dim=1)[start - 1 :].tolist()


def standalone_chain(model: LlamaForCausalLM, tokens: list[int], bonus: int) -> list[int]:
    """What a server's standalone draft says after the bonus token: it never saw token 0."""
    return greedy(model, [tokens[1 : bonus + 1]], STEPS)[0]


def target_steps(chain: Callable[[int], list[int]], tokens: list[int], start: int) -> int:
    """Target steps that a server needs from the bonus token at `start` to the last token."""
    bonus, steps = start, 0
    while bonus < len(tokens) - 1:
        bonus += matching(chain(bonus), tokens[bonus + 1 :]) + 1
        steps += 1
    return steps


def matching(drafted: list[int], answer: list[int]) -> int:
    """Drafted tokens before the first wrong one: [5, 6, 9] against [5, 6, 7, 8] gives 2."""
    for i, token in enumerate(drafted):
        if i >= len(answer) or token != answer[i]:
            return i
    return len(drafted)


def distinct_trigrams(tokens: list[int]) -> float:
    """Share of different runs of three tokens; a looping output falls far below 1."""
    runs = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
    return len(set(runs)) / len(runs) if runs else 1.0


def measure(weights: Path, n: int, new_tokens: int) -> dict[str, dict[str, float]]:
    """Per family: answers, trigrams, and for each draft total tokens over total target steps."""
    teacher = Teacher(weights / "target")
    tokenizer = Tokenizer.from_file(str(weights / "target" / "tokenizer.json"))
    standalone = LlamaForCausalLM.from_pretrained(weights / "standalone", dtype=torch.float32)
    heads = {name: load_head(weights, name) for name in DRAFTS if name != "standalone"}
    facts: dict[str, dict[str, float]] = {}
    for family in tqdm(FAMILIES, desc="families"):
        texts = [p.text for p in demo_mix(n * len(FAMILIES)) if p.family == family]
        prompts = [e.ids for e in tokenizer.encode_batch_fast(texts)]
        answers = greedy(teacher.model, prompts, new_tokens)
        row = facts[family] = {
            "prompt tokens": sum(map(len, prompts)) / n,
            "answer tokens": sum(map(len, answers)) / n,
            "ended": sum(a[-1] == END_ID for a in answers) / n,
            "distinct 3-grams": sum(map(distinct_trigrams, answers)) / n,
        }
        steps = dict.fromkeys(DRAFTS, 0)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens, start = prompt + answer, len(prompt)
            chain = partial(standalone_chain, standalone, tokens)
            steps["standalone"] += target_steps(chain, tokens, start)
            for name, (head, ids) in heads.items():
                rows = dict(enumerate(head_chains(head, ids, teacher, tokens, start), start))
                steps[name] += target_steps(rows.__getitem__, tokens, start)
        emitted = sum(len(a) - 1 for a in answers)  # the first token comes from the prefill
        row |= {f"tau {name}": emitted / steps[name] for name in DRAFTS}
    return facts


def main(argv: list[str] | None = None) -> int:
    """Print a table for people and, as the last line, JSON for machines."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo_models.measure", description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40, help="prompts per family")
    parser.add_argument("--new-tokens", type=int, default=140)
    args = parser.parse_args(argv)
    facts = measure(args.weights, args.prompts, args.new_tokens)
    columns = list(next(iter(facts.values())))
    print("family  " + "  ".join(columns))
    for family, row in facts.items():
        print(f"{family:8}" + "  ".join(f"{row[c]:{len(c)}.3f}" for c in columns))
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
