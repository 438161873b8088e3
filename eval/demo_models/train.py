"""Make the demo models: `python -m eval.demo_models.train --data DIR --out DIR --work DIR`."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import LlamaConfig, LlamaForCausalLM

from eval.demo_models import corpus, export, mla
from eval.demo_models.modeling import (
    AUX_LAYERS,
    CONFIGS,
    DRAFT_VOCAB,
    END_ID,
    VOCAB,
    ChainCache,
    Eagle3Head,
    EagleHead,
    Head,
)
from sglang_c2t.files import write_whole

SEED = 0
GENERATED = {"math": 22_000, "code": 20_000, "chat": 24_000}  # documents, about 2.3 M tokens each
REAL_SHARE = {
    "gsm8k_train": 1.0,
    "sgd_dialogues": 1.0,
    "tldr_pages": 0.6,
    "dolly_15k": 0.8,
    "code_thealgorithms": 0.7,
    "public_domain_books": 0.35,
}
BATCH, DRAFT_BATCH, LENGTH = 16, 8, 256

#: Loss, and other numbers to show, by name.
Loss = tuple[Tensor, dict[str, float]]
Batch = TypeVar("Batch")


def corpus_stage(args: argparse.Namespace) -> None:
    """Text -> tokenizer and one long shuffled stream of token ids."""
    documents = [
        corpus.generate(family, "train", str(i))
        for family, n in GENERATED.items()
        for i in range(n)
    ]
    rng = random.Random(SEED)
    real = corpus.real_documents(args.data)
    documents += [found for found in real if rng.random() < REAL_SHARE[found.family]]
    random.Random(SEED).shuffle(documents)
    tokenizer = export.train_tokenizer(d.prompt + d.answer for d in documents[::3])
    encoded = tokenizer.encode_batch_fast([d.prompt + d.answer + export.END for d in documents])
    stream = np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])
    np.save(args.work / "stream.npy", stream)
    counts = Counter[str]()
    for document, e in zip(documents, encoded, strict=True):
        counts[document.family] += len(e.ids)
    (args.work / "counts.json").write_text(json.dumps(counts, indent=1))
    tokenizer.save(str(args.work / "tokenizer.json"))
    print(f"{len(stream):,} tokens, vocabulary {tokenizer.get_vocab_size()}: {dict(counts)}")
    export.save_tokenizer(tokenizer, args.out)


# --- the training loop, shared by all models ------------------------------------------------------


def optimizers(model: nn.Module, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, heads, norms and biases.

    Muon learns clearly more per token than AdamW alone, and tokens are what a small CPU lacks.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        inner = parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        groups[not inner].append(parameter)
    matrices, others = groups
    return [
        torch.optim.Muon(
            matrices, muon_rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_scale(done: float) -> float:
    """Learning rate over its peak at the share `done` of the time: short warm-up, cosine to 5 %."""
    warm = 0.02
    if done < warm:
        return max(done / warm, 0.01)
    cosine = 0.5 * (1 + float(np.cos(np.pi * min(1.0, (done - warm) / (1 - warm)))))
    return 0.05 + 0.95 * cosine


def fit(
    name: str, model: nn.Module, rates: tuple[float, float],
    batches: Callable[[int], Iterator[Batch]], loss_of: Callable[[Batch], Loss],
    minutes: float, work: Path,
) -> None:  # fmt: skip
    """Train for `minutes`, scheduled by time; a run that was cut off goes on from its last save.

    `rates` are the peaks of Muon and AdamW. `batches` gets the step, so that a resumed run sees new
    text.
    """
    path, seconds, step, spent = work / f"{name}.pt", 60.0 * minutes, 0, 0.0
    log: list[dict[str, float]] = []
    parts = optimizers(model, *rates)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for part, state in zip(parts, saved["optimizers"], strict=True):
            part.load_state_dict(state)
        spent, step, log = saved["spent"], saved["step"], saved["log"]
    source, start, last_save = batches(step), time.monotonic() - spent, spent
    bar = tqdm(total=round(seconds), initial=round(spent), unit="s", desc=name, mininterval=5)
    while spent < seconds:
        loss, facts = loss_of(next(source))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, rate in zip(parts, rates, strict=True):
            part.param_groups[0]["lr"] = rate * rate_scale(spent / seconds)
            part.step()
            part.zero_grad(set_to_none=True)
        step, spent = step + 1, time.monotonic() - start
        log = [*log[-99:], {"loss": loss.item(), **facts}]
        bar.n = min(round(spent), round(seconds))
        bar.set_postfix(step=step, **log[-1], refresh=step % 10 == 0)
        if spent - last_save > 120 or spent >= seconds:
            last_save = spent
            state = {
                "model": model.state_dict(), "optimizers": [part.state_dict() for part in parts],
                "spent": spent, "step": step, "log": log,
            }  # fmt: skip
            write_whole({path: partial(torch.save, state)})
    bar.close()
    result: dict[str, float] = {"steps": step, "seconds": round(spent)}
    result |= {key: round(float(np.mean([row[key] for row in log])), 4) for key in log[-1]}
    (work / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(name, result)


def crops(stream: Path, batch: int, seed: int, step: int) -> Iterator[Tensor]:
    """Endless [batch, LENGTH + 1] pieces of a stream: each epoch once over, from a new offset.

    Pieces begin anywhere in a document. That is what a standalone draft meets on a server: it never
    sees the first prompt token.
    """
    rng, tokens = np.random.default_rng(seed + step), np.load(stream)
    while True:
        starts = np.arange(rng.integers(LENGTH), len(tokens) - LENGTH - 1, LENGTH)
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            rows = [tokens[s : s + LENGTH + 1] for s in starts[i : i + batch]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


# --- target ---------------------------------------------------------------------------------------


def target_stage(args: argparse.Namespace, name: str = "target") -> None:
    """Plain next-token training of a target; that of latent attention is saved with its draft."""
    torch.manual_seed(SEED)
    latent = name == mla.NAME
    model = mla.new_target() if latent else LlamaForCausalLM(LlamaConfig(**CONFIGS[name]))

    def loss_of(tokens: Tensor) -> Loss:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), {}

    source = partial(crops, args.work / "stream.npy", BATCH, SEED + 1 + latent)
    fit(name, model.train(), (4e-3, 4e-3), source, loss_of, args.minutes[name], args.work)
    if not latent:
        export.save_model(name, model.state_dict(), args.out)


# --- drafts: the frozen target teaches, on half corpus, half its own answers -------------------

SELF_PROMPTS = 300  # per family
SELF_TOKENS = 140
UNROLL = 3  # draft steps trained; the deeper ones see the draft's own states, as on a server
STEP_DECAY = 0.8  # loss weight of a step over that of the step before


class Teacher:
    """The trained target, frozen: what it hands to each kind of draft."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.embed, self.lm_head = self.model.model.embed_tokens, self.model.lm_head

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T] -> post-norm hidden [B, T, D], three inner ones [B, T, 3 D], logits [B, T, V]."""
        out = self.model(tokens, use_cache=False, output_hidden_states=True)
        # hidden_states[0] is the embedding, so the output of layer i stands at i + 1.
        aux = torch.cat([out.hidden_states[i + 1] for i in AUX_LAYERS], dim=-1)
        return out.hidden_states[-1], aux, out.logits


@torch.no_grad()
def replies(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int,
    temperature: float = 0.0,
) -> list[list[int]]:  # fmt: skip
    """Answers, each cut after its end token; prompts of one call are padded on the left."""
    width, end = max(map(len, prompts)), model.config.eos_token_id
    pads = [width - len(prompt) for prompt in prompts]
    rows = [[end] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    out = model.generate(
        torch.tensor(rows),
        attention_mask=(torch.arange(width) >= torch.tensor(pads)[:, None]).long(),
        do_sample=bool(temperature),
        max_new_tokens=new_tokens,
        pad_token_id=end,
        **sampling,
    )
    answers = [row[width:].tolist() for row in out]
    return [a[: a.index(end) + 1] if end in a else a for a in answers]


def answers_stage(args: argparse.Namespace) -> None:
    """Let the target answer prompts of the training split: text as the drafts will meet it."""
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.bfloat16).eval()
    texts = [
        corpus.generate(family, "train", f"answers/{i}").prompt
        for family in corpus.FAMILIES  # one after the other: a batch stops when all of it ended
        for i in range(SELF_PROMPTS)
    ]
    prompts = [e.ids for e in tokenizer.encode_batch_fast(texts)]
    documents: list[list[int]] = []
    for i in tqdm(range(0, len(prompts), 60), desc="answers"):
        batch = prompts[i : i + 60]
        answered = replies(model, batch, SELF_TOKENS)
        documents += [p + a for p, a in zip(batch, answered, strict=True) if a[-1] == END_ID]
    random.Random(SEED).shuffle(documents)
    stream = np.concatenate([np.asarray(d, dtype=np.uint16) for d in documents])
    np.save(args.work / "answers.npy", stream)
    print(f"{len(documents)} of {len(prompts)} answers ended; {len(stream):,} tokens")


def draft_batches(work: Path, seed: int, step: int) -> Iterator[Tensor]:
    """[DRAFT_BATCH, LENGTH + 1]: first half corpus, second half the target's own answers."""
    half = DRAFT_BATCH // 2
    both = [crops(work / f"{n}.npy", half, seed, step) for n in ("stream", "answers")]
    return map(torch.cat, zip(*both, strict=True))


