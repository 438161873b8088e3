"""Every seam exists in the pinned SGLang, and a missing one is named."""

from __future__ import annotations

import pytest

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
