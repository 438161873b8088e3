"""A drafter with a plan and a gate, without SGLang's draft worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.plan.fixed import FixedPlanner
from sglang_c2t.plan.step import StepKind
from sglang_c2t.policies import build_policy
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.gated_tree import GatedTree
from sglang_c2t.srt.data_parallel import Peers
from sglang_c2t.srt.draft.chain import ChainDrafter
from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import Host
from sglang_c2t.srt.draft.planning import Planning
from sglang_c2t.srt.draft.selection import ChainSelector
from sglang_c2t.srt.draft.tree import TreeDrafter
from tests.doubles import double
from tests.srt.draft.stock_worker import BATCH, STEPS, VOCAB, Planned, batch_of

SLOTS = torch.arange(BATCH)


def served(drafter: Drafter, planner: Planned | None = None, *, width: int = STEPS + 1) -> Any:
    """The drafter, with a planner or the one of full drafts."""
    host, options = drafter.host, {"tiers": lambda: None, "width": width, "device": "cpu"}
    fixed = FixedPlanner(host.num_steps, host.topk, width)
    gating = planning = Planning(fixed, None, **options)
    if planner is not None:
        selector = ChainSelector(planner, width=width, slots=host.num_slots, device="cpu")
        planning = Planning(planner, selector, **options)
    drafter.serve(planning, gating, packed=planner is not None)
    return drafter


def chains(host: Host, policy: Any, planner: Planned | None = None) -> Any:
    """Policy ``None``: ``auto``."""
    policy = policy or build_policy(C2TConfig(policy="auto"))
    gate = ChainGate(policy, num_slots=host.num_slots, device="cpu")
    return served(ChainDrafter(host, gate), planner)


def step(drafter: Any, *slots: int) -> Any:
    """The verify input of a step, of the first slots if none are given."""
    return drafter.host._worker.step(batch_of(*slots or range(BATCH)))


def layers_run(drafter: Any) -> list[int]:
    """The number of draft forwards of each draft."""
    return drafter.host._worker.layers_run


@pytest.fixture
def make(make_worker: Any) -> Any:
    """Make a drafter of chains over SGLang's draft worker."""

    def made(policy: Any, planner: Planned | None = None, **options: Any) -> Any:
        return make_worker(lambda host: chains(host, policy, planner), **options).drafter

    return made


@pytest.fixture
def planner() -> Planned:
    return Planned()


@pytest.fixture
def planned(make: Any, planner: Planned) -> Any:
    """A drafter with this planner."""
    return make(None, planner)


# -- a gate decides -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 2, 4, None])
def test_drafter_skips_layers_after_the_gate_ended_all_chains(
    make: Any, length: int | None
) -> None:
    drafter = make(Fixed(length))
    step(drafter)  # at its end it scores the first layer of the next
    kept = STEPS if length is None else length
    assert step(drafter).num_rows.tolist() == [kept + 1] * BATCH
    assert layers_run(drafter)[1] == min(kept, STEPS - 1)


@pytest.mark.parametrize("why", ["captured", "with other ranks"])
def test_drafter_skips_no_layer_in_graphs_or_with_other_ranks(make: Any, why: str) -> None:
    drafter = make(Fixed(1))
    if why == "captured":
        drafter.host.capturing = True
    else:
        drafter.host.peers = double(Peers)
        drafter.host.peers.layers = lambda mine, *_, **__: mine
    assert step(drafter).num_rows.tolist() == [2] * BATCH
    assert layers_run(drafter) == [STEPS - 1]


def test_drafter_opt_out_verifies_the_full_chain(make: Any) -> None:
    drafter = make(Fixed(1))
    drafter.requests.admit(batch_of(0, 1, 5))
    assert step(drafter, 0, 1, 5).num_rows.tolist() == [2, 2, STEPS + 1]
    assert layers_run(drafter) == [STEPS - 1]


