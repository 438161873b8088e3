"""Train the EAGLE-3 head: `python -m eval.smollm2.train --data DIR --work runs/smollm2`.

It learns to say what the target says in its own answers (``eval.smollm2.answers``), from the states
that were kept with them: the target itself does not run. Three draft steps are unrolled from every
token of an answer, each behind the head's own states, as on a server (EAGLE-3, arXiv:2503.01840).

The head begins as the target's last layer; its input projection hands that the last kept state.

Legend: N tokens of a batch of answers, prompts included; R roots, the tokens of answers behind
which something is drafted; D hidden size; V draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from eval.demo_models import export
from eval.demo_models.modeling import Eagle3Head
from eval.demo_models.train import STEP_DECAY, UNROLL, Optimizer, fit
from eval.smollm2 import HEAD
from eval.smollm2.answers import SEED, Answers, Entry, own_answers, read_rows
from eval.smollm2.decode import AUX_LAYERS, Llama
from eval.smollm2.target import target_folder

DRAFT_VOCAB = 8192
BATCH_TOKENS = 6000

#: One answer in so many is held out.
HELD_OUT = 40

#: Share of the human text beside the target's own in what chooses the draft vocabulary.
HUMAN_TEXT = 0.3


def head_config(target: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of the head, from that of its target."""
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        },
    }


@torch.no_grad()
def new_head(config: dict[str, Any], target: Llama, kept: Tensor) -> Eagle3Head:
    """The head before training: the target's last layer behind its uppermost kept state."""
    torch.manual_seed(SEED)
    head, width = Eagle3Head(config), config["hidden_size"]
    for parameter in head.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    layer, attention = head.midlayer, head.midlayer.self_attn
    head.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
    last = target.layers[-1]
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    for part, rows in zip(parts, last.qkv.split([p.out_features for p in parts]), strict=True):
        part.weight[:, width:] = rows  # its first half reads the token's embedding
    attention.o_proj.weight.copy_(last.out)
    gate, up = last.gate_up.chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.mlp.down_proj.weight.copy_(last.down)
    layer.hidden_norm.weight.copy_(last.input_norm)
    layer.post_attention_layernorm.weight.copy_(last.second_norm)
    head.norm.weight.copy_(target.norm)
    head.lm_head.weight.copy_(target.head[kept])
    return head


def draft_vocabulary(data: Path, answers: Answers, tokenizer: Any, size: int) -> Tensor:
    """The DRAFT_VOCAB ids, in rising order, that answers have most often.

    The target's answers, and human ones beside them for what the former are too few to show.
    """
    own = np.zeros(size)
    for entry in own_answers(answers.entries):
        tokens = answers.tokens(entry)[entry.prompt :]
        own += np.bincount(tokens, minlength=size)
    human = np.zeros(size)
    for name in ("dolly_15k", "gsm8k_train", "mbpp_train", "self_instruct_seed"):
        texts = [row["reference"] for row in read_rows(data, name) if row.get("reference")]
        for ids in tokenizer(texts)["input_ids"]:
            human += np.bincount(np.asarray(ids, dtype=np.int64), minlength=size)
    counts = own / own.sum() + HUMAN_TEXT * human / human.sum()
    kept = np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB])
    shares = [f"{counted[kept].sum() / counted.sum():.2%}" for counted in (own, human)]
    print(
        f"the draft vocabulary covers {shares[0]} of the target's answers, {shares[1]} of people's"
    )
    return torch.from_numpy(kept)


# --- batches of answers, one behind the other -----------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Answers without padding. ``spans`` has (first token, tokens, prompt tokens) of each."""

    tokens: Tensor  # [N]
    states: Tensor  # [N, 4 D]
    spans: list[tuple[int, int, int]]

    def roots(self) -> Tensor:
        """[R] the tokens that begin a chain: the next is a bonus token, UNROLL more are known."""
        parts = [
            torch.arange(first + prompt - 1, first + size - UNROLL - 1)
            for first, size, prompt in self.spans
        ]
        return torch.cat(parts)


def usable(entry: Entry) -> bool:
    """Whether a chain fits behind a token of the answer."""
    return entry.tokens - entry.prompt > UNROLL + 1


def batches(answers: Answers, entries: Sequence[Entry], seed: int) -> Iterator[Batch]:
    """Endless; each epoch in another order."""
    rng, left = random.Random(seed), list[Entry]()
    while True:
        chosen, size = list[Entry](), 0
        while size < BATCH_TOKENS:
            if not left:
                left = rng.sample(entries, len(entries))
            chosen.append(left.pop())
            size += chosen[-1].tokens
        yield batch_of(answers, chosen)


