"""What somebody probably meant by a name that does not exist.

A leaf: imports neither torch nor sglang.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ``"; did you mean beta?"``, or ``""`` if nothing is close."""
    # Cut, because comparing takes time in proportion to the length, which clients choose.
    close = difflib.get_close_matches(name[:100].lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def hints_for(message: str, known: Iterable[str]) -> str:
    """:func:`did_you_mean` for what argparse did not know: flags, or a choice.

    ``message`` is argparse's: ``unrecognized arguments: --bta=1 --x`` or ``argument command:
    invalid choice: 'recrod' (choose from ...)``.
    """
    if message.startswith("unrecognized arguments: "):
        unknown = re.findall(r"(?<!\S)--[^\s=]+", message)
    else:
        unknown = re.findall(r"invalid choice: '([^']*)'", message)
    known = list(known)
    return "".join(did_you_mean(name, known) for name in unknown)
