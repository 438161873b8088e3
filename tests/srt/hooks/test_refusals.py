"""Refusals of ``--c2t``: one clear line, exit code 2, before any model loads.

The launcher's own parsing and resolution run in this process; test_launch.py shows the
same through the real command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.server import TARGET, speculative_flags
from sglang_c2t import config
from sglang_c2t.srt import compat, environment, seams, versions
from sglang_c2t.srt.versions import TESTED

EAGLE3 = list(speculative_flags("EAGLE3"))
TREES = list(speculative_flags("EAGLE3", topk=4, num_draft_tokens=16))
TOGETHER = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
DECODE = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"]


newest = pytest.mark.skipif(versions.installed() != TESTED[-1], reason="refused beside older ones")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    """Load the plugin as the launcher does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.utils.common import is_cpu

        from sglang_c2t.srt.cpu import engine as cpu_engine

        is_cpu.cache_clear()  # another test may have loaded SGLang, and us, for a GPU
        load_plugins()
        cpu_engine.install()
        HookRegistry.apply_hooks()  # those of an install() after load_plugins()
        yield


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, "")  # restored, also after a test published one


def launch(*flags: str) -> object:
    """Parse and resolve a command line; SystemExit is a refusal."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(["--model-path", str(TARGET), "--device", "cpu", *flags])
    if hasattr(args, "resolve_once"):  # older SGLang resolves when it parses
        args.resolve_once()
    return args


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The last line a user sees, after checking that the launcher exits with 2."""
    with pytest.raises(SystemExit) as exit_:
        launch(*flags)
    assert exit_.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def flags_of(given: list[str] | dict[str, Any], folder: Path) -> list[str]:
    """Flags as they are; settings in a file of ``--c2t-config``."""
    if isinstance(given, list):
        return given
    path = folder / "c2t.json"
    path.write_text(json.dumps(given))
    return ["--c2t-config", str(path)]


def test_launch_publishes_the_resolved_configuration(tmp_path: Path) -> None:
    launch(*EAGLE3, "--c2t", "--c2t-policy", "fixed", "--c2t-verify", "static")
    assert config.active() == config.C2TConfig(policy="fixed", verify="static")
    recording = {"record": str(tmp_path), "record_share": 0.5}
    launch(*EAGLE3, "--c2t", *flags_of(recording, tmp_path))
    assert config.active() == config.C2TConfig.from_mapping(recording)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("draft", [EAGLE3, TREES], ids=["chains", "trees"])
def test_launch_of_prefill_and_decode_servers_is_served(mode: str, draft: list[str]) -> None:
    launch(*draft, "--c2t", *DECODE[:1], mode, *DECODE[2:])
    assert config.active() == config.C2TConfig()


