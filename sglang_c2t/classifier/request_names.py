"""Request ids in a recording, and a file that restores their names.

Clients may put anything into request ids, for example a user's address. A recording holds keyed
hashes instead. Each recording server makes a new key, shows it in ``/server_info`` and stores it
nowhere. A client that sends a prompt file knows its own ids; :func:`name_requests` writes them next
to the shards.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from sglang_c2t.checks import ConfigError
from sglang_c2t.files import read_text, write_whole

PATTERN = "names-*.json"

#: Most bytes of a file of names.
LARGEST_NAMES = 1 << 28


def new_key() -> str:
    """Return a random key as hexadecimal digits."""
    return secrets.token_hex(16)


def recorded_id(rid: str, key: str) -> str:
    """Return the hash of ``rid`` in a recording: 32 hexadecimal digits."""
    text = rid.encode("utf-8", errors="surrogatepass")  # JSON may hold half a surrogate pair
    return hashlib.blake2b(text, key=bytes.fromhex(key), digest_size=16).hexdigest()


def name_requests(directory: Path, key: str, rids: Iterable[str]) -> None:
    """Write a file of names, so that readers of the recording in ``directory`` get these ids."""
    text = json.dumps({recorded_id(rid, key): rid for rid in rids}, indent=0) + "\n"
    path = directory / PATTERN.replace("*", secrets.token_hex(4))
    write_whole({path: lambda tmp: tmp.write_text(text, encoding="utf-8")})


def names_in(directory: Path) -> dict[str, str]:
    """Return names by recorded id, from all files of names in ``directory``."""
    names: dict[str, str] = {}
    for path in sorted(directory.glob(PATTERN)):
        try:
            found = json.loads(read_text(path, LARGEST_NAMES))  # may hold half a surrogate pair
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the names of requests in {path}: {error}") from error
        if not isinstance(found, dict) or not all(isinstance(n, str) for n in found.values()):
            raise ConfigError(f"{path} must hold a JSON object of names of requests")
        names |= found
    return names
