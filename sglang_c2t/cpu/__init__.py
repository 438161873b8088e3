"""The ops of ``sgl_kernel`` that SGLang's CPU engine needs, in plain torch.

SGLang's CPU engine needs kernels that no PyPI wheel has. `install` supplies the few small ops of
its speculative path that are missing, and keeps existing ones. It knows nothing of SGLang:
``sglang_c2t.srt.cpu.engine`` connects it.

There are two cases:

* the wheel's ``sgl_kernel`` cannot be imported at all (it needs ``libcuda.so.1``):
  the folder ``stand_in`` goes to the front of ``sys.path``, which spawned children inherit;
* ``sgl_kernel`` imports without its CPU ops: they are defined in torch's ``sgl_kernel``
  namespace, where the wheel's own Python wrappers find them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sglang_c2t.cpu import cache_locs, commit, kv_copy, sampling, tree_build, tree_verify


class Op(NamedTuple):
    """A torch function with the parameters of the op it replaces, and the arguments it writes."""

    run: Callable[..., Any]
    writes: tuple[str, ...] = ()

    @property
    def schema(self) -> str:
        """The op's schema for torch, without its name."""
        return torch.library.infer_schema(self.run, mutates_args=self.writes)


_LINKS = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
OPS: dict[str, Op] = {
    "build_tree_kernel_efficient_cpu": Op(
        tree_build.build_tree, ("tree_mask", "positions", *_LINKS)
    ),
    "verify_tree_greedy_cpu": Op(
        tree_verify.verify_tree, ("predicts", "accept_index", "accept_token_num")
    ),
    "assign_draft_cache_locs_contiguous_cpu": Op(cache_locs.draft_locs, ("out_cache_loc",)),
    "assign_extend_cache_locs_cpu": Op(cache_locs.gather_ranges, ("out_cache_loc",)),
    "assign_req_to_token_pool_cpu": Op(cache_locs.scatter_ranges, ("req_to_token",)),
    "fill_bonus_tokens_cpu": Op(commit.fill_bonus_tokens, ("bonus_tokens",)),
    "fill_accept_out_cache_loc_cpu": Op(commit.fill_accepted_locs, ("accept_out_cache_loc",)),
    "rotate_input_ids_cpu": Op(commit.rotate_input_ids, ("input_ids",)),
    "copy_all_layer_kv_cache_cpu": Op(kv_copy.copy_all_layers),
    "murmur_hash32_cpu": Op(sampling.murmur_hash32),
}

# torch drops the ops of a Library that is garbage collected
_library: Any = None


def stand_in_folder() -> Path:
    """Return the folder of the stand-in package ``sgl_kernel``."""
    return Path(__file__).parent / "stand_in"


def install() -> list[str]:
    """Bind missing ops; returns the names that this call bound (empty if all exist)."""
    bound = [] if _importable() else [_use_stand_in()]
    return bound + _define_missing_ops()


def _importable() -> bool:
    """Whether ``sgl_kernel``, the real one or the stand-in, can be imported."""
    try:
        module = importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError):
        # The wheel raises ImportError without libcuda.so.1, OSError for other libraries.
        _forget("sgl_kernel")
        return False
    return isinstance(module, ModuleType)


def _forget(package: str) -> None:
    """Drop the half-imported modules of a package, so that the stand-in can be found."""
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]


def _use_stand_in() -> str:
    folder = str(stand_in_folder())
    if folder not in sys.path:
        # Before site-packages, which may have a wheel that cannot be imported.
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    importlib.import_module("sgl_kernel")
    return "sgl_kernel (stand-in package)"


def _define_missing_ops() -> list[str]:
    global _library
    missing = [name for name in OPS if not hasattr(torch.ops.sgl_kernel, name)]
    if missing and _library is None:
        _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in missing:
        _library.define(name + OPS[name].schema)
        _library.impl(name, OPS[name].run, "CPU")
    return [f"sgl_kernel.{name}" for name in missing]
