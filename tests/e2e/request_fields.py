"""Every field of SGLang's requests, by its own types, for :mod:`eval.soak.fields`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from eval.soak.fields import SAMPLING
from eval.soak.malformed import CHAT, COMPLETIONS
from sglang_c2t.srt.hooks.control import CHANGEABLE, FORGET


def _annotated(annotations: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    return {name: str(annotations.get(name, "Any")) for name in names}


def _modelled(model: type[BaseModel]) -> dict[str, str]:
    return {name: str(field.annotation) for name, field in model.model_fields.items()}


FIELDS: dict[str, dict[str, str]] = {
    "/generate": {field.name: str(field.type) for field in dataclasses.fields(GenerateReqInput)},
    SAMPLING: _annotated(SamplingParams.__annotations__, SamplingParams.__struct_fields__),
    COMPLETIONS: _modelled(CompletionRequest),
    CHAT: _modelled(ChatCompletionRequest),
    "/c2t": dict.fromkeys((*CHANGEABLE, FORGET, "verify", "record", ""), "Any"),
}
