"""Traces: conversion, storage, tables, and the replay that a server runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.bench.replay import expected_steps
from eval.gpu import traces
from eval.gpu.microbench import POLICIES
from eval.gpu.trace_replay import (
    FILLER,
    LANE_SHIFT,
    MARK,
    MAX_SHIFTS,
    Replay,
    Settings,
    finish_dummy,
    lengths_of,
    prompt,
    replayed,
)
from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies.dymax import DyMax
from tests.recordings import chain, recording
from tests.refusals import refused

POSITIONS = 200


def answered(answers: dict[str, list[int]], depth: int) -> Recording:
    """Every root of these answers with a chain behind it, of which so many drafts are accepted."""
    drafts = [
        chain([0.9] * depth, [int(level < n) for level in range(depth)], request=rid, position=root)
        for rid, correct in answers.items()
        for root, n in enumerate(correct)
    ]
    return recording(drafts, roots="every")


def made(correct: list[list[int]], depth: int = 3) -> traces.Traces:
    """Traces with these accepted drafts, one list each."""
    answers = {f"made/{i}": one for i, one in enumerate(correct)}
    provenance = {"origins": [], "groups": {}, "num_traces": len(correct), "depth": depth}
    return traces.Traces(Chains.from_recording(answered(answers, depth)), provenance)


def test_a_conversion_takes_turns_between_groups_and_cuts_chains() -> None:
    lengths = {"a/0": 40, "a/1": 41, "a/2": 42, "b/0": 43, "c/0": 5}
    recorded = answered({rid: [r % 4 for r in range(n)] for rid, n in lengths.items()}, depth=4)
    found = traces.from_recording(recorded, depth=2, num_traces=3, source="here")
    assert found.chains.requests == ["a/0", "b/0", "a/1"]  # c/0 is too short
    assert (found.chains.first_root[1:] - found.chains.first_root[:-1]).tolist() == [40, 43, 41]
    assert found.chains.num_correct[:5].tolist() == [0, 1, 2, 2, 0]
    assert found.chains.stats["prob"].shape == (124, 2)
    assert found.provenance["groups"] == {"a": 2, "b": 1}


def test_a_conversion_refuses_what_is_not_there() -> None:
    recorded = answered({"a/0": [1] * 40}, depth=4)
    with refused("chains of 4, asked for 7"):
        traces.from_recording(recorded, depth=7, num_traces=1, source="here")
    with refused("holds 1 answers", "asked for 2"):
        traces.from_recording(recorded, depth=4, num_traces=2, source="here")


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    before = made([[1, 2, 0], [3, 3]])
    traces.save(before, tmp_path / "t.safetensors")
    after = traces.load(tmp_path / "t.safetensors")
    assert after.provenance == before.provenance
    assert after.chains.requests == before.chains.requests
    assert torch.equal(after.chains.num_correct, before.chains.num_correct)
    assert torch.equal(after.chains.first_root, before.chains.first_root)
    for name in traces.STATS:
        assert torch.equal(after.chains.stats[name], before.chains.stats[name])


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read traces"):
        traces.load(tmp_path / "none.safetensors")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="is not a c2t-traces file"):
        traces.load(tmp_path / "x.safetensors")


def test_a_trace_starts_again_at_its_end() -> None:
    two = made([[1, 2], [3, 0, 1]])
    assert two.tiled(two.chains.num_correct, 4).tolist() == [[1, 2, 1, 2], [3, 0, 1, 3]]


def test_the_shipped_traces_are_small_and_serve_every_compared_policy() -> None:
    assert traces.DEMO.stat().st_size < 1_000_000
    demo = traces.load(traces.DEMO)
    assert demo.num_traces == demo.provenance["num_traces"] == 64
    assert demo.chains.max_length == demo.provenance["depth"] == 7
    policies = [{"policy": name} for name in POLICIES]
    lengths = lengths_of(demo, Settings(str(traces.DEMO), policies, num_steps=5))
    assert all(int(row.min()) >= 0 and int(row.max()) <= 5 for row in lengths)
    assert len({tuple(row.tolist()) for row in lengths}) == len(POLICIES)  # no two are alike


def walk(replayer: Replay, lane: int, policy: int, num_tokens: int, limit: int | None) -> int:
    """Steps of one request served by ``replayer``; the policy's lengths unless ``limit``."""
    slots = torch.tensor([3])
    ids = prompt(lane, policy, 10)
    replayer.join(slots, [ids])
    seq_len, tokens, steps = len(ids), 1, 0
    while tokens < num_tokens:
        verified = limit if limit is not None else replayer.next_lens[slots] - 1
        accepted = int(replayer.accept(slots, torch.tensor([seq_len]), verified))
        tokens, seq_len, steps = tokens + accepted, seq_len + accepted, steps + 1
    return steps


lists_of_correct = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3
)


