"""The gate of a drafted layer: kernels, twin and float64 lists agree, and so do our policies.

The kernels run in Triton's interpreter, where a process of its own calls `main`, and compile for
Hopper without a GPU; on a GPU they are compared with the twin and replayed in CUDA graphs.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import traceback

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.classifier.features import MIN_PROB
from sglang_c2t.draft.growth import node_margins
from sglang_c2t.draft_layer import MAX_MARGIN, DraftLayer, measure
from sglang_c2t.kernels import gate, gate_device
from sglang_c2t.kernels.gate import judge_layer, judge_layer_reference
from sglang_c2t.kernels.gate_program import FusedGate, GateOutput, Relay, Weights
from tests import oracles
from tests.gpu import gpu
from tests.kernels.hopper import compiled, require_no_spills
from tests.kernels.processes import run_worker

#: Feature sets of c2t, c2t-log, c2t-plus; what else may be read; c2t-plus in trees.
NETWORKS = [
    ("joint", "entropy", "depth"),
    ("log_joint", "entropy", "depth"),
    ("log_joint", "margin", "entropy", "depth"),
    ("depth", "prob"),
    ("log_joint", "margin", "entropy", "depth", "rank", "parent_rank"),
]
#: DyJoint and DyMax; entropy and depth, which must not be exceeded.
THRESHOLDS = {("joint",): 1, ("prob",): 1, ("entropy",): -1, ("depth",): -1}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# -- what is expected ---------------------------------------------------------------------


def random_weights(features: int, hidden: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(hidden, features), (hidden,), (1, hidden), (1,)]
    return Weights(*(torch.randn(shape, generator=generator) * 0.3 for shape in shapes))


def program(
    names: tuple[str, ...], hidden: int = 48, beta: float | None = None, device: str = "cpu"
) -> FusedGate:
    sign = THRESHOLDS.get(names, 1)
    beta = 0.4 * (1 if sign > 0 else -8) if beta is None else beta
    weights = None if names in THRESHOLDS else random_weights(len(names), hidden)
    return FusedGate(names, weights, beta=beta, device=device, sign=sign)


def confidence_by_hand(gate_program: FusedGate, known: dict[str, float]) -> float:
    x = [known[name] for name in gate_program.names]
    if gate_program.hidden_size:
        return 1 / (1 + math.exp(-oracles.logit(gate_program.weights, x)))
    return THRESHOLDS[gate_program.names] * x[0]


def judged_by_hand(
    logits: Tensor,
    gate_program: FusedGate,
    depth: int,
    topk: int,
    joint: Tensor | None = None,
    alive: Tensor | None = None,
    token_map: Tensor | None = None,
    width: int = 1,
) -> GateOutput:
    """Row by row and token by token in float64; at least one logit of a row is finite."""
    rows, beta = [], gate_program.beta.item()
    for r, row in enumerate(logits.double().tolist()):
        high = max(row)
        raised = [math.exp(x - high) for x in row]
        total = math.fsum(raised)
        probs = [e / total for e in raised]
        entropy = -math.fsum(p * math.log(p) for p in probs if p > 0)
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        for place, token in enumerate(order[:topk]):
            rival = order[1] if place == 0 else order[0]
            p = probs[token] * (1.0 if joint is None else joint[r].item())
            known = {
                "joint": p,
                "log_joint": math.log(max(p, 1e-9)),
                "prob": probs[token],
                "margin": min(max(row[token] - row[rival], -50.0), 50.0),
                "entropy": entropy,
                "depth": float(depth),
                "rank": float(place),
                "parent_rank": float(r % width),
            }
            said = confidence_by_hand(gate_program, known)
            keep = said >= beta and (alive is None or bool(alive[r]))
            target = token if token_map is None else token_map[token].item()
            rows.append((target, probs[token], p, said, keep, entropy))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 6
    types = [torch.int64] + [torch.float64] * 3 + [torch.bool, torch.float64]
    tensors = [
        torch.tensor(column, dtype=dtype).view(len(logits), topk)
        for column, dtype in zip(columns, types, strict=True)
    ]
    return GateOutput(*tensors[:5], tensors[5][:, 0])


def assert_same(got: GateOutput, expected: GateOutput, beta: float) -> None:
    """Ids exactly; numbers to float32; decisions wherever beta is not a rounding away.

    An entropy that torch sums over a vocabulary of 128,256 was 9e-5 off on a CPU without AVX-512.
    """
    mine, theirs = got.tokens, expected.tokens
    assert mine.dtype == torch.int64
    assert torch.equal(mine, theirs), f"{mine.tolist()} != {theirs.tolist()}"
    for name in ("prob", "joint", "confidence", "entropy"):
        mine, theirs = getattr(got, name), getattr(expected, name).float()
        worst = (mine - theirs).abs().max().item() if mine.numel() else 0.0
        close = torch.allclose(mine, theirs, rtol=2e-5, atol=1e-5)
        assert close, f"{name}: differs by {worst}"
    sure = (expected.confidence - beta).abs() > 1e-5
    assert torch.equal(got.keep & sure, expected.keep & sure), "keep"


def verify_against_hand(logits: Tensor, gate_program: FusedGate, **layer: object) -> None:
    """The kernels (where they run) and their twin both say what the lists say."""
    beta = gate_program.beta.item()
    expected = judged_by_hand(logits, gate_program, **layer)
    twin = judge_layer_reference(logits, gate_program, **layer)
    assert_same(twin, expected, beta)
    blind = judge_layer_reference(logits, gate_program, **layer, tokens=False)
    assert_same(blind._replace(tokens=expected.tokens), expected, beta)
    judged = judge_layer(logits, gate_program, **layer)
    assert_same(judged, expected, beta)
    torch.testing.assert_close(judged.confidence, twin.confidence, rtol=2e-5, atol=2e-6)


def random_layer(
    rows: int, vocab: int, topk: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, dict[str, object]]:
    """Logits and the parents they belong to; the first parent is dead."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    alive = torch.arange(rows) != 0
    of_parents = {"joint": torch.rand(rows, generator=generator), "alive": alive}
    return logits, {"depth": 1 + seed % 6, "topk": topk, **of_parents}


