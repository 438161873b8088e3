"""Training data of the head: the target's own answers, and its hidden states.

    python -m eval.smollm2.answers --data DIR --work runs/smollm2 --minutes 40

Prompts are of the training text alone, no prompt of an evaluation set is among them. Half are
answered greedily, half sampled. A second run goes on from the last answer of the first.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoTokenizer, LlamaForCausalLM

from eval.demo_models.train import replies
from eval.smollm2.prompts import Conversation, ask
from eval.smollm2.target import target_folder

SEED = 0
BATCH, LONGEST, NEW_TOKENS = 64, 640, 128
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.7, 1.0)

#: Layers whose outputs the head reads. Kept besides is the state that the target's own head reads.
AUX_LAYERS = (2, 15, 27)

#: Prompts by family, at most so many. Chat is hardest to draft, so it is most of them.
SHARES = {
    "chat": 5200,
    "math": 2200,
    "code": 2200,
    "passages": 700,
    "dialogues": 400,
    "writing": 700,
    "tasks": 2800,
}

FORMS = (
    "short story", "poem", "formal email", "blog post", "dialogue", "speech", "outline", "review",
    "list of ten ideas", "letter to a friend", "news report", "plan for a week",
)  # fmt: skip
ORDERS = (
    "Write a {form} about {topic}.",
    "Compose a {form} on {topic} for a reader who knows nothing of it. Keep it under 200 words.",
    "I need a {form} about {topic}. Make it lively.",
    "Explain the advantages and drawbacks of {topic}, as a {form}.",
)
TASKS = (
    "Summarize this text in two sentences.\n\n{text}",
    "What are the key points of the following?\n\n{text}",
    "Say in simple words what this text is about.\n\n{text}",
    "{text}\n\nList all names in this text, and what is said about each.",
    "{text}\n\nWhich dates and numbers are in this text? Make a table.",
    "{text}\n\nGive the most important facts as JSON.",
)
LANGUAGES = ("French", "Spanish", "German", "Italian")
CODE_ORDERS = ("Complete the code I provided.\n\n", "Complete this Python function:\n\n", "",
               "Finish the following function. Answer with code only.\n\n")  # fmt: skip


def training_prompts(data: Path) -> list[tuple[str, Conversation]]:
    """Family and conversation of each prompt, families mixed, the same order every time."""
    rng = random.Random(SEED)
    families: dict[str, list[Conversation]] = {
        "chat": [ask(t) for t in _turns(data, "dolly_15k") + _turns(data, "self_instruct_seed")],
        "math": [ask(t) for t in _turns(data, "gsm8k_train")],
        "code": [ask(t) for t in _turns(data, "mbpp_train")]
        + [ask(rng.choice(CODE_ORDERS) + head) for head in _functions(data)],
        "passages": [ask(rng.choice(("", "Read this.\n\n")) + t) for t in _turns(data, "xquad_en")],
        "dialogues": [_dialogue(row["text"], rng) for row in read_rows(data, "sgd_dialogues")],
        "writing": [ask(text) for text in _writing(data, rng)],
        "tasks": [ask(text) for text in _tasks(data, rng)],
    }
    mixed = []
    for family, most in SHARES.items():
        rng.shuffle(families[family])
        short = (c for c in families[family] if sum(len(m["content"]) for m in c) < 1400)
        mixed += [(family, conversation) for conversation in islice(short, most)]
    rng.shuffle(mixed)
    return mixed


def read_rows(data: Path, name: str) -> list[dict[str, Any]]:
    """All of a file of the training text."""
    return [json.loads(line) for line in (data / f"{name}.jsonl").open(encoding="utf-8")]


def _turns(data: Path, name: str) -> list[str]:
    return [row["turns"][0] for row in read_rows(data, name)]


def _functions(data: Path) -> Iterator[str]:
    """Signature and docstring of each documented function."""
    for row in read_rows(data, "code_thealgorithms"):
        try:
            tree = ast.parse(row["text"])
        except SyntaxError:
            continue
        lines = row["text"].splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                end = node.body[0].end_lineno or 0
                yield "\n".join(lines[node.lineno - 1 : end]) + "\n"


def _dialogue(text: str, rng: random.Random) -> Conversation:
    """The first turns of a dialogue, up to one of the user's."""
    turns = [line.split(": ", 1) for line in text.splitlines() if ": " in line]
    users = [i for i, (who, _) in enumerate(turns) if who == "User"]
    end = rng.choice(users[:4]) + 1 if users else 0
    return [{"role": who.lower(), "content": said} for who, said in turns[:end]]


def _writing(data: Path, rng: random.Random) -> Iterator[str]:
    """Orders of our own; topics are places, commands, and titles of the training text."""
    topics = [row["text"].split("\n")[0] for row in read_rows(data, "world_factbook")]
    topics += [
        row["text"].split("\n")[1].removeprefix("Title: ") for row in read_rows(data, "python_peps")
    ]
    topics += 12 * [
        "the sea", "winter", "a lost key", "working from home", "bicycles", "sleep", "tea", "chess",
        "public libraries", "rain", "a city of the future", "friendship",
    ]  # fmt: skip
    for topic in topics:
        yield rng.choice(ORDERS).format(form=rng.choice(FORMS), topic=topic)


