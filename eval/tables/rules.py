"""Rules on recorded drafts: their confidences, and the curves that their thresholds draw.

A rule that learns does so from one family of prompts and is used on the others, for chains and for
trees. ``[n]`` is one value per recorded token; ``[1 + S]`` a value and its resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from eval.baselines import logistic
from eval.tables.tree_replay import Forest, replay_trees
from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.offline.curves import (
    ODDS_GRID,
    Array,
    Curve,
    everyone,
    interval,
    resamples,
    sweep,
)
from sglang_c2t.offline.replay import Chains, Outcome, replay
from sglang_c2t.offline.train import RECIPES, TrainSettings, train_classifier
from sglang_c2t.policies.base import Gate
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.c2t_log import C2TLog
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.policies.fixed import Fixed
from sglang_c2t.policies.gated_tree import GatedTree

NUM_RESAMPLES = 1000

#: Rules that learn, by the name they are served by.
LEARN = {kind.name: kind for kind in (C2T, C2TLog, C2TPlus, logistic.Logistic)}
OURS = (C2T.name, C2TLog.name, C2TPlus.name)

#: Of trees: even in log odds, and 0, which keeps every node.
TREE_GRID = tuple(float(x) for x in 1 / (1 + np.exp(-np.r_[-np.inf, np.linspace(-8, 3, 23)])))

#: How classifiers are trained: as ``sglang_c2t train`` does.
SETTINGS = TrainSettings()


@dataclass(frozen=True)
class Known(Gate):
    """A gate whose confidences are in the recording already."""

    beta: float = 0.0
    name: ClassVar[str] = "known"
    needs: ClassVar[frozenset[str]] = frozenset({"confidence"})

    def confidence(self, layer: DraftLayer) -> Tensor:
        """[B] float32."""
        return layer.measured["confidence"]


@dataclass(frozen=True)
class Rule:
    """A rule as it was learnt, if it learns."""

    name: str
    learnt_on: str | None
    """Family of prompts."""

    scores: Tensor
    """[n] float32: its confidence in each recorded token."""

    curve: Curve

    def tests(self, families: Sequence[str]) -> list[str]:
        """Those that it did not learn from."""
        return [family for family in families if family != self.learnt_on]


@dataclass(frozen=True)
class Recorded:
    """Drafts of one pair, all of chains or all of trees, with resamples of their requests."""

    recording: Recording
    replayed: Chains | Forest
    groups: list[str]  # family of each request
    weights: Array  # [1 + S, Q]: each request once, then resamples
    _sized: dict[int, Curve] = field(default_factory=dict, repr=False)
    _known: dict[tuple[int, int, str], tuple[Curve, Array]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def of(cls, recording: Recording) -> Recorded:
        """Resample the requests within their families."""
        kind = Chains if recording.topk == 1 else Forest
        replayed = kind.from_recording(recording)
        groups = [rid.rsplit("/", 1)[0] for rid in replayed.requests]
        weights = np.concatenate((everyone(groups), resamples(groups, NUM_RESAMPLES)))
        return cls(recording, replayed, groups, weights)

    @property
    def trees(self) -> bool:
        """Whether these are no chains."""
        return isinstance(self.replayed, Forest)

    @property
    def families(self) -> list[str]:
        """Each family once."""
        return sorted(set(self.groups))

    @property
    def largest(self) -> int:
        """Drafts behind each root."""
        if isinstance(self.replayed, Chains):
            return self.replayed.max_length
        return self.replayed.shape.num_draft_tokens - 1

    def sized(self, size: int) -> Curve:
        """One point: fixed chains of so many drafts, or EAGLE-2's trees of so many nodes."""
        if size not in self._sized:
            if isinstance(self.replayed, Chains):
                outcome: Outcome = replay(Fixed(), self.replayed, max_length=size)
            else:
                shape = self.replayed.shape._replace(num_draft_tokens=size + 1)
                outcome = replay_trees(EAGLE2(), self.replayed, shape)
            self._sized[size] = Curve.of([outcome])
        return self._sized[size]

    def rules(self) -> Iterator[Rule]:
        """DyJoint, and each rule that learns by the family it learnt from."""
        joint = self.recording.nodes["joint"]
        yield Rule(DyJoint.name, None, joint, self.curve(joint))
        drafts = self.recording.groups()
        for family in self.families:
            mine = torch.tensor([group == family for group in drafts])
            learnt = self.recording.select(mine[self.recording.drafts["request"].long()])
            for name in LEARN:
                scores = self._scores(name, learnt)
                yield Rule(name, family, scores, self.curve(scores))

    def _scores(self, name: str, learnt: Recording) -> Tensor:
        """[n] float32: the confidence in each recorded token of a rule that ``learnt`` taught."""
        if name == logistic.Logistic.name:
            return logistic.path_scores(logistic.train(learnt), self.recording)
        classifier = train(learnt, name)
        return classifier.confidence(self.recording.layer(classifier.features.needs))

    def curve(self, scores: Tensor) -> Curve:
        """The curve of the threshold on ``scores`` [n]."""
        if isinstance(self.replayed, Forest):
            forest = replace(self.replayed, nodes=self.replayed.nodes | {"confidence": scores})
            return Curve.of([replay_trees(GatedTree(Known(b)), forest) for b in TREE_GRID])
        rows = scores.view(self.recording.num_drafts, -1)[self.replayed.draft_row]
        chains = replace(self.replayed, stats=self.replayed.stats | {"confidence": rows})
        return sweep(Known, chains, ODDS_GRID)

    def nodes_at(self, curve: Curve, size: int, family: str) -> Array:
        """[1 + S]: verified drafts per verification where ``curve`` accepts, in this family, as
        much as drafts of ``size`` there; kept, as tables share them.
        """
        key = id(curve), size, family
        if key not in self._known:
            mine = self.weights * everyone(self.groups, only=family)
            # By chance whole drafts may accept less than shorter ones in a resample.
            taus = (self.sized(n).tau(mine)[:, 0] for n in (size, self.largest))
            nodes = curve.gamma_at(np.minimum(*taus), mine)
            self._known[key] = curve, nodes  # the curve, so that its id stays its own
        return self._known[key][1]

    def change(self, curve: Curve, rival: Curve | int, size: int, family: str) -> Array:
        """[1 + S]: difference of :meth:`nodes_at` from the rival's in per cent, paired."""
        other = rival if isinstance(rival, int) else self.nodes_at(rival, size, family)
        return 100 * (self.nodes_at(curve, size, family) / other - 1)


def train(recording: Recording, name: str) -> Classifier:
    """The classifier of the rule ``name``, as ``sglang_c2t train`` makes it."""
    of_trees = f"{name}-tree"
    recipe = RECIPES[of_trees if recording.topk > 1 and of_trees in RECIPES else name]
    return train_classifier(recording, recipe, settings=SETTINGS)


def verdict(values: Array) -> str:
    """``fewer`` or ``more`` where the interval of differences [1 + S] says so."""
    low, high = interval(values[1:])
    return "fewer" if high < 0 else "more" if low > 0 else "no difference"
