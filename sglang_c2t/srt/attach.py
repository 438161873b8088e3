"""The three ways in which the plugin attaches to SGLang.

* **hooks**, SGLang's own registries: :func:`hook` and :func:`on_resolution`;
* **subclasses** of its workers, attention backends, graph runner and verify input, which call
  ``super()``;
* **replacements** of an existing attribute or module global, either for a block (:func:`swapped`)
  or permanently (:func:`write`, :func:`wrap_global`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_c2t.srt import versions
from sglang_c2t.srt.probes import SeamError
from sglang_c2t.srt.seams import GROUPS, hook_targets


def hook(label: str, function: Callable[..., Any], kind: str) -> None:
    """Register ``function`` on the targets of a label of ``seams.txt``. ``kind`` is "before",
    "after" or "around"; see SGLang's ``HookType``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in hook_targets(label):
        HookRegistry.register(target, function, HookType[kind.upper()])


def on_resolution(step: str, run: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Call ``run(server_args, previous)`` around a step of SGLang's argument resolution. It is
    silent if the step is missing as well: :func:`missing_hooks` then names it.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:

        def around(previous: Callable[[Any], None], server_args: Any) -> None:
            run(server_args, previous)

        hook(step, around, "around")
        return
    register_resolution_hook(step)(run)


def wrap_global(module_name: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``module.name`` by ``wrapper(original, ...)``, once per process. For functions that
    upstream calls through a module global. SGLang's hook registry would import the module in every
    process, also in those that never verify.
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
    """Set ``owner.name = value`` for each of them, on an object or module of SGLang or FlashInfer.
    Raises :class:`SeamError` if the attribute does not exist, because nothing would read it.
    """
    for name, value in values.items():
        _present(owner, name)
        setattr(owner, name, value)


def _present(owner: Any, name: str) -> Any:
    """Return ``owner.name``; :class:`SeamError` if upstream does not have it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        what = getattr(owner, "__name__", type(owner).__qualname__)
        uses = [
            seam.use
            for seams in GROUPS.values()
            for seam in seams
            if name in (*seam.fields.split(), seam.target.rpartition(".")[2])
        ]
        raise SeamError(
            f"SGLang {versions.installed()} has no {name} on {what}; "
            f"C2T needs it for {(uses or ['a write'])[0]}"
        ) from error


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` inside the block; :class:`SeamError` if it does not exist."""
    original = _present(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
