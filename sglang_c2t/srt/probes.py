"""A seam: a place in SGLang or FlashInfer that the plugin depends on, probed by feature. It is
never probed by version. ``seams.txt`` lists the seams.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_c2t.config import ConfigError


class SeamError(ConfigError):
    """The installed SGLang lacks something C2T attaches to."""


@dataclass(frozen=True)
class Seam:
    """One symbol of SGLang or FlashInfer that we call, override, wrap or write.

    ``use`` is the reason. ``parameters`` are names that the callable must accept, ``fields`` names
    that instances of the class must have (:func:`attribute_names`), both separated by spaces.
    ``hook`` is the label of a target of SGLang's hook registry. ``otherwise`` is the seam of an
    SGLang without this one. ``needs``, ``on_gpu`` and ``if_imported`` limit where it is probed.
    """

    target: str
    use: str
    parameters: str = ""
    fields: str = ""
    hook: str = ""
    otherwise: Seam | None = None
    needs: str = ""
    on_gpu: bool = False
    if_imported: bool = False

    def has_hook(self, label: str) -> bool:
        """Whether this seam, or one that replaces it, is the hook of that label."""
        other = self.otherwise
        return self.hook == label or (other is not None and other.has_hook(label))

    def chosen(self) -> Seam:
        """Return the seam itself, or its alternative if only that fits."""
        if self.otherwise is None or self._own_defect() is None:
            return self
        return self if self.otherwise.defect() is not None else self.otherwise.chosen()

    def defect(self) -> str | None:
        """Return the seam's defect in this SGLang; ``None`` if it fits."""
        own = self._own_defect()
        if own is None or self.otherwise is None:
            return own
        other = self.otherwise.defect()
        return None if other is None else f"{own}; nor {self.otherwise.target}: {other}"

    def _own_defect(self) -> str | None:
        if self.needs and not module_exists(self.needs):
            return None
        if self.on_gpu and not has_gpu():
            return None
        if self.if_imported and self.target.rpartition(".")[0] not in sys.modules:
            return None
        try:
            found = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"not found ({import_failure(self.target) or error})"
        missing = [p for p in self.parameters.split() if p not in parameters_of(found)]
        if missing:
            return f"lacks the parameters {missing}"
        missing = [f for f in self.fields.split() if f not in attribute_names(found)]
        if missing:
            return f"lacks the fields {missing}"
        return None


def parameters_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def import_failure(target: str) -> str | None:
    """Return why a module on the path of a dotted name cannot be imported; ``None`` if it can.
    ``pkgutil.resolve_name`` reports it as a missing module.
    """
    parts = target.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        try:
            importlib.import_module(module)
        except ImportError as error:
            gone = isinstance(error, ModuleNotFoundError) and error.name == module
            return None if gone else f"{module} cannot be imported: {error}"
    return None


def module_exists(module: str) -> bool:
    """Whether a module can be found; this imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package
        return False


def has_gpu() -> bool:
    """Whether torch sees a CUDA device; it imports torch only when called."""
    import torch

    return torch.cuda.is_available()


@functools.cache
def attribute_names(cls: type) -> frozenset[str]:
    """Return the attributes of instances of ``cls`` without making one, which may need a GPU. They
    are the fields of a dataclass, class attributes, and what its methods assign to ``self``.
    """
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return frozenset(dir(cls)).union(fields, *map(_assigned, cls.__mro__))


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """Return attributes that the methods of this class itself assign to their first argument."""
    if cls.__module__.split(".")[0] not in ("sglang", "sglang_c2t", "flashinfer"):
        return frozenset()  # a base class of another package, whose attributes we leave alone
    return _assignments(cls.__module__).get(cls.__name__, frozenset())


@functools.cache
def _assignments(module: str) -> dict[str, frozenset[str]]:
    """Return by class what its methods assign to their first argument."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        cls.name: frozenset(
            node.attr
            for method in ast.walk(cls)
            if isinstance(method, ast.FunctionDef) and method.args.args
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == method.args.args[0].arg
        )
        for cls in classes
    }
