"""A ``--c2t`` server that verifies trees gives what the server without speculation gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from eval.prompts import demo_mix
from eval.server import TARGET, Server, running
from sglang_c2t.offline.client import Answer, LoadResult, differing, greedy, run_load
from tests.e2e.conftest import (
    BODIES,
    CONCURRENCY,
    CONSTRAINED_BODIES,
    LOGPROB_BODIES,
    TREE,
    GatedServer,
    assert_same_logprobs,
    notes_of,
    replace_text,
    run_beside_aborts,
    tree_launch,
    verified,
    verified_rows_reported,
)
from tests.e2e.server_policies import FAILS
from tests.e2e.witness import WATCHED

N = TREE["num_draft_tokens"]
MODES = {
    "full": "full",
    "none": "none",
    "random": "random",
    FAILS: FAILS,
    "c2t": '{"policy": "c2t"}',
    "c2t-eagle2": '{"policy": "c2t-eagle2"}',
    "fork": '{"policy": "eval.baselines:Fork"}',
    "entropy-width": '{"policy": "eval.baselines:EntropyWidth"}',
    "static": '{"policy": "eval.baselines:StaticTree"}',
}
ON_EACH_DRAFT = {
    "EAGLE3": tuple(MODES),
    "EAGLE": ("full", "random", "c2t"),
    "STANDALONE": ("random", "c2t-eagle2"),
}
"""Every policy on one draft kind, the most different ones on the others."""


@dataclass(frozen=True)
class Served:
    """All of BODIES under one policy, and what the server counted meanwhile."""

    result: LoadResult
    rows: int  # of the target's verify forwards
    attention_rows: int  # that reached its attention in them
    forwards: int


@dataclass(frozen=True)
class Runs:
    """One run per mode, shared by the tests that look at different sides of it."""

    gated: GatedServer
    done: dict[str, Served] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Served]]:
        for mode in ON_EACH_DRAFT[self.gated.algorithm]:
            if mode not in self.done:
                self.done[mode] = served(self.gated, MODES[mode])
            yield mode, self.done[mode]


def served(
    gated: GatedServer,
    mode: str,
    bodies: list[dict[str, Any]] = BODIES,
    concurrency: int = CONCURRENCY,
) -> Served:
    """Serve ``bodies`` in ``mode`` and read the counters around it."""
    before = gated.server.c2t_state()
    result = gated.run(mode, bodies, concurrency)
    after = gated.server.c2t_state()
    rows, forwards = (
        after["counters"][name] - before["counters"][name]
        for name in ("verify_rows", "verify_forwards")
    )
    attention = after["attention_verify_rows"] - before["attention_verify_rows"]
    return Served(result, rows, attention, forwards)


@pytest.fixture(scope="module")
def runs(trees: GatedServer) -> Runs:
    return Runs(trees)


def sizes(answers: list[Answer]) -> list[int]:
    """How many trees of each size these requests verified."""
    found = [0] * (N + 1)
    for answer in filter(verified, answers):
        for size, count in enumerate(answer.meta_info["spec_cap_lens_histogram"]):
            found[size] += count
    return found


# -- the same tokens ----------------------------------------------------------------------


def test_greedy_outputs_equal_those_without_speculation(
    runs: Runs, expected: list[tuple[int, ...]]
) -> None:
    """16 at a time, of different lengths, so that requests leave and join at every step."""
    for mode, run in runs:
        assert differing(run.result.outputs, expected) == [], mode


@pytest.mark.parametrize(("mode", "concurrency"), [("full", 1), ("random", 32)])
def test_outputs_do_not_depend_on_the_size_of_the_batch(
    trees: GatedServer, expected: list[tuple[int, ...]], mode: str, concurrency: int
) -> None:
    count = 8 if concurrency == 1 else len(BODIES)
    result = trees.run(mode, BODIES[-count:], concurrency)
    assert differing(result.outputs, expected[-count:]) == []


def test_the_target_forwards_the_nodes_of_the_trees_and_nothing_else(runs: Runs) -> None:
    """Rows counted in attention, in the model's forward, and reported per request agree."""
    for mode, run in runs:
        reported = verified_rows_reported(run.result.answers)
        assert run.rows == run.attention_rows == reported > 0, mode


