"""SGLang's own scheduler on the emulated device: requests in, tokens out.

    python -m tests.emulated.serve    reads cases, one a line, and answers each with a line

No HTTP and no tokenizer: requests are handed to the scheduler's loop, some of them while others
run. SGLang is imported once, and each case is served in a fork of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from array import array
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Request:
    """One to serve."""

    ids: tuple[int, ...]
    joins: int = 0  # the iteration at which it comes
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    max_new_tokens: int = 16


@dataclass(frozen=True)
class Case:
    """A server, and what it is asked."""

    flags: tuple[str, ...]
    requests: tuple[Request, ...]
    in_turn: bool = False
    """Everything is done when it is launched."""

    ahead: int | None = None
    """A seed by which streams run ahead of the host; ``None``: all is as late as can be."""


@dataclass
class Served:
    """What became of a case."""

    outputs: list[list[int]]
    steps: list[dict[str, int]]
    """What each decode step counted, with ``batch``."""

    sites: dict[str, int]
    """Where it came from, over all steps: ``what at line``."""

    error: str = ""


def serve(case: Case) -> Served:
    """The scheduler's own loop, until every request has its answer."""
    from sglang.srt.managers import scheduler as of_sglang
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import PortArgs, prepare_server_args

    import sglang_c2t.kernels.rows
    from tests.emulated.device import DEVICE

    load_plugins()
    # Blocks of a launch, which the interpreter runs one by one.
    sglang_c2t.kernels.rows.FULL_GRID = 4
    DEVICE.in_turn = case.in_turn
    DEVICE.ahead = None if case.ahead is None else random.Random(case.ahead)
    args = prepare_server_args(list(case.flags))
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    scheduler = of_sglang.Scheduler(args, PortArgs.init_new(args))
    DEVICE.idle()  # seconds have gone by
    DEVICE.tally.clear()
    DEVICE.sites.clear()
    steps: list[dict[str, int]] = []
    taken: dict[int, Any] = {}
    mode, counted, iteration = "", Counter[str](), 0
    queue, run_batch = scheduler._add_request_to_queue, scheduler.run_batch

    def keep(req: Any, *more: Any, **options: Any) -> Any:
        taken[int(req.rid)] = req
        return queue(req, *more, **options)

    def noting(batch: Any, *more: Any, **options: Any) -> Any:
        nonlocal mode
        mode = f"{batch.forward_mode.name} {len(batch.reqs)}"
        return run_batch(batch, *more, **options)

    def receive(*_: Any, **__: Any) -> list[Any]:
        nonlocal mode, counted, iteration
        now = Counter(DEVICE.tally)
        if mode.startswith("DECODE"):
            steps.append({**(now - counted), "batch": int(mode.split()[1])})
        mode, counted = "", now
        all_there = len(taken) == len(case.requests)
        if (all_there and all(r.finished() for r in taken.values())) or iteration > MOST_ITERATIONS:
            scheduler.gracefully_exit = True
        come = [
            _tokenized(TokenizedGenerateReqInput, SamplingParams, number, request)
            for number, request in enumerate(case.requests)
            if request.joins == iteration
        ]
        iteration += 1
        return come

    scheduler._add_request_to_queue, scheduler.run_batch = keep, noting
    SchedulerRequestReceiver.recv_requests = receive
    SenderWrapper.send_output = lambda *_, **__: None
    scheduler.run_event_loop()
    outputs = [list(taken[n].output_ids)[: r.max_new_tokens] for n, r in enumerate(case.requests)]
    sites = {f"{what} at {line}": n for (what, line), n in DEVICE.sites.most_common(60)}
    return Served(outputs, steps, sites)


def _tokenized(kind: Any, sampling: Any, number: int, request: Request) -> Any:
    parameters = sampling(
        max_new_tokens=request.max_new_tokens, ignore_eos=True, **request.sampling
    )
    parameters.normalize(None)
    return kind(
        rid=str(number), input_text="", input_ids=array("q", request.ids), input_embeds=None,
        mm_inputs=None, token_type_ids=None, sampling_params=parameters, return_logprob=False,
        logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
    )  # fmt: skip


def case_of(line: str) -> Case:
    """A case from JSON."""
    given = json.loads(line)
    requests = tuple(Request(**{**r, "ids": tuple(r["ids"])}) for r in given.pop("requests"))
    return Case(tuple(given.pop("flags")), requests, **given)


def main(seconds: int) -> None:
    """Answers each case that comes, in a fork that may take so many ``seconds``."""
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    with ExitStack() as stack:
        _device(stack)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            child = os.fork()
            if child == 0:
                _answer(line, answers, seconds)
            _, status = os.waitpid(child, 0)
            if status:
                died = Served([], [], {}, f"it ended with {status}")
                print(json.dumps(asdict(died)), file=answers, flush=True)


def _device(stack: ExitStack) -> None:
    """The device is there, and SGLang imported."""
    from tests.emulated import kernels, torch_cuda, triton_interpreter

    stack.enter_context(torch_cuda.installed())
    stack.enter_context(torch_cuda.compiled_as_it_is())
    kernels.import_sgl_kernel()
    kernels.define_operations()
    stack.enter_context(kernels.served())
    stack.enter_context(triton_interpreter.interpreted())
    import sglang.srt.layers.attention.flashattention_backend
    import sglang.srt.layers.attention.flashinfer_backend
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama_eagle3
    import sglang.srt.speculative.eagle_worker_v2
    import sglang.srt.speculative.standalone_worker_v2  # noqa: F401


def _answer(line: str, answers: Any, seconds: int) -> None:
    """In the fork: one answer, and the end."""
    signal.alarm(seconds)
    try:
        served = serve(case_of(line))
    except BaseException:
        served = Served([], [], {}, traceback.format_exc())
        traceback.print_exc()
    print(json.dumps(asdict(served)), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