def batch_of(answers: Answers, entries: Sequence[Entry]) -> Batch:
    read = [answers.read(entry) for entry in entries]
    spans, first = [], 0
    for entry in entries:
        spans.append((first, entry.tokens, entry.prompt))
        first += entry.tokens
    return Batch(torch.cat([t for t, _ in read]), torch.cat([s for _, s in read]), spans)


# --- the head's steps on a batch ------------------------------------------------------------------


def steps(head: Eagle3Head, embed: Tensor, batch: Batch) -> Iterator[Tensor]:
    """Head-ready states [R, D] of each of UNROLL draft steps.

    What :class:`~eval.demo_models.modeling.Eagle3Head` computes, for roots alone: of a prompt's
    tokens only keys and values are needed.
    """
    roots, width = batch.roots(), embed.shape[1]
    positions = torch.cat([torch.arange(size) for _, size, _ in batch.spans])
    layer, attention = head.midlayer, head.midlayer.self_attn
    known = batch.tokens.roll(-1)  # the token behind each state; a root always has one
    hidden = head.fc(batch.states[:, : 3 * width])
    both = side_by_side(layer, embed[known], hidden)
    keys = rotate(attention.k_proj(both), positions, attention)
    values = attention.v_proj(both).unflatten(-1, (attention.kv_heads, -1))
    both, carried = both[roots], hidden[roots]
    own: list[tuple[Tensor, Tensor]] = []
    for k in range(UNROLL):
        if k:
            both = side_by_side(layer, embed[known[roots + k]], carried)
            key = rotate(attention.k_proj(both), positions[roots] + k, attention)
            own.append((key, attention.v_proj(both).unflatten(-1, (attention.kv_heads, -1))))
        query = rotate(attention.q_proj(both), positions[roots] + k, attention)
        read = attend(query, keys, values, own, batch.spans)
        carried = carried + attention.o_proj(read)
        carried = carried + layer.mlp(normed(layer.post_attention_layernorm, carried))
        yield normed(head.norm, carried)


def side_by_side(layer: Any, embeds: Tensor, hidden: Tensor) -> Tensor:
    """[R, 2 D]: what the layer's attention reads."""
    entered = normed(layer.input_layernorm, embeds.to(hidden.dtype))
    return torch.cat([entered, normed(layer.hidden_norm, hidden)], -1)


def normed(norm: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm in the type of ``x``; of mixed types torch has no fused one."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def rotate(x: Tensor, positions: Tensor, attention: Any) -> Tensor:
    """[R, heads * head_dim] -> [R, heads, head_dim] with rotary embedding at ``positions``."""
    x = x.unflatten(-1, (-1, attention.head_dim))
    half = attention.head_dim // 2
    frequency = attention.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions[:, None] * frequency)[:, None]
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]],
    spans: list[tuple[int, int, int]],
) -> Tensor:  # fmt: skip
    """[R, heads * head_dim]: each root's query reads all tokens up to the root's own, and what its
    chain has drafted (``own``: keys and values [R, kv heads, head_dim] of each step).
    """
    kv, dim = keys.shape[1:]
    sizes = [size for _, size, _ in spans]
    counts = [size - UNROLL - prompt for _, size, prompt in spans]
    # Split, not sliced: the gradient of a slice is as large as what it was cut from.
    queries = query.unflatten(1, (kv, -1)).permute(1, 2, 0, 3).split(counts, 2)
    weights_own = [
        (query.unflatten(1, (kv, -1)) * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own
    ]  # [R, kv, group, 1]
    chains = [w.permute(1, 2, 0, 3).split(counts, 2) for w in weights_own]
    out, shares = [], []
    for i, (k, v) in enumerate(zip(keys.split(sizes), values.split(sizes), strict=True)):
        last, prompt = sizes[i] - UNROLL - 1, spans[i][2]
        q = queries[i].flatten(1, 2)  # [kv, group * rows, dim]
        scores = (q @ k[:last].permute(1, 2, 0)).unflatten(1, (-1, counts[i]))
        hidden = torch.ones(counts[i], last, dtype=torch.bool).triu(prompt)
        scores = scores.masked_fill(hidden, float("-inf"))
        scores = torch.cat([scores, *(chain[i] for chain in chains)], -1)
        weights = (scores.float() / dim**0.5).softmax(-1).to(v.dtype)
        known, drafted = weights.split([last, len(own)], -1)
        read = known.flatten(1, 2) @ v[:last].transpose(0, 1)
        out.append(read.unflatten(1, (-1, counts[i])))
        shares.append(drafted)
    read = torch.cat(out, 2).permute(2, 0, 1, 3)  # [R, kv, group, dim]
    share = torch.cat(shares, 2).permute(2, 0, 1, 3)
    for i, (_, value) in enumerate(own):
        read = read + share[..., i, None] * value[:, :, None]
    return read.flatten(1)


class Loss:
    """Cross-entropy against the target's distribution, summed over the draft steps."""

    def __init__(
        self, head: Eagle3Head, target: Llama, kept: Tensor, maps: dict[str, Tensor]
    ) -> None:
        self._head, self._target, self._kept, self._t2d = head, target, kept, maps["t2d"]
        self._kept_head = target.head[kept]

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, float], list[Tensor]]:
        """Loss, shares of agreement by step, and [R] for each step whether the two agree."""
        width, roots = self._target.embed.shape[1], batch.roots()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                said = batch.states[:, 3 * width :]
                wanted = F.linear(said, self._kept_head).float().softmax(-1)
                # Greedy answers tell the target's choice; of sampled ones this is the best kept.
                best = self._kept[wanted.argmax(-1)]
            loss, facts, hits = torch.zeros(()), dict[str, float](), []
            for k, state in enumerate(steps(self._head, self._target.embed, batch)):
                rows = roots + k + 1
                logits = self._head.lm_head(state)
                known = self._t2d[batch.tokens[rows + 1]].float()
                ce = -(wanted[rows] * logits.float().log_softmax(-1)).sum(-1)
                loss = loss + STEP_DECAY**k * (ce * known).sum() / known.sum()
                hits.append((self._kept[logits.argmax(-1)] == best[rows]) & known.bool())
                facts[f"agree{k + 1}"] = hits[-1].float().mean().item()
        return loss, facts, hits


