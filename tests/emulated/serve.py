"""SGLang's own scheduler on the emulated device: requests in, tokens out.

    python -m tests.emulated.serve    reads cases, one a line, and answers each with some lines

No HTTP and no tokenizer: requests are handed to the scheduler's loop, some of them while others
run. SGLang is imported once; each case is a server in a fork of that, and each of its runs a fork
of the server as it stands behind its start.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import traceback
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

#: What SGLang and its libraries read when they are imported.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "FLASHINFER_USE_CUDA_NORM": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_USE_SGL_FA3_KERNEL": "1",
    "TQDM_DISABLE": "1",
    "TRITON_INTERPRET": "1",
}

#: Iterations of the scheduler behind which a case has failed.
MOST_ITERATIONS = 400

#: Iterations of the scheduler between two switches of its policy.
SWITCHED_EVERY = 5

#: Numbers that stand for what a layer keeps of a token.
SKETCHED = 4

#: Where a picture begins.
PICTURE = 8

#: Last characters of an error that are reported: fewer than a pipe holds.
LONGEST_ERROR = 8000


@dataclass(frozen=True)
class Request:
    """One to serve."""

    ids: tuple[int, ...]
    joins: int = 0  # the iteration at which it comes
    aborted: int | None = None  # that at which the client aborts it
    opted_out: bool = False
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    max_new_tokens: int = 16
    logprobs: bool = False  # asked for, of each token of the answer
    picture: tuple[int, int] | None = None  # of so many rows and columns, see `rotated`
    adapter: str | None = None  # the path of one, of LoRA


@dataclass(frozen=True)
class Run:
    """A request to a server."""

    requests: tuple[Request, ...]
    ahead: int | None = None
    """A seed by which streams run ahead of the host; ``None``: all is as late as can be."""

    mutant: str = ""
    """Name of the mistake, see ``mutants.py``."""

    retracting: bool = False
    """Requests lose their places again and again, as where there is no memory left."""

    switched: tuple[str, ...] = ()
    """Bodies of POST /c2t, JSON, that come one after the other while requests run."""


@dataclass(frozen=True)
class Case:
    """A server, and its runs: each finds it as it started."""

    flags: tuple[str, ...]
    runs: tuple[Run, ...]
    mutant: str = ""
    """Name of a mistake that is made before the start."""

    in_turn: bool = False
    """Everything is done when it is launched."""


@dataclass
class Served:
    """Results of a run."""

    outputs: list[list[int]]
    verifications: list[int]
    """Tokens of each request."""

    rows: list[int]
    """That were verified of each request."""

    retracted: list[int]
    """How often each request was."""

    steps: list[dict[str, int]]
    """Counts of each decode step, its ``batch``, the rows of a whole draft of it that ours
    ``drafted``, those that the target ``forwarded`` for it, and whether it was ``planned``, and
    ``uniform``, and the ``layers`` that it drafted.
    """

    sites: dict[str, int]
    """Where it came from, over all steps: ``what at line``."""

    keys: list[list[list[float]]]
    """:func:`sketch` of what target and draft keep of each request's tokens in the prefix cache."""

    logprobs: list[list[float]]
    """Log-probabilities of each token, for requests that asked."""

    compiled: list[str]
    """Triton kernels of ours that had to be, while it served."""

    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the device when the server had started: ``held``, and of those the draft attention's
    for ``whole drafts`` and for ``all`` lengths.
    """

    error: str = ""
    requests: tuple[Request, ...] = ()
    """The requests."""

    @classmethod
    def failed(cls, error: str) -> Served:
        """Nothing but the reason."""
        return cls([], [], [], [], [], {}, [], [], [], error=error)


class Start(NamedTuple):
    """Arguments of each rank of a server."""

    args: Any
    ports: Any

    @classmethod
    def of(cls, case: Case) -> Start:
        """As its flags say."""
        from sglang.srt.server_args import PortArgs

        from tests.emulated.versions import RELEASE

        args = RELEASE.arguments(list(case.flags))
        return cls(args, PortArgs.init_new(args))


def start(case: Case, given: Start, rank: int = 0) -> Any:
    """SGLang's scheduler, ready to serve."""
    from tests.emulated.device import DEVICE
    from tests.emulated.everywhere import rough_prices, small_grids
    from tests.emulated.mutants import MUTANTS
    from tests.emulated.versions import RELEASE

    small_grids()
    rough_prices()
    DEVICE.in_turn = case.in_turn
    if case.mutant:
        MUTANTS[case.mutant].break_it()
    scheduler = RELEASE.scheduler(given.args, given.ports, rank)
    DEVICE.idle()  # seconds have gone by
    return scheduler


