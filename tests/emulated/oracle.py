"""Expected results on the emulated device, by transformers and by SGLang without the plugin.

Keys and values tell more than tokens: a wrong mask, position or slot changes them in each layer
behind the first, where the likeliest token often stays the same.
"""

from __future__ import annotations

import functools
import itertools
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from eval.prompts import demo_mix
from eval.server import TARGET
from tests import lora
from tests.e2e.server_policies import LONGEST_BURST
from tests.emulated.serve import Case, Request, Run, Served, rotated, sketch
from tests.emulated.servers import COMMON, LATENT, SERVERS, UNUSUAL
from tests.emulated.versions import COUNTED, RELEASE

FLAGS = SERVERS | UNUSUAL | LATENT

TOKENS = 16
JOINS = (0, 0, 4, 7)
ABORTED_AT = 4

#: What some requests are held to, by their number.
CONSTRAINTS = {1: "[0-9]{2}(-[0-9]{4}){1,3}", 3: "(yes|no|maybe)( and (yes|no|maybe)){2,5}"}

#: Requests that ask for log-probabilities in runs that have such requests.
TOLD = (0, 3)

#: Last tokens of a request that a model does not keep: the last one, after which nothing was
#: forwarded, and the one before where a model keeps pairs of tokens.
NOT_KEPT = 2


class Rounding(NamedTuple):
    """How far a server may be from transformers in float32."""

    logits: float
    """A token's below the highest."""

    logprobs: float
    """A token's, either way."""

    kept: float
    """Tolerance of a number of :func:`sketch`; the numbers are in the tens."""


#: In bfloat16 about twice what the target alone is: 0.06 and 0.9.
ROUNDING = {"float32": Rounding(0.0, 1e-4, 1e-3), "bfloat16": Rounding(0.12, 0.2, 1.8)}


class Truth(NamedTuple):
    """The target's results for a sequence of tokens."""

    logits: Tensor
    """[n, V] behind each token but the last."""

    kept: Tensor
    """[L, m] :func:`sketch` of what the target keeps."""


