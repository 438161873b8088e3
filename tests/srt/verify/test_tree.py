"""Tree verification without a server: what the target forwards, and what comes of its logits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_c2t.plan.tiers import Tiers
from tests import oracles
from tests.doubles import double
from tests.srt.chains import tree_input

VOCAB = 4  # so small that drafts are often right, and siblings sometimes equal
NEVER = float("-inf")

fast = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def target_runner(graphs: Any = None) -> Any:
    """SGLang's runner of the target, with CUDA graphs or without."""
    return double("ModelRunner", decode_cuda_graph_runner=graphs)


# -- batches of trees ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch, as lists: request b has the nodes of ``parents[b]``, root first."""

    parents: list[list[int]]
    tokens: list[list[int]]
    max_nodes: int
    num_steps: int
    seq_lens: list[int]
    slots: list[int]  # rows of the request table
    table: Tensor  # [rows, places], no slot twice, slot 0 nowhere
    packed: bool
    seed: int

    def depth(self, b: int, node: int) -> int:
        return len(oracles.ancestors(self.parents[b], node)) - 1

    def verify_input(self) -> Any:
        return tree_input(
            self.parents, self.tokens, self.batch(), width=self.max_nodes,
            num_steps=self.num_steps, packed=self.packed,
        )  # fmt: skip

    def batch(self, **fields: Any) -> Any:
        return double(
            "ScheduleBatch",
            req_to_token_pool=double("ReqToTokenPool", req_to_token=self.table),
            req_pool_indices=torch.tensor(self.slots),
            seq_lens=torch.tensor(self.seq_lens),
            **fields,
        )

    @property
    def forwarded(self) -> list[tuple[int, int]]:
        """(request, node) of each row of the target's forward; padding where not packed."""
        counts = [len(p) if self.packed else self.max_nodes for p in self.parents]
        return [(b, node) for b, count in enumerate(counts) for node in range(count)]

    def kv_slot(self, b: int, place: int) -> int:
        """Where request b keeps the place-th token behind its committed prefix."""
        return int(self.table[self.slots[b], self.seq_lens[b] + place])

    def sees(self, b: int, row: int, column: int) -> bool:
        """Whether a row attends to another; padding attends to itself and the root."""
        if row >= len(self.parents[b]):
            return column in (0, row)
        return column in oracles.ancestors(self.parents[b], row)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """1 to 4 trees of 1 to N <= 8 nodes: roots alone, chains, bushes, full ones."""
    rng = random.Random(draw(st.integers(0, 2**20)))
    max_nodes = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, max_nodes), min_size=1, max_size=4))
    parents = []
    for size in sizes:
        chain = rng.random() < 0.3
        parents.append([-1, *(n - 1 if chain else rng.randrange(n) for n in range(1, size))])
    deepest = max(len(oracles.ancestors(p, n)) - 1 for p in parents for n in range(len(p)))
    rows, places = 6, 24
    table = torch.tensor(rng.sample(range(1, 200), rows * places)).view(rows, places)
    return Case(
        parents=parents,
        tokens=[[rng.randrange(VOCAB) for _ in p] for p in parents],
        max_nodes=max_nodes,
        num_steps=max(deepest, 1) + rng.randrange(3),
        seq_lens=[rng.randrange(10) for _ in parents],
        slots=rng.sample(range(rows), len(parents)),
        table=table.int(),
        packed=draw(st.booleans()),
        seed=rng.randrange(2**20),
    )


# -- what goes into the target ------------------------------------------------------------


@fast
@given(cases())
def test_tree_verify_input_holds_its_trees_and_rows(case: Case) -> None:
    found = case.verify_input()
    width = max(case.max_nodes, case.num_steps + 1)
    assert found.max_tree_depth == case.num_steps + 1
    found.packing.forwarded(found, case.batch(), target_runner())
    assert found.packing.rows.tolist() == [b * case.max_nodes + node for b, node in case.forwarded]
    for b, parents in enumerate(case.parents):
        rows = [row for row, (owner, _) in enumerate(case.forwarded) if owner == b]
        assert found.packing.num_rows[b] == len(rows)
        assert found.packing.layout.window[b].tolist() == [
            case.kv_slot(b, place) for place in range(width)
        ]
        for node in range(len(parents)):
            flat = b * case.max_nodes + node
            assert found.draft_token[flat] == case.tokens[b][node]
            assert found.positions[flat] == case.seq_lens[b] + case.depth(b, node)
            assert found.packing.layout.row_starts[b] + node == rows[node]


