"""Whether the suite would find what it looks for: altered answers are defects, ties are ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.lossless import diverge, greedy, seeded
from eval.lossless.__main__ import FULL
from eval.lossless.diverge import Divergence, Led, Noise, Output, Score, compare, judged, parting
from eval.lossless.workload import LONG_PROMPT, LONGEST_ANSWER, SORTS, Asked, mixed
from eval.metrics import SpecTotals
from sglang_c2t.offline.client import run_load
from tests.eval.fake_server import Choose, fake_server, likeliest
from tests.tiny_llama import VOCAB, tiny_llama

REQUEST = Asked(3, "ordinary", {"input_ids": [1, 2], "sampling_params": {}})
PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + i % 4)] for i in range(24)]
NOISE = Noise(largest=0.1, median=0.01, places=1000)


# -- where answers part ---------------------------------------------------------------------


def test_answers_part_at_their_first_difference_or_where_the_shorter_ends() -> None:
    assert parting((1, 2, 3), (1, 2, 3)) is None
    assert parting((1, 2, 3), (1, 4, 3)) == 1
    assert parting((1, 2, 3), (1, 2)) == 2
    assert parting((), (5,)) == 0


def test_a_divergence_knows_the_context_of_the_token_that_differs() -> None:
    found = compare(REQUEST, Output((4, 5, 6)), Output((4, 7, 6)))
    assert found is not None
    assert (found.place, found.wanted, found.got) == (1, 5, 7)
    assert found.context == [1, 2, 4]
    assert found.verdict == "unclassified"


@pytest.mark.parametrize(
    "got",
    [
        Output((4,)),
        Output((4, 5, 6)),
        Output((4, 5), finish=("stop", 0)),
        Output((4, 5), text="another"),
    ],
    ids=["too short", "too long", "another reason to end", "another text"],
)
def test_what_no_rounding_can_explain_is_a_defect_at_once(got: Output) -> None:
    found = compare(REQUEST, Output((4, 5)), got)
    assert found is not None
    assert found.verdict == "defect"
    assert found.why


# -- defect or tie --------------------------------------------------------------------------


def divergence() -> Divergence:
    found = compare(REQUEST, Output((4,)), Output((5,)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("score", "verdict"),
    [
        (Score(best=-0.7, wanted=-0.7, got=-0.75), "tie"),
        (Score(best=-0.7, wanted=-0.85, got=-0.7), "tie"),
        (Score(best=-0.7, wanted=-0.7, got=-0.91), "defect"),
        # A third token is the likeliest by far: neither server should have taken its own.
        (Score(best=-0.1, wanted=-3.0, got=-3.0), "defect"),
    ],
)
def test_a_tie_is_a_lead_within_twice_the_measured_noise(score: Score, verdict: str) -> None:
    found = judged(divergence(), score, NOISE)
    assert found.verdict == verdict
    assert found.bound == pytest.approx(0.2)
    assert found.lead == pytest.approx(score.best - min(score.wanted, score.got))


def tied_llama() -> LlamaForCausalLM:
    """Tokens 2 and 5 are one to this model, in and out: it cannot prefer either."""
    model = tiny_llama(0)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        weight.data[5] = weight.data[2]
    return model


def the_other_of_a_tie(_prompt: list[int], _answer: list[int], log_probs: Tensor) -> int:
    """Token 5 where the likeliest is 2, which is as likely: what another rounding would do."""
    best = int(log_probs.argmax())
    return 5 if best == 2 else best


def altered(prompt: list[int], answer: list[int], log_probs: Tensor) -> int:
    """The second best token, at the third place of some answers."""
    third = len(answer) == 2 and sum(prompt) % 3 == 0
    return int(log_probs.topk(2).indices[1]) if third else int(log_probs.argmax())


def asked() -> list[Asked]:
    params = {"temperature": 0, "max_new_tokens": 12}
    bodies = [{"input_ids": prompt, "sampling_params": params} for prompt in PROMPTS]
    return [Asked(i, "ordinary", body) for i, body in enumerate(bodies)]


def found_by_the_suite(model: LlamaForCausalLM, choose: Choose) -> list[Divergence]:
    """All of ``asked()`` on a server that chooses so, compared, scored again and classified."""
    with fake_server(model) as plain, fake_server(model, choose) as other:
        expected = greedy.ask(plain, asked(), 8, lambda: None).outputs
        served = greedy.ask(other, asked(), 8, lambda: None)
        parted = greedy.wave("other", "c2t", 8, asked(), expected, served).divergences
        noise = diverge.rounding_noise(plain.url, diverge.leads(plain.url, PROMPTS, 12))
        return diverge.classify(parted, diverge.scores_of(plain.url, parted), noise)


def test_altered_outputs_are_found_and_called_defects() -> None:
    found = found_by_the_suite(tiny_llama(0), altered)
    hit = [i for i, prompt in enumerate(PROMPTS) if sum(prompt) % 3 == 0]
    assert [d.index for d in found] == hit
    assert {(d.place, d.verdict) for d in found} == {(2, "defect")}
    assert all(d.lead is not None and d.lead > 1e-3 for d in found)


def test_the_other_token_of_a_constructed_tie_is_called_a_tie() -> None:
    found = found_by_the_suite(tied_llama(), the_other_of_a_tie)
    assert found
    assert {(d.wanted, d.got, d.verdict) for d in found} == {(2, 5, "tie")}


def test_a_faithful_server_is_found_equal() -> None:
    assert found_by_the_suite(tiny_llama(0), likeliest) == []


def test_noise_is_how_far_served_leads_are_from_those_in_float32() -> None:
    """A served lead shifted by 0.05 nats at near ties is measured as such."""
    model = tiny_llama(0)
    with fake_server(model) as plain:
        served = diverge.leads(plain.url, PROMPTS, 12)
        exact = diverge.rounding_noise(plain.url, served)
        shifted = [replace(answer, top=tuple(map(shift, answer.top))) for answer in served]
        noise = diverge.rounding_noise(plain.url, shifted)
    assert exact.largest < 1e-5
    assert noise.largest == pytest.approx(0.05, abs=1e-5)
    assert 0 < noise.places <= exact.places <= 24 * 12


def shift(place: tuple[tuple[float, int], tuple[float, int]]) -> tuple[
    tuple[float, int], tuple[float, int]
]:  # fmt: skip
    (best, token), second = place
    return (best + 0.05, token), second


def test_noise_cannot_be_told_from_empty_answers() -> None:
    with fake_server(tiny_llama(0)) as plain, pytest.raises(ValueError, match="are empty"):
        diverge.rounding_noise(plain.url, [Led((1, 2), (), ())])


# -- what is asked --------------------------------------------------------------------------


def test_a_mixed_batch_holds_every_sort_and_lengths_up_to_the_longest() -> None:
    requests = mixed(PROMPTS, 20 * len(SORTS))
    assert {request.sort for request in requests} == set(SORTS)
    lengths = {r.body["sampling_params"]["max_new_tokens"] for r in requests}
    assert {1, LONGEST_ANSWER} <= lengths <= set(range(1, LONGEST_ANSWER + 1))
    by_sort = {request.sort: request for request in requests}
    assert len(by_sort["one-token prompt"].prompt_ids) == 1
    assert LONG_PROMPT // 2 <= len(by_sort["long prompt"].prompt_ids) <= LONG_PROMPT
    assert {s for s, r in by_sort.items() if r.constrained} == {"regex", "JSON schema"}


def test_a_mixed_batch_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert mixed(PROMPTS, 40, seed=1) == mixed(PROMPTS, 40, seed=1)
    assert mixed(PROMPTS, 40, seed=1) != mixed(PROMPTS, 40, seed=2)


@pytest.mark.parametrize("n", [1, 7, 100, 102])
def test_batch_sizes_share_all_requests_among_them(n: int) -> None:
    numbers = [number for _, part in greedy.dealt(n) for number in range(n)[part]]
    assert numbers == list(range(n))


@pytest.mark.parametrize(("n", "parts"), [(0, 3), (2, 3), (100, 7), (102, 6)])
def test_blocks_hold_all_requests_once_and_in_order(n: int, parts: int) -> None:
    found = greedy.blocks(n, parts)
    assert len(found) == parts
    assert [number for block in found for number in range(n)[block]] == list(range(n))


def test_the_largest_batch_of_a_full_run_is_full() -> None:
    """Six servers, up to six policies: more requests than run at once, so that some join."""
    for names in greedy.POLICIES.values():
        least = min(len(range(FULL[0] // 6)[b]) for b in greedy.blocks(FULL[0] // 6, len(names)))
        concurrency, part = greedy.dealt(least)[-1]
        assert concurrency == 64 < len(range(least)[part])


def test_a_wave_counts_tokens_and_drafts() -> None:
    served = greedy.Served([Output((1, 2)), Output((3,))], SpecTotals(2, 3, 4))
    requests = [REQUEST, replace(REQUEST, index=4)]
    told = greedy.wave("s", "c2t", 8, requests, [Output((1, 2)), Output((3,))], served)
    assert (told.requests, told.tokens, told.accept_length, told.gamma) == (2, 3, 2.5, 2.0)
    assert told.divergences == []


def test_a_lost_answer_is_an_error_not_an_equality() -> None:
    with pytest.raises(ValueError, match="shorter"):
        greedy.wave("s", "c2t", 8, [REQUEST], [Output((1,))], greedy.Served([], SpecTotals()))


# -- seeds ----------------------------------------------------------------------------------


def test_kinds_are_sent_alone_and_all_in_one_batch() -> None:
    """Of the mixed ones only greedy requests are promised; each is held against its own kind."""
    some = PROMPTS[:3]
    with fake_server(tiny_llama(0)) as server:
        expected = {
            kind: run_load(server.url, seeded.bodies(some, kind), concurrency=8).outputs
            for kind in seeded.KINDS
        }
        expected["top_p"] = [(99,)] * len(some)  # what a server says that draws otherwise
        runs = seeded.check(server, "s", some, expected, (16, 1), lambda: None)
    told = {(run.cut, run.concurrency): (len(run.differing), run.promised) for run in runs}
    few = seeded.num_asked(len(some), 1)
    assert told == {
        ("whole", 16): (0, True), ("whole", 1): (0, True),
        ("top_p", 16): (len(some), True), ("top_p", 1): (few, True),
        ("top_k", 16): (0, True), ("top_k", 1): (0, True),
        ("greedy, mixed", 16): (0, True), ("whole, mixed", 16): (0, False),
        ("top_p, mixed", 16): (len(some), False), ("top_k, mixed", 16): (0, False),
    }  # fmt: skip
    assert sum(run.requests for run in runs) == seeded.num_answers(len(some), (16, 1))
