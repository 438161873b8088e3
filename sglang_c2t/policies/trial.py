"""Trial of a policy on an invented draft before the server serves. A failure here would be
permanent, so the server refuses to start. Later failures fall back to full drafts
(:mod:`sglang_c2t.draft.served`).
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_c2t.checks import ConfigError, format_error, shown
from sglang_c2t.draft_layer import DraftLayer, known_measurement, measure
from sglang_c2t.policies.base import TreeLayer, TreeShape, grown, is_tree_policy, kept, own_measure

BATCH = 2
VOCABULARY = 64


def try_policy(policy: Any, shape: TreeShape) -> None:
    """Call the policy for two layers of an invented draft, on the CPU.

    Raises :class:`ConfigError` for an object that lacks parts of a policy, needs unknown
    measurements, or returns other tensors than it must. A policy with its own ``measure`` is not
    called: it may read hidden states, whose width depends on the draft.
    """
    parts = (
        ("name", "needs", "grow", "check") if is_tree_policy(policy) else ("name", "needs", "keep")
    )
    try:
        missing = [part for part in parts if not hasattr(policy, part)]
        if missing:
            raise ConfigError(
                f"c2t policy {type(policy).__name__} is no policy: it has no {', '.join(missing)}"
            )
        if own_measure(policy) is not None:
            return
        for name in policy.needs:
            if not known_measurement(name):
                raise ConfigError(
                    f"policy {policy.name} needs {shown(name)}, which sglang-c2t does not "
                    "measure, and has no method measure"
                )
        _ask(policy, shape)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"policy {policy.name} fails on a made-up draft: {format_error(error)}"
        ) from error


@torch.inference_mode()
def _ask(policy: Any, shape: TreeShape) -> None:
    topk, layer, rows = shape.topk, None, BATCH
    for depth in range(1, min(2, shape.num_steps) + 1):
        layer = _layer(depth, rows, topk, policy.needs, layer)
        if is_tree_policy(policy):
            grown(policy, TreeLayer(layer, BATCH, topk))
        else:
            kept(policy, layer)
        rows = BATCH * topk  # all children of the first layer are forwarded


def _layer(
    depth: int, rows: int, topk: int, needs: frozenset[str], before: DraftLayer | None
) -> DraftLayer:
    """[rows * topk] tokens: the ``topk`` best children of each row, some of them dead."""
    logits = 3 * torch.sin(torch.arange(rows * VOCABULARY).float()).view(rows, VOCABULARY)
    of_row = measure(logits, needs)
    measured = {name: values.repeat_interleave(topk, dim=0) for name, values in of_row.items()}
    prob = logits.softmax(dim=1).topk(topk).values.flatten()
    nodes = torch.arange(rows * topk)
    return DraftLayer(
        depth=depth,
        prob=prob,
        joint=prob if before is None else prob * before.joint[nodes // topk],
        entropy=measured["entropy"],
        alive=nodes % 3 < 2,
        measured=measured,
        parent=before if topk == 1 else None,
    )
