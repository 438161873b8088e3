r"""The mixed batch of a benchmark: where its prompts come from, and in which order they are sent.

A part of the batch has one of four sources:

    own:chat                   questions of our own, see :mod:`eval.smollm2.prompts`
    demo:math                  what the demo models know (math, code, chat)
    prompts/mine.jsonl         a prompt file, see :mod:`sglang_c2t.offline.prompts`
    gsm8k                      a public set of public_sets.toml: looked for in a local folder, then
                               in an installed package, in the Hugging Face cache and on the hub

Prompts to a model with a chat template are sent as one user message. A part's ``template``
overrides that: ``raw`` sends the text as it is, ``Question: {prompt}\nAnswer:`` wraps it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.bench.config import DatasetConfig, PartConfig, build
from eval.demo_models.corpus import FAMILIES
from eval.prompts import demo_mix
from eval.smollm2 import prompts as real
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.prompts import PromptRow, read_prompts

RAW = "raw"

#: Public sets that packages of the Python index hold.
PACKAGED = {"humaneval": real.humaneval, "sharegpt": real.sharegpt}


@dataclass(frozen=True)
class Hub:
    """Where the Hugging Face hub has a set; ``text`` is a column of it, or one of ``MESSAGES``."""

    path: str
    split: str
    text: str
    config: str | None = None

    def message(self, row: Mapping[str, Any]) -> str:
        """A row as a user's message."""
        return MESSAGES[self.text](row) if self.text in MESSAGES else str(row[self.text])


@dataclass(frozen=True)
class PublicSet:
    """A set by name. ``sha256`` is that of its prompts, see :func:`prompts_sha256`."""

    family: str
    files: tuple[str, ...]
    count: int
    sha256: str | None = None
    hub: Hub | None = None
    origin: str = ""


def _instruction(row: Mapping[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else str(row["instruction"])


MESSAGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "first turn": lambda row: str(row["prompt"][0]),
    "instruction with input": _instruction,
    "article": lambda row: f"Summarize the following news article.\n\n{row['article']}",
}


def _public_sets() -> dict[str, PublicSet]:
    text = Path(__file__).with_name("public_sets.toml").read_text(encoding="utf-8")
    return build(dict[str, PublicSet], tomllib.loads(text))


PUBLIC = _public_sets()


@dataclass(frozen=True)
class Sample:
    """One prompt of the batch: ``prompt`` is a text, or token ids where a template made them."""

    family: str
    prompt: str | list[int]
    prompt_len: int  # tokens


@dataclass(frozen=True)
class Dataset:
    """The batch in the order of sending, and what run.json says of it."""

    samples: list[Sample]
    facts: dict[str, Any]


def load(config: DatasetConfig, tokenizer: Any, folders: Sequence[Path]) -> Dataset:
    """Read, check, draw and interleave all parts; :class:`ConfigError` says what is missing."""
    drawn, facts = [], []
    for part in config.parts:
        rows, where = rows_of(part, config.seed, folders)
        found = check(part.source, rows, where)
        drawn.append(draw(part, rows, config, tokenizer))
        families = ", ".join(sorted({sample.family for sample in drawn[-1]}))
        facts.append({"name": part.source, "family": families, "n": part.n, "count": len(rows),
                      "sha256": found, "source": where})  # fmt: skip
    samples = interleaved(drawn, config.seed)
    parts = " + ".join(f"{part.n} {part.source}" for part in config.parts)
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.family, sample.prompt]).encode() + b"\0")
    sha256 = digest.hexdigest()
    return Dataset(samples, {"name": parts, "n": len(samples), "sha256": sha256, "parts": facts})


# -- sources --------------------------------------------------------------------------------


def rows_of(part: PartConfig, seed: int, folders: Sequence[Path]) -> tuple[list[PromptRow], str]:
    """All prompts of a source, and where they came from."""
    kind, _, family = part.source.rpartition(":")
    if kind == "demo" and family in FAMILIES:
        mix = demo_mix(part.n * len(FAMILIES), seed)
        return [PromptRow(family, text=o.text) for o in mix if o.family == family], "our generator"
    if kind == "own" and family in real.OWN:  # nothing learns from these
        found = itertools.islice(real.conversations(family, "measured", seed), part.n)
        return [PromptRow(family, messages=list(said)) for said in found], "our own"
    if part.source.endswith(".jsonl"):
        return read_prompts(part.source), part.source
    if part.source in PUBLIC:
        return _public(part.source, folders)
    own = [f"demo:{name}" for name in FAMILIES] + [f"own:{name}" for name in real.OWN]
    raise ConfigError(
        f"dataset source {part.source!r} is unknown; give a .jsonl file, one of our "
        f"own ({', '.join(own)}) or one of {', '.join(PUBLIC)}"
    )


