"""The weighted demo target: heavier, and the very same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.bench.config import ModelConfig
from eval.bench.methods import target_of
from eval.demo_models import weighted
from eval.demo_models.weighted import WeightError, main, weighted_target
from eval.server import TARGET
from sglang_c2t.config import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-c2t"


def test_it_weighs_what_was_asked_for_and_is_made_once(cache: Path) -> None:
    folder = target_of(ModelConfig(target="demo:8"), Path("unused"))
    tensors = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == pytest.approx(8e6, rel=0.02)
    width = json.loads((folder / "config.json").read_text())["intermediate_size"]
    assert {t.shape[0] for name, t in tensors.items() if "gate_proj" in name} == {width}
    assert (folder / "tokenizer.json").exists()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert weighted_target(8) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in cache.iterdir()] == [folder.name], "nothing is left behind"


def test_one_that_answers_otherwise_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, by: pad(x, by, value=0.5))
    assert main(["8"]) == 2
    assert f"answers otherwise than {TARGET}" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("millions", [4, 2001])
def test_sizes_out_of_range_are_refused(millions: int) -> None:
    with pytest.raises(WeightError, match=f"5 to 2000 million parameters, not {millions}"):
        weighted_target(millions)


@pytest.mark.parametrize("target", ["demo:", "demo:big", "demo:4", "demo:2001", "demo:-8"])
def test_a_run_that_asks_for_no_size_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="must name 5 to 2000 million parameters, such as"):
        ModelConfig(target=target)


def test_the_standard_size_is_one_that_can_be_made() -> None:
    assert weighted.SMALLEST <= weighted.STANDARD <= weighted.LARGEST
