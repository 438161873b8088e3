"""Choosing, cutting and linking trees and chains: kernels, twins and loops agree.

The kernels run in Triton's interpreter, where a process of its own calls `main`, and where there
is one on a GPU. All compile for an H100.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_c2t.draft.growth import TreeGrowth
from sglang_c2t.kernels import beams, budget, outcome, survival, trees
from sglang_c2t.kernels.beams import choose_beams
from sglang_c2t.kernels.budget import chains_within, nodes_within
from sglang_c2t.kernels.outcome import (
    outcome_of_chains,
    outcome_of_chains_torch,
    outcome_of_trees,
    outcome_of_trees_torch,
)
from sglang_c2t.kernels.rows import block_of
from sglang_c2t.kernels.survival import (
    survival_of_chains,
    survival_of_chains_torch,
    survival_of_nodes,
    survival_of_nodes_torch,
)
from sglang_c2t.kernels.trees import cut_and_link, finish_trees, finish_trees_torch
from sglang_c2t.plan.survival import LIMIT
from sglang_c2t.policies.base import TreePolicy, TreeShape
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fused import growth_rule
from sglang_c2t.policies.gated_tree import GatedEAGLE2, GatedTree, PlannedTree
from sglang_c2t.tree import Trees
from tests.gpu import at_size, gpu
from tests.kernels.hopper import compiled, require_no_spills
from tests.kernels.processes import run_worker
from tests.kernels.test_masks import random_forest

DEPTH = 70  # of the deepest node that a forest may have


def drafted(rng: random.Random, width: int, size: int, device: str = "cpu") -> Trees:
    """Random trees as a draft's end gives them: parents, depths and sources in one table."""
    parents = random_forest(rng, width, size=size).parents
    depths = []
    for of_tree in parents:
        depth: list[int] = []
        for node, parent in enumerate(of_tree):
            depth.append(depth[parent] + 1 if node and parent >= 0 else 0)
        depths.append(depth)
    source = [
        [100 * b + node if parent >= 0 else -1 for node, parent in enumerate(of_tree)]
        for b, of_tree in enumerate(parents)
    ]
    tokens = [[rng.randrange(1, 9) if s >= 0 else 0 for s in of_tree] for of_tree in source]
    links = torch.tensor([parents, depths, source], device=device).permute(1, 2, 0).contiguous()
    above, deep, came_from = links.unbind(dim=2)
    nodes = (above >= 0).sum(dim=1) + 1
    return Trees(torch.tensor(tokens, device=device), above, deep, nodes, came_from)


def falling(rng: random.Random, trees: Trees, steps: int) -> Tensor:
    """[B, N] float32 in [0, 1] that fall along each path, many of them equal."""
    values = []
    for of_tree in trees.parents.tolist():
        mine: list[float] = []
        for parent in of_tree:
            drawn = rng.randrange(steps + 1) / steps
            mine.append(drawn if parent < 0 else min(mine[parent], drawn))
        values.append(mine)
    return torch.tensor(values, device=trees.tokens.device)