def soft_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy against the teacher's whole distribution; [B, T, V] twice -> [B, T]."""
    return -(wanted * logits.float().log_softmax(-1)).sum(-1)


def distilled(logits: Tensor, teacher: Tensor) -> Loss:
    """Loss against the teacher's logits, and how often both choose the same token."""
    agree = (logits.argmax(-1) == teacher.argmax(-1)).float().mean().item()
    return soft_cross_entropy(logits, teacher.float().softmax(-1)).mean(), {"agree": agree}


def standalone_stage(args: argparse.Namespace) -> None:
    """Distil the target into a one-layer model that stands alone."""
    name, teacher = "standalone", Teacher(args.out / "target")
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**CONFIGS[name])).train()

    def loss_of(tokens: Tensor) -> Loss:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1], use_cache=False).logits
            return distilled(logits, teacher(tokens[:, :-1])[2])

    source = partial(draft_batches, args.work, SEED + 200)
    fit(name, model, (4e-3, 6e-3), source, loss_of, args.minutes[name], args.work)
    export.save_model(name, model.state_dict(), args.out)


@torch.no_grad()
def new_head(name: str, teacher: Teacher, kept: Tensor) -> Head:
    """A head that begins near the target instead of from noise; the same one every time."""
    torch.manual_seed(SEED)
    head = (EagleHead if name == "eagle" else Eagle3Head)(CONFIGS[name])
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    if isinstance(head, EagleHead):
        width = head.fc.out_features
        head.fc.weight[:, width:] = torch.eye(width)  # at first, pass the target's state through
        head.fc.bias.zero_()
        for key, weight in head.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    else:
        head.lm_head.weight.copy_(teacher.lm_head.weight[kept])
        head.norm.weight.copy_(teacher.model.model.norm.weight)
    return head.train()


