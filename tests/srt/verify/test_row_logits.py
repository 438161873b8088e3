"""Penalties and logit processors of each verified row, against SGLang's own applied token by token.

A made-up server runs for some steps: requests join, leave, and are prefilled again in another slot,
and the host knows of each step's tokens one step late, as under SGLang's overlap scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
)
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_c2t.srt.probes import attribute_names
from sglang_c2t.srt.verify import chain, packed, penalties
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.penalties import OutputHistory
from sglang_c2t.srt.verify.row_logits import RowLogits, depends_on_outputs, recall
from tests import oracles
from tests.doubles import double, real_class
from tests.srt.chains import full_chains, padded, tree_input

VOCAB, SLOTS, STEPS = 7, 5, 4
NODES = 5  # N
TOKENIZER = SimpleNamespace(eos_token_id=6, additional_stop_token_ids={5})

#: What requests ask for; the last asks for nothing.
ASKED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 4},
    {"frequency_penalty": -0.3, "presence_penalty": 0.7, "repetition_penalty": 0.8,
     "min_new_tokens": 9, "stop_token_ids": [0]},
    {},
]  # fmt: skip


@dataclasses.dataclass
class Asking:
    """A request as it is, and what the host takes it to be: ``req``."""

    req: Any
    slot: int
    said: list[int]  # root included

    @classmethod
    def new(cls, name: str, slot: int, first: int, params: dict[str, Any], **fields: Any) -> Asking:
        req = double(
            "Req", rid=name, origin_input_ids=array("q", range(len(name))),
            output_ids=array("q"), sampling_params=SamplingParams(**params),
            eos_token_ids={4}, tokenizer=TOKENIZER, retraction_count=0, to_finish=None,
            **{"custom_logit_processor": None, **fields}, **row_of(slot),
        )  # fmt: skip
        return cls(req, slot, [first])

    def prefill_again(self, slot: int) -> None:
        """Retracted: what the host knows is prefilled, and brings another token."""
        self.said = [*self.req.output_ids, self.said[-1]]
        self.slot = slot
        self.req.retraction_count += 1
        for name, value in row_of(slot).items():
            setattr(self.req, name, value)


def row_of(slot: int) -> dict[str, Any]:
    """A request's row in SGLang's table, as this SGLang has it."""
    if "kv" in attribute_names(real_class("Req")):
        return {"kv": SimpleNamespace(req_pool_idx=slot)}
    return {"req_pool_idx": slot}


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A step's drafts: request b has the nodes of ``parents[b]``, root first."""

    shape: str
    parents: list[list[int]]
    tokens: list[list[int]]

    @classmethod
    def of(cls, requests: list[Asking], shape: str, rng: random.Random) -> Drafted:
        parents, tokens = [], []
        for request in requests:
            size = NODES if shape == "static chains" else rng.randint(1, NODES)
            above = [rng.randrange(n) if "trees" in shape else n - 1 for n in range(1, size)]
            parents.append([-1, *above])
            tokens.append([request.said[-1], *(rng.randrange(VOCAB) for _ in above)])
        return cls(shape, parents, tokens)

    def verify_input(self, seq_lens: list[int]) -> Any:
        if "trees" in self.shape:
            batch = double("ScheduleBatch", seq_lens=torch.tensor(seq_lens))
            return tree_input(
                self.parents, self.tokens, batch, width=NODES, num_steps=NODES - 1,
                packed=self.shape == "trees",
            )  # fmt: skip
        sizes = torch.tensor([len(p) for p in self.parents])
        stock = full_chains(
            len(sizes), NODES, draft_token=padded(self.tokens, 0, NODES).flatten(),
            positions=(torch.tensor(seq_lens)[:, None] + torch.arange(NODES)).flatten(),
        )  # fmt: skip
        packing = Packing(sizes, NODES) if self.shape == "chains" else None
        return chain.ChainVerifyInput.cut(stock, sizes.int(), packing=packing)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(request, node) of each row that the target forwards."""
        all_of_them = self.shape in ("static chains", "padded trees")
        counts = [NODES if all_of_them else len(p) for p in self.parents]
        return [(b, node) for b, count in enumerate(counts) for node in range(count)]

    def path(self, b: int, node: int) -> list[int]:
        """The tokens from the root to the node."""
        return [self.tokens[b][n] for n in sorted(oracles.ancestors(self.parents[b], node))]


SHAPES = "chains", "static chains", "trees", "padded trees"


def info_of(reqs: list[Any], processor: Any = None, **fields: Any) -> Any:
    """SGLang's sampling parameters of a greedy batch, as a forward is given them."""
    base: dict[str, Any] = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties"))
    params = [req.sampling_params.custom_params for req in reqs]
    processors = {hash(name): (made(), None) for name, made in (processor or {}).items()}
    return double(
        "SamplingBatchInfo", **base, is_all_greedy=True, logit_bias=fields.pop("bias", None),
        has_custom_logit_processor=bool(processor), custom_params=params,
        custom_logit_processor=processors, **fields,
    )  # fmt: skip


