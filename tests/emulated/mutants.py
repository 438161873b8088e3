"""Mistakes in the CUDA path that somebody could make, each of which the tests must see.

A mutant breaks one thing in the process of a server: when it has started, or before. On the
emulated device it must end in an error, keep other keys and values, verify other rows, or exceed
the budget of a step; ``test_serving.py`` looks. A GPU would show some of them now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MUTANTS: dict[str, Mutant] = {}


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    server: str
    """Which of the tests' servers makes it."""

    break_it: Callable[[], None]
    at_start: bool = False
    """Before the server starts, as it shows in what is captured."""


def mutant(server: str, *, at_start: bool = False) -> Callable[[Callable[[], None]], None]:
    """Its function's name says what goes wrong."""

    def add(break_it: Callable[[], None]) -> None:
        MUTANTS[break_it.__name__.replace("_", " ")] = Mutant(server, break_it, at_start)

    return add


def around(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """``instead`` is given the function that it replaces, and its arguments."""
    kept = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: instead(kept, *args, **kwargs))


CHAINS, FLASHINFER = "EAGLE3 chains, FA3, gated", "EAGLE3 chains, FlashInfer, gated"
TREES = "EAGLE3 trees, FlashInfer, gated"
TWO_RANKS = "EAGLE3 chains, FA3, two ranks"


# -- order -----------------------------------------------------------------------------------


@mutant(CHAINS)
def sizes_are_read_before_they_are_there() -> None:
    from sglang_c2t.srt.verify.packing import HostSizes

    HostSizes.wait = lambda self: self._host.clamp(1, 4)  # not forever, where it is poison


@mutant(CHAINS)
def the_event_of_sizes_stands_before_their_copy() -> None:
    from sglang_c2t.srt.verify.packing import HostSizes

    def early(sizes: Any, values: Any) -> None:
        sizes._arrived = torch.cuda.Event()
        sizes._arrived.record()
        sizes._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        sizes._host.copy_(values, non_blocking=True)

    HostSizes.__init__ = early
    around(HostSizes, "wait", lambda wait, self: wait(self).clamp(1, 4))


@mutant(CHAINS)
def sizes_travel_on_a_stream_that_waits_for_nobody() -> None:
    from sglang_c2t.srt.verify.packing import HostSizes

    side = torch.cuda.Stream()

    def aside(init: Any, self: Any, sizes: Any) -> None:
        with torch.cuda.stream(side):
            init(self, sizes)

    around(HostSizes, "__init__", aside)
    around(HostSizes, "wait", lambda wait, self: wait(self).clamp(1, 4))


@mutant(CHAINS)
def the_host_waits_for_sizes_as_soon_as_they_are_sent() -> None:
    from sglang_c2t.srt.verify.packing import HostSizes

    def blocking(self: Any, sizes: Any) -> None:
        self._arrived, self._host = None, sizes.cpu()

    HostSizes.__init__ = blocking


@mutant(FLASHINFER)
def attention_is_laid_out_on_a_stream_that_nobody_waits_for() -> None:
    from sglang_c2t.srt.verify.flashinfer import RaggedFlashInferBackend

    side = torch.cuda.Stream()

    def aside(fill: Any, *args: Any) -> None:
        with torch.cuda.stream(side):
            fill(*args)

    around(RaggedFlashInferBackend, "_fill", aside)


# -- packed rows -----------------------------------------------------------------------------


@mutant(CHAINS)
def padding_writes_over_a_request() -> None:
    from sglang_c2t.srt.verify import packing

    def written(pack: Any, rows: Any, tokens: Any, positions: Any, table: Any, slots: Any,
                seq_lens: Any, tier: int) -> Any:  # fmt: skip
        made = pack(rows, tokens, positions, table, slots, seq_lens, tier)
        last = table[slots[:1].long(), seq_lens[:1].long() - 1]
        padding = torch.arange(tier, device=rows.device) >= rows.sum()
        return made._replace(out_cache_loc=torch.where(padding, last, made.out_cache_loc))

    around(packing, "pack_inputs", written)


@mutant(CHAINS)
def rows_are_written_one_place_behind() -> None:
    from sglang_c2t.srt.verify import packing

    around(
        packing,
        "pack_inputs",
        lambda pack, *args: pack(*args[:5], args[5] + 1, *args[6:]),
    )


