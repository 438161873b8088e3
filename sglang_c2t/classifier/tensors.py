"""Checks safetensors files that users name, before they are read."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

from sglang_c2t.files import require_regular


def require_safetensors(path: Path, *, largest: int, largest_header: int) -> None:
    """Raise OSError unless this is a regular file within ``largest`` bytes and ``largest_header``.
    The header names each tensor.
    """
    require_regular(path, largest)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        first = file.read(8) or b""
    header = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if header > largest_header:
        raise OSError(
            errno.EFBIG, f"a header of {header} bytes, of {largest_header} at most", str(path)
        )