def test_trees_have_the_sizes_that_their_policy_gives_them(runs: Runs) -> None:
    """Otherwise the equalities above would prove little about trees of different size."""
    fixed = {"full": N, "none": 1, "fork": 1 + TREE["topk"] * TREE["num_steps"], "static": 26}
    for mode, run in runs:
        found = sizes(run.result.answers)
        seen = {size for size, count in enumerate(found) if count}
        if mode in fixed:
            assert seen == {fixed[mode]}, mode
        else:
            assert len(seen) >= 8, (mode, found)


@pytest.mark.parametrize("mode", ["random", "c2t"])
def test_trees_of_one_forward_differ_in_size(trees: GatedServer, mode: str) -> None:
    with Notes(trees) as folder:
        trees.run(MODES[mode], BODIES[:24])
        forwards = verified_sizes(folder)
    mixed = [batch for batch in forwards if len(set(batch)) >= 3]
    assert len(mixed) > len(forwards) / 4, forwards


def test_no_draft_forward_runs_when_every_tree_is_its_root(trees: GatedServer) -> None:
    before = trees.server.c2t_state()["counters"]
    trees.run("none", BODIES[:12])
    after = trees.server.c2t_state()["counters"]
    assert after["draft_forwards"] == before["draft_forwards"]
    assert after["draft_forwards_skipped"] > before["draft_forwards_skipped"]


def test_trees_are_really_walked(runs: Runs) -> None:
    """Of a random tree more than one draft is accepted per verification, as often as not."""
    answers = [a for a in dict(runs)["random"].result.answers if verified(a)]
    drafts = sum(a.meta_info["spec_num_correct_drafts"] for a in answers)
    assert drafts > sum(a.meta_info["spec_verify_ct"] for a in answers) / 2


def test_aborted_requests_leave_the_others_untouched(
    trees: GatedServer, expected: list[tuple[int, ...]]
) -> None:
    """Requests that join, are aborted or lose their client, among ones that are checked."""
    replace_text(trees.control, "random")
    assert differing(run_beside_aborts(trees.server).outputs, expected) == []


# -- the same log-probabilities, constraints, KV ------------------------------------------


def test_log_probabilities_equal_those_of_plain_decoding(trees: GatedServer, plain: Server) -> None:
    plain.flush_cache()
    wanted = run_load(plain.url, LOGPROB_BODIES, concurrency=8)
    assert_same_logprobs(trees.run("random", LOGPROB_BODIES), wanted)


def test_constrained_and_free_requests_share_a_batch(trees: GatedServer, plain: Server) -> None:
    """Each row of a tree has its own mask, that of the path to it."""
    plain.flush_cache()
    wanted = run_load(plain.url, CONSTRAINED_BODIES, concurrency=4)
    assert differing(trees.run("random", CONSTRAINED_BODIES, 12).outputs, wanted.outputs) == []


def test_biases_and_penalties_reach_every_row(trees: GatedServer) -> None:
    """A forced token wins at each position, at accepted nodes as at the bonus.

    Penalties are SGLang's relaxed ones, one state per verification, so only a forced outcome
    can be told in advance.
    """
    forced = greedy(demo_mix(1)[0].text, 20)
    forced["sampling_params"].update(logit_bias={"77": 1e4}, ignore_eos=True)
    penalised = greedy(demo_mix(1)[0].text, 30)
    penalised["sampling_params"].update(
        frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3, ignore_eos=True
    )
    free = BODIES[2:6]
    result = trees.run("random", [forced, penalised, *free, forced, penalised])
    for i in (0, -2):
        assert result.outputs[i] == (77,) * 20
    for i in (1, -1):
        assert len(result.outputs[i]) == 30
    assert differing(result.outputs[2:-2], trees.run("full", free, 1).outputs) == []


