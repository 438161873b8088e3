"""Inputs and outputs of the target's forward over packed rows: positions, KV slots, ranks."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_c2t.kernels.accept import AcceptedPaths
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify import chain, packed, sampling
from sglang_c2t.srt.verify.packing import Packing
from tests.doubles import double
from tests.srt.chains import full_chains

VOCAB = 5


# -- M-RoPE -------------------------------------------------------------------------------


class MRope:
    """A batch of an M-RoPE target. ``deltas``: how far an image has pushed the positions of
    each request's tokens; ``None`` where there is none.
    """

    def __init__(self, lens: list[int], width: int, deltas: list[int | None], padded: bool) -> None:
        from sglang.srt.managers.schedule_batch import MultimodalInputs

        self.lens, self.width, self.deltas = lens, width, deltas
        rng = random.Random(sum(lens))
        self.positions = [rng.randrange(100) for _ in range(len(lens) * width)]
        tiers = Tiers(len(lens) + 1, width) if padded else None
        self.runner = SimpleNamespace(
            device="cpu", decode_cuda_graph_runner=SimpleNamespace(tiers=tiers)
        )
        self.spec_info: Any = None
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=None,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(9, 200, dtype=torch.int32)),
            req_pool_indices=torch.arange(len(lens)),
            seq_lens=torch.ones(len(lens), dtype=torch.int64),
            multimodal_inputs=[
                None if delta is None else MultimodalInputs(
                    mm_items=[], mrope_position_delta=torch.tensor([[delta]])
                )
                for delta in deltas
            ],
        )  # fmt: skip

    def verify_input(self, **fields: Any) -> Any:
        positions = torch.tensor(self.positions)
        return full_chains(len(self.lens), self.width, positions=positions, **fields)

    def init_new(self, verify_input: Any, _pool: Any, batch: Any, worker: Any) -> Tensor:
        """``eagle_prepare_for_verify`` as far as positions go: [3, T]."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        assert batch.spec_info is verify_input
        if verify_input.prepared_mrope_positions is not None:
            prepared: Tensor = verify_input.prepared_mrope_positions
            return prepared
        forward_batch = ForwardBatch.__new__(ForwardBatch)
        forward_batch.seq_lens = batch.seq_lens
        forward_batch.compute_spec_mrope_positions(worker.model_runner, batch)
        return forward_batch.mrope_positions

    def rows_of_the_forward(self) -> list[int]:
        """The position of each row, row by row; 0 on padding."""
        live = [
            self.positions[b * self.width + j] + (self.deltas[b] or 0)
            for b, length in enumerate(self.lens)
            for j in range(length)
        ]
        tiers = self.runner.decode_cuda_graph_runner.tiers
        tier = None if tiers is None else tiers.pick(len(live), len(self.lens))
        return live + [0] * ((tier or len(live)) - len(live))


@st.composite
def mropes(draw: st.DrawFn) -> MRope:
    """1 to 4 requests; often T is divisible by B, where wrong positions have a right shape."""
    width = draw(st.integers(1, 6))
    lens = draw(st.lists(st.integers(1, width), min_size=1, max_size=4))
    if draw(st.booleans()):
        lens[-1] = max((n for n in range(1, width + 1)
                        if (sum(lens[:-1]) + n) % len(lens) == 0), default=lens[-1])  # fmt: skip
    deltas = [draw(st.one_of(st.none(), st.integers(-40, 40))) for _ in lens]
    return MRope(lens, width, deltas, draw(st.booleans()))


@given(mropes(), st.booleans())
def test_packing_mrope_positions_are_those_of_the_requests(case: MRope, prepared: bool) -> None:
    """Also where SGLang has prepared those of the full window."""
    full = torch.full((3, len(case.positions)), -1)
    packing = Packing(torch.tensor(case.lens, dtype=torch.int32), case.width)
    stock = case.verify_input(**({"prepared_mrope_positions": full} if prepared else {}))
    whole = packed.PackedVerifyInput.of(stock, packing=packing)
    case.batch.spec_info = whole
    worker = SimpleNamespace(model_runner=case.runner)
    pool = case.batch.req_to_token_pool
    found = packed.prepare(case.init_new, whole, pool, case.batch, worker)
    assert found.tolist() == [case.rows_of_the_forward()] * 3
    assert case.batch.spec_info is whole
    assert (whole.prepared_mrope_positions is full) == prepared


# -- near the context limit ---------------------------------------------------------------


