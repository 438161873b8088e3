"""What SGLang's CPU engine asks of ``sgl_kernel``, in plain torch, for machines without it.

SGLang's CPU engine needs kernels that no PyPI wheel carries. `install` supplies the few small
ops of its speculative path where they are missing and touches nothing where they exist.
Knows nothing of SGLang: ``sglang_c2t.srt.cpu.engine`` plugs this in.

Two gaps are told apart:

* the wheel's ``sgl_kernel`` cannot be imported at all (it needs ``libcuda.so.1``):
  the folder ``stand_in`` goes in front of ``sys.path``, which spawned children inherit;
* ``sgl_kernel`` imports, but its CPU ops were never compiled in: the ops are defined in
  torch's ``sgl_kernel`` namespace, where the wheel's own Python wrappers look for them.
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
    """A torch function and the schema its caller expects, name left out."""

    run: Callable[..., Any]
    schema: str


_SLOT_RANGES = (
    "(Tensor req_pool_indices, {rw} req_to_token, Tensor start_offset, Tensor end_offset, "
    "{out} out_cache_loc, int pool_len) -> ()"
)
OPS: dict[str, Op] = {
    "build_tree_kernel_efficient_cpu": Op(
        tree_build.build_tree,
        "(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
        "Tensor(a!) tree_mask, Tensor(b!) positions, Tensor(c!) retrive_index, "
        "Tensor(d!) retrive_next_token, Tensor(e!) retrive_next_sibling, "
        "int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()",
    ),
    "verify_tree_greedy_cpu": Op(
        tree_verify.verify_tree,
        "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
        "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, "
        "Tensor retrive_next_sibling, Tensor target_predict) -> ()",
    ),
    "assign_draft_cache_locs_contiguous_cpu": Op(
        cache_locs.draft_locs,
        "(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
        "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()",
    ),
    "assign_extend_cache_locs_cpu": Op(
        cache_locs.gather_ranges, _SLOT_RANGES.format(rw="Tensor", out="Tensor(a!)")
    ),
    "assign_req_to_token_pool_cpu": Op(
        cache_locs.scatter_ranges, _SLOT_RANGES.format(rw="Tensor(a!)", out="Tensor")
    ),
    "fill_bonus_tokens_cpu": Op(
        commit.fill_bonus_tokens,
        "(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, "
        "int accept_stride) -> ()",
    ),
    "fill_accept_out_cache_loc_cpu": Op(
        commit.fill_accepted_locs,
        "(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()",
    ),
    "rotate_input_ids_cpu": Op(
        commit.rotate_input_ids,
        "(Tensor(a!) input_ids, Tensor extend_start_loc, Tensor extend_seq_lens, "
        "Tensor topk_index, Tensor? select_index=None) -> ()",
    ),
    "copy_all_layer_kv_cache_cpu": Op(
        kv_copy.copy_all_layers,
        "(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()",
    ),
    "murmur_hash32_cpu": Op(
        sampling.murmur_hash32,
        "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor",
    ),
}

# torch drops the ops of a Library that is garbage collected
_library: Any = None


def stand_in_folder() -> Path:
    """The folder that holds the stand-in package ``sgl_kernel``."""
    return Path(__file__).parent / "stand_in"


def install() -> list[str]:
    """Bind what is missing; returns the names this call bound (empty when all is there)."""
    bound = [] if _importable() else [_use_stand_in()]
    return bound + _define_missing_ops()


def _importable() -> bool:
    """Whether ``sgl_kernel``, the real one or the stand-in, can be imported."""
    try:
        module = importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError):
        # the wheel raises ImportError without libcuda.so.1, OSError for other libraries
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
        # in front of site-packages, where the wheel that cannot be imported lies
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
