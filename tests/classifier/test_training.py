"""Recording and training: rows come back as written, the network learns a known rule."""

import pytest
import torch

from sglang_c2t.classifier.recording import RecordingWriter, read_recording
from sglang_c2t.classifier.train import TrainSettings, auc, split_by_request, train_classifier
from sglang_c2t.config import ConfigError


def synthetic_rows(n: int = 6000, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens accepted with probability P: joint probability is the whole truth."""
    g = torch.Generator().manual_seed(seed)
    joint = torch.rand(n, generator=g)
    return {
        "joint": joint,
        "entropy": torch.rand(n, generator=g) * 5,
        "prob": joint,
        "depth": torch.randint(1, 6, (n,), generator=g).to(torch.uint8),
        "accept": (torch.rand(n, generator=g) < joint).to(torch.uint8),
        "request": torch.arange(n) // 20,
    }


def test_a_recording_reads_back_what_was_written(tmp_path) -> None:
    rows = synthetic_rows(100)
    writer = RecordingWriter(tmp_path, origin={"draft": "d"}, shard_rows=30)
    for part in torch.arange(100).split(17):
        writer.add({name: column[part] for name, column in rows.items()})
    writer.flush()
    read, origins = read_recording(tmp_path)
    assert origins == [{"draft": "d"}]
    assert len(list(tmp_path.iterdir())) > 1
    for name, column in rows.items():
        assert torch.equal(read[name], column), name


def test_a_directory_without_a_recording_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors shard found"):
        read_recording(tmp_path)
    (tmp_path / "shard-0.safetensors").write_bytes(b"half a shard")
    with pytest.raises(ConfigError, match="cannot read recording shard"):
        read_recording(tmp_path)


def test_training_learns_that_joint_probability_decides() -> None:
    """Confidence must follow P. Over five seeds the largest deviation was 0.07."""
    classifier = train_classifier(synthetic_rows(60_000), origins=[])
    probe = torch.linspace(0.1, 0.9, 9)
    confidence = classifier.confidence(probe, torch.full((9,), 2.0), 2)
    assert (confidence - probe).abs().max().item() < 0.15
    assert classifier.training["rows"] == 60_000


def test_the_same_seed_trains_the_same_weights() -> None:
    settings = TrainSettings(epochs=1, seed=3)
    a = train_classifier(synthetic_rows(), origins=[], settings=settings)
    b = train_classifier(synthetic_rows(), origins=[], settings=settings)
    for x, y in zip(a.net.parameters(), b.net.parameters(), strict=True):
        assert torch.equal(x, y)


def test_no_request_is_both_trained_on_and_held_out() -> None:
    request = torch.tensor([5, 5, 9, 9, 9, 2])
    train, heldout = split_by_request(request, 0.34, torch.Generator().manual_seed(0))
    assert sorted((*train.tolist(), *heldout.tolist())) == list(range(6))
    assert not set(request[train].tolist()) & set(request[heldout].tolist())
    assert heldout.numel() > 0


@pytest.mark.parametrize(("value", "said"), [(1, "0 rejected"), (0, "0 accepted")])
def test_a_recording_of_one_class_is_refused(value: int, said: str) -> None:
    rows = {**synthetic_rows(), "accept": torch.full((6000,), value, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match=said):
        train_classifier(rows, origins=[])


def test_auc_equals_the_share_of_ordered_pairs() -> None:
    """Against the definition: pairs (accepted, rejected) in the right order, ties half."""
    g = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 6, (40,), generator=g).float()
    labels = torch.randint(0, 2, (40,), generator=g).float()
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, x in zip(scores, labels, strict=True)
        for b, y in zip(scores, labels, strict=True)
        if x == 1 and y == 0
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
