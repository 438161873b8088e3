"""Synthetic recordings: drafts given by hand or drawn at random, in memory or on disk.

Measurements are made up, but they hang together: joint probabilities are products along the
path, and all others tell more or less of the token's own probability.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eval.baselines.mcsd import TOPK_PROBS
from sglang_c2t.classifier.recording import DRAFT_COLUMNS, NODE_COLUMNS, Recording, RecordingWriter
from sglang_c2t.policies.base import TreeShape

ORIGIN = {"algorithm": "EAGLE3", "draft": "d", "target": "t"}
HIDDEN_SIZE = 8


def tree_origin(shape: TreeShape) -> dict[str, Any]:
    """Columns of a recording of trees."""
    return {**ORIGIN, **shape._asdict()}


@dataclass(frozen=True)
class Draft:
    """One verification of one request; ``parents[i]`` is -1 for the root or less than i."""

    parents: Sequence[int]
    accept: Sequence[int]
    prob: Sequence[float]
    request: str = "math/0"
    prompt: int = 0
    position: int = 7


def chain(prob: Sequence[float], accept: Sequence[int], **of_draft: Any) -> Draft:
    """A draft whose every token follows the one before."""
    return Draft(range(-1, len(prob) - 1), accept, prob, **of_draft)


def random_chains(num_requests: int, roots: int, depth: int, seed: int = 0) -> list[Draft]:
    """A chain behind each of the ``roots`` tokens of each request's answer.

    A token survives with its joint probability: it is the whole truth.
    """
    rng = random.Random(seed)
    drafts = []
    for request in range(num_requests):
        for root in range(roots):
            prob = [rng.random() ** 0.25 for _ in range(depth)]  # 0.8 on average
            alive, accept = 1, []
            for p in prob:
                alive &= rng.random() < p
                accept.append(alive)
            of_draft = {"request": f"math/{request}", "prompt": request, "position": 5 + root}
            drafts.append(chain(prob, accept, **of_draft))
    return drafts


def random_trees(
    num_requests: int,
    roots: int,
    *,
    topk: int,
    num_steps: int,
    num_draft_tokens: int | None = None,
    seed: int = 0,
) -> list[Draft]:
    """EAGLE-2's tree behind each of the ``roots`` tokens of each request's answer.

    Of ``num_draft_tokens`` nodes, all candidates by default. Probabilities are sums of
    powers of two, so that ties are frequent and products exact.
    """
    rng = random.Random(seed)
    size = num_draft_tokens or 1 + topk + (num_steps - 1) * topk**2
    drafts = []
    for request in range(num_requests):
        for root in range(roots):
            of_draft = {"request": f"math/{request}", "prompt": request, "position": 5 + root}
            drafts.append(_eagle2_tree(rng, topk, num_steps, size, of_draft))
    return drafts


def _eagle2_tree(
    rng: random.Random, topk: int, num_steps: int, size: int, of_draft: dict[str, Any]
) -> Draft:
    parents, prob, joint = [], [], []
    beams = [-1]  # the root
    for _ in range(num_steps):
        first = len(parents)
        for beam in beams:
            row = sorted((rng.choice((0.0625, 0.25, 0.5, 1.0)) for _ in range(topk)), reverse=True)
            parents += [beam] * topk
            prob += row
            joint += [p * (1.0 if beam < 0 else joint[beam]) for p in row]
        layer = range(first, len(parents))
        beams = sorted(layer, key=lambda node: -joint[node])[:topk]
    # Parents are no less likely than children and come first, so this is a closed set.
    kept = sorted(sorted(range(len(parents)), key=lambda node: -joint[node])[: size - 1])
    place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    on_path = {-1}
    for node in kept:  # the target takes one child of an accepted node, or none
        taken = any(parents[other] == parents[node] for other in on_path - {-1})
        if parents[node] in on_path and not taken and rng.random() < 0.6:
            on_path.add(node)
    accept = [int(node in on_path) for node in kept]
    return Draft([place[parents[n]] for n in kept], accept, [prob[n] for n in kept], **of_draft)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 6) -> Draft:
    """A chain, a bush, or anything between, of 1 to ``max_nodes`` tokens."""
    size = draw(st.integers(1, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    accept: list[int] = []
    for parent in parents:
        accept.append(int(draw(st.booleans()) and (parent < 0 or accept[parent] == 1)))
    return Draft(
        parents,
        accept,
        [draw(st.sampled_from([0.1, 0.5, 0.9])) for _ in parents],
        request=draw(st.sampled_from(["math/0", "math/1", "chat/0"])),
        prompt=draw(st.integers(0, 3)),
        position=draw(st.integers(1, 99)),
    )


def tables(
    drafts: Sequence[Draft], *, extra: Collection[str] = (), seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Arguments of :meth:`RecordingWriter.add`: nodes, drafts, request ids."""
    rows: dict[str, list[float]] = {n: [] for n in ("draft", "parent", "rank", "depth", "joint")}
    eldest: list[int] = []  # of the node and its siblings
    for number, draft in enumerate(drafts):
        depth: list[int] = []
        joint: list[float] = []
        for i, parent in enumerate(draft.parents):
            depth.append(1 if parent < 0 else depth[parent] + 1)
            joint.append(draft.prob[i] * (1.0 if parent < 0 else joint[parent]))
            eldest.append(len(rows["draft"]) - i + list(draft.parents).index(parent))
            rows["draft"].append(number)
            rows["parent"].append(parent)
            rows["rank"].append(list(draft.parents[:i]).count(parent))
        rows["depth"] += depth
        rows["joint"] += joint
    nodes = {name: torch.tensor(values) for name, values in rows.items()}
    nodes["accept"] = torch.tensor([a for draft in drafts for a in draft.accept])
    prob = torch.tensor([p for draft in drafts for p in draft.prob])
    nodes["prob"] = prob

    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(prob), HIDDEN_SIZE, generator=generator)  # [n, H]
    # What is measured of a distribution is the same for all tokens it offers.
    nodes["entropy"] = (noise[:, 0] - prob.log())[eldest]
    nodes["entropy_top1000"] = 0.9 * nodes["entropy"]
    nodes["margin"] = torch.logit(prob, eps=1e-3).clamp(min=0) + noise[:, 1]
    rest = (1 - prob)[:, None] / TOPK_PROBS
    wide = {
        "topk_prob": torch.cat((prob[:, None], rest.repeat(1, TOPK_PROBS - 1)), dim=1),
        "hidden": torch.cat((prob[:, None], noise[:, 1:]), dim=1),
    }
    nodes |= {name: wide[name][eldest] if name in wide else nodes["entropy"] for name in extra}
    of_draft = {
        "prompt": torch.tensor([draft.prompt for draft in drafts]),
        "position": torch.tensor([draft.position for draft in drafts]),
    }
    return nodes, of_draft, [draft.request for draft in drafts]


