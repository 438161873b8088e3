"""What a recording says of the settings of the server that it was made on.

It holds whole drafts and what became of them, and no times: how deep drafts survive, whether the
shipped classifier knows which do, and whether trees find more than chains. What that brings in
tokens a second only a server can tell.

Legend: n drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sglang_c2t.classifier.checkpoint import load_classifier, shipped_for
from sglang_c2t.classifier.pair import learnt_from, pair_in
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.advice import ENOUGH, MISJUDGES, SELDOM, Finding, Fine
from sglang_c2t.offline.evaluation import least_on_path, score
from sglang_c2t.offline.scores import auc, expected_calibration_error


@dataclass(frozen=True)
class Recorded:
    """Counts of a recording."""

    drafts: int
    """n."""
    num_steps: int
    topk: int
    nodes: int
    """Drafted tokens."""
    survived_at_least: Mapping[int, int]
    """Drafts of which so many tokens, or more, survived."""
    survived_off_chain: int
    """Of the tokens that survived, those that were not the likeliest of their siblings."""
    survived: int
    classifier: str
    learnt_from: str
    auc: float
    error: float
    """Calibration error of the classifier here."""
    card_auc: float
    card_error: float
    """The same where it was trained."""

    @property
    def accept_length(self) -> float:
        """Of whole drafts: tau."""
        return 1.0 + self.survived / self.drafts


def recorded(recording: Recording) -> Recorded:
    """Count. Raises :class:`ConfigError` where too little was recorded to say anything."""
    if recording.num_drafts < ENOUGH:
        raise ConfigError(
            f"this recording holds {recording.num_drafts} drafts, and {ENOUGH} are needed to say "
            "anything: record more"
        )
    nodes, topk = recording.nodes, recording.topk
    accepted = nodes["accept"].float()
    depth = nodes["depth"].long()
    survives = least_on_path(accepted, recording.parent_rows(), nodes["depth"]) > 0.5
    deepest = torch.zeros(recording.num_drafts, dtype=torch.long)
    deepest.scatter_reduce_(0, nodes["draft"].long(), depth * survives, "amax")
    name = "c2t-plus" if topk == 1 else "c2t-plus-tree"
    pair = pair_in(recording.origins[0])
    if folder := shipped_for(pair):
        name = f"{folder}/{name}"
    classifier = load_classifier(name)
    scored = score(recording, classifier)
    labels = scored.accepted.float()
    num_steps = int(depth.max())
    return Recorded(
        drafts=recording.num_drafts,
        num_steps=num_steps,
        topk=topk,
        nodes=recording.num_nodes,
        survived_at_least={d: int((deepest >= d).sum()) for d in range(1, num_steps + 1)},
        survived_off_chain=int((survives & (nodes["rank"] > 0)).sum()),
        survived=int(survives.sum()),
        classifier=name,
        learnt_from=learnt_from(classifier.training, pair),
        auc=auc(scored.confidence, labels),
        error=expected_calibration_error(scored.confidence, labels),
        card_auc=float(classifier.training["heldout_auc"]),
        card_error=float(classifier.training["heldout_ece"]),
    )


def recorded_text(r: Recorded) -> str:
    """What to set, and by which numbers."""
    told = [_steps(r), _classifier(r), *([_trees(r)] if r.topk > 1 else [])]
    lines = [
        f"{r.drafts:,} recorded drafts of {r.nodes / r.drafts:.1f} tokens, of which "
        f"{r.survived / r.drafts:.2f} survive: a verification of a whole draft gives "
        f"{r.accept_length:.2f} tokens.",
        "A recording holds no times, so that no gain in tokens/s can be given: ask `python -m "
        "sglang_c2t advise URL` for that.",
        "",
    ]
    for one in told:
        lines.append(f"{one.name}: {one.sentence}.")
        if isinstance(one, Finding):
            lines.append(f"   do: {one.do}")
    return "\n".join(lines)


def _steps(r: Recorded) -> Finding | Fine:
    often = [d for d, n in r.survived_at_least.items() if (n + 2) / r.drafts >= SELDOM]
    useful = max(often, default=1)
    reach = r.survived_at_least[useful] / r.drafts
    sentence = f"{reach:.0%} of the drafts survive to depth {useful} of {r.num_steps}"
    if useful >= r.num_steps - 1:
        last = r.survived_at_least[r.num_steps] / r.drafts
        if last < 0.5:
            return Fine("steps", sentence)
        more = r.num_steps + 2
        return Finding(
            "steps",
            f"{last:.0%} of the drafts survive whole, all {r.num_steps} tokens",
            f"--speculative-num-steps {more}",
            None,
        )
    return Finding(
        "steps",
        f"{sentence}, and fewer than {SELDOM:.0%} further",
        f"--speculative-num-steps {useful}",
        None,
    )


def _classifier(r: Recorded) -> Finding | Fine:
    sentence = (
        f"{r.classifier}, which learnt from {r.learnt_from}, ranks these drafts with AUC "
        f"{r.auc:.3f} and is off by {r.error:.1%} on average; where it was trained "
        f"{r.card_auc:.3f} and {r.card_error:.1%}"
    )
    if r.error <= r.card_error + MISJUDGES and r.auc >= r.card_auc - MISJUDGES:
        return Fine("classifier", sentence)
    return Finding(
        "classifier",
        sentence,
        "train one on this recording: `python -m sglang_c2t train` (--fine-tune starts from it)",
        None,
    )


def _trees(r: Recorded) -> Finding | Fine:
    share = r.survived_off_chain / max(r.survived, 1)
    sentence = (
        f"{share:.0%} of the tokens that survive are not the likeliest of their siblings, which "
        f"topk {r.topk} is for"
    )
    if share >= SELDOM:
        return Fine("trees", sentence)
    return Finding("trees", sentence, "--speculative-eagle-topk 1", None)
