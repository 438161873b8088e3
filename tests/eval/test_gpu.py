"""Measuring on a GPU, without one: the step clock, entry points, shapes of models, floors."""

from __future__ import annotations

import ast
import json
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.gpu import microbench, models, plugins, step_clock
from eval.gpu.plan import STAGES
from eval.gpu.sprint import TESTS
from eval.gpu.step_clock import Step, decoding
from sglang_c2t import __version__
from sglang_c2t.kernels.gate_program import GateOutput

ROOT = Path(__file__).parents[2]
GROUP = "sglang.srt.plugins"


# -- the clock ----------------------------------------------------------------------------


def test_all_decode_steps_are_timed_and_no_prefill() -> None:
    log = [
        (0.0, 0, 0, 0),  # prefill
        (0.5, 1, 1, 4),
        (0.6, 0, 0, 0),
        (1.0, 2, 4, 8),
        (1.1, 2, 6, 8),  # one request has finished
        (1.4, 1, 3, 4),
    ]
    assert decoding(log) == (pytest.approx(0.5 + 0.4 + 0.1 + 0.3), 1 + 4 + 6 + 3, 4, 24)
    with pytest.raises(ValueError, match="no decode step among 1"):
        decoding(log[:1])


def read() -> list[Step]:
    """Steps in the clock's report."""
    state = SimpleNamespace(internal_state={})
    step_clock._report(state)
    return [Step(*row) for row in state.internal_state[step_clock.KEY]]


def decoded(mode: bool, brings: list[int], **result: Any) -> list[Step]:
    """Return the clock's row for a processed batch that ``brings`` tokens to its requests."""
    reqs = [SimpleNamespace(output_ids=[1]) for _ in brings]
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: mode), reqs=reqs)

    def process(_scheduler: Any, batch: Any, _result: Any) -> None:
        for req, count in zip(batch.reqs, brings, strict=True):
            req.output_ids.extend([0] * count)

    step_clock._steps.clear()
    step_clock._timed(process, None, batch, SimpleNamespace(**result))
    return read()


def test_whoever_reads_the_clock_takes_nothing_from_the_others() -> None:
    """SGLang's benchmark client reads /server_info as well, at the end of a cell."""
    first = decoded(True, [1], cap_lens=None)
    again = read()
    assert again == first
    later = [*again, Step(again[-1].seconds + 1, 1, 1, 1)]
    assert step_clock.since(again, later) == later[-1:]
    assert step_clock.since([], later) == later


@pytest.mark.parametrize(
    ("mode", "brings", "result", "counts"),
    [
        (True, [3, 0], {"speculative_num_draft_tokens": 4, "cap_lens": None}, (2, 3, 8)),
        (True, [1, 1], {"speculative_num_draft_tokens": 8, "cap_lens": torch.tensor([3, 1])},
         (2, 2, 4)),
        (True, [1], {"speculative_num_draft_tokens": None}, (1, 1, 1)),
        (False, [1], {}, (0, 0, 0)),
    ],
    ids=["tokens that reached requests", "rows that a gate chose", "no speculation", "a prefill"],
)  # fmt: skip
def test_the_clock_counts(
    mode: bool, brings: list[int], result: dict[str, Any], counts: tuple[int, ...]
) -> None:
    (step,) = decoded(mode, brings, **result)
    assert step[1:] == counts


# -- entry points and command lines -------------------------------------------------------


def test_the_plugin_folder_declares_what_installing_declares_and_the_measuring_ones() -> None:
    found = [point for one in distributions(path=[str(plugins.SITE)]) for point in one.entry_points
             if point.group == GROUP]  # fmt: skip
    assert sorted(point.name for point in found) == ["c2t", "graft", "step_clock"]
    assert all(callable(point.load()) for point in found)
    project = tomllib.loads((plugins.ROOT / "pyproject.toml").read_text())["project"]
    declared = {point.name: point.value for point in found}
    assert project["entry-points"][GROUP].items() <= declared.items()
    (ours,) = distributions(name="sglang-c2t", path=[str(plugins.SITE)])
    assert (ours.metadata["Name"], ours.version) == (project["name"], __version__)


def test_only_the_plugins_asked_for_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site")
    env = plugins.environment(["step_clock"])
    assert env["SGLANG_PLUGINS"] == "step_clock"
    assert env["PYTHONPATH"].split(":") == [str(plugins.SITE), str(plugins.ROOT), "/site"]


def test_model_folders_hold_config_and_tokenizer_of_the_demo_pair(tmp_path: Path) -> None:
    """Sizes of the shape, one layer for the head; norms make up for coordinates that are zero."""
    demo = models.trained("demo")
    for name, shape in models.SHAPES.items():
        pair = models.write(name, tmp_path, demo)
        target, draft = (json.loads((path / "config.json").read_text()) for path in pair)
        assert (
            vars(shape).items() <= (target | {"draft_vocab_size": shape.draft_vocab_size}).items()
        )
        assert {**vars(shape), "num_hidden_layers": 1}.items() <= draft.items()
        assert "draft_vocab_size" not in target
        share = models.copies(shape.hidden_size, 256) * 256 / shape.hidden_size
        assert target["rms_norm_eps"] == draft["rms_norm_eps"] == pytest.approx(1e-5 * share)
        assert list(pair.target.glob("tokenizer*"))
    with pytest.raises(ValueError, match="no model shape 9b; there are 8b, 1b, small, small128"):
        models.write("9b", tmp_path, demo)


@pytest.mark.parametrize(
    ("wide", "hidden", "wanted"),
    [(4096, 576, 4), (2048, 576, 2), (768, 576, 1), (4096, 256, 8), (512, 256, 1), (256, 256, 0)],
)
def test_copies_leave_a_coordinate_and_are_a_power_of_two(
    wide: int, hidden: int, wanted: int
) -> None:
    assert models.copies(wide, hidden) == wanted


# -- floors -------------------------------------------------------------------------------


def test_microbench_floor_counts_each_tensor_once() -> None:
    out = GateOutput.empty(4, 1, "cpu")
    assert microbench.nbytes(torch.zeros(4, 100, dtype=torch.bfloat16), out, None) == 800 + 100


def test_gpu_readme_names_every_file_and_stage() -> None:
    folder = Path(plugins.__file__).parent
    text = (folder / "README.md").read_text()
    for path in (*folder.glob("*.py"), *folder.glob("*.sh"), *folder.glob("*.json")):
        assert path.stem == "__init__" or f"`{path.name}`" in text, path.name
    for stage in STAGES:
        assert f"`{stage}`" in text, stage


def marked(path: Path) -> bool:
    """Whether any test of a file asks for a GPU, by its own name for the mark."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    return any(
        isinstance(mark, ast.Name) and mark.id == "gpu"
        for function in functions
        for mark in function.decorator_list
    )


def test_the_sprint_runs_every_kernel_test_that_asks_for_a_gpu() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked(path)]
    run = [ROOT / test for test in TESTS]
    left = {path.name for path in files if not any(p in (path, *path.parents) for p in run)}
    assert left == {"test_servers.py"}, "that one starts servers"