def check_choice(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """Every budget, with and without whole trees, by picking the best node so many times."""
    trees = drafted(rng, width, size, device)
    survival = falling(rng, trees, rng.choice([2, 10, 1000]))
    live = [(b, n) for b, row in enumerate(trees.depth.tolist()) for n, d in enumerate(row) if d]
    whole = [rng.random() < 0.3 for _ in range(size)]
    for drafts in {0, 1, len(live), len(live) + 2, rng.randint(0, len(live))}:
        for mask in (None, whole):
            ranked = [(b, n) for b, n in live if mask is None or not mask[b]]
            ranked.sort(key=lambda at: (-survival[at].item(), at[1], at[0]))
            kept = {*ranked[:drafts], *(set(live) - set(ranked))}
            given = None if mask is None else torch.tensor(mask, device=device)
            found = nodes_within(survival, trees.depth, drafts, given)
            assert found.dtype == torch.bool
            assert {(b, n + 1) for b, n in found.nonzero().tolist()} == kept


def check_cut(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """Trees and links by loops, of a random closed set and of all."""
    trees = drafted(rng, width, size, device)
    roots = [rng.randrange(10, 99) for _ in range(size)]
    survival = falling(rng, trees, 5)
    budget = rng.randint(0, size * width)
    for chosen in (None, nodes_within(survival, trees.depth, budget)):
        found = cut_and_link(trees, torch.tensor(roots, dtype=torch.int32, device=device), chosen)
        for b, parents in enumerate(trees.parents.tolist()):
            stay = [0] + [
                n
                for n, parent in enumerate(parents)
                if parent >= 0 and (chosen is None or bool(chosen[b, n - 1]))
            ]
            up = [-1] + [stay.index(parents[n]) for n in stay[1:]]
            wanted = {
                "tokens": [roots[b], *(int(trees.tokens[b, n]) for n in stay[1:])],
                "parents": up,
                "depth": [int(trees.depth[b, n]) for n in stay],
                "source": [int(trees.source[b, n]) for n in stay],
                "first_child": [
                    next((c for c, p in enumerate(up) if p == n), -1) for n in range(len(stay))
                ],
                "next_sibling": [
                    next((c for c in range(n + 1, len(stay)) if up[c] == up[n] >= 0), -1)
                    for n in range(len(stay))
                ],
            }
            assert int(found.num_nodes[b]) == len(stay)
            for name, values in wanted.items():
                pad = [0 if name in ("tokens", "depth") else -1] * (width - len(stay))
                table = getattr(found, name)
                assert table.is_contiguous() or name in ("parents", "depth", "source")
                assert table[b].tolist() == values + pad, name


def check_survival(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """The kernels say what their twins say, certain and hopeless drafts among them."""
    torch.manual_seed(rng.randrange(2**20))
    values = torch.rand(DEPTH, 12, device=device)
    trees = drafted(rng, width, size, device)
    least = falling(rng, trees, 7)
    least[:, 0] = torch.inf  # as roots have it
    least = least.masked_fill((trees.depth == 0) & (least < 2), -torch.inf)
    of_nodes = survival_of_nodes(values, least, trees.depth, trees.parents, LIMIT)
    twins = survival_of_nodes_torch(values, least, trees.depth, trees.parents, LIMIT)
    torch.testing.assert_close(of_nodes, twins, rtol=1e-5, atol=1e-6)
    above = of_nodes.gather(1, trees.parents.clamp(min=0))
    assert (of_nodes <= above)[trees.depth > 0].all(), "exactly, or the best would be no trees"
    layers = rng.randint(1, 9)
    chains = torch.rand(layers, size, device=device)  # layers may be rows, too
    chains = rng.choice([chains.T, chains.T.contiguous()])
    chains[0, 0] = rng.choice([0.0, 1.0, -1.0, 2.0, torch.nan, torch.inf, -torch.inf])
    told = []
    for survivals in (survival_of_chains, survival_of_chains_torch):
        tables = torch.full((2, size + 1, 11), -7.0, device=device)
        out, kept = tables[:, :size, :layers].unbind()
        survivals(values, chains, LIMIT, out=out, kept=kept)
        assert kept.nan_to_num(-7.0).equal(chains.nan_to_num(-7.0))
        assert (out.diff(dim=1) <= 0).all()
        told.append(out.clone())
        tables[:, :size, :layers] = -7.0
        assert (tables == -7.0).all(), "no more than that is written"
    torch.testing.assert_close(*told, rtol=1e-5, atol=1e-6)


def check_outcome(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """Numbers copied to the host, one by one; packed rows identify nodes."""
    layers = rng.randint(1, 5)
    confidences = torch.rand(size, layers + 2, device=device)[:, :layers]
    rows, accepted = (torch.randint(1, 9, (size,), dtype=torch.int32) for _ in range(2))
    for told in (outcome_of_chains, outcome_of_chains_torch):
        found = told(confidences, rows.to(device), accepted.to(device))
        for b, sure in enumerate(confidences.tolist()):
            assert found[b].tolist() == [*sure, rows[b] - 1, accepted[b] - 1]
    links = torch.randint(0, 6, (size, width, 3), device=device)
    depth = rng.choice([links[:, :, 1], links[:, :, 1].contiguous()])
    keys, chosen = torch.rand(size, width, device=device), torch.rand(size, width - 1) < 0.6
    starts, paths = [0], []
    for b in range(size):
        here = [*range(starts[b], starts[b] + 1 + int(chosen[b].sum()))]
        starts.append(here[-1] + 1)
        path = [here[0], *sorted(rng.sample(here[1:], min(len(here) - 1, 3)))]
        paths.append(path + [-1] * (5 - len(path)))
    index, begins = (torch.tensor(n, dtype=torch.int32, device=device) for n in (paths, starts))
    for told in (outcome_of_trees, outcome_of_trees_torch):
        found = told(depth, keys, chosen.to(device), index, begins)
        for b in range(size):
            row = starts[b]
            for node in range(1, width):
                verified = bool(chosen[b, node - 1])
                row += verified
                of_node = depth[b, node], keys[b, node], verified, verified and row in paths[b]
                assert found[b, node - 1].tolist() == [float(x) for x in of_node]


def check_beams(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """The best children of each request, of equals the first; nan is no better than -inf."""
    topk, rows, depth = rng.randint(1, 5), rng.randint(1, 4), rng.randint(0, 3)
    children = topk * rows
    width = min(width, children)
    strange = [-torch.inf, torch.nan, 0.0, -0.0, -2.5]
    values = [
        [rng.choice([*strange, rng.random(), 0.5]) for _ in range(children)] for _ in range(size)
    ]
    tokens = torch.randint(1, 99, (size, children))
    joint = torch.rand(size, children)
    above = torch.randint(0, 9, (size, rows, depth))
    found = choose_beams(
        *(table.to(device) for table in (torch.tensor(values), tokens, joint, above)),
        width=width, topk=topk, first=100,
    )  # fmt: skip
    for b, row in enumerate(torch.tensor(values).tolist()):
        key = [v if v > -torch.inf else -torch.inf for v in row]
        best = sorted(range(children), key=lambda i: (-key[i], i))[:width]
        assert found.tokens[b].tolist() == tokens[b, best].tolist()
        assert found.joint[b].tolist() == joint[b, best].tolist()
        assert found.candidate[b].tolist() == [100 + i for i in best]
        assert found.parent_row[b].tolist() == [i // topk for i in best]
        assert found.alive[b].tolist() == [key[i] > -torch.inf for i in best]
        assert found.ancestor_rows[b].tolist() == [
            [*above[b, i // topk].tolist(), place] for place, i in enumerate(best)
        ]


def check_finish(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """The kernel says what its twin says; deep trees, many equal keys, dead nodes and nan."""
    candidates, depth = rng.randint(1, 2 * width), [1] * (2 * width)
    parents = []
    for _ in range(size):
        of_tree = []
        for c in range(candidates):
            parent = rng.randint(max(-1, c - 4), c - 1) if c else -1
            of_tree.append(parent)
            depth[c] = max(depth[c], 1 + (depth[parent] if parent >= 0 else 0))
        parents.append(of_tree)
    drawn = [-torch.inf, torch.nan, -1.5, 0.0, 0.25, 0.5]
    keys = [[rng.choice([*drawn, rng.random()]) for _ in range(candidates)] for _ in range(size)]
    tables = torch.randint(1, 99, (size, candidates)), torch.tensor(parents), torch.tensor(keys)
    for verify in (None, torch.rand(size, candidates) < 0.8):
        given = [None if table is None else table.to(device) for table in (*tables, verify)]
        sizes = {"max_nodes": width, "max_depth": max(depth)}
        trees, ranks = finish_trees(*given, **sizes)
        twins, same_ranks = finish_trees_torch(*given, **sizes)
        for name in ("tokens", "parents", "depth", "num_nodes", "source"):
            assert getattr(trees, name).equal(getattr(twins, name)), name
        assert ranks.equal(same_ranks)


def check_growth(rng: random.Random, width: int, size: int, device: str = "cpu") -> None:
    """The kernel grows the trees that the policy grows in torch: alive beams and all nodes."""
    torch.manual_seed(rng.randrange(2**20))
    topk, steps = rng.randint(1, 4), rng.randint(1, 4)
    gate, drafted = DyJoint(0.5), rng.choice([steps, min(2, steps), 1])
    policy: TreePolicy = rng.choice(
        [GatedTree(gate), GatedTree(gate, layer_limit=2), GatedEAGLE2(gate), PlannedTree(gate),
         EAGLE2()]
    )  # fmt: skip
    rule = growth_rule(policy)
    assert rule is not None
    whole = rng.choice([None, torch.rand(size, device=device) < 0.5])
    how = {"whole": whole}
    beta = torch.tensor([0.5], device=device)
    shape = TreeShape(topk, steps, width)
    asked = TreeGrowth(policy, shape, size, device, **how)
    fused = TreeGrowth(policy, shape, size, device, **how, fused=(rule, beta))
    for depth in range(drafted):
        alive = asked.beams.alive
        grid = size, alive.shape[1], topk
        tokens = torch.randint(1, 99, grid, device=device)
        # Multiples of 1/8: their products are exact, and many are equal.
        prob, sure = (torch.randint(1, 9, grid, device=device) / 8 for _ in range(2))
        sure[torch.rand(grid, device=device) < 0.05] = torch.nan
        keep = (sure >= 0.5) & alive[:, :, None]
        measured = {
            "entropy": torch.ones(alive.numel(), device=device),
            "confidence": sure.flatten(), "keep": keep.flatten(),
        }  # fmt: skip
        wanted = asked.add(tokens, prob, measured)
        # Of the first layer it waits in a table, request by request.
        strided = sure.flatten(1).T.contiguous().T if depth == 0 else sure.flatten(1)
        found = fused.add_judged(tokens, prob, strided)
        if depth + 1 == drafted:
            break
        assert found.alive.equal(wanted.alive)
        for name in ("tokens", "parent_row", "row_of_batch", "candidate", "joint"):
            mine, theirs = getattr(found, name), getattr(wanted, name)
            assert mine[found.alive].equal(theirs[found.alive]), name
        assert found.ancestor_rows[found.alive].equal(wanted.ancestor_rows[found.alive])
    (trees, ranks), (same, same_ranks) = fused.finish(), asked.finish()
    for name in ("tokens", "parents", "depth", "num_nodes", "source"):
        assert getattr(trees, name).equal(getattr(same, name)), (name, rule)
    assert ranks.equal(same_ranks)


def slowly(survival: list[list[float]], drafts: int, whole: list[bool]) -> list[int]:
    """Oracle: pick the best draft so many times, of equals the shallower, then the first."""
    left = [
        (-value, depth, request)
        for request, chain in enumerate(survival)
        for depth, value in enumerate(chain)
        if not whole[request]
    ]
    kept = sorted(left)[:drafts]
    return [
        1 + (len(chain) if whole[request] else sum(1 for *_, r in kept if r == request))
        for request, chain in enumerate(survival)
    ]


def check_chains(rng: random.Random, layers: int, batch: int, device: str = "cpu") -> None:
    """A random batch with many equal survivals, every budget, with and without whole drafts."""
    steps = rng.choice([2, 10, 1000])
    survival = []
    for _ in range(batch):
        chain = sorted((rng.randrange(steps + 1) / steps for _ in range(layers)), reverse=True)
        survival.append(torch.tensor(chain).tolist())  # as float32 has them
    whole = [rng.random() < 0.2 for _ in range(batch)]
    values = torch.tensor(survival, device=device)
    for drafts in {0, 1, batch, batch * layers, batch * layers + 3, rng.randrange(batch * layers)}:
        for chosen in (None, whole):
            mask = None if chosen is None else torch.tensor(chosen, device=device)
            width = layers + rng.randint(1, 3)
            found, links = chains_within(values, drafts, width, mask)
            # As a table of more layers holds them.
            table = torch.nn.functional.pad(values, (0, 3), value=1.0)
            again = chains_within(table, drafts, width, mask, layers=layers)
            assert again[0].equal(found)
            assert again[1].equal(links)
            assert (found.dtype, links.dtype) == (torch.int32, torch.int64)
            rows = slowly(survival, drafts, chosen or [False] * batch)
            assert found.tolist() == rows, (survival, drafts, chosen)
            ends = [[*range(1, n), *[-1] * (width + 1 - n)] for n in rows]
            assert links.tolist() == ends


CHECKS = (
    check_choice, check_cut, check_survival, check_outcome, check_beams, check_finish, check_chains
)  # fmt: skip
#: What has a kernel only.
KERNELS = (check_growth,)


def main() -> None:
    """Trees of sizes around the kernels' blocks."""
    rng = random.Random(0)
    for width, size in ((1, 3), (2, 1), (9, 3), (5, 33), (33, 2), (65, 2)):
        for check in (*CHECKS, *KERNELS * 6):
            check(rng, width, size)
    for batch, layers in ((1, 8), (31, 2), (32, 5), (70, 8)):
        check_chains(rng, layers, batch)


INT, FLOAT, BOOL = torch.int64, torch.float32, torch.bool


def test_the_interpreted_kernels_do_what_loops_and_twins_do() -> None:
    run_worker("test_trees")


@pytest.mark.parametrize("check", CHECKS)
@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(1, 4))
def test_the_twins_do_what_loops_do(
    check: Callable[..., None], seed: int, width: int, size: int
) -> None:
    check(random.Random(seed), width, size)


I32 = torch.int32
SURVIVAL = {"BINS": 12, "LIMIT": LIMIT, "EPS": survival.EPS}
#: Kernels, what they are launched with, and their constants: small and large, and each branch.
COMPILED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((trees._cut_kernel, (*[INT] * 5, BOOL, INT, I32, n, 5 * n, 3 * n, 3),
       {"ALL": every, "BLOCK_N": n}) for n in (8, 64) for every in (False, True)),
    *((beams._beams_kernel, (FLOAT, INT, FLOAT, INT, INT, BOOL, FLOAT, INT, n, 48, 8, 8, 72, 8, 3),
       {"BLOCK": n, "BLOCK_D": d}) for n, d in ((64, 8), (4, 1))),
    *((beams._grow_kernel,
       (INT, FLOAT, FLOAT, 64, 5, FLOAT, BOOL, INT, BOOL, FLOAT, INT, INT, INT, FLOAT, BOOL, 264,
        INT, BOOL, FLOAT, INT, n, 48, 8, 8, 72, 8, 3, 2, 5),
       {"KIND": kind, "ROOT": d == 1, "ANY_WHOLE": d > 1, "BLOCK": n, "BLOCK_D": d})
      for kind in ("gated", "planned", "joint", "filtered") for n, d in ((64, 8), (8, 1))),
    *((trees._finish_kernel, (INT, INT, FLOAT, BOOL, I32, INT, INT, FLOAT, n, 60, 480),
       {"DEPTH": 6, "ALL": every, "BLOCK_M": block_of(n), "BLOCK_N": 64})
      for n in (64, 264) for every in (False, True)),
    *((budget._nodes_within_kernel, (FLOAT, INT, BOOL, BOOL, 5, 5, 5, 24, 3),
       {"ANY_WHOLE": whole, "BLOCK_B": 64, "BLOCK_N": 16}) for whole in (False, True)),
    *((budget._chains_within_kernel, (FLOAT, n, BOOL, I32, INT, n, n, n, n),
       {"ANY_WHOLE": whole, "BLOCK_B": 256, "BLOCK_D": 8, "BLOCK_N": 8})
      for whole in (False, True) for n in (1, 5)),
    (survival._chains_kernel, (*[FLOAT] * 4, *[5] * 5), {**SURVIVAL, "BLOCK_B": survival.CHAINS}),
    (survival._nodes_kernel, (FLOAT, FLOAT, INT, INT, FLOAT, 9, 27, 3),
     {**SURVIVAL, "DEPTH": 5, "BLOCK_N": 16}),
    (outcome._chains_kernel, (FLOAT, I32, I32, FLOAT, 5, 5, 5), {"BLOCK_B": 32}),
    (outcome._trees_kernel, (INT, FLOAT, BOOL, I32, I32, FLOAT, 9, 4, 27, 3), {"BLOCK_N": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "arguments", "constants"), COMPILED)
def test_kernels_of_trees_and_chains_compile_for_an_h100_without_spills(
    kernel: Any, arguments: Any, constants: dict[str, Any]
) -> None:
    require_no_spills(compiled(kernel, *arguments, **constants))


@gpu
@at_size
@pytest.mark.parametrize("check", [*CHECKS, *KERNELS])
def test_the_kernels_do_what_loops_and_twins_do_on_a_gpu(check: Callable[..., None]) -> None:
    rng = random.Random(1)
    for width in (1, 8, 33, 65, 128):
        for size in (1, 3, 70, 256):
            check(rng, width, size, "cuda")