class Server:
    """Runs steps; ``logits`` of a step become those that RowLogits makes of them."""

    def __init__(self) -> None:
        self.history = OutputHistory(NODES)
        self.table = torch.arange(1, 1 + SLOTS * 200).view(SLOTS, 200).int()

    def batch(self, requests: list[Asking], info: Any) -> Any:
        lens = [len(r.req.origin_input_ids) + len(r.said) - 1 for r in requests]
        return double(
            "ScheduleBatch", reqs=[r.req for r in requests], sampling_info=info,
            req_to_token_pool=double("ReqToTokenPool", req_to_token=self.table),
            req_pool_indices=torch.tensor([r.slot for r in requests]), seq_lens=torch.tensor(lens),
        )  # fmt: skip

    def change(
        self, requests: list[Asking], drafted: Drafted, logits: Tensor, info: Any = None
    ) -> tuple[RowLogits, Any]:
        info = info_of([r.req for r in requests]) if info is None else info
        batch = self.batch(requests, info)
        verify_input = drafted.verify_input(batch.seq_lens.tolist())
        if verify_input.packing is not None:
            runner = double("ModelRunner", decode_cuda_graph_runner=None)
            verify_input.packing.forwarded(verify_input, batch, runner)
        rows = RowLogits(verify_input, batch, self.history)
        rows.change(double("LogitsProcessorOutput", next_token_logits=logits), None)
        return rows, batch


def accept(requests: list[Asking], drafted: Drafted, rows: RowLogits, rng: random.Random) -> None:
    """Each request accepts a path and a bonus token, which the host learns a step later."""
    numbers = {place: row for row, place in enumerate(drafted.rows)}
    predict = torch.zeros(len(numbers) + 1, dtype=torch.int32)
    index = torch.full((len(requests), NODES), -1, dtype=torch.int32)
    for b, request in enumerate(requests):
        request.req.output_ids = array("q", request.said)
        nodes = sorted(
            oracles.ancestors(drafted.parents[b], rng.randrange(len(drafted.parents[b])))
        )
        said = [*(drafted.tokens[b][n] for n in nodes[1:]), rng.randrange(VOCAB)]
        for place, (node, token) in enumerate(zip(nodes, said, strict=True)):
            index[b, place] = numbers[b, node]
            predict[numbers[b, node]] = token
        request.said += said
    rows.keep((predict, (index >= 0).sum(1), index))


def as_plain(req: Any, said: list[int], logits: Tensor) -> Tensor:
    """[V]: what SGLang's penalizers of plain decoding make of it, fed token by token."""
    kinds = {
        penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer, penaltylib.BatchedRepetitionPenalizer,
    }  # fmt: skip
    alone = double("ScheduleBatch", reqs=[req], device="cpu")
    penalizers: Any = penaltylib.BatchedPenalizerOrchestrator(VOCAB, alone, kinds)
    for token in said:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    logits, added = logits[None].clone(), torch.zeros(1, VOCAB)
    penalizers.accumulate_additive_penalties(added)
    logits += added
    if (scaling := penalizers.accumulate_scaling_penalties()) is not None:
        apply_scaling_penalties(logits, scaling)
    return logits[0]


