"""An SGLang plugin: acceptance and draft lengths from recorded traces, everything else real.

With random weights no draft is ever accepted and no draft statistic means anything, but every
kernel, graph, copy and scheduler step costs what it costs with trained ones. So only two
decisions are replaced, by what a trained pair did behind the same number of tokens::

    drafts accepted   min(recorded accept length, drafts verified)         eagle_sample
    drafts verified   what the policy says to the recorded measurements    ChainGate

The gate still measures and judges the real logits; its answer is then not used. Chains only
(``--speculative-eagle-topk 1``), one GPU, greedy requests, no grammar.

A request names its trace (its *lane*) and its policy by the first tokens of its prompt, see
:func:`prompt`, so that one server measures several policies on the same traces. Tables and
positions stay on the device, and nothing is read by the host: CUDA graphs and overlap work as
they do.

Switched on by an environment variable holding :class:`Settings` as JSON; the entry point is
made by ``plugins.py``.

Legend: B requests, N rows of a full chain, Q traces, P positions, K policies.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.gpu.traces import Traces, load
from sglang_c2t.config import C2TConfig
from sglang_c2t.policies import build_policy

ENV = "EVAL_TRACE_REPLAY"

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
DUMMY_WEIGHTS = "sglang.srt.model_loader.loader.initialize_dummy_weights"

#: Lanes beyond the number of traces start further on in them, so that no two requests of a
#: batch need to walk in step.
LANE_SHIFT = 29
MAX_SHIFTS = 16

#: First token of a prompt that names a lane and a policy; any other walks lane 0.
MARK = 1729
FILLER = 5


def prompt(lane: int, policy: int, length: int) -> list[int]:
    """Token ids [length] of a request that walks ``lane`` under ``policy``."""
    return [MARK, lane, policy, *([FILLER] * (length - 3))]


@dataclass(frozen=True)
class Settings:
    """What is replayed."""

    traces: str
    """File made by ``traces.py``."""

    policies: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Of a ``--c2t`` server, and none of others: configurations, as in ``--c2t-config``; a
    prompt names one by its number."""

    num_steps: int = 7
    """Drafted tokens per step, the most a policy may verify."""

    max_positions: int = 4096
    """Tokens of the longest request, prompt included."""

    def to_env(self) -> dict[str, str]:
        """The environment of a server that replays."""
        return {ENV: json.dumps(asdict(self))}


