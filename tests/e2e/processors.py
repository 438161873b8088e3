"""Logit processors that requests of tests bring: SGLang's CustomLogitProcessor, by reference."""

from __future__ import annotations

import itertools
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class NoPairTwice(CustomLogitProcessor):
    """Forbids each token that followed the last one before, in prompt or answer."""

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        for row, params in enumerate(custom_param_list):
            req = params["__req__"]
            said = [*req.origin_input_ids, *req.output_ids]
            assert len(said) == req.seqlen
            after = [b for a, b in itertools.pairwise(said) if a == said[-1]]
            logits[row, after] = -float("inf")
        return logits


class EveryOther(CustomLogitProcessor):
    """Counts its calls in the request's params: with drafts, no count of tokens."""

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        for params in custom_param_list:
            params["calls"] = params.get("calls", 0) + 1
        return logits