def _tasks(data: Path, rng: random.Random) -> Iterator[str]:
    """Orders of our own about passages of the training text, and sentences of it to translate."""
    texts = {turn.split("\n\nQuestion:")[0] for turn in _turns(data, "xquad_en")}
    texts |= {
        line.removeprefix("Background: ")
        for row in read_rows(data, "world_factbook")
        for line in row["text"].split("\n")
        if line.startswith("Background: ")
    }
    for text in sorted(text for text in texts if len(text) < 1200):
        for order in rng.sample(TASKS, 4):
            yield order.format(text=text)
        sentences = [found for found in re.split(r"(?<=[.?!]) ", text) if 30 < len(found) < 150]
        for sentence in rng.sample(sentences, min(2, len(sentences))):
            yield f"Translate this sentence to {rng.choice(LANGUAGES)}.\n\n{sentence}"


# --- the target ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A prompt and the temperature of its answer; ``key`` numbers the prompt."""

    key: int
    prompt: Sequence[int]
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """``tokens`` [N] of prompt and answer; ``states`` [N - 1, S * D], none of the last token."""

    request: Request
    tokens: Tensor
    states: Tensor


def load_target(folder: Path) -> LlamaForCausalLM:
    """The target in bfloat16, frozen."""
    # Decoding 64 rows on a CPU takes two thirds of the time with eager attention.
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@torch.no_grad()
def read(
    model: LlamaForCausalLM, request: Request, reply: Sequence[int],
    aux_layers: Sequence[int] = AUX_LAYERS,
) -> Answer:  # fmt: skip
    """The target's states while it reads a prompt and a reply."""
    tokens = torch.tensor([*request.prompt, *reply])
    out = model.model(tokens[None, :-1], use_cache=False, output_hidden_states=True)
    kept = [out.hidden_states[i + 1][0] for i in aux_layers]
    return Answer(request, tokens, torch.cat([*kept, out.last_hidden_state[0]], -1))


# --- files of answers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An answer; the first ``prompt`` of its ``tokens`` are the prompt's."""

    number: int
    key: int
    family: str
    prompt: int
    tokens: int
    temperature: float


class Answers:
    """Answers in ``work``, one file each and a line in the index; new ones are appended."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work, self._index = work, work / "index.jsonl"
        lines = self._index.read_text().splitlines() if self._index.exists() else []
        self.entries = [Entry(**json.loads(line)) for line in lines]

    def add(self, answer: Answer, family: str) -> None:
        """Append one; its line in the index is written last."""
        request = answer.request
        entry = Entry(
            len(self.entries), request.key, family, len(request.prompt), len(answer.tokens),
            request.temperature,
        )  # fmt: skip
        tensors = {"tokens": answer.tokens, "states": answer.states.to(torch.bfloat16)}
        save_file(tensors, self._work / f"{entry.number}.safetensors")
        with self._index.open("a") as index:
            index.write(json.dumps(asdict(entry)) + "\n")
        self.entries.append(entry)

    def read(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Tokens [N] and states [N, S * D]; zeros for the last token, never read by the target."""
        found = load_file(self._work / f"{entry.number}.safetensors")
        return found["tokens"], F.pad(found["states"], (0, 0, 0, 1))


def prompt_ids(conversation: Conversation, tokenizer: Any) -> list[int]:
    """A conversation in the chat template, up to where the target answers."""
    ids: list[int] = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    return ids


def requests(
    prompts: Sequence[tuple[str, Conversation]], tokenizer: Any, done: set[int]
) -> Iterator[Request]:
    """One per prompt that is short enough; greedy and sampled ones take turns."""
    for key, (_, conversation) in enumerate(prompts):
        if key in done or not conversation:
            continue
        ids = prompt_ids(conversation, tokenizer)
        if len(ids) + NEW_TOKENS <= LONGEST:
            yield Request(key, ids, TEMPERATURES[key % len(TEMPERATURES)])


def batches(wanted: Iterator[Request]) -> Iterator[list[Request]]:
    """Up to BATCH requests of one temperature and of similar length."""
    while some := list(islice(wanted, 16 * BATCH)):
        for temperature in sorted(set(TEMPERATURES)):
            mine = [request for request in some if request.temperature == temperature]
            mine.sort(key=lambda request: len(request.prompt))
            yield from (mine[i : i + BATCH] for i in range(0, len(mine), BATCH))


def main(argv: Sequence[str] | None = None) -> int:
    """Answer prompts until the time is over; what is there already counts."""
    parser = argparse.ArgumentParser(prog="python -m eval.smollm2.answers", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the training text, *.jsonl")
    add("--work", type=Path, default=Path("runs/smollm2"), help="folder of the answers")
    add("--minutes", type=float, default=40.0)
    add("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    folder = target_folder()
    model, tokenizer = load_target(folder), AutoTokenizer.from_pretrained(folder)
    prompts = training_prompts(args.data)
    answers = Answers(args.work)
    wanted = requests(prompts, tokenizer, {entry.key for entry in answers.entries})
    end, tokens = time.monotonic() + 60 * args.minutes, 0
    with tqdm(total=len(prompts), initial=len(answers.entries), desc="answers") as bar:
        for batch in batches(wanted):
            asked = [request.prompt for request in batch]
            said = replies(model, asked, NEW_TOKENS, batch[0].temperature)
            for request, reply in zip(batch, said, strict=True):
                answers.add(read(model, request, reply), prompts[request.key][0])
                tokens += len(reply)
            bar.update(len(batch))
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            if time.monotonic() > end:
                break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
