"""What more inputs, a larger network or a price of tokens would bring a classifier of tree nodes.

Each row of the table is a network trained on the same nodes, with its confidences looked up in
replay. The last rows are a bound: as near to a perfectly calibrated ranker as these recordings let
anybody come.

Legend: n recorded nodes, R roots, F inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from eval.tables.markdown import change_at, section
from sglang_c2t.classifier.features import MIN_PROB
from sglang_c2t.classifier.model import ConfidenceNet, num_parameters
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.offline.compare import Array, Curve
from sglang_c2t.offline.tree_replay import Forest, replay_trees
from sglang_c2t.policies.gated_tree import GatedTree

PLUS = ("log_joint", "margin", "entropy", "depth")
RANKS = ("rank", "parent_rank")
SIBLINGS = ("log_prob", "rank", "better_siblings")
PARENT = ("parent_margin", "parent_entropy")
ROOT = ("root_joint", "root_margin", "root_entropy")
LAYER = ("layer_rank", "better_in_layer")
REQUEST = ("hits", "last_hit")
ALL = tuple(dict.fromkeys((*PLUS, *RANKS, *SIBLINGS, *PARENT, *ROOT, *LAYER, *REQUEST)))

SMALL, WIDE = (48,), (64, 64)
EPOCHS = 10
BATCH = 4096
LEARNING_RATE = 4e-3

#: Thresholds, even in their logarithm.
GRID = tuple(float(x) for x in np.geomspace(0.0015, 0.12, 12))

#: How many first drafts, half of them right, a request is taken to have had before its first.
PRIOR = 6.0
#: Of the share of first drafts that were wrong: the power a node's price goes with.
POWER = 0.7


@dataclass(frozen=True)
class Known:
    """A gate whose confidences are with the nodes already."""

    beta: float
    name: ClassVar[str] = "known"
    needs: ClassVar[frozenset[str]] = frozenset({"confidence"})


@dataclass(frozen=True)
class Trial:
    """A row of the table."""

    name: str
    inputs: Sequence[str]
    hidden_sizes: Sequence[int] = SMALL
    on_test: bool = False
    """Learns from half of the test prompts too, and judges the other half."""


TRIALS = (
    Trial("C2T-plus", PLUS),
    Trial("with ranks: what is shipped reads these", (*PLUS, *RANKS)),
    Trial("with siblings", (*PLUS, *SIBLINGS)),
    Trial("with the parent", (*PLUS, *PARENT)),
    Trial("with the root's first draft", (*PLUS, *ROOT)),
    Trial("with the layer", (*PLUS, *LAYER)),
    Trial("with the request's hits", (*PLUS, *REQUEST)),
    Trial("all", ALL),
    Trial("all, wide", ALL, WIDE),
    Trial("all, wide, half of the test prompts learnt", ALL, WIDE, on_test=True),
)


def inputs_table(
    forest: Forest,
    test: Recording,
    train: Recording,
    *,
    algorithm: str,
    targets: dict[int, Callable[[Array], Array]],
    weights: tuple[Array, Array],
    console: Console,
) -> list[str]:
    """Nodes at EAGLE-2's accept lengths by what a network reads.

    Args:
        forest: Of ``test``.
        test: The trees to measure on.
        train: The trees to learn from.
        algorithm: Of the draft.
        targets: By number of nodes, gives the accept length of EAGLE-2 for weights.
        weights: All requests once, and resamples, see :mod:`sglang_c2t.offline.compare`.
        console: Told of each row.
    """
    here, there = inputs_of(test), inputs_of(train)
    labels, learnt = test.nodes["accept"].float(), train.nodes["accept"].float()
    price = price_of(here["hits"])
    halves = test.drafts["request"].long()[test.nodes["draft"].long()] % 2
    plain: list[tuple[str, list[str]]] = []
    priced: list[tuple[str, list[str]]] = []
    for trial in TRIALS:
        x, y = (torch.stack([of[name] for name in trial.inputs], dim=1) for of in (here, there))
        if trial.on_test:
            logits = torch.empty_like(labels)
            for half in (halves == 0, halves == 1):
                net = fitted(torch.cat((y, x[~half])), torch.cat((learnt, labels[~half])), trial)
                logits[half] = said(net, x[half])
        else:
            net = fitted(y, learnt, trial)
            logits = said(net, x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
        beside = [f"{num_parameters(net)}", f"{1e3 * loss:.2f}"]
        for table, confidence in ((plain, logits.sigmoid()), (priced, logits.sigmoid() * price)):
            scored = replace(forest, nodes=forest.nodes | {"confidence": confidence})
            curve = Curve.of([replay_trees(GatedTree(Known(b)), scored) for b in GRID])  # type: ignore[arg-type]
            cells = [change_at(curve, size, tau, weights) for size, tau in targets.items()]
            table.append((trial.name, [*(beside if table is plain else ()), *cells]))
        console.print(f"  inputs: {trial.name}")
    sizes = [f"N = {size}" for size in targets]
    lines = section(
        f"### {algorithm}: inputs of a classifier",
        "Networks of 48 units (wide: 64 and 64) on the same training nodes, one training each; "
        "log loss on all recorded test nodes, in thousandths. Difference of nodes from EAGLE-2's "
        "in per cent at its accept lengths, as above. Inputs beyond C2T-plus's: ranks of a node "
        "among its siblings and of its parent among the rows forwarded; "
        "own probability and the mass of better siblings; margin and entropy behind the parent; "
        "the same and the joint probability of the root's first child; rank and mass of better "
        "nodes in the layer; how often the request's first drafts were right, and the last.",
        ["inputs", "parameters", "log loss", *sizes],
        plain,
    )
    return lines + section(
        f"### {algorithm}: the same, priced by the request",
        "A confidence is multiplied by (share of the request's first drafts that were wrong, with "
        f"{PRIOR:g} half of them right before its first) ^ {POWER:g}: where drafts are mostly "
        "right, a token more is soon had anyway.",
        ["inputs", *sizes],
        priced,
    )


def said(net: ConfidenceNet, x: Tensor) -> Tensor:
    """[n] logits for inputs [n, F], some at a time."""
    return torch.cat([net(part) for part in x.split(2**18)])


def price_of(hits: Tensor) -> Tensor:
    """[n]: what a token of the request is worth, 1 where half of its first drafts are right."""
    return (2.0 * (1.0 - hits)) ** POWER


@torch.inference_mode()
def inputs_of(recording: Recording) -> dict[str, Tensor]:
    """[n] float32 by name."""
    nodes, parents = recording.nodes, recording.parent_rows()
    of = nodes["draft"].long()
    log_joint, log_prob = (nodes[name].clamp(min=MIN_PROB).log() for name in ("joint", "prob"))
    found = {
        "log_joint": log_joint, "log_prob": log_prob, "margin": nodes["margin"],
        "entropy": nodes["entropy"], "depth": nodes["depth"].float(),
    }  # fmt: skip
    places = recording.layer(RANKS).measured
    found |= {name: places[name] for name in RANKS}
    for name, of_root in (("margin", 5.0), ("entropy", 0.0)):
        behind = nodes[name][parents.clamp(min=0)]
        found[f"parent_{name}"] = behind.masked_fill(parents < 0, of_root)
    # A draft's nodes begin by the likeliest child of its root.
    first = torch.searchsorted(of, torch.arange(recording.num_drafts))
    for name, values in (("joint", log_joint), ("margin", nodes["margin"]),
                         ("entropy", nodes["entropy"])):  # fmt: skip
        found[f"root_{name}"] = values[first][of]
    layer = of * 256 + nodes["depth"]
    rank, found["better_in_layer"] = _better(layer, nodes["joint"])
    found["layer_rank"] = rank.log1p()
    owner = torch.where(parents < 0, recording.num_nodes + of, parents)
    found["better_siblings"] = _better(owner, nodes["prob"])[1]
    hits, last = _hits(recording, nodes["accept"][first].numpy())
    return found | {"hits": hits[of], "last_hit": last[of]}


def _better(group: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] each: how many of a node's ``group`` have larger ``values``, and these together."""
    order = torch.from_numpy(np.lexsort((-values.numpy(), group.numpy())))
    ordered, sums = group[order], values[order].double().cumsum(0)
    first = torch.searchsorted(ordered, ordered)
    before = torch.cat((sums.new_zeros(1), sums))
    rank, mass = torch.empty_like(values), torch.empty_like(values)
    rank[order] = (torch.arange(len(order)) - first).float()
    mass[order] = (before[:-1] - before[first]).float()
    return rank, mass


