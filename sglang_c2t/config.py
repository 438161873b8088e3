"""Every knob of C2T in one frozen dataclass, and how it travels between processes.

The launcher resolves the configuration once (flags over file over defaults) and puts
its JSON into one environment variable; SGLang's child processes inherit it. Users of
``sglang.Engine`` set the same variable themselves, to JSON or to a file's path.

Imports neither torch nor sglang.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_c2t.hints import did_you_mean

CONFIG_ENV = "SGLANG_C2T_CONFIG"

VERIFY_MODES = ("auto", "ragged", "static")
RECORD_ROOTS = ("visited", "every")


class ConfigError(ValueError):
    """A setting that cannot be served; its message is one line for the user."""


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

    def __post_init__(self) -> None:
        """Check each field by itself; the policy checks its own options when built."""
        for name in ("policy", "classifier", "verify"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"c2t {name} must be a non-empty string, got {value!r}")
        if self.verify not in VERIFY_MODES:
            raise ConfigError(
                f"c2t verify must be one of {', '.join(VERIFY_MODES)}, got {self.verify!r}"
            )
        if self.beta is not None and not (_is_number(self.beta) and 0.0 < self.beta < 1.0):
            raise ConfigError(f"c2t beta must be a number in (0, 1), got {self.beta!r}")
        rows = self.max_verify_rows
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise ConfigError(
                f"c2t max_verify_rows must be a whole number of nodes >= 1, got {rows!r}"
            )
        steps = self.draft_steps
        if steps is not None:
            if not isinstance(steps, (list, tuple)) or not all(
                isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in steps
            ):
                raise ConfigError(
                    f"c2t draft_steps must be a list of whole numbers >= 1, got {steps!r}"
                )
            object.__setattr__(self, "draft_steps", tuple(steps))  # JSON has lists
        if not isinstance(self.exact_ancestors, bool):
            raise ConfigError(
                f"c2t exact_ancestors must be true or false, got {self.exact_ancestors!r}"
            )
        if self.record is not None and (not isinstance(self.record, str) or not self.record):
            raise ConfigError(f"c2t record must be a directory, got {self.record!r}")
        if not (_is_number(self.record_share) and 0.0 < self.record_share <= 1.0):
            raise ConfigError(
                f"c2t record_share must be a number in (0, 1], got {self.record_share!r}"
            )
        if not (_is_number(self.record_limit_mb) and 0 < self.record_limit_mb < math.inf):
            raise ConfigError(
                f"c2t record_limit_mb must be a number of megabytes > 0, "
                f"got {self.record_limit_mb!r}"
            )
        if self.record_roots not in RECORD_ROOTS:
            raise ConfigError(
                f"c2t record_roots must be one of {', '.join(RECORD_ROOTS)}, "
                f"got {self.record_roots!r}"
            )
        if not isinstance(self.record_extra, (list, tuple)) or not all(
            isinstance(name, str) for name in self.record_extra
        ):
            raise ConfigError(
                f"c2t record_extra must be a list of measurements, got {self.record_extra!r}"
            )
        object.__setattr__(self, "record_extra", tuple(self.record_extra))  # JSON has lists
        if not isinstance(self.policy_options, Mapping):
            raise ConfigError(
                f"c2t policy_options must be an object of options, got {self.policy_options!r}"
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
                    f"unknown c2t setting {key!r}; allowed: {', '.join(known)}"
                    f"{did_you_mean(key, known)}"
                )
        return cls(**values)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> C2TConfig:
        """Parse JSON; ``source`` names the file or variable in error messages."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not valid JSON: {error}") from error
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
    """The configuration of this process; ``None`` when C2T is off."""
    text = os.environ.get(CONFIG_ENV)
    if not text:
        return None
    if text.lstrip().startswith("{"):
        return C2TConfig.from_json(text, source=f"environment variable {CONFIG_ENV}")
    return C2TConfig.from_file(text)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
