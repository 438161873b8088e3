"""Stand-ins for SGLang's objects that cannot have what SGLang's have not.

A double that brings the attribute which the code under test reads hides that SGLang has
renamed it. So a double is an instance of the real class, built without its ``__init__`` (which
may want a GPU or a model), and holds only what that class's source says its instances hold.
"""

from __future__ import annotations

import pkgutil
from typing import Any, cast

from sglang_c2t.srt.compat import attribute_names


def double(cls: type | str, **attributes: Any) -> Any:
    """An instance of ``cls``, a class or its full name, that holds ``attributes``."""
    real = cast(type, pkgutil.resolve_name(cls)) if isinstance(cls, str) else cls
    unknown = sorted(attributes.keys() - attribute_names(real))
    assert not unknown, f"instances of {real.__qualname__} have no {', '.join(unknown)}"
    computed = {n: v for n, v in attributes.items() if isinstance(getattr(real, n, None), property)}
    made = object.__new__(type(real.__name__, (real,), computed) if computed else real)
    for name in attributes.keys() - computed.keys():
        setattr(made, name, attributes[name])
    return made
