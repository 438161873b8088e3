"""The duties of our workers, without a server: SGLang's constructor and steps are stand-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_v2

from sglang_c2t.classifier.pair import Pair
from sglang_c2t.config import CONFIG_ENV, C2TConfig, active
from sglang_c2t.draft.gate import Exploration
from sglang_c2t.srt import compat, serving, worker
from sglang_c2t.srt.data_parallel import Peers
from sglang_c2t.srt.hooks import reporting
from sglang_c2t.srt.recorder import Recorder
from sglang_c2t.srt.verify import backends, trial
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packed import IdleVerifyInput
from sglang_c2t.srt.worker import C2TEagleWorker
from tests.doubles import double
from tests.refusals import refused
from tests.srt.chains import full_chains

STEPS, WIDTH, SLOTS, REQUESTS = 5, 6, 8, 4
PAIR = Pair("EAGLE3", "1" * 16, "2" * 16)
EAGLE, DRAFT = eagle_worker_v2.EAGLEWorkerV2, eagle_worker_v2.EagleDraftWorker


class Server:
    """Makes workers as SGLang does, and notes what they ask of its other parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch.setattr
        self.setenv = monkeypatch.setenv
        self.calls: list[str] = []
        self.recorder: Any = None
        self.device = "cpu"
        self.result = double("GenerationBatchResult", accept_lens=torch.tensor([1, 3]))
        self.verified: list[Any] = []  # verify inputs that reached SGLang's ``verify``
        monkeypatch.setattr(reporting, "PARTS", {})
        monkeypatch.setattr(worker, "PARTS", reporting.PARTS)
        monkeypatch.setattr(worker, "served_pair", lambda _args: PAIR)
        monkeypatch.setattr(compat, "widen_request_table", lambda: None)
        monkeypatch.setattr(compat, "dp_rank", lambda _runner: 0)
        monkeypatch.setattr(Recorder, "from_config", lambda *_: self.recorder)
        monkeypatch.setattr(worker, "seed_costs", lambda *_: self.calls.append("seed costs"))
        self.with_backend(None)
        self.with_trial(lambda: None)
        monkeypatch.setattr(EAGLE, "__init__", self._constructor())
        monkeypatch.setattr(EAGLE, "init_attention_backends", lambda _: None)
        monkeypatch.setattr(EAGLE, "init_cuda_graphs", lambda _: self.calls.append("capture"))
        monkeypatch.setattr(EAGLE, "verify", lambda _, batch: self._verify(batch))
        monkeypatch.setattr(DRAFT, "alloc_memory_pool", lambda *_, **__: None)

    def with_backend(self, unsupported_reason: str | None) -> None:
        """The target's attention backend cannot verify packed rows for this reason."""
        self.patch(backends, "unsupported_reason", lambda *_, **__: unsupported_reason)
        self.patch(backends, "prepare", lambda *_, **__: self.calls.append("prepare packing"))
        self.patch(backends, "disable_packing", lambda _: self.calls.append("disable packing"))

    def with_trial(self, mismatch: Callable[[], str | None]) -> None:
        """Result of the start-up trial of packed rows."""

        def tried(_worker: Any) -> str | None:
            self.calls.append("trial")
            return mismatch()

        self.patch(trial, "packed_output_mismatch", tried)

    def _constructor(self) -> Callable[..., None]:
        def construct(made: Any, server_args: Any, gpu_id: int) -> None:
            topk = server_args.speculative_eagle_topk
            sizes: dict[str, Any] = {
                "topk": topk, "device": self.device, "speculative_num_steps": STEPS,
                "speculative_num_draft_tokens": WIDTH, "server_args": server_args,
            }  # fmt: skip
            table = double("ReqToTokenPool", req_to_token=torch.zeros(SLOTS, 16))
            made._draft_worker = double(
                eagle_worker_v2.EagleDraftWorker, **sizes, req_to_token_pool=table,
                draft_runner=double("ModelRunner"), draft_attn_backend=None,
            )  # fmt: skip
            runner = double(
                "ModelRunner",
                device=self.device,
                max_running_requests=REQUESTS,
                forward_pass_id=0,
                decode_cuda_graph_runner=None,
            )
            made._target_worker = double("TpModelWorker", model_runner=runner)
            for name, value in sizes.items():
                setattr(made, name, value)

        return construct

    def _verify(self, batch: Any) -> Any:
        self.verified.append(batch.spec_info)
        return self.result

    def worker(self, typed: C2TConfig | None = None, *, topk: int = 1, **arguments: Any) -> Any:
        """A worker whose draft worker has its memory, before any attention backend is there."""
        self.setenv(CONFIG_ENV, (typed or C2TConfig()).to_json())
        shape = {
            "speculative_eagle_topk": topk, "speculative_num_steps": STEPS,
            "speculative_num_draft_tokens": WIDTH,
        }  # fmt: skip
        modes = {
            "disaggregation_mode": "null", "speculative_accept_threshold_single": 1.0,
            "speculative_accept_threshold_acc": 1.0, "model_path": "target",
            "speculative_draft_model_path": "draft",
        }  # fmt: skip
        made = C2TEagleWorker(double("ServerArgs", **shape, **modes | arguments), gpu_id=0)
        made._draft_worker.alloc_memory_pool()
        return made

    def started(self, typed: C2TConfig | None = None, **options: Any) -> Any:
        """A worker that is ready to serve."""
        made = self.worker(typed, **options)
        made.init_attention_backends()
        made.init_cuda_graphs()
        return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def state(made: Any) -> dict[str, Any]:
    """All that a live switch may change."""
    served, drafter = made._serving, made._drafter
    return {
        "settings": (served.config, active()),
        "policy": drafter.gate.served.policy,
        "program": drafter.gate.served.program,
        "planner": (served.planning, drafter.planning, drafter.gate.planned),
        "requests to judge again": set(drafter.requests._unscored),
    }


