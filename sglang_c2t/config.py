"""All settings of C2T in one frozen dataclass, and their transfer between processes.

The launcher resolves the configuration once (flags over file over defaults) and puts its JSON into
one environment variable, which SGLang's child processes inherit. Users of ``sglang.Engine`` set the
same variable themselves, to JSON or to a file's path.

It imports neither torch nor sglang.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_c2t.checks import ConfigError, is_number, is_whole, parse_json, require, shown
from sglang_c2t.files import read_text
from sglang_c2t.hints import did_you_mean

__all__ = ["C2TConfig", "ConfigError", "active", "publish", "resolve"]

CONFIG_ENV = "SGLANG_C2T_CONFIG"

#: Settings that reach the policy themselves, so no option may repeat them.
POLICY_SETTINGS = ("policy", "beta", "classifier")

#: The default policy; :func:`sglang_c2t.policies.named` resolves its name.
DEFAULT = "default"

#: Longest name of a policy, or of an option.
LONGEST_NAME = 200


class Values(NamedTuple):
    """Allowed values of a setting."""

    allowed: str
    """For an error message: "must be ``allowed``"."""

    fit: Callable[[Any], bool]

    flag: Callable[[str], Any] | None = None
    """Parses the flag's text; ``bool``: a flag without one. ``None``: no flag, only a key."""

    choices: tuple[str, ...] | None = None