# -- interpreted cases --------------------------------------------------------------------


def each_feature_set_and_type_of_logits() -> None:
    for names, dtype in itertools.product((*NETWORKS, *THRESHOLDS), DTYPES):
        logits, layer = random_layer(6, 150, 4, dtype=dtype)
        verify_against_hand(logits, program(names), **layer, width=3)
        logits, layer = random_layer(3, 150, 1, dtype=dtype, seed=1)
        verify_against_hand(logits, program(names), **layer)


def each_topk_down_to_vocabularies_of_just_that_size() -> None:
    for topk in range(1, gate.MAX_TOPK + 1):
        for vocab in (max(topk, 2), gate.GROUP + 1):
            logits, layer = random_layer(2, vocab, topk, seed=topk)
            for names in (NETWORKS[2], NETWORKS[-1]):
                verify_against_hand(logits, program(names), **layer)
    logits, layer = random_layer(2, gate.CHUNK + 1, gate.MAX_TOPK)
    verify_against_hand(logits, program(NETWORKS[2]), **layer)


def equal_logits_go_to_the_lowest_id() -> None:
    """Within a group, across groups and across chunks; 0.0 and -0.0 are equal."""
    for vocab, topk in itertools.product((40, 200, 9000), (1, 10)):
        generator = torch.Generator().manual_seed(vocab)
        few = torch.randint(0, 3, (2, vocab), generator=generator).float()
        few[0] = 0.0
        few[0, ::2] = -0.0
        layer = {"depth": 1, "topk": topk}
        verify_against_hand(few, program(NETWORKS[2]), **layer)
        verify_against_hand(-few, program(NETWORKS[2]), **layer)


def masked_logits_have_no_probability() -> None:
    """Whole chunks, all tokens but one, and more children wanted than tokens are left."""
    for dtype in DTYPES:
        logits, layer = random_layer(5, 2 * gate.CHUNK + 100, 8, dtype=dtype)
        logits[0, : gate.CHUNK] = -torch.inf
        logits[1, gate.CHUNK :] = -torch.inf
        logits[2] = -torch.inf
        logits[2, gate.CHUNK + 77] = -3.0
        logits[3, torch.arange(logits.shape[1]) % 4000 != 5] = -torch.inf
        verify_against_hand(logits, program(NETWORKS[2]), **layer)
        verify_against_hand(logits, program(NETWORKS[2]), **{**layer, "topk": 1})