def test_launch_without_c2t_publishes_nothing_and_refuses_our_settings(capsys) -> None:
    launch(*EAGLE3)
    assert config.active() is None
    assert "--c2t-beta given without --c2t" in refusal(capsys, *EAGLE3, "--c2t-beta", "0.5")
    with pytest.raises(SystemExit):
        launch(*EAGLE3, "--speculative-nun-steps", "5")
    err = capsys.readouterr().err
    assert err.startswith("usage: ")
    assert "did you mean" not in err, "typos in SGLang's flags are left to SGLang"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--c2t-beta", "1.5"], "beta must be a number in (0, 1), got 1.5"),
        (["--c2t-beta", "high"], "argument --c2t-beta: invalid float value: 'high'"),
        (["--c2t-policy", "nonsense"], "unknown c2t policy 'nonsense'; known: auto, c2t, c2t"),
        (["--c2t-classifier", "/absent.safetensors"], "cannot read its card absent.json"),
        (["--c2t-config", "/absent.json"], "cannot read c2t config file /absent.json"),
        (["--c2t-record", "/proc/absent"], "cannot write c2t recordings to /proc/absent"),
        (["--c2t-state", "/dev/null"], "/dev/null cannot be written: OSError: [Errno 22] not a re"),
        (["--c2t-state", "/absent/state"], "/absent is no directory, for the file state"),
        (["--c2t-config", "/dev/zero"], "cannot read c2t config file /dev/zero: [Errno 22] not a"),
        (["--c2t-verify", "packed"], "argument --c2t-verify: invalid choice: 'packed'"),
        (["--c2t-max-verify-rows", "64"], "it bounds trees; set --speculative-eagle-topk above 1"),
        (["--c2t-policy", "eagle2"], "policy eagle2 grows trees: set --speculative-eagle-topk a"),
    ],
)  # fmt: skip
def test_launch_with_a_wrong_setting_is_refused(
    capsys, tmp_path: Path, given: Any, said: str
) -> None:
    """Settings that only trees know among them."""
    assert said in refusal(capsys, *EAGLE3, "--c2t", *flags_of(given, tmp_path))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--c2t-bta", "0.5"], "--c2t-bta 0.5; did you mean --c2t-beta?"),
        (["--c2-policy=fixed"], "--c2-policy=fixed; did you mean --c2t-policy?"),
        (["--c2t_record", "d"], "--c2t_record d; did you mean --c2t-record?"),
        (["--c2t-beta"], "argument --c2t-beta: expected one argument"),
    ],
)
def test_launch_with_a_typo_in_our_flags_is_refused_in_one_line(
    capsys, flags: list[str], said: str
) -> None:
    """Without SGLang's usage, hundreds of lines before the error."""
    with pytest.raises(SystemExit) as exit_:
        launch(*EAGLE3, "--c2t", *flags)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.rstrip().endswith(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "it needs a draft model; add --speculative-algorithm"),
        (
            ["--speculative-algorithm", "NGRAM"],
            "a --speculative-algorithm other than EAGLE, EAGLE3",
        ),
        (
            [*speculative_flags("EAGLE3", num_steps=3), "--speculative-adaptive"],
            "--speculative-adaptive both set the draft length",
        ),
        ([*speculative_flags("STANDALONE"), "--enable-lora"], "drop --enable-lora"),
        ([*EAGLE3, *TOGETHER, "--c2t-record", "x"], "drop --enable-dp-attention while recording"),
        ([*EAGLE3, *TOGETHER, *DECODE], "--enable-dp-attention with --disaggregation-mode: the"),
        (
            [*EAGLE3, "--c2t-verify", "ragged", "--attention-backend", "torch_native"],
            "an --attention-backend other than fa3, fa4, flashinfer, trtllm_mha, ",
        ),
        (
            [*EAGLE3, "--c2t-policy", "auto", "--c2t-verify", "static"],
            "plans: it decides how many rows are verified; drop --c2t-verify static",
        ),
        (
            [*EAGLE3, "--c2t-policy", "c2t", "--c2t-state", "s"],
            "choose --c2t-policy auto or rows-only, or drop it",
        ),
        (
            [*speculative_flags("STANDALONE"), *DECODE],
            "a hidden state, which such a draft has none of; drop --disaggregation-mode",
        ),
        ([*EAGLE3, *DECODE[:-1], "nixl"], "no other was tested; choose mooncake"),
        ([*EAGLE3, *DECODE, "--c2t-record", "x"], "on the server that prefills; drop one of them"),
        ([*TREES, "--c2t-policy", "rows-only"], "policy rows-only cuts chains only"),
        (
            [*TREES, "--c2t-policy", "auto", "--c2t-max-verify-rows", "64"],
            "plans: it decides how many rows are verified; drop --c2t-max-verify-rows",
        ),
    ],
)
def test_launch_with_an_unsupported_combination_is_refused(
    capsys, flags: list[str], said: str
) -> None:
    assert said in refusal(capsys, *flags, "--c2t")


@newest
def test_launch_recording_every_root_with_mixed_chunks_is_refused(capsys, tmp_path: Path) -> None:
    """Older releases switch mixed chunks off beside drafts."""
    every = ["--c2t-record", str(tmp_path), "--c2t-record-roots", "every"]
    said = refusal(capsys, *EAGLE3, "--c2t", *every, "--enable-mixed-chunk")
    assert "a token without a draft after it; drop --enable-mixed-chunk while recording" in said


ADAPTED = (["--lora-paths", "adapter=/absent"], ["--enable-lora", "--max-lora-rank", "8",
           "--lora-target-modules", "q_proj"])  # fmt: skip


@pytest.mark.parametrize("flags", ADAPTED)
@pytest.mark.parametrize("draft", [EAGLE3, TREES], ids=["chains", "trees"])
def test_launch_with_lora_is_served_where_sglang_has_its_seams(
    capsys, monkeypatch: pytest.MonkeyPatch, draft: list[str], flags: list[str]
) -> None:
    if compat.verifies_adapters():
        launch(*draft, *flags, "--c2t")
        assert config.active() == config.C2TConfig()
    moved = dataclasses.replace(seams.ADAPTER_SEAMS[-1], target="sglang.srt.no_such_module")
    monkeypatch.setattr(compat, "ADAPTER_SEAMS", (*seams.ADAPTER_SEAMS[:-1], moved))
    said = refusal(capsys, *draft, *flags, "--c2t")
    assert "does not serve LoRA, --enable-lora or --lora-paths, in an SGLang without" in said


