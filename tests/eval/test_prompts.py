"""The demo prompts: the same every time, and never what the models or a classifier trained on."""

import subprocess
import sys
import zlib

import pytest

from eval.demo_models.corpus import FAMILIES, generate, split_of
from eval.prompts import classifier_mix, demo_mix


def test_the_same_arguments_give_the_same_prompts():
    """Also across processes: nothing may hang on the interpreter's hash seed."""
    code = "from eval.prompts import demo_mix; print([p.text for p in demo_mix(9, seed=5)])"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == f"{[p.text for p in demo_mix(9, seed=5)]}\n"


def test_documents_are_those_that_the_shipped_models_learnt_from():
    made = [generate(family, "train", str(i)) for family in FAMILIES for i in range(100)]
    assert zlib.crc32("".join(d.prompt + d.answer for d in made).encode()) == 2503512462


def test_families_take_turns_and_a_longer_mix_starts_with_the_shorter_one():
    for n in (0, 1, 2, 3, 10):
        expected = [FAMILIES[i % 3] for i in range(n)]
        assert [p.family for p in demo_mix(n)] == expected
        assert [p.family for p in classifier_mix(n)] == expected
        assert demo_mix(30)[:n] == demo_mix(n)


def test_measured_recorded_and_trained_prompts_do_not_meet():
    """Exact, for any number of prompts: the checksum that names a prompt's split sees the text."""
    measured = {p.text for seed in range(3) for p in demo_mix(300, seed)}
    recorded = {p.text for seed in range(3) for p in classifier_mix(300, seed)}
    trained = {generate(f, "train", str(i)).prompt for f in FAMILIES for i in range(3000)}
    assert len(measured) == len(recorded) == 900, "a mix repeats itself"
    assert {split_of(text) for text in measured} == {"demo"}
    assert {split_of(text) for text in recorded} == {"classifier"}
    assert {split_of(text) for text in trained} == {"train"}
    assert not measured & recorded
    assert not (measured | recorded) & trained


def test_prompts_are_short_and_end_where_an_answer_starts():
    ends = {"math": "\nAnswer:", "code": "\nCode:\n", "chat": "\nAssistant:"}
    for prompt in demo_mix(300):
        assert 40 < len(prompt.text) < 600, prompt
        assert prompt.text.endswith(ends[prompt.family]), prompt


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="n must be"):
        demo_mix(-1)
    with pytest.raises(ValueError, match="family must be"):
        generate("poetry", "train", "0")
    with pytest.raises(ValueError, match="split must be"):
        generate("math", "test", "0")


def test_prompts_need_no_torch():
    """A benchmark client must start in a moment and on a machine without torch."""
    code = "import sys, eval.prompts; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