@fast
@given(cases(), st.booleans())
def test_tree_forward_gets_live_nodes_slots_and_masks(case: Case, captured: bool) -> None:
    """Back to back, behind them padding up to the tier of a CUDA graph; the tables of the whole
    batch stay as they were.
    """
    whole = case.verify_input()
    tiers = Tiers(len(case.parents) + 1, case.max_nodes)
    graphs = double("sglang_c2t.srt.verify.graphs.TieredGraphRunner", tiers=tiers)
    runner = target_runner(graphs if captured else None)
    packed, slots = whole.packing.forwarded(whole, case.batch(), runner)
    tokens = whole.draft_token.tolist()
    positions = whole.positions.tolist()
    at = [b * case.max_nodes + node for b, node in case.forwarded]
    rows = tiers.pick(len(at), len(case.parents)) if captured else len(at)
    assert rows is not None
    padding = [0] * (rows - len(at))  # slot 0 belongs to no request
    assert packed.draft_token.tolist() == [tokens[i] for i in at] + padding
    assert packed.positions.tolist() == [positions[i] for i in at] + padding
    assert slots.tolist() == [case.kv_slot(*row) for row in case.forwarded] + padding
    assert packed.custom_mask.tolist() == [
        case.sees(b, row, column)
        for b, row in case.forwarded
        for owner, column in case.forwarded
        if owner == b
    ]
    layout, slots = packed.ragged_verify_layout, len(case.parents)
    if captured:
        slots = tiers.slots(rows)
    assert (
        layout.verify_lens.tolist()[: len(case.parents) - 1]
        == (
            whole.packing.num_rows.tolist()[:-1]  # the last may have what is left
        )
    )
    assert layout.verify_lens.sum() == layout.graph_num_tokens == rows
    assert layout.padded_to_bucket(padded_bs=slots) is layout
    assert whole.draft_token.numel() == len(case.parents) * case.max_nodes
    assert whole.ragged_verify_layout is None


# -- what comes of the logits -------------------------------------------------------------


def logits_of(case: Case) -> Tensor:
    """[T, V], without ties, negative ones as well."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(len(case.forwarded), VOCAB, generator=generator)


def sampling_info(**fields: Any) -> Any:
    """SGLang's, of a greedy batch."""
    return double("SamplingBatchInfo", **{"logit_bias": None, "is_all_greedy": True, **fields})


