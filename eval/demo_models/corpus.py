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
    openers = ("First, ", "To start, ", "At first, ", "")
    middles = ("Then ", "After that, ", "Next, ", "Now ", "So ", "Later, ")
    return [rng.choice(openers if i == 0 else middles) + step for i, step in enumerate(steps)]


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
    plain = (
        f"How many {item} are there now?",
        f"How many {item} does {who} have in the end?",
        f"What is the number of {item} now?",
    )
    kinds = [
        (rng.choice(plain), "", v),
        (rng.choice(plain), "", v),
        (
            f"If {who} sells each of them for ${price}, how much money is that?",
            f"at ${price} each, {who} gets {v} * {price} = ${v * price}.",
            v * price,
        ),
        (
            f"With {k} {item} in every {box}, how many {box}s are full?",
            f"{v} {item} fill {v // k} {box}s of {k}, with {v % k} left over.",
            v // k,
        ),
    ]
    return rng.choice(kinds)


def _math_distraction(rng: random.Random, who: str, friend: str) -> str:
    kinds = (
        f"The trip to {rng.choice(CITIES)} takes {rng.randint(2, 9)} hours.",
        f"{friend} is {rng.randint(7, 70)} years old.",
        f"{who} works as a {rng.choice(JOBS)} near the {rng.choice(PLACES)}.",
        f"It is {rng.choice(MONTHS)}, and {friend} waits at the {rng.choice(PLACES)}.",
    )
    return rng.choice(kinds)


# --- code: a small Python function made of two or three steps -----------------------------------

NUMBER_NOUNS, WORD_NOUNS, RESULTS = map(_words, ("number_nouns", "word_nouns", "results"))
Op = tuple[str, str, str]  # words of the task, Python expression over {x}, verb for the name


def _code(rng: random.Random) -> Document:
    numeric = rng.random() < 0.6
    noun = rng.choice(NUMBER_NOUNS if numeric else WORD_NOUNS)
    test, change, ending = (_number_ops if numeric else _word_ops)(rng, noun)
    name = "_".join((test[2], rng.choice((change[2], noun)), ending[2]))
    example = _example(rng, numeric)
    task = _code_task(rng, name, noun, (test, change, ending), example)
    body = _code_body(rng, noun, (test, change, ending))
    docstring = rng.choice(
        (
            f"Return {ending[0]} of the {noun} that {test[0]}, {change[0]}.",
            f"Take the {noun} that {test[0]}, {change[0]}, and give {ending[0]}.",
            f"For all {noun} that {test[0]}: {change[0]}. Then return {ending[0]}.",
        )
    )
    lines = [
        f"def {name}({noun}):",
        f'    """{docstring}"""',
        *body,
        "",
        f"print({name}({example}))",
    ]
    return Document("code", f"{task}\nCode:\n", "\n".join(lines))


def _code_task(rng: random.Random, name: str, noun: str, ops: tuple[Op, Op, Op], ex: str) -> str:
    test, change, ending = ops
    return rng.choice(
        (
            f"Task: Write `{name}` in Python. Keep the {noun} that {test[0]}, {change[0]}, and "
            f"return {ending[0]}. Try it on {ex}.",
            f"Task: I have a list of {noun} such as {ex}. Please write a function `{name}` for "
            f"those that {test[0]}. It should {change[0].replace('each', 'every one')} and return "
            f"{ending[0]}.",
            f"Task: Given {noun}, return {ending[0]} after you {change[0]}. Use only {noun} that "
            f"{test[0]}. Call the function `{name}` and show it with {ex}.",
        )
    )


def _number_ops(rng: random.Random, noun: str) -> tuple[Op, Op, Op]:
    a, b, k = rng.randint(2, 60), rng.randint(2, 12), rng.randint(2, 9)
    tests: list[Op] = [
        (f"are above {a}", f"{{x}} > {a}", "large"),
        (f"are below {a}", f"{{x}} < {a}", "small"),
        (f"can be divided by {k}", f"{{x}} % {k} == 0", "even" if k == 2 else "divisible"),
        (f"are not {a}", f"{{x}} != {a}", "other"),
        (f"lie between {k} and {a + k}", f"{k} <= {{x}} <= {a + k}", "between"),
    ]
    changes: list[Op] = [
        (f"multiply each by {b}", f"{{x}} * {b}", "scaled"),
        (f"add {b} to each", f"{{x}} + {b}", "shifted"),
        (f"subtract each from {a}", f"{a} - {{x}}", "reversed"),
        ("square each of them", "{x} ** 2", "squared"),
        (f"divide each by {k}", f"{{x}} / {k}", "divided"),
    ]
    endings: list[Op] = [
        ("the sum", "sum({r})", "sum"),
        ("the largest", "max({r})", "max"),
        ("the smallest", "min({r})", "min"),
        ("how many there are", "len({r})", "count"),
        ("them in sorted order", "sorted({r})", "sorted"),
        (f"the first {k}", f"{{r}}[:{k}]", "first"),
        ("the mean", "sum({r}) / len({r})", "mean"),
    ]
    return rng.choice(tests), rng.choice(changes), rng.choice(endings)


