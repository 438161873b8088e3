"""The configuration of a benchmark run, read from a TOML file and checked before anything starts.

Every table of the file is a frozen dataclass here, every key one of its fields; unknown keys are
errors. ``eval/configs/gpu.toml`` explains each key.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from eval.gpu.models import DEMO, PAIRS, SHAPES, SMOLLM2
from eval.smollm2.weighted import LARGEST, SMALLEST
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.files import read_text
from sglang_c2t.policies import ChainPolicy, TreePolicy, build_policy, build_tree_policy, plans

SEEDS = "--enable-deterministic-inference"

#: Algorithms that SGLang's adaptive rule serves; with others it warns, and drafts one length.
ADAPTIVE = ("EAGLE", "EAGLE3")

Kind = Literal["none", "fixed", "adaptive", "tree", "c2t", "c2t-tree"]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True)  # "3" and true are no numbers


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The pair that is served.

    ``smollm2`` and ``demo`` are the trained pairs of :mod:`eval.gpu.models`, ``smollm2:8b`` one at
    the cost of a shape there. The target ``smollm2:400`` has 400 million parameters and the draft
    ``smollm2`` (:mod:`eval.smollm2.weighted`).
    """

    target: str = DEMO
    draft: str = DEMO
    algorithm: str = "EAGLE3"

    def __post_init__(self) -> None:
        pair, size = named(self.target)
        if not pair:
            return
        heavier = pair == SMOLLM2 and size.isdecimal() and SMALLEST <= int(size) <= LARGEST
        if ":" in self.target and not (size in SHAPES or heavier):
            raise ConfigError(
                f"no target {self.target}; sizes are {', '.join(SHAPES)}, and {SMALLEST} to "
                f"{LARGEST} (million parameters) of {SMOLLM2}"
            )
        fitting = self.target if size in SHAPES else pair
        if named(self.draft)[0] and self.draft != fitting:
            raise ConfigError(f"the draft of {self.target} is {fitting}, got {self.draft}")
        if (size or pair == SMOLLM2) and self.draft == fitting and self.algorithm != "EAGLE3":
            raise ConfigError(f"the algorithm of {fitting} is EAGLE3, got {self.algorithm}")


def named(model: str) -> tuple[str, str]:
    """Pair and size of ``pair:size`` or ``pair``; two empty texts for a folder or a hub's name."""
    pair, _, size = model.partition(":")
    return (pair, size) if pair in PAIRS else ("", "")


@dataclass(frozen=True, config=STRICT)
class ServerConfig:
    """How servers are started, the same for all methods."""

    device: Literal["cpu", "cuda"] = "cuda"
    flags: tuple[str, ...] = ()
    mode: Literal["together", "in-turn", "auto", "once"] = "in-turn"
    memory_gib: float = 0.0
    starting: Positive = 1
    metrics: bool = True
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode == "auto" and self.memory_gib <= 0:
            raise ConfigError(
                'mode = "auto" compares the free memory with what the servers need: set '
                "server.memory_gib to what one of them takes"
            )


@dataclass(frozen=True, config=STRICT)
class RequestConfig:
    """Settings of each request, and of how its answers are compared."""

    max_new_tokens: Positive = 256
    seeded: bool = False
    stream: bool = True
    timeout_s: PositiveFloat = 600.0
    warm_up: Annotated[int, Field(ge=0)] = 16
    cached_prompts: bool = False
    fresh_prompts: bool = False
    equal_outputs: Literal["greedy", "seeded", "report", "none"] = "greedy"

    def __post_init__(self) -> None:
        if self.equal_outputs == "seeded" and not self.seeded:
            raise ConfigError(
                'equal_outputs = "seeded" compares sampled outputs, which needs '
                "requests.seeded = true"
            )


@dataclass(frozen=True, config=STRICT)
class LoadConfig:
    """Loads at one temperature: numbers of requests at once, and of prompts for each."""

    temperature: Annotated[float, Field(ge=0)]
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)]
    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.concurrency) != len(self.prompts):
            raise ConfigError(
                "concurrency and prompts must be lists of one length, got "
                f"{list(self.concurrency)} and {list(self.prompts)}"
            )
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ConfigError(f"concurrency holds a number twice: {list(self.concurrency)}")
        for at_once, prompts in zip(self.concurrency, self.prompts, strict=True):
            if prompts < at_once:
                raise ConfigError(
                    f"{prompts} prompts never reach {at_once} at once; give at least {at_once}"
                )


@dataclass(frozen=True, config=STRICT)
class PartConfig:
    """One part of the mixed batch; see :mod:`eval.bench.datasets` for its sources."""

    source: str
    n: Positive
    template: str = ""


@dataclass(frozen=True, config=STRICT)
class DatasetConfig:
    """The mixed batch: parts, interleaved in a seeded order."""

    parts: Annotated[tuple[PartConfig, ...], Field(min_length=1)]
    seed: int = 0
    max_prompt_tokens: Positive = 1024