def policy_of(made: Any) -> str:
    return str(made._drafter.gate.served.policy.name)


# -- choice of verification at start-up -------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize(("typed", "serves"), [("default", "auto"), ("dyjoint", "dyjoint")])
def test_worker_packs_and_plans_where_the_backend_can(
    server: Server, caplog: pytest.LogCaptureFixture, topk: int, typed: str, serves: str
) -> None:
    with caplog.at_level(logging.INFO):
        made = server.started(C2TConfig(typed), topk=topk)
    assert policy_of(made) == made._serving.config.policy == serves
    assert made._drafter.packed
    assert made._drafter.planning.plans == (serves == "auto")
    published = active()
    assert published is not None
    assert published.policy == serves
    words = "ragged verification of chains" if topk == 1 else "packed verification of trees"
    (line,) = (text for text in caplog.messages if "settings" in text)
    assert line.startswith(f"C2T: policy {serves}, {words}")


@pytest.mark.parametrize(
    ("typed", "topk", "sentence"),
    [
        (C2TConfig(verify="ragged"), 1, "--c2t-verify ragged cannot be served: it cannot"),
        (C2TConfig("auto"), 1, "policy auto plans how many rows are verified, and here all are"),
        (C2TConfig(), 4, "--c2t cannot verify trees: it cannot"),
    ],
)
def test_worker_that_needs_packed_rows_is_refused_where_they_fail(
    server: Server, typed: C2TConfig, topk: int, sentence: str
) -> None:
    server.with_trial(lambda: "it cannot")
    for unsupported in ("it cannot", None) if topk == 1 else ("it cannot",):  # trees: no trial
        server.with_backend(unsupported)
        with refused(sentence):
            server.started(typed, topk=topk)


def test_worker_of_a_prefill_server_measures_no_costs(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "on_arrival", lambda *_: None)
    with caplog.at_level(logging.INFO):
        server.started(disaggregation_mode="prefill")
    assert [text for text in caplog.messages if text.startswith("C2T")] == [
        "C2T: no gate here: another server verifies the drafts of this one"
    ]
    assert "seed costs" not in server.calls


@pytest.mark.parametrize(("policy", "measures"), [("auto", True), ("c2t", False)])
def test_worker_seeds_costs_after_capture_for_a_planner(
    server: Server, policy: str, measures: bool
) -> None:
    server.started(C2TConfig(policy))
    steps = ["prepare packing", "trial", "capture", *(["seed costs"] if measures else [])]
    assert server.calls == steps


# -- fallback after a failed trial ------------------------------------------------------------


def out_of_memory() -> str | None:
    raise MemoryError("no room")


TRIED = ["prepare packing", "trial", "disable packing", "capture"]


@pytest.mark.parametrize(
    ("unsupported", "mismatch", "reason", "calls"),
    [
        ("it cannot", lambda: None, "it cannot", ["capture"]),  # neither prepared nor tried
        (None, lambda: "rows differ", "rows differ", TRIED),
        (None, out_of_memory, "a packed batch failed with MemoryError: no room", TRIED),
    ],
)
def test_worker_fallback_without_packed_rows_serves_the_gate(
    server: Server, caplog: pytest.LogCaptureFixture, unsupported: str | None, mismatch: Any,
    reason: str, calls: list[str],
) -> None:  # fmt: skip
    """No switch brings a planner back, which would pack rows that the target does not read."""
    server.with_backend(unsupported)
    server.with_trial(mismatch)
    with caplog.at_level(logging.INFO):
        made = server.started()
    assert server.calls == calls
    assert policy_of(made) == "c2t"
    assert (made._drafter.packed, made._drafter.planning.plans) == (False, False)
    assert not made._drafter.gate.planned
    report = made._serving.report()
    assert (report["packed"], report["unpacked_because"]) == (False, reason)
    if unsupported is None:
        assert f"verifying full width (same output, no saving): {reason}" in caplog.text
    assert "C2T: policy c2t, static verification of chains" in caplog.text
    before = state(made)
    with refused("policy auto plans how many rows are verified, and here all are"):
        made.change({"policy": "auto"})
    assert state(made) == before


