"""Where the demo models' text comes from: seeded task generators and a reader of real text.

The generators (`math`, `code`, `chat`) write every sentence themselves, with the words and phrases
of `corpus.toml`, so prompts made by them may be shipped. The real text is only read at training
time, from a folder the caller names. Knows nothing of tensors, tokenizers or SGLang.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("math", "code", "chat")
SPLITS = ("train", "demo", "classifier")


@dataclass(frozen=True)
class Document:
    """One training text; the model is asked with `prompt` and should continue with `answer`."""

    family: str
    prompt: str
    answer: str


def generate(family: str, split: str, seed: str) -> Document:
    """The document of this family, split and seed; the same arguments always give the same text.

    A prompt belongs to exactly one split, by a checksum of its text: two splits can never hold the
    same prompt, however many are drawn. A draw that belongs elsewhere is drawn again.
    """
    if family not in _GENERATORS:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}.")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}.")
    # A string seed is hashed with SHA-512 by `random`, so it does not depend on PYTHONHASHSEED.
    rng = random.Random(f"{split}/{family}/{seed}")
    while True:
        document = _GENERATORS[family](rng)
        if split_of(document.prompt) == split:
            return document


def split_of(prompt: str) -> str:
    """The one split that may hold this prompt: an eighth each is kept from training."""
    return {0: "demo", 1: "classifier"}.get(zlib.crc32(prompt.encode()) % 8, "train")


_TEXTS = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text(encoding="utf-8"))


def _words(name: str) -> list[str]:
    found: list[str] = _TEXTS["words"][name].split()
    return found


NAMES, CITIES, DAYS, MONTHS = map(_words, ("names", "cities", "days", "months"))
ITEMS, BOXES, PLACES, JOBS = map(_words, ("items", "boxes", "places", "jobs"))


# --- math: short stories about a quantity, answered step by step --------------------------------

MATH = _TEXTS["math"]


def _math(rng: random.Random) -> Document:
    who, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    story, steps, value = _math_start(rng, who, item)
    if rng.random() < 0.35:
        story.insert(rng.randrange(len(story) + 1), _math_distraction(rng, who, friend))
    for _ in range(rng.choice((1, 2, 2, 3))):
        sentence, step, value = _math_event(rng, who, friend, item, value)
        story.append(sentence)
        steps.append(step)
    question, last, value = _math_question(rng, who, item, value)
    story.append(question)
    if last:
        steps.append(last)
    joined = " ".join(_with_connectives(rng, steps))
    return Document("math", f"Question: {' '.join(story)}\nAnswer:", f" {joined}\n#### {value}")


def _with_connectives(rng: random.Random, steps: list[str]) -> list[str]:
    return [rng.choice(MATH["middles" if i else "openers"]) + s for i, s in enumerate(steps)]


def _math_start(rng: random.Random, who: str, item: str) -> tuple[list[str], list[str], int]:
    a, b, k = rng.randint(6, 60), rng.randint(4, 40), rng.randint(2, 9)
    box, place, city = rng.choice(BOXES), rng.choice(PLACES), rng.choice(CITIES)
    job, (day, day2) = rng.choice(JOBS), rng.sample(DAYS, 2)
    numbers = {"a": a, "b": b, "k": k, "sum": a + b, "product": k * b}
    words = {"who": who, "item": item, "box": box, "place": place, "city": city, "job": job}
    sentence, step, value = rng.choice(MATH["starts"])
    fill = {**numbers, **words, "day": day, "day2": day2}
    return [sentence.format(**fill)], [step.format(**fill)], numbers[value]


def _math_event(
    rng: random.Random, who: str, friend: str, item: str, v: int
) -> tuple[str, str, int]:
    """A change by ``v`` things: the sentence of the story, the step of the answer, how many."""
    c, k = rng.randint(2, 30), rng.randint(2, 5)
    place, day = rng.choice(PLACES), rng.choice(DAYS)
    less = min(c, v - 1) if v > 1 else 0
    numbers = {
        "v": v, "c": c, "k": k, "less": less, "sum": v + c, "left": v - less, "times": k * v,
        "together": v + k * v,
    }  # fmt: skip
    if v % 2 == 0 and v > 2:
        numbers["half"] = v // 2
    if v % k == 0 and v // k > 1:
        numbers["share"] = v // k
    events = [event for event in MATH["events"] if numbers.get(event[1], 500) < 500]
    sentence, value, *steps = rng.choice(events)
    fill = {**numbers, "who": who, "friend": friend, "item": item, "place": place, "day": day}
    return sentence.format(**fill), rng.choice(steps).format(**fill), numbers[value]


def _math_question(rng: random.Random, who: str, item: str, v: int) -> tuple[str, str, int]:
    price, box, k = rng.randint(2, 9), rng.choice(BOXES), rng.randint(2, 9)
    simple = [[rng.choice(MATH["counts"]), "", "v"] for _ in range(2)]
    numbers = {"v": v, "price": price, "k": k, "money": v * price, "full": v // k, "rest": v % k}
    question, last, value = rng.choice([*simple, *MATH["questions"]])
    fill = {**numbers, "who": who, "item": item, "box": box}
    return question.format(**fill), last.format(**fill), numbers[value]


def _math_distraction(rng: random.Random, who: str, friend: str) -> str:
    fill = {
        "who": who, "friend": friend, "city": rng.choice(CITIES), "hours": rng.randint(2, 9),
        "age": rng.randint(7, 70), "job": rng.choice(JOBS), "place": rng.choice(PLACES),
        "month": rng.choice(MONTHS), "meeting": rng.choice(PLACES),
    }  # fmt: skip
    text: str = rng.choice(MATH["distractions"])
    return text.format(**fill)


# --- code: a small Python function made of two or three steps -----------------------------------

CODE = _TEXTS["code"]
NUMBER_NOUNS, WORD_NOUNS, RESULTS = map(_words, ("number_nouns", "word_nouns", "results"))


def _code(rng: random.Random) -> Document:
    numeric = rng.random() < 0.6
    noun = rng.choice(NUMBER_NOUNS if numeric else WORD_NOUNS)
    fill: dict[str, Any] = {"noun": noun}
    if numeric:
        a, b, k = rng.randint(2, 60), rng.randint(2, 12), rng.randint(2, 9)
        divisible = "even" if k == 2 else "divisible"
        fill |= {"a": a, "b": b, "k": k, "above": a + k, "divisible": divisible}
    else:
        k, letter, suffix = rng.randint(2, 9), rng.choice("abcdeglmnoprst"), rng.choice("_-.:!+")
        fill |= {"k": k, "letter": letter, "suffix": suffix}
    steps = "test", "change", "ending"
    ops = [rng.choice(CODE["number" if numeric else "word"][step]) for step in steps]
    verbs = [verb.format(**fill) for _, _, verb in ops]
    fill["name"] = "_".join((verbs[0], rng.choice((verbs[1], noun)), verbs[2]))
    fill["example"] = _example(rng, numeric)
    words = {step: op[0].format(**fill) for step, op in zip(steps, ops, strict=True)}
    every = words["change"].replace("each", "every one")
    task = rng.choice(CODE["tasks"]).format(**fill, **words, every=every)
    fill["r"] = rng.choice(RESULTS)
    fill["x"] = rng.choice((noun[0], "x", "item", "entry", noun.rstrip("s")))
    expressions = {step: op[1].format(**fill) for step, op in zip(steps, ops, strict=True)}
    guard = CODE["guard"].format(**fill, nothing=rng.choice(("None", "0", "[]")))
    body = rng.choice(CODE["bodies"]).format(**fill, **expressions)
    body += guard if rng.random() < 0.4 else ""
    docstring = rng.choice(CODE["docstrings"]).format(**fill, **words)
    answer = CODE["function"].format(**fill, **expressions, docstring=docstring, body=body)
    return Document("code", f"{task}\nCode:\n", answer)


def _example(rng: random.Random, numeric: bool) -> str:
    if numeric:
        return str([rng.randint(1, 90) for _ in range(rng.randint(3, 5))])
    return str([rng.choice(CITIES + ITEMS).lower() for _ in range(rng.randint(2, 4))])


# --- chat: someone asks for a booking, the assistant checks, offers and confirms ----------------

FIRST, SECOND, FOODS = map(_words, ("first", "second", "foods"))
CHAT = _TEXTS["chat"]
Slots = dict[str, str]


def _chat(rng: random.Random) -> Document:
    domain = CHAT["domains"][rng.choice(sorted(CHAT["domains"]))]
    slots = _slots(rng)
    ask = rng.choice(domain["asks"]).format(**slots)
    turns = [f"User: {rng.choice(CHAT['greetings'])}{ask}"]
    if rng.random() < 0.5:
        check, reply = (rng.choice(CHAT[name]) for name in ("checks", "replies"))
        turns += [f"Assistant: {check}", f"User: {reply.format(**slots)}"]
    parts = [rng.choice(CHAT["starts"]).format(**slots), *rng.sample(domain["offers"], 3)]
    parts.append(rng.choice(CHAT["closings"]))
    answer = " ".join(part.format(**slots) for part in parts)
    return Document("chat", "\n".join(turns) + "\nAssistant:", " " + answer)


def _slots(rng: random.Random) -> Slots:
    """Values for the blanks of a dialogue; all of them are drawn so that templates may use any."""
    place, other = (f"{rng.choice(FIRST)} {rng.choice(SECOND)}" for _ in range(2))
    (city, city2), (day, day2) = rng.sample(CITIES, 2), rng.sample(DAYS, 2)
    return {
        "who": rng.choice(NAMES),
        "friend": rng.choice(NAMES),
        "city": city,
        "city2": city2,
        "day": day,
        "day2": day2,
        "place": place,
        "other": other,
        "time": _time(rng, ("00", "15", "30", "45")),
        "time2": _time(rng, ("00", "10", "20", "40")),
        "n": str(rng.randint(2, 9)),
        "price": str(rng.randint(12, 240)),
        "job": rng.choice(JOBS),
        "rating": f"{rng.randint(3, 4)}.{rng.randint(0, 9)}",
        "month": rng.choice(MONTHS),
        "date": str(rng.randint(1, 30)),
        "near": rng.choice(PLACES),
        "near2": rng.choice(PLACES),
        "food": rng.choice(FOODS),
        "car": rng.choice(CHAT["cars"]),
        "phone": f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}",
    }


def _time(rng: random.Random, minutes: tuple[str, ...]) -> str:
    return f"{rng.randint(1, 11)}:{rng.choice(minutes)} {rng.choice(('am', 'pm'))}"


_GENERATORS: dict[str, Callable[[random.Random], Document]] = {
    "math": _math,
    "code": _code,
    "chat": _chat,
}


# --- real text, read from the folder the caller names -------------------------------------------

PIECE_CHARS = 700  # about 256 tokens of the demo vocabulary


def real_documents(data: Path) -> Iterator[Document]:
    """Training text from `data`/*.jsonl in the shapes of the generated families, where they fit."""
    if not (data / "gsm8k_train.jsonl").is_file():
        raise ValueError(f"data must be a folder with gsm8k_train.jsonl and others, got {data}.")
    yield from _gsm8k(data)
    yield from _dialogues(data)
    yield from _instructions(data)
    for name in ("tldr_pages", "code_thealgorithms", "public_domain_books"):
        for row in _rows(data, name):
            for piece in _pieces(row["text"]):
                yield Document(name, "", piece)


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    with open(data / f"{name}.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _gsm8k(data: Path) -> Iterator[Document]:
    for row in _rows(data, "gsm8k_train"):
        answer = re.sub(r"<<[^>]*>>", "", row["reference"])
        yield Document("gsm8k_train", f"Question: {row['turns'][0]}\nAnswer:", f" {answer}")


def _dialogues(data: Path) -> Iterator[Document]:
    """Windows of two to eight turns that end with the assistant, as the `chat` family does."""
    rng = random.Random("windows")
    for row in _rows(data, "sgd_dialogues"):
        turns = row["text"].split("\n")
        start = 0
        while start + 1 < len(turns):
            size = 2 * rng.randint(1, 4)
            window = turns[start : start + size]
            start += size
            if len(window) % 2 == 0:
                yield Document("sgd_dialogues", "\n".join(window), "")


def _instructions(data: Path) -> Iterator[Document]:
    for row in _rows(data, "dolly_15k"):
        question, answer = row["turns"][0], row["reference"]
        if len(question) + len(answer) <= PIECE_CHARS:
            yield Document("dolly_15k", f"User: {question}\nAssistant:", f" {answer}")


def _pieces(text: str) -> Iterator[str]:
    """Cut at line ends so that no piece is longer than PIECE_CHARS, unless one line is."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE_CHARS:
            yield piece.strip("\n")
            piece = ""
        piece += line
    if piece.strip():
        yield piece.strip("\n")