@dataclass(frozen=True, config=STRICT)
class MethodConfig:
    """One method."""

    kind: Kind
    name: str = ""
    num_steps: Positive = 5
    topk: int = 1
    num_draft_tokens: int | None = None
    policy: str = "c2t"
    beta: float | None = None
    classifier: str = "default"
    policy_options: dict[str, Any] = Field(default_factory=dict)
    flags: tuple[str, ...] = ()
    plugin_off: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        tree = self.kind in ("tree", "c2t-tree")
        wrong = {
            f"needs topk above 1, got {self.topk}": tree and self.topk < 2,
            f"has no topk, got {self.topk}": not tree and self.topk != 1,
            "needs num_draft_tokens: how many nodes, root included, a tree may have": tree
            and self.num_draft_tokens is None,
            "verifies num_steps + 1 rows at most; drop num_draft_tokens": not tree
            and self.num_draft_tokens is not None,
            f"has no beta, got {self.beta}": not self.gated and self.beta is not None,
            "is served by the plugin; drop plugin_off": self.gated and self.plugin_off,
        }
        for message, holds in wrong.items():
            if holds:
                raise ConfigError(f"kind {self.kind} {message}")

    @property
    def gated(self) -> bool:
        """Whether it is one of ours."""
        return self.kind in ("c2t", "c2t-tree")

    @property
    def plans(self) -> bool:
        """Whether it learns costs and survivals from the load it has seen."""
        return self.gated and plans(self._policy(self.c2t()))

    @property
    def baseline(self) -> bool:
        """Whether the others are compared with it."""
        return self.kind == "none" and not self.plugin_off

    def c2t(self) -> C2TConfig:
        """Its settings as ``--c2t`` takes them; ConfigError for any that it would refuse."""
        names = ("policy", "beta", "classifier", "policy_options")
        config = C2TConfig.from_mapping({name: getattr(self, name) for name in names})
        self._policy(config)
        return config

    def _policy(self, config: C2TConfig) -> ChainPolicy | TreePolicy:
        return (build_tree_policy if self.kind == "c2t-tree" else build_policy)(config)

    def _default_name(self) -> str:
        beta = "" if self.beta is None else f" beta {self.beta:g}"
        return {
            "none": "no speculation",
            "fixed": f"fixed {self.num_steps}",
            "adaptive": "adaptive",
            "tree": f"EAGLE-2 {self.num_draft_tokens}",
            "c2t": f"{self.policy}{beta}",
            "c2t-tree": f"{self.policy} tree{beta}",
        }[self.kind]


@dataclass(frozen=True, config=STRICT)
class BenchConfig:
    """A whole run."""

    name: str
    load: Annotated[tuple[LoadConfig, ...], Field(min_length=1)]
    methods: Annotated[tuple[MethodConfig, ...], Field(min_length=1)]
    dataset: DatasetConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    requests: RequestConfig = Field(default_factory=RequestConfig)
    repeats: Positive = 3
    seed: int = 0

    def __post_init__(self) -> None:
        methods = self.methods
        _unique("methods.name", [method.name for method in methods])
        _unique("load.temperature", [f"{load.temperature:g}" for load in self.load])
        if sum(method.baseline for method in methods) > 1:
            raise ConfigError("methods: at most one may be of kind none, it is the baseline")
        for method in methods:
            if method.gated:
                method.c2t()
            if method.kind == "adaptive" and self.model.algorithm not in ADAPTIVE:
                raise ConfigError(
                    f"methods: kind adaptive serves {' and '.join(ADAPTIVE)} drafts, got "
                    f"model.algorithm {self.model.algorithm}; drop the method"
                )
        if self.requests.seeded and SEEDS not in self.server.flags:
            raise ConfigError(
                f"requests.seeded = true needs {SEEDS} among server.flags: without it, SGLang "
                "ignores seeds"
            )
        most = max(n for load in self.load for n in load.prompts)
        given = sum(part.n for part in self.dataset.parts)
        if most > given:
            raise ConfigError(f"load.prompts asks for {most} prompts, dataset.parts give {given}")


def _unique(name: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{name} {value!r} is given twice; each must differ")


def read_config(path: Path) -> BenchConfig:
    """The run described in ``path``; :class:`ConfigError` names the key that is wrong."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return build(BenchConfig, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def build(kind: type[T], table: Any) -> T:
    """``kind`` from tables of TOML; :class:`ConfigError` with a line for each wrong key."""
    try:  # as JSON, where lists are tuples, and nothing else is converted
        return TypeAdapter(kind).validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError("; ".join(map(_sentence, error.errors()))) from None


def _sentence(error: Any) -> str:
    """``server.mode: Input should be 'together', ...; got 'both'``."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "unexpected_keyword_argument":
        message = "unknown key; eval/configs/gpu.toml has all"
    if error["type"] not in ("value_error", "missing", "unexpected_keyword_argument"):
        message += f"; got {error['input']!r}"
    return f"{where.lstrip('.')}: {message}".removeprefix(": ")


def as_dict(config: BenchConfig) -> dict[str, Any]:
    """The run as plain JSON values, for run.json."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def changed(config: BenchConfig, **values: Any) -> BenchConfig:
    """``config`` with other values of JSON; :class:`ConfigError` if they do not fit."""
    return build(BenchConfig, {**as_dict(config), **values})
