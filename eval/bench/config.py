"""What a benchmark run does, read from a TOML file and checked before anything starts.

Every table of the file is one frozen dataclass here, every key one of its fields; unknown keys
are errors. ``eval/configs/gpu.toml`` explains each key.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from eval.gpu.models import DEMO, PAIRS, SHAPES, SMOLLM2
from eval.smollm2.weighted import LARGEST, SMALLEST
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.files import read_text
from sglang_c2t.policies import ChainPolicy, TreePolicy, build_policy, build_tree_policy, plans

SEEDS = "--enable-deterministic-inference"

#: Algorithms that SGLang's adaptive rule serves; with others it warns, and drafts one length.
ADAPTIVE = ("EAGLE", "EAGLE3")

Kind = Literal["none", "fixed", "adaptive", "tree", "c2t", "c2t-tree"]
T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """The pair that is served.

    ``smollm2`` and ``demo`` are the trained pairs of :mod:`eval.gpu.models`, ``smollm2:8b`` one at
    the cost of a shape there. The target ``smollm2:400`` weighs 400 million parameters and has the
    draft ``smollm2`` (:mod:`eval.smollm2.weighted`).
    """

    target: str = DEMO
    draft: str = DEMO
    algorithm: str = "EAGLE3"
    tokenizer: str = ""

    def __post_init__(self) -> None:
        pair, size = named(self.target)
        if not pair:
            return
        heavier = pair == SMOLLM2 and size.isdecimal() and SMALLEST <= int(size) <= LARGEST
        if ":" in self.target and not (size in SHAPES or heavier):
            raise ConfigError(
                f"model.target: no {self.target}; sizes are {', '.join(SHAPES)}, and {SMALLEST} to "
                f"{LARGEST} (million parameters) of {SMOLLM2}"
            )
        fitting = self.target if size in SHAPES else pair
        if named(self.draft)[0] and self.draft != fitting:
            raise ConfigError(
                f"model.draft: {self.target} is drafted for by {fitting}, got {self.draft}"
            )
        if (size or pair == SMOLLM2) and self.draft == fitting and self.algorithm != "EAGLE3":
            raise ConfigError(f"model.algorithm: {fitting} drafts by EAGLE3, got {self.algorithm}")


def named(model: str) -> tuple[str, str]:
    """Pair and size of ``pair:size`` or ``pair``; two empty texts for a folder or a hub's name."""
    pair, _, size = model.partition(":")
    return (pair, size) if pair in PAIRS else ("", "")


@dataclass(frozen=True)
class ServerConfig:
    """How servers are started, the same for all methods."""

    device: Literal["cpu", "cuda"] = "cuda"
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    mode: Literal["together", "in-turn", "auto", "once"] = "in-turn"
    memory_gib: float = 0.0
    starting: int = 1
    share: bool = True
    metrics: bool = True
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least("server.starting", self.starting, 1)
        if self.mode == "auto" and self.memory_gib <= 0:
            raise ConfigError(
                'server.mode = "auto" compares the free memory with what the servers need: set '
                "server.memory_gib to what one of them takes"
            )


