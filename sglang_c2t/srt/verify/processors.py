"""Custom logit processors, called for each verified row with the row's own output.

``--enable-custom-logit-processor`` lets requests send them. SGLang's plain sampler calls one with
the logits of a token and the request's ``custom_params``, which hold the request as ``__req__``.
SGLang's speculation does not call them. Here the output of a row's ``__req__`` ends with the drafts
on its path. The host copies these tokens from the device when a processor reads them.

A processor that writes into its params or the request would count calls for rows that are not kept.
Such a request ends with 400.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from torch import Tensor

from sglang_c2t.srt import attach
from sglang_c2t.srt.verify.packing import sent

REQUEST = "__req__"

#: A request's custom_params at the call for its first row.
_GIVEN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class RowRequest(Req):
    """SGLang's request as seen by one of its rows."""

    _row_output: Callable[[], list[int]]

    @classmethod
    def of(cls, req: Any, output: Callable[[], list[int]]) -> RowRequest:
        """Copy a request with the row's ``output``, which is computed on access."""
        made = object.__new__(cls)
        made.__dict__.update(req.__dict__, _row_output=output)
        return made

    @property
    def output_ids(self) -> Any:  # type: ignore[override]
        """The output before the row's next token, in SGLang's container type."""
        made = self.__dict__["output_ids"][:0]
        made.extend(self._row_output())
        return made

    def changed(self, req: Any) -> bool:
        """Whether a processor wrote to it."""
        own = {k: v for k, v in self.__dict__.items() if k != "_row_output"}
        mine = vars(req)
        return own.keys() != mine.keys() or any(own[name] is not mine[name] for name in own)


def ask(
    logits: Tensor, batch: Any, rows_of: list[int], outputs: Callable[[], list[list[int]]]
) -> None:
    """Call each request's processor on the logits [R, V] of its rows, in place.

    Args:
        logits: Penalties, bias and grammar are applied.
        batch: SGLang's, of B requests.
        rows_of: Rows of each request.
        outputs: Returns the output of each row.
    """
    info = batch.sampling_info
    ends = torch.tensor(rows_of).cumsum(0).tolist()
    for key, entry in info.custom_logit_processor.items():
        processor = entry[0] if isinstance(entry, tuple) else entry.processor
        asked = [
            (request, row)
            for request, req in enumerate(batch.reqs)
            if req.custom_logit_processor is not None and hash(req.custom_logit_processor) == key
            for row in range(ends[request] - rows_of[request], ends[request])
        ]
        params = [
            _params(batch.reqs[request], info.custom_params[request], row, outputs)
            for request, row in asked
        ]
        rows = sent(torch.tensor([row for _, row in asked]), logits.device)
        found = processor(logits.index_select(0, rows), params)
        logits.index_copy_(0, rows, found.to(logits.dtype))
        for (request, _), mine in zip(asked, params, strict=True):
            if mine is not None and _changed(batch.reqs[request], mine):
                _refuse(batch.reqs[request], type(processor).__name__)


def _params(
    req: Any, params: dict[str, Any] | None, row: int, outputs: Callable[[], list[list[int]]]
) -> dict[str, Any] | None:
    """Return the processor's params for a row."""
    if params is None:
        return None
    if req not in _GIVEN:
        _GIVEN[req] = copy.deepcopy({k: v for k, v in params.items() if k != REQUEST})
    if REQUEST not in params:
        return dict(params)
    return {**params, REQUEST: RowRequest.of(req, lambda: outputs()[row])}


def _changed(req: Any, params: dict[str, Any]) -> bool:
    row = params.pop(REQUEST, None)
    return (isinstance(row, RowRequest) and row.changed(req)) or params != _GIVEN[req]


def _refuse(req: Any, processor: str) -> None:
    """End the request with 400."""
    message = (
        f"custom_logit_processor {processor} writes into custom_params or __req__: --c2t asks it "
        "for several tokens at once, of which some are not kept; have it read "
        "__req__.output_ids instead"
    )
    if req.to_finish is None:
        attach.write(
            req, to_finish=FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
        )
