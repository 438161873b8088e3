"""The command line: whole runs on small recordings, and one line for whatever is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from sglang_c2t.classifier.checkpoint import Classifier, load_classifier
from sglang_c2t.cli import main
from sglang_c2t.policies.base import DraftLayer, TreeShape
from tests.recordings import ORIGIN, random_chains, random_trees, tree_origin, write


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``every`` root, the ``visited`` ones, one prompt only, two draft models, trees; ``mine``."""
    root = tmp_path_factory.mktemp("recordings")
    chains = random_chains(20, roots=6, depth=4)
    write(root / "every", chains, roots="every")
    write(root / "visited", chains)
    write(root / "one", chains[:6])
    write(root / "mixed", chains)
    write(root / "mixed", chains, origin={**ORIGIN, "draft": "another"})
    trees = random_trees(20, 3, topk=3, num_steps=3)
    write(root / "trees", trees, roots="every", origin=tree_origin(TreeShape(3, 3, 22)))
    assert main(f"train {root}/every --out {root}/mine.safetensors --steps 2".split()) == 0
    return root


@dataclass
class Shell:
    """Runs a command line, in which {r} stands for the recordings and {t} for a free folder."""

    recordings: Path
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, line: str) -> int:
        self.capsys.readouterr()
        code = main(line.format(r=self.recordings, t=self.folder).split())
        self.out, self.err = self.capsys.readouterr()
        return code

    def usage_error(self, line: str) -> str:
        """Output for a wrong command line."""
        with pytest.raises(SystemExit) as exit_:
            self(line)
        assert exit_.value.code == 2
        return self.capsys.readouterr().err

    def trained(self, name: str = "mine") -> Classifier:
        return load_classifier(self.folder / f"{name}.safetensors")


