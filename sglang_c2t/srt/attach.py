"""How we attach to SGLang.

There are three ways, and no others:

* **hooks**, SGLang's own registries: what ``plugin.py`` registers, and :func:`on_resolution`;
* **subclasses** of its workers, attention backends, graph runner and verify input, which call
  ``super()``;
* **replacements** of an attribute or a module's global, which must be there already: for the time
  of a block (:func:`swapped`) or for good (:func:`write`, :func:`wrap_global`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_c2t.srt.probes import SeamError, sglang_version
from sglang_c2t.srt.seams import EVERY_SEAM, step_seam


def on_resolution(step: str, hook: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Run ``hook(server_args, previous)`` around a step of SGLang's argument resolution.

    Silent when the step is gone as well: :func:`missing_hooks` then names it.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def around(previous: Callable[[Any], None], server_args: Any) -> None:
            hook(server_args, previous)

        HookRegistry.register(step_seam(step).chosen().target, around, HookType.AROUND)
        return
    register_resolution_hook(step)(hook)


def wrap_global(module_name: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``module.name`` by ``wrapper(original, ...)``, once per process.

    For functions that upstream calls through a module global; SGLang's hook registry
    would import the module in every process, also in those that never verify.
    """
    module = importlib.import_module(module_name)
    original = _present(module, name)
    if getattr(original, "c2t_wrapper", None) is wrapper:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.c2t_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(module, name, wrapped)


def write(owner: Any, **values: Any) -> None:
    """``owner.name = value`` for each of them, on an object or module of SGLang or FlashInfer.

    Raises :class:`SeamError` where nothing of that name is there: it would not be read.
    """
    for name, value in values.items():
        _present(owner, name)
        setattr(owner, name, value)


def _present(owner: Any, name: str) -> Any:
    """``owner.name``; :class:`SeamError` where upstream has no such thing."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        what = getattr(owner, "__name__", type(owner).__qualname__)
        purposes = [
            s.purpose
            for s in EVERY_SEAM
            if name in (*s.fields.split(), s.target.rpartition(".")[2])
        ]
        raise SeamError(
            f"SGLang {sglang_version()} has no {name} on {what}; "
            f"C2T needs it because it {(purposes or ['writes it'])[0]}"
        ) from error


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block; :class:`SeamError` if it was not there."""
    original = _present(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
