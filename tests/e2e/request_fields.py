"""Every field of SGLang's requests, by its own types, for :mod:`eval.soak.fields`."""

from __future__ import annotations

import dataclasses

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from eval.soak.fields import SAMPLING
from eval.soak.malformed import CHAT, COMPLETIONS
from sglang_c2t.srt.hooks.control import CHANGEABLE, FORGET

FIELDS: dict[str, tuple[str, ...]] = {
    "/generate": tuple(field.name for field in dataclasses.fields(GenerateReqInput)),
    SAMPLING: tuple(SamplingParams.__struct_fields__),
    COMPLETIONS: tuple(CompletionRequest.model_fields),
    CHAT: tuple(ChatCompletionRequest.model_fields),
    "/c2t": (*CHANGEABLE, FORGET, "verify", "record", ""),
}  # fmt: skip
