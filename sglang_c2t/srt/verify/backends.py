"""Checks whether a target can verify packed rows, and prepares it."""

from __future__ import annotations

from typing import Any

from sglang_c2t.srt import compat, data_parallel
from sglang_c2t.srt.verify import adapters, graphs, ragged

#: Reason for full width on a user's request.
ASKED_FOR = "--c2t-verify static asks for it"


def unsupported_reason(target_runner: Any, *, trees: bool = False) -> str | None:
    """Return why this runner cannot verify packed rows, of ``trees`` or chains; ``None`` if it can.
    It reads a backend's own statement. A backend that ignores the layout would read wrong rows
    without an error, so ``trial.py`` also tests it.
    """
    backend = target_runner.attn_backend
    if compat.is_flashinfer(backend):
        from sglang_c2t.srt.verify import flashinfer

        if (reason := flashinfer.unsupported_reason(backend)) is not None:
            return reason
    elif compat.is_flashinfer_mla(backend):
        from sglang_c2t.srt.verify import flashinfer_mla

        if (reason := flashinfer_mla.unsupported_reason(backend, trees=trees)) is not None:
            return reason
    elif not compat.reads_packed_rows(backend):
        return f"attention backend {type(backend).__name__} does not say that it reads packed rows"
    if compat.gathers_rows(target_runner.server_args) and not data_parallel.agrees_on_rows():
        return (
            "ranks exchange rows inside the model (--moe-a2a-backend, --moe-dense-tp-size), and "
            "agree on full width before it"
        )
    if compat.has_recurrent_state(target_runner.model_config):
        return "the target keeps recurrent state per verified row"
    manager = compat.lora_manager(target_runner)
    if manager is not None and manager.lora_backend.is_moe_lora:
        return "LoRA adapters of experts were not tested with packed rows"
    return None


def prepare(target_runner: Any, *, trees: bool, max_rows: int | None) -> None:
    """Make the target's attention and CUDA graphs accept packed rows."""
    if compat.is_flashinfer(target_runner.attn_backend):
        from sglang_c2t.srt.verify import flashinfer

        flashinfer.adopt(target_runner.attn_backend)
    elif compat.is_flashinfer_mla(target_runner.attn_backend):
        from sglang_c2t.srt.verify import flashinfer_mla

        flashinfer_mla.adopt(target_runner.attn_backend)
    elif target_runner.device == "cuda":
        ragged.patch_backend_for_ragged_layout(target_runner.attn_backend)
    if (manager := compat.lora_manager(target_runner)) is not None:
        adapters.use_per_row_lora(manager)
    if target_runner.device == "cuda":
        graphs.use_tiers(target_runner, trees=trees, max_rows=max_rows)


def disable_packing(target_runner: Any) -> None:
    """Make the target verify full drafts, in SGLang's own CUDA graphs if it has any."""
    if (manager := compat.lora_manager(target_runner)) is not None:
        adapters.restore_per_request_lora(manager)
    if target_runner.device == "cuda":
        graphs.use_stock(target_runner)
