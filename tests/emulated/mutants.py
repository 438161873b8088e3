"""Mistakes in the CUDA path, each of which the tests must detect.

A mutant breaks one thing in the process of a server: when it has started, or before. On the
emulated device it must end in an error, keep other keys and values, or verify other rows;
``test_unusual.py`` looks. Mistakes that one function shows by itself are left to the tests of that
function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Imported where a mutant needs them: SGLang is, with them.
PACKING = "sglang_c2t.srt.verify.packing"

MUTANTS: dict[str, Mutant] = {}


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    server: str
    """Which of the tests' servers makes it."""

    break_it: Callable[[], None]


def mutant(server: str) -> Callable[[Callable[[], None]], None]:
    """Its function's name says what goes wrong."""

    def add(break_it: Callable[[], None]) -> None:
        MUTANTS[break_it.__name__.replace("_", " ")] = Mutant(server, break_it)

    return add


def around(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """``instead`` is given the function that it replaces, of an object or of a module by its name,
    and its arguments.
    """
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    kept = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: instead(kept, *args, **kwargs))


CHAINS = "EAGLE3 chains, FA3, gated"
#: With a target that sees: not among the servers of `servers.py`.
SEEING = "a server that sees"
#: With adapters, the same.
ADAPTED = "a server with adapters"
#: With one that keeps latents, as well.
LATENT = "NEXTN chains, FlashInfer, gated"


@mutant(CHAINS)
def rows_are_written_one_place_behind() -> None:
    def behind(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made = lay_out(*tables, **sizes)
        later = lay_out(*tables[:5], tables[5] + 1, **sizes)
        return made._replace(out_cache_loc=later.out_cache_loc)

    around(PACKING, "lay_out", behind)


@mutant(CHAINS)
def attention_forgets_the_rows_themselves() -> None:
    def before(lay_out: Any, *tables: Any, **sizes: Any) -> Any:
        made = lay_out(*tables, **sizes)
        return made._replace(slot_keys=made.slot_keys - made.slot_rows)

    around(PACKING, "lay_out", before)


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