def test_worker_trial_skips_trees_and_static_chains(server: Server) -> None:
    server.with_trial(lambda: "rows differ")
    assert server.started(topk=4)._drafter.packed
    assert not server.started(C2TConfig(verify="static"))._drafter.packed
    assert "trial" not in server.calls


# -- live switch ------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 4])
def test_worker_switch_replaces_policy_and_planner(
    server: Server, caplog: pytest.LogCaptureFixture, topk: int
) -> None:
    made = server.started(topk=topk)
    planning = made._serving.planning
    assert planning.plans
    with caplog.at_level(logging.INFO):
        config = made.change({"policy": "c2t-plus", "beta": 0.4})
    assert config == made._serving.config
    assert (config.policy, config.beta) == (policy_of(made), 0.4) == ("c2t-plus", 0.4)
    assert made._serving.planning is made._drafter.planning is made._drafter.gating
    assert not made._serving.planning.plans
    assert not made._drafter.gate.planned
    assert made._drafter.requests._unscored == set(range(SLOTS))
    assert "C2T: classifier c2t-plus" in caplog.text
    made.change({"policy": "auto"})
    assert made._serving.planning is planning is made._drafter.planning
    assert made._drafter.gate.planned
    resets: list[str] = []
    planning.planner.reset = lambda: resets.append("reset")
    before = made._serving.config
    assert made.change({"forget": True}) == before
    assert resets == ["reset"]


@pytest.mark.parametrize(
    ("typed", "values", "sentence", "graphs"),
    [
        (C2TConfig(), {"beta": "high"}, "c2t beta must be", False),
        (C2TConfig("dyjoint"), {"forget": True}, "policy dyjoint learns nothing", False),
        (C2TConfig("c2t", max_verify_rows=8), {"policy": "auto"}, "policy auto plans how", False),
        (C2TConfig("c2t"), {"tpot_ms": 50}, "policy c2t keeps no limit", True),
        (C2TConfig("c2t", record="r"), {"beta": 0.5}, "the policy of a server that rec", False),
        (C2TConfig("c2t", verify="static"), {"policy": "auto"}, "policy auto plans how", False),
        (C2TConfig("dyjoint"), {"policy": "c2t-plus"}, "cannot take over in captured CUDA", True),
        (C2TConfig("dyjoint"), {"policy": "auto"}, "graphs, which compute no surviv", True),
    ],
)
def test_worker_switch_that_is_refused_changes_nothing(
    server: Server, typed: C2TConfig, values: dict[str, Any], sentence: str, graphs: bool
) -> None:
    made = server.started(typed)
    if graphs:
        made._draft_worker.cuda_graph_runner = "graphs"
    before = state(made)
    with refused(sentence):
        made.change(values)
    assert state(made) == before


def test_worker_switch_in_cuda_graphs_restores_the_captured_planner(server: Server) -> None:
    made = server.started()
    draft, drafter = made._draft_worker, made._drafter
    drafter.captured_planning = made._serving.planning
    draft.cuda_graph_runner, switches = "graphs", []
    drafter.gate.switch = lambda policy, *, captured: switches.append((policy.name, captured))
    made.change({"policy": "auto"})
    assert switches == [("auto", True)]
    assert made._serving.planning is drafter.captured_planning


def test_worker_state_file_belongs_to_the_policy_at_start(server: Server, tmp_path: Any) -> None:
    made = server.started(C2TConfig(state=str(tmp_path / "state.json")))
    files = [made._serving.planning.state_file]
    made.change({"policy": "rows-only"})  # plans as well
    files.append(made._serving.planning.state_file)
    assert [file is None for file in files] == [False, True]


# -- a step -----------------------------------------------------------------------------------


def batch_of(verify_input: Any, mode: ForwardMode = ForwardMode.DECODE) -> Any:
    return double(
        "ScheduleBatch", spec_info=verify_input, forward_mode=mode, reqs=[],
        req_pool_indices=torch.tensor([2, 5]),
    )  # fmt: skip