def real_vocabularies() -> None:
    """Llama 2, Llama 3, an odd one; as SGLang gives them, in rows wider than V."""
    sizes = ((32000, torch.bfloat16, 1), (128256, torch.float32, 10), (32003, torch.bfloat16, 8))
    for vocab, dtype, topk in sizes:
        wide, layer = random_layer(2 if vocab < 1e5 else 1, vocab + 61, topk, dtype=dtype)
        layer["token_map"] = torch.randperm(vocab) + 1000
        logits = wide[:, :vocab]
        wide[:, vocab:] = 1e4  # would win if it were read
        verify_against_hand(logits, program(NETWORKS[1]), **layer)


def rows_of_nothing_but_nan_harm_nobody() -> None:
    logits, layer = random_layer(3, 500, 5)
    logits[1] = torch.nan
    layer["token_map"] = torch.randperm(500)
    judged = judge_layer(logits, program(NETWORKS[1]), **layer)
    assert torch.equal(judged.tokens[1], layer["token_map"][:5])
    others = [0, 2]
    of_others = {n: v[others] for n, v in layer.items() if n in {"joint", "alive"}}
    alone = judge_layer(logits[others], program(NETWORKS[1]), **{**layer, **of_others})
    for mine, theirs in zip(judged, alone, strict=True):
        assert torch.equal(mine[others], theirs)


def results_land_in_given_memory_and_nowhere_else() -> None:
    for topk in (1, 3, 10):
        logits, layer = random_layer(4, 90, topk)
        expected = judge_layer(logits, program(NETWORKS[2]), **layer)
        for run in (judge_layer, judge_layer_reference):
            around = [torch.zeros(t.numel() + 64, dtype=t.dtype) for t in expected]
            out = GateOutput(*(a[:-64].view_as(t) for a, t in zip(around, expected, strict=True)))
            assert run(logits, program(NETWORKS[2]), **layer, out=out) is out
            for mine, theirs in zip(out, expected, strict=True):
                assert torch.allclose(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)
            assert not any(a[-64:].any() for a in around)


def what_is_said_waits_in_the_columns_of_its_slots() -> None:
    """And nothing else of the table is touched."""
    for topk in (1, 3):
        logits, layer = random_layer(4, 90, topk)
        slots = torch.tensor([5, 0, 2, 6])
        for run in (judge_layer, judge_layer_reference):
            table = torch.full((1 + 2 * topk, 8), -7.0)
            said = run(logits, program(NETWORKS[2]), **layer, relay=Relay(table, slots))
            expected = torch.full_like(table, -7.0)
            for row, slot in enumerate(slots.tolist()):
                column = [said.entropy[row], *said.prob[row], *said.confidence[row]]
                expected[:, slot] = torch.stack(column)
            assert torch.equal(table, expected), run.__name__


def chains_keep_their_books_in_place() -> None:
    """Three steps of K = 1 on one set of buffers count like loops over single tokens."""
    rows, steps = 6, 3
    gate_program = program(("joint",), beta=0.2)
    for run in (judge_layer, judge_layer_reference):
        books = GateOutput.empty(rows, 1, "cpu")
        books.joint.fill_(1.0)
        books.keep.fill_(True)
        num_kept = torch.zeros(rows, dtype=torch.int32)
        probs = []
        for depth in range(1, steps + 1):
            logits, _ = random_layer(rows, 30, 1, seed=depth)
            state = {"joint": books.joint[:, 0], "alive": books.keep[:, 0], "num_kept": num_kept}
            run(logits, gate_program, depth=depth, topk=1, out=books, **state)
            probs.append(logits.double().softmax(-1).amax(-1).tolist())
        kept = []
        for of_request in zip(*probs, strict=True):
            joints = list(itertools.accumulate(of_request, lambda a, b: a * b))
            kept.append(len(list(itertools.takewhile(lambda p: p >= 0.2, joints))))
        assert num_kept.tolist() == kept, (num_kept.tolist(), kept)
        assert len(set(kept)) > 1, "the example should have chains of different length"


def a_confidence_exactly_at_the_threshold_is_kept() -> None:
    """And dropped where the threshold is the next float above it."""
    for names in (*THRESHOLDS, NETWORKS[1]):
        for run in (judge_layer, judge_layer_reference):
            logits, layer = random_layer(2, 40, 3, seed=5)
            layer["alive"] = None
            gate_program = program(names)
            confidence = run(logits, gate_program, **layer).confidence.flatten()
            above = confidence.nextafter(torch.tensor(2.0))
            for place in range(len(confidence)):
                for beta, kept in ((confidence[place], True), (above[place], False)):
                    gate_program.set_beta(beta.item())
                    judged = run(logits, gate_program, **layer)
                    assert judged.keep.flatten()[place] == kept, (names, run.__name__)


