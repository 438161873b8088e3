"""Evaluation: every table against nested loops over the tokens of small random trees."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.classifier.checkpoint import Classifier
from sglang_c2t.classifier.features import FeatureSpec
from sglang_c2t.classifier.model import ConfidenceNet
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.evaluation import (
    Report,
    acceptance_table,
    decide,
    entropy_buckets,
    evaluate,
    score,
    summary,
)
from sglang_c2t.offline.plots import acceptance_plot, reliability_diagram
from sglang_c2t.offline.scores import Rates
from tests import recordings
from tests.recordings import recording

#: One token: parent (-1 for the root), prob, joint, entropy, accepted on its own.
Token = tuple[int, float, float, float, bool]
Draft = list[Token]

# Few distinct values, so that ties and interval ends are common. Joint probabilities are
# drawn freely, not multiplied: the tables must not rely on their falling along the path.
SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 0.6, 0.95, 1.0])
ENTROPIES = st.sampled_from([-1e-7, 0.0, 0.5, 1.0, 2.5, 3.0, 4.9, 6.0, 9.0])


@st.composite
def random_draft(draw: st.DrawFn, max_tokens: int = 8) -> Draft:
    """A chain, a bush, or anything between; possibly without tokens."""
    size = draw(st.integers(0, max_tokens))
    return [
        (
            draw(st.integers(-1, i - 1)),
            draw(SHARES),
            draw(SHARES),
            draw(ENTROPIES),
            draw(st.booleans()),
        )
        for i in range(size)
    ]


RANDOM_DRAFTS = st.lists(random_draft(), max_size=5)


def path(draft: Draft, i: int) -> list[int]:
    """Indices from token ``i`` up to the child of the root."""
    parent = draft[i][0]
    return [i] if parent < 0 else [i, *path(draft, parent)]


def survives(draft: Draft, i: int) -> bool:
    return all(draft[j][4] for j in path(draft, i))


def recording_of(drafts: list[Draft]) -> Recording:
    """Each draft is a request of its own."""
    data = recording(
        [
            recordings.Draft(
                parents=[token[0] for token in draft],
                accept=[survives(draft, i) for i in range(len(draft))],
                prob=[token[1] for token in draft],
                request=f"r/{number}",
                prompt=number,
            )
            for number, draft in enumerate(drafts)
        ]
    )
    data.nodes["joint"] = torch.tensor([token[2] for draft in drafts for token in draft])
    data.nodes["entropy"] = torch.tensor([token[3] for draft in drafts for token in draft])
    return data


def linear(weights: dict[str, float], bias: float) -> Classifier:
    """Confidence sigmoid(weights * features + bias)."""
    net = ConfidenceNet(len(weights), ())
    with torch.no_grad():
        weight, offset = net.parameters()
        weight.copy_(torch.tensor([list(weights.values())]))
        offset.fill_(bias)
    net.requires_grad_(False)
    return Classifier(net, FeatureSpec(names=tuple(weights)), {})


#: Keeps a token of prob >= 0.5 at beta 0.5.
BY_PROB = linear({"prob": 10.0}, -5.0)

#:      root
#:     /    \        One token each; the right one has two children.
#:    0      1
#:          / \
#:         2   3
TREE: Draft = [
    (-1, 0.6, 0.6, 0.5, True),
    (-1, 0.3, 0.3, 1.5, True),
    (1, 0.95, 0.28, 2.5, True),
    (1, 0.1, 0.05, 9.0, False),
]


def slow_rates(decisions: list[tuple[bool, bool]]) -> Rates:
    """From (kept, accepted) pairs, each rate by its definition."""

    def share(part: int, whole: int) -> float:
        return part / whole if whole else math.nan

    hits = sum(kept and accepted for kept, accepted in decisions)
    kept, accepted = (sum(pair[i] for pair in decisions) for i in (0, 1))
    right = sum(pair[0] == pair[1] for pair in decisions)
    return Rates(
        accuracy=share(right, len(decisions)),
        precision=share(hits, kept),
        recall=share(hits, accepted),
        f1=share(2 * hits, kept + accepted),
        positive_rate=share(kept, len(decisions)),
    )


def same(a: Rates, b: Rates) -> bool:
    return vars(a) == pytest.approx(vars(b), nan_ok=True)


BUCKETS = [(-1, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, math.inf)]


@given(RANDOM_DRAFTS)
def test_entropy_buckets_hold_what_loops_over_tokens_put_there(drafts: list[Draft]) -> None:
    """And the last one all tokens, as the summary does."""
    recording = recording_of(drafts)
    scored = score(recording, BY_PROB)
    assert scored.joint.tolist() == pytest.approx([token[2] for draft in drafts for token in draft])
    kept = decide(scored, 0.5)
    buckets = entropy_buckets(scored, kept)
    tokens = [(draft, i) for draft in drafts for i in range(len(draft))]
    for (low, high), bucket in zip([*BUCKETS, (-1, math.inf)], buckets, strict=True):
        inside = [(draft, i) for draft, i in tokens if low <= draft[i][3] < high]
        classifier = [
            (all(draft[j][1] >= 0.5 for j in path(draft, i)), survives(draft, i))
            for draft, i in inside
        ]
        least = kept.joint_threshold
        joint = [
            (all(torch.tensor(draft[j][2]) >= least for j in path(draft, i)), survives(draft, i))
            for draft, i in inside
        ]
        assert bucket.tokens == len(inside)
        assert not tokens or bucket.proportion == pytest.approx(len(inside) / len(tokens))
        assert same(bucket.classifier, slow_rates(classifier))
        assert same(bucket.joint, slow_rates(joint))
    overall = summary(recording, scored, kept)
    assert same(overall.classifier.rates, bucket.classifier)
    assert same(overall.joint.rates, bucket.joint)


@given(RANDOM_DRAFTS, st.sampled_from([0.01, 0.3, 0.5, 0.99]))
def test_the_rival_recalls_as_much_and_would_not_at_any_higher_threshold(
    drafts: list[Draft], beta: float
) -> None:
    scored = score(recording_of(drafts), BY_PROB)
    kept = decide(scored, beta)
    target = int((kept.classifier & scored.accepted).sum())
    assert int((kept.joint & scored.accepted).sum()) >= target
    higher = scored.path_joint > kept.joint_threshold
    if target:
        assert int((higher & scored.accepted).sum()) < target
    else:
        assert not kept.joint.any()


@given(RANDOM_DRAFTS)
def test_the_acceptance_table_counts_like_a_loop(drafts: list[Draft]) -> None:
    """Intervals are closed on the right, as in the paper; 0 belongs to the first."""
    table = acceptance_table(recording_of(drafts))
    tokens = [(draft, i) for draft in drafts for i in range(len(draft))]
    assert table.depths == sorted({len(path(draft, i)) for draft, i in tokens})
    for row in range(20):
        low, high = row / 20, (row + 1) / 20
        for column, depth in enumerate(table.depths):
            labels = [
                survives(draft, i)
                for draft, i in tokens
                if len(path(draft, i)) == depth
                and (low < draft[i][2] <= high or (row == 0 and draft[i][2] == 0))
            ]
            assert table.tokens[row][column] == len(labels)
            rate = sum(labels) / len(labels) if labels else math.nan
            assert table.accept_rate[row][column] == pytest.approx(rate, nan_ok=True)


def test_a_perfect_classifier_ranks_and_decides_perfectly() -> None:
    draft: Draft = [(-1, 1.0, 0.4, 1.0, True), (-1, 0.0, 0.5, 1.0, False)]
    found = evaluate(recording_of([draft]), BY_PROB).summary
    assert found.classifier.auc == 1.0
    assert found.classifier.rates == Rates(1.0, 1.0, 1.0, 1.0, 0.5)
    assert found.joint.auc == 0.0
    assert found.joint.threshold == pytest.approx(0.4)
    assert found.joint.rates.precision == 0.5


ONE_TOKEN: list[Draft] = [[(-1, 0.6, 0.6, 1.0, True)]]
ALL_REJECTED: list[Draft] = [[(-1, 0.6, 0.6, 1.0, False), (0, 0.6, 0.4, 1.0, False)]]


@pytest.mark.parametrize("drafts", [[], [[], []], ONE_TOKEN, ALL_REJECTED])
def test_what_is_undefined_is_null_in_json_and_a_dash_in_markdown(drafts: list[Draft]) -> None:
    report = evaluate(recording_of(drafts), BY_PROB)
    plain = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert plain["summary"]["classifier"]["auc"] is None
    text = report.to_markdown()
    assert "nan" not in text
    assert " - |" in text


def report_of(names: dict[str, float]) -> Report:
    return evaluate(recording_of([TREE, TREE[:2]]), linear(names, -1.0))


PAPER = {"joint": 4.0, "entropy": -0.5, "depth": -0.2}


def test_json_holds_the_report() -> None:
    report = report_of(PAPER)
    plain = json.loads(report.to_json())
    assert plain["summary"]["tokens"] == 6
    assert plain["features"] == list(PAPER)
    assert plain["entropy_buckets"][-2]["high"] is None
    assert plain["summary"]["joint"]["ece"] == report.summary.joint.ece
    assert plain["acceptance"]["tokens"] == report.acceptance.tokens
    assert len(plain["reliability"]["classifier"]) == 15


@pytest.mark.parametrize("names", [PAPER, {"prob": 1.0}])
def test_markdown_gives_every_table_a_heading_a_sentence_and_straight_columns(
    names: dict[str, float],
) -> None:
    _, *sections = report_of(names).to_markdown().split("\n## ")
    assert len(sections) == 4
    for section in sections:
        _heading, sentence, *table = section.strip().split("\n\n")
        assert sentence.endswith(".")
        for lines in table:
            assert "n = " in sentence
            shapes = {
                tuple(i for i, c in enumerate(line) if c == "|") for line in lines.split("\n")
            }
            assert len(shapes) == 1


def test_a_method_stands_beside_its_own_threshold() -> None:
    report = report_of(PAPER)
    rows = [line.split("|")[1:3] for line in report.to_markdown().splitlines() if "|" in line]
    summary = {name.strip(): cell.strip() for name, cell in rows[2:4]}
    own = report.summary
    assert own.classifier.threshold != own.joint.threshold
    assert summary == {
        "classifier": f"{own.classifier.threshold:.3g}",
        "joint probability": f"{own.joint.threshold:.3g}",
    }


def test_a_recording_that_lacks_a_feature_or_holds_values_that_are_not_finite_is_refused() -> None:
    recording = recording_of([TREE])
    with pytest.raises(ConfigError, match="lacks hidden: record again"):
        evaluate(recording, linear({"hidden": 1.0}, 0.0))
    recording.nodes["entropy"][2] = math.nan
    with pytest.raises(ConfigError, match="1 of 4 recorded tokens"):
        evaluate(recording, BY_PROB)


@pytest.mark.parametrize(
    ("draw", "suffix", "start"),
    [
        (reliability_diagram, "png", b"\x89PNG"),
        (acceptance_plot, "svg", b"<?xml"),
    ],
)
def test_plots_are_drawn_in_the_format_of_the_suffix(
    tmp_path: Path, draw: Callable[[Report, Path], None], suffix: str, start: bytes
) -> None:
    path = tmp_path / f"plot.{suffix}"
    draw(report_of(PAPER), path)
    assert path.read_bytes().startswith(start)


def test_plots_of_nothing_are_refused_or_empty(tmp_path: Path) -> None:
    report = evaluate(recording_of([]), BY_PROB)
    reliability_diagram(report, tmp_path / "a.svg")
    acceptance_plot(report, tmp_path / "b.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "b.svg"]
