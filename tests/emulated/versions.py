"""Differences between the SGLang releases that the emulated device serves.

Where a release looks for its compiled kernels, how its scheduler is made and asked, and what one of
its decode steps may cost. Everything else under ``tests/emulated`` is for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch import Tensor

from sglang_c2t.cpu.tree_build import build_tree
from sglang_c2t.cpu.tree_verify import verify_tree
from sglang_c2t.srt.versions import TESTED
from tests.emulated.kernels import store_cache

#: What is counted of a decode step, outside of graphs, while requests come and go.
COUNTED = ("launches", "H2D", "D2H", "pageable", "syncs", "event waits", "replays")


@dataclass(frozen=True)
class Release:
    """An SGLang, with the FlashInfer and the ``sgl_kernel`` that come with it."""

    loaders: tuple[str, ...]
    """Modules that have ``load_jit``, which compiles kernels when they are first used."""

    operations: dict[str, Callable[..., Any]]
    """References of operations of ``sgl_kernel`` that not all releases launch, by schema."""

    compiled: dict[str, Callable[..., None]]
    """The same of kernels that are compiled when they are first used, by module and function."""

    deep_gemm: ModuleType | None
    """Module that is imported in its place, and never called here."""

    without: dict[str, dict[str, Any]]
    """Replacements in a module for functions that need a driver."""

    arguments: Callable[[list[str]], Any]
    """A server's, from flags."""

    scheduler: Callable[[Any, Any, int], Any]
    """Makes one from arguments, ports and its rank."""

    cached: Callable[[Any, Any], Tensor]
    """Slots of a request's tokens, those that are in the tree of the prefix cache."""

    budget: dict[str, tuple[int, ...]]
    """By server, what a step may count at most, in the order of :data:`COUNTED`. Pageable copies
    are SGLang's own. Of planned servers those of "any plan" are counted; others go by the clock.
    """


def _store_cache_0_5_17(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, split: int,
    limit: int, skip: int,
) -> None:  # fmt: skip
    """``split`` says how a GPU shares a row."""
    del split
    store_cache(k, v, k_cache, v_cache, slots, limit, skip)


def _arguments_0_5_17(flags: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(flags)


def _scheduler_0_5_17(args: Any, ports: Any, rank: int) -> Any:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish

    publish(args, role="scheduler")
    return Scheduler(args, ports, 0, rank, 0, 0, 0, 0, None)


def _cached_0_5_17(tree: Any, req: Any) -> Tensor:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(req.origin_input_ids + req.output_ids, req.extra_key)
    slots: Tensor = tree.match_prefix(MatchPrefixParams(key=key)).device_indices
    return slots


def _arguments_0_5_23(flags: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(flags)
    args.resolve_once()
    args.check_server_args()
    return args


def _scheduler_0_5_23(args: Any, ports: Any, rank: int) -> Any:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    return Scheduler(args, ports)


def _cached_0_5_23(tree: Any, req: Any) -> Tensor:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(tree, req, req.origin_input_ids + req.output_ids)
    found = tree.match_prefix(MatchPrefixParams(key=key))
    slots: Tensor = tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]
    return slots


OLDEST = Release(
    loaders=("sglang.kernels.jit.utils", "sglang.kernels.jit.utils.compile"),
    operations={
        "build_tree_kernel_efficient(Tensor parent_list, Tensor selected_index, "
        "Tensor verified_seq_len, Tensor! tree_mask, Tensor! positions, "
        "Tensor! retrive_index, Tensor! retrive_next_token, Tensor! retrive_next_sibling, "
        "int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()": build_tree,
        "verify_tree_greedy(Tensor! predicts, Tensor! accept_index, "
        "Tensor! accept_token_num, Tensor candidates, Tensor retrive_index, "
        "Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor target_predict)"
        " -> ()": verify_tree,
    },
    compiled={"kvcache.store_cache": _store_cache_0_5_17},
    deep_gemm=ModuleType("deep_gemm"),  # its attention for MLA cannot be imported without
    without={},
    arguments=_arguments_0_5_17,
    scheduler=_scheduler_0_5_17,
    cached=_cached_0_5_17,
    # Draft extend is in no graph on FA3, and on FlashInfer lengths travel twice more.
    budget={
        "target alone, FA3": (40, 1, 1, 0, 0, 1, 1),
        "EAGLE3 chains, FA3, stock": (100, 3, 2, 2, 0, 1, 2),
        "EAGLE3 chains, FA3, gated": (104, 3, 4, 2, 0, 2, 2),
        "EAGLE3 chains, FlashInfer, gated": (88, 9, 6, 4, 2, 2, 3),
        "EAGLE3 trees, FlashInfer, gated": (102, 9, 6, 4, 2, 2, 3),
    },
)

NEWEST = Release(
    loaders=(
        "sglang.kernels.jit.utils",
        "sglang.kernels.jit.utils.compile",
        "sglang.kernels.jit.utils.compile.loader",
    ),
    operations={},
    compiled={
        "kvcache.store_cache": store_cache,
        "speculative_tree.build_tree_kernel_efficient": build_tree,
        "speculative_tree.verify_tree_greedy": verify_tree,
    },
    deep_gemm=None,
    # It copies by raw addresses: SGLang's own way without it is torch's.
    without={"sglang.kernels.ops.memory.small_copy": {"try_small_copy": lambda *_: False}},
    arguments=_arguments_0_5_23,
    scheduler=_scheduler_0_5_23,
    cached=_cached_0_5_23,
    budget={
        "target alone, FA3": (40, 1, 1, 0, 0, 1, 1),
        "EAGLE3 chains, FA3, stock": (66, 3, 2, 2, 0, 1, 3),
        "EAGLE3 chains, FA3, gated": (73, 3, 4, 2, 0, 2, 3),
        # The last step of a burst of draft-free ones runs draft extend up to three times.
        "EAGLE3 chains, FA3, any plan": (86, 4, 5, 2, 1, 1, 3),
        # A tree of one layer is grown outside of graphs.
        "EAGLE3 trees, FlashInfer, any plan": (114, 11, 7, 2, 2, 2, 3),
        "EAGLE3 chains, FlashInfer, gated": (82, 9, 6, 2, 2, 2, 3),
        "EAGLE3 chains, FlashInfer, any plan": (98, 11, 7, 2, 2, 2, 3),
        "EAGLE3 trees, FlashInfer, gated": (88, 9, 6, 2, 2, 2, 3),
        # SGLang alone: (112, 15, 3, 2, 1, 1, 2).
        "NEXTN chains, FlashInfer, gated": (111, 12, 5, 2, 1, 2, 2),
    },
)

#: By SGLang's version.
RELEASES = {TESTED[0]: OLDEST, TESTED[-1]: NEWEST}

#: The installed release; an unknown one counts as the newest.
RELEASE = RELEASES.get(version("sglang"), NEWEST)
