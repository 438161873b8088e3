"""The verdict on a classifier: recordings on which the answer is known beforehand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.evaluation import evaluate, score
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.offline.verdict import (
    UNNAMED,
    Judge,
    Verdict,
    calibration_line,
    on_tokens,
    rounded_down,
)
from sglang_c2t.policies.c2t import C2T
from sglang_c2t.policies.dymax import DyMax
from tests.offline.test_evaluation import linear
from tests.recordings import chain, recording

#: Reads the entropy, which here tells what survives; the joint probability, backwards and as it is.
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
    judge = Judge(CHAINS, C2T(classifier), "--c2t-classifier mine", accept_length)
    return judge.verdict({"dymax": DyMax()})


def test_a_classifier_that_knows_what_survives_pays_and_is_what_to_serve() -> None:
    found = verdict(KNOWS)
    assert found.pays
    assert found.low <= found.change <= found.high < -20
    assert found.mine.tau == pytest.approx(found.whole)  # it drops only what is rejected
    assert found.sentence.endswith(f"set --c2t-classifier mine --c2t-{found.mine.setting}")
    assert " pays: -" in found.answer


def test_a_classifier_that_ranks_backwards_does_not_pay_and_is_not_what_to_serve() -> None:
    found = verdict(BACKWARDS)
    assert found.pays is False
    assert 0 < found.low <= found.change <= found.high
    assert " does not pay: +" in found.answer
    assert found.sentence.endswith(found.rival.flags)
    assert "which needs no classifier" in found.sentence
    assert "mine" not in found.sentence


def test_the_joint_probability_in_other_words_is_not_told_apart_from_it() -> None:
    found = verdict(JOINT)
    assert found.pays is None
    assert found.low <= 0 <= found.high
    assert "may or may not pay" in found.answer


@pytest.mark.parametrize("classifier", [KNOWS, BACKWARDS, JOINT])
@pytest.mark.parametrize("wanted", [None, 2.0, 2.5])
def test_every_setting_reaches_the_accept_length_when_it_is_served(
    classifier: Classifier, wanted: float | None
) -> None:
    found = verdict(classifier, wanted)
    assert found.wanted == pytest.approx(wanted or 0.98 * found.whole)
    beta = float(found.mine.setting.removeprefix("beta "))
    assert found.mine.flags.endswith(f"--c2t-beta {beta:g}")
    outcome = replay(C2T(classifier, beta), CHAINS)
    assert outcome.accept_length() == found.mine.tau >= found.wanted
    assert found.rival.tau >= found.wanted


def test_families_are_told_one_by_one_and_policies_as_they_are() -> None:
    found = verdict(KNOWS)
    assert list(found.families) == ["chat", "math"]
    assert all(change < -20 for change in found.families.values())
    lines = found.lines()
    assert lines[-1].startswith("By family of prompts: chat -")
    assert any(line.startswith("dymax ") and " default " in line for line in lines)


def test_a_family_without_a_name_has_one_and_requests_left_out_are_counted() -> None:
    """A request that nobody named is recorded as a hash, which holds no slash."""
    names = [name if q % 3 else f"{q:032x}" for q, name in enumerate(CHAINS.requests)]
    chains = replace(CHAINS, requests=names, left_out=3)
    found = Judge(chains, C2T(KNOWS), "--c2t-classifier mine").verdict({})
    assert list(found.families) == ["chat", "math", UNNAMED]
    assert f", {UNNAMED} -" in found.lines()[-2]
    assert found.lines()[-1].startswith("3 requests lack roots")


@pytest.mark.parametrize("wanted", [0.9, 4.9])
def test_an_accept_length_that_whole_drafts_do_not_reach_is_refused(wanted: float) -> None:
    with pytest.raises(ConfigError, match=rf"--accept-length must be in \[1, .*\], .*got {wanted}"):
        verdict(KNOWS, wanted)


def test_thresholds_are_rounded_to_where_more_is_kept() -> None:
    assert [rounded_down(x) for x in (0.3568, 0.1, 0.35, 0.01239, 0.00056)] == [
        0.35, 0.1, 0.35, 0.012, 0.00056
    ]  # fmt: skip


def test_without_a_replay_a_threshold_keeps_98_of_100_accepted_tokens() -> None:
    scored = score(DATA, JOINT)
    told = on_tokens(scored, "--c2t-policy c2t", "it holds trees")
    assert told.startswith("Whether this classifier pays is not known: it holds trees.")
    beta = float(told.split("--c2t-beta ")[1].split(" ")[0])
    kept = scored.path_confidence[scored.accepted] >= beta
    assert 0.98 <= kept.float().mean() < 1
    nothing = on_tokens(score(recording([chain([0.5], [0])]), JOINT), "", "it is short")
    assert "no threshold to choose" in nothing


def test_a_bad_calibration_is_warned_of_with_what_it_is_held_against_and_the_command() -> None:
    """Confidence 0.5 for all, of whom half are accepted, and 0.9."""
    data = recording([chain([0.5, 0.5], [1, 0], request=f"r/{i}") for i in range(9)])
    for logit, bad in ((0.0, False), (2.2, True)):
        report = evaluate(data, linear({"joint": 0.0}, logit))
        told = calibration_line(report, ["a b", "c"], "mine.safetensors", "c2t")
        assert told.startswith("WARNING") is bad
        assert "0.05" in told
        command = (
            "train 'a b' c --recipe c2t --fine-tune mine.safetensors --calibration isotonic --out "
        )
        assert (command in told) is bad
        assert f"{report.summary.classifier.ece:.3f}" in told


def test_the_answer_is_drawn_from_requests_that_are_too_few_to_tell() -> None:
    """One request: every resample is the recording, so that the interval is the number."""
    data = made(1)
    found = Judge(Chains.from_recording(data), C2T(KNOWS), "").verdict({})
    assert found.low == pytest.approx(found.change) == pytest.approx(found.high)
    assert torch.tensor(found.change).isfinite()