def matched(
    case: Case, logits: Tensor, mask: Any = None, verify_input: Any = None, **info: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch = case.batch(sampling_info=sampling_info(**info))
    output = double("LogitsProcessorOutput", next_token_logits=logits)
    verify_input = verify_input or case.verify_input()
    verify_input.packing.forwarded(verify_input, batch, target_runner())
    accepted: tuple[Tensor, Tensor, Tensor] = verify_input.accept(None, batch, output, mask)
    return accepted


def assert_accepts(
    case: Case, target: list[int], found: tuple[Tensor, Tensor, Tensor]
) -> list[list[int]]:
    """``found`` is the walk along the targets [T]; returns the accepted nodes by request."""
    predict, accept_lens, accept_index = found
    paths = []
    for b, parents in enumerate(case.parents):
        row_of = {node: row for row, (owner, node) in enumerate(case.forwarded) if owner == b}
        told = [target[row_of[node]] for node in range(len(parents))]
        path = oracles.accepted_path(parents, case.tokens[b], told)
        rows = [row_of[node] for node in path]
        assert accept_lens[b] == len(path)
        assert accept_index[b].tolist() == rows + [-1] * (case.num_steps + 1 - len(path))
        assert predict[rows].tolist() == [told[node] for node in path]
        paths.append(path)
    return paths


@fast
@given(cases())
def test_tree_acceptance_with_sampling_follows_one_draw_per_row(case: Case) -> None:
    rng = random.Random(case.seed)
    target = [rng.randrange(VOCAB) for _ in case.forwarded]
    asked = []

    def draw(logits: Tensor, info: Any, request: Tensor, positions: Tensor) -> Tensor:
        asked.append((logits.clone(), request.tolist(), positions.tolist()))
        return torch.tensor(target)

    logits = logits_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_c2t.srt.verify.accept.sample_rows", draw)
        assert_accepts(case, target, matched(case, logits, is_all_greedy=False))
    ((seen, request, positions),) = asked
    assert torch.equal(seen, logits)
    for row, (b, node) in enumerate(case.forwarded):
        depth = case.depth(b, node) if node < len(case.parents[b]) else 0
        assert positions[row] == case.seq_lens[b] + depth
    assert request == [owner for owner, _ in case.forwarded]


@fast
@given(cases())
def test_tree_acceptance_applies_the_bias_of_the_request_to_all_rows(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed + 1)
    bias = torch.randn(len(case.parents), VOCAB, generator=generator)
    before, logits = logits_of(case), logits_of(case)
    found = matched(case, logits, logit_bias=bias)
    assert torch.equal(logits, before + bias[[owner for owner, _ in case.forwarded]])
    assert_accepts(case, logits.argmax(dim=1).tolist(), found)


class Grammar:
    """Masks as xgrammar does, only with one bool per token."""

    def apply_vocab_mask(self, logits: Tensor, vocab_mask: Tensor) -> None:
        assert logits.shape == vocab_mask.shape
        logits.masked_fill_(~vocab_mask, NEVER)


@fast
@given(cases())
def test_tree_acceptance_applies_the_grammar_mask_of_the_node(case: Case) -> None:
    """SGLang fills a mask for all B * N nodes; T rows were forwarded."""
    from sglang.srt.constrained.base_grammar_backend import GrammarMask

    rng = random.Random(case.seed)
    allowed = [
        [[v == must or rng.random() < 0.4 for v in range(VOCAB)]
         for must in (rng.randrange(VOCAB) for _ in range(case.max_nodes))]
        for _ in case.parents
    ]  # fmt: skip
    logits = logits_of(case)
    before = logits.clone()
    mask = GrammarMask(grammar=Grammar(), vocab_mask=torch.tensor(allowed).flatten(0, 1))
    found = matched(case, logits, mask)
    target = []
    for row, (b, node) in enumerate(case.forwarded):
        choices = [v for v in range(VOCAB) if allowed[b][node][v]]
        target.append(max(choices, key=lambda v, row=row: float(before[row, v])))
    assert_accepts(case, target, found)


# -- the accepted path --------------------------------------------------------------------


class Pool:
    """A KV pool of one number per slot, in two layers."""

    def __init__(self) -> None:
        self.layers = [torch.arange(200.0), -torch.arange(200.0)]

    def get_kvcache(self) -> Pool:
        return self

    def move_kv_cache(self, target: Tensor, source: Tensor) -> None:
        for layer in self.layers:
            layer[target] = layer[source].clone()


@fast
@given(cases(), st.booleans())
def test_tree_accepted_path_moves_to_the_front(case: Case, with_hidden: bool) -> None:
    """Oracle of greedy acceptance, which follows the target's argmax."""
    logits = logits_of(case)
    target = logits.argmax(dim=1).tolist()
    verify_input = case.verify_input()
    found = matched(case, logits, verify_input=verify_input)
    paths = assert_accepts(case, target, found)
    predict, accept_lens, accept_index = found
    pool = Pool()
    hidden = torch.arange(2.0 * len(logits)).view(-1, 2)
    output = double("LogitsProcessorOutput", hidden_states=hidden.clone() if with_hidden else None)
    case.table.zero_()  # the scheduler may have given the requests' rows away by now
    batch = case.batch(spec_info=verify_input)
    slots = verify_input.packing.layout.window.tolist()
    tokens = verify_input.accepted_to_front(
        batch, accept_index, accept_lens, predict, output, len(case.parents),
        token_to_kv_pool_allocator=pool, num_draft_tokens=case.max_nodes,
    )  # fmt: skip
    width = case.num_steps + 1
    holds = {slot: slot for slot in range(200)}  # what stands in each slot, by its first slot
    for b, path in enumerate(paths):
        row_of = {node: row for row, (owner, node) in enumerate(case.forwarded) if owner == b}
        for place, node in enumerate(path):
            holds[slots[b][place]] = slots[b][node]
            row = row_of[node]
            assert tokens[b * width + place] == target[row]
            if with_hidden:
                assert output.hidden_states[b * width + place].tolist() == hidden[row].tolist()
    for sign, layer in zip((1, -1), pool.layers, strict=True):
        assert layer.tolist() == [sign * holds[slot] for slot in range(200)]
    assert tokens.shape == (len(case.parents) * width,)
    assert verify_input.paths.accept_index is accept_index  # for recordings
    assert with_hidden or output.hidden_states is None
