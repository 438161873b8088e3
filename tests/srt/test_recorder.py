"""Recording inside a server: what is written, for whom, and what a full disk may not do."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_c2t.classifier.pair import Pair
from sglang_c2t.classifier.recording import MEASURED, Recording, RecordingWriter, read_recording
from sglang_c2t.classifier.request_names import name_requests
from sglang_c2t.config import C2TConfig
from sglang_c2t.draft_layer import DraftLayer
from sglang_c2t.srt import compat, recorder
from tests.doubles import double
from tests.recordings import ORIGIN


def layers(depths: int, batch: int) -> list[DraftLayer]:
    """Layer d of request b: probability 0.b, joint 0.b ** d; all other values differ as well."""
    prob = torch.tensor([(b + 1) / 10 for b in range(batch)])
    return [
        DraftLayer(
            depth=d,
            prob=prob,
            joint=prob**d,
            entropy=prob + d,
            alive=prob > 0,
            measured={
                "margin": prob + 10 * d,
                "entropy_top1000": prob + 20 * d,
                "hidden": torch.stack((prob, prob * 0 + d), dim=1),
            },
        )
        for d in range(1, depths + 1)
    ]


def request(rid: str, prompt: list[int], *, top_k: int = 1, grammar: object = None) -> Any:
    params = double("SamplingParams", top_k=top_k)
    at = {"rid": rid, "origin_input_ids": prompt, "custom_logit_processor": None}
    return double("Req", sampling_params=params, grammar=grammar, **at)


def add(
    of: Any,
    reqs: list[Any],
    *,
    accept_lens: list[int] | None = None,
    depths: int = 2,
    recordable: list[bool] | None = None,
    drafts: list[list[int]] | None = None,
    target: list[list[int]] | None = None,
) -> None:
    """Record one step as the worker does; positions are 100, 101, ..."""
    logits = None
    if target is not None:
        logits = torch.nn.functional.one_hot(torch.tensor(target).flatten(), 9).float()
    of.add(
        double("ScheduleBatch", reqs=reqs, seq_lens=torch.arange(100, 100 + len(reqs))),
        layers(depths, len(reqs)),
        torch.tensor([True] * len(reqs) if recordable is None else recordable),
        torch.tensor(drafts or [[0] * (depths + 1)] * len(reqs)).flatten(),
        double(
            "GenerationBatchResult",
            accept_lens=torch.tensor(accept_lens or [1] * len(reqs)),
            logits_output=double("LogitsProcessorOutput", next_token_logits=logits),
        ),
    )


def written(directory: Path, of: Any, reqs: list[Any]) -> Recording:
    """Read the recording with the names of the requests."""
    of.flush()
    name_requests(directory, of.id_key, [req.rid for req in reqs])
    return read_recording(directory)


# -- what is written ----------------------------------------------------------------------


def test_recorder_chain_nodes_hold_every_column() -> None:
    """Requests 2 and 0 of three, 3 depths, 1 and 3 drafts accepted: every column by hand."""
    nodes = recorder.chain_nodes(
        layers(3, 3), torch.tensor([2, 0]), torch.tensor([1, 3]), [*MEASURED, "hidden"]
    )
    expected = {
        "draft": [0, 0, 0, 1, 1, 1],
        "parent": [-1, 0, 1, -1, 0, 1],
        "rank": [0, 0, 0, 0, 0, 0],
        "depth": [1, 2, 3, 1, 2, 3],
        "accept": [1, 0, 0, 1, 1, 1],
        "prob": [0.3, 0.3, 0.3, 0.1, 0.1, 0.1],
        "joint": [0.3, 0.09, 0.027, 0.1, 0.01, 0.001],
        "entropy": [1.3, 2.3, 3.3, 1.1, 2.1, 3.1],
        "margin": [10.3, 20.3, 30.3, 10.1, 20.1, 30.1],
        "entropy_top1000": [20.3, 40.3, 60.3, 20.1, 40.1, 60.1],
    }
    assert set(nodes) == {*expected, "hidden"}
    for name, values in expected.items():
        assert nodes[name].float().tolist() == pytest.approx(values), name
    assert nodes["hidden"].flatten().tolist() == pytest.approx(
        [0.3, 1, 0.3, 2, 0.3, 3, 0.1, 1, 0.1, 2, 0.1, 3]
    )


def test_recorder_exploration_step_is_labelled_by_acceptance(tmp_path: Path) -> None:
    """Whatever the requests' sampling; SGLang's accept length counts the bonus token. Drafts
    whose first token was not measured are left out.
    """
    of = recorder.Recorder(RecordingWriter(tmp_path, origin=ORIGIN))
    measured = [request("math/0", [1, 2]), request("math/1", [3], top_k=50)]
    reqs = [request("unmeasured", [1]), *measured]
    add(of, reqs, accept_lens=[2, 3, 1], recordable=[False, True, True])
    add(of, reqs, recordable=[False] * 3)
    add(of, measured[:1], accept_lens=[2])
    read = written(tmp_path, of, measured)
    assert read.nodes["accept"].view(3, 2).tolist() == [[1, 1], [0, 0], [1, 0]]
    assert read.nodes["prob"].tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.1, 0.1])
    assert [read.requests[i] for i in read.drafts["request"]] == ["math/0", "math/1", "math/0"]
    assert read.drafts["position"].tolist() == [101, 102, 100]
    prompts = read.drafts["prompt"].tolist()
    assert prompts[0] == prompts[2] != prompts[1]
    assert (recorder.RECORDING.drafts, recorder.RECORDING.drafts_written) == (3, 3)


def test_recorder_writes_no_request_id(tmp_path: Path) -> None:
    """Nor can it be guessed: the hash is of a key that is not on the disk."""
    of = recorder.Recorder(RecordingWriter(tmp_path, origin=ORIGIN))
    rids = ["anna@example.org/0", "anna@example.org/1", "\ud800"]
    for rid in rids:
        add(of, [request(rid, [1])])
    of.flush()
    (shard,) = tmp_path.iterdir()
    assert b"anna" not in shard.read_bytes()
    assert of.id_key.encode() not in shard.read_bytes()
    assert of.id_key == recorder.RECORDING.id_key
    read = read_recording(tmp_path)
    assert all(re.fullmatch("[0-9a-f]{32}", rid) for rid in read.requests)
    assert len(set(read.requests)) == 3
    another = recorder.Recorder(RecordingWriter(tmp_path / "b", origin=ORIGIN))
    add(another, [request(rids[0], [1])])
    another.flush()
    assert read_recording(tmp_path / "b").requests[0] != read.requests[0]


def test_recorder_every_position_labels_greedy_requests_by_argmax(tmp_path: Path) -> None:
    """Sampled and grammar requests; what the server accepted says nothing in this mode."""
    of = recorder.Recorder(RecordingWriter(tmp_path, origin=ORIGIN), every_position=True)
    reqs = [
        request("greedy", [1]),
        request("sampled", [1], top_k=50),
        request("grammar", [1], grammar=object()),
        request("unmeasured", [1]),
        request("also greedy", [1]),
    ]
    add(
        of,
        reqs,
        recordable=[True, True, True, False, True],
        # Root, then two drafts; the target's choice stands one row before the draft. Its last
        # rows fill a captured graph and belong to no request.
        drafts=[[9, 1, 2]] * 5,
        target=[[1, 3, 4], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 0], [8, 8, 8]],
    )
    read = written(tmp_path, of, reqs)
    assert [read.requests[i] for i in read.drafts["request"]] == ["greedy", "also greedy"]
    assert read.nodes["accept"].view(2, 2).tolist() == [[1, 0], [1, 1]]


# -- the share ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"share": 0.01}, 0.01),
        ({"share": 0.3}, 0.3),
        ({"share": 1.0}, 1.0),
        ({"share": 0.01, "every_position": True}, 1.0),
    ],
)
def test_recorder_explores_its_share_of_steps_and_none_after_the_end(
    options: dict, share: float
) -> None:
    """20000 steps; five standard deviations are off once in two million."""
    of = recorder.Recorder(FullDisk(), **options)
    explored = sum(of.next_step_explores() for _ in range(20_000))
    assert abs(explored - 20_000 * share) <= 5 * (20_000 * share * (1 - share)) ** 0.5
    of.flush()
    assert not any(of.next_step_explores() for _ in range(1000))


# -- the disk -----------------------------------------------------------------------------


class FullDisk:
    """A writer whose disk is full."""

    drafts_written = 0

    def add(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_recorder_full_disk_ends_the_recording_only(caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, and the state says why."""
    of = recorder.Recorder(FullDisk())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            add(of, [request("a", [1])])
            of.flush()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["C2T: recording stopped, serving goes on: [Errno 28] No space left on device"]
    assert recorder.RECORDING.stopped == "[Errno 28] No space left on device"


