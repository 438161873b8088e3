"""The gate of a drafted layer: kernels, twin and float64 lists agree, and so do our policies.

The kernels run in Triton's interpreter and compile for Hopper without a GPU (`gate_worker`);
on a GPU they are compared with the twin and replayed in CUDA graphs.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.classifier.features import MIN_PROB
from sglang_c2t.draft.growth import node_margins
from sglang_c2t.draft_layer import MAX_MARGIN, DraftLayer, measure
from sglang_c2t.kernels import gate, gate_device
from sglang_c2t.kernels.gate import judge_layer, judge_layer_reference
from sglang_c2t.kernels.gate_program import FusedGate, GateOutput, Weights
from tests.gpu import gpu
from tests.kernels import gate_worker
from tests.kernels.gate_worker import (
    NETWORKS,
    THRESHOLDS,
    assert_same,
    program,
    random_layer,
)
from tests.kernels.hopper import compiled, require_no_spills
from tests.kernels.processes import run_worker

FLOAT = torch.float32
SHIPPED = ("c2t", "c2t-log", "c2t-plus", "c2t-tree", "c2t-log-tree", "c2t-plus-tree")


@functools.cache
def failures() -> dict[str, str]:
    """All cases of `gate_worker` in one fresh process."""
    return json.loads(run_worker("gate_worker").splitlines()[-1])


@pytest.mark.parametrize("case", [case.__name__ for case in gate_worker.INTERPRETED])
def test_the_interpreted_kernels_say_what_lists_of_float64_say(case: str) -> None:
    traceback = failures()[case]
    assert not traceback, traceback


@pytest.mark.parametrize("dtype", gate_worker.DTYPES)
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
@given(**gate_worker.LAYERS)
def test_the_twin_says_what_lists_of_float64_say(**layer: object) -> None:
    gate_worker.verify_any(**layer)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("topk", [1, 8])
def test_the_gate_is_as_sure_as_the_shipped_classifier(name: str, topk: int) -> None:
    """From the same logits, through `measure`, `node_margins` and the classifier itself."""
    classifier = load_classifier(name)
    assert classifier.isotonic is None, "the gate knows no isotonic calibration"
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


def test_the_example_of_the_docstring() -> None:
    judged = judge_layer(
        torch.tensor([[0.6, 0.4]]).log(),
        program(("joint",), beta=0.25),
        depth=2,
        topk=2,
        joint=torch.tensor([0.5]),
    )
    assert judged.tokens.tolist() == [[0, 1]]
    assert judged.joint[0].tolist() == pytest.approx([0.3, 0.2])
    assert judged.keep.tolist() == [[True, False]]


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
        program(NETWORKS[0]).load(gate_worker.random_weights(4, 48))
    with pytest.raises(ValueError, match="shapes"):
        program(("joint",)).load(gate_worker.random_weights(1, 16))
    with pytest.raises(ValueError, match="entropy_top5"):
        FusedGate(("entropy_top5",), gate_worker.random_weights(1, 16), beta=0.5, device="cpu")


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
    weights = [gate_worker.random_weights(3, 48, seed) for seed in range(3)]
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
    here = FusedGate(NETWORKS[2], gate_worker.random_weights(4, 48), beta=0.4, device="cuda")
    first = judge_layer(logits, here, **layer)
    for _ in range(5):
        for mine, theirs in zip(judge_layer(logits, here, **layer), first, strict=True):
            assert torch.equal(mine, theirs)
