"""Targets that see (M-RoPE), and requests that fill their context: the same tokens as without."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from eval.prompts import demo_mix
from eval.server import Launch, Server, running
from tests.e2e import vision_models
from tests.e2e.conftest import REPOSITORY
from tests.e2e.mixed_load import FLAGS, RETRACTING, LosslessnessSuite

CONTEXT = 160
CONCURRENCY = 6


@dataclass(frozen=True)
class SeeingLaunch(Launch):
    """SGLang's server, see ``vision_server.py``."""

    def argv(self, port: int) -> list[str]:
        """The command line."""
        argv = super().argv(port)
        argv[argv.index("sglang.launch_server")] = "tests.e2e.vision_server"
        return [*argv, "--context-length", str(CONTEXT)]


def picture(width: int, height: int, seed: int) -> str:
    """Noise, as a data URL."""
    noise = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def bodies() -> list[dict[str, Any]]:
    """A third without a picture, the others with one of several sizes; some run into the end of
    the context.
    """
    found = []
    for number, prompt in enumerate(demo_mix(12)):
        length = (7, None, 24, 1, 33, None)[number % 6]
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": length is None}
        body: dict[str, Any] = {"text": prompt.text, "sampling_params": sampling}
        if number % 3:
            size = 56 * (1 + number % 4), 56 * (1 + number % 3)
            body["text"] = vision_models.IMAGE + prompt.text
            body["image_data"] = [picture(*size, seed=number)]
        found.append(body)
    return found


BODIES = bodies()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    vision_models.save(folder)
    return folder


@pytest.fixture(scope="module")
def suite(models: Path, logs: Path) -> LosslessnessSuite:
    """The seeded requests see nothing."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in demo_mix(8, seed=11)]
    launch = SeeingLaunch("seeing-plain", FLAGS, models / "target", PYTHONPATH)
    with running(launch, logs) as server:
        found = LosslessnessSuite.of(server, BODIES, prompts)
    metas = [answer.meta_info for answer in found.wanted[0].answers]
    ends = [meta["prompt_tokens"] + meta["completion_tokens"] for meta in metas]
    assert sum(end >= CONTEXT - 2 for end in ends) >= 3, ends
    return found


PYTHONPATH = {"PYTHONPATH": str(REPOSITORY)}
DRAFTING = {**PYTHONPATH, **RETRACTING}

#: Twelve layers of trees with few rows: their windows are longer than SGLang leaves room for behind
#: the context.
TREES = (
    "--speculative-num-steps", "12", "--speculative-eagle-topk", "3",
    "--speculative-num-draft-tokens", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def seeing(
    models: Path, logs: Path,
    suite: LosslessnessSuite,  # so that its server has gone
) -> Iterator[Server]:  # fmt: skip
    flags = (
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(models / "draft"), *TREES, "--c2t", *FLAGS,
    )  # fmt: skip
    launch = SeeingLaunch("seeing-trees", flags, models / "target", DRAFTING)
    with running(launch, logs) as server:
        yield server


def test_outputs_equal_those_without_speculation_to_the_end_of_the_context(
    seeing: Server, suite: LosslessnessSuite
) -> None:
    """Pictures push the positions of the tokens behind them, in each request by another number.

    Requests that would not stop end at the context limit, beside others that go on.
    """
    suite.run(seeing, CONCURRENCY, victims=CONTEXT // 2)
