"""A host without SGLang's draft worker, which drafts at random, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_c2t.plan.planner import Planner
from sglang_c2t.plan.step import StepKind, StepPlan
from sglang_c2t.plan.survival import Survival
from sglang_c2t.srt import attach
from sglang_c2t.srt.draft.drafter import Drafter
from sglang_c2t.srt.draft.host import DraftForward, Host, OnForward, Rows, T
from sglang_c2t.srt.probes import attribute_names
from tests.doubles import double, real_class
from tests.srt.chains import full_chains

STEPS, BATCH, VOCAB = 6, 3, 8


class FakeHost(Host):
    """Notes what is asked of it: layers of each draft, whether eagerly, and how many ran."""

    drafts_in_graphs = False  # type: ignore[assignment]
    token_map = peers = None  # type: ignore[assignment]
    num_slots, device = 8, "cpu"

    def __init__(self, *, topk: int = 1, num_steps: int = STEPS) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.asked: list[tuple[int, bool]] = []
        self.layers_run: list[int] = []
        self._on_forward: OnForward = DraftForward.run
        self._random = torch.Generator().manual_seed(1)

    @contextmanager
    def drafting(
        self, layers: int, build: Callable[..., Any] | None = None, *, eager: bool = False
    ) -> Iterator[None]:
        self.asked.append((layers, eager))
        self.layers_run.append(0)
        with attach.swapped(self, "_build", build):
            yield

    _build: Any = None

    def chains(self, loop: Callable[[], Any], on_forward: OnForward) -> Any:
        with attach.swapped(self, "_on_forward", on_forward):
            return loop()

    def trees(
        self, loop: Callable[[], Any], on_forward: OnForward, gate: Any, organize: Any
    ) -> Any:
        self._grow, self._organize = gate.add, organize
        return self.chains(loop, on_forward)

    def extend(self, stock: Callable[[Any, Any], None], batch: Any, batch_result: Any) -> Rows:
        stock(batch, batch_result)
        return torch.zeros(BATCH, VOCAB), None

    def last_rows(self, extend: Callable[[], T], last: Any = None) -> tuple[T, Rows]:
        return extend(), (torch.zeros(BATCH, VOCAB), None)

    def capture(self, stock: Callable[[], None], *, all_lengths: bool) -> None:
        raise NotImplementedError("nothing is captured here")

    # -- in place of SGLang ---------------------------------------------------------------

    def step(self, drafter: Drafter, batch: Any) -> Any:
        """Draft for a ``batch``, and extend the draft; returns the verify input."""
        batch.spec_info = drafter.draft(batch, lambda: self._draft(drafter, batch))
        drafter.extend_decode(batch, None, lambda *_: None)
        return batch.spec_info

    def _draft(self, drafter: Drafter, batch: Any) -> Any:
        loop = self._draft_chains if self.topk == 1 else self._draft_trees
        drafted = drafter.draft_forward(batch, lambda: loop(batch, self.asked[-1][0]))
        full = full_chains(BATCH, self.num_steps + 1)
        return self._build and self._build(lambda: full, batch, batch.spec_info, *drafted)

    def _draft_chains(self, batch: Any, layers: int) -> Any:
        return None, None, [self._forward(batch, BATCH) for _ in range(layers - 1)], None

    def _draft_trees(self, batch: Any, layers: int) -> Any:
        logits = torch.rand(BATCH, VOCAB)
        for layer in range(layers):
            prob, token = logits.softmax(dim=1).topk(self.topk)
            self._grow(token.view(BATCH, -1, self.topk), prob.view(BATCH, -1, self.topk))
            if layer < layers - 1:
                logits = self._forward(batch, BATCH * self.topk)
        return (*self._organize(), None)

    def _forward(self, batch: Any, rows: int) -> torch.Tensor:
        """Logits of a layer, as the drafter leaves them."""

        def run() -> Any:
            self.layers_run[-1] += 1
            logits = torch.randn(rows, VOCAB, generator=self._random)
            return double("LogitsProcessorOutput", next_token_logits=logits, hidden_states=None)

        batch.input_ids = torch.zeros(rows, dtype=torch.int64)
        forward = DraftForward(batch, run)
        self._on_forward(forward)
        return forward.rows[0]


class Planned(Planner):
    """Plans what a test says."""

    def __init__(self) -> None:
        super().__init__(STEPS, Survival(STEPS))
        self.says(StepKind.PLANNED, STEPS)

    def says(self, kind: StepKind, layers: int) -> None:
        """The next steps are of this kind and length, with rows for all drafts."""
        self.next = StepPlan(kind, layers, 1, BATCH * (layers + 1))

    def plan(self, batch: Any) -> StepPlan:
        return self.next

    def learn(self, record: Any) -> None:
        pass


def batch_of(*slots: int, mode: ForwardMode = ForwardMode.DECODE) -> Any:
    """A batch of the requests in these ``slots``; that of slot 5 opted out."""
    return double(
        "ScheduleBatch",
        reqs=[_request(slot) for slot in slots],
        sampling_info=double("SamplingBatchInfo", is_all_greedy=True),
        forward_mode=mode,
        req_pool_indices=torch.tensor(slots, dtype=torch.int64),
        seq_lens=torch.ones(len(slots), dtype=torch.int64),
        spec_info=double(
            "sglang.srt.speculative.eagle_info.EagleDraftInput",
            bonus_tokens=torch.zeros(len(slots), dtype=torch.int32),
            hidden_states=None,
        ),
    )


def _request(slot: int) -> Any:
    asked = double("SamplingParams", custom_params={"c2t": slot != 5})
    at = {"origin_input_ids": [1], "output_ids": [], "sampling_params": asked}
    made = double("Req", custom_logit_processor=None, **at)
    if "req_pool_idx" in attribute_names(real_class("Req")):  # older SGLang
        made.req_pool_idx = slot
    else:
        made.kv = SimpleNamespace(req_pool_idx=slot)
    return made
