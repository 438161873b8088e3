"""Every speculative flag left out, alone and together: a served shape, or the missing flags.

The launcher's own parsing and resolution run in this process, and the worker is chosen from what
they leave, as a scheduler does. It also runs beside the oldest SGLang served (`make parity-old`).
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.server import DRAFTS
from sglang_c2t import config
from sglang_c2t.srt import compat
from sglang_c2t.srt.hooks.resolution import SHAPE_FLAGS
from tests.srt.hooks.test_refusals import launch, plugin, refusal

__all__ = ["plugin"]  # a fixture that applies to this module too

CHAIN, TREE = ("3", "1", "4"), ("3", "4", "16")
GIVEN = sorted(
    {
        tuple(value if kept else None for value, kept in zip(shape, mask, strict=True))
        for shape in (CHAIN, TREE)
        for mask in itertools.product((True, False), repeat=3)
    },
    key=str,
)


@pytest.fixture(autouse=True)
def _no_published_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, "")


def expected_shape(algorithm: str, given: tuple[str | None, ...]) -> tuple[int, int, int] | None:
    """Steps, topk and draft tokens served for a demo target (Llama); ``None``: a refusal."""
    steps, topk, tokens = given
    if given == (None, None, None):
        return (3, 1, 4) if algorithm == "STANDALONE" else (5, 1, 6)  # SGLang: (5, 4, 8)
    if steps and topk and tokens:
        return int(steps), int(topk), int(tokens)
    if steps and topk == "1":
        return int(steps), 1, int(steps) + 1
    return None


def typed_as(form: str, folder: Path, values: dict[str, Any]) -> list[str]:
    """The same arguments as flags, or as a file of SGLang's ``--config``."""
    if form == "flags":
        return [part for flag, value in values.items() for part in _as_flag(flag, value)]
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump({flag.removeprefix("--"): v for flag, v in values.items()}))
    return ["--config", str(path)]


def _as_flag(flag: str, value: Any) -> list[str]:
    return [flag] if value is True else [flag, str(value)]


@pytest.mark.parametrize("form", ["flags", "file"])
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "-".join(str(v) for v in given))
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"])
def test_launch_with_flags_left_out_is_served_or_names_the_missing_ones(
    capsys, tmp_path: Path, algorithm: str, given: tuple[str | None, ...], form: str
) -> None:
    shape = {
        flag: int(value)
        for flag, value in zip(SHAPE_FLAGS, given, strict=True)
        if value is not None
    }
    draft = DRAFTS["EAGLE" if algorithm == "NEXTN" else algorithm]
    values = {
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": str(draft),
        **shape,
        "--c2t": True,
    }
    flags = typed_as(form, tmp_path, values)
    expected = expected_shape(algorithm, given)
    if expected is None:
        sentence = refusal(capsys, *flags)
        assert "--c2t does not serve" in sentence
        order = sentence.partition("; add ")[2]
        assert order, sentence
        for flag in SHAPE_FLAGS:
            assert (flag in order) == (flag not in shape), sentence
        return
    served: Any = launch(*flags)
    assert tuple(compat.draft_shape(served)[i] for i in (1, 0, 2)) == expected
    standalone = algorithm == "STANDALONE"
    name = "C2TStandaloneWorker" if standalone else "C2TEagleWorker"
    assert worker_of(served).__name__ == name


def test_server_arguments_are_read_resolved() -> None:
    """``ServerArgs`` itself does not hold SGLang's choice for a flag that was left out."""
    raw = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in sorted(Path(compat.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).endswith("server_args")
        and node.attr != "use_mla_backend"  # a method of older SGLang's
    ]
    assert raw == []


def worker_of(server_args: Any) -> type:
    """The worker that a scheduler makes with these arguments."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    name = compat.argument(server_args, "speculative_algorithm")
    made = SpeculativeAlgorithm.from_string(name).create_worker(server_args)
    assert made is not None
    return made


@pytest.mark.parametrize("left_out", ["--speculative-algorithm", "--speculative-draft-model-path"])
def test_launch_without_algorithm_or_draft_names_the_flag(capsys, left_out: str) -> None:
    flags = {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(DRAFTS["EAGLE3"]),
    }
    del flags[left_out]
    typed = [part for flag, value in flags.items() for part in (flag, value)]
    assert f"add {left_out}" in refusal(capsys, *typed, "--c2t")


def test_launch_in_pages_with_no_shape_given_drafts_chains(capsys) -> None:
    """SGLang's own choice, trees, would end it."""
    draft = ["--speculative-draft-model-path", str(DRAFTS["EAGLE3"])]
    served = launch("--speculative-algorithm", "eagle3", *draft, "--page-size", "16", "--c2t")
    assert tuple(compat.draft_shape(served)) == (1, 5, 6)
    assert "drafts chains of 5 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("flag", SHAPE_FLAGS)
def test_launch_with_a_shape_below_one_names_the_flag(capsys, flag: str, value: str) -> None:
    shape = dict(zip(SHAPE_FLAGS, TREE, strict=True)) | {flag: value}
    draft = str(DRAFTS["EAGLE3"])
    typed = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    typed += [part for pair in shape.items() for part in pair]
    sentence = refusal(capsys, *typed, "--c2t")
    assert "--c2t does not serve" in sentence
    assert flag in sentence