class Replay:
    """Where each request slot stands in its trace, as tables on one device.

    Position p of a trace is its root behind p output tokens: ``seq_lens`` less the prompt.
    """

    def __init__(
        self,
        traces: Traces,
        lengths: Sequence[Tensor],
        *,
        num_slots: int,
        max_positions: int,
        device: torch.device | str,
    ) -> None:
        self.num_traces = traces.num_traces
        self.num_policies = len(lengths)
        self.max_positions = max_positions
        self._width = max_positions + MAX_SHIFTS * LANE_SHIFT  # P
        tables = [traces.tiled(row, self._width).flatten() for row in lengths]
        correct = traces.tiled(traces.chains.num_correct, self._width)
        #: [Q * P] int32: leading drafts that the target accepts.
        self.num_correct = correct.flatten().to(device, torch.int32)
        #: [K * Q * P] int32 in [1, N]: rows a policy verifies, root included; [1] without one.
        self.verify_lens = (
            torch.cat(tables).to(device, torch.int32) + 1
            if tables
            else torch.ones(1, dtype=torch.int32, device=device)
        )
        #: [slots] int64: index of the trace's root 0, less the length of the prompt.
        self.start = torch.zeros(num_slots, dtype=torch.int64, device=device)
        #: [slots] int64: where the policy's table begins.
        self.plan = torch.zeros(num_slots, dtype=torch.int64, device=device)
        #: [slots] int32: rows that the next step verifies. Has one address, so that a captured
        #: graph may read it.
        self.next_lens = torch.ones(num_slots, dtype=torch.int32, device=device)

    def join(self, slots: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        """Requests enter with the token ids of their ``prompts``.

        Raises ValueError for a lane or policy that does not exist, or too long a prompt.
        """
        starts, plans, firsts = [], [], []
        for ids in prompts:
            marked = len(ids) > 2 and int(ids[0]) == MARK
            lane, policy = (int(ids[1]), int(ids[2])) if marked else (0, 0)
            shift, trace = divmod(lane, self.num_traces)
            if shift >= MAX_SHIFTS:
                raise ValueError(f"lane {lane} of {MAX_SHIFTS * self.num_traces}")
            if policy and policy >= self.num_policies:
                raise ValueError(f"policy {policy} of {self.num_policies}")
            if len(ids) >= self.max_positions:
                raise ValueError(f"{len(ids)} tokens of at most {self.max_positions}")
            first = trace * self._width + shift * LANE_SHIFT
            firsts.append(first)
            starts.append(first - len(ids))
            plans.append(policy * len(self.num_correct))
        device = self.start.device
        plan = torch.tensor(plans).to(device, non_blocking=True)
        self.start[slots] = torch.tensor(starts).to(device, non_blocking=True)
        self.plan[slots] = plan
        if self.num_policies:
            begins = torch.tensor(firsts).to(device, non_blocking=True)
            self.next_lens[slots] = self.verify_lens[plan + begins]

    def accept(self, slots: Tensor, seq_lens: Tensor, num_proposed: Tensor | int) -> Tensor:
        """[B] int32: tokens accepted, the bonus token included, of ``num_proposed`` drafts.

        Then moves on: :attr:`next_lens` is that of the next step. ``seq_lens`` [B] is without
        the root.
        """
        here = self.start[slots] + seq_lens
        recorded = self.num_correct[here]
        accept_lens = (
            recorded.clamp(max=num_proposed)
            if isinstance(num_proposed, int)
            else torch.minimum(recorded, num_proposed.to(torch.int32))
        ) + 1
        if self.num_policies:
            self.next_lens[slots] = self.verify_lens[here + accept_lens + self.plan[slots]]
        return accept_lens


#: Of this scheduler process, once its request table exists.
_replay: Replay | None = None


def register() -> None:
    """Entry point ``sglang.srt.plugins``. SGLang swallows exceptions, hence ``SystemExit``."""
    if ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        settings()
    except (TypeError, ValueError) as error:
        sys.exit(f"{ENV}: {error}")
    HookRegistry.register(CREATE_WORKER, _create_worker, HookType.AROUND)
    HookRegistry.register(DUMMY_WEIGHTS, _dummy_weights, HookType.AROUND)


def settings() -> Settings:
    """What the environment says."""
    return Settings(**json.loads(os.environ[ENV]))


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND hook: the scheduler is about to make its speculative worker."""
    worker = original(algorithm, server_args)
    _attach()
    return worker


_attached = False


def _attach() -> None:
    """Wrap SGLang's worker and sampling, and our gate; once a process."""
    global _attached
    if _attached:
        return
    _attached = True
    from sglang.srt.speculative import eagle_worker_common
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    from sglang_c2t.srt.verify.chain import ChainVerifyInput

    # The draft worker's, because C2T makes its gate right behind it.
    alloc, forward = EagleDraftWorker.alloc_memory_pool, EAGLEWorkerV2.forward_batch_generation

    # wraps: C2T looks at the parameters of what it attaches to.
    @functools.wraps(alloc)
    def alloc_memory_pool(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = alloc(worker, *args, **kwargs)
        _allocate(worker)
        return result

    @functools.wraps(forward)
    def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() and batch.reqs:
            assert _replay is not None, "no request table yet"
            _replay.join(batch.req_pool_indices, [req.origin_input_ids for req in batch.reqs])
        return forward(worker, batch, *args, **kwargs)

    sample, accept = eagle_worker_common.eagle_sample, ChainVerifyInput.accept

    def of_recording(verify_input: Any, batch: Any, sampled: Any) -> Any:
        if batch.forward_mode.is_idle():
            return sampled
        assert _replay is not None, "no request table yet"
        return replayed(_replay, verify_input, batch, *sampled)

    @functools.wraps(sample)
    def sample_replayed(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return of_recording(verify_input, batch, sample(verify_input, batch, *args, **kwargs))

    @functools.wraps(accept)
    def accept_replayed(
        verify_input: Any, stock: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        accepted = accept(verify_input, sample, batch, *args, **kwargs)
        return of_recording(verify_input, batch, accepted)

    # The last two: SGLang's, and what C2T puts in its place for packed rows.
    for owner, ours in (
        (EagleDraftWorker, alloc_memory_pool),
        (EAGLEWorkerV2, forward_batch_generation),
        (eagle_worker_common, sample_replayed),
        (ChainVerifyInput, accept_replayed),
    ):
        setattr(owner, ours.__name__, ours)
    _replace_gate()


def _replace_gate() -> None:
    """The lengths that leave the gate are the recorded ones; what it computes is thrown away."""
    from sglang_c2t.draft.chain import ChainGate

    begin = ChainGate.begin

    @functools.wraps(begin)
    def begin_replayed(gate: Any, slots: Tensor) -> None:
        gate.replayed_slots = slots
        begin(gate, slots)

    def verify_lens(gate: Any) -> Tensor:
        assert _replay is not None, "no request table yet"
        # No longer than what was drafted; inside a graph, that is the graph's own length.
        return _replay.next_lens[gate.replayed_slots].clamp(max=gate.depth + 1)

    def any_alive(gate: Any) -> bool:
        return bool((gate.verify_lens > gate.depth).any())

    for name, replacement in {
        "begin": begin_replayed,
        "verify_lens": property(verify_lens),
        "any_alive": any_alive,
    }.items():
        if not hasattr(ChainGate, name):
            raise AttributeError(f"ChainGate has no {name}: trace replay does not fit this version")
        setattr(ChainGate, name, replacement)


def _allocate(worker: Any) -> None:
    """Make the tables once the request table exists, before any graph is captured."""
    global _replay
    if _replay is not None:
        return
    wanted = settings()
    traces = load(Path(wanted.traces))
    _replay = Replay(
        traces,
        lengths_of(traces, wanted),
        num_slots=worker.req_to_token_pool.req_to_token.shape[0],
        max_positions=wanted.max_positions,
        device=worker.device,
    )


def lengths_of(traces: Traces, wanted: Settings) -> list[Tensor]:
    """Per policy [R] int64: drafts it verifies behind each root, ``num_steps`` at most."""
    policies = [build_policy(C2TConfig.from_mapping(config)) for config in wanted.policies]
    return [traces.lengths(policy).clamp(max=wanted.num_steps) for policy in policies]


def replayed(
    replay: Replay,
    verify_input: Any,
    batch: Any,
    predict: Tensor,  # [B * N] int32
    accept_lens: Tensor,  # [B] int32
    accept_index: Tensor,  # [B, N] int32
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``eagle_sample`` would have returned for the trained pair, its tokens apart.

    An accepted row predicts the draft behind it, as it must; the bonus token is whatever stands
    behind the last one. About ten small launches a step, which a server without speculation
    does not pay: ``microbench.py`` measures them.
    """
    batch_size, width = accept_index.shape
    if verify_input.draft_token_num != width:
        raise ValueError("trace replay serves chains only: set --speculative-eagle-topk 1")
    num_proposed: Tensor | int = width - 1
    if replay.num_policies:  # a gate cut the links, at the length that was really verified
        num_proposed = (verify_input.retrieve_next_token >= 0).sum(dim=1)
    accept_lens = replay.accept(batch.req_pool_indices, batch.seq_lens, num_proposed)
    rows = torch.arange(batch_size * width, dtype=torch.int32, device=predict.device)
    rows = rows.view(batch_size, width)
    accept_index = torch.where(rows - rows[:, :1] < accept_lens[:, None], rows, -1)
    drafted = verify_input.draft_token.view(batch_size, width)
    predict.view(batch_size, width)[:, :-1].copy_(drafted[:, 1:])
    return predict, accept_lens, accept_index


# -- random weights -----------------------------------------------------------------------

#: Of a trained network's matrices; SGLang's 0.001 would make every activation tiny.
STANDARD_DEVIATION = 0.02


def _dummy_weights(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook: random weights of realistic size, and the token map of an EAGLE-3 head."""
    half_width = STANDARD_DEVIATION * 3**0.5
    original(model, low=-half_width, high=half_width)
    finish_dummy(model)


def finish_dummy(model: Any) -> None:
    """Norms of one; and 32k ids out of 128k where the draft head has a vocabulary of its own.

    SGLang sets ``hot_token_id`` only when it loads weights. Without it an EAGLE-3 head would
    take another, cheaper path than a trained one does.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
    config = getattr(model, "config", None)
    draft_vocab = getattr(config, "draft_vocab_size", None)
    vocab = getattr(config, "vocab_size", None)
    if hasattr(model, "hot_token_id") and draft_vocab and vocab and draft_vocab < vocab:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randperm(vocab, generator=generator, device="cpu")[:draft_vocab]
        model.hot_token_id = ids.sort().values.to(next(model.parameters()).device)
