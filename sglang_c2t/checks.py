"""Checks of values from users and clients, and how error messages show these values. It imports the
standard library only.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

#: Largest whole number of a setting: the maximum of int32.
MAX_WHOLE = 2**31 - 1

#: Largest number of a float32 tensor.
MAX_NUMBER = (2 - 2**-23) * 2.0**127


class ConfigError(ValueError):
    """A setting that cannot be served; its message is one line for the user."""


def require(fits: bool, what: str, allowed: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` ``fits``: "``what`` must be ``allowed``"."""
    if not fits:
        raise ConfigError(f"{what} must be {allowed}, got {shown(value)}")


def is_number(value: object) -> bool:
    """Whether the value is a finite number within float32; a bool is not."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -MAX_NUMBER <= value <= MAX_NUMBER  # false for nan
    )


def is_whole(value: object, least: int = 0, most: int = MAX_WHOLE) -> bool:
    """Whether the value is a whole number in [least, most]; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def shown(value: object, longest: int = 80) -> str:
    """Format a value for a message: one line, escaped, shortened."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def format_error(error: BaseException, longest: int = 300) -> str:
    """Format an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:longest]}" if text else type(error).__name__


def parse_json(text: str, *, source: str) -> Any:
    """Parse unambiguous JSON. :class:`ConfigError` names the ``source``. It is raised for invalid
    JSON, nan or infinite numbers, a repeated key, too deep nesting, and NUL or half characters in
    strings.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_no_number,
            parse_float=_finite,
        )
        _require_characters(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    except ValueError as error:  # ours, and integers of thousands of digits
        raise ConfigError(f"{source}: {error}") from error
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is given twice")
    return values


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _require_characters(value: Any) -> None:
    """Refuse strings that files and logs cannot hold."""
    if isinstance(value, str):
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{shown(value)} holds NUL or half a character")
    elif isinstance(value, dict):
        for name, item in value.items():
            _require_characters(name)
            _require_characters(item)
    elif isinstance(value, list):
        for item in value:
            _require_characters(item)
