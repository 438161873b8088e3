"""The parts of a decode step that py-spy's stacks are assigned to."""

from __future__ import annotations

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from eval.waterfall import PARTS, SCHEDULER, TARGET, part_of, parts, table

REPOSITORY = Path(__file__).parents[2]
OURS = REPOSITORY / "sglang_c2t"

LOOP = "<module> (<string>:1);Scheduler.event_loop_normal (scheduler.py:2048)"
BATCH = f"{LOOP};EAGLEWorkerV2.forward_batch_generation (eagle_worker_v2.py:1480)"
FORWARD = "ModelRunner.forward (model_runner.py:1860);linear (sglang_c2t/cpu/linear.py:53)"
VERIFY = f"{BATCH};EAGLEWorkerV2.verify (eagle_worker_v2.py:1980)"
DRAFT = f"{BATCH};EagleDraftWorker.draft (eagle_worker_v2.py:714)"
EXTEND = f"{BATCH};EagleDraftWorker._draft_extend_for_decode (eagle_worker_v2.py:1211)"


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        (f"{VERIFY};{FORWARD}", TARGET),
        (f"{LOOP};{FORWARD};EagerRunner._execute_decode (runner/eager_runner.py:268)", TARGET),
        (f"{LOOP};{FORWARD};EagerRunner._execute_extend (runner/eager_runner.py:361)", "prefill"),
        (f"{BATCH};EAGLEWorkerV2._forward_prefill_batch (e.py:1);{FORWARD}", "prefill"),
        (f"{DRAFT};EagleDraftWorker.draft_forward (e.py:847);{FORWARD}", "draft layers"),
        (f"{EXTEND};{FORWARD}", "draft extend"),
        (f"{EXTEND};Gate._relay (sglang_c2t/draft/gate.py:192)", "gate"),
        (f"{DRAFT};Planning.begin (sglang_c2t/srt/draft/planning.py:223)", "planning"),
        (f"{DRAFT};build_tree (organize.py:62)", "before and after draft layers"),
        (f"{VERIFY};accept_paths (sglang_c2t/kernels/rows.py:74)", "packing, acceptance"),
        (f"{LOOP};Scheduler.process_batch_result (scheduler.py:5092)", SCHEDULER),
        ("<module> (<string>:1);Thread._bootstrap (threading.py:1002)", None),
    ],
)
def test_waterfall_assigns_each_stack_to_the_part_whose_code_runs(stack, part) -> None:
    assert part_of(stack) == part


def test_waterfall_reads_functions_that_sglang_and_this_package_define() -> None:
    """A function that has another name in the next SGLang would leave its part empty."""
    functions = {
        name
        for _, patterns in PARTS
        for pattern in patterns
        if "/" not in pattern
        for name in re.findall(r"\w+", pattern.replace(r"\b", ""))
    }
    srt = Path(find_spec("sglang").origin).parent / "srt"
    folders = *(srt / name for name in ("managers", "speculative", "model_executor")), OURS
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for name in functions:
        assert re.search(rf"(def|class) \w*{name}", source), name
    for pattern in (pattern for _, patterns in PARTS for pattern in patterns if "/" in pattern):
        head, _, several = pattern.removesuffix(")").partition("(")
        for path in several.split("|") if several else pattern.split("|"):
            at = REPOSITORY / (head + path if several else path)
            assert at.is_dir() or list(at.parent.glob(f"{at.name}*.py")), path


def test_waterfall_gives_each_part_per_100_of_the_targets_forward() -> None:
    stacks = [f"{VERIFY};{FORWARD} 50", f"{EXTEND};{FORWARD} 5", f"{LOOP};idle (x.py:1) 2"]
    assert parts(stacks) == Counter({TARGET: 50, "draft extend": 5, SCHEDULER: 2})
    console = Console(width=100, record=True)
    console.print(table({"--c2t, 8": parts(stacks)}))
    shown = console.export_text()
    assert re.search(r"draft extend\s+10\.0", shown)
    assert re.search(r"step\s+114\.0", shown)
