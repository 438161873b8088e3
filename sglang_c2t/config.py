"""Every knob of C2T in one frozen dataclass, and how it travels between processes.

The launcher resolves the configuration once (flags over file over defaults) and puts
its JSON into one environment variable; SGLang's child processes inherit it. Users of
``sglang.Engine`` set the same variable themselves, to JSON or to a file's path.

Imports neither torch nor sglang.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_c2t.checks import ConfigError, is_number, is_whole, parse_json, require, shown
from sglang_c2t.hints import did_you_mean

__all__ = ["C2TConfig", "ConfigError", "active", "publish", "resolve"]

CONFIG_ENV = "SGLANG_C2T_CONFIG"

VERIFY_MODES = ("auto", "ragged", "static")
RECORD_ROOTS = ("visited", "every")

#: Settings that reach the policy by themselves: no option may say them a second time.
POLICY_SETTINGS = ("policy", "beta", "classifier")

#: Longest name of a policy, or of an option.
LONGEST_NAME = 200


@dataclass(frozen=True)
class C2TConfig:
    """What ``--c2t`` does. Field names are the keys of ``--c2t-config`` files.

    Raises :class:`ConfigError` for any value out of range.
    """

    policy: str = "c2t"
    """Name from the menu in ``sglang_c2t.policies``, or ``module:Class`` of your own."""

    beta: float | None = None
    """The policy's threshold, in (0, 1): a drafted token whose confidence is below it
    ends its request's draft. ``None``: the policy's own default."""

    classifier: str = "default"
    """``default`` (shipped, trained on the demo models) or a ``.safetensors`` file with
    its JSON card beside it."""

    verify: str = "auto"
    """``ragged``: the target forwards only surviving tokens, packed over the batch.
    ``static``: full width, drafts cut by masking (same output, no saving).
    ``auto``: ragged where the attention backend can, else static with one log line."""

    max_verify_rows: int | None = None
    """Trees: nodes one target forward may verify over the whole batch, roots included;
    the best ones stay. ``None``: no limit."""

    draft_steps: tuple[int, ...] | None = None
    """Chains on a GPU: numbers of layers that a step may draft for the whole batch, besides
    ``--speculative-num-steps``; one is chosen by how long recent drafts got. ``None``: a third
    and two thirds of it. Empty: always all."""

    exact_ancestors: bool = True
    """Trees: drafted nodes attend to their true ancestors. ``false``: to their beam rows,
    as stock SGLang (sgl-project/sglang#8409). Same output, fewer tokens accepted."""

    record: str | None = None
    """Directory for features and accept labels of drafted tokens; ``None``: off."""

    record_share: float = 0.01
    """Share of steps that are recorded, in (0, 1]. They verify full drafts, whatever the
    policy says, so that labels are not censored."""

    record_limit_mb: float = 1024.0
    """Recording stops, serving goes on, once the directory holds this many megabytes."""

    record_roots: str = "visited"
    """``visited``: drafts that serving makes anyway. ``every``: take one token per step and
    record the draft behind each, for exact replay and for more data from few prompts. Slow;
    records greedy requests without grammar only."""

    record_extra: tuple[str, ...] = ()
    """Further measurements to record, e.g. ``hidden`` or ``topk_prob`` (``mcsd``)."""

    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the policy, e.g. ``{"length": 3}`` for ``fixed``."""

    classifier_dir: str | None = None
    """Directory whose classifiers ``POST /c2t`` may name; ``None``: those shipped only."""

    loopback_control: bool = False
    """Whether ``POST /c2t`` takes changes from the machine itself on a server that has no
    admin key; else nobody may post there."""

    def __post_init__(self) -> None:
        """Check each field by itself; the policy checks its own options when built."""
        for name in ("policy", "classifier", "verify"):
            value = getattr(self, name)
            require(
                isinstance(value, str) and value != "", f"c2t {name}", "a non-empty string", value
            )
        require(
            len(self.policy) <= LONGEST_NAME and self.policy.isprintable(),
            "c2t policy",
            f"a name of at most {LONGEST_NAME} printable characters",
            self.policy,
        )
        _require_one_of(self.verify, VERIFY_MODES, "c2t verify")
        require(
            self.beta is None or (is_number(self.beta) and 0.0 < self.beta < 1.0),
            "c2t beta",
            "a number in (0, 1)",
            self.beta,
        )
        rows = self.max_verify_rows
        require(
            rows is None or is_whole(rows, 1),
            "c2t max_verify_rows",
            "a whole number of nodes >= 1",
            rows,
        )
        steps = self.draft_steps
        require(
            steps is None or (_is_list(steps) and all(is_whole(s, 1) for s in steps)),
            "c2t draft_steps",
            "a list of whole numbers >= 1",
            steps,
        )
        if steps is not None:
            object.__setattr__(self, "draft_steps", tuple(steps))  # JSON has lists
        for name in ("exact_ancestors", "loopback_control"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"c2t {name}", "true or false", value)
        for name in ("record", "classifier_dir"):
            value = getattr(self, name)
            fits = value is None or (isinstance(value, str) and value != "" and "\0" not in value)
            require(fits, f"c2t {name}", "a directory", value)
        require(
            is_number(self.record_share) and 0.0 < self.record_share <= 1.0,
            "c2t record_share",
            "a number in (0, 1]",
            self.record_share,
        )
        require(
            is_number(self.record_limit_mb) and self.record_limit_mb > 0,
            "c2t record_limit_mb",
            "a number of megabytes > 0",
            self.record_limit_mb,
        )
        _require_one_of(self.record_roots, RECORD_ROOTS, "c2t record_roots")
        extra = self.record_extra
        require(
            _is_list(extra) and all(isinstance(name, str) for name in extra),
            "c2t record_extra",
            "a list of measurements",
            extra,
        )
        object.__setattr__(self, "record_extra", tuple(extra))  # JSON has lists
        self._check_options()

    def _check_options(self) -> None:
        options = self.policy_options
        named = isinstance(options, Mapping) and all(
            isinstance(name, str) and len(name) <= LONGEST_NAME for name in options
        )
        require(named, "c2t policy_options", "an object of options", options)
        for name in POLICY_SETTINGS:
            if name in options:
                raise ConfigError(
                    f"c2t policy_options: {name} is a setting of its own: give --c2t-{name}, or "
                    f"{name} beside policy_options"
                )

    @property
    def visits_every_root(self) -> bool:
        """Whether each step takes a single token, so that every root gets recorded."""
        return self.record is not None and self.record_roots == "every"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> C2TConfig:
        """Build from a plain mapping; an unknown key is an error, not a warning."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"unknown c2t setting {shown(key)}; allowed: {', '.join(known)}"
                    f"{did_you_mean(str(key), known)}"
                )
        return cls(**values)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> C2TConfig:
        """Parse JSON; ``source`` names the file or variable in error messages."""
        values = parse_json(text, source=source)
        if not isinstance(values, dict):
            raise ConfigError(f"{source} must hold a JSON object, got {type(values).__name__}")
        return cls.from_mapping(values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> C2TConfig:
        """Read a ``--c2t-config`` file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read c2t config file {path}: {error}") from error
        return cls.from_json(text, source=f"c2t config file {path}")

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back to an equal config."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def resolve(*, file: str | None, flags: Mapping[str, Any]) -> C2TConfig:
    """Flags over file over defaults. ``flags`` holds only what the user typed."""
    base = C2TConfig.from_file(file) if file is not None else C2TConfig()
    merged = {**dataclasses.asdict(base), **flags}
    return C2TConfig.from_mapping(merged)


def publish(config: C2TConfig) -> None:
    """Switch C2T on for this process and all children it will start."""
    os.environ[CONFIG_ENV] = config.to_json()


def active() -> C2TConfig | None:
    """The configuration of this process; ``None`` when C2T is off.

    Asked on every request, so parsed once: where the variable names a file, the file's contents
    take its place, for this process and its children. What becomes of the file then is nothing
    to a running server.
    """
    text = os.environ.get(CONFIG_ENV)
    if not text:
        return None
    if not text.lstrip().startswith("{"):
        publish(C2TConfig.from_file(text))
        text = os.environ[CONFIG_ENV]
    return _parsed(text)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> C2TConfig:
    return C2TConfig.from_json(text, source=f"environment variable {CONFIG_ENV}")


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _require_one_of(value: object, choices: tuple[str, ...], what: str) -> None:
    require(value in choices, what, f"one of {', '.join(choices)}", value)