def test_recorder_at_its_limit_ends_the_recording(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path, origin=ORIGIN, shard_nodes=2, limit_bytes=10)
    of = recorder.Recorder(writer)
    for _ in range(3):
        add(of, [request("a", [1])])
    assert "MB, the limit is" in recorder.RECORDING.stopped
    assert recorder.RECORDING.drafts_written == read_recording(tmp_path).num_drafts == 1


# -- configuration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "topk", "directory"),
    [(0, 1, True), (0, None, True), (0, 3, True), (1, 1, True), (0, 1, False)],
)
def test_recorder_exists_on_rank_0_with_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, topk: int | None, directory: bool
) -> None:
    """Names and not paths; and whoever asks for the state finds the drafts on the disk."""
    group = double("sglang.srt.distributed.parallel_state.GroupCoordinator", rank_in_group=rank)
    monkeypatch.setattr(recorder, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    record = str(tmp_path) if directory else None
    config = C2TConfig("c2t", record=record, record_roots="every")
    server_args = double(
        "ServerArgs",
        model_path="/models/target",
        speculative_draft_model_path="org/draft",
        speculative_algorithm="EAGLE3",
        speculative_num_steps=2,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=3,
    )
    if topk is None:  # left out: SGLang chooses
        compat.decide(server_args, speculative_eagle_topk=1)
    policy = SimpleNamespace(needs=frozenset({"margin", "hidden"}))
    of = recorder.Recorder.from_config(config, server_args, Pair("EAGLE3", "12", "34"), policy)
    if rank == 1 or not directory:
        assert of is None
        return
    assert of.names == {"margin", "entropy_top1000", "hidden"}
    add(of, [request("a", [1])], drafts=[[9, 1, 2]], target=[[1, 2, 3]])
    for flush in recorder.BEFORE_REPORT:
        flush()
    read = read_recording(tmp_path)
    assert recorder.RECORDING.directory == str(tmp_path.resolve())
    assert read.roots == "every"
    assert read.nodes["hidden"].tolist() == torch.tensor([[0.1, 1.0], [0.1, 2.0]]).half().tolist()
    assert read.origins == [
        {"target": "target", "draft": "draft", "algorithm": "EAGLE3",
         "weights": {"target": "12", "draft": "34"}, "num_steps": 2, "topk": topk or 1,
         "num_draft_tokens": 3, "policy": "c2t"}
    ]  # fmt: skip


# -- prompts ------------------------------------------------------------------------------


ONE_TWO_THREE = 1577885785983191476


def test_recorder_prompt_checksum_is_the_same_in_every_process() -> None:
    """Splits go by it. The numbers were computed in another process; 63 bits, never negative."""
    assert recorder._checksum([]) == 0
    assert recorder._checksum([1, 2, 3]) == ONE_TWO_THREE
    assert recorder._checksum((1, 2, 3)) == ONE_TWO_THREE