def chains(made: Any, rows: list[int]) -> Any:
    """Chains of the next step, as its draft worker hands them on."""
    lens = torch.tensor(rows, dtype=torch.int32)
    verify_input = ChainVerifyInput.cut(full_chains(2, WIDTH), lens)
    verify_input.step = made._drafter.planning.begin(2)
    return verify_input


def test_worker_verify_reports_its_rows_on_the_result(server: Server) -> None:
    made = server.started(C2TConfig("dyjoint"))
    made._drafter.gate.fell_back = True
    result = made.verify(batch_of(chains(made, [2, 6])))
    assert result.cap_lens.tolist() == [2, 6]
    step = result.c2t_step
    assert (step.full, step.drafted, step.forwarded_rows) == (WIDTH, WIDTH, 2 * WIDTH)
    assert (step.planned, step.fell_back) == (False, True)
    strides = {
        getattr(result, "speculative_output_stride", None),
        result.speculative_num_draft_tokens,
    }
    assert WIDTH in strides


def test_worker_verify_leaves_sglangs_own_input_alone(server: Server) -> None:
    made, theirs = server.started(), full_chains(2, WIDTH)
    result = made.verify(batch_of(theirs))
    assert server.verified == [theirs]
    assert not hasattr(result, "c2t_step")


# -- recording --------------------------------------------------------------------------------


class Recorded(Exploration):
    """A recorder that explores every step and keeps what it is given."""

    names = frozenset({"prob"})

    def __init__(self) -> None:
        self.added: list[Any] = []

    def next_step_explores(self) -> bool:
        return True

    def add(self, *step: Any) -> None:
        self.added.append(step)


def test_worker_exploration_step_is_recorded_with_its_result(server: Server) -> None:
    server.recorder = Recorded()
    made = server.started(C2TConfig("c2t", record="r"))
    gate, verify_input = made._drafter.gate, chains(made, [6, 6])
    slots = torch.tensor([2])  # the other one came from a prefill that measured less
    gate.first_tokens.put("complete", slots, torch.ones(1))
    batch = batch_of(verify_input)
    result = made.verify(batch)
    ((recorded, layers, recordable, tokens, of),) = server.recorder.added
    assert recorded is batch
    assert of is result
    assert layers is gate.layers
    assert recordable.tolist() == [True, False]
    assert tokens is verify_input.draft_token
    gate.exploring = False
    made.verify(batch_of(chains(made, [6, 6])))
    assert len(server.recorder.added) == 1


@pytest.mark.parametrize("roots", ["every", "visited"])
def test_worker_that_records_every_position_accepts_no_draft(server: Server, roots: str) -> None:
    """On each rank, also on those without a recorder."""
    made = server.started(C2TConfig("c2t", record="r", record_roots=roots))
    verify_input = chains(made, [6, 6])
    made.verify(batch_of(verify_input))
    assert verify_input.accepts_drafts == (roots != "every")


# -- an idle rank -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "typed", "dummy_row"),
    [(False, "auto", False), (True, "auto", True), (True, "static", False)],
)
def test_worker_idle_rank_verifies_a_dummy_row_where_other_ranks_pack(
    server: Server, peers: bool, typed: str, dummy_row: bool
) -> None:
    made = server.started(C2TConfig(verify=typed))
    alone = double(Peers, ranks=2) if peers else None
    made._drafter.host.peers = alone
    theirs = full_chains(0, WIDTH)
    made.verify(batch_of(theirs, ForwardMode.IDLE))
    (verified,) = server.verified
    assert isinstance(verified, IdleVerifyInput) == dummy_row
    assert dummy_row or verified is theirs
    if dummy_row:
        assert verified.num_rows.tolist() == [1]


# -- reports ----------------------------------------------------------------------------------


def test_worker_reports_shape_policy_classifier_and_the_planner_while_it_plans(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PARTS", reporting.PARTS)
    made = server.started(C2TConfig("c2t-plus", beta=0.4))
    report = reporting.PARTS["serving"]()
    shape = {"num_steps": STEPS, "topk": 1, "num_draft_tokens": WIDTH}
    assert report.items() >= {**shape, "max_running_requests": REQUESTS}.items()
    assert (report["packed"], report["unpacked_because"], report["plans"]) == (True, None, False)
    assert (report["beta"], report["pair"]) == (0.4, PAIR._asdict())
    assert report["classifier"]["name"] == "c2t-plus"
    assert "planner" not in reporting.PARTS
    made.change({"policy": "dyjoint"})
    assert reporting.PARTS["serving"]()["classifier"] is None
    made = server.started()
    made._serving.planning.report = lambda requests: {"requests": requests}
    assert reporting.PARTS["planner"]() == {"requests": REQUESTS}
    made.change({"policy": "c2t"})
    assert reporting.PARTS["planner"]() is None