@pytest.mark.parametrize(("stock", "reserved", "room"), [(10, 24, 24), (32, 24, 32)])
def test_request_table_holds_what_is_reserved_beyond_the_context_limit(
    stock: int, reserved: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever arguments the functions take in this SGLang."""
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator

    name = "get_req_to_token_extra_context_len"
    assert getattr(kv_cache_configurator, name) is getattr(allocation_sizing, name)
    given = inspect.signature(getattr(allocation_sizing, name)).parameters
    monkeypatch.setattr(kv_cache_configurator, name, lambda *args: stock)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda *args: reserved)
    compat.widen_request_table()
    compat.widen_request_table()  # by every worker of a process
    assert getattr(kv_cache_configurator, name)(*given) == room


# -- what comes back ----------------------------------------------------------------------


def chain_input(lens: list[int], width: int, **fields: Any) -> Any:
    """Chains of which ``lens`` rows are verified."""
    num_rows = torch.tensor(lens, dtype=torch.int32)
    packing = Packing(num_rows, width)
    stock = full_chains(len(lens), width)
    return chain.ChainVerifyInput.cut(stock, num_rows, packing=packing, **fields)


def test_chain_verify_input_ends_chains_at_their_cut() -> None:
    stock = full_chains(2, width=3)
    stock.hidden_states = "undeclared"
    lens = torch.tensor([2, 3], dtype=torch.int32)
    chains = chain.ChainVerifyInput.cut(stock, lens)
    assert chains.retrieve_next_token.tolist() == [[1, -1, -1], [1, 2, -1]]
    assert stock.retrieve_next_token.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert (chains.hidden_states, chains.draft_token_num) == ("undeclared", 3)
    lens.zero_()
    assert chains.num_rows.tolist() == [2, 3], "of its own"


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("own_acceptance", [False, True])
@pytest.mark.parametrize("has_hidden", [False, True])
def test_packing_outputs_are_unpacked_for_full_width_readers(
    return_logprob: bool, own_acceptance: bool, has_hidden: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Draft extend reads hidden states; SGLang's acceptance and log-probabilities read logits."""
    logits = torch.arange(4.0 * VOCAB).view(4, VOCAB)
    hidden = torch.arange(8.0).view(4, 2) if has_hidden else None
    output = double("LogitsProcessorOutput", next_token_logits=logits, hidden_states=hidden)
    ours = AcceptedPaths(*torch.zeros(5, 1))
    monkeypatch.setattr(chain, "match_rows", lambda *_: ours)
    chains = chain_input([3, 1], width=3, exact=own_acceptance)
    batch = SimpleNamespace(return_logprob=return_logprob)
    accepted = chains.accept(lambda *_: "stock", batch, output)
    reads_full = return_logprob or not own_acceptance
    assert accepted == (ours[:3] if own_acceptance else "stock")

    def unpacked(rows: Tensor) -> list[list[float]]:
        nothing = [0.0] * rows.shape[1]
        return [*rows.tolist(), nothing, nothing]

    assert output.next_token_logits.tolist() == (
        unpacked(logits) if reads_full else logits.tolist()
    )
    if hidden is None:
        assert output.hidden_states is None
    else:
        assert output.hidden_states.tolist() == unpacked(hidden)


# -- ranks --------------------------------------------------------------------------------


class Rank:
    """A tensor-parallel group as rank 1 of it sees things: rank 0 sends ``sends``."""

    world_size = 2

    def __init__(self, sends: Tensor) -> None:
        self._sends = sends

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """In place, as SGLang's."""
        assert src == 0
        assert input_.dtype == self._sends.dtype
        return input_.copy_(self._sends)


def test_sampling_ranks_take_the_tokens_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank draws by itself: seeds apart, the draws differ."""
    theirs = torch.tensor([4, 3, 2, 1])
    monkeypatch.setattr(sampling, "tp_group", lambda: Rank(theirs))
    monkeypatch.setattr(sampling, "_sampler", lambda: lambda *_: torch.zeros(4).long())
    names = "temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "return_sampling_masks"
    info = double("SamplingBatchInfo", **dict.fromkeys(names))
    rows = torch.tensor([0, 0, 0, 1])
    found = sampling.sample_rows(torch.zeros(4, VOCAB), info, rows, rows)
    assert found.tolist() == theirs.tolist()


def test_sampling_row_has_the_parameters_of_its_request() -> None:
    info = double(
        "SamplingBatchInfo",
        temperatures=torch.tensor([[0.5], [2.0]]), top_ps=torch.tensor([0.1, 0.2]),
        top_ks=torch.tensor([7, 8]), min_ps=torch.tensor([0.3, 0.4]), sampling_seed=None,
        return_sampling_masks=None,
    )  # fmt: skip
    rows = sampling.per_row(info, torch.tensor([0, 1, 1]))
    assert rows.temperatures.tolist() == [[0.5], [2.0], [2.0]]
    assert rows.top_ps.tolist() == pytest.approx([0.1, 0.2, 0.2])
    assert rows.top_ks.tolist() == [7, 8, 8]
    assert rows.min_ps.tolist() == pytest.approx([0.3, 0.4, 0.4])
    assert rows.sampling_seed is None
    assert info.top_ks.tolist() == [7, 8]