def _word_ops(rng: random.Random, noun: str) -> tuple[Op, Op, Op]:
    k, letter, suffix = rng.randint(2, 9), rng.choice("abcdeglmnoprst"), rng.choice("_-.:!+")
    tests: list[Op] = [
        (f"start with '{letter}'", f"{{x}}.startswith('{letter}')", f"{letter}"),
        (f"contain '{letter}'", f"'{letter}' in {{x}}", "with"),
        (f"have more than {k} letters", f"len({{x}}) > {k}", "long"),
        (f"are shorter than {k} letters", f"len({{x}}) < {k}", "short"),
        (f"end in '{letter}'", f"{{x}}.endswith('{letter}')", "ending"),
    ]
    changes: list[Op] = [
        ("put each in upper case", "{x}.upper()", "upper"),
        ("reverse each of them", "{x}[::-1]", "reversed"),
        (f"add '{suffix}' to each", f"{{x}} + '{suffix}'", "marked"),
        (f"cut each after {k} letters", f"{{x}}[:{k}]", "cut"),
        ("take the length of each", "len({x})", "lengths"),
    ]
    endings: list[Op] = [
        ("them as a list", "{r}", "list"),
        ("them without doubles", "set({r})", "set"),
        ("the last one", "{r}[-1]", "last"),
        ("how many there are", "len({r})", "count"),
        ("them in sorted order", "sorted({r})", "sorted"),
        (f"the first {k}", f"{{r}}[:{k}]", "first"),
    ]
    return rng.choice(tests), rng.choice(changes), rng.choice(endings)


def _example(rng: random.Random, numeric: bool) -> str:
    if numeric:
        return str([rng.randint(1, 90) for _ in range(rng.randint(3, 5))])
    return str([rng.choice(CITIES + ITEMS).lower() for _ in range(rng.randint(2, 4))])


def _code_body(rng: random.Random, noun: str, ops: tuple[Op, Op, Op]) -> list[str]:
    r, x = rng.choice(RESULTS), rng.choice((noun[0], "x", "item", "entry", noun.rstrip("s")))
    test, change, ending = (op[1].format(x=x, r=r) for op in ops)
    loop = [
        f"    {r} = []",
        f"    for {x} in {noun}:",
        f"        if {test}:",
        f"            {r}.append({change})",
    ]
    skip = [
        f"    {r} = []",
        f"    for {x} in {noun}:",
        f"        if not ({test}):",
        "            continue",
        f"        {r}.append({change})",
    ]
    short = [f"    {r} = [{change} for {x} in {noun} if {test}]"]
    guard = [f"    if not {r}:", f"        return {rng.choice(('None', '0', '[]'))}"]
    body = rng.choice((loop, skip, short))
    return body + (guard if rng.random() < 0.4 else []) + [f"    return {ending}"]


# --- chat: someone asks for a booking, the assistant checks, offers and confirms ----------------

FIRST, SECOND, FOODS = map(_words, ("first", "second", "foods"))
CHAT = _TEXTS["chat"]
Slots = dict[str, str]


def _chat(rng: random.Random) -> Document:
    domain = CHAT["domains"][rng.choice(sorted(CHAT["domains"]))]
    slots = _slots(rng)
    ask = rng.choice(domain["asks"]).format(**slots)
    turns = [f"User: {_greeting(rng)}{ask}"]
    if rng.random() < 0.5:
        check, reply = (rng.choice(CHAT[name]) for name in ("checks", "replies"))
        turns += [f"Assistant: {check}", f"User: {reply.format(**slots)}"]
    parts = [rng.choice(CHAT["starts"]).format(**slots), *rng.sample(domain["offers"], 3)]
    parts.append(rng.choice(CHAT["closings"]))
    answer = " ".join(part.format(**slots) for part in parts)
    return Document("chat", "\n".join(turns) + "\nAssistant:", " " + answer)


def _greeting(rng: random.Random) -> str:
    return rng.choice(("Hi, ", "Hello, ", "", "", "Good morning, ", "Hey, ", "Excuse me, "))


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