def assert_rows(
    requests: list[Asking], drafted: Drafted, before: Tensor, found: Tensor,
    expected: Callable[[Any, list[int], Tensor], Tensor] = as_plain,
) -> None:  # fmt: skip
    """Each live row is what plain decoding has behind its path."""
    for row, (b, node) in enumerate(drafted.rows):
        if node < len(drafted.parents[b]):
            said = [*requests[b].said[:-1], *drafted.path(b, node)]
            wanted = expected(requests[b].req, said, before[row])
            torch.testing.assert_close(found[row], wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**20), st.sampled_from(SHAPES), st.sampled_from([1, penalties.ROOM]))
def test_row_logits_penalties_equal_plain_decoding(seed: int, shape: str, room: int) -> None:
    with mock.patch.object(penalties, "ROOM", room):  # a history that must grow
        served_steps(seed, shape)


def served_steps(seed: int, shape: str) -> None:
    rng, server = random.Random(seed), Server()
    generator = torch.Generator().manual_seed(seed)
    free, requests = list(range(SLOTS)), []
    for step in range(STEPS):
        while free and (not requests or rng.random() < 0.5):
            slot = free.pop(rng.randrange(len(free)))
            name = "r" * rng.randint(1, 4) + str(step)
            requests.append(Asking.new(name, slot, rng.randrange(VOCAB), rng.choice(ASKED)))
        if len(requests) > 1 and rng.random() < 0.3:
            free.append(requests.pop(rng.randrange(len(requests))).slot)
        if free and len(requests[0].req.output_ids) and rng.random() < 0.3:
            free.append(requests[0].slot)
            requests[0].prefill_again(free.pop(0))
        drafted = Drafted.of(requests, shape, rng)
        before = torch.randn(len(drafted.rows), VOCAB, generator=generator)
        found = before.clone()
        rows, _ = server.change(requests, drafted, found)
        assert_rows(requests, drafted, before, found)
        accept(requests, drafted, rows, rng)


def _with(info: Any, name: str) -> Any:
    made = double("SamplingBatchInfo", **vars(info))
    setattr(made, name, torch.zeros(1))
    return made


def test_row_logits_recall_counts_outputs_of_a_retracted_request() -> None:
    """The batch has a request without output tokens."""
    requests = [Asking.new(str(n), n, 2, params) for n, params in enumerate(ASKED[:5])]
    for request in requests[:4]:
        request.req.output_ids = array("q", [1, 3, 3])
    info = _with(info_of([r.req for r in requests], vocab_size=VOCAB), "acc_additive_penalties")
    recall(Server().batch(requests, info))
    logits = torch.randn(len(requests), VOCAB)
    found = logits + info.acc_additive_penalties
    apply_scaling_penalties(found, info.acc_scaling_penalties)
    for row, request in enumerate(requests):
        wanted = as_plain(request.req, list(request.req.output_ids), logits[row])
        torch.testing.assert_close(found[row], wanted, rtol=1e-6, atol=1e-6)


def test_row_logits_recall_without_penalties_or_outputs_changes_nothing() -> None:
    request = Asking.new("one", 0, 2, ASKED[0])
    for info in (info_of([request.req]), _with(info_of([request.req]), "acc_additive_penalties")):
        kept = dict(vars(info))
        recall(Server().batch([request], info))
        assert vars(info) == kept


# -- custom logit processors --------------------------------------------------------------


class Counting(CustomLogitProcessor):
    """Counts how often it is asked, where a test says: no such processor can be served."""

    where = "params"

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        for params in custom_param_list:
            if self.where == "params":
                params["asked"] = params.get("asked", 0) + 1
            elif self.where == "nested":
                params["list"].append(1)
            else:
                params["__req__"].c2t_asked = 1
        return logits


