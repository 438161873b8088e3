"""Call a function after any code imports a module. Imports nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def behind(names: tuple[str, ...], act: Callable[[], object]) -> None:
    """Do ``act`` once, when the first module of these ``names`` is there; at once if one is."""
    if sys.modules.keys() & set(names):
        act()
    else:
        sys.meta_path.insert(0, _Watching(set(names), act))


class _Watching(MetaPathFinder):
    """Finds what it waits for as usual, and has it loaded with ``act`` behind it."""

    def __init__(self, names: set[str], act: Callable[[], object]) -> None:
        self._names, self._act = names, act

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.discard(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader, self._once)
        return spec

    def _once(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


class _Acting(Loader):
    """Another loader, and something behind it."""

    def __init__(self, loader: Any, act: Callable[[], None]) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act()
