"""Mistakes in the CUDA path, each of which the tests must detect.

A mutant breaks one thing in the process of a server: when it has started, or before. On the
emulated device it must end in an error, keep other keys and values, verify other rows, or exceed
the budget of a step; ``test_serving.py`` looks. A GPU would show some of them now and then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated.versions import OLDEST, RELEASE

#: Imported where a mutant needs them: SGLang is, with them.
PACKING, ACCEPT = "sglang_c2t.srt.verify.packing", "sglang_c2t.srt.verify.accept"

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
    """``instead`` is given the function that it replaces, of an object or of a module by its name,
    and its arguments.
    """
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    kept = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: instead(kept, *args, **kwargs))


#: Of each number of layers, with graphs of their own.
ANY_CHAINS, ANY_TREES = "EAGLE3 chains, FA3, any plan", "EAGLE3 trees, FlashInfer, any plan"
CHAINS, FLASHINFER = "EAGLE3 chains, FA3, gated", "EAGLE3 chains, FlashInfer, gated"
TREES = "EAGLE3 trees, FlashInfer, gated"
#: With a target that sees: not among the servers of `servers.py`.
SEEING = "a server that sees"
#: With requests that have penalties, the same.
PENALISED = "a server with penalties"
#: With adapters, the same.
ADAPTED = "a server with adapters"
#: With one that keeps latents, as well.
LATENT = "NEXTN chains, FlashInfer, gated"
TWO_RANKS = "EAGLE3 chains, FA3, two ranks"
#: Of ranks that have requests of their own: not among them either.
DATA_PARALLEL = "a server of data-parallel attention"


# -- order -----------------------------------------------------------------------------------


@mutant(CHAINS)
def sizes_are_read_before_they_are_there() -> None:
    from sglang_c2t.srt.verify.packing import HostSizes

    HostSizes.wait = lambda self: self._host.clamp(1, 4)  # not forever, where it is poison


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
    def written(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made = lay_out(*tables, **sizes)
        rows, _, _, table, slots, seq_lens = tables
        last = table[slots[:1].long(), seq_lens[:1].long() - 1]
        padding = torch.arange(len(made.input_ids), device=rows.device) >= rows.sum()
        return made._replace(out_cache_loc=torch.where(padding, last, made.out_cache_loc))

    around(PACKING, "lay_out", written)


@mutant(CHAINS)
def rows_are_written_one_place_behind() -> None:
    def behind(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made = lay_out(*tables, **sizes)
        later = lay_out(*tables[:5], tables[5] + 1, **sizes)
        return made._replace(out_cache_loc=later.out_cache_loc)

    around(PACKING, "lay_out", behind)


@mutant(CHAINS)
def positions_are_those_of_whole_drafts() -> None:
    def unpacked(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made, positions = lay_out(*tables, **sizes), tables[2]
        whole = positions.repeat(len(made.positions) // len(positions) + 1)
        return made._replace(positions=whole[: len(made.positions)])

    around(PACKING, "lay_out", unpacked)


@mutant(CHAINS)
def the_smallest_graph_is_replayed_for_any_rows() -> None:
    from sglang_c2t.srt.verify.packing import _Size

    def smallest(_: Any, runner: Any, *sizes: Any) -> _Size:
        tiers = runner.decode_cuda_graph_runner.tiers
        return _Size(min(tiers.rows), tiers.slots(min(tiers.rows)))

    around(PACKING, "_size", smallest)


@mutant(CHAINS)
def a_graph_keeps_the_rows_of_its_capture() -> None:
    from sglang_c2t.srt.verify.ragged import PackedLayout

    of = PackedLayout.of

    def captured(layout: Any) -> Any:
        alike = torch.arange(len(layout.row_starts), dtype=torch.int32, device="cuda")
        return of(layout._replace(row_starts=alike))

    PackedLayout.of = captured


@mutant(CHAINS)
def attention_forgets_the_rows_themselves() -> None:
    def before(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made = lay_out(*tables, **sizes)
        return made._replace(slot_keys=made.slot_keys - made.slot_rows)

    around(PACKING, "lay_out", before)


@mutant(CHAINS)
def a_row_counts_to_the_request_behind() -> None:
    around(
        ACCEPT, "accept_paths", lambda walk, wanted, *more, **n: walk(wanted.roll(1), *more, **n)
    )


@mutant(CHAINS)
def cuts_are_forgotten() -> None:
    def whole(walk: Any, wanted: Any, tokens: Any, rows: Any, *more: Any, **sizes: Any) -> Any:
        everything = torch.nn.functional.pad(wanted, (0, tokens.numel() - len(wanted)))
        return walk(everything, tokens, torch.full_like(rows, 4), *more, **sizes)

    around(ACCEPT, "accept_paths", whole)


@mutant(CHAINS)
def drafts_end_before_the_first() -> None:
    from sglang_c2t.draft.chain import ChainGate

    around(ChainGate, "agreed", lambda agreed, self, lens: torch.ones_like(agreed(self, lens)))


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

    def before(agreed: Any, self: Any, lens: Any) -> Any:
        last.append(lens.clone())
        stale = last[-2] if len(last) > 1 and len(last[-2]) == len(lens) else lens
        return agreed(self, stale)

    around(ChainGate, "agreed", before)


@mutant(ANY_CHAINS, at_start=True)
def graphs_of_all_lengths_share_one_attention() -> None:
    from sglang_c2t.srt.draft.lengths import DraftLengths

    around(DraftLengths, "_backend", lambda _, self, layers: self._worker.draft_attn_backend)


@mutant(ANY_CHAINS)
def first_tokens_after_uniform_steps_are_not_scored() -> None:
    from sglang_c2t.draft.gate import Gate

    def never(relay: Any, self: Any, *args: Any, later: bool = False) -> None:
        if uniform[-1:] != [True]:
            relay(self, *args, later=later)

    uniform: list[bool] = []
    from sglang_c2t.srt.draft.drafter import Drafter

    def noting(extend: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        uniform.append(batch.spec_info.step.plan.kind.value == "uniform")
        extend(self, batch, *args, **kwargs)

    around(Drafter, "extend_decode", noting)
    around(Gate, "relay_first_token", never)


@mutant(ANY_CHAINS)
def uniform_steps_verify_a_row_less() -> None:
    from sglang_c2t.srt.draft import chain

    around(
        chain.ChainVerifyInput, "cut",
        lambda cut, stock, lens, *more, **own: cut(stock, (lens - 1).clamp(min=1), *more, **own),
    )  # fmt: skip


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
def all_nodes_are_children_of_the_root() -> None:
    def flat(walk: Any, *tables: Any, **sizes: Any) -> Any:
        *more, parents = tables
        return walk(*more, parents.clamp(max=0), **sizes)

    around(ACCEPT, "accept_paths", flat)


@mutant(TREES)
def padding_counts_as_rows() -> None:
    def padded(walk: Any, wanted: Any, tokens: Any, rows: Any, starts: Any, *more: Any,
               **sizes: Any) -> Any:  # fmt: skip
        late = starts + torch.arange(len(starts), dtype=torch.int32, device=starts.device)
        return walk(wanted, tokens, rows, late.clamp(max=len(wanted) - 1), *more, **sizes)

    around(ACCEPT, "accept_paths", padded)


@mutant(TREES)
def depths_are_no_positions() -> None:
    from sglang_c2t.tree import Trees

    nodes = Trees.positions
    Trees.positions = lambda self, lens: nodes(self, lens) * 0 + lens[:, None]


@mutant(ADAPTED)
def adapters_are_told_of_the_rows_of_the_request_before() -> None:
    from sglang_c2t.srt.verify import adapters

    def shifted(stock: Any, forward_batch: Any) -> Any:
        of_rows = stock(forward_batch)
        return of_rows[:1] + of_rows[:-1]

    around(adapters, "adapters_of_rows", shifted)


@mutant(ADAPTED)
def a_graph_adapts_rows_as_it_was_captured() -> None:
    """Not at the start: no request had an adapter then."""
    from sglang.srt.lora.lora_manager import LoRAManager

    from sglang_c2t.srt import attach

    attach.write(LoRAManager, _use_cuda_graph_batch=lambda *_: False)


@mutant(SEEING)
def rows_are_rotated_as_whole_drafts_are() -> None:
    from sglang_c2t.srt.verify.packing import Packing

    def unpacked(self: Any, positions: Any) -> Any:
        rows = len(self.layout.rows)
        return torch.nn.functional.pad(positions, (0, max(rows - positions.shape[1], 0)))[:, :rows]

    Packing.rotated = unpacked


@mutant(LATENT)
def padding_is_planned_in_no_slot() -> None:
    from sglang_c2t.srt.verify import flashinfer_mla
    from sglang_c2t.srt.verify.flashinfer import HostPlan

    def without(_: Any, forward_batch: Any, packing: Any, _tokens: int) -> Any:
        prefix = forward_batch.seq_lens_cpu[: len(packing.host_rows)]
        return HostPlan.of(packing.host_rows, prefix, forward_batch.batch_size)

    around(flashinfer_mla, "_host_plan", without)


@mutant(LATENT)
def latents_of_rows_are_read_one_place_behind() -> None:
    from sglang_c2t.srt.verify import flashinfer_mla

    def behind(fill: Any, table: Any, requests: Any, prefix: Any, *more: Any) -> Any:
        return fill(table.roll(-1, 1), requests, prefix, *more)

    around(flashinfer_mla, "ragged_kv_indices", behind)


# -- ranks -----------------------------------------------------------------------------------


@mutant(TWO_RANKS, at_start=True)
def a_rank_plans_for_itself() -> None:
    from sglang.srt.runtime_context import get_parallel

    from sglang_c2t.srt import serving

    make = serving.host_broadcast_from_rank0

    def other() -> Any:
        agree = make()

        def alone(numbers: list[int]) -> list[int]:
            """Exchange one layer and three layers; other values stay as agreed."""
            agreed = agree(numbers)
            if len(agreed) > 1 and get_parallel().tp_rank > 0:
                agreed[1] = {1: 3, 3: 1}.get(agreed[1], agreed[1])
            return agreed

        return alone

    serving.host_broadcast_from_rank0 = other


@mutant(DATA_PARALLEL)
def a_rank_hears_of_its_own_rows_alone() -> None:
    from sglang_c2t.srt.data_parallel import Peers

    def deaf(of_all: Any, self: Any, *mine: int) -> Any:
        told = of_all(self, *mine)
        return [list(mine)] * self.ranks if len(mine) == 2 else told

    around(Peers, "of_all", deaf)


#: Those that tests look for: beside one release, as comparisons are the same beside the other.
@mutant(PENALISED)
def what_was_accepted_is_not_counted() -> None:
    penalties = importlib.import_module("sglang_c2t.srt.verify.penalties")
    around(penalties.OutputHistory, "keep", lambda *_: None)


@mutant(PENALISED)
def penalties_are_those_of_the_root() -> None:
    """As in SGLang's own verification."""
    penalties = importlib.import_module("sglang_c2t.srt.verify.penalties")

    def root_alone(of: Any, *args: Any) -> Any:
        rows = of(*args)
        tokens = rows.tokens.clone()
        tokens[:, 1:] = int(tokens.max())
        return rows._replace(tokens=tokens)

    around(penalties.Rows, "of", root_alone)


TRIED = {} if RELEASE is OLDEST else MUTANTS
