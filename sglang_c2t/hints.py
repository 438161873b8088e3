"""Suggestions for names that do not exist. It imports neither torch nor sglang."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: ``"; did you mean beta?"``, or ``""``."""
    # The name is cut, because clients choose its length and comparing takes time in proportion.
    close = difflib.get_close_matches(name[:100].lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def hints_for(message: str, known: Iterable[str]) -> str:
    """Return suggestions for flags or a choice that argparse did not know. ``message`` is
    argparse's: ``unrecognized arguments: --bta=1 --x`` or ``argument command: invalid choice:
    'recrod' (choose from ...)``.
    """
    if message.startswith("unrecognized arguments: "):
        unknown = re.findall(r"(?<!\S)--[^\s=]+", message)
    else:
        unknown = re.findall(r"invalid choice: '([^']*)'", message)
    known = list(known)
    return "".join(did_you_mean(name, known) for name in unknown)
