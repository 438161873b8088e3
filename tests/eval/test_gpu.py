"""Measuring on a GPU, without one: the step clock, entry points, shapes of models, floors."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.gpu import microbench, models, plugins, roofline, step_clock
from eval.gpu.step_clock import Step, full_batch
from eval.gpu.timing import Timing

CEILINGS = roofline.Ceilings("made up", bytes_per_s=4e12, flops_per_s=8e14)


# -- the clock ----------------------------------------------------------------------------


def steps(*rows: tuple[float, int, int, int, int]) -> list[Step]:
    """Rows as /server_info gives them."""
    return [Step(*row) for row in rows]


def test_only_steps_of_the_whole_batch_are_timed() -> None:
    log = steps(
        (0.0, 0, 0, 0, 0),  # prefill
        (0.5, 1, 1, 1, 4),  # the second request still waits
        (0.6, 0, 0, 0, 0),
        (1.0, 2, 2, 4, 8),  # the distance to this one is not a step's
        (1.1, 2, 2, 6, 8),
        (1.3, 2, 2, 3, 7),
        (1.4, 2, 1, 1, 8),  # one request has finished
    )
    span = full_batch(log, 2, skip=0)
    assert span == (pytest.approx(0.3), 9, 2, 15)


def test_stretches_between_prefills_are_added_up() -> None:
    """One request at a time, its answers of three and of four steps."""
    log = steps(
        *((float(i), 1, 1, 2, 3) for i in range(3)), (10.0, 0, 0, 0, 0),
        *((11.0 + 2 * i, 1, 1, 2, 3) for i in range(4)), (30.0, 0, 0, 0, 0),
        (31.0, 1, 1, 2, 3),  # no step can be timed in a stretch of one
    )  # fmt: skip
    assert full_batch(log, 1, skip=0) == (2.0 + 6.0, 2 * 5, 5, 3 * 5)


def test_the_first_steps_behind_a_prefill_are_skipped() -> None:
    log = steps(*((float(i), 2, 2, 2, 2) for i in range(10)))
    assert full_batch(log, 2) == (7.0, 14, 7, 14)


def test_too_short_a_stretch_is_refused() -> None:
    log = steps((1.0, 2, 2, 2, 2), (2.0, 2, 2, 2, 2), (3.0, 2, 2, 2, 2))
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


def decoded(mode: bool, reqs: list[Request], result: Any, brings: int) -> list[Step]:
    """What the clock notes of one processed batch."""
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: mode), reqs=reqs)

    def process(_scheduler: Any, batch: Any, _result: Any) -> None:
        for req in batch.reqs:
            if not req.finished():
                req.output_ids.extend([0] * brings)

    step_clock._steps.clear()
    step_clock._timed(process, None, batch, result)
    told = SimpleNamespace(internal_state={})
    step_clock._hand_out(told)
    return [Step(*row) for row in told.internal_state[step_clock.KEY]]


def test_whoever_reads_the_clock_takes_nothing_from_the_others() -> None:
    """SGLang's benchmark client reads /server_info as well, at the end of a cell."""
    first = decoded(True, [Request(9)], SimpleNamespace(cap_lens=None), 1)
    told = SimpleNamespace(internal_state={})
    step_clock._hand_out(told)
    again = [Step(*row) for row in told.internal_state[step_clock.KEY]]
    assert again == first
    later = [*again, Step(again[-1].seconds + 1, 1, 1, 1, 1)]
    assert step_clock.since(again, later) == later[-1:]
    assert step_clock.since([], later) == later


def test_the_clock_counts_what_reached_the_requests() -> None:
    stock = SimpleNamespace(speculative_num_draft_tokens=4, cap_lens=None)
    (step,) = decoded(True, [Request(9), Request(0)], stock, 3)
    assert step[1:] == (2, 1, 3, 8)


def test_the_clock_counts_the_rows_that_a_gate_chose() -> None:
    gated = SimpleNamespace(speculative_num_draft_tokens=8, cap_lens=torch.tensor([3, 1]))
    (step,) = decoded(True, [Request(9), Request(9)], gated, 1)
    assert step[1:] == (2, 2, 2, 4)