@given(lists_of_correct, st.data(), st.integers(1, 60), st.none() | st.integers(0, 3))
def test_a_request_walks_its_trace_at_any_fixed_length_or_as_its_own_policy_says(
    correct: list[list[int]], data: st.DataObject, num_tokens: int, limit: int | None
) -> None:
    loaded = made(correct)
    first = loaded.chains.first_root.tolist()
    roots = st.lists(st.integers(0, 3), min_size=first[-1], max_size=first[-1])
    kept = [torch.tensor(data.draw(roots)) for _ in range(2)]
    policy = data.draw(st.integers(0, 1))
    lane = data.draw(st.integers(0, len(correct) * 2 - 1))
    shift, trace = divmod(lane, len(correct))
    lengths = kept[policy][first[trace] : first[trace + 1]].tolist() if limit is None else limit
    expected = expected_steps(correct[trace], lengths, num_tokens, shift * LANE_SHIFT)
    replayer = Replay(loaded, kept, num_slots=4, max_positions=POSITIONS, device="cpu")
    assert walk(replayer, lane, policy, num_tokens, limit) == expected


def test_replayed_steps_are_those_of_the_offline_replay() -> None:
    demo = traces.load(traces.DEMO)
    policy = DyMax(beta=0.5)
    outcome = replay(policy, demo.chains)
    lengths = demo.lengths(policy)
    first = demo.chains.first_root.tolist()
    for q in range(0, demo.num_traces, 9):
        here = slice(first[q], first[q + 1])
        steps = expected_steps(
            demo.chains.num_correct[here].tolist(), lengths[here].tolist(), first[q + 1] - first[q]
        )
        # An answer's last token may come with the step before the last root.
        assert abs(steps - int(outcome.num_steps[q])) <= 1


def test_requests_without_a_mark_walk_the_first_trace() -> None:
    replayer = Replay(made([[2], [0]]), [], num_slots=4, max_positions=POSITIONS, device="cpu")
    replayer.join(torch.tensor([1, 2]), [[9, 1, 1], [9]])
    accepted = replayer.accept(torch.tensor([1, 2]), torch.tensor([3, 1]), 3)
    assert accepted.tolist() == [3, 3]


def test_prompts_that_name_nothing_are_refused() -> None:
    replayer = Replay(made([[2], [0]]), [], num_slots=4, max_positions=20, device="cpu")
    slot = torch.tensor([1])
    for ids, message in (
        ([MARK, 2 * MAX_SHIFTS, 0], "lane 32 of 32"),
        ([MARK, 0, 1], "policy 1 of 0"),
        ([FILLER] * 20, "20 tokens of at most 20"),
    ):
        with pytest.raises(ValueError, match=message):
            replayer.join(slot, [ids])


def chain_links(lens: list[int], width: int) -> Tensor:
    """SGLang's links of chains cut to ``lens`` rows."""
    rows = torch.arange(1, width + 1).expand(len(lens), width)
    return torch.where(rows < torch.tensor(lens)[:, None], rows, -1)


@pytest.mark.parametrize("gated", [True, False])
def test_acceptance_ends_at_the_trace_and_at_a_gates_cut(gated: bool) -> None:
    lengths = [torch.tensor([3, 3, 1])] if gated else []
    replayer = Replay(made([[2], [0], [3]]), lengths, num_slots=9, max_positions=20, device="cpu")
    slots = torch.tensor([4, 8, 6])
    replayer.join(slots, [prompt(lane, 0, 5) for lane in range(3)])
    tokens = torch.arange(100, 112)  # [3 * 4]: root and three drafts each
    verify_input = SimpleNamespace(
        draft_token_num=4, draft_token=tokens, retrieve_next_token=chain_links([4, 4, 2], 4)
    )
    batch = SimpleNamespace(req_pool_indices=slots, seq_lens=torch.tensor([5, 5, 5]))
    sampled = (
        torch.zeros(12, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
        torch.full((3, 4), -1, dtype=torch.int32),
    )
    predict, accept_lens, accept_index = replayed(replayer, verify_input, batch, *sampled)
    # The third trace accepts all 3, of which a gate left 1.
    assert accept_lens.tolist() == [3, 1, 2 if gated else 4]
    third = [8, 9, -1, -1] if gated else [8, 9, 10, 11]
    assert accept_index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1], third]
    assert predict.view(3, 4)[:, :3].tolist() == tokens.view(3, 4)[:, 1:].tolist()
    assert accept_lens.dtype == accept_index.dtype == predict.dtype == torch.int32


def test_trees_are_refused() -> None:
    replayer = Replay(made([[2]]), [], num_slots=2, max_positions=20, device="cpu")
    tree = SimpleNamespace(draft_token_num=8)
    sampled = torch.zeros(8), torch.ones(1), torch.zeros(1, 4)
    with pytest.raises(ValueError, match="chains only"):
        replayed(replayer, tree, SimpleNamespace(), *sampled)


def test_a_dummy_draft_head_gets_a_token_map_within_the_target_vocabulary() -> None:
    head = torch.nn.Module()
    head.norm = torch.nn.LayerNorm(4)  # type: ignore[assignment]
    head.norm.weight.data.fill_(0.1)
    head.config = SimpleNamespace(vocab_size=100, draft_vocab_size=30)  # type: ignore[assignment]
    head.hot_token_id = None  # type: ignore[assignment]
    finish_dummy(head)
    ids = head.hot_token_id.tolist()  # type: ignore[union-attr]
    assert ids == sorted(set(ids)) and len(ids) == 30 and max(ids) < 100  # noqa: PT018 - one fact
    assert head.norm.weight.tolist() == [1.0] * 4
