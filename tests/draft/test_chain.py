"""Draft chains: gating, truncation, packing, against loops that are obviously right."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.baselines import Entropy
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.draft.chain import ChainGate, matched_drafts
from sglang_c2t.draft_layer import measure
from sglang_c2t.kernels.gate import judge_layer
from sglang_c2t.policies import DraftLayer, build_policy
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.dymax import DyMax
from tests.draft.own_rules import Scheduled, in_torch


class Scripted:
    """Keeps what a table [D][B] says, and remembers what it was shown."""

    name = "scripted"

    def __init__(self, table: list[list[bool]], needs: frozenset[str] = frozenset()) -> None:
        self.table = table
        self.needs = needs
        self.seen: list[DraftLayer] = []

    def keep(self, layer: DraftLayer) -> torch.Tensor:
        self.seen.append(layer)
        return torch.tensor(self.table[layer.depth - 1], dtype=torch.bool)


class Measuring(Scripted):
    """Measures two things itself: a number of the logits, and the hidden state."""

    def __init__(self, table: list[list[bool]]) -> None:
        super().__init__(table, frozenset({"margin", "spread", "state"}))

    def measure(self, logits: torch.Tensor, hidden: torch.Tensor | None) -> dict[str, torch.Tensor]:
        assert hidden is not None
        return {"spread": logits.amax(dim=1) - logits.amin(dim=1), "state": hidden}


def run_gate(
    gate: ChainGate, logits: torch.Tensor, slots_of: Sequence[int] | None = None
) -> torch.Tensor:
    """Drive a gate as SGLang does: ``logits`` is [D, B, V], the first layer is relayed."""
    chosen = range(logits.shape[1]) if slots_of is None else slots_of
    slots = torch.tensor([*chosen], dtype=torch.int64)
    gate.join(slots, logits[0])
    gate.begin(slots)
    for layer in logits[1:]:
        gate.observe(layer)
    return gate.verify_lens


@given(
    st.integers(1, 6).flatmap(
        lambda depth: st.integers(0, 5).flatmap(
            lambda batch: st.lists(
                st.lists(st.booleans(), min_size=batch, max_size=batch),
                min_size=depth,
                max_size=depth,
            )
        )
    )
)
def test_chain_gate_ends_a_chain_at_its_first_dropped_token(table: list[list[bool]]) -> None:
    """Once the policy drops a token, later layers cannot revive the chain; the next step can."""
    depth, batch = len(table), len(table[0])
    expected = []
    for request in range(batch):
        kept = 0
        for layer in table:
            if not layer[request]:
                break
            kept += 1
        expected.append(kept + 1)
    gate = ChainGate(Scripted(table), num_slots=batch, device="cpu")
    for _ in range(2):
        lens = run_gate(gate, torch.zeros(depth, batch, 4))
        assert lens.tolist() == expected
        assert lens.dtype == torch.int32
        assert gate.any_alive() == (depth + 1 in expected)
        assert len(gate.layers) == depth


@pytest.mark.parametrize("enter", [ChainGate.join, ChainGate.relay_first_token])
def test_chain_gate_relays_first_tokens_by_slot(enter: Callable[..., None]) -> None:
    """Whatever the policy needs follows the request's slot, whatever the next batch's order."""
    policy = Measuring([[True, True]])
    gate = ChainGate(policy, num_slots=5, device="cpu")
    logits, hidden = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.rand(2, 3)
    enter(gate, torch.tensor([4, 1]), logits, hidden)
    gate.begin(torch.tensor([1, 4]))
    measured = measure(logits, ["margin"]) | policy.measure(logits, hidden)
    for name, values in measured.items():
        assert torch.equal(policy.seen[0].measured[name], values.flip(0)), name


def test_chain_gate_layers_carry_what_the_policy_needs() -> None:
    """And nothing more. P is the running product of the probabilities; depth counts from 1."""
    policy = Measuring([[True, False]] * 3)
    gate = ChainGate(policy, num_slots=2, device="cpu")
    logits, hidden, slots = draft_logits(3, 2, seed=0), torch.rand(3, 2, 4), torch.arange(2)
    gate.join(slots, logits[0], hidden[0])
    gate.begin(slots)
    for row in (1, 2):
        gate.observe(logits[row], hidden[row])
    assert not gate.exploring
    assert gate.layers == policy.seen
    assert [layer.alive.tolist() for layer in gate.layers] == [[True, True]] + [[True, False]] * 2
    parent, joint = None, torch.ones(2)
    for depth, layer in enumerate(gate.layers, start=1):
        said = measure(logits[depth - 1], ["margin"])
        said |= policy.measure(logits[depth - 1], hidden[depth - 1])
        joint = joint * said["prob"]
        assert layer.depth == depth
        assert layer.parent is parent
        assert layer.measured.keys() == said.keys()
        assert all(torch.equal(layer.measured[name], values) for name, values in said.items())
        assert torch.equal(layer.prob, said["prob"])
        assert torch.equal(layer.entropy, said["entropy"])
        assert torch.equal(layer.joint, joint)
        parent = layer


def test_chain_gate_fallback_when_a_measure_raises(caplog: pytest.LogCaptureFixture) -> None:
    """As a ``keep`` that raises: one log line, and the next step asks again."""
    policy = Measuring([[False]] * 3)
    gate, logits = ChainGate(policy, num_slots=2, device="cpu"), torch.zeros(2, 4)
    policy.keep = lambda layer: layer.measured["spread"] < layer.measured["state"][:, 0]  # type: ignore[method-assign]
    gate.join(torch.arange(2), logits, torch.ones(2, 3))
    gate.begin(torch.arange(2))
    assert gate.verify_lens.tolist() == [2, 2]
    for _ in range(2):
        gate.observe(logits, None)
    assert gate.fell_back
    assert gate.verify_lens.tolist() == [4, 4]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    gate.relay_first_token(torch.arange(2), logits, torch.zeros(2, 3))
    gate.begin(torch.arange(2))
    assert not gate.fell_back
    assert gate.verify_lens.tolist() == [1, 1]


@pytest.mark.parametrize(("needs", "complete"), [(set(), False), ({"margin"}, True)])
def test_chain_gate_first_token_without_recorded_names_is_not_complete(
    needs: set[str], complete: bool
) -> None:
    """Request 1 sat out the step before the exploring one, so its first token was measured
    for a policy's step; request 2 joins with everything measured, since its next step is unknown.
    """
    policy = Scripted([[True] * 4], frozenset(needs))
    gate = ChainGate(policy, num_slots=4, device="cpu", exploration=Scheduled(False, False, True))
    logits = torch.zeros(2, 4)
    gate.join(torch.tensor([0, 1]), logits)
    gate.relay_first_token(torch.tensor([0, 1]), logits)  # the next step does not explore
    gate.relay_first_token(torch.tensor([0]), logits[:1])  # the one after does
    gate.join(torch.tensor([2]), logits[:1])
    slots = torch.tensor([2, 1, 0, 3])
    gate.begin(slots)
    assert gate.exploring
    # Slot 3 was never measured.
    assert gate.first_tokens_complete(slots).tolist() == [True, complete, True, False]


def test_chain_gate_ranks_follow_rank_0() -> None:
    """The result of ``agree`` wins over the local policy, in lengths and in early exits."""
    gate = ChainGate(
        Scripted([[False, False, False]]),
        num_slots=3,
        device="cpu",
        agree=lambda mine: torch.tensor([3, 1, 2], dtype=mine.dtype),
    )
    assert run_gate(gate, torch.zeros(1, 3, 4)).tolist() == [1, 1, 1]
    assert gate.agreed(gate.verify_lens).tolist() == [3, 1, 2]
    assert gate.any_alive()


# -- with a kernel program ----------------------------------------------------------------

#: With thresholds that cut about half of the chains below.
BETAS = {
    "c2t": 0.3, "c2t-log": 0.3, "c2t-plus": 0.3, "dyjoint": 0.1, "dymax": 0.5,
}  # fmt: skip
GATES = {name: C2TConfig(policy=name, beta=beta) for name, beta in BETAS.items()} | {
    "fixed": C2TConfig("fixed", policy_options={"length": 3})
}


def policy_of(name: str) -> Any:
    return build_policy(GATES[name])


def fused(policy: Any, **options: Any) -> ChainGate:
    """A gate that asks the policy's program, here the kernel's twin."""
    gate = ChainGate(policy, **{"num_slots": 9, "device": "cpu", **options})
    assert gate.served.program is not None
    return gate


def plain(policy: Any, **options: Any) -> ChainGate:
    """A gate that asks the rule itself."""
    gate = ChainGate(in_torch(policy), **{"num_slots": 9, "device": "cpu", **options})
    assert gate.served.program is None
    return gate


def draft_logits(*shape: int, seed: int) -> torch.Tensor:
    return 4 * torch.randn(*shape, 50, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", GATES)
def test_chain_gate_program_decides_as_its_policy(name: str) -> None:
    """Over steps of different requests in different places, all lengths and early exits."""
    gates = fused(policy_of(name)), plain(policy_of(name))
    seen = set()
    steps = [([3, 1, 7], [1, 3]), ([1, 7, 3, 5], [5]), ([5, 8, 0, 0], [8]), ([8], []), ([7, 3], [])]
    for seed, (slots, joining) in enumerate(steps):
        logits = draft_logits(5, len(slots), seed=10 * seed)
        for gate in gates:
            if joining:
                gate.join(torch.tensor(joining), draft_logits(len(joining), seed=10 * seed + 1))
            gate.begin(torch.tensor(slots))
        for layer in logits:
            assert gates[0].any_alive() == gates[1].any_alive()
            for gate in gates:
                gate.observe(layer)
        lens = [gate.verify_lens for gate in gates]
        assert lens[0].tolist() == lens[1].tolist()
        assert lens[0].dtype == torch.int32
        assert gates[0].depth == gates[1].depth == 6
        seen |= set(lens[0].tolist())
        for gate in gates:  # the requests at 0 are a graph's padding, which no result shows
            real = [slot for slot in slots if slot]
            next_first = draft_logits(len(real), seed=10 * seed + 2)
            gate.relay_first_token(torch.tensor(real), next_first)
    assert len(seen) > (0 if name == "fixed" else 2), "no choice"


def test_chain_gate_lengths_outlive_the_next_step() -> None:
    """Graphs and the scheduler read lengths while the next step is under way."""
    gate, slots = fused(DyJoint(0.9)), torch.arange(4)
    gate.join(slots, draft_logits(4, seed=0))
    gate.begin(slots)
    gate.observe(draft_logits(4, seed=1))
    lens = gate.verify_lens
    before = lens.tolist()
    gate.relay_first_token(slots, 100 * torch.eye(4, 50))
    gate.begin(slots)
    gate.observe(100 * torch.eye(4, 50))
    assert gate.verify_lens.tolist() == [3] * 4
    assert lens.tolist() == before != [3] * 4


@pytest.mark.parametrize("captured", [False, True])
def test_chain_gate_switch_judges_from_the_next_step_on(captured: bool) -> None:
    """As a gate that was built with it; captured or not, and in torch.

    A program's new threshold counts for first tokens that were relayed before, too.
    """
    slots, first, later = torch.arange(5), draft_logits(5, seed=0), draft_logits(3, 5, seed=1)
    expected = run_gate(fused(DyJoint(0.3)), torch.cat((first[None], later)))
    gates = [fused(DyJoint(0.9))]
    if not captured:
        gates.append(ChainGate(Entropy(), num_slots=9, device="cpu"))
    for gate in gates:
        run_gate(gate, draft_logits(4, 5, seed=2))
        was_judged = gate.program is not None
        if was_judged:
            gate.relay_first_token(slots, first)
        gate.switch(DyJoint(0.3), captured=captured)
        if not was_judged:
            gate.relay_first_token(slots, first)
        gate.begin(slots)
        for layer in later:
            gate.observe(layer)
        assert gate.verify_lens.tolist() == expected.tolist() != [1] * 5


def test_chain_gate_switch_in_cuda_graphs_takes_weights_of_the_same_network_only() -> None:
    """Replayed graphs read the same memory for ever."""
    gate = fused(policy_of("c2t-plus"))
    memory = gate.program.buffer.data_ptr() if gate.program else 0
    gate.switch(build_policy(C2TConfig(policy="c2t-plus", beta=0.9)), captured=True)
    assert gate.program is not None
    assert gate.program.beta.item() == pytest.approx(0.9)
    assert gate.program.buffer.data_ptr() == memory
    for name in ("c2t", "dyjoint", "fixed"):
        with pytest.raises(ConfigError, match="cannot take over in captured CUDA graphs"):
            gate.switch(build_policy(C2TConfig(policy=name)), captured=True)
    assert gate.program.beta.item() == pytest.approx(0.9)
    assert gate.served.needs == policy_of("c2t-plus").needs
    with pytest.raises(ConfigError, match="cannot take over in captured CUDA graphs"):
        plain(DyJoint(0.5)).switch(DyJoint(0.4), captured=True)


@pytest.mark.parametrize("program", [False, True])
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.randoms())
def test_chain_gate_opt_out_keeps_full_drafts(
    program: bool, answers: list[tuple[bool, bool]], rng: random.Random
) -> None:
    """By the slot's last request; others are judged as if there were none, and ranks agree."""
    num, agreed = len(answers), list[list[int]]()
    slots = rng.sample(range(9), num)
    layers = draft_logits(3, max(num, 1), seed=4)[:, :num]
    make = fused if program else plain
    gate, other = (
        make(DyJoint(0.2), agree=lambda x: agreed.append(x.tolist()) or x),
        make(DyJoint(0.2)),
    )
    for request in (0, 1):
        gate.opt_outs.admit(slots, [answer[request] for answer in answers])
    out = [answer[1] for answer in answers]
    assert gate.opt_outs.any == any(out)
    alone = run_gate(other, layers, slots).tolist()
    assert run_gate(gate, layers, slots).tolist() == [
        4 if opted else length for opted, length in zip(out, alone, strict=True)
    ]
    assert gate.any_alive() == (any(out) or other.any_alive())
    assert agreed[-1] == [int(o or n == 4) for o, n in zip(out, alone, strict=True)]


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_chain_gate_keeps_a_token_at_the_threshold(program: bool, depth: int) -> None:
    """The first one, which was judged in the step before, and later ones."""
    logits = draft_logits(2, 3, seed=0)
    logits[2 - depth] *= 100  # the other layer is certain
    policy = DyMax(measure(logits[depth - 1], [])["prob"][1].item())
    gate = (fused if program else plain)(policy)
    if gate.program is not None:
        judged = judge_layer(logits[depth - 1], gate.program, depth=depth, topk=1)
        gate.program.set_beta(judged.confidence[1].item())
    assert run_gate(gate, logits)[1] == 3