def recording(
    drafts: Sequence[Draft],
    *,
    roots: str = "visited",
    extra: Collection[str] = (),
    seed: int = 0,
    origin: dict[str, Any] = ORIGIN,
) -> Recording:
    """The drafts in memory, as they would come from the disk."""
    nodes, of_draft, requests = tables(drafts, extra=extra, seed=seed)
    ids = list(dict.fromkeys(requests))
    of_draft["request"] = torch.tensor([ids.index(rid) for rid in requests])
    wide = {name: torch.float32 if nodes[name].dim() == 1 else torch.float16 for name in extra}
    types = NODE_COLUMNS | wide
    return Recording(
        nodes={name: nodes[name].to(dtype) for name, dtype in types.items()},
        drafts={name: of_draft[name].to(dtype) for name, dtype in DRAFT_COLUMNS.items()}
        | {"origin": torch.zeros(len(drafts), dtype=torch.int32)},
        requests=ids,
        origins=[origin],
        roots=roots,
    )


def write(
    directory: Path,
    drafts: Sequence[Draft],
    *,
    origin: dict[str, Any] = ORIGIN,
    extra: Collection[str] = (),
    **options: Any,
) -> RecordingWriter:
    """Write the drafts, two at a time; ``options`` are the writer's."""
    writer = RecordingWriter(directory, origin=origin, **options)
    for start in range(0, len(drafts), 2):
        writer.add(*tables(drafts[start : start + 2], extra=extra, seed=start))
    writer.flush()
    return writer
