"""LoRA adapters of packed rows: the adapter of each row in SGLang's backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_c2t.srt import compat
from sglang_c2t.srt.cpu import engine
from sglang_c2t.srt.verify import adapters
from sglang_c2t.srt.verify.packed import PackedVerifyInput
from sglang_c2t.srt.verify.packing import HostSizes, Packing
from tests.doubles import double

pytestmark = pytest.mark.skipif(
    not compat.verifies_adapters(), reason="this SGLang serves no adapters beside drafts"
)

WIDTH = 4
LEFT, RIGHT = "left", "right"
#: Where each stands in SGLang's memory of adapters.
PLACES = {None: 0, LEFT: 1, RIGHT: 2}


class NeverThere(HostSizes):
    """Whoever asks for these sizes waits for ever."""

    def wait(self) -> Tensor:
        raise AssertionError("nobody has to wait")


def verification(
    of: list[str | None], rows: list[int] | None, tokens: int, sizes: HostSizes | None = None
) -> Any:
    """A verify forward of so many ``tokens``, with the adapters ``of`` requests; with all rows of
    each where none are given.
    """
    packing = None if rows is None else Packing(torch.tensor(rows), WIDTH, sizes=sizes)
    return double(
        "ForwardBatch", forward_mode=ForwardMode.TARGET_VERIFY, batch_size=len(rows or of),
        lora_ids=of, input_ids=torch.zeros(tokens, dtype=torch.int64), return_logprob=False,
        spec_info=double(PackedVerifyInput, packing=packing, draft_token_num=WIDTH),
    )  # fmt: skip


def test_lora_row_has_the_adapter_of_its_request() -> None:
    for of, rows, tokens, expected in (
        ([LEFT, None, RIGHT], [1, 3, 2], 6, [LEFT, None, None, None, RIGHT, RIGHT]),
        ([LEFT, None], [2, 1], 5, [LEFT, LEFT, None, None, None]),
        ([RIGHT, LEFT], None, 8, [RIGHT] * 4 + [LEFT] * 4),
        ([], [1, 1], 2, [None, None]),  # for no adapter
    ):  # fmt: skip
        assert adapters.adapters_of_rows(verification(of, rows, tokens)) == expected


def test_lora_waits_for_sizes_only_where_adapters_differ() -> None:
    never = NeverThere(torch.tensor([3, 2]))
    for one in (None, LEFT):
        told = adapters.adapters_of_rows(verification([one, one], [3, 2], 8, never))
        assert told == [one] * 8
    with pytest.raises(AssertionError, match="wait"):
        adapters.adapters_of_rows(verification([LEFT, None], [3, 2], 8, never))


def manager_of(backend: Any) -> Any:
    """A LoRA manager in whose memory both adapters are."""
    memory = SimpleNamespace(uid_to_buffer_id=PLACES, get_buffer_id=PLACES.__getitem__)
    adapter = SimpleNamespace(config=SimpleNamespace(r=4), scaling=1.0)
    return double(
        "sglang.srt.lora.lora_manager.LoRAManager", lora_backend=backend, memory_pool=memory,
        attn_dp_enabled=False,
        loras={LEFT: adapter, RIGHT: adapter}, max_loras_per_batch=len(PLACES),
    )  # fmt: skip


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of SGLang's LoRA backends."""
    from sglang.srt.lora.backend import chunked_backend
    from sglang.srt.lora.backend.lora_registry import get_backend_from_name

    settings = SimpleNamespace(max_lora_chunk_size=16)
    monkeypatch.setattr(chunked_backend, "get_lora", lambda: settings)
    cls: Any = get_backend_from_name(name)
    return cls(max_loras_per_batch=len(PLACES), device=torch.device("cpu"), server_args=None)


def places_of_rows(backend: Any, tokens: int) -> list[int]:
    """[T]: whose weights the backend's kernels would take for each row."""
    info = getattr(backend, "sgemm_batch_info", None) or backend.batch_info
    if hasattr(info, "token_slots"):
        return [max(place, 0) for place in info.token_slots[:tokens].tolist()]  # -1: none
    if hasattr(info, "weight_indices_cpu"):
        each = info.weight_indices_cpu.repeat_interleave(info.seg_lens_cpu)
        return [int(place) for place in each]
    found = [-1] * tokens
    bounds, rows = info.seg_indptr.tolist(), info.permutation.tolist()
    for segment in range(info.num_segments):
        for at in range(bounds[segment], bounds[segment + 1]):
            assert found[rows[at]] == -1, "a row of two segments"
            found[rows[at]] = int(info.weight_indices[segment])
    return found


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["csgmv", "triton", "triton_v2", "torch_native"])
def test_lora_backend_applies_the_adapter_of_each_row(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs it writes into what was captured; the largest has full width."""
    backend = made(name, monkeypatch)
    manager = manager_of(backend)
    adapters.use_per_row_lora(manager)
    with engine._Unpinned():
        if graphs:
            manager.init_decode_cuda_graph_batch_info(
                max_bs_in_cuda_graph=5, num_tokens_per_req=WIDTH
            )
        for of, rows, tokens in (
            ([LEFT, None, RIGHT, LEFT], [1, 4, 2, 3], 12),
            ([RIGHT, LEFT, RIGHT, None], [4, 4, 4, 4], 20),
            ([None, RIGHT], [1, 1], 2),
        ):
            forward = verification(of, rows, tokens)
            manager.prepare_lora_batch(forward)
            owners = [a for a, n in zip(of, rows, strict=True) for _ in range(n)]
            told = places_of_rows(backend, tokens)[: len(owners)]
            assert told == [PLACES[owner] for owner in owners]
            assert backend.batch_info.use_cuda_graph == graphs
            assert forward.forward_mode.is_target_verify()  # what attention reads is left alone
            assert forward.batch_size == len(of)


def test_lora_manager_is_restored() -> None:
    manager = manager_of(None)
    stock = manager.prepare_lora_batch, manager.init_decode_cuda_graph_batch_info
    adapters.use_per_row_lora(manager)
    assert manager.prepare_lora_batch != stock[0]
    adapters.restore_per_request_lora(manager)
    assert (manager.prepare_lora_batch, manager.init_decode_cuda_graph_batch_info) == stock