def test_chain_gate_ranks_explore_when_rank_0_does() -> None:
    """It alone has a recorder, and so knows when to."""
    gate = ChainGate(
        Scripted([[False]] * 2), num_slots=1, device="cpu", recording=True,
        agree=torch.ones_like,
    )  # fmt: skip
    assert gate.exploring
    assert run_gate(gate, torch.zeros(2, 1, 4)).tolist() == [3]
    gate.relay_first_token(torch.tensor([0]), torch.zeros(1, 4))
    assert gate.exploring
    asked: list[torch.Tensor] = []
    alone = ChainGate(Scripted([[True]]), num_slots=1, device="cpu", agree=asked.append)
    alone.relay_first_token(torch.tensor([0]), torch.zeros(1, 4))
    assert asked == [], "without a recorder ranks need no message"


@pytest.mark.parametrize("name", ["c2t-plus", "dymax"])
def test_chain_gate_exploration_steps_keep_full_drafts_measured_in_torch(name: str) -> None:
    """Recordings do not depend on the machine, and requests may change between the kinds."""
    explored = False, True, False, True, False
    gates = [make(policy_of(name), exploration=Scheduled(*explored)) for make in (fused, plain)]
    batches = [0, 1, 2], [2, 0, 4], [4, 1, 0], [1, 2, 4], [0, 1, 2]
    for seed, (explores, slots) in enumerate(zip(explored, batches, strict=True)):
        here = torch.tensor(slots)
        for gate in gates:
            if seed < 2:
                joining = torch.tensor([[0, 1, 2], [4]][seed])
                gate.join(joining, draft_logits(len(joining), seed=100 + seed))
            gate.begin(here)
            for layer in draft_logits(3, 3, seed=seed):
                gate.observe(layer)
            assert gate.exploring == explores
            assert (gate.program is None) == (explores or gate is gates[1])
        mine, theirs = gates
        assert mine.verify_lens.tolist() == theirs.verify_lens.tolist()
        if explores:
            assert mine.verify_lens.tolist() == [5] * 3
            assert all("margin" in layer.measured for layer in mine.layers)
            complete = [gate.first_tokens_complete(here) for gate in gates]
            # Margins of this policy's own steps are the program's: not recorded.
            assert not (complete[0] & ~complete[1]).any()
            rows = complete[0].nonzero().flatten()
            assert rows.numel() >= 2
            for left, right in zip(mine.layers, theirs.layers, strict=True):
                assert torch.equal(left.joint[rows], right.joint[rows])
                assert left.measured.keys() == right.measured.keys()
                for statistic, values in left.measured.items():
                    assert torch.equal(values[rows], right.measured[statistic][rows])
        for gate in gates:
            if seed < 4:
                gate.relay_first_token(here, draft_logits(3, seed=200 + seed))


