"""Reports about C2T: per request in ``meta_info``, per process in ``/server_info``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sglang_c2t.config import active
from sglang_c2t.srt import compat

COUNTERS_ENV = "SGLANG_C2T_COUNTERS"


@dataclass
class Counters:
    """Forwards and rows of this scheduler process since its start. It counts only with
    SGLANG_C2T_COUNTERS=1, then also on servers without ``--c2t``, to compare methods.
    """

    target_decode_rows: int = 0  # rows of target forwards that decode without a draft
    verify_forwards: int = 0
    verify_rows: int = 0  # rows of target forwards that verify, roots included
    draft_forwards: int = 0  # draft forwards inside the draft loop
    draft_rows: int = 0
    draft_forwards_skipped: int = 0  # skipped because every chain had ended


COUNTERS = Counters()


@dataclass
class RecordingState:
    """Progress of ``--c2t-record`` in this scheduler process."""

    directory: str | None = None
    drafts: int = 0
    drafts_written: int = 0
    left_out: int = 0  # drafts of requests whose target distribution is changed
    stopped: str | None = None  # reason, once recording has stopped
    id_key: str | None = None  # turns a request's id into the recorded one, see request_names.py


RECORDING = RecordingState()


@dataclass
class ControlState:
    """Effects of ``POST /c2t`` on this scheduler process."""

    switches: int = 0
    refusal: str | None = None  # reason of the last refusal


CONTROL = ControlState()

#: Further parts of the reported state, by name.
PARTS: dict[str, Callable[[], Any]] = {}

#: Called before a report, so that its readers find everything on the disk.
BEFORE_REPORT: list[Callable[[], None]] = []


def counting() -> bool:
    """Whether this process counts."""
    return os.environ.get(COUNTERS_ENV) == "1"


def count_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on ``ModelRunner.forward``, registered only when counting."""
    mode = forward_batch.forward_mode
    rows = forward_batch.input_ids.shape[0]
    if mode.is_target_verify():
        COUNTERS.verify_forwards += 1
        COUNTERS.verify_rows += rows
    elif mode.is_decode() and runner.is_draft_worker:
        COUNTERS.draft_forwards += 1
        COUNTERS.draft_rows += rows
    elif mode.is_decode():
        COUNTERS.target_decode_rows += rows
    return original(runner, forward_batch, *args, **kwargs)


def add_counters(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook on ``Scheduler.get_internal_state``: adds the key ``c2t``."""
    config = active()
    if config is None and not counting():
        return
    state: dict[str, Any] = {"enabled": config is not None}
    if config is not None:
        # SGLang lists its schedulers in the order of their answers.
        state["dp_rank"] = compat.dp_rank(scheduler.tp_worker.model_runner)
        state["config"] = config.to_json()
        for flush in BEFORE_REPORT:
            flush()
        state["recording"] = asdict(RECORDING)
        state["control"] = asdict(CONTROL)
        state |= {name: part() for name, part in PARTS.items()}
    if counting():
        state["counters"] = asdict(COUNTERS)
        backend = scheduler.tp_worker.model_runner.attn_backend
        # Our CPU backend counts the query rows in attention, which checks the counters
        # independently.
        state["attention_verify_rows"] = getattr(backend, "verify_rows_seen", None)
    result.internal_state["c2t"] = state


def correct_accept_rate(
    _result: None, _manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """AFTER hook on ``TokenizerManager._calculate_spec_decoding_metrics``. SGLang divides accepted
    drafts by verifications times full length. Under C2T fewer drafts are proposed: verified rows
    less one root per verification.
    """
    if active() is None or "spec_cap_length" not in meta_info:
        return
    num_proposed = recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i]
    num_correct = recv_obj.spec_num_correct_drafts[i]
    meta_info["spec_num_proposed_drafts"] = num_proposed
    # Without proposals the rate is 0, which keeps the key's type for clients that sum it.
    meta_info["spec_accept_rate"] = num_correct / num_proposed if num_proposed else 0.0