class Oracle:
    """Four prompts, and by transformers what follows them."""

    #: That some of them begin with, see `serve.rotated`.
    pictures: tuple[tuple[int, int] | None, ...] = (None,) * len(JOINS)

    #: Flags of all of its servers.
    flags: tuple[str, ...] = ()

    #: See :class:`Case`.
    in_turn = False

    #: Paths of those that some of them are for.
    adapters: tuple[str | None, ...] = (None,) * len(JOINS)

    def __init__(self) -> None:
        self.read = functools.cache(self._read)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of target and drafts."""
        return AutoTokenizer.from_pretrained(TARGET)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of 24 tokens each."""
        texts = [prompt.text for prompt in demo_mix(len(JOINS), seed=3)]
        return [tuple(self.tokenizer(text)["input_ids"][:24]) for text in texts]

    @cached_property
    def _models(self) -> dict[str, torch.nn.Module]:
        """With weights as they are, and rounded."""
        load = AutoModelForCausalLM.from_pretrained
        return {name: load(TARGET, dtype=getattr(torch, name)).float() for name in ROUNDING}

    def _model(self, ids: tuple[int, ...], dtype: str) -> torch.nn.Module:
        """Which one reads them."""
        del ids
        return self._models[dtype]

    def _number(self, ids: tuple[int, ...]) -> int:
        """Which prompt they begin with."""
        return next(n for n, prompt in enumerate(self.prompts) if ids[: len(prompt)] == prompt)

    def _places(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        """Where the model takes its tokens to stand; nothing: one behind the other."""
        del ids
        return {}

    @torch.inference_mode()
    def _read(self, ids: tuple[int, ...], dtype: str = "float32") -> Truth:
        """All at once, computed in float32."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several of so small a model wait for each other, on busy cores
        try:
            out = self._model(ids, dtype)(torch.tensor([ids]), **self._places(ids))
        finally:
            torch.set_num_threads(threads)
        return Truth(out.logits[0, :-1], sketch(self._kept(out.past_key_values.layers)))

    def _kept(self, layers: Any) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that a server keeps of each token, by layer."""
        return [(x.keys[0].transpose(0, 1), x.values[0].transpose(0, 1)) for x in layers]

    def answer(
        self, number: int, tokens: list[int], *, dtype: str = "float32", pattern: str = ""
    ) -> Tensor:
        """[n, V] log-probabilities at each of these ``tokens`` of a request's answer, of which a
        ``pattern`` may forbid some.
        """
        prompt = self.prompts[number]
        logits = self.read((*prompt, *tokens), dtype).logits[len(prompt) - 1 :].clone()
        for at in range(len(tokens)) if pattern else ():
            logits[at, ~self._allowed(pattern, tuple(tokens[:at]))] = -torch.inf
        return logits.log_softmax(-1)

    def _allowed(self, pattern: str, before: tuple[int, ...]) -> Tensor:
        """[V] bool: what may follow these tokens. Each one is tried."""
        said = self.tokenizer.decode(list(before))
        allowed = [
            bool(text) and regex.fullmatch(pattern, said + text, partial=True) is not None
            for text in self._texts
        ]
        allowed[self.tokenizer.eos_token_id] = regex.fullmatch(pattern, said) is not None
        return torch.tensor(allowed)

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token; special tokens have none."""
        ids = range(len(self.tokenizer))
        return [self.tokenizer.decode([i], skip_special_tokens=True) for i in ids]

    def run(
        self,
        *,
        aborted: int | None = None,
        opted_out: int | None = None,
        asked: bool = False,
        cut: dict[str, Any] | None = None,
        **how: Any,
    ) -> Run:
        """All prompts, some of which join later.

        Args:
            aborted: This one is, once it has some tokens.
            opted_out: This one is.
            asked: Some are held to patterns, and some want log-probabilities.
            cut: They are sampled, each by its own seed, from the target's distribution cut so.
            how: See :class:`Run`.
        """
        requests = []
        for number, (ids, joins) in enumerate(zip(self.prompts, JOINS, strict=True)):
            sampling: dict[str, Any] = {"temperature": 0.0}
            if cut is not None:
                sampling = {**_seeded(number), **cut}
            if asked and number in CONSTRAINTS:
                sampling["regex"] = CONSTRAINTS[number]
            requests.append(
                Request(
                    ids,
                    joins,
                    ABORTED_AT if number == aborted else None,
                    number == opted_out,
                    sampling,
                    TOKENS,
                    logprobs=asked and number in TOLD,
                    picture=self.pictures[number],
                    adapter=self.adapters[number],
                )
            )
        return Run(tuple(requests), **how)

    def case(self, server: str, *runs: Run, mutant: str = "", more: tuple[str, ...] = ()) -> Case:
        """One of :data:`SERVERS` or :data:`UNUSUAL`, with ``more`` flags, and its runs."""
        flags = (*COMMON, *FLAGS[server], *self.flags, *more)
        return Case(flags, runs, mutant, in_turn=self.in_turn)

    def wrong(
        self, server: str, served: Served, stock: Served | None, *, counted: bool = True
    ) -> list[str]:
        """List what is wrong, in words.

        Args:
            server: Which one served.
            served: Its run.
            stock: SGLang's own run with the same draft model.
            counted: Whether steps must stay within their budget.
        """
        if served.error:
            return [served.error]
        found = [
            f"{what}, request {number}"
            for number in range(len(served.requests))
            for what in self._wrong_of(server, served, stock, number)
        ]
        if served.compiled:
            found.append(f"compiled while it served: {served.compiled}")
        budget = RELEASE.budget.get(server, ()) if counted else ()
        for what, allowed in zip(COUNTED, budget, strict=False):
            most = max(step.get(what, 0) for step in served.steps)
            if most > allowed:
                found.append(f"{most} {what} in a step, and {allowed} are allowed: {served.sites}")
        return found

    def _wrong_of(
        self, server: str, served: Served, stock: Served | None, number: int
    ) -> list[str]:
        """List what is wrong with one request."""
        request, tokens = served.requests[number], served.outputs[number]
        flags = (*COMMON, *FLAGS[server])
        dtype = _last(flags, "--dtype", "float32")
        rounding, pattern = ROUNDING[dtype], request.sampling.get("regex", "")
        ended = bool(pattern) and self.tokenizer.eos_token_id in tokens[-1:]
        if request.aborted is not None:
            ended = 0 < len(tokens) < TOKENS
        if not ended and len(tokens) != TOKENS:
            return [f"{len(tokens)} tokens"]
        if not all(0 <= token < len(self.tokenizer) for token in tokens):
            return [f"tokens {tokens}"]
        found = []
        said = self.answer(number, tokens, dtype=dtype, pattern=pattern)
        each = said.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if bool((each < said.max(-1).values - rounding.logits).any()):
            found.append("tokens")
        if request.logprobs and not _alike(
            torch.tensor(served.logprobs[number]), each, rounding.logprobs
        ):
            found.append("log-probabilities")
        if request.aborted is not None:
            return found
        truth = self.read((*request.ids, *tokens), dtype).kept
        kept, width = torch.tensor(served.keys[number]), truth.shape[1]
        if len(truth) - len(kept) >= NOT_KEPT + int(_last(flags, "--page-size", "1")):
            return [*found, f"{len(kept)} tokens in the cache"]
        shared = min(len(kept), len(truth))
        if not _alike(kept[:shared, :width], truth[:shared], rounding.kept):
            found.append("keys and values of the target")
        if stock is not None:
            theirs = torch.tensor(stock.keys[number])
            # A request that ends within a burst of draft-free steps leaves its last tokens unread.
            unread = LONGEST_BURST if "any plan" in server else len(tokens)
            unread = 0 if "stock" in server or "gated" in server else unread
            shared = min(len(kept), len(theirs)) - unread
            if not _alike(kept[:shared, width:], theirs[:shared, width:], rounding.kept):
                found.append("keys and values of the draft model")
        return found


class Seeing(Oracle):
    """Oracle of a multimodal target: the demo target as a Qwen2.5-VL, which ignores its pictures.

    Args:
        folder: See :func:`tests.e2e.vision_models.save`.
    """

    pictures = (None, (2, 4), (3, 3), None)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.flags = (
            "--model-path", str(folder / "target"),
            "--speculative-draft-model-path", str(folder / "draft"),
        )  # fmt: skip

    @cached_property
    def _models(self) -> dict[str, torch.nn.Module]:
        load = AutoModelForImageTextToText.from_pretrained
        return {"float32": load(self._folder / "target", dtype=torch.float32)}

    def _places(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        picture = self.pictures[self._number(ids)]
        return {"position_ids": rotated(picture, len(ids))[:, None]}


class Adapted(Oracle):
    """Oracle of a target with two adapters and without one, in one batch.

    Args:
        folder: Where they are saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        left, right = (str(folder / name) for name in ("left", "right"))
        for seed, path in enumerate((left, right)):
            # Of few modules: each takes the interpreter two launches more per layer.
            lora.save(Path(path), seed, of=("self_attn.o_proj", "mlp.down_proj"))
        self.adapters = (left, right, None, left)
        self.flags = ("--max-loras-per-batch", "3", "--lora-paths", left, right)

    @cached_property
    def _adapted(self) -> dict[str | None, torch.nn.Module]:
        load = AutoModelForCausalLM.from_pretrained
        models = {path: load(TARGET, dtype=torch.float32) for path in set(self.adapters)}
        for path, model in models.items():
            if path is not None:
                lora.merge(Path(path), model)
        return models

    def _model(self, ids: tuple[int, ...], dtype: str) -> torch.nn.Module:
        del dtype
        return self._adapted[self.adapters[self._number(ids)]]


class Latent(Oracle):
    """Oracle of a target that keeps latents (MLA), and drafts with a layer of its own.

    Args:
        folder: See :func:`tests.emulated.latent_models.save`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.flags = ("--model-path", str(folder))

    @cached_property
    def _models(self) -> dict[str, torch.nn.Module]:
        load = AutoModelForCausalLM.from_pretrained
        return {"bfloat16": load(self._folder, dtype=torch.float32)}  # its weights are rounded

    def _kept(self, layers: Any) -> list[tuple[Tensor, Tensor]]:
        """Latents, and what RoPE turned of the keys: transformers has its pairs apart."""
        return [
            (x.keys[0, 0], x.values[0, 0].unflatten(-1, (2, -1)).mT.flatten(-2)) for x in layers
        ]


def _seeded(number: int) -> dict[str, Any]:
    return {"temperature": (1.0, 0.7)[number % 2], "sampling_seed": 1000 + number}


def _alike(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether each number is; nan is like nothing."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=rounding)


def _last(flags: tuple[str, ...], name: str, default: str) -> str:
    """The last value of a flag."""
    values = [value for flag, value in itertools.pairwise(flags) if flag == name]
    return values[-1] if values else default