# -- packing ------------------------------------------------------------------------------


@given(st.integers(0, 2**16), st.integers(0, 5), st.integers(0, 6))
def test_matched_drafts_counts_to_the_first_mismatch(seed: int, depth: int, batch: int) -> None:
    """A draft stands one row after the target's choice for it."""
    generator = torch.Generator().manual_seed(seed)
    drafts, target = torch.randint(0, 2, (2, batch, depth + 1), generator=generator)
    found = matched_drafts(drafts, target).tolist()
    for b, matched in enumerate(found):
        assert drafts[b, 1 : matched + 1].tolist() == target[b, :matched].tolist()
        assert matched == depth or drafts[b, matched + 1] != target[b, matched]
    assert len(found) == batch


@pytest.mark.parametrize(
    ("policy", "names"), [("c2t", ()), ("c2t-plus", ()), ("dymax", ()), ("dymax", ("margin",))]
)
@pytest.mark.parametrize("fused", [True, False])
def test_chain_gate_keeps_an_unmeasured_first_token(
    policy: str, names: tuple[str, ...], fused: bool
) -> None:
    """Its prefill ran on another server, and drafts must not depend on other requests."""
    rule = build_policy(C2TConfig(policy=policy))
    exploration = Scheduled(*[False] * 9)
    exploration.names = frozenset(names)
    used, fresh = (
        ChainGate(
            rule if fused else in_torch(rule),
            num_slots=3,
            device="cpu",
            exploration=exploration if names else None,
        )
        for _ in range(2)
    )
    logits, hidden = draft_logits(4, 3, seed=2), torch.rand(3, 4)
    everyone, arriving = torch.arange(3), torch.tensor([2, 0])
    used.join(everyone, torch.zeros_like(logits[0]), hidden)  # as unsure as can be
    used.join_unmeasured(arriving)
    for gate in (used, fresh):
        gate.begin(arriving)
        for layer in logits[1:]:
            gate.observe(layer[arriving], hidden[arriving])
    assert used.verify_lens.equal(fresh.verify_lens)
    assert (used.verify_lens > 1).all()
    for gate in (used, fresh):  # as certain, so that it does not weigh on the next one either
        gate.begin(arriving)
        gate.observe(100 * torch.eye(2, 50), torch.rand(2, 4))
        assert gate.verify_lens.tolist() == [3, 3]
    if names:
        assert used.first_tokens_complete(everyone).tolist() == [False, True, False]
