"""Stand-ins for SGLang's objects that cannot have what SGLang's have not.

A double that brings the attribute which the code under test reads hides that SGLang has
renamed it. So a double is an instance of the real class, built without its ``__init__`` (which
may want a GPU or a model), and holds only what that class's source says its instances hold.
"""

from __future__ import annotations

import pkgutil
from typing import Any, cast

from sglang_c2t.srt.probes import attribute_names

#: SGLang's classes by their short name.
SGLANG = {
    full.rpartition(".")[2]: full
    for full in (
        "sglang.srt.layers.attention.flashinfer_backend.DecodeMetadata",
        "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend",
        "sglang.srt.layers.attention.flashinfer_backend.FlashInferMultiStepDraftBackend",
        "sglang.srt.layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend",
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        "sglang.srt.managers.schedule_batch.Req",
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "sglang.srt.managers.tp_worker.TpModelWorker",
        "sglang.srt.managers.utils.GenerationBatchResult",
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "sglang.srt.model_executor.model_runner.ModelRunner",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        "sglang.srt.sampling.sampling_params.SamplingParams",
        "sglang.srt.server_args.ServerArgs",
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker",
    )
}


def double(cls: type | str, **attributes: Any) -> Any:
    """An instance of ``cls`` that holds ``attributes``: a class, a name of :data:`SGLANG`, or a
    full name.
    """
    real = real_class(cls)
    unknown = sorted(attributes.keys() - attribute_names(real))
    assert not unknown, f"instances of {real.__qualname__} have no {', '.join(unknown)}"
    computed = {n: v for n, v in attributes.items() if isinstance(getattr(real, n, None), property)}
    if hasattr(real, "__struct_fields__"):  # msgspec's are made of their fields alone
        return real(**attributes)
    made = object.__new__(type(real.__name__, (real,), computed) if computed else real)
    for name in attributes.keys() - computed.keys():
        object.__setattr__(made, name, attributes[name])  # a frozen class as well
    return made


def real_class(cls: type | str) -> type:
    """The class that a double is of."""
    if isinstance(cls, type):
        return cls
    return cast(type, pkgutil.resolve_name(SGLANG.get(cls, cls)))


def invented(stand_in: object, cls: type | str) -> set[str]:
    """List attributes of a hand-made double that instances of ``cls`` lack."""
    return set(dir(stand_in)) - set(dir(object())) - attribute_names(real_class(cls)) - {
        "__dict__", "__module__", "__weakref__",
    }  # fmt: skip
