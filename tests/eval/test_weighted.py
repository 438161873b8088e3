"""A heavier copy of the real pair's target: the very same model. The demo target stands for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.bench.config import ModelConfig
from eval.bench.methods import drafting, target_of, tokenizer_of
from eval.run import main as run
from eval.server import TARGET
from eval.smollm2 import HEAD, weighted
from eval.smollm2.target import NAME, SHA256, TargetError
from eval.smollm2.weighted import main, weighted_target
from sglang_c2t.config import ConfigError
from tests.eval.bench_configs import config

MODEL = f"{NAME}-{SHA256[:12]}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("eval.bench.config.SMALLEST", 5)
    monkeypatch.setattr(weighted, "SMALLEST", 5)
    shutil.copytree(TARGET, tmp_path / "sglang-c2t" / MODEL)
    return tmp_path / "sglang-c2t"


def test_weighted_target_has_the_parameters_asked_for_and_is_made_once(cache: Path) -> None:
    folder = target_of(ModelConfig("smollm2:8", "smollm2"), Path("unused"))
    tensors = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == pytest.approx(8e6, rel=0.02)
    width = json.loads((folder / "config.json").read_text())["intermediate_size"]
    assert {t.shape[0] for name, t in tensors.items() if "gate_proj" in name} == {width}
    assert (folder / "tokenizer.json").exists()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert weighted_target(8) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    kept = sorted(path.name for path in cache.iterdir())
    assert kept == sorted([folder.name, MODEL]), "nothing is left over"


def test_weighted_target_that_answers_otherwise_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, by: pad(x, by, value=0.5))
    assert main(["8"]) == 2
    assert "the weighted target answers otherwise than" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == [MODEL]


@pytest.mark.parametrize("millions", [4, 2001])
def test_weighted_target_of_a_size_out_of_range_is_refused(millions: int) -> None:
    with pytest.raises(TargetError, match=f"5 to 2000 million parameters, not {millions}"):
        weighted_target(millions)


# -- in a configuration -------------------------------------------------------------------


def test_run_on_the_real_pair_serves_its_target_and_its_head(cache: Path) -> None:
    model = ModelConfig("smollm2", "smollm2")
    assert target_of(model, Path("unused")) == cache / MODEL
    assert tokenizer_of(ModelConfig("smollm2:8", "smollm2")) == str(cache / MODEL)
    flags = drafting(model, next(m for m in config().methods if m.gated), Path("unused"))
    assert flags[flags.index("--speculative-draft-model-path") + 1] == str(HEAD)


def test_run_without_the_package_says_how_to_get_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cache)
    monkeypatch.setattr("eval.smollm2.target.PACKAGE", "no-such-package")
    text = Path("eval/configs/demo.toml").read_text().replace('= "demo"', '= "smollm2"')
    (cache.parent / "real.toml").write_text(text)
    assert run([str(cache.parent / "real.toml"), "--list"]) == 2
    assert "no-such-package, which is not installed: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target", ["demo:", "demo:130", "smollm2:big", "smollm2:4", "smollm2:2001", "smollm2:-8"]
)
def test_run_on_a_size_that_the_pair_has_not_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"no target {target}; sizes are 8b, .* and 5 to 2000"):
        config(model={"target": target, "draft": "smollm2"})


@pytest.mark.parametrize(
    ("target", "draft", "fitting"),
    [("smollm2", "demo", "smollm2"), ("demo:8b", "demo", "demo:8b"), ("demo", "demo:8b", "demo"),
     ("smollm2:400", "smollm2:400", "smollm2"), ("smollm2:8b", "demo:8b", "smollm2:8b")],
)  # fmt: skip
def test_run_with_another_pairs_draft_is_refused(target: str, draft: str, fitting: str) -> None:
    with pytest.raises(ConfigError, match=f"the draft of {target} is {fitting}, got {draft}"):
        config(model={"target": target, "draft": draft})


def test_run_on_the_real_pair_with_an_algorithm_it_has_not_is_refused() -> None:
    model = {"target": "smollm2", "draft": "smollm2", "algorithm": "STANDALONE"}
    with pytest.raises(ConfigError, match="the algorithm of smollm2 is EAGLE3, got STANDALONE"):
        config(model=model)