def _hits(recording: Recording, right: Array) -> tuple[Tensor, Tensor]:
    """By draft: the share of the request's first drafts before it that were ``right``, and whether
    the last was.
    """
    request, position = (recording.drafts[name].numpy() for name in ("request", "position"))
    hits, last = np.empty(len(right), np.float32), np.empty(len(right), np.float32)
    order = np.lexsort((position, request))
    seen = good = 0.0
    before = -1
    for at in order:
        if request[at] != before:
            before, seen, good, previous = request[at], PRIOR, PRIOR / 2, 0.5
        hits[at], last[at] = good / seen, previous
        seen, good, previous = seen + 1.0, good + right[at], float(right[at])
    return torch.from_numpy(hits), torch.from_numpy(last)


def fitted(x: Tensor, labels: Tensor, trial: Trial) -> ConfidenceNet:
    """A network for inputs ``x`` [n, F], its scaling in the weights; the same for the same data."""
    torch.manual_seed(0)
    mean, std = x.mean(dim=0), x.std(dim=0).clamp(min=1e-6)
    net, scaled = ConfidenceNet(x.shape[1], trial.hidden_sizes), (x - mean) / std
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    steps = EPOCHS * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    loss_of = nn.BCEWithLogitsLoss()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH):
            loss = loss_of(net(scaled[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.absorb_scaling(mean, std)
    return net.eval().requires_grad_(False)