NGRAM = {"ngram_size": 2, "window_size": 50}


def asking(name: str, slot: int, processor: str, params: dict[str, Any]) -> Asking:
    made = Asking.new(name, slot, 2, {}, custom_logit_processor=processor)
    made.req.sampling_params.custom_params = {**params, "__req__": made.req}
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_row_logits_processor_is_asked_for_each_row(shape: str) -> None:
    """SGLang's own, which forbids pairs of tokens that were said; beside penalties."""
    rng, server = random.Random(1), Server()
    requests = [
        asking("one", 3, "ngram", NGRAM),
        Asking.new("two", 1, 2, ASKED[0]),
        asking("three", 0, "ngram", NGRAM),
    ]

    def expected(req: Any, said: list[int], logits: Tensor) -> Tensor:
        changed = as_plain(req, said, logits)[None]
        if req.custom_logit_processor is not None:
            told = SimpleNamespace(
                origin_input_ids=req.origin_input_ids, output_ids=array("q", said)
            )
            params: Any = {**NGRAM, "__req__": told}
            changed = DeepseekOCRNoRepeatNGramLogitProcessor()(changed, [params])
        return changed[0]

    forbidden = 0
    for _ in range(STEPS):
        drafted = Drafted.of(requests, shape, rng)
        before = torch.randn(len(drafted.rows), VOCAB)
        found = before.clone()
        made = {"ngram": DeepseekOCRNoRepeatNGramLogitProcessor}
        info = info_of([r.req for r in requests], made)
        rows, batch = server.change(requests, drafted, found, info)
        assert_rows(requests, drafted, before, found, expected)
        assert not depends_on_outputs(batch.sampling_info), "applied once"
        forbidden += int(found.isinf().sum())
        accept(requests, drafted, rows, rng)
    assert forbidden
    assert [r.req.to_finish for r in requests] == [None] * 3


@pytest.mark.parametrize("where", ["params", "nested", "request"])
def test_row_logits_processor_with_state_ends_its_request_with_400(where: str) -> None:
    server, rng = Server(), random.Random(2)
    bad, good = asking("bad", 3, "counts", {"list": []}), asking("good", 1, "ngram", NGRAM)
    drafted = Drafted.of([bad, good], "static chains", rng)
    counting = type("Counting", (Counting,), {"where": where})
    made = {"counts": counting, "ngram": DeepseekOCRNoRepeatNGramLogitProcessor}
    info = info_of([bad.req, good.req], made)
    server.change([bad, good], drafted, torch.randn(2 * NODES, VOCAB), info)
    assert bad.req.to_finish.status_code == 400
    assert "Counting writes into custom_params or __req__" in bad.req.to_finish.message
    assert good.req.to_finish is None
    assert not hasattr(bad.req, "c2t_asked")


# -- around acceptance --------------------------------------------------------------------


def test_row_logits_are_applied_once_before_sglangs_acceptance() -> None:
    """Chains at full width, where SGLang samples."""
    server, rng = Server(), random.Random(3)
    requests = [Asking.new("one", 3, 2, ASKED[4])]
    drafted = Drafted.of(requests, "static chains", rng)
    before = torch.randn(NODES, VOCAB)
    output = double("LogitsProcessorOutput", next_token_logits=before.clone())
    info = _with(info_of([requests[0].req], bias=torch.ones(1, VOCAB)), "acc_additive_penalties")
    batch = server.batch(requests, info)
    seen = []

    def stock(_input: Any, batch: Any, output: Any, mask: Any) -> Any:
        seen.append((batch.sampling_info, output.next_token_logits.clone(), mask))
        return torch.ones(NODES).int(), torch.ones(1), torch.zeros(1, NODES)

    verify_input = drafted.verify_input(batch.seq_lens.tolist())
    packed.accept(verify_input, stock, server.history, verify_input, batch, output)
    ((given, logits, mask),) = seen
    assert mask is None
    assert given.logit_bias is None
    assert not depends_on_outputs(given)
    assert_rows(requests, drafted, before, logits - 1)
