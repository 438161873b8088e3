"""Windows, sinks, keys kept in another dtype, and pages: the same tokens as without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.prompts import demo_mix
from eval.server import TARGET, Launch, Server, running, speculative_flags
from sglang_c2t.offline.client import greedy
from tests.e2e import breadth_models
from tests.e2e.conftest import REPOSITORY, replace_text, switchable_flags
from tests.e2e.mixed_load import (
    FLAGS,
    PROMPTS,
    RETRACTING,
    LosslessnessSuite,
    assert_keys_of_a_prompt,
)

CONCURRENCY = 8

#: Of all lengths; the last prompt is many windows, and several pages, long.
BODIES = [
    greedy(prompt.text, (7, 40, 24, 1, 33, 2)[n % 6]) for n, prompt in enumerate(demo_mix(16))
] + [greedy(" ".join(prompt.text for prompt in demo_mix(6, seed=1)), 40)]

STEPS = 4
TREES = {"topk": 3, "num_draft_tokens": 10}


pytestmark = pytest.mark.extended


@dataclass(frozen=True)
class Family:
    """A target, and how it is drafted for."""

    name: str
    model: Path
    flags: tuple[str, ...]
    alone: Server
    """Without speculation."""
    suite: LosslessnessSuite

    def launch(self, kind: str, *flags: str, **shape: int) -> Launch:
        """A server that drafts."""
        draft = speculative_flags("STANDALONE", STEPS, draft=self.model.parent / "draft", **shape)
        every = (*draft, *self.flags, *flags)
        return Launch(f"breadth-{self.name}-{kind}", every, self.model, DRAFTING)


PYTHONPATH = {"PYTHONPATH": str(REPOSITORY)}
DRAFTING = {**PYTHONPATH, **RETRACTING}

TOKENIZER = AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module", params=sorted(breadth_models.MODELS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, logs: Path
) -> Iterator[Family]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    breadth_models.save(name, folder)
    flags, model = (*breadth_models.FLAGS[name], *FLAGS), folder / "target"
    with running(Launch(f"breadth-{name}", flags, model, PYTHONPATH), logs) as alone:
        yield Family(name, model, flags, alone, LosslessnessSuite.of(alone, BODIES, PROMPTS))


@torch.inference_mode()
def test_without_speculation_tokens_are_those_of_transformers(family: Family) -> None:
    """Windows and sinks of the CPU engine's attention, versus transformers'."""
    model = AutoModelForCausalLM.from_pretrained(
        family.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for body, answer in zip(BODIES, family.suite.wanted[0].answers, strict=True):
        prompt = TOKENIZER(body["text"])["input_ids"]
        said = list(answer.output_ids)
        chosen = model(torch.tensor([[*prompt, *said]])).logits[0].argmax(dim=-1)
        assert chosen[len(prompt) - 1 : -1].tolist() == said


def test_windows_do_not_change_what_chains_cut_at_random_give(family: Family, logs: Path) -> None:
    """Packed rows of requests whose first keys have long left the window."""
    control = logs / f"gate-{family.name}"
    launch = family.launch("gated", *switchable_flags(control, logs))
    with running(launch, logs) as server:
        replace_text(control, "random")
        family.suite.run(server, CONCURRENCY)
    assert "ragged verification of chains" in server.log.read_text()


def test_planned_trees_behind_windows_keep_the_keys_of_a_prompt(family: Family, logs: Path) -> None:
    """The same tokens; and what a verification has kept of a token is what a prefill keeps."""
    with running(family.launch("trees", "--c2t", **TREES), logs) as server:
        family.suite.run(server, CONCURRENCY)
        assert server.c2t_state()["planner"]["steps"] > 10
        assert_keys_of_a_prompt(server, family.alone, TARGET)
    assert "packed verification of trees" in server.log.read_text()


#: Options that SGLang's CPU engine has without Intel AMX.
KEPT_OTHERWISE = {"keys-bf16": ("--kv-cache-dtype", "bf16"), "pages-16": ("--page-size", "16")}


@pytest.mark.parametrize("name", sorted(KEPT_OTHERWISE))
def test_the_tokens_are_the_same_however_keys_are_kept(name: str, logs: Path) -> None:
    """In a narrower dtype than the model's, and in pages of many tokens; chains cut at random."""
    control, flags = logs / f"gate-{name}", (*KEPT_OTHERWISE[name], *FLAGS)
    with running(Launch(f"breadth-{name}", flags, TARGET, PYTHONPATH), logs) as alone:
        suite = LosslessnessSuite.of(alone, BODIES, PROMPTS)
    every = (*speculative_flags("EAGLE3", STEPS), *flags, *switchable_flags(control, logs))
    with running(Launch(f"breadth-{name}-gated", every, TARGET, DRAFTING), logs) as server:
        for mode in ("c2t", "random"):
            replace_text(control, mode)
            suite.run(server, CONCURRENCY)
    assert "ragged verification of chains" in server.log.read_text()