def test_without_speculation_a_request_is_one_row() -> None:
    (step,) = decoded(True, [Request(9)], SimpleNamespace(speculative_num_draft_tokens=None), 1)
    assert step[1:] == (1, 1, 1, 1)


def test_a_prefill_breaks_the_row_of_steps() -> None:
    (step,) = decoded(False, [Request(9)], SimpleNamespace(), 1)
    assert step[1:] == (0, 0, 0, 0)


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
    import tomllib

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


def test_model_folders_hold_what_sglang_needs_to_draw_weights(tmp_path: Path) -> None:
    for name, shape in models.SHAPES.items():
        pair = models.write(name, tmp_path)
        target, draft = (json.loads((path / "config.json").read_text()) for path in pair)
        assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
        assert draft["vocab_size"] == target["vocab_size"] > draft["draft_vocab_size"]
        assert draft["hidden_size"] == target["hidden_size"]
        assert shape.num_attention_heads * shape.head_dim == shape.hidden_size
        assert target["eos_token_id"] < target["vocab_size"]
    with pytest.raises(ValueError, match="no model shape 9b; there are 8b, 1b, toy"):
        models.write("9b", tmp_path)


# -- floors -------------------------------------------------------------------------------


def test_the_shape_of_llama_8b_has_its_weights() -> None:
    shape = models.SHAPES["8b"]
    assert shape.target_weights == pytest.approx(7.5e9, rel=0.01)  # 8.03 less the embedding
    assert shape.num_hidden_layers * shape.layer_kv_bytes == 131072
    assert models.SHAPES["1b"].target_weights == pytest.approx(1.24e9, rel=0.01)


def test_a_small_batch_is_bound_by_bytes_and_a_large_one_by_arithmetic() -> None:
    shape = models.SHAPES["8b"]
    one = roofline.forward(shape, rows=1, batch=1, context=0)
    assert one.seconds(CEILINGS) == pytest.approx(2 * shape.target_weights / 4e12)
    many = roofline.forward(shape, rows=2048, batch=256, context=0)
    assert many.seconds(CEILINGS) == pytest.approx(2 * 2048 * shape.target_weights / 8e14)


def test_a_step_without_speculation_has_no_draft() -> None:
    shape = models.SHAPES["8b"]
    floor = roofline.step_floor(shape, CEILINGS, rows=8, batch=8, context=200, num_steps=0)
    assert floor.draft == 0
    assert floor.total == floor.verify


@given(st.integers(1, 256), st.integers(1, 7), st.integers(0, 4000))
def test_more_rows_drafts_or_context_never_lower_the_floor(
    batch: int, num_steps: int, context: int
) -> None:
    shape = models.SHAPES["1b"]

    def floor(rows: int, drafts: int, tokens: int) -> float:
        return roofline.step_floor(
            shape, CEILINGS, rows=rows, batch=batch, context=tokens, num_steps=drafts
        ).total

    here = floor(batch, num_steps, context)
    assert here <= floor(batch + 1, num_steps, context)
    assert here <= floor(batch, num_steps + 1, context)
    assert here <= floor(batch, num_steps, context + 1)


def test_floors_of_the_parts_by_hand() -> None:
    assert microbench.gate_bytes(2, 100) == 2 * (200 + 16 + 20 + 1)
    assert microbench.pack_bytes(10) == 440  # as its docstring says: 44 a row
    assert microbench.scatter_bytes(2, 4, 3, 10) == (3 + 8) * 10 * 4
    assert microbench.kv_indices_bytes(2, 100, 6) == 8 * 206
    assert microbench.mask_bytes(1, 3, 2) == 2 * 8 + 2  # the docstring's mask of two bytes
    assert microbench.mask_bytes(1, 0, 65) == 65 * 16 + 529


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


def test_the_readme_names_every_module_and_stage() -> None:
    folder = Path(plugins.__file__).parent
    text = (folder / "README.md").read_text()
    for path in folder.glob("*.py"):
        assert path.stem == "__init__" or f"`{path.name}`" in text, path.name
    script = (folder / "session.sh").read_text()
    stages = re.findall(r"^  (\w+)\)$", script, re.MULTILINE)
    assert stages
    for stage in stages:
        assert f"session.sh {stage}" in text, stage
    assert f"stages: {' '.join(stages)}" in script