def serve(scheduler: Any, run: Run) -> Served:
    """The scheduler's own loop, until every request has its answer. Ranks of data-parallel
    attention have requests of their own, which they get in turn.
    """
    from sglang.srt.managers import scheduler as of_sglang
    from sglang.srt.managers.io_struct import AbortReq, SetInternalStateReq
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.runtime_context import get_parallel

    from sglang_c2t.srt import attach
    from sglang_c2t.srt.data_parallel import peers
    from sglang_c2t.srt.hooks import control
    from sglang_c2t.srt.hooks.reporting import BEFORE_REPORT
    from tests.emulated.device import DEVICE
    from tests.emulated.memory import Block
    from tests.emulated.mutants import MUTANTS

    memory = {"held": Block.held, **_bytes_of_draft_attention(scheduler)}
    attach.write(of_sglang, TEST_RETRACT=run.retracting)
    DEVICE.ahead = None if run.ahead is None else random.Random(run.ahead)
    if run.mutant:
        MUTANTS[run.mutant].break_it()
    DEVICE.tally.clear()
    DEVICE.sites.clear()
    compiled = len(DEVICE.compiled)
    steps: list[dict[str, int]] = []
    taken: dict[int, Any] = {}
    mode, counted, iteration = "", Counter[str](), 0
    together = peers()
    ranks, rank = (together.ranks, get_parallel().attn_dp_rank) if together else (1, 0)
    numbered = [(n, request) for n, request in enumerate(run.requests) if n % ranks == rank]
    ours = {"drafted": 0, "forwarded": 0, "planned": 0, "uniform": 0, "layers": 0}
    queue, run_batch = scheduler._add_request_to_queue, scheduler.run_batch

    def keep(req: Any, *more: Any, **options: Any) -> Any:
        taken[int(req.rid)] = req
        return queue(req, *more, **options)

    def noting(batch: Any, *more: Any, **options: Any) -> Any:
        nonlocal mode
        mode = f"{batch.forward_mode.name} {len(batch.reqs)}"
        result = run_batch(batch, *more, **options)
        step = getattr(result, "c2t_step", None)
        ours.update(
            drafted=step.drafted if step is not None else 0,
            forwarded=step.forwarded_rows if step is not None else 0,
            planned=int(step is not None and step.planned),
            uniform=int(step is not None and step.plan.kind.value == "uniform"),
            layers=step.plan.num_layers if step is not None else 0,
        )
        return result

    def receive(*_: Any, **__: Any) -> list[Any]:
        nonlocal mode, counted, iteration
        now = Counter(DEVICE.tally)
        if mode.startswith("DECODE"):
            steps.append({**(now - counted), "batch": int(mode.split()[1]), **ours})
        mode, counted = "", now
        all_there = len(taken) == len(numbered)
        done = all_there and all(r.finished() for r in taken.values())
        if together is not None:  # no rank ends before the others
            (done,) = map(bool, min(together.of_all(int(done))))
        if done or iteration > MOST_ITERATIONS:
            scheduler.gracefully_exit = True
        come = [_tokenized(n, request) for n, request in numbered if request.joins == iteration]
        gone: list[Any] = [
            AbortReq(rid=str(n)) for n, request in numbered if request.aborted == iteration
        ]
        number, rest = divmod(iteration, SWITCHED_EVERY)
        if rest == 0 and 1 <= number <= len(run.switched):
            values = {f"{control._PREFIX}{run.switched[number - 1]}": None}
            gone.append(SetInternalStateReq(server_args=values))
        iteration += 1
        return [*come, *gone]

    scheduler._add_request_to_queue, scheduler.run_batch = keep, noting
    SchedulerRequestReceiver.recv_requests = receive
    SenderWrapper.send_output = lambda *_, **__: None
    scheduler.run_event_loop()
    DEVICE.idle()
    for prepare in BEFORE_REPORT:  # what was recorded is written
        prepare()
    sites = {f"{what} at {line}": n for (what, line), n in DEVICE.sites.most_common(60)}
    mine = Served(
        [list(taken[n].output_ids)[: r.max_new_tokens] for n, r in numbered],
        [taken[n].spec_verify_ct for n, _ in numbered],
        [taken[n].spec_num_cap_tokens for n, _ in numbered],
        [taken[n].retraction_count for n, _ in numbered],
        steps,
        sites,
        [_kept(scheduler, taken[n]) for n, _ in numbered],
        [
            list(taken[n].logprob.output_token_logprobs_val or ())[: r.max_new_tokens]
            for n, r in numbered
        ],
        DEVICE.compiled[compiled:],
        memory,
    )
    return mine if together is None else _joined(mine, get_parallel().tp_group, ranks)


