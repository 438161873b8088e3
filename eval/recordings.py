"""Recordings of a target and its draft, made once and kept: every root, whole chains or wide trees.

Of the demo models ``test`` prompts are measured on, ``train`` prompts are learnt from; the two
share none.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.prompts import (
    EVALUATION_SETS,
    TRAINING_SETS,
    Prompt,
    asked,
    classifier_mix,
    demo_mix,
    public_mix,
    real_mix,
)
from eval.server import DRAFTS, TARGET, Launch, running, speculative_flags
from eval.smollm2 import HEAD
from eval.terminal import console
from sglang_c2t.classifier.recording import Recording, read_recording
from sglang_c2t.classifier.request_names import name_requests
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.policies.base import TreeShape

NUM_STEPS = 10
MAX_NEW_TOKENS = 96
CONCURRENCY = 32


class Pair(NamedTuple):
    """A target and a draft model for it, in folders that SGLang loads."""

    name: str
    target: Path
    draft: Path
    algorithm: str
    env: Mapping[str, str] = {}
    """Environment of its servers."""


def demo_pair(algorithm: str) -> Pair:
    """The demo target and its draft of ``algorithm``."""
    return Pair(f"demo, {algorithm}", TARGET, DRAFTS[algorithm], algorithm)


def smollm2() -> Pair:
    """SmolLM2-135M-Instruct and our head; its target is made at first use, see there for errors."""
    from eval.smollm2.target import target_folder

    # One server at a time, with forwards of hundreds of rows: worth all cores.
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    return Pair("SmolLM2-135M-Instruct, EAGLE3", target_folder(), HEAD, "EAGLE3", threads)


class Recorded(NamedTuple):
    """Draft depth and width after every token."""

    num_steps: int
    topk: int = 1
    max_new_tokens: int = MAX_NEW_TOKENS
    concurrency: int = CONCURRENCY
    settings: Mapping[str, Any] = {}
    """Further settings of ``--c2t-config``, such as a policy that measures more."""

    @property
    def num_draft_tokens(self) -> int:
        """The root and all candidates."""
        return 1 + TreeShape(self.topk, self.num_steps, 0).num_candidates


CHAINS = Recorded(NUM_STEPS)
#: EAGLE-2's full tree, about as wide as its paper's; shorter answers, because it is 328 nodes.
TREES = Recorded(num_steps=6, topk=8, max_new_tokens=48)
#: Public sets that the real pair is asked, C2T's.
FAMILIES = ("gsm8k", "humaneval", "mt_bench")
MANIFEST = "manifest.json"

#: A STANDALONE draft behind a cached prefix depends on who cached it: SGLang's draft keeps
#: token p + 1 in slot p, and only EAGLE's cache keys tell prefixes apart by that token.
WITHOUT_PREFIX_CACHE = ("--disable-radix-cache",)


def prompts(split: str, n: int, folder: Path | None) -> list[Prompt]:
    """``n`` prompts of each family: our generators', and the public sets' if there is a folder."""
    own, sets = (demo_mix, EVALUATION_SETS) if split == "test" else (classifier_mix, TRAINING_SETS)
    return shuffled(own(3 * n) + (public_mix(folder, sets, n) if folder is not None else []))


def real_prompts(n: int, folder: Path | None) -> list[Prompt]:
    """``n`` prompts for the real pair of each family: :data:`FAMILIES` of the folder, if there is
    one, HumanEval, and whatever is ours as one family, ``own``.
    """
    sets = asked({name: EVALUATION_SETS[name] for name in FAMILIES}) if folder else {}
    found = public_mix(folder, sets, n) if folder else []
    counts = Counter(dict.fromkeys(sets, n))
    for prompt in real_mix(8 * n):  # families take turns there, and some have few
        family = prompt.family if prompt.family in FAMILIES else "own"
        counts[family] += 1
        if counts[family] <= n:
            found.append(Prompt(family, prompt.text))
    return shuffled(found)


def shuffled(mix: list[Prompt]) -> list[Prompt]:
    """The same order every time; families share batches then, as in production."""
    random.Random(0).shuffle(mix)
    return mix


def record(
    pair: Pair | str, texts: Sequence[Prompt], directory: Path, what: Recorded = CHAINS
) -> Recording:
    """The recording in ``directory``, made if it is not there; complete or absent.

    A ``pair`` that is a word is the demo draft of that algorithm. Raises ValueError when the
    recording is of other prompts, models or settings.
    """
    pair = demo_pair(pair) if isinstance(pair, str) else pair
    made_from = manifest(pair, texts, what)
    if not directory.exists():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _serve(pair, texts, partial, what)
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


def manifest(pair: Pair, texts: Sequence[Prompt], what: Recorded = CHAINS) -> dict[str, Any]:
    """Everything that a recording depends on."""
    prompts_of = json.dumps([[prompt.family, prompt.text] for prompt in texts])
    models = (pair.target / "model.safetensors", pair.draft / "model.safetensors")
    return {
        "prompts": hashlib.sha256(prompts_of.encode()).hexdigest(),
        "models": [hashlib.sha256(path.read_bytes()).hexdigest() for path in models],
        "num_steps": what.num_steps,
        "max_new_tokens": what.max_new_tokens,
        **({"topk": what.topk} if what.topk > 1 else {}),
        **({"settings": dict(what.settings)} if what.settings else {}),
    }


def named_bodies(texts: Sequence[Prompt], max_new_tokens: int) -> list[dict[str, Any]]:
    """Greedy requests whose ids say family and number."""
    numbers: Counter[str] = Counter()
    bodies = []
    for prompt in texts:
        rid = f"{prompt.family}/{numbers[prompt.family]}"
        bodies.append(greedy(prompt.text, max_new_tokens) | {"rid": rid})
        numbers[prompt.family] += 1
    return bodies


def _serve(pair: Pair, texts: Sequence[Prompt], directory: Path, what: Recorded) -> None:
    bodies = named_bodies(texts, what.max_new_tokens)
    config = directory / "config.json"
    config.write_text(
        json.dumps({
            "policy": "fixed" if what.topk == 1 else "eagle2",
            "record": str(directory.resolve()),
            "record_roots": "every",
            "record_limit_mb": 8000,
            **what.settings,
        })
    )  # fmt: skip
    flags = (
        *speculative_flags(
            pair.algorithm, what.num_steps, what.topk, what.num_draft_tokens, draft=pair.draft
        ),
        *WITHOUT_PREFIX_CACHE,
        "--c2t",
        "--c2t-config",
        str(config),
    )
    launch = Launch(f"record-{pair.algorithm}", flags, pair.target, pair.env)
    with running(launch, directory) as server, progress_on(console()) as progress:
        task = progress.add_task(f"recording {directory.name}", total=len(bodies))
        run_load(server.url, bodies, concurrency=what.concurrency,
                 on_answer=lambda: progress.advance(task))  # fmt: skip
        state = server.c2t_state()["recording"]  # writes what is pending
        if state["stopped"] or state["drafts_written"] != state["drafts"]:
            raise RuntimeError(f"recording is not complete: {state}")
        name_requests(directory, state["id_key"], [body["rid"] for body in bodies])
