"""Which targets verify packed rows, and what is said of the others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from sglang.srt.utils import common

from sglang_c2t.config import C2TConfig
from sglang_c2t.srt import compat
from sglang_c2t.srt.probes import attribute_names
from sglang_c2t.srt.verify import backends, chain, tree
from tests.doubles import double, real_class
from tests.refusals import refused

#: FlashInfer's for latents.
MLA = double("FlashInferMLAAttnBackend")

MODES = ("auto", "ragged", "static")


def adapters(**of_backend: Any) -> Any:
    """A LoRA manager."""
    backend = double("sglang.srt.lora.backend.base_backend.BaseLoRABackend", **of_backend)
    return double("sglang.srt.lora.lora_manager.LoRAManager", lora_backend=backend)


def target(
    monkeypatch: pytest.MonkeyPatch, *, exchanges: bool = False, recurrent: bool = False,
    backend: Any = None, lora: Any = None, **of_backend: Any,
) -> Any:  # fmt: skip
    """A target on a GPU; FlashInfer unless it has another backend."""
    monkeypatch.setattr(common, "require_gathered_buffer", lambda: exchanges)
    monkeypatch.setattr(compat, "has_recurrent_state", lambda model_config: recurrent)
    attention = backend or double("FlashInferAttnBackend", **{"num_wrappers": 1, **of_backend})
    return double(
        "ModelRunner", attn_backend=attention, model_config=None, device="cuda", server_args=None,
        lora_manager=lora,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_backend_flashinfer_verifies_packed_rows(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Trees of full width have masks of ours, so that the target is prepared for them as well."""
    prepared: list[bool] = []
    monkeypatch.setattr(backends, "prepare", lambda *_, trees, max_rows: prepared.append(trees))
    runner = target(monkeypatch)
    assert (tree.prepare_packing(C2TConfig(verify=mode), runner) is None) is (mode != "static")
    assert (chain.prepare_packing(mode, runner) is None) is (mode != "static")
    assert prepared == ([True] if mode == "static" else [True, False])


def test_backend_mla_verifies_packed_chains_and_refuses_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang refuses trees of a draft that keeps latents, and no other draft's."""
    monkeypatch.setattr(backends, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(compat, "translates_slots", lambda _: False)
    runner = target(monkeypatch, backend=MLA)
    assert chain.prepare_packing("auto", runner) is None
    with refused("cannot verify trees: FlashInfer's attention over latents (MLA) reads no masks"):
        tree.prepare_packing(C2TConfig(), runner)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({"backend": object()}, "attention backend object does not say that it reads packed rows"),
        ({"num_wrappers": 2}, "FlashInfer with sliding windows or cross attention"),
        pytest.param(
            {"kv_index_translator": double("KVIndexTranslator", reads_are_translated=True)},
            "the KV pool hands out translated slots",
            marks=pytest.mark.skipif(
                "kv_index_translator" not in attribute_names(real_class("FlashInferAttnBackend")),
                reason="this SGLang does not translate",
            ),
        ),
        # MoE all-to-all wants multiples of the ranks, and row counts agreed on before.
        ({"exchanges": True}, "ranks exchange rows inside the model (--moe-a2a-backend"),
        ({"recurrent": True}, "the target keeps recurrent state"),
        ({"lora": adapters(is_moe_lora=True)}, "LoRA adapters of experts"),
    ],
)
def test_backend_unsupported_verifies_full_width_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str,
    different: dict[str, Any], reason: str,
) -> None:  # fmt: skip
    """Chains verify full width unless ragged was asked for; trees have no such way out: their
    mask is ours as well.
    """
    runner = target(monkeypatch, **different)
    with refused(f"cannot verify trees: {reason}"):
        tree.prepare_packing(C2TConfig(verify=mode), runner)
    ragged = refused(f"--c2t-verify ragged cannot be served: {reason}")
    with ragged if mode == "ragged" else nullcontext():
        told = chain.prepare_packing(mode, runner)
        assert told is not None
        assert (backends.ASKED_FOR if mode == "static" else reason) in told
    assert (f"verifying full width (same output, no saving): {reason}" in caplog.text) == (
        mode == "auto"
    )