def _joined(mine: Served, group: Any, ranks: int) -> Served:
    """Join the results of all ``ranks``, which got requests in turn; steps of one rank."""
    everyones: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyones, mine, group=group.cpu_group)
    everyones = everyones[:: group.world_size // ranks]  # others share requests
    of_requests = "outputs", "verifications", "rows", "retracted", "keys", "logprobs"
    taken_in_turn = {
        name: [
            told
            for turn in zip_longest(*(getattr(each, name) for each in everyones), fillvalue=None)
            for told in turn
            if told is not None
        ]
        for name in of_requests
    }
    return replace(mine, **taken_in_turn)


def sketch(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[L, n * SKETCHED] float32 of keys and values [L, heads, size] of each of n layers: a few
    sums, of which some would differ if a number did.
    """
    rows = torch.cat([torch.cat((k.flatten(1), v.flatten(1)), dim=1) for k, v in layers], dim=1)
    size = rows.shape[1] // len(layers)
    signs = torch.randn((size, SKETCHED), generator=torch.Generator().manual_seed(0))
    return (rows.float().view(-1, len(layers), size) @ signs).flatten(1)


def _kept(scheduler: Any, req: Any) -> list[list[float]]:
    """Sketch of the keys and values of the request's tokens in the prefix cache."""
    from sglang_c2t.srt.tensor_parallel import tp_group
    from tests.emulated.ranks import whole
    from tests.emulated.versions import RELEASE

    group = tp_group()
    slots = RELEASE.cached(scheduler.tree_cache, req).cpu()
    pools = [scheduler.tp_worker.model_runner.token_to_kv_pool]
    if scheduler.draft_worker is not None:
        pools.append(scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool)
    kept = []
    for pool in pools:
        if hasattr(pool, "kv_buffer"):  # latents, equal on all ranks, and RoPE parts
            layers = [kv.host[slots].tensor_split([pool.kv_lora_rank], -1) for kv in pool.kv_buffer]
        else:
            layers = [
                (whole(k.host[slots], group), whole(v.host[slots], group))
                for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)
            ]
        kept.append(sketch(layers))
    told: list[list[float]] = torch.cat(kept, dim=1).tolist()
    return told


def _bytes_of_draft_attention(scheduler: Any) -> dict[str, int]:
    """Bytes of the device that its steps hold, for full drafts and for drafts of all lengths."""
    if scheduler.draft_worker is None:
        return {}
    draft = scheduler.draft_worker.draft_worker
    ours = getattr(draft, "drafter", None)  # it alone has shorter drafts
    shorter = [of.draft_attn_backend for of in ours.host.lengths.shorter.values()] if ours else []
    found: dict[int, int] = {}
    told = {}
    for name, backends in (("whole drafts", [draft.draft_attn_backend]), ("all", shorter)):
        for backend in filter(None, backends):
            for step in (backend, *backend.attn_backends):
                found |= _storages(vars(step))
        told[name] = sum(found.values())
    return told


def _storages(held: Any) -> dict[int, int]:
    """Bytes of the device's tensors, by address, FlashInfer's plans among them."""
    leaves = tree_leaves(held)
    wrappers = [leaf for leaf in leaves if "Wrapper" in type(leaf).__name__]
    leaves += [getattr(wrapper, "_int_workspace_buffer", None) for wrapper in wrappers]
    storages = [t.untyped_storage() for t in leaves if isinstance(t, Tensor) and t.is_cuda]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _tokenized(number: int, request: Request) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        ignore_eos=True,
        custom_params={"c2t": False} if request.opted_out else None,
        **request.sampling,
    )
    least, parameters.min_new_tokens = parameters.min_new_tokens, 0
    parameters.normalize(None)  # which would ask a tokenizer for the token that ends answers
    parameters.min_new_tokens = least
    return TokenizedGenerateReqInput(
        rid=str(number), input_text="", input_ids=array("q", request.ids), input_embeds=None,
        mm_inputs=_seen(request), token_type_ids=None, sampling_params=parameters,
        return_logprob=request.logprobs, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False, lora_id=_known_as(request.adapter),
    )  # fmt: skip


