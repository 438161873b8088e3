"""Assertions on the messages for invalid input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_c2t.config import ConfigError


@contextmanager
def refused(*said: str) -> Iterator[None]:
    """The block raises a :class:`ConfigError` of one line that says all of this."""
    with pytest.raises(ConfigError) as error:
        yield
    assert "\n" not in str(error.value)
    for words in said:
        assert words in str(error.value)
