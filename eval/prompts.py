"""Which prompts a run is measured on, and which ones a classifier learns from.

For the real pair see :mod:`eval.smollm2.prompts`. For the demo models our own generators write
most, with seeds that the models were never trained on. Public sets come from folders the caller
names, one JSON object a line with ``turns``. Knows nothing of torch or servers.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.demo_models.corpus import FAMILIES, generate
from eval.smollm2.prompts import mix, rendered


@dataclass(frozen=True)
class Prompt:
    """One request: `text` goes to the server as it is, `family` names the row of a report."""

    family: str
    text: str


def demo_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to measure on, the families taking turns: math, code, chat, math, ..."""
    return _mix("demo", n, seed)


def classifier_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to record classifier features on; none of them can come from `demo_mix`."""
    return _mix("classifier", n, seed)


def real_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to measure the real pair on, through its chat template."""
    return [Prompt(family, rendered(said)) for family, said in mix("measured", n, seed)]


def real_classifier_mix(n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts to record classifier features on; none of them can come from `real_mix`."""
    return [Prompt(family, rendered(said)) for family, said in mix("learnt", n, seed)]


def _mix(split: str, n: int, seed: int) -> list[Prompt]:
    if n < 0:
        raise ValueError(f"n must be 0 or more, got {n}.")
    turns = ((FAMILIES[i % len(FAMILIES)], i // len(FAMILIES)) for i in range(n))
    return [Prompt(f, generate(f, split, f"{seed}/{turn}").prompt) for f, turn in turns]


def _question(turn: str) -> str:
    return f"Question: {turn}\nAnswer:"


def _chat(turn: str) -> str:
    return f"User: {turn}\nAssistant:"


def _task(turn: str) -> str:
    return f"Task: {turn.splitlines()[0]}\nCode:\n"


def _tail(turn: str) -> str:
    """Questions with a passage: its end, because the models know about 256 tokens."""
    return _chat(turn[-300:])


#: Public sets by family: the file in the folder, and the shape the demo models know.
EVALUATION_SETS: dict[str, tuple[str, Callable[[str], str]]] = {
    "gsm8k": ("gsm8k_eagle80.jsonl", _question),
    "humaneval": ("humaneval.jsonl", str),
    "mt_bench": ("mt_bench.jsonl", _chat),
    "nq": ("nq_eagle80.jsonl", _chat),
}
TRAINING_SETS: dict[str, tuple[str, Callable[[str], str]]] = {
    "gsm8k_train": ("gsm8k_train.jsonl", _question),
    "mbpp": ("mbpp_train.jsonl", _task),
    "self_instruct": ("self_instruct_seed.jsonl", _chat),
    "xquad": ("xquad_en.jsonl", _tail),
}


def asked(
    sets: dict[str, tuple[str, Callable[[str], str]]],
) -> dict[str, tuple[str, Callable[[str], str]]]:
    """The same public sets as the real pair is asked: each prompt as a user's message."""
    return {name: (file, _asked) for name, (file, _) in sets.items()}


def _asked(turn: str) -> str:
    return rendered([{"role": "user", "content": turn}])


def _opening(row: dict[str, Any]) -> str:
    """The beginning of a text, up to the last blank before 200 characters."""
    text: str = row["text"]
    return text if len(text) <= 200 else text[:200].rpartition(" ")[0] or text[:200]


#: Sets beside the evaluation sets, to see whether a result holds on other prompts: the file, and
#: the prompt of one of its rows. No demo model and no classifier of ours learnt from them.
OTHER_SETS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "gsm8k_others": ("gsm8k_test.jsonl", lambda row: _question(row["turns"][0])),
    "humaneval_others": ("humaneval.jsonl", lambda row: row["turns"][0]),
    "mt_bench_second": ("mt_bench.jsonl", lambda row: _chat(row["turns"][1])),
    "algorithms": ("code_keon_algorithms.jsonl", _opening),
    "rust_book": ("rust_book.jsonl", _opening),
    "shakespeare": ("tinyshakespeare.jsonl", _opening),
}

