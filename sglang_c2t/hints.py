"""What somebody probably meant by a name that does not exist.

A leaf: imports neither torch nor sglang.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ``"; did you mean beta?"``, or ``""`` if nothing is close."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