def head_stage(args: argparse.Namespace, name: str) -> None:
    """EAGLE and EAGLE-3: match the target's distribution over the draft's own vocabulary.

    EAGLE, whose vocabulary is the target's, matches the target's hidden states as well.
    """
    teacher = Teacher(args.out / "target")
    kept = torch.arange(VOCAB)
    if name == "eagle3":
        streams = [np.load(args.work / f"{n}.npy") for n in ("stream", "answers")]
        counted = [np.bincount(stream, minlength=VOCAB) for stream in streams]
        kept = frequent_tokens(counted, [1.0, 1.0], DRAFT_VOCAB)
    maps, head = export.vocabulary_maps(kept), new_head(name, teacher, kept)

    def loss_of(tokens: Tensor) -> Loss:
        tokens = tokens[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            hidden, aux, target_logits = teacher(tokens)
            best, wanted = target_logits.argmax(-1), target_logits[..., kept].float().softmax(-1)
            loss, facts = torch.zeros(()), dict[str, float]()
            inner = aux if name == "eagle3" else hidden
            for k, state in unroll(head, teacher.embed.weight, tokens, inner):
                rows = slice(k + 1, k + 1 + state.shape[1])
                logits = head.logits(state, teacher.lm_head)
                # Where the target's choice cannot be drafted there is nothing to learn.
                known = maps["t2d"][best[:, rows]].float()
                ce = soft_cross_entropy(logits, wanted[:, rows])
                step_loss = (ce * known).sum() / known.sum()
                if name == "eagle":
                    step_loss += F.smooth_l1_loss(state.float(), hidden[:, rows].float())
                loss = loss + STEP_DECAY**k * step_loss
                hit = kept[logits.argmax(-1)] == best[:, rows]
                facts[f"agree{k + 1}"] = hit.float().mean().item()
        return loss, facts

    source = partial(draft_batches, args.work, SEED + (300 if name == "eagle" else 400))
    fit(name, head, (4e-3, 4e-3), source, loss_of, args.minutes[name], args.work)
    weights = dict(head.state_dict())
    export.save_model(name, weights | maps if name == "eagle3" else weights, args.out)


def unroll(
    head: Head, embed: Tensor, tokens: Tensor, hidden: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield (k, head-ready states [B, T, D]) of UNROLL draft steps from every root at once.

    The state of root t at step k predicts token t + k + 2, so it is compared with what the target
    says at t + k + 1. T is the same for all steps: roots too near the end are left out.
    """
    rows, cache = tokens.shape[1] - UNROLL, ChainCache()
    carried = hidden[:, :rows]
    for k in range(UNROLL):
        embeds = embed[tokens[:, k + 1 : k + 1 + rows]]
        state, carried = head(embeds, carried, cache)
        yield k, state


def frequent_tokens(counted: Sequence[np.ndarray], weights: Sequence[float], size: int) -> Tensor:
    """The `size` ids, in rising order, that are most frequent in texts of these counts [V]."""
    counts = sum(w * c / c.sum() for w, c in zip(weights, counted, strict=True))
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    shares = ", ".join(f"{c[kept].sum() / c.sum():.2%}" for c in counted)
    print(f"the draft vocabulary covers {shares} of the texts")
    return torch.from_numpy(kept)


# --- the draft layer of a target of latent attention ----------------------------------------------


def mtp_stage(args: argparse.Namespace) -> None:
    """The draft layer learns what the frozen target says one token later; both are saved."""
    torch.manual_seed(SEED)
    target = mla.new_target()
    target.load_state_dict(torch.load(args.work / f"{mla.NAME}.pt", weights_only=True)["model"])
    target.eval().requires_grad_(False)
    head = mla.MtpHead(target).train().requires_grad_(True)

    def loss_of(tokens: Tensor) -> Loss:
        tokens = tokens[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            hidden, wanted = mla.states(target, tokens)
            state = head(target.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1])
            return distilled(target.lm_head(state), wanted[:, 1:])

    source = partial(crops, args.work / "stream.npy", DRAFT_BATCH, SEED + 3)
    fit("mtp", head, (4e-3, 4e-3), source, loss_of, args.minutes["mtp"], args.work)
    weights = mla.published(dict(target.state_dict())) | head.weights()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    export.save_tokenizer(tokenizer, args.out, (mla.NAME,))
    export.save_model(mla.NAME, weights, args.out)


# --- command line ---------------------------------------------------------------------------------

MINUTES = {
    "target": 28.0, "standalone": 5.0, "eagle": 5.0, "eagle3": 5.0, "mla": 14.0, "mtp": 5.0,
}  # fmt: skip
STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "corpus": corpus_stage,
    "target": target_stage,
    "answers": answers_stage,
    "standalone": standalone_stage,
    "eagle": partial(head_stage, name="eagle"),
    "eagle3": partial(head_stage, name="eagle3"),
    "mla": partial(target_stage, name=mla.NAME),
    "mtp": mtp_stage,
}


def main(argv: list[str] | None = None) -> int:
    """Run the stages asked for, in order."""
    parser = argparse.ArgumentParser(prog="python -m eval.demo_models.train", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the real text, *.jsonl")
    add("--out", type=Path, required=True, help="folder for the model folders")
    add(
        "--work", type=Path, default=Path("runs/demo_models"),
        help="folder for checkpoints; a second run goes on from them",
    )  # fmt: skip
    add("--stage", nargs="+", choices=list(STAGES), default=list(STAGES))
    add("--minutes", type=json.loads, default={}, help=f"JSON, over the defaults {MINUTES}")
    add("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    if unknown := args.minutes.keys() - MINUTES:
        parser.error(f"--minutes: {unknown.pop()} is none of {', '.join(MINUTES)}")
    args.minutes = MINUTES | args.minutes
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    for stage in args.stage:
        STAGES[stage](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