#: Longer prompts are skipped: they would not fit the demo models' 2,048 positions.
MAX_CHARS = 4000

#: Prompts that share so many words in a row are not two.
SHARED_WORDS = 13


def public_mix(
    folder: Path, sets: dict[str, tuple[str, Callable[[str], str]]], n: int
) -> list[Prompt]:
    """The first `n` fitting prompts of each set in `folder`; ValueError for a missing file."""
    prompts = []
    for family, (name, shape) in sets.items():
        texts = (shape(row["turns"][0]) for row in _rows([folder], name, family))
        prompts += [Prompt(family, text) for text in itertools.islice(_fitting(texts), n)]
    return prompts


def other_mix(folders: Sequence[Path], n: int, apart_from: Sequence[Prompt]) -> list[Prompt]:
    """The first `n` fitting prompts of each of `OTHER_SETS`, looked for in all `folders`.

    Left out is what shares `SHARED_WORDS` words in a row with a prompt of `apart_from`.
    ValueError for a missing file.
    """
    taken = {run for prompt in apart_from for run in _runs(prompt.text)}
    prompts = []
    for family, (name, shape) in OTHER_SETS.items():
        texts = (shape(row) for row in _rows(folders, name, family))
        apart = (text for text in _fitting(texts) if taken.isdisjoint(_runs(text)))
        prompts += [Prompt(family, text) for text in itertools.islice(apart, n)]
    return prompts


def long_mix(n: int, folder: Path | None, tokens: Callable[[str], int], most: int) -> list[Prompt]:
    """``n`` prompts per family of up to ``most`` ``tokens``: solved tasks of the family, and an
    open one behind them.

    Families and open tasks are those of `demo_mix`, and of `EVALUATION_SETS` if there is a folder.
    """
    open_ones, solved = demo_mix(3 * n), {}
    if folder is not None:
        open_ones += public_mix(folder, EVALUATION_SETS, n)
        solved = {family: list(_solved_sets(family, folder)) for family in EVALUATION_SETS}
    seen: Counter[str] = Counter()
    prompts = []
    for open_one in open_ones:
        family, text = open_one.family, open_one.text
        rng = random.Random(f"{family}/{seen[family]}")
        tasks = _solved_own(family, seen[family]) if family in FAMILIES else solved[family]
        seen[family] += 1
        for task in rng.sample(tasks, len(tasks)):
            longer = f"{task}\n\n{text}"
            if task not in text and open_one.text not in task and tokens(longer) <= most:
                text = longer
        prompts.append(Prompt(family, text))
    return prompts


def _solved_own(family: str, number: int) -> list[str]:
    made = (generate(family, "demo", f"solved/{number}/{i}") for i in range(40))
    return [document.prompt + document.answer for document in made]


def _solved_sets(family: str, folder: Path) -> Iterator[str]:
    """Tasks with the answers that their set gives, if it gives any."""
    name, shape = EVALUATION_SETS[family]
    for row in _rows([folder], name, family):
        question = shape(row["turns"][0])
        answer = row.get("reference", "")
        yield question + (answer if question.endswith("\n") else f" {answer}".rstrip())


def _runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    last = max(len(words) - SHARED_WORDS, 0)
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(last + 1)}


def _fitting(texts: Iterator[str]) -> Iterator[str]:
    return (text for text in texts if len(text) <= MAX_CHARS)


def _rows(folders: Sequence[Path], name: str, family: str) -> Iterator[dict[str, Any]]:
    """Rows of the first file of that name; missing files are told before the first row."""
    found = [folder / name for folder in folders if (folder / name).is_file()]
    if not found:
        where = " or ".join(map(str, folders))
        raise ValueError(f"{where} must hold {name}, the prompts of {family}.")
    # Not splitlines(): a text may hold other line ends than its file.
    lines = found[0].read_text(encoding="utf-8").split("\n")
    return (json.loads(line) for line in lines if line)