def test_refusals_name_a_flag_the_reason_and_what_to_do() -> None:
    """A flag that SGLang or we have, or a variable; a reason; and an order that can be followed."""
    from sglang.srt.server_args import ServerArgs

    from sglang_c2t.srt.hooks.refusals import REFUSALS

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    if compat.module_exists(
        "sglang.srt.sampling.watermarking"
    ):  # an older SGLang has not all that we refuse
        for refusal in REFUSALS:
            unknown = set(re.findall(r"--[a-z0-9-]+", refusal.sentence)) - known
            assert unknown == set(), refusal.sentence
    for refusal in REFUSALS:
        assert re.search(r"--[a-z0-9-]+|SGLANG_[A-Z_]+", refusal.what), refusal.sentence
        assert refusal.instead.startswith(("add ", "change ", "choose ", "drop ", "set ", "unset "))
        assert len(refusal.why.split()) >= 3, refusal.sentence


# -- trees --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": "c2t-eagle2", "max_verify_rows": 100},
        {"policy": "c2t", "policy_options": {"layer_limit": 3}},
        {"policy": "eagle2", "verify": "static"},
        {"policy": "eval.baselines:Fork", "policy_options": {"width": 4}},
        {"policy": "eval.baselines:EntropyWidth", "policy_options": {"stop_entropy": 0.5}},
        {"policy": "tests.e2e.server_policies:SwitchableTree", "policy_options": {}},
    ],
)
def test_launch_of_trees_is_served(tmp_path: Path, settings: dict[str, Any]) -> None:
    if settings.get("policy_options") == {}:  # it reads a file, also when it is tried
        control = tmp_path / "control"
        control.write_text("full")
        settings = {**settings, "policy_options": {"control": str(control)}}
    launch(*TREES, "--c2t", *flags_of(settings, tmp_path))
    assert config.active() == config.C2TConfig(**settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--attention-backend", "torch_native"], "--attention-backend other than flashinfer, int"),
        (["--attention-backend", "triton"], "or set --speculative-eagle-topk 1"),
        (["--speculative-accept-threshold-single", "0.9"], "drop --speculative-accept-threshold-s"),
        (["--speculative-accept-threshold-acc", "0.9"], "and --speculative-accept-threshold-acc"),
        (TOGETHER, "does not serve --enable-dp-attention with --speculative-eagle-topk above 1"),
        (["--c2t-policy", "fixed"], "fixed cuts chains only: set --speculative-eagle-topk 1, or"),
        (["--c2t-policy", "eval.baselines:StaticTree"], "needs at least --speculative-num-draft-"),
        # SGLang raises for this backend, before it would ask us.
        (["--page-size", "16"], "set --page-size 1 with --speculative-eagle-topk above 1"),
        (
            {"policy": "eval.baselines:Fork", "policy_options": {"width": 5}},
            "needs --speculative-e",
        ),
    ],
)
def test_launch_of_unsupported_trees_is_refused(
    capsys, tmp_path: Path, given: Any, said: str
) -> None:
    assert said in refusal(capsys, *TREES, "--c2t", *flags_of(given, tmp_path))


def test_launch_of_http_workers_loads_the_plugin_or_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setenv(environment.HTTP_APP, environment.OUR_HTTP_APP)
    monkeypatch.delenv(environment.HTTP_APP)
    several = [*EAGLE3, "--c2t", "--tokenizer-worker-num", "2"]
    if environment.names_http_app():
        launch(*EAGLE3, "--c2t")
        assert environment.HTTP_APP not in os.environ
        launch(*several)
        assert os.environ[environment.HTTP_APP] == environment.OUR_HTTP_APP
        launch(*several)  # again, as each process that resolves its arguments
        monkeypatch.setenv(environment.HTTP_APP, "mine:app")
        assert f"unset {environment.HTTP_APP}" in refusal(capsys, *several)
        monkeypatch.setattr(environment, "names_http_app", lambda: False)
    assert "whose HTTP workers cannot load plugins" in refusal(capsys, *several)


