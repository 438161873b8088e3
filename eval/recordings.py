"""Recordings of the demo models, made once and kept: every root, whole chains or wide trees.

``test`` prompts are measured on, ``train`` prompts are learnt from; the two share none.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.prompts import (
    EVALUATION_SETS,
    TRAINING_SETS,
    Prompt,
    classifier_mix,
    demo_mix,
    long_mix,
    other_mix,
    public_mix,
)
from eval.server import DRAFTS, TARGET, Launch, running, speculative_flags
from eval.terminal import console
from sglang_c2t.classifier.recording import Recording, read_recording
from sglang_c2t.classifier.request_names import name_requests
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.policies.base import TreeShape

NUM_STEPS = 10
MAX_NEW_TOKENS = 96
CONCURRENCY = 32


class Recorded(NamedTuple):
    """What is drafted behind every token."""

    num_steps: int
    topk: int = 1
    max_new_tokens: int = MAX_NEW_TOKENS
    ignore_eos: bool = False
    """Whether answers go on behind their end, so that all are as long."""

    concurrency: int = CONCURRENCY

    @property
    def num_draft_tokens(self) -> int:
        """The root and all candidates."""
        return 1 + TreeShape(self.topk, self.num_steps, 0).num_candidates


CHAINS = Recorded(NUM_STEPS)
#: EAGLE-2's full tree, about as wide as its paper's; shorter answers, because it is 328 nodes.
TREES = Recorded(num_steps=6, topk=8, max_new_tokens=48)
#: Tokens of a long prompt, at most; the demo models have room for 2,048 with their answer and tree.
LONG_PROMPT = 1500

#: Behind answers that are far longer than the demo models' training texts, 256 tokens.
LONG_ANSWERS = TREES._replace(max_new_tokens=512, ignore_eos=True, concurrency=4)
MANIFEST = "manifest.json"

#: A STANDALONE draft behind a cached prefix depends on who cached it: SGLang's draft keeps
#: token p + 1 in slot p, and only EAGLE's cache keys tell prefixes apart by that token.
WITHOUT_PREFIX_CACHE = ("--disable-radix-cache",)


def prompts(split: str, n: int, folder: Path | None) -> list[Prompt]:
    """``n`` prompts of each family: our generators', and the public sets' if there is a folder."""
    own, sets = (demo_mix, EVALUATION_SETS) if split == "test" else (classifier_mix, TRAINING_SETS)
    return _shuffled(own(3 * n) + (public_mix(folder, sets, n) if folder is not None else []))


def long_prompts(n: int, folder: Path | None) -> list[Prompt]:
    """``n`` test prompts of each family behind solved tasks, `LONG_PROMPT` tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return _shuffled(long_mix(n, folder, lambda text: len(tokenizer.encode(text)), LONG_PROMPT))


def other_prompts(n: int, folders: Sequence[Path], apart_from: Sequence[Prompt]) -> list[Prompt]:
    """``n`` prompts of each set that neither tables nor classifiers use otherwise."""
    return _shuffled(other_mix(folders, n, apart_from))


def _shuffled(mix: list[Prompt]) -> list[Prompt]:
    random.Random(0).shuffle(mix)  # families share batches, as in production
    return mix


def record(
    algorithm: str, texts: Sequence[Prompt], directory: Path, what: Recorded = CHAINS
) -> Recording:
    """The recording in ``directory``, made if it is not there; complete or absent.

    Raises ValueError when it is of other prompts, models or settings.
    """
    made_from = manifest(algorithm, texts, what)
    if not directory.exists():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _serve(algorithm, texts, partial, what)
        (partial / MANIFEST).write_text(json.dumps(made_from, indent=2) + "\n")
        partial.rename(directory)
    found = directory / MANIFEST
    if not found.is_file() or json.loads(found.read_text()) != made_from:
        raise ValueError(
            f"{directory} holds a recording of other prompts, models or settings: delete it, or "
            "choose another folder."
        )
    recording = read_recording(directory)
    known = [rid.count("/") == 1 for rid in recording.requests]  # the server's warm-up is not ours
    mask = [known[request] for request in recording.drafts["request"].tolist()]
    return recording.select(recording.drafts["request"].new_tensor(mask).bool())


def manifest(algorithm: str, texts: Sequence[Prompt], what: Recorded = CHAINS) -> dict[str, Any]:
    """What a recording depends on."""
    prompts_of = json.dumps([[prompt.family, prompt.text] for prompt in texts])
    models = (TARGET / "model.safetensors", DRAFTS[algorithm] / "model.safetensors")
    return {
        "prompts": hashlib.sha256(prompts_of.encode()).hexdigest(),
        "models": [hashlib.sha256(path.read_bytes()).hexdigest() for path in models],
        "num_steps": what.num_steps,
        "max_new_tokens": what.max_new_tokens,
        **({"topk": what.topk} if what.topk > 1 else {}),
        **({"ignore_eos": True} if what.ignore_eos else {}),
    }


def named_bodies(
    texts: Sequence[Prompt], max_new_tokens: int, *, ignore_eos: bool = False
) -> list[dict[str, Any]]:
    """Greedy requests whose ids say family and number."""
    numbers: Counter[str] = Counter()
    bodies = []
    for prompt in texts:
        rid = f"{prompt.family}/{numbers[prompt.family]}"
        body = greedy(prompt.text, max_new_tokens) | {"rid": rid}
        body["sampling_params"] |= {"ignore_eos": True} if ignore_eos else {}
        bodies.append(body)
        numbers[prompt.family] += 1
    return bodies


def _serve(algorithm: str, texts: Sequence[Prompt], directory: Path, what: Recorded) -> None:
    bodies = named_bodies(texts, what.max_new_tokens, ignore_eos=what.ignore_eos)
    chains = what.topk == 1  # of trees there are many nodes: only what every rule reads
    extra = ["topk_prob", "entropy_top100", "entropy_top500"] if chains else []
    extra += ["hidden"] if chains and algorithm != "STANDALONE" else []
    config = directory / "config.json"
    config.write_text(
        json.dumps({
            "policy": "fixed" if chains else "eagle2",
            "record": str(directory.resolve()),
            "record_roots": "every",
            "record_extra": extra,
            "record_limit_mb": 8000,
        })
    )  # fmt: skip
    flags = (
        *speculative_flags(algorithm, what.num_steps, what.topk, what.num_draft_tokens),
        *WITHOUT_PREFIX_CACHE,
        "--c2t",
        "--c2t-config",
        str(config),
    )
    with (
        running(Launch(f"record-{algorithm}", flags), directory) as server,
        progress_on(console()) as progress,
    ):
        task = progress.add_task(f"recording {directory.name}", total=len(bodies))
        run_load(server.url, bodies, concurrency=what.concurrency,
                 on_answer=lambda: progress.advance(task))  # fmt: skip
        state = server.c2t_state()["recording"]  # writes what is pending
        if state["stopped"] or state["drafts_written"] != state["drafts"]:
            raise RuntimeError(f"recording is not complete: {state}")
        name_requests(directory, state["id_key"], [body["rid"] for body in bodies])
