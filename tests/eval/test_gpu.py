"""Measuring on a GPU, without one: the step clock, entry points, shapes of models, floors."""

from __future__ import annotations

import ast
import json
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.gpu import microbench, models, plugins, roofline, step_clock
from eval.gpu.kernels import TESTS
from eval.gpu.plan import STAGES
from eval.gpu.step_clock import Step, decoding, full_batch
from eval.gpu.timing import Timing
from sglang_c2t.kernels.gate_program import GateOutput

ROOT = Path(__file__).parents[2]
CEILINGS = roofline.Ceilings("made up", bytes_per_s=4e12, flops_per_s=8e14)


# -- the clock ----------------------------------------------------------------------------


def test_only_steps_of_the_whole_batch_are_timed() -> None:
    log = [
        (0.0, 0, 0, 0, 0),  # prefill
        (0.5, 1, 1, 1, 4),  # the second request still waits
        (0.6, 0, 0, 0, 0),
        (1.0, 2, 2, 4, 8),  # the distance to this one is not a step's
        (1.1, 2, 2, 6, 8),
        (1.3, 2, 2, 3, 7),
        (1.4, 2, 1, 1, 8),  # one request has finished
    ]
    span = full_batch(log, 2, skip=0)
    assert span == (pytest.approx(0.3), 9, 2, 15)


def test_all_decode_steps_are_timed_and_no_prefill() -> None:
    log = [
        (0.0, 0, 0, 0, 0),  # prefill
        (0.5, 1, 1, 1, 4),
        (0.6, 0, 0, 0, 0),
        (1.0, 2, 2, 4, 8),
        (1.1, 2, 1, 6, 8),  # one request has finished
        (1.4, 1, 1, 3, 4),
    ]
    assert decoding(log) == (pytest.approx(0.5 + 0.4 + 0.1 + 0.3), 1 + 4 + 6 + 3, 4, 24)
    with pytest.raises(ValueError, match="no decode step among 1"):
        decoding(log[:1])


def test_stretches_between_prefills_are_added_up() -> None:
    """One request at a time, its answers of three and of four steps."""
    log = [
        *((float(i), 1, 1, 2, 3) for i in range(3)), (10.0, 0, 0, 0, 0),
        *((11.0 + 2 * i, 1, 1, 2, 3) for i in range(4)), (30.0, 0, 0, 0, 0),
        (31.0, 1, 1, 2, 3),  # no step can be timed in a stretch of one
    ]  # fmt: skip
    assert full_batch(log, 1, skip=0) == (2.0 + 6.0, 2 * 5, 5, 3 * 5)


def test_the_first_steps_behind_a_prefill_are_skipped() -> None:
    log = [(float(i), 2, 2, 2, 2) for i in range(10)]
    assert full_batch(log, 2) == (7.0, 14, 7, 14)


def test_too_short_a_stretch_is_refused() -> None:
    log = [(float(i), 2, 2, 2, 2) for i in range(3)]
    with pytest.raises(ValueError, match="decoded for 1 steps only, of 3"):
        full_batch(log, 2)
    with pytest.raises(ValueError, match="decoded for 0 steps only"):
        full_batch([], 2)


class Request:
    """A request that grows by so many tokens, then ends."""

    def __init__(self, length: int) -> None:
        self.output_ids: list[int] = []
        self._length = length

    def finished(self) -> bool:
        return len(self.output_ids) >= self._length


def read() -> list[Step]:
    """What the clock tells whoever asks."""
    told = SimpleNamespace(internal_state={})
    step_clock._hand_out(told)
    return [Step(*row) for row in told.internal_state[step_clock.KEY]]


def decoded(mode: bool, lengths: list[int], brings: int, **result: Any) -> list[Step]:
    """What the clock notes of one processed batch of requests that end at these lengths."""
    reqs = [Request(length) for length in lengths]
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: mode), reqs=reqs)

    def process(_scheduler: Any, batch: Any, _result: Any) -> None:
        for req in batch.reqs:
            if not req.finished():
                req.output_ids.extend([0] * brings)

    step_clock._steps.clear()
    step_clock._timed(process, None, batch, SimpleNamespace(**result))
    return read()


def test_whoever_reads_the_clock_takes_nothing_from_the_others() -> None:
    """SGLang's benchmark client reads /server_info as well, at the end of a cell."""
    first = decoded(True, [9], 1, cap_lens=None)
    again = read()
    assert again == first
    later = [*again, Step(again[-1].seconds + 1, 1, 1, 1, 1)]
    assert step_clock.since(again, later) == later[-1:]
    assert step_clock.since([], later) == later