@pytest.mark.parametrize("draft", [EAGLE3, TREES], ids=["chains", "trees"])
def test_launch_that_bypasses_request_checks_or_our_sampler_is_refused(
    capsys, draft: list[str]
) -> None:
    for flag in ("--smg-grpc-mode", "--grpc-mode"):
        assert "drop --smg-grpc-mode and --grpc-mode" in refusal(capsys, *draft, flag, "--c2t")
    assert "drop --use-ray" in refusal(capsys, *draft, "--use-ray", "--c2t")
    if compat.module_exists("sglang.srt.sampling.watermarking"):
        said = refusal(capsys, *draft, "--c2t", "--watermark-config", "{}")
        assert "does not serve --watermark-config: packed rows are sampled without it" in said


@pytest.mark.parametrize(
    ("name", "draft"),
    [("SGLANG_RUST_SERVER", EAGLE3), ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", TREES)],
)
def test_launch_with_an_unsupported_variable_is_refused(
    capsys, monkeypatch, name: str, draft: list[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert f"unset {name}" in refusal(capsys, *draft, "--c2t")


@newest
def test_launch_with_dp_attention_is_served(capsys, monkeypatch) -> None:
    launch(*EAGLE3, *TOGETHER, "--c2t")
    name = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
    monkeypatch.setenv(name, "1")
    assert f"unset {name}" in refusal(capsys, *EAGLE3, *TOGETHER, "--c2t")


@pytest.mark.skipif(versions.installed() == TESTED[-1], reason="it is served beside this one")
def test_launch_with_dp_attention_on_an_older_sglang_is_refused(capsys) -> None:
    assert "choose the newest SGLang" in refusal(capsys, *EAGLE3, *TOGETHER, "--c2t")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"page_size": 16}, "set --page-size 1 with --speculative-eagle-topk above 1"),
        (
            {"speculative_use_rejection_sampling": True},
            "does not serve --speculative-use-rejection-sampling",
        ),
    ],
)
def test_refusals_hold_where_sglang_would_not_refuse(changed: dict[str, Any], said: str) -> None:
    """SGLang serves pages of 16 with trees on GPU backends, and may come to serve the other. We
    serve them where it is FlashInfer.
    """
    from sglang_c2t.srt.hooks import resolution

    args = compat.resolved(launch(*TREES, "--c2t"))
    assert resolution.refusals(args) == []
    in_pages = Changed(args, page_size=16, attention_backend="flashinfer")
    assert resolution.refusals(in_pages) == []
    (sentence,) = resolution.refusals(Changed(args, **changed))
    assert said in sentence


class Changed:
    """Resolved arguments, some of them said to be others."""

    def __init__(self, resolved: object, **changed: object) -> None:
        self._resolved = resolved
        vars(self).update(changed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._resolved, name)


def test_refusals_of_cuda_graphs_without_padding() -> None:
    from sglang_c2t.srt.hooks import resolution

    resolved = compat.resolved(launch(*EAGLE3))
    config.publish(config.C2TConfig())
    assert resolution.refusals(Changed(resolved, device="cuda")) == []
    unpadded = Changed(resolved, device="cuda", disable_cuda_graph_padding=True)
    (said,) = resolution.refusals(unpadded)
    assert "drop --disable-cuda-graph-padding" in said


def without_draft_path(algorithm: str) -> list[str]:
    """All flags of drafting but the path."""
    flags = list(speculative_flags("EAGLE")[2:])
    at = flags.index("--speculative-draft-model-path")
    return ["--speculative-algorithm", algorithm, *flags[:at], *flags[at + 2 :]]


@pytest.mark.parametrize(("algorithm", "served"), [("NEXTN", True), ("EAGLE3", False)])
def test_launch_of_mtp_layers_needs_no_draft_path(
    capsys, tmp_path: Path, algorithm: str, served: bool
) -> None:
    """MTP layers, here MiMo's, which SGLang finds when it builds the draft's configuration."""
    model = json.loads((TARGET / "config.json").read_text())
    model |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(model))
    flags = [*without_draft_path(algorithm), "--c2t", "--model-path", str(tmp_path)]
    if served:
        launch(*flags)
    else:
        assert "add --speculative-draft-model-path" in refusal(capsys, *flags)


def test_engine_refusal_is_an_exception(monkeypatch) -> None:
    """Switched on by the environment, a refusal must not end the caller's process."""
    from sglang_c2t.srt.hooks import args

    monkeypatch.setattr(args, "_parsed_from_command_line", False)
    monkeypatch.setenv(config.CONFIG_ENV, "{}")
    with pytest.raises(config.ConfigError, match="needs a draft model"):
        launch()
