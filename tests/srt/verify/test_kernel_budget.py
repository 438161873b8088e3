"""Budget of launches of a decode step on a GPU, without waits for it or copies to it.

Numbers are upper bounds: fewer launches are welcome, more need a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft.chain import ChainGate
from sglang_c2t.draft.tree import TreeGate
from sglang_c2t.kernels import layout
from sglang_c2t.kernels.rows import chain_links
from sglang_c2t.plan.step import StepKind, StepPlan
from sglang_c2t.policies import POLICIES, build_policy, build_tree_policy
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.srt.draft.planning import Step
from sglang_c2t.srt.draft.selection import TreeSelector
from sglang_c2t.srt.verify import accept, ragged, sampling, tree
from sglang_c2t.srt.verify.packing import Packing
from sglang_c2t.srt.verify.timing import Mark
from sglang_c2t.tree import LinkedTrees, Trees
from tests.fake_cuda import HostRead, Launches, fake_cuda

B, D, V, N = 8, 5, 512, 6


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_cuda(monkeypatch):
        yield


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def integers(*shape: int) -> Tensor:
    return on_device(*shape, dtype=torch.int64)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x.copy_(torch.zeros(4)),
    ],
)
def test_launches_find_host_reads_and_copies(step: Any) -> None:
    x = on_device(4)
    with Launches() as launches:
        (x.view(2, 2).T[1:] + 1.0).relu_()  # views are free
    assert launches.names == ["aten.add.Tensor", "aten.relu_.default"]
    with pytest.raises(HostRead), Launches():
        step(x)


# -- chains -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_launches_of_a_chain_step_stay_within_budget(name: str) -> None:
    """From the relayed first tokens to those of the next step: five layers, ten kernels."""
    with unset_fake_temporarily():
        policy = build_policy(C2TConfig(policy=name))
    assert len(chain_step(policy)) <= 16


def test_launches_of_a_classifier_in_torch_copy_no_weights() -> None:
    """Weights that are copied while a CUDA graph is captured end the server."""
    with unset_fake_temporarily():
        policy = build_policy(C2TConfig(policy="c2t"))
        assert isinstance(policy, C2T)
        net = ConfidenceNet(hidden_sizes=[48, 48]).requires_grad_(False)
        deeper = replace(policy, classifier=replace(policy.classifier, net=net))
    assert "judge" not in chain_step(deeper)  # in torch, or nothing would be shown


def chain_step(policy: Any) -> list[str]:
    """List the launches."""
    gate = ChainGate(policy, num_slots=64, device="cuda")
    slots, logits, hidden = integers(B), on_device(B, V), on_device(B, 32)
    gate.relay_first_token(slots, logits, hidden)
    with Launches() as launches:
        gate.begin(slots)
        for _ in range(D - 1):
            gate.observe(logits, hidden)
        _ = gate.verify_lens
        gate.relay_first_token(slots, logits, hidden)
    return launches.names


# -- trees --------------------------------------------------------------------------------

SHAPE = TreeShape(topk=4, num_steps=D, num_draft_tokens=28)


@pytest.mark.parametrize(
    ("name", "budget"),
    [*((name, 17) for name in ("c2t", "c2t-eagle2", "dyjoint", "eagle2")), ("auto", 19)],
)
def test_launches_of_a_tree_step_stay_within_budget(name: str, budget: int) -> None:
    """Up to what the target verifies; how many rows a plan has was known before."""
    with unset_fake_temporarily():
        policy: Any = build_tree_policy(C2TConfig(policy=name))
        planner = policy.planner(SHAPE) if name == "auto" else None
    if planner is None:
        assert len(tree_step(policy)) <= budget
        return
    selector = TreeSelector(planner, width=SHAPE.num_draft_tokens, device="cuda")
    plan = StepPlan(StepKind.PLANNED, D, SHAPE.topk, 2 * B)
    step = Step(plan, B, 0, Mark(on_cuda=False))
    launched = tree_step(policy, lambda trees, keys: selector.select(step, trees, keys)[0])
    assert len(launched) <= budget


def tree_step(
    policy: Any, choose: Callable[[Trees, Tensor], Tensor | None] = lambda *_: None
) -> list[str]:
    """List the launches."""
    gate = TreeGate(policy, SHAPE, num_slots=64, device="cuda")
    slots, logits, topk = integers(B), on_device(B, V), SHAPE.topk
    gate.relay_first_token(slots, logits)
    with Launches() as launches:
        gate.begin(slots)
        gate.add(integers(B, 1, topk), on_device(B, 1, topk))
        for _ in range(D - 1):
            gate.observe(on_device(B * topk, V))
            gate.add(integers(B, topk, topk), on_device(B, topk, topk))
        trees, keys = gate.finish()
        gate.finalize(trees, keys, integers(B), choose(trees, keys))
    return launches.names


# -- verification -------------------------------------------------------------------------


def batch(**fields: Any) -> Any:
    """The fields of a batch that packing reads."""
    return SimpleNamespace(
        **fields,
        req_to_token_pool=SimpleNamespace(req_to_token=on_device(64, 200, dtype=torch.int32)),
        req_pool_indices=integers(B),
        seq_lens=integers(B),
    )


def packing_of_two_thirds(width: int, **trees: Any) -> Any:
    """Its sizes have arrived: R and T of two thirds of the rows."""
    sizes = on_device(B, dtype=torch.int64 if trees else torch.int32)
    packing = Packing(sizes, width, sizes=SimpleNamespace(), **trees)
    packing.total = 2 * B * width // 3
    return packing


#: A target that has captured no CUDA graphs.
EAGER = SimpleNamespace(decode_cuda_graph_runner=None)


def test_launches_of_packing_chains_are_two_kernels() -> None:
    """Also for a graph, whose slots attention would pad and sum up by itself."""
    verify_input = SimpleNamespace(
        draft_token=integers(B * N), positions=integers(B * N), ragged_verify_layout=None,
        max_tree_depth=N,
    )  # fmt: skip
    lens, here = integers(B), batch()
    packing = packing_of_two_thirds(N)
    with Launches() as launches:
        chain_links(lens, N)
        packed, _ = packing.forwarded(verify_input, here, EAGER)
        layout = packed.ragged_verify_layout.padded_to_bucket(padded_bs=B)
        ragged._geometry(forbidden, seq_lens=here.seq_lens, layout=layout)
        _ = packing.rows
    assert launches.names == ["_chain_links_kernel", "_lay_out_kernel"]


def forbidden(**_: Any) -> Any:
    raise AssertionError("SGLang's own")


def test_launches_of_packing_trees_stay_within_budget() -> None:
    tokens, parents, depth, source, child, sibling = (integers(B, N) for _ in range(6))
    trees = LinkedTrees(tokens, parents, depth, integers(B), source, child, sibling)
    here = batch()
    packing = packing_of_two_thirds(N, parents=trees.parents, num_steps=D)
    with Launches() as launches:
        verify_input = tree.build_verify_input(trees, here, num_steps=D, topk=4, packing=packing)
        packing.forwarded(verify_input, here, EAGER)
        _ = packing.words
    assert len(launches.names) <= 4


def sampling_info(**fields: Any) -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    return SamplingBatchInfo(
        temperatures=on_device(B, 1), top_ps=on_device(B), min_ps=on_device(B),
        top_ks=on_device(B, dtype=torch.int32), sampling_seed=integers(B), is_all_greedy=False,
        is_any_greedy=False, need_top_p_sampling=True, need_top_k_sampling=True,
        need_min_p_sampling=True, vocab_size=V, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(("greedy", "budget"), [(True, 8), (False, 15)])
def test_launches_of_acceptance_stay_within_budget(
    greedy: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias included; SGLang's sampler is not."""
    packing = packing_of_two_thirds(N)
    rows = packing.total
    packing.layout = layout.Layout(
        *[integers(rows + 3)] * 5, integers(B, N), *[on_device(B + 1, dtype=torch.int32)] * 4
    )
    info = sampling_info(logit_bias=on_device(B, V))
    info.is_all_greedy = greedy
    monkeypatch.setattr(sampling, "_sampler", lambda: lambda *_: integers(rows))
    monkeypatch.setattr(accept, "sanitize_nan_logits", lambda *_: None)
    verify_input = SimpleNamespace(
        positions=integers(B * N), draft_token=integers(B * N), max_tree_depth=N,
        accepts_drafts=True, num_rows=packing.num_rows,
    )  # fmt: skip
    output = SimpleNamespace(next_token_logits=on_device(rows + 3, V))
    with Launches() as launches:
        accept.match_rows(verify_input, packing, batch(sampling_info=info), output)
    assert len(launches.names) <= budget
