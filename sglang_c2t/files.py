"""Reads files that users name within bounds, and writes files atomically. It imports the standard
library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

#: Writes a file at the given path.
Write = Callable[[Path], object]


#: Most bytes of a file of settings, a state or a card: far more than ours have.
LARGEST_JSON = 1 << 20


def require_regular(path: str | os.PathLike[str], most: int) -> int:
    """Return the file's size in bytes. Raises OSError unless it is a regular file of at most
    ``most`` bytes: a FIFO or a terminal would block its reader, and a device has no end.
    """
    return _require_regular(os.stat(path), path, most)


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the contents of a regular file of at most ``most`` bytes; otherwise OSError."""
    require_regular(path, most)  # before opening, which may affect a device
    # Not blocking: another file may have replaced it, and some in /proc block like pipes.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = _require_regular(os.fstat(file.fileno()), path, most)
        data = file.read(size + 1) or b""
    if len(data) > size:
        raise OSError(errno.EBUSY, "grows while it is read", str(path))
    return data


def read_text(path: str | os.PathLike[str], most: int = LARGEST_JSON) -> str:
    """Read a file as UTF-8, as :func:`read_bytes`; UnicodeDecodeError if it is none."""
    return read_bytes(path, most).decode()


def _require_regular(found: os.stat_result, path: str | os.PathLike[str], most: int) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"{found.st_size} bytes, of {most} at most", str(path))
    return found.st_size


def write_whole(files: dict[Path, Write]) -> None:
    """Write all files under temporary names, then rename them. If a write fails, no file appears
    and none is left behind. The temporary name keeps the suffix, by which some writers choose the
    format. A link stays and its target is written; OSError if that is no regular file.
    """
    with ExitStack() as cleanup:
        written: list[tuple[Path, Path]] = []
        for named, write in files.items():
            path = Path(os.path.realpath(named))
            _require_replaceable(path)
            tmp = path.with_name(f".{os.getpid()}.{path.name}")
            cleanup.callback(tmp.unlink, missing_ok=True)
            write(tmp)
            tmp.chmod(0o644)  # safetensors makes files that only their owner can read
            written.append((tmp, path))
        for tmp, path in written:
            os.replace(tmp, path)


def _require_replaceable(path: Path) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    _require_regular(found, path, found.st_size)


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write texts in UTF-8, as :func:`write_whole`."""
    write_whole({path: partial(Path.write_text, data=text, encoding="utf-8")
                 for path, text in texts.items()})  # fmt: skip
