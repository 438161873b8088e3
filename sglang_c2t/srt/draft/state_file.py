"""The state file keeps a planner's learnt values across restarts. It is JSON of a few kilobytes,
written atomically. For an unreadable file, or one from other models, the server logs one line and
the planner starts cold.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from sglang_c2t.checks import ConfigError, format_error, parse_json, shown
from sglang_c2t.files import read_text, require_regular, write_texts
from sglang_c2t.plan.planner import Planner

logger = logging.getLogger(__name__)

#: Version of the format. Version 1 had other kinds of steps: the planner ignores it.
VERSION = 2

#: Seconds between two writes while the server runs.
EVERY = 60.0

#: The same after a request for a report, which clients may repeat at any rate.
EVERY_IF_ASKED = 1.0


def require_state(path: Path) -> bool:
    """Return whether the file exists; :class:`ConfigError` if the path cannot hold a file."""
    if not path.parent.is_dir():
        raise ConfigError(f"c2t state: {path.parent} is no directory, for the file {path.name}")
    try:
        require_regular(path, sys.maxsize)
    except FileNotFoundError:  # or a dangling link
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"c2t state: {path} cannot be written: {format_error(error)}") from error
    return True


class StateFile:
    """The file of one planner.

    Args:
        path: Path of the file; its directory exists.
        planner: Its state is saved. The state of an earlier server is restored at once.
        learnt_on: Conditions of the state: models, policy, draft length.
        writes: Whether to write the file; of several planners that share a file, one does.

    Raises:
        ConfigError: The file could not be written.
    """

    def __init__(
        self, path: Path, planner: Planner, learnt_on: dict[str, Any], *, writes: bool = True
    ) -> None:
        self._path, self._planner, self._learnt_on = path, planner, learnt_on
        self._saved_at = time.monotonic()
        self._failed = False
        self._writes = writes
        if require_state(path):
            self._restore()
        else:
            logger.info("C2T: no state in %s yet: the planner starts cold", path)
        self.save()
        if self._failed:
            raise ConfigError(f"c2t state: {path} cannot be written")

    def save_now_and_then(self, every: float = EVERY) -> None:
        """Save the state if the last write is at least ``every`` seconds old."""
        if time.monotonic() - self._saved_at >= every:
            self.save()

    def save(self) -> None:
        """Save the state; on failure serving continues, and the log has one line."""
        if not self._writes:
            return
        self._saved_at = time.monotonic()
        content = {
            "version": VERSION,
            "learnt_on": self._learnt_on,
            "planner": self._planner.state(),
        }
        text = json.dumps(content) + "\n"
        try:
            write_texts({self._path: text})
        except OSError as error:
            if not self._failed:
                logger.warning("C2T: cannot write %s: %s", self._path, error.strerror)
            self._failed = True
        else:
            self._failed = False

    def _restore(self) -> None:
        try:
            self._planner.restore(self._read())
        except Exception as error:  # the file may hold anything
            self._planner.forget()
            logger.warning(
                "C2T: the state in %s cannot be used, and the planner starts cold: %s",
                self._path,
                format_error(error),
            )
        else:
            logger.info("C2T: the planner goes on from %s", self._path)

    def _read(self) -> dict[str, Any]:
        content = parse_json(read_text(self._path), source="it")
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"it is no state of version {VERSION}")
        theirs = content.get("learnt_on")
        if theirs != self._learnt_on:
            raise ValueError(f"it was learnt on {shown(theirs)}, not on {self._learnt_on}")
        state = content["planner"]
        if not isinstance(state, dict):
            raise ValueError("its planner is no object")
        return state