@mutant(CHAINS)
def positions_are_those_of_whole_drafts() -> None:
    from sglang_c2t.srt.verify import packing

    def unpacked(pack: Any, rows: Any, tokens: Any, positions: Any, *more: Any) -> Any:
        made = pack(rows, tokens, positions, *more)
        whole = positions.repeat(len(made.positions) // len(positions) + 1)
        return made._replace(positions=whole[: len(made.positions)])

    around(packing, "pack_inputs", unpacked)


@mutant(CHAINS)
def the_smallest_graph_is_replayed_for_any_rows() -> None:
    from sglang_c2t.srt.verify import packing

    packing._tier = lambda runner, *_: min(runner.decode_cuda_graph_runner.tiers.rows)


@mutant(CHAINS)
def a_graph_keeps_the_rows_of_its_capture() -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    def captured(make: Any, *, verify_lens: Any, graph_num_tokens: int) -> Any:
        return make(verify_lens=torch.ones_like(verify_lens), graph_num_tokens=graph_num_tokens)

    around(RaggedVerifyLayout, "from_verify_lens_device", captured)


@mutant(CHAINS)
def a_row_counts_to_the_request_behind() -> None:
    from sglang_c2t.srt.verify import packing

    def shifted(rows: Any, *args: Any) -> Any:
        made = rows(*args)
        return made._replace(rows=made.rows.roll(1))

    around(packing, "packed_rows", shifted)


@mutant(CHAINS)
def cuts_are_forgotten() -> None:
    from sglang_c2t.srt.verify import chain

    chain.truncated_chains = lambda links, _lens: links


@mutant(CHAINS)
def drafts_end_before_the_first() -> None:
    from sglang_c2t.draft.chain import ChainGate

    ChainGate.finalize = lambda _, lens: torch.ones_like(lens)


@mutant(CHAINS)
def the_draft_reads_the_hidden_states_of_other_rows() -> None:
    from sglang_c2t.srt.verify import chain

    around(
        chain,
        "scatter_rows",
        lambda scatter, values, *args: scatter(values.roll(1, 0), *args),
    )


# -- what is kept between steps --------------------------------------------------------------


@mutant(CHAINS, at_start=True)
def first_tokens_are_judged_by_those_of_another_request() -> None:
    from sglang_c2t.draft.slots import FirstTokens

    around(FirstTokens, "judged", lambda read, self, slots: read(self, slots.flip(0)))


@mutant(CHAINS)
def lengths_are_read_of_the_step_before() -> None:
    from sglang_c2t.draft.chain import ChainGate

    last: list[Any] = []

    def before(finalize: Any, self: Any, lens: Any) -> Any:
        last.append(lens)
        stale = last[-2] if len(last) > 1 and len(last[-2]) == len(lens) else lens
        return finalize(self, stale)

    around(ChainGate, "finalize", before)


@mutant(CHAINS, at_start=True)
def graphs_of_all_lengths_share_one_attention() -> None:
    from sglang_c2t.srt.draft.chain import ChainDraftMixin

    def shared(capture: Any, self: Any, *args: Any) -> Any:
        self.init_attention_backend = lambda: None
        try:
            return capture(self, *args)
        finally:
            del self.init_attention_backend

    around(ChainDraftMixin, "_capture", shared)


# -- FlashInfer ------------------------------------------------------------------------------


@mutant(FLASHINFER)
def keys_are_those_of_the_step_before() -> None:
    from sglang_c2t.srt.verify import flashinfer

    calls = []

    def stale(fill: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(0)
        if len(calls) % 2:
            fill(*args, **kwargs)

    around(flashinfer, "ragged_kv_indices", stale)


@mutant(FLASHINFER)
def the_plan_on_the_host_has_whole_drafts() -> None:
    from sglang_c2t.srt.verify.flashinfer import HostPlan

    make = HostPlan.of
    HostPlan.of = classmethod(lambda _, rows, *more: make(torch.full_like(rows, 4), *more))


@mutant(TREES)
def rows_see_the_tree_of_the_step_before() -> None:
    from sglang_c2t.srt.verify.packing import Packing

    seen: dict[Any, Any] = {}  # packings live on here, so that their numbers stay their own
    words = Packing.words.func

    def before(self: Any) -> Any:
        if self not in seen:
            seen[self] = words(self)
        mine = list(seen).index(self)
        stale = list(seen.values())[max(mine - 1, 0)]
        return stale if stale.shape == seen[self].shape else seen[self]

    Packing.words = property(before)


@mutant(TREES)
def the_window_begins_one_place_behind() -> None:
    from sglang_c2t.srt.verify import packing

    around(
        packing,
        "verify_window",
        lambda window, table, slots, lens, width: window(table, slots, lens + 1, width),
    )


@mutant(TREES)
def masks_are_packed_behind_a_shorter_prefix() -> None:
    from sglang_c2t.srt.verify import flashinfer

    around(
        flashinfer,
        "pack_tree_mask",
        lambda pack, words, prefix, *more: pack(words, prefix - 1, *more),
    )


@mutant(TREES)
def accepted_keys_stay_where_the_tree_was() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    MHATokenToKVPool.move_kv_cache = lambda *_: None


@mutant(TREES)
def keys_are_moved_the_wrong_way() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    around(MHATokenToKVPool, "move_kv_cache", lambda move, pool, to, of: move(pool, of, to))


@mutant(TREES)
def siblings_are_children() -> None:
    from dataclasses import replace

    from sglang_c2t.draft import tree

    def swapped(cut: Any, *given: Any) -> Any:
        made = cut(*given)
        return replace(made, first_child=made.next_sibling, next_sibling=made.first_child)

    around(tree, "cut_and_link", swapped)


@mutant(TREES)
def padding_counts_as_rows() -> None:
    from sglang_c2t.tree import Trees

    around(Trees, "retrieve_index", lambda index, self, rows: index(self, rows + 1))


@mutant(TREES)
def depths_are_no_positions() -> None:
    from sglang_c2t.tree import Trees

    nodes = Trees.positions
    Trees.positions = lambda self, lens: nodes(self, lens) * 0 + lens[:, None]


# -- ranks -----------------------------------------------------------------------------------


@mutant(TWO_RANKS, at_start=True)
def a_rank_plans_for_itself() -> None:
    from sglang.srt.runtime_context import get_parallel

    from sglang_c2t.srt import worker

    make = worker.host_agreement

    def other() -> Any:
        agree = make()

        def alone(numbers: list[int]) -> list[int]:
            """Of three layers one, and of one three; what is no plan is as agreed."""
            agreed = agree(numbers)
            if len(agreed) > 1 and get_parallel().tp_rank > 0:
                agreed[2] = {1: 3, 3: 1}.get(agreed[2], agreed[2])
            return agreed

        return alone

    worker.host_agreement = other
