"""CUDA graphs of packed rows: which ones attention has room for, and what SGLang tunes with."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_c2t.config import ConfigError
from sglang_c2t.plan.tiers import Tiers
from sglang_c2t.srt import compat
from sglang_c2t.srt.verify import flashinfer as flashinfer_verify
from sglang_c2t.srt.verify import graphs, packing
from tests.doubles import double

MIB = 2**20
H100_SMS = 132


# -- FlashInfer's workspace ---------------------------------------------------------------


@example(more=16, slots=1, kv_heads=1, group=1, head_dim=64, by_rows=False)  # a larger tile
@given(
    more=st.sampled_from([14, 15, 16, 62, 63, 64]) | st.integers(0, 4000),
    slots=st.integers(1, 600),
    kv_heads=st.sampled_from([1, 2, 4, 8, 32]),
    group=st.sampled_from([1, 2, 4, 8, 16]),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    by_rows=st.booleans(),
)
def test_flashinfer_workspace_bytes_are_what_its_planner_reserves(
    more: int, slots: int, kv_heads: int, group: int, head_dim: int, by_rows: bool
) -> None:
    """In the words of its ``scheduler.cuh``: one tile and one grid for every replay of a graph."""
    rows = slots + more
    longest = (more + 1) * group  # packed rows, one of each query head of the group
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    grid = max(2 * H100_SMS // kv_heads, -(-rows * group // tile) + slots - 1)
    partial = -(-grid * tile // group) if by_rows else grid * tile
    heads = kv_heads * group
    aligned = -(-heads * partial * head_dim * 4 // 16) * 16
    assert aligned + heads * partial * 4 == flashinfer_verify.workspace_bytes(
        rows, slots, heads=(heads, kv_heads), head_dim=head_dim, num_sm=H100_SMS, by_rows=by_rows
    )


def eight_billion(rows: int, slots: int, *, by_rows: bool = False) -> int:
    """The need of a target of 32 query heads, 8 KV heads of 128, on an H100."""
    return int(
        flashinfer_verify.workspace_bytes(
            rows, slots, heads=(32, 8), head_dim=128, num_sm=H100_SMS, by_rows=by_rows
        )
    )


@settings(max_examples=200)
@given(
    requests=st.integers(1, 400),
    width=st.integers(2, 64),
    mib=st.integers(64, 1024),
    per_slot=st.sampled_from([1, 2]),
    by_rows=st.booleans(),
)
def test_cuda_graph_tiers_fit_the_workspace(
    requests: int, width: int, mib: int, per_slot: int, by_rows: bool
) -> None:
    def fits(rows: int, slots: int) -> bool:
        return eight_billion(rows, slots, by_rows=by_rows) <= mib * MIB

    tiers = Tiers(requests + 1, width, rows_per_slot=per_slot, admits=fits)
    assert all(fits(rows, tiers.slots(rows)) for rows in tiers.rows)
    if fits(requests * width, requests):
        assert tiers.rows
    unbounded = Tiers(requests + 1, width, rows_per_slot=per_slot)
    for rows in range(requests, requests * width + 1, max(requests * width // 7, 1)):
        # No batch loses its graph unless that graph does not fit.
        found, wanted = tiers.pick(rows, requests), unbounded.pick(rows, requests)
        assert found == wanted or not fits(wanted or 0, unbounded.slots(wanted or 0))


def test_flashinfer_planner_release_is_read_from_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import flashinfer

    monkeypatch.setattr(flashinfer, "__file__", str(tmp_path / "__init__.py"))
    assert not compat.flashinfer_counts_rows()  # unknown: what is never too little
    header = tmp_path / "data/include/flashinfer/attention/scheduler.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("num_qo_heads * padded_batch_size * cta_tile_q * head_dim_vo")
    assert not compat.flashinfer_counts_rows()
    header.write_text("num_qo_heads * max_partial_rows * head_dim_vo")
    assert compat.flashinfer_counts_rows()


# -- the runner ---------------------------------------------------------------------------


def runner(workspace_mib: float | None, **attributes: Any) -> Any:
    """Ours, for 160 requests of 6 rows; FlashInfer with a workspace, or another attention."""
    backend = double("sglang.srt.layers.attention.base_attn_backend.AttentionBackend")
    if workspace_mib is not None:
        updater = double(
            "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill",
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
        )
        workspace = torch.empty(int(workspace_mib * MIB), dtype=torch.uint8, device="meta")
        backend = double(
            "FlashInferAttnBackend", indices_updater_prefill=updater, workspace_buffer=workspace
        )
    of = {
        "capture_bs": [1, 80, 161], "captured_req_width": 6, "attn_backend": backend,
        "model_runner": double("ModelRunner", lora_manager=None),
    }  # fmt: skip
    return double(graphs.TieredGraphRunner, **{**of, **attributes})


@pytest.fixture
def _h100(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(multi_processor_count=H100_SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr("sglang_c2t.srt.compat.flashinfer_counts_rows", lambda: False)


@pytest.mark.usefixtures("_h100")
def test_cuda_graphs_get_a_larger_workspace_where_sglangs_is_too_small() -> None:
    """Just as large as the largest of them wants, and no larger than is reasonable."""
    mine = runner(384)
    before = mine.attn_backend.workspace_buffer
    assert max(mine._build_ragged_verify_token_buckets()) == 966
    assert 384 * MIB < mine.attn_backend.workspace_buffer.nbytes < 400 * MIB
    assert before.nbytes == 384 * MIB, "who has it already keeps it"
    enough = runner(512)
    before = enough.attn_backend.workspace_buffer
    enough._build_ragged_verify_token_buckets()
    assert enough.attn_backend.workspace_buffer is before
    huge = runner(384, capture_bs=[1, 2048])
    assert max(huge._build_ragged_verify_token_buckets()) < 2048 * 6
    assert huge.attn_backend.workspace_buffer.nbytes == flashinfer_verify.MOST_WORKSPACE


@pytest.mark.usefixtures("_h100")
def test_cuda_graphs_without_workspace_are_left_out_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_verify, "MOST_WORKSPACE", 384 * MIB)
    with caplog.at_level(logging.WARNING):
        rows = runner(384)._build_ragged_verify_token_buckets()
    assert max(rows) < 966
    assert "room for CUDA graphs of up to 960 packed rows, of 966" in caplog.text
    caplog.clear()
    assert max(runner(512)._build_ragged_verify_token_buckets()) == 966
    assert max(runner(None)._build_ragged_verify_token_buckets()) == 966
    assert not caplog.text


@pytest.mark.usefixtures("_h100")
def test_cuda_graphs_without_workspace_for_any_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_verify, "MOST_WORKSPACE", 100_000)
    with pytest.raises(ConfigError, match="SGLANG_FLASHINFER_WORKSPACE_SIZE"):
        runner(0.1)._build_ragged_verify_token_buckets()


@given(st.integers(1, 12), st.integers(2, 8), st.data())
def test_cuda_graph_runs_exactly_what_was_laid_out_for_it(
    requests: int, width: int, data: st.DataObject
) -> None:
    """Also with one request more than graphs are captured for, whose slot is for padding."""
    tiers = Tiers(requests + 1, width)
    batch = data.draw(st.integers(1, requests + 2))
    rows = data.draw(st.integers(batch, batch * width))
    ours = runner(None, tiers=tiers, capture_num_tokens=tiers.rows, require_mlp_sync=False,
                  is_encoder_decoder=False, capture_hidden_mode=0)  # fmt: skip
    ours.attn_backend.supports_ragged_verify_graph = True
    target = double("ModelRunner", decode_cuda_graph_runner=ours)
    tokens, slots, _ = packing._size(target, None, rows, batch)
    layout = SimpleNamespace(graph_num_tokens=tokens)
    forward_batch = double("ForwardBatch", batch_size=batch, capture_hidden_mode=0)
    in_graph = tiers.pick(rows, batch) is not None
    assert ours._can_run_ragged_verify_graph(forward_batch, layout) == in_graph
    assert in_graph == (tokens in tiers.rows and slots == tiers.slots(tokens))


@given(st.integers(1, 40), st.integers(1, 64), st.none() | st.integers(1, 400))
def test_cuda_graph_autotune_fits_its_buffers(
    requests: int, width: int, max_rows: int | None
) -> None:
    """It forwards N rows for each request; a row limit makes the buffers smaller than that."""
    most = max(Tiers(requests, width, max_rows=max_rows).rows)

    def buffers(rows: int, slots: int) -> Any:
        return SimpleNamespace(input_ids=torch.empty(rows), seq_lens=torch.empty(slots))

    ours = runner(
        None, captured_req_width=width, max_bs=requests, max_num_token=most,
        buffers=buffers(most, requests),
    )  # fmt: skip
    ours._alloc_dummy_decode_buffers = lambda bs, *, num_tokens_per_req: buffers(
        bs * num_tokens_per_req, bs
    )
    given_buffers, batch = ours._autotune_buffers()
    # What `_dummy_run` asserts.
    assert 1 <= batch <= len(given_buffers.seq_lens)
    assert batch * width <= len(given_buffers.input_ids)
    if max_rows is None:  # then as stock
        assert (given_buffers, batch) == (ours.buffers, requests)