def rotated(picture: tuple[int, int] | None, length: int) -> Tensor:
    """[3, length] int64 of M-RoPE: places in time, height and width. Of a ``picture``, rows times
    columns tokens from the ninth on, all are at one time, and what follows begins behind its longer
    side.
    """
    places = torch.arange(length).repeat(3, 1)
    if picture is not None:
        rows, columns = picture
        token, begins, ends = torch.arange(rows * columns), PICTURE, PICTURE + rows * columns
        seen = torch.stack((token * 0, token // columns, token % columns)) + begins
        places[:, begins:ends] = seen
        places[:, ends:] += begins + max(picture) - ends
    return places


def _known_as(adapter: str | None) -> str | None:
    """SGLang's name for an adapter that it was given as a path."""
    from sglang.srt.lora.lora_registry import LoRARef

    return None if adapter is None else LoRARef.deterministic_id(adapter, adapter)


def _seen(request: Request) -> Any:
    """SGLang's word for it; nothing is to be looked at, so that only places tell."""
    if request.picture is None:
        return None
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    places = rotated(request.picture, len(request.ids))
    behind = places[:, -1:] - (len(request.ids) - 1)
    return MultimodalInputs(mm_items=[], mrope_positions=places, mrope_position_delta=behind[:1])


def case_of(line: str) -> Case:
    """A case from JSON."""
    given = json.loads(line)
    runs = tuple(
        Run(tuple(Request(**{**r, "ids": tuple(r["ids"])}) for r in run.pop("requests")), **run)
        for run in given.pop("runs")
    )
    return Case(tuple(given.pop("flags")), runs, **given)


def main(seconds: int) -> None:
    """Answers each run of each case that comes, in a fork that may take so many ``seconds``."""
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer

    def answer(served: Served) -> None:
        print(json.dumps(asdict(served)), file=answers, flush=True)

    with ExitStack() as stack:
        _device(stack)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            case = case_of(line)
            died = _forked(partial(_serve_all, case, answer, seconds), seconds)
            for _ in case.runs if died else ():
                answer(Served.failed(died))


def _serve_all(case: Case, answer: Callable[[Served], None], seconds: int) -> None:
    """In a fork: a server, and each of its runs in a fork."""
    given = Start.of(case)
    if given.args.tp_size > 1:
        _serve_by_ranks(case, given, answer, seconds)
        return
    scheduler = start(case, given)
    signal.alarm(0)
    for run in case.runs:
        died = _forked(lambda run=run: answer(serve(scheduler, run)), seconds)
        if died:
            answer(Served.failed(died))


def _serve_by_ranks(
    case: Case, given: Start, answer: Callable[[Served], None], seconds: int
) -> None:
    """Each run by a server of its own, as ranks are connected and a fork would share that. Each
    rank is a fork. All are in one order: a device that waits for another one keeps its host, so
    that two orders would wait for each other where hosts agree on something.
    """
    for run in case.runs:

        def serve_as(rank: int, run: Run = run) -> None:
            served = serve(start(case, given, rank), run)
            if rank == 0:
                answer(served)

        ranks = [_fork(partial(serve_as, rank), seconds) for rank in range(given.args.tp_size)]
        died = [end() for end in ranks]
        if died[0]:
            answer(Served.failed("\n".join(died)[-LONGEST_ERROR:]))


def _forked(work: Callable[[], None], seconds: int) -> str:
    """Done in a fork that may take so many ``seconds``; what it died of, if it did."""
    return _fork(work, seconds)()


def _fork(work: Callable[[], None], seconds: int) -> Callable[[], str]:
    """As :func:`_forked`, which waits for it when what is given back is called."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os.write(tell, traceback.format_exc()[-LONGEST_ERROR:].encode())
        sys.stderr.flush()
        os._exit(0)
    os.close(tell)

    def end() -> str:
        with os.fdopen(told) as lines:
            error = lines.read()
        _, status = os.waitpid(child, 0)
        return error or (f"it ended with {status}" if status else "")

    return end


def _device(stack: ExitStack) -> None:
    """The device is there, and SGLang imported."""
    from tests.emulated import libraries, ranks, torch_cuda, triton_interpreter

    stack.enter_context(torch_cuda.installed())
    stack.enter_context(torch_cuda.compiled_as_it_is())
    with libraries.without_libraries():
        import sgl_kernel  # noqa: F401
    libraries.define_operations()
    stack.enter_context(libraries.served())
    stack.enter_context(triton_interpreter.interpreted())
    from sglang.srt import utils  # not before there is a device

    # It keeps what was compiled, and here nothing is.
    kept = patch.object(utils, "cached_triton_kernel", lambda *_: lambda kernel: kernel)
    stack.enter_context(kept)
    stack.enter_context(ranks.connected())
    stack.enter_context(patch.object(gc, "unfreeze"))  # a server's captures would, and collect all
    import sglang.srt.layers.attention.flashattention_backend
    import sglang.srt.layers.attention.flashinfer_backend
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2
    import sglang.srt.speculative.standalone_worker_v2  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
    os._exit(0)  # an interpreter with all of SGLang in it takes seconds to end
