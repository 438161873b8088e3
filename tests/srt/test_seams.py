"""Every seam exists in the installed SGLang, and a missing one is named."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_c2t.srt import compat


def test_every_seam_fits_the_installed_sglang() -> None:
    assert compat.broken_seams() == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sglang.srt.no_such_module.thing", "not found"),
        ("sglang.srt.server_args.ServerArgs.no_such_method", "not found"),
    ],
)
def test_a_missing_symbol_is_a_defect(target: str, said: str) -> None:
    defect = compat.Seam(target, "test").defect()
    assert defect is not None
    assert said in defect


def test_a_missing_parameter_or_field_is_a_defect() -> None:
    """A renamed argument breaks us as surely as a renamed function."""
    verify = compat.Seam(f"{compat.EAGLE_WORKER}.EAGLEWorkerV2.verify", "test", ["batch", "x"])
    assert verify.defect() == "lacks the parameters ['x']"
    result = compat.Seam(
        "sglang.srt.managers.utils.GenerationBatchResult", "test", fields=["cap_lens", "y"]
    )
    assert result.defect() == "lacks the fields ['y']"


def test_a_server_argument_that_is_gone_is_an_error_not_off() -> None:
    """A refusal that reads a renamed argument must not let the combination through."""
    with pytest.raises(compat.SeamError, match="has no server argument enable_lora"):
        compat.argument(object(), "enable_lora")


def test_a_broken_seam_is_refused_in_a_sentence_that_names_it(monkeypatch) -> None:
    import sglang.srt.speculative.eagle_worker_common as common

    monkeypatch.delattr(common, "eagle_prepare_for_verify")
    with pytest.raises(compat.SeamError) as error:
        compat.require_seams()
    assert f"{compat.EAGLE_COMMON}.eagle_prepare_for_verify" in str(error.value)
    assert f"SGLang {compat.sglang_version()}" in str(error.value)


def test_a_seam_that_moved_fits_where_either_place_is_there() -> None:
    """What one release lacks another may have; only an SGLang without both is refused."""
    here = compat.Seam("sglang.srt.server_args.ServerArgs", "test")
    gone = compat.Seam("sglang.srt.server_args.NoSuchClass", "test")
    either = dataclasses.replace(gone, otherwise=here)
    assert either.defect() is None
    assert either.chosen() is here
    assert dataclasses.replace(here, otherwise=gone).chosen().target == here.target
    neither = dataclasses.replace(gone, otherwise=dataclasses.replace(gone, target="sglang.none"))
    assert neither.chosen() is neither
    defect = neither.defect()
    assert defect is not None
    assert "NoSuchClass" in defect
    assert "nor sglang.none: not found" in defect


@dataclasses.dataclass
class NewVerifyInput:
    """Says itself where its rows are written."""

    prepared_out_cache_loc: Tensor | None = None
    kv_loc_plan: object | None = "the full window"


@dataclasses.dataclass
class OldVerifyInput:
    """Leaves that to a function that SGLang looks up when it verifies."""


def bind_rows(verify_input: NewVerifyInput | OldVerifyInput) -> Tensor:
    """As SGLang does in ``eagle_prepare_for_verify``."""
    if isinstance(verify_input, NewVerifyInput):
        assert verify_input.kv_loc_plan is None
        assert verify_input.prepared_out_cache_loc is not None
        return verify_input.prepared_out_cache_loc
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func

    return assign_extend_cache_locs_uniform_func(req_pool_indices=None, draft_token_num=6)


@pytest.mark.parametrize("kind", [NewVerifyInput, OldVerifyInput])
def test_packed_rows_are_written_where_we_say(kind: type) -> None:
    locs = torch.tensor([7, 3, 9])
    verify_input = kind()
    with compat.writing_rows(verify_input, locs):
        assert bind_rows(verify_input) is locs


def test_rows_that_sglang_binds_by_other_means_are_not_verified() -> None:
    """They would be written to the slots of other rows."""
    with (
        pytest.raises(AssertionError, match="bound the rows to verify without"),
        compat.writing_rows(OldVerifyInput(), torch.tensor([7])),
    ):
        pass


def test_the_width_of_result_rows_is_told_in_the_field_that_the_result_has() -> None:
    new = SimpleNamespace(speculative_output_stride=None, speculative_num_draft_tokens=28)
    compat.set_output_stride(new, 6)
    assert (new.speculative_output_stride, new.speculative_num_draft_tokens) == (6, 28)
    old = SimpleNamespace(speculative_num_draft_tokens=28)
    compat.set_output_stride(old, 6)
    assert vars(old) == {"speculative_num_draft_tokens": 6}


def test_dp_attention_is_found_by_its_size_or_by_its_flag() -> None:
    """The flag is older than the size; an SGLang that has neither is not "off"."""
    assert compat.uses_dp_attention(SimpleNamespace(attn_dp_size=2))
    assert not compat.uses_dp_attention(SimpleNamespace(attn_dp_size=1, enable_dp_attention=False))
    assert compat.uses_dp_attention(SimpleNamespace(enable_dp_attention=True))
    with pytest.raises(compat.SeamError, match="no server argument enable_dp_attention"):
        compat.uses_dp_attention(SimpleNamespace())
