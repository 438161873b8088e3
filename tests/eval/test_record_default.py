"""``make classifier``: which recordings become which of the shipped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval import record_default
from eval.prompts import Prompt
from eval.recordings import CHAINS, TREES, Recorded
from eval.smollm2.target import TargetError


class Made:
    """Doubles of recording and training that keep their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[tuple[Any, int, Path, Recorded]] = []
        self.trained: dict[Path, list[str]] = {}
        monkeypatch.setattr(record_default, "record", self._record)
        monkeypatch.setattr(record_default, "c2t", self._train)

    def _record(self, pair: Any, texts: list[Prompt], directory: Path, what: Recorded) -> None:
        self.recorded.append((pair, len(texts), directory, what))

    def _train(self, argv: list[str]) -> int:
        self.trained[Path(argv[-1])] = argv
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_the_demo_drafts_are_pooled_into_the_classifiers_of_every_pair(
    made: Made, tmp_path: Path
) -> None:
    numbers = ("--num-prompts", "2", "--num-tree-prompts", "1")
    argv = ("--pair", "demo", "--work", "w", "--out", str(tmp_path), *numbers)
    assert record_default.main(argv) == 0
    drafts = ("EAGLE", "EAGLE3", "STANDALONE")
    assert made.recorded == [
        (draft, number, Path("w") / kind / draft, what)
        for kind, number, what in (("chains", 6, CHAINS), ("trees", 3, TREES))
        for draft in drafts
    ]
    chains = ["c2t", "c2t-log", "c2t-plus"]
    trees = ["c2t-tree", "c2t-log-tree", "c2t-plus-tree"]
    assert list(made.trained) == [tmp_path / f"{name}.safetensors" for name in chains + trees]
    for out, told in made.trained.items():
        kind = "trees" if out.stem in trees else "chains"
        assert told[1:5] == [*(f"w/{kind}/{draft}" for draft in drafts), "--mix-drafts"]
    argv = made.trained[tmp_path / "c2t-tree.safetensors"]
    assert argv[5:] == ["--recipe", "c2t", "--out", str(tmp_path / "c2t-tree.safetensors")]


def test_a_real_pair_has_a_folder_of_its_own_and_is_not_mixed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = record_default.Source(
        {"mine": "EAGLE3"}, lambda n: [Prompt("own", "?")] * n, "mine", CHAINS, TREES, 3
    )
    monkeypatch.setattr(record_default, "real", lambda: source)
    assert record_default.main(("--num-prompts", "5", "--work", "w", "--out", str(tmp_path))) == 0
    assert [one[1:3] for one in made.recorded] == [
        (5, Path("w/chains/mine")), (3, Path("w/trees/mine"))
    ]  # fmt: skip
    names = ["c2t", "c2t-log", "c2t-plus", "c2t-tree", "c2t-log-tree", "c2t-plus-tree"]
    assert list(made.trained) == [tmp_path / "mine" / f"{name}.safetensors" for name in names]
    assert all("--mix-drafts" not in told for told in made.trained.values())
    made.trained.clear()
    assert record_default.main(("--only-trees", "--work", "w", "--out", str(tmp_path))) == 0
    assert list(made.trained) == [tmp_path / "mine" / f"{name}.safetensors" for name in names[3:]]


def test_a_target_that_cannot_be_had_is_one_line(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> record_default.Source:
        raise TargetError("the package is not installed")

    monkeypatch.setattr(record_default, "real", absent)
    assert record_default.main(()) == 1
    assert capsys.readouterr().err == "error: the package is not installed\n"
    with pytest.raises(SystemExit):
        record_default.main(("--train-sets", "folder"))
    assert made.recorded == []