def _setting(default: Any, values: Values, meaning: str, *, unset: str = "none") -> Any:
    """Return a field of :class:`C2TConfig` with all that describes a setting. ``unset`` names the
    meaning of a default of ``None`` or false, for the flag's help.
    """
    metadata = {"values": values, "meaning": meaning, "unset": unset}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _one_of(*names: str) -> Values:
    return Values(f"one of {', '.join(names)}", lambda value: value in names, str, names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_name(value: Any) -> bool:
    return _is_text(value) and len(value) <= LONGEST_NAME and value.isprintable()


def _is_options(value: Any) -> bool:
    names = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return names and all(len(name) <= LONGEST_NAME for name in value)


NAME = Values(f"a name of 1 to {LONGEST_NAME} printable characters", _is_name, str)
FILE = Values("a file, or a shipped classifier's name", _is_text, str)
FILE_TO_WRITE = Values("a file", _is_text, str)
DIRECTORY = Values("a directory", _is_text, str)
SWITCH = Values("true or false", lambda value: isinstance(value, bool), bool)
NODES = Values("a whole number of nodes >= 1", lambda value: is_whole(value, 1), int)
THRESHOLD = Values("a number in (0, 1)", lambda value: is_number(value) and 0 < value < 1, float)
SHARE = Values("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1, float)
MEGABYTES = Values("a number of megabytes > 0", lambda value: is_number(value) and value > 0, float)
MILLISECONDS = Values(
    "a number of milliseconds >= 0.001", lambda value: is_number(value) and value >= 1e-3, float
)
OPTIONS = Values("an object of options", _is_options)


@dataclass(frozen=True)
class C2TConfig:
    """The settings of ``--c2t``. Fields are the keys of ``--c2t-config`` files; those with a flag
    are ``--c2t-NAME`` too. Raises :class:`ConfigError` for invalid values; ``None`` is valid if it
    is the default.
    """

    policy: str = _setting(
        DEFAULT,
        NAME,
        "Which drafts are verified: a name from the menu, or module:Class of your own. 'default': "
        "auto for drafts that are verified packed; c2t for others, and where a threshold, a "
        "classifier, options, a bound on rows or a recording are set.",
    )
    beta: float | None = _setting(
        None,
        THRESHOLD,
        "Threshold of the policy, in (0, 1): a draft token whose confidence is below it ends its "
        "request's draft.",
        unset="the policy's own",
    )
    classifier: str = _setting(
        "default",
        FILE,
        "'default', the one shipped for the policy, of these two models if there is one; a shipped "
        "one's name, or a .safetensors file next to its JSON card.",
    )
    verify: str = _setting(
        "auto",
        _one_of("auto", "ragged", "static"),
        "ragged: the target forwards only surviving tokens, packed over the batch. static: full "
        "width, same output. auto: ragged where the attention backend can, else static with one "
        "log line.",
    )
    max_verify_rows: int | None = _setting(
        None,
        NODES,
        "Trees: nodes one target forward may verify over the whole batch, roots included; the "
        "best ones stay.",
        unset="no limit",
    )
    tpot_ms: float | None = _setting(
        None,
        MILLISECONDS,
        "Policies that plan: milliseconds per output token that no request should exceed. Of the "
        "plans that keep it the fastest is chosen.",
        unset="no limit",
    )
    state: str | None = _setting(
        None,
        FILE_TO_WRITE,
        "Policies that plan: file that keeps the learnt survivals and costs for the next "
        "start with the same models.",
        unset="forgotten at the end",
    )
    record: str | None = _setting(
        None,
        DIRECTORY,
        "Directory for features and accept labels of draft tokens.",
        unset="off",
    )
    record_share: float = _setting(
        0.01,
        SHARE,
        "Share of steps that are recorded, in (0, 1]. They verify full drafts under any "
        "policy, so that labels are not censored.",
    )
    record_limit_mb: float = _setting(
        1024,
        MEGABYTES,
        "Recording stops, serving goes on, once the directory holds this many megabytes.",
    )
    record_roots: str = _setting(
        "visited",
        _one_of("visited", "every"),
        "visited: drafts that serving makes anyway. every: take one token per step and record the "
        "draft behind each, for exact replay and for more data from few prompts; slow, and only "
        "greedy requests without grammar.",
    )
    policy_options: Mapping[str, Any] = _setting(
        {}, OPTIONS, 'Further arguments of the policy, e.g. {"length": 3} for fixed.'
    )
    classifier_dir: str | None = _setting(
        None,
        DIRECTORY,
        "Directory whose classifiers POST /c2t may name.",
        unset="only those shipped",
    )
    loopback_control: bool = _setting(
        False,
        SWITCH,
        "Without an admin key: take POST /c2t from the machine itself.",
        unset="from nobody",
    )

    def __post_init__(self) -> None:
        """Check each field alone; the policy checks its own options when built."""
        for setting in dataclasses.fields(self):
            value, values = getattr(self, setting.name), setting.metadata["values"]
            fits = values.fit(value) or (value is None and setting.default is None)
            require(fits, f"c2t {setting.name}", values.allowed, value)
            if isinstance(value, list):  # JSON's; as tuples, equal settings are equal
                object.__setattr__(self, setting.name, tuple(value))
        for name in POLICY_SETTINGS:
            if name in self.policy_options:
                raise ConfigError(
                    f"c2t policy_options: {name} is a setting of its own: give --c2t-{name}, or "
                    f"{name} beside policy_options"
                )

    @property
    def visits_every_root(self) -> bool:
        """Whether each step takes a single token, so that every root is recorded."""
        return self.record is not None and self.record_roots == "every"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> C2TConfig:
        """Build the configuration from a mapping; an unknown key is an error, not a warning."""
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
            text = read_text(path)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the name
            raise ConfigError(f"cannot read c2t config file {path}: {error}") from error
        return cls.from_json(text, source=f"c2t config file {path}")

    def to_json(self) -> str:
        """Return one line of JSON that :meth:`from_json` reads back to an equal config."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def resolve(*, file: str | None, flags: Mapping[str, Any]) -> C2TConfig:
    """Merge flags over file over defaults. ``flags`` holds only what the user typed."""
    base = C2TConfig.from_file(file) if file is not None else C2TConfig()
    merged = {**dataclasses.asdict(base), **flags}
    return C2TConfig.from_mapping(merged)


def publish(config: C2TConfig) -> None:
    """Switch C2T on for this process and all its future children."""
    os.environ[CONFIG_ENV] = config.to_json()


def active() -> C2TConfig | None:
    """Return the configuration of this process; ``None`` if C2T is off. Every request calls it, so
    it parses once. If the variable names a file, its contents replace the name, for this process
    and its children. Later changes of the file do not affect a running server.
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