def test_the_kv_of_every_accepted_token_is_that_of_a_plain_prefill(trees: GatedServer) -> None:
    """After each verification, in all layers: prompt, and the paths that were moved."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in demo_mix(4, seed=6)]
    moved = 0
    for mode in ("full", "random"):
        bodies = [tokens(ids, 24, f"{WATCHED}{i}") for i, ids in enumerate(prompts)]
        with Notes(trees) as folder:
            outputs = trees.run(mode, bodies).outputs
            whole = [[*ids, *out] for ids, out in zip(prompts, outputs, strict=True)]
            trees.run("none", [tokens(ids, 1, f"{WATCHED}all-{i}") for i, ids in enumerate(whole)])
            for i, (ids, every) in enumerate(zip(prompts, whole, strict=True)):
                wanted = torch.load(folder / f"{WATCHED}all-{i}.{len(every)}.pt")
                steps = {int(path.suffixes[0][1:]): torch.load(path)
                         for path in folder.glob(f"{WATCHED}{i}.*.pt")}  # fmt: skip
                lengths = sorted(steps)
                assert lengths[0] == len(ids)  # the prefill
                # The last path may reach beyond what the request asked for.
                for length in lengths[:-1]:
                    assert steps[length].shape[1] == length
                    torch.testing.assert_close(
                        steps[length], wanted[:, :length], atol=2e-4, rtol=1e-3
                    )
                moved += sum(after - before > 2 for before, after in pairwise(lengths))
    assert moved >= 10, "hardly a path was long enough to be moved"


def tokens(ids: list[int], max_new_tokens: int, rid: str) -> dict[str, Any]:
    """A greedy body on token ids that runs to its end."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "rid": rid, "sampling_params": params}


class Notes:
    """The server writes down what it verifies, see :class:`tests.e2e.witness.Witness`."""

    def __init__(self, gated: GatedServer) -> None:
        self._folder = notes_of(gated.control)

    def __enter__(self) -> Path:
        self._folder.mkdir()
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def verified_sizes(folder: Path) -> list[list[int]]:
    """Sizes of the trees of each forward."""
    return [json.loads(line) for line in (folder / "sizes.jsonl").read_text().splitlines()]


# -- other ways to verify: a server for each --------------------------------------------


@pytest.mark.parametrize("trees", ["EAGLE"], indirect=True)
def test_padded_verification_is_packed_verification_token_for_token(
    trees: GatedServer, expected: list[tuple[int, ...]], logs: Path
) -> None:
    """``--c2t-verify static``: the same outputs at full width and, one request at a time,
    the same verifications and accepted drafts.
    """
    launch, control = tree_launch("padded", logs, "--c2t-verify", "static", algorithm="EAGLE")
    with running(launch, logs) as server:
        padded = GatedServer(server, "EAGLE", control)
        for mode in ("random", "none"):
            run = served(padded, mode)
            assert differing(run.result.outputs, expected) == []
            verifications = sum(a.meta_info.get("spec_verify_ct", 0) for a in run.result.answers)
            assert run.rows == run.attention_rows == N * verifications > 0
        for mode in ("c2t", "entropy-width"):
            ours = padded.run(MODES[mode], BODIES[:12], 1)
            theirs = trees.run(MODES[mode], BODIES[:12], 1)
            assert differing(ours.outputs, theirs.outputs) == []
            for one, other in zip(ours.answers, theirs.answers, strict=True):
                for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_accept_histogram"):
                    assert one.meta_info.get(name) == other.meta_info.get(name), (mode, name)


def test_no_forward_exceeds_the_budget_of_the_batch_and_outputs_stay(
    logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """16 requests share 40 rows; alone, a request has its whole tree."""
    budget = 40
    launch, control = tree_launch("budgeted", logs, "--c2t-max-verify-rows", str(budget))
    with running(launch, logs) as server:
        assert "exact ancestors" in server.log.read_text()
        gated = GatedServer(server, "EAGLE3", control)
        for mode in ("full", "random"):
            with Notes(gated) as folder:
                run = served(gated, mode)
                forwards = verified_sizes(folder)
            assert differing(run.result.outputs, expected) == []
            assert run.rows == sum(map(sum, forwards)) == run.attention_rows
            assert run.forwards == len(forwards)
            assert all(sum(batch) <= max(budget, len(batch)) for batch in forwards)
            if mode == "full":  # else the budget need not bite
                assert all(sum(batch) == min(budget, N * len(batch)) for batch in forwards)


def test_retracted_requests_give_the_same_outputs_and_leak_nothing(
    logs: Path, expected: list[tuple[int, ...]]
) -> None:
    """A pool for a few requests at once, and a retraction every third step; SGLang's strict
    memory check ends the server on a leak.
    """
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    pool = ("--max-total-tokens", "2600")
    launch, control = tree_launch("retract", logs, *pool, env=env)
    with running(launch, logs) as server:
        result = GatedServer(server, "EAGLE3", control).run("random")
        assert sum(answer.meta_info["num_retractions"] for answer in result.answers) > 0
        assert differing(result.outputs, expected) == []
        server.flush_cache()  # an idle server checks its memory
        assert server.process.poll() is None
        assert server.generate(**greedy("A", 4))["meta_info"]["completion_tokens"] > 0