@dataclass(frozen=True)
class RequestConfig:
    """What each request asks for."""

    max_new_tokens: int = 256
    ignore_eos: bool = False
    top_p: float = 1.0
    seeded: bool = False
    stream: bool = True
    timeout_s: float = 600.0
    warm_up: int = 16
    cached_prompts: bool = False
    fresh_prompts: bool = False
    timed: Literal["full batch", "decoding"] = "full batch"
    steady_ratio: float = 0.8
    equal_outputs: Literal["greedy", "seeded", "report", "none"] = "greedy"

    def __post_init__(self) -> None:
        _at_least("requests.max_new_tokens", self.max_new_tokens, 1)
        _at_least("requests.warm_up", self.warm_up, 0)
        for name in ("top_p", "steady_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"requests.{name} must be in (0, 1], got {getattr(self, name)}")
        if self.timeout_s <= 0:
            raise ConfigError(f"requests.timeout_s must be above 0, got {self.timeout_s}")
        if self.equal_outputs == "seeded" and not self.seeded:
            raise ConfigError(
                'requests.equal_outputs = "seeded" compares sampled outputs, which needs '
                "requests.seeded = true"
            )


@dataclass(frozen=True)
class PhaseConfig:
    """A stretch of a ramp: so many prompts, arriving at ``rate`` a second on average."""

    prompts: int
    rate: float

    def __post_init__(self) -> None:
        _at_least("load.phases.prompts", self.prompts, 1)
        if self.rate <= 0:
            raise ConfigError(f"load.phases.rate must be above 0, got {self.rate}")


@dataclass(frozen=True)
class LoadConfig:
    """Rungs of the ladder at one temperature: so many requests at once, of so many prompts.

    With ``phases`` one rung, a ramp: its requests arrive when they do, whatever the server does,
    so that its ``concurrency`` is only what it is expected to climb to.
    """

    temperature: float
    concurrency: tuple[int, ...]
    prompts: tuple[int, ...] = ()
    phases: tuple[PhaseConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"load.temperature must be 0 or more, got {self.temperature}")
        if self.phases:
            every = (sum(phase.prompts for phase in self.phases),)
            if self.prompts not in ((), every):
                raise ConfigError(
                    f"load.prompts: the phases send {every[0]} prompts, got {list(self.prompts)}; "
                    "drop it"
                )
            object.__setattr__(self, "prompts", every)
        if not self.concurrency or len(self.concurrency) != len(self.prompts):
            raise ConfigError(
                "load.concurrency and load.prompts must be lists of one length, got "
                f"{list(self.concurrency)} and {list(self.prompts)}: one number of prompts for "
                "each concurrency"
            )
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ConfigError(f"load.concurrency holds a number twice: {list(self.concurrency)}")
        for at_once, prompts in zip(self.concurrency, self.prompts, strict=True):
            _at_least("load.concurrency", at_once, 1)
            if prompts < at_once:
                raise ConfigError(
                    f"load.prompts: {prompts} prompts never reach {at_once} at once; give at "
                    f"least {at_once}"
                )

    def arrivals(self, seed: str) -> tuple[float, ...]:
        """Seconds at which prompts arrive, in each phase as a Poisson process; () in a ladder,
        where the end of one request sends the next.
        """
        rng = random.Random(seed)
        gaps = (rng.expovariate(p.rate) for p in self.phases for _ in range(p.prompts))
        return tuple(itertools.accumulate(gaps))


@dataclass(frozen=True)
class PartConfig:
    """One part of the mixed batch; see :mod:`eval.bench.datasets` for its sources."""

    source: str
    n: int
    family: str = ""
    template: str = ""
    count: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        _at_least("dataset.parts.n", self.n, 1)


@dataclass(frozen=True)
class DatasetConfig:
    """The mixed batch: parts, interleaved in a seeded order."""

    parts: tuple[PartConfig, ...] = ()
    seed: int = 0
    data: str = ""
    max_prompt_tokens: int = 1024

    def __post_init__(self) -> None:
        _at_least("dataset.max_prompt_tokens", self.max_prompt_tokens, 1)


@dataclass(frozen=True)
class MethodConfig:
    """One method. ``beta`` may be a list: one method for each."""

    kind: Kind
    name: str = ""
    num_steps: int = 5
    topk: int = 1
    num_draft_tokens: int | None = None
    policy: str = "c2t"
    beta: float | tuple[float, ...] | None = None
    classifier: str = "default"
    policy_options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    own_server: bool = False
    plugin_off: bool = False

    def __post_init__(self) -> None:
        _at_least("methods.num_steps", self.num_steps, 1)
        tree = self.kind in ("tree", "c2t-tree")
        if tree and self.topk < 2:
            raise ConfigError(f"methods: kind {self.kind} needs topk above 1, got {self.topk}")
        if not tree and self.topk != 1:
            raise ConfigError(f"methods: kind {self.kind} has no topk, got {self.topk}")
        if tree and self.num_draft_tokens is None:
            raise ConfigError(
                f"methods: kind {self.kind} needs num_draft_tokens: how many nodes, root "
                "included, a tree may have"
            )
        if not tree and self.num_draft_tokens is not None:
            raise ConfigError(
                f"methods: kind {self.kind} verifies num_steps + 1 rows at most; drop "
                "num_draft_tokens"
            )
        if not self.gated and self.beta is not None:
            raise ConfigError(f"methods: kind {self.kind} has no beta, got {self.beta}")
        if self.gated and self.plugin_off:
            raise ConfigError(f"methods: kind {self.kind} is served by the plugin; drop plugin_off")

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

    def c2t_settings(self) -> dict[str, Any]:
        """The same as :meth:`c2t`, as POST /c2t and ``--c2t-config`` take it."""
        names = ("policy", "beta", "classifier", "policy_options")
        return {name: getattr(self, name) for name in names}

    def c2t(self) -> C2TConfig:
        """Its settings as ``--c2t`` takes them; ConfigError for any that it would refuse."""
        assert not isinstance(self.beta, tuple), "expanded() makes one method of each"
        config = C2TConfig.from_mapping(self.c2t_settings())
        self._policy(config)
        return config

    def _policy(self, config: C2TConfig) -> ChainPolicy | TreePolicy:
        return (build_tree_policy if self.kind == "c2t-tree" else build_policy)(config)

    def expanded(self) -> list[MethodConfig]:
        """One named method for each beta."""
        name = self.name or self._default_name()
        if not isinstance(self.beta, tuple):
            return [replace(self, name=name)]
        return [replace(self, name=f"{name} beta {beta:g}", beta=beta) for beta in self.beta]

    def _default_name(self) -> str:
        return {
            "none": "no speculation",
            "fixed": f"fixed {self.num_steps}",
            "adaptive": "adaptive",
            "tree": f"EAGLE-2 {self.num_draft_tokens}",
            "c2t": self.policy,
            "c2t-tree": f"{self.policy} tree",
        }[self.kind]


@dataclass(frozen=True)
class BenchConfig:
    """A whole run."""

    name: str
    load: tuple[LoadConfig, ...]
    methods: tuple[MethodConfig, ...]
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    requests: RequestConfig = field(default_factory=RequestConfig)
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("repeats", self.repeats, 1)
        methods = tuple(one for method in self.methods for one in method.expanded())
        object.__setattr__(self, "methods", methods)
        if not methods or not self.load:
            raise ConfigError("a run needs at least one [[methods]] and one [[load]]")
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
        if self.requests.timed == "decoding" and "step_clock" not in self.server.plugins:
            raise ConfigError(
                'requests.timed = "decoding" needs the server\'s step clock: put "step_clock" '
                "among server.plugins, or drop it"
            )
        if self.requests.seeded and SEEDS not in self.server.flags:
            raise ConfigError(
                f"requests.seeded = true needs {SEEDS} among server.flags: without it, SGLang "
                "ignores seeds"
            )
        self._check_prompts()

    def _check_prompts(self) -> None:
        if not self.dataset.parts:
            raise ConfigError("dataset.parts is empty: give at least one part")
        most = max(n for load in self.load for n in load.prompts)
        given = sum(part.n for part in self.dataset.parts)
        if most > given:
            raise ConfigError(f"load.prompts asks for {most} prompts, dataset.parts give {given}")


def read_config(path: Path) -> BenchConfig:
    """The run described in ``path``; :class:`ConfigError` names the key that is wrong."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return build(BenchConfig, table, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def as_dict(config: BenchConfig) -> dict[str, Any]:
    """The run as plain JSON values, for run.json."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(config))
    return plain


def build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """A dataclass from a table of TOML; ``where`` is the table's name in errors."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(
                f"unknown key {_join(where, key)}; known here: {', '.join(sorted(hints))}"
            )
    values = {key: _value(value, hints[key], _join(where, key)) for key, value in table.items()}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"key {_join(where, f.name)} is missing")
    return kind(**values)


def _value(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the field's type says, lists as tuples and tables as dataclasses."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_fitting(value, args, where)
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
        raise ConfigError(f"{where} must be a list, got {value!r}")
    if origin is dict and isinstance(value, dict):
        return {k: _value(v, args[1], _join(where, k)) for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:  # not isinstance: true is no number
        return value
    raise ConfigError(f"{where} must be {_called(hint)}, got {value!r}")


def _first_fitting(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in hints:
        return None  # as run.json tells it; TOML has no null: a key that is absent is None
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return _value(value, hint, where)
        except ConfigError:
            continue
    wanted = " or ".join(_called(hint) for hint in hints if hint is not type(None))
    raise ConfigError(f"{where} must be {wanted}, got {value!r}")


def _called(hint: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    if get_origin(hint) is tuple:
        return "a list"
    return names.get(hint, "a table")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be {least} or more, got {value}")


def _unique(name: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{name} {value!r} is given twice; each must differ")