@pytest.fixture
def run(recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(recordings, tmp_path, capsys)


def test_training_writes_two_files_and_one_line(run: Shell) -> None:
    assert run("train {r}/every --out {t}/new/mine.safetensors --steps 2 --seed 5") == 0
    files = [path.name for path in (run.folder / "new").iterdir()]
    assert sorted(files) == ["mine.json", "mine.safetensors"]
    (summary,) = [line for line in run.out.splitlines() if line.startswith("wrote")]
    assert "mine.safetensors: 241 parameters, trained on " in summary
    assert "of 480 tokens, held-out AUC 0." in summary
    settings = run.trained("new/mine").training["settings"]
    assert (settings["steps"], settings["seed"]) == (2, 5)


def test_training_takes_another_recipe_and_two_drafts(run: Shell) -> None:
    flags = "--recipe c2t-log --steps 2 --mix-drafts"
    assert run(f"train {{r}}/mixed --out {{t}}/mine.safetensors {flags}") == 0
    classifier = run.trained()
    assert classifier.features.names == ("log_joint", "entropy", "depth")
    assert [origin["draft"] for origin in classifier.training["origins"]] == ["d", "another"]


def test_fine_tuning_takes_fewer_and_smaller_steps(run: Shell) -> None:
    assert run("train {r}/every --out {t}/mine.safetensors --fine-tune {r}/mine.safetensors") == 0
    facts = run.trained().training
    assert facts["fine_tuned"] is True
    assert (facts["settings"]["steps"], facts["settings"]["learning_rate"]) == (1_000, 1e-4)


def test_evaluate_ends_with_the_answer_and_the_setting(run: Shell) -> None:
    assert run("evaluate {r}/every --classifier {r}/mine.safetensors") == 0
    last = run.out.splitlines()[-1]
    assert re.match(r"On these recordings this classifier (pays|does not pay|may or may not pay): "
                    r"[+-]\d+\.\d % \[.*\] drafts verified", last)  # fmt: skip
    assert re.search(r" set --c2t-policy \w+ .*--c2t-beta 0\.\d+$", last)


def test_evaluate_accept_length_chooses_the_setting(run: Shell) -> None:
    line = "evaluate {r}/every --classifier {r}/mine.safetensors"
    assert run(f"{line} --accept-length 1.5 --policies dymax") == 0
    assert "For 1.50 tokens per verification set " in run.out.splitlines()[-1]
    assert any(line.startswith("dymax ") for line in run.out.splitlines())
    assert run(f"{line} --accept-length 9") == 2
    assert run.err.startswith("error: --accept-length must be in [1, ")


def test_evaluate_visited_roots_gives_a_threshold_and_why_no_more(run: Shell) -> None:
    assert run("evaluate {r}/visited --classifier {r}/mine.safetensors") == 0
    last = run.out.splitlines()[-1]
    assert last.startswith("Whether this classifier pays is not known: this recording holds only")
    assert "record with --c2t-record-roots every" in last
    assert re.search(r"--c2t-beta 0\.\d+ keeps 98 % of the accepted ones", last)


def test_evaluate_trees_gives_a_threshold_without_replay(run: Shell) -> None:
    """21 nodes in each of 60 trees."""
    assert run("train {r}/trees --out {t}/mine.safetensors --steps 2") == 0
    assert run.trained().training["tokens"] == 21 * 60
    assert run("evaluate {r}/trees --classifier {t}/mine.safetensors") == 0
    assert "pays is not known: this recording holds trees" in run.out.splitlines()[-1]


OUT = "--out {t}/mine.safetensors"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"train {{r}}/absent {OUT}", "no recording in"),
        (f"train {{r}}/one {OUT}", "needs at least 2 prompts"),
        (f"train {{r}}/mixed {OUT}", "another pair of models (draft another, not d)"),
        (f"train {{r}}/every {{r}}/visited {OUT}", "holds roots of kind visited"),
        ("train {r}/every --out {t}/mine.bin", "must end in .safetensors, got"),
        (f"train {{r}}/every {OUT} --recipe c3t", "unknown recipe 'c3t'; known: c2t, c2t-log"),
        (f"train {{r}}/every {OUT} --steps 0", "steps must be 1 or more, got 0"),
        (f"train {{r}}/every {OUT} --fine-tune {{t}}/absent.safetensors", "cannot read its card"),
        ("evaluate {r}/absent", "no recording in"),
        ("evaluate {r}/every --classifier {t}/absent.safetensors", "cannot read its card"),
        ("evaluate {r}/every --policies nonsense", "unknown c2t policy 'nonsense'"),
        (
            "evaluate {r}/every --classifier {r}/mine.safetensors --policies tests.test_cli:Hungry",
            "reads topk_prob, which this recording lacks",
        ),
        ("record {t}/absent.jsonl", "cannot read prompt file"),
        ("record {t}/absent.jsonl --concurrency 0", "--concurrency must be 1 or more, got 0"),
        ("record {t}/absent.jsonl --max-new-tokens 0", "--max-new-tokens must be 1 or more, got 0"),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(run: Shell, line: str, said: str) -> None:
    assert run(line) == 2
    assert run.err.startswith("error: ")
    assert said in run.err
    assert run.err.count("\n") == 1
    assert "wrote" not in run.out
    assert list(run.folder.iterdir()) == []


class Hungry:
    """A policy of a user's own that reads what was not recorded."""

    name = "hungry"
    needs = frozenset({"topk_prob"})

    def keep(self, layer: DraftLayer) -> Tensor:
        return layer.alive


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("chek", "check"),
        ("evalute {r}/every", "evaluate"),
        ("record prompts.jsonl --concurency 3", "--concurrency"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(run: Shell, line: str, meant: str) -> None:
    assert run.usage_error(line).strip().endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    "line", ["", "train", "train {r}/every", "train {r}/every --out x --steps many", "serve"]
)
def test_an_incomplete_command_explains_its_use(run: Shell, line: str) -> None:
    assert "usage: python -m sglang_c2t" in run.usage_error(line)


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("record prompts.jsonl", ["aiohttp", "rich"]),
        ("train {r}/every --out {t}/x.safetensors", ["rich"]),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    run: Shell, monkeypatch: pytest.MonkeyPatch, line: str, missing: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(line) == 2
    assert run.err == (f"error: this needs {', '.join(missing)}: pip install 'sglang-c2t[train]'\n")
    assert list(run.folder.iterdir()) == []