@pytest.mark.parametrize(
    ("mode", "lengths", "brings", "result", "counts"),
    [
        (True, [9, 0], 3, {"speculative_num_draft_tokens": 4, "cap_lens": None}, (2, 1, 3, 8)),
        (True, [9, 9], 1, {"speculative_num_draft_tokens": 8, "cap_lens": torch.tensor([3, 1])},
         (2, 2, 2, 4)),
        (True, [9], 1, {"speculative_num_draft_tokens": None}, (1, 1, 1, 1)),
        (False, [9], 1, {}, (0, 0, 0, 0)),
    ],
    ids=["tokens that reached requests", "rows that a gate chose", "no speculation", "a prefill"],
)  # fmt: skip
def test_the_clock_counts(
    mode: bool, lengths: list[int], brings: int, result: dict[str, Any], counts: tuple[int, ...]
) -> None:
    """A prefill breaks the row of steps."""
    (step,) = decoded(mode, lengths, brings, **result)
    assert step[1:] == counts


# -- entry points and command lines -------------------------------------------------------


def test_the_plugin_folder_declares_every_entry_point(tmp_path: Path) -> None:
    folder = plugins.write(tmp_path / "plugins")
    found = {
        point.name: point.value
        for distribution in distributions(path=[str(folder)])
        for point in distribution.entry_points
        if point.group == plugins.GROUP
    }
    assert found == {**plugins.C2T, **plugins.MEASURING}
    for value in found.values():
        module, _, function = value.partition(":")
        assert hasattr(__import__(module, fromlist=[function]), function)


def test_the_checkout_declares_what_installing_it_does() -> None:
    project = tomllib.loads((plugins.ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][plugins.GROUP] == plugins.C2T
    assert Distribution.from_name("sglang_c2t").metadata["Name"] == "sglang-c2t"


def test_only_the_plugins_asked_for_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site")
    env = plugins.environment(tmp_path, ["step_clock"])
    assert env["SGLANG_PLUGINS"] == "step_clock"
    assert env["PYTHONPATH"].split(":") == [str(tmp_path), str(plugins.ROOT), "/site"]


def test_model_folders_hold_config_and_tokenizer_of_the_demo_pair(tmp_path: Path) -> None:
    demo = models.trained("demo")
    for name, shape in models.SHAPES.items():
        pair = models.write(name, tmp_path, demo)
        target, draft = (json.loads((path / "config.json").read_text()) for path in pair)
        assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
        assert draft["vocab_size"] == target["vocab_size"] > draft["draft_vocab_size"]
        assert draft["hidden_size"] == target["hidden_size"]
        share = models.copies(shape.hidden_size, 256) * 256 / shape.hidden_size
        assert target["rms_norm_eps"] == draft["rms_norm_eps"] == pytest.approx(1e-5 * share)
        if not name.startswith("small"):
            assert shape.num_attention_heads * shape.head_dim == shape.hidden_size
        assert list(pair.target.glob("tokenizer*"))
        assert target["eos_token_id"] < target["vocab_size"]
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


def test_the_shape_of_llama_8b_has_its_weights() -> None:
    shape = models.SHAPES["8b"]
    assert shape.target_weights == pytest.approx(7.5e9, rel=0.01)  # 8.03 less the embedding
    assert shape.num_hidden_layers * shape.layer_kv_bytes == 131072
    assert models.SHAPES["1b"].target_weights == pytest.approx(1.28e9, rel=0.01)


def test_a_small_batch_is_bound_by_bytes_and_a_large_one_by_arithmetic() -> None:
    shape = models.SHAPES["8b"]
    one = roofline.forward(shape, rows=1, batch=1, context=0)
    assert one.seconds(CEILINGS) == pytest.approx(2 * shape.target_weights / 4e12)
    many = roofline.forward(shape, rows=2048, batch=256, context=0)
    assert many.seconds(CEILINGS) == pytest.approx(2 * 2048 * shape.target_weights / 8e14)


def test_microbench_floor_counts_each_tensor_once() -> None:
    out = GateOutput.empty(4, 1, "cpu")
    assert microbench.nbytes(torch.zeros(4, 100, dtype=torch.bfloat16), out, None) == 800 + 100


@given(st.integers(1, 64), st.integers(1, 40))
def test_random_trees_are_trees(batch: int, nodes: int) -> None:
    parents, num_rows = microbench.trees(batch, nodes)
    assert bool((parents[:, 0] == -1).all())
    assert bool((parents[:, 1:] < torch.arange(1, nodes)).all())
    assert bool((parents[:, 1:] >= 0).all())
    assert int(num_rows.min()) >= 1
    assert int(num_rows.max()) <= nodes


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_timing_lies_between_its_bounds(seconds: list[float]) -> None:
    timing = Timing.of(seconds)
    assert min(seconds) <= timing.low <= timing.median <= timing.high <= max(seconds)


def test_without_a_gpu_the_measuring_commands_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert microbench.main([]) == 2
    assert roofline.main([]) == 2
    assert capsys.readouterr().err.count("needs a CUDA device") == 2


def test_a_line_of_the_microbenchmark_names_its_floor() -> None:
    made = microbench.Row("gate", "B 1", Timing(2e-6, 1e-6, 3e-6), 4_000_000, "graph")
    assert microbench.line(made, CEILINGS) == "| gate | B 1 | graph | 2.0 [1.0, 3.0] | 1.00 | 2.0 |"


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
