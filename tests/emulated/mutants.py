"""Mistakes in the CUDA path, each of which the tests must detect.

A mutant breaks one thing in the process of a server: when it has started, or before. On the
emulated device it must end in an error, keep other keys and values, verify other rows, or exceed
the budget of a step; ``test_serving.py`` looks. A GPU would show some of them now and then.
Mistakes that one function shows by itself are left to the tests of that function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated.versions import OLDEST, RELEASE

#: Imported where a mutant needs them: SGLang is, with them.
PACKING = "sglang_c2t.srt.verify.packing"

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
def accepted_keys_stay_where_the_tree_was() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    MHATokenToKVPool.move_kv_cache = lambda *_: None


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


@mutant(PENALISED)
def what_was_accepted_is_not_counted() -> None:
    penalties = importlib.import_module("sglang_c2t.srt.verify.penalties")
    around(penalties.OutputHistory, "keep", lambda *_: None)


#: Those that tests look for: beside one release, as comparisons are the same beside the other.
TRIED = {} if RELEASE is OLDEST else MUTANTS
