"""Files that appear whole or not at all. A leaf: standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

#: Writes a file at the path it is given.
Write = Callable[[Path], object]


def write_whole(files: dict[Path, Write]) -> None:
    """Write all files under temporary names, then rename them.

    When a write fails, none of them appears and nothing is left behind. The temporary name
    keeps the suffix, because some writers choose the format by it.
    """
    with ExitStack() as cleanup:
        written: list[tuple[Path, Path]] = []
        for path, write in files.items():
            tmp = path.with_name(f".{os.getpid()}.{path.name}")
            cleanup.callback(tmp.unlink, missing_ok=True)
            write(tmp)
            tmp.chmod(0o644)  # safetensors makes files that only their owner can read
            written.append((tmp, path))
        for tmp, path in written:
            os.replace(tmp, path)


def write_texts(texts: Mapping[Path, str]) -> None:
    """:func:`write_whole` of texts, in UTF-8."""
    write_whole({path: partial(Path.write_text, data=text, encoding="utf-8")
                 for path, text in texts.items()})  # fmt: skip