def new_weights_and_thresholds_are_seen_at_once() -> None:
    logits, layer = random_layer(3, 50, 4)
    swapped = program(NETWORKS[0])
    memory = swapped.buffer.data_ptr()
    for seed, beta in ((1, 0.3), (2, 0.9), (3, 0.0)):
        swapped.load(random_weights(3, 48, seed))
        swapped.set_beta(beta)
        verify_against_hand(logits, swapped, **layer)
    assert swapped.buffer.data_ptr() == memory


#: Any layer of draft logits that a gate may meet.
LAYERS = {
    "rows": st.integers(0, 4),
    "vocab": st.integers(2, 300) | st.integers(4000, 5000),
    "topk": st.integers(1, gate.MAX_TOPK),
    "dtype": st.sampled_from(DTYPES),
    "names": st.sampled_from([*NETWORKS, *THRESHOLDS]),
    "hidden": st.sampled_from([1, 16, 32, 48, 64]),
    "seed": st.integers(0, 10**6),
    "masked": st.floats(0, 1),
    "unknown": st.sets(st.sampled_from(["joint", "alive"])),
}


def verify_any(
    rows: int,
    vocab: int,
    topk: int,
    dtype: torch.dtype,
    names: tuple[str, ...],
    hidden: int,
    seed: int,
    masked: float,
    unknown: set[str],
) -> None:
    """A layer of :data:`LAYERS`; the first token of a row is never masked."""
    logits, layer = random_layer(rows, vocab, min(topk, vocab), dtype=dtype, seed=seed)
    gone = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < masked
    gone[:, 0] = False
    layer |= dict.fromkeys(unknown)
    verify_against_hand(logits.masked_fill(gone, -torch.inf), program(names, hidden), **layer)


# No shrinking: it takes minutes in the interpreter.
@settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
@given(**LAYERS)
def any_shape(**layer: object) -> None:
    verify_any(**layer)


INTERPRETED = [
    each_feature_set_and_type_of_logits,
    each_topk_down_to_vocabularies_of_just_that_size,
    equal_logits_go_to_the_lowest_id,
    masked_logits_have_no_probability,
    real_vocabularies,
    rows_of_nothing_but_nan_harm_nobody,
    results_land_in_given_memory_and_nowhere_else,
    what_is_said_waits_in_the_columns_of_its_slots,
    chains_keep_their_books_in_place,
    a_confidence_exactly_at_the_threshold_is_kept,
    new_weights_and_thresholds_are_seen_at_once,
    any_shape,
]


def main() -> None:
    """Prints JSON, {case: traceback or ""}."""
    failures = {}
    for case in INTERPRETED:
        failures[case.__name__] = ""
        try:
            case()
        except Exception:
            failures[case.__name__] = traceback.format_exc()
    print(json.dumps(failures))


FLOAT = torch.float32
SHIPPED = ("c2t", "c2t-log", "c2t-plus", "c2t-tree", "c2t-log-tree", "c2t-plus-tree")


@functools.cache
def failures() -> dict[str, str]:
    """All cases of `main` in one fresh process."""
    return json.loads(run_worker("test_gate").splitlines()[-1])


@pytest.mark.parametrize("case", [case.__name__ for case in INTERPRETED])
def test_the_interpreted_kernels_say_what_lists_of_float64_say(case: str) -> None:
    traceback = failures()[case]
    assert not traceback, traceback


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_partials_compile_for_an_h100_without_spills(dtype: torch.dtype) -> None:
    sizes = {"CHUNK": gate.CHUNK, "GROUP": gate.GROUP}
    require_no_spills(compiled(gate.logit_partials, dtype, 32000, 32000, FLOAT, FLOAT, **sizes))


