"""Was this answer right? Pure: a request, its reply and what was done to the server meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eval.soak.traffic import Job, Outputs, begins, same

Verdict = Literal["right", "cut", "timed out", "refused", "as stock", "wrong", "unexpected"]

#: What may be: a whole and right answer; the beginning of one that somebody ended; a request over
#: the server's time limit; a malformed one refused; one that a stock server does not refuse either.
GOOD: tuple[Verdict, ...] = ("right", "cut", "timed out", "refused", "as stock")


#: What SGLang says of a request that it ends without a reason.
REASON_LOST = frozenset({"Aborted", "Abort in waiting queue"})


@dataclass(frozen=True)
class Reply:
    """What came back. Times are seconds of one monotonic clock."""

    status: int  # of HTTP, or of the error in a stream; 0 when nothing came
    started: float
    ended: float
    outputs: Outputs = ()
    left: bool = False  # the client went away on purpose
    problem: str = ""  # message of a refusal or a failure

    @property
    def seconds(self) -> float:
        """How long the client waited."""
        return self.ended - self.started

    @property
    def messages(self) -> list[str]:
        """What was said about a failure, of the whole and of each answer."""
        told = [self.problem, *(output.message for output in self.outputs)]
        return [text for text in told if text]


@dataclass
class Interruptions:
    """When everybody's requests were ended, and how long one may run."""

    time_limit: float  # seconds a request may decode
    spans: list[tuple[float, float]] = field(
        default_factory=list
    )  # seconds, ``inf`` while it lasts

    def meets(self, reply: Reply) -> bool:
        """Whether some interruption happened while the request was under way."""
        return any(start <= reply.ended and reply.started <= end for start, end in self.spans)


def judge(
    job: Job, reply: Reply, expected: Outputs | None, interruptions: Interruptions
) -> Verdict:
    """Verdict on a well-formed request; ``expected`` is None for a sampled one."""
    if expected is not None and not begins(reply.outputs, expected):
        return "wrong"
    if reply.left:
        return "cut"
    if reply.status == 200 and all(o.finish in ("stop", "length") for o in reply.outputs):
        whole = bool(reply.outputs) if expected is None else same(reply.outputs, expected)
        return "right" if whole else "wrong"
    ended_by_others = job.end == "abort" or interruptions.meets(reply)
    if ended_by_others and reply.status in (200, 400, 503):
        return "cut"
    if reply.seconds >= interruptions.time_limit and _says_timeout(job, reply):
        return "timed out"
    return "unexpected"


def _says_timeout(job: Job, reply: Reply) -> bool:
    """OpenAI endpoints and streams say of an answer that was begun only that it was aborted; and
    SGLang forgets why where it ends a request that reads its prompt in chunks, as a retracted one
    reads its own answer again (``Scheduler.process_pending_chunked_abort``).
    """
    silent = (job.stream or job.path != "/generate") and reply.status == 200
    return silent or any(
        "timeout reached" in text or text in REASON_LOST for text in reply.messages
    )


def judge_malformed(
    reply: Reply, stock_status: int | None, interruptions: Interruptions
) -> Verdict:
    """Verdict on a malformed request, given what a stock server answered to it; None where it
    would have ended, so that a refusal is all that is right.

    Some are refused by the scheduler only, so that they may be aborted while they wait there.
    """
    if 400 <= reply.status < 500:
        return "refused"
    if harm(reply.status) <= allowed_harm(stock_status):
        return "as stock"
    aborted = "abort" in reply.problem.lower() and interruptions.meets(reply)
    return "cut" if aborted else "unexpected"


def harm(status: int) -> int:
    """How bad an answer to a malformed request is: refused, taken, broken, none."""
    if 400 <= status < 500:
        return 0
    return 1 if 200 <= status < 400 else 2 if status >= 500 else 3


def allowed_harm(stock_status: int | None) -> int:
    """What ``--c2t`` may answer where stock answers so (None: it would end): what stock takes may
    be taken, everything else must be refused.
    """
    return 1 if stock_status is not None and harm(stock_status) == 1 else 0


def own_of_stock(stock: Mapping[str, int | None]) -> dict[str, int | None]:
    """Names and statuses of malformed requests that a stock server does not refuse."""
    return {name: status for name, status in stock.items() if status is None or harm(status) > 0}