@torch.no_grad()
def held_out(answers: Answers, entries: Sequence[Entry], loss: Loss) -> dict[str, list[float]]:
    """Per family: share of roots whose first 1, 2, ... UNROLL drafts the target would choose."""
    survived: dict[str, list[Tensor]] = {}
    for entry in entries:
        alive = torch.stack(loss(batch_of(answers, [entry]))[2]).cumprod(0).float()
        survived.setdefault(entry.family, []).append(alive)
    return {
        family: [round(x, 3) for x in torch.cat(found, 1).mean(1).tolist()]
        for family, found in sorted(survived.items())
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure on answers held out, write the head's folder."""
    parser = argparse.ArgumentParser(prog="python -m eval.smollm2.train", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the training text, *.jsonl")
    add("--work", type=Path, default=Path("runs/smollm2"), help="answers, and the checkpoint")
    add("--out", type=Path, default=HEAD)
    add("--go-on", action="store_true", help="begin with the head in --out, made by an earlier run")
    add("--minutes", type=float, default=60.0)
    add("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    folder = target_folder()
    target, tokenizer = Llama(folder), AutoTokenizer.from_pretrained(folder)
    answers = Answers(args.work, target.width)
    kept_path = args.work / "kept.npy"
    if args.go_on:
        known = load_file(args.out / "model.safetensors")
        kept = known.pop("d2t") + torch.arange(DRAFT_VOCAB)
        known.pop("t2d")
    elif kept_path.exists():
        kept = torch.from_numpy(np.load(kept_path))
    else:
        kept = draft_vocabulary(args.data, answers, tokenizer, len(target.embed))
        np.save(kept_path, kept.numpy())
    config = head_config(json.loads((folder / "config.json").read_text()))
    maps = export.vocabulary_maps(kept, len(target.embed))
    head = new_head(config, target, kept).train()
    if args.go_on:
        head.load_state_dict(known)
    learnt = [e for e in answers.entries if e.key % HELD_OUT and usable(e)]
    tested = [e for e in answers.entries if not e.key % HELD_OUT and usable(e)]
    for name, entries in (("all", learnt), ("the target's own", own_answers(learnt))):
        tokens = sum(entry.tokens - entry.prompt for entry in entries)
        print(f"learns from {len(entries)} answers, {name}: {tokens:,} tokens", flush=True)
    loss = Loss(head, target, kept, maps)
    optimizer = Optimizer(head, muon_rate=2e-3, adam_rate=1e-3)
    # Own answers twice: they are what is drafted behind on a server.
    source = batches(answers, learnt + own_answers(learnt), random.randrange(1 << 30))
    if args.minutes:
        fit("head", head, optimizer, lambda: loss(next(source))[:2], args.minutes, args.work)
    survival = held_out(answers, tested, loss)
    print(json.dumps(survival))
    weights = dict(head.state_dict()) | maps
    export.save_model(args.out.name, weights, args.out.parent, config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
