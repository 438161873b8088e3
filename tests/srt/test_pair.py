"""The pair that a server serves, found from SGLang's arguments."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from eval.server import DRAFTS, MLA, TARGET
from sglang_c2t.classifier.checkpoint import load_classifier
from sglang_c2t.classifier.pair import Pair, fingerprint
from sglang_c2t.config import C2TConfig
from sglang_c2t.policies.c2t_plus import C2TPlus
from sglang_c2t.policies.dyjoint import DyJoint
from sglang_c2t.srt import pair
from sglang_c2t.srt.announce import log_classifier
from sglang_c2t.srt.pair import served_pair, shipped_on_all_ranks
from tests.doubles import double

TARGET_WEIGHTS, DRAFT_WEIGHTS = fingerprint(TARGET), fingerprint(DRAFTS["EAGLE3"])
assert TARGET_WEIGHTS is not None
assert DRAFT_WEIGHTS is not None
PAIR = Pair("EAGLE3", TARGET_WEIGHTS, DRAFT_WEIGHTS)


def arguments(**changes: Any) -> Any:
    typed = {
        "model_path": str(TARGET), "revision": None, "download_dir": None,
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_revision": None,
        "speculative_draft_model_path": str(DRAFTS["EAGLE3"]),
    }  # fmt: skip
    return double("ServerArgs", **typed | changes)


def test_served_pair_is_algorithm_and_weights(tmp_path: Path) -> None:
    assert served_pair(arguments()) == PAIR
    renamed = shutil.copytree(DRAFTS["EAGLE3"], tmp_path / "renamed")
    assert served_pair(arguments(speculative_draft_model_path=str(renamed))) == PAIR


@pytest.mark.parametrize("draft", [None, str(MLA)])
def test_served_pair_of_an_mtp_target_is_the_target_twice(draft: str | None) -> None:
    typed = {"model_path": str(MLA), "speculative_algorithm": "NEXTN"}
    found = served_pair(arguments(**typed, speculative_draft_model_path=draft))
    mla = fingerprint(MLA)
    assert mla is not None
    assert found == Pair("NEXTN", mla, mla)


def in_cache(cache: Path, name: str, revision: str, source: Path) -> None:
    """As Hugging Face's client keeps a model."""
    folder = cache / ("models--" + name.replace("/", "--"))
    shutil.copytree(source, folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text("0" * 40)


def test_served_pair_of_hub_models_is_found_in_the_cache(tmp_path: Path) -> None:
    in_cache(tmp_path, "org/target", "v1", TARGET)
    in_cache(tmp_path, "org/draft", "v2", DRAFTS["EAGLE3"])
    typed = {
        "model_path": "org/target", "speculative_draft_model_path": "org/draft",
        "revision": "v1", "speculative_draft_model_revision": "v2", "download_dir": str(tmp_path),
    }  # fmt: skip
    assert served_pair(arguments(**typed)) == PAIR
    for absent in (
        {"revision": "v2"},
        {"speculative_draft_model_revision": None},
        {"model_path": "org/absent"},
        {"model_path": "s3://no/name/of/the/hub"},
        {"speculative_draft_model_path": str(tmp_path)},  # no weights in it
    ):
        assert served_pair(arguments(**typed | absent)) is None


def test_served_pair_ranks_take_the_classifier_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "shipped_names", lambda: ["a/c2t", "b/c2t", "c2t"])
    monkeypatch.setattr(pair, "shipped_for", lambda _pair: "b")
    assert shipped_on_all_ranks(PAIR) == "b"
    for first, wanted in ((0, None), (1, "a"), (2, "b")):
        monkeypatch.setattr(
            pair, "host_broadcast_from_rank0", lambda _group, n=first: lambda _mine: [n]
        )
        assert shipped_on_all_ranks(PAIR) == wanted


# -- the log line --------------------------------------------------------------------------------


def learnt(of: Pair) -> C2TPlus:
    """A policy whose classifier learnt from such a pair."""
    classifier = load_classifier("c2t-plus")
    weights = {"target": of.target, "draft": of.draft}
    classifier.training["origins"] = [
        {"algorithm": "EAGLE3", "target": "t", "draft": "d", "weights": weights}
    ]
    return C2TPlus(classifier)


@pytest.mark.parametrize(
    ("given", "of", "served", "level", "said"),
    [
        ("default", PAIR, PAIR, logging.INFO, "this pair (d for t): the default"),
        ("default", PAIR, None, logging.INFO, "whose weights are not to be found"),
        (
            "mine",
            PAIR._replace(draft="0" * 16),
            PAIR,
            logging.WARNING,
            "another pair (d for t): as",
        ),
    ],
)
def test_log_classifier_warns_of_one_that_learnt_from_another_pair(
    caplog: pytest.LogCaptureFixture,
    given: str,
    of: Pair,
    served: Pair | None,
    level: int,
    said: str,
) -> None:
    with caplog.at_level(logging.INFO):
        log_classifier(C2TConfig("c2t-plus", classifier=given), learnt(of), served)
        log_classifier(C2TConfig("dyjoint"), DyJoint(0.5), served)  # reads none
    (record,) = caplog.records
    assert record.levelno == level
    assert said in record.getMessage()
