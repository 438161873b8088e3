"""Evaluation of a classifier: recordings on which the answer is known beforehand."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.classifier.checkpoint import Classifier, save_classifier
from sglang_c2t.classifier.features import FeatureSpec
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.evaluation import (
    Verdict,
    compare,
    evaluate,
    quality,
    rounded_down,
    score,
    token_threshold,
)
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.c2t import C2T
from tests.recordings import Draft, chain, recording, trees


def linear(weights: dict[str, float], bias: float) -> Classifier:
    """Confidence sigmoid(weights * features + bias)."""
    net = ConfidenceNet(len(weights), ())
    weight, offset = net.requires_grad_(False).parameters()
    weight.copy_(weight.new_tensor([list(weights.values())]))
    offset.fill_(bias)
    return Classifier(net, FeatureSpec(names=tuple(weights)), {}, name="mine")


#: Gates of the entropy, which here predicts survival, and of the joint probability, both ways.
KNOWS, BACKWARDS, JOINT = linear({"entropy": -4.0}, 8.0), linear({"joint": -9.0}, 4.5), linear(
    {"joint": 9.0}, -4.5
)  # fmt: skip


def made(num_requests: int = 24) -> Recording:
    """Chains of four whose probabilities say nothing; the entropy is 1 where a token survives, 3
    where not. Half of the requests are of each of two families.
    """
    rng = random.Random(0)
    drafts = []
    for q in range(num_requests):
        for root in range(12):
            accept = [1]
            while len(accept) < 5:
                accept.append(int(accept[-1] and rng.random() < 0.7))
            prob = [0.5 + rng.random() / 2 for _ in range(4)]
            name = f"{('math', 'chat')[q % 2]}/{q}"
            drafts.append(chain(prob, accept[1:], request=name, prompt=q, position=5 + root))
    data = recording(drafts, roots="every")
    data.nodes["entropy"] = 3.0 - 2.0 * data.nodes["accept"].float()
    return data


DATA = made()
CHAINS = Chains.from_recording(DATA)


def verdict(classifier: Classifier, accept_length: float | None = None) -> Verdict:
    return compare(CHAINS, C2T(classifier), "--c2t-classifier {mine}", accept_length)


# -- by replay -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classifier", "pays", "said"),
    [(KNOWS, True, " pays: -"), (BACKWARDS, False, " does not pay: +"),
     (JOINT, None, "may or may not pay")],
)  # fmt: skip
def test_compare_serves_a_classifier_that_pays(
    classifier: Classifier, pays: bool | None, said: str
) -> None:
    found = verdict(classifier)
    assert found.pays is pays
    assert found.low <= found.change <= found.high
    assert said in found.sentence
    assert (found.high < -20) == (pays is True)
    assert (found.low > 0) == (pays is False)
    if pays:  # it drops what is rejected
        assert found.mine.outcome.accept_length() == pytest.approx(found.full)
        assert found.sentence.endswith(f"set --c2t-classifier {{mine}} --c2t-{found.mine.value}")
    elif pays is False:
        assert found.sentence.endswith(found.rival.flags)
        assert "which needs no classifier" in found.sentence
        assert "{mine}" not in found.sentence


@pytest.mark.parametrize("classifier", [KNOWS, BACKWARDS, JOINT])
@pytest.mark.parametrize("wanted", [None, 2.0, 2.5])
def test_compare_every_setting_reaches_the_accept_length_when_served(
    classifier: Classifier, wanted: float | None
) -> None:
    found = verdict(classifier, wanted)
    assert found.wanted == pytest.approx(wanted or 0.98 * found.full)
    beta = float(found.mine.value.removeprefix("beta "))
    assert found.mine.flags.endswith(f"--c2t-beta {beta:g}")
    outcome = replay(C2T(classifier, beta), CHAINS)
    assert outcome.accept_length() == found.mine.outcome.accept_length() >= found.wanted
    assert found.rival.outcome.accept_length() >= found.wanted


@pytest.mark.parametrize("wanted", [0.9, 4.9])
def test_compare_accept_length_out_of_reach_is_refused(wanted: float) -> None:
    with pytest.raises(ConfigError, match=rf"--accept-length must be in \[1, .*\], .*got {wanted}"):
        verdict(KNOWS, wanted)


# -- token by token ------------------------------------------------------------------------


def test_rounded_down_thresholds_keep_more() -> None:
    assert [rounded_down(x) for x in (0.3568, 0.1, 0.35, 0.01239, 0.00056)] == [
        0.35, 0.1, 0.35, 0.012, 0.00056
    ]  # fmt: skip


def test_token_threshold_keeps_98_of_100_accepted_tokens() -> None:
    scored = score(DATA, JOINT)
    line = token_threshold(scored, "--c2t-policy c2t", "it holds trees")
    assert line.startswith("Whether this classifier pays is not known: it holds trees.")
    beta = float(line.split("--c2t-beta ")[1].split(" ")[0])
    kept = scored.path_confidence[scored.accepted] >= beta
    assert 0.98 <= kept.float().mean() < 1
    nothing = token_threshold(score(recording([chain([0.5], [0])]), JOINT), "", "it is short")
    assert "no threshold to choose" in nothing


@given(st.lists(trees(), min_size=1, max_size=5))
def test_score_takes_the_least_confidence_on_each_path(drafts: list[Draft]) -> None:
    scored = score(recording(drafts), linear({"prob": 10.0}, -5.0))
    first = 0
    for draft in drafts:
        for i, above in enumerate(draft.parents):
            own = scored.confidence[first + i]
            least = own if above < 0 else min(own, scored.path_confidence[first + above])
            assert scored.path_confidence[first + i] == least
        first += len(draft.parents)


@pytest.mark.parametrize(("bias", "error"), [(0.0, "0.000"), (2.2, "0.400")])
def test_quality_shows_the_calibration_error(bias: float, error: str) -> None:
    """Half of the tokens are accepted; the confidence is 0.5 for all, or 0.9."""
    data = recording([chain([0.5, 0.5], [1, 0], request=f"r/{i}") for i in range(9)])
    classifier = linear({"joint": 0.0}, bias)
    assert quality(score(data, classifier), classifier).endswith(f", calibration error {error}.")


def test_evaluate_recording_without_a_feature_or_with_nan_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "mine.safetensors")
    data = recording([chain([0.5, 0.5], [1, 0])])
    with pytest.raises(ConfigError, match="lacks hidden: record again"):
        score(data, linear({"hidden": 1.0}, 0.0))
    data.nodes["entropy"][1] = math.nan
    save_classifier(linear({"joint": 1.0, "entropy": 1.0, "depth": 1.0}, 0.0), file)
    with pytest.raises(ConfigError, match="1 of 2 recorded tokens"):
        evaluate(data, file)