@pytest.mark.parametrize("vocab", [32000, 151936])
@pytest.mark.parametrize(
    ("names", "topk"),
    [
        *((NETWORKS[2], topk) for topk in (1, 8, 10, 16)),
        (NETWORKS[-1], 1),
        (NETWORKS[-1], 16),
        *((names, 4) for names in THRESHOLDS),
    ],
)
def test_the_judge_compiles_for_an_h100_without_spills(
    names: tuple[str, ...], topk: int, vocab: int
) -> None:
    """Chains count what they keep, trees do not; EAGLE-3 alone brings a token map."""
    parents = [None, None] if names in THRESHOLDS else [FLOAT, torch.bool]
    token_map, num_kept = (torch.int64, None) if topk > 1 else (None, torch.int32)
    out = [torch.int64, *[FLOAT] * 3, torch.bool, FLOAT]
    relay = (None, None, 0) if topk == 8 else (FLOAT, torch.int64, 257)
    constants = gate.judge_constants(program(names), topk, -(-vocab // gate.CHUNK))
    kernel = compiled(
        gate.judge, torch.bfloat16, vocab, vocab, FLOAT, FLOAT, FLOAT, 2.0, *parents, token_map,
        num_kept, *relay, *out, **constants,
    )  # fmt: skip
    require_no_spills(kernel)


# -- the twin -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(**LAYERS)
def test_the_twin_says_what_lists_of_float64_say(**layer: object) -> None:
    verify_any(**layer)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("topk", [1, 8])
def test_the_gate_is_as_sure_as_the_shipped_classifier(name: str, topk: int) -> None:
    """From the same logits, through `measure`, `node_margins` and the classifier itself."""
    classifier = load_classifier(name)
    weights = Weights(*classifier.net.parameters())
    shipped = FusedGate(classifier.features.names, weights, beta=0.5, device="cpu")
    logits, given_layer = random_layer(20, 300, topk, seed=3)
    width = 1 if topk == 1 else 4
    judged = judge_layer(logits, shipped, **given_layer, width=width)

    stats = measure(logits, ["margin"])
    prob = logits.softmax(-1).topk(topk).values
    margin = stats["margin"] if topk == 1 else node_margins(prob)
    joint = (prob * given_layer["joint"][:, None]).flatten()
    layer = DraftLayer(
        depth=given_layer["depth"],
        prob=prob.flatten(),
        joint=joint,
        entropy=stats["entropy"].repeat_interleave(topk),
        alive=given_layer["alive"].repeat_interleave(topk),
        measured={
            "margin": margin,
            "rank": torch.arange(topk).repeat(20).float(),
            "parent_rank": (torch.arange(20) % width).repeat_interleave(topk).float(),
        },
    )
    torch.testing.assert_close(judged.prob[:, 0], stats["prob"])
    torch.testing.assert_close(judged.entropy, stats["entropy"])
    confidence = classifier.confidence(layer)
    torch.testing.assert_close(judged.confidence.flatten(), confidence, rtol=1e-5, atol=1e-6)


def test_the_first_child_has_the_margin_of_a_chain_even_without_a_second_token() -> None:
    logits = torch.full((1, 70), -torch.inf)
    logits[0, 66] = 2.0
    one, nothing = torch.ones(1, 1), torch.zeros(1)
    as_is = Weights(0.01 * one, one[0], one, nothing)  # sigmoid(1 + margin / 100)
    margin = FusedGate(("margin",), as_is, beta=0.5, device="cpu")
    chain = judge_layer(logits, margin, depth=1, topk=1)
    tree = judge_layer(logits, margin, depth=1, topk=3)
    assert measure(logits, ["margin"])["margin"].tolist() == [MAX_MARGIN]
    sure, unsure = torch.tensor([1.5, 0.5]).sigmoid().tolist()
    assert chain.confidence.tolist() == [[sure]]
    assert tree.confidence.tolist() == [[sure, unsure, unsure]]
    assert tree.tokens.tolist() == [[66, 0, 1]]


def test_the_constants_are_the_classifiers() -> None:
    assert gate_device.MIN_PROB.value == MIN_PROB
    assert gate_device.MAX_MARGIN.value == MAX_MARGIN


# -- programs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "hidden_sizes", "reason"),
    [
        (("joint", "entropy_top1000"), (48,), "entropy_top1000"),
        (("hidden",), (48,), "hidden"),
        (("entropy_top5", "hidden"), (48,), "entropy_top5, hidden"),
        (("joint",), (48, 48), "one hidden layer"),
        (("joint",), (65,), "at most 64 units"),
        (("joint",), (0,), "at most 64 units"),
        (("joint", "prob"), (), "one feature is the confidence"),
        ((), (), "one feature is the confidence"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_with_the_reason(
    names: tuple[str, ...], hidden_sizes: tuple[int, ...], reason: str
) -> None:
    said = FusedGate.refusal(names, hidden_sizes)
    assert said is not None
    assert reason in said


def test_weights_of_another_network_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(48, 3\)"):
        program(NETWORKS[0]).load(random_weights(4, 48))
    with pytest.raises(ValueError, match="shapes"):
        program(("joint",)).load(random_weights(1, 16))
    with pytest.raises(ValueError, match="entropy_top5"):
        FusedGate(("entropy_top5",), random_weights(1, 16), beta=0.5, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9).double()}, "float64"),
        ({"logits": torch.zeros(9)}, r"\[R, V\]"),
        ({"logits": torch.zeros(9, 2).T}, "neighbours"),
        ({"topk": 10}, "fit into V = 9, got 10"),
        ({"topk": 0}, "got 0"),
        ({"logits": torch.zeros(2, 40), "topk": 17}, "got 17"),
        ({"joint": torch.zeros(3)}, "joint must be"),
        ({"joint": torch.zeros(2, 2)[:, 0]}, "joint must be"),
        ({"alive": torch.zeros(2)}, "alive must be"),
        ({"token_map": torch.arange(8)}, "token_map must be"),
        ({"num_kept": torch.zeros(2).long()}, "num_kept must be"),
        ({"out": GateOutput.empty(2, 3, "cpu")}, "out.tokens must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    layer = {"logits": torch.zeros(2, 9), "depth": 1, "topk": 2, **change}
    with pytest.raises(ValueError, match=message):
        judge_layer(layer.pop("logits"), program(("joint",)), **layer)


# -- on a GPU -----------------------------------------------------------------------------


def on_gpu(
    rows: int, vocab: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, dict[str, object]]:
    _, layer = random_layer(rows, 1, topk, seed=seed)
    moved = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in layer.items()}
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, device="cuda") * 4
    return logits.to(dtype), moved


@gpu
@pytest.mark.parametrize("topk", [1, 10, 16])
@pytest.mark.parametrize("vocab", [32000, 32003, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_and_twin_agree_on_a_gpu(topk: int, vocab: int, dtype: torch.dtype) -> None:
    kinds = (1, NETWORKS[0]), (64, NETWORKS[2]), (9, NETWORKS[-1])
    for rows, names in (*kinds, *((256, names) for names in THRESHOLDS)):
        logits, layer = on_gpu(rows, vocab, topk, dtype)
        logits[0, :9000] = -torch.inf
        layer["token_map"] = torch.randperm(vocab, device="cuda")
        here = program(names, device="cuda")
        twin = judge_layer_reference(logits, here, **layer)
        assert_same(judge_layer(logits, here, **layer), twin, beta=here.beta.item())


@gpu
@pytest.mark.parametrize("topk", [1, 10])
def test_a_captured_gate_sees_new_logits_weights_and_thresholds(topk: int) -> None:
    logits, layer = on_gpu(32, 32000, topk, torch.bfloat16)
    weights = [random_weights(3, 48, seed) for seed in range(3)]
    here = FusedGate(NETWORKS[0], weights[0], beta=0.4, device="cuda")
    num_kept = torch.zeros(32, dtype=torch.int32, device="cuda")
    out = GateOutput.empty(32, topk, "cuda")
    judge_layer(logits, here, **layer, num_kept=num_kept, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        judge_layer(logits, here, **layer, num_kept=num_kept, out=out)
    for seed, beta in ((1, 0.3), (2, 0.6)):
        logits.copy_(on_gpu(32, 32000, topk, torch.bfloat16, seed)[0])
        here.load(weights[seed])
        here.set_beta(beta)
        num_kept.zero_()
        graph.replay()
        expected = judge_layer_reference(logits, here, **layer)
        assert_same(out, expected, beta)
        assert torch.equal(num_kept, out.keep[:, 0].int())


@gpu
def test_the_kernels_say_the_same_every_time() -> None:
    logits, layer = on_gpu(100, 128256, 10, torch.bfloat16)
    here = FusedGate(NETWORKS[2], random_weights(4, 48), beta=0.4, device="cuda")
    first = judge_layer(logits, here, **layer)
    for _ in range(5):
        for mine, theirs in zip(judge_layer(logits, here, **layer), first, strict=True):
            assert torch.equal(mine, theirs)
