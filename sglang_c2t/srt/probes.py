"""What a seam is: a place in SGLang or FlashInfer that we hold on to, probed by feature.

Never by version. ``seams.txt`` lists them.
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

    ``use`` says what for. ``parameters`` are names the callable must accept, ``fields`` names that
    instances of the class must have (:func:`attribute_names`), both separated by spaces. ``hook``
    is the label of a target of SGLang's hook registry. ``otherwise`` is the seam of an SGLang that
    lacks this one. ``needs``, ``on_gpu`` and ``if_imported`` limit where it is probed.
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
        """The seam itself or, where it does not fit and another does, that one."""
        if self.otherwise is None or self._own_defect() is None:
            return self
        return self if self.otherwise.defect() is not None else self.otherwise.chosen()

    def defect(self) -> str | None:
        """What is wrong with the seam in this SGLang; ``None`` when it fits."""
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
    """Why a module on the way to a dotted name cannot be imported, where there is one.

    ``pkgutil.resolve_name`` says of it what it says of a module that is not there.
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
    """Whether a module can be found; it is not imported, only the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False


def has_gpu() -> bool:
    """Whether torch sees a CUDA device; only who asks pays for torch."""
    import torch

    return torch.cuda.is_available()


@functools.cache
def attribute_names(cls: type) -> frozenset[str]:
    """What instances of ``cls`` have, without making one (that may take a GPU): fields of a
    dataclass, attributes of the class, and what its methods assign to ``self`` by their source.
    """
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return frozenset(dir(cls)).union(fields, *map(_assigned, cls.__mro__))


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """Attributes that the methods of this very class assign to their first argument."""
    if cls.__module__.split(".")[0] not in ("sglang", "sglang_c2t", "flashinfer"):
        return frozenset()  # a base class of another package, whose attributes we leave alone
    return _assignments(cls.__module__).get(cls.__name__, frozenset())


@functools.cache
def _assignments(module: str) -> dict[str, frozenset[str]]:
    """What the methods of each class of a module assign to their first argument."""
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


def sglang_version() -> str:
    """Version of the installed SGLang."""
    from importlib.metadata import version

    return version("sglang")