def _public(name: str, folders: Sequence[Path]) -> tuple[list[PromptRow], str]:
    wanted = PUBLIC[name]
    for path in (folder / file for folder in folders for file in wanted.files):
        if path.is_file():
            return [replace(row, group=wanted.family) for row in read_prompts(path)], str(path)
    looked = ", ".join(map(str, folders)) or "no folder (give one with --data)"
    missing = f"dataset {name} was not found. Looked for {' or '.join(wanted.files)} in {looked}. "
    if name in PACKAGED:
        try:
            said = PACKAGED[name]()
            return [PromptRow(wanted.family, messages=list(one)) for one in said], "a package"
        except real.PackageError as error:
            missing += f"And {error}. "
    if wanted.hub is None:
        raise ConfigError(f"{missing}Download it from {wanted.origin}.")
    try:
        return _from_hub(wanted.hub, wanted.family), f"huggingface.co/datasets/{wanted.hub.path}"
    except Exception as error:  # whatever the libraries below raise, it means: not there
        raise ConfigError(
            f"{missing}Nor could the Hugging Face cache or hub give {wanted.hub.path} "
            f"({type(error).__name__}: {str(error)[:200]}). Put the file into a folder and name "
            f"it with --data, or run `hf download --repo-type dataset {wanted.hub.path}` where "
            "the hub can be reached."
        ) from error


def _from_hub(hub: Hub, family: str) -> list[PromptRow]:
    """Rows of a set on the hub; its cached copy where the hub cannot be reached."""
    import datasets  # type: ignore[import-untyped]

    download = datasets.DownloadConfig(max_retries=1)
    rows = datasets.load_dataset(hub.path, hub.config, split=hub.split, download_config=download)
    texts = (hub.message(row) for row in rows)
    return [PromptRow(family, messages=[{"role": "user", "content": text}]) for text in texts]


# -- checks ---------------------------------------------------------------------------------


def check(name: str, rows: Sequence[PromptRow], where: str) -> str:
    """The hash of the prompts; ConfigError for a public set in another version."""
    found, known = prompts_sha256(rows), PUBLIC.get(name)
    if known and len(rows) != known.count:
        wrong = f"has {len(rows)} prompts, expected {known.count}"
    elif known and known.sha256 not in (None, found):
        wrong = f"has prompts of sha256 {found}, expected {known.sha256}"
    else:
        return found
    raise ConfigError(
        f"dataset {name} from {where} {wrong}. Get the published file, or name yours as a .jsonl "
        "source."
    )


def prompts_sha256(rows: Iterable[PromptRow]) -> str:
    r"""SHA-256 of the prompts in their order, whoever packed them.

    Each prompt, stripped and with ``\n`` line ends, in UTF-8, followed by a zero byte.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(content(row).replace("\r\n", "\n").strip().encode() + b"\0")
    return digest.hexdigest()


def content(row: PromptRow) -> str:
    """The user's text, or all messages joined."""
    if row.text is not None:
        return row.text
    return "\n\n".join(str(message.get("content", "")) for message in row.messages or ())


# -- the batch ------------------------------------------------------------------------------


def draw(
    part: PartConfig, rows: Sequence[PromptRow], config: DatasetConfig, tokenizer: Any
) -> list[Sample]:
    """The first ``n`` prompts of a seeded order that are short enough."""
    order = list(rows)
    random.Random(f"{config.seed}/{part.source}").shuffle(order)
    samples = (sample(part, row, tokenizer) for row in order)
    fitting = (one for one in samples if one.prompt_len <= config.max_prompt_tokens)
    drawn = list(itertools.islice(fitting, part.n))
    if len(drawn) < part.n:
        raise ConfigError(
            f"dataset {part.source} has {len(drawn)} prompts of at most "
            f"{config.max_prompt_tokens} tokens, n asks for {part.n}: lower n or raise "
            "dataset.max_prompt_tokens"
        )
    return drawn


def sample(part: PartConfig, row: PromptRow, tokenizer: Any) -> Sample:
    """A prompt as it is sent."""
    if part.template or row.messages is None:
        text = shaped(part.template, content(row))
        return Sample(row.group, text, len(tokenizer.encode(text)))
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the model has no chat template for the messages of dataset {part.source}: give "
            f'this part a template, such as template = "{RAW}"'
        )
    ids = tokenizer.apply_chat_template(
        real.harmless(row.messages, tokenizer),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return Sample(row.group, list(ids), len(ids))


def shaped(template: str, text: str) -> str:
    """The text as the template wants it."""
    if template in ("", RAW):
        return text
    if "{prompt}" in template:
        return template.replace("{prompt}", text)
    raise ConfigError(f"template {template!r} is neither {RAW!r} nor a text with {{prompt}} in it")


def interleaved(parts: Sequence[Sequence[Sample]], seed: int) -> list[Sample]:
    """All parts as one batch, of which every stretch holds them in about their proportions.

    Prompt k of n belongs somewhere in [k/n, (k+1)/n) of the batch; a seeded draw says where.
    """
    rng = random.Random(f"{seed}/order")
    placed = [
        ((k + rng.random()) / len(part), number, one)
        for number, part in enumerate(parts)
        for k, one in enumerate(part)
    ]
    placed.sort(key=lambda item: item[:2])
    return [one for _, _, one in placed]