@pytest.mark.parametrize(("kept", "run"), [(True, 2), (False, 0)])
def test_drafter_skips_layers_after_no_tree_grows(make_worker: Any, kept: bool, run: int) -> None:
    policy = GatedTree(DyJoint(0.0 if kept else 1.1))
    gate = TreeGate(policy, TreeShape(3, 3, 9), num_slots=8, device="cpu")
    worker = make_worker(lambda host: served(TreeDrafter(host, gate), width=9), topk=3, num_steps=3)
    verify_input = step(worker.drafter)
    assert worker.layers_run == [run]
    assert verify_input.num_rows.tolist() == [9 if kept else 1] * BATCH
    assert verify_input.step.plan.kind is StepKind.FIXED


# -- a planner decides --------------------------------------------------------------------


def test_drafter_uniform_step_asks_no_gate(planned: Any, planner: Planned) -> None:
    planned.gate.observe = planned.gate.begin = None  # must not be called
    planner.says(StepKind.UNIFORM, 3)
    assert step(planned).num_rows.tolist() == [4] * BATCH


@pytest.mark.parametrize("graphs", [False, True])
def test_drafter_scores_first_tokens_after_uniform_steps_late(
    make: Any, planner: Planned, graphs: bool
) -> None:
    """Those after the last one. A graph scores every step, so that its first tokens always are."""
    planned, measured = make(None, planner, graphs=graphs), []
    planned.gate._judge_first = lambda slots, *_: measured.append(slots.tolist())
    for kind in (*[StepKind.UNIFORM] * 3, StepKind.PLANNED):
        late = len(measured)
        planner.says(kind, 1)
        step(planned)
    assert late == (3 if graphs else 0)
    assert measured == [SLOTS.tolist()] * (4 if graphs else 2)


# -- requests -----------------------------------------------------------------------------


def test_drafter_requests_from_another_server_are_unmeasured(planned: Any) -> None:
    """A measurement that waited is of the request that had the slot before."""
    slots = torch.tensor([0, 1, 5])
    planned.gate.relay_first_token(slots, torch.zeros(BATCH, VOCAB), later=True)
    planned.requests.arrive(batch_of(1, 5))
    assert planned.gate.first_tokens.judged(slots).prob[0].tolist() == [0.125, 1, 1]
    assert planned.gate.opt_outs.whole(slots).tolist() == [False, False, True]
    for unmeasured in ([1, 2], []):
        made = step(planned, 0, 1, 5).step
        assert (made.unmeasured, made.full) == (unmeasured, [2])


def test_drafter_switch_forgets_scores_of_another_policy(make: Any, planner: Planned) -> None:
    """A confidence of ``fixed`` is a depth, and one of ``entropy`` an entropy."""
    drafter, seen = make(Fixed()), []
    gate = drafter.gate
    gate.join(SLOTS, torch.zeros(BATCH, VOCAB))
    assert gate.first_tokens.judged(SLOTS).confidence[0].tolist() == [-1] * BATCH
    gate.switch(build_policy(C2TConfig(policy="auto")), captured=False)
    served(drafter, planner).requests.forget_scores()
    begin = gate.begin
    gate.begin = lambda slots: (
        begin(slots), seen.append(gate.first_tokens.judged(slots).confidence[0].tolist())
    )  # fmt: skip
    for unmeasured in (SLOTS.tolist(), []):
        assert step(drafter).step.unmeasured == unmeasured
    assert seen[0] == [1.0] * BATCH


# -- ranks that forward together ----------------------------------------------------------


def test_drafter_ranks_agree_on_layers(planned: Any, planner: Planned) -> None:
    """Each says whether a request wants them all, its requests, and its layers."""
    told, host = [], planned.host
    host.peers = double(Peers)
    host.peers.of_all = lambda *mine: (told.append(mine), [[0, 9, 2], [*mine]])[1]
    planned.requests.admit(batch_of(5))
    planner.says(StepKind.PLANNED, 4)
    assert step(planned).step.plan.num_layers == 2
    planner.says(StepKind.PLANNED, STEPS)
    assert step(planned, 0, 1, 5).step.plan.num_layers == STEPS
    host._worker.step(batch_of(mode=ForwardMode.IDLE))
    assert told == [(0, BATCH, 4), (1, BATCH, STEPS), (0, 0, STEPS)]
    assert layers_run(planned) == [1, STEPS - 1, 1]
