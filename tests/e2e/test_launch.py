"""The real launch commands: what they refuse, and that neither runs without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from eval.prompts import classifier_mix
from eval.server import Launch, run_to_exit, running, speculative_flags
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import C2TConfig
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies import build_policy
from tests.e2e.conftest import REPOSITORY

AS_USERS_DO = True

EAGLE3 = speculative_flags("EAGLE3")

# Runs in every Python process before anything else; renames a function once its module
# has been imported, as a new SGLang release might have.
RENAME = """
import importlib.abc, importlib.machinery, sys

class Renamer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.speculative.eagle_worker_common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.eagle_prepare_verification = module.__dict__.pop("eagle_prepare_for_verify")
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Renamer())
"""


def test_a_renamed_upstream_symbol_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RENAME)
    env = {"PYTHONPATH": str(tmp_path)}
    ended = run_to_exit(Launch("renamed", (*EAGLE3, "--c2t"), env=env))
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert "--c2t cannot be served" in last
    assert "sglang.srt.speculative.eagle_worker_common.eagle_prepare_for_verify" in last


def test_without_the_plugin_the_flag_is_unknown() -> None:
    env = {"SGLANG_PLUGINS": "some_other_plugin"}
    ended = run_to_exit(Launch("unplugged", (*EAGLE3, "--c2t"), env=env))
    assert ended.returncode == 2
    assert "unrecognized arguments: --c2t" in ended.stderr


def test_a_wrong_setting_is_the_last_line_of_a_failed_launch() -> None:
    ended = run_to_exit(Launch("beta", (*EAGLE3, "--c2t", "--c2t-beta", "2")))
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].endswith("in (0, 1), got 2.0")


class ServeLaunch(Launch):
    """``sglang serve`` instead of ``python -m sglang.launch_server``."""

    def argv(self, port: int) -> list[str]:
        """The same flags behind the other command."""
        command = Path(sys.executable).with_name("sglang")
        return [str(command), "serve", *super().argv(port)[3:]]


ENGINE = """
from sglang.srt.plugins import load_plugins

load_plugins()  # without a GPU, Engine itself cannot be imported before the CPU runtime is in
import sglang
from eval.server import DRAFTS, TARGET

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=str(TARGET), device="cpu", dtype="float32", max_total_tokens=4096,
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(DRAFTS["EAGLE3"]),
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4,
    )
    answer = engine.generate("A", {"temperature": 0, "max_new_tokens": 8})
    print("cap length", answer["meta_info"]["spec_cap_length"])
    engine.shutdown()
"""


def test_engine_users_switch_c2t_on_by_the_environment(tmp_path: Path) -> None:
    """The variable that carries the configuration between processes is their door."""
    (tmp_path / "script.py").write_text(ENGINE)
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_C2T_CONFIG": '{"policy": "fixed", "policy_options": {"length": 2}}',
    }
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert "cap length 3.0" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_check_reports_a_healthy_installation() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sglang_c2t", "check"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "plugin entry point: registered" in ended.stdout
    assert "0 broken" in ended.stdout


def test_a_prompt_file_becomes_a_classifier_that_is_served(logs: Path, tmp_path: Path) -> None:
    """The README's commands, from an empty folder: record, train, evaluate, serve.

    What is served ends drafts exactly where the replay of the recording says, request by request.
    """
    prompts = tmp_path / "prompts.jsonl"
    mix = classifier_mix(18)
    rows = [{"prompt": p.text, "dataset": p.family} for p in mix]
    rows += [
        {"turns": ["Book a table for two."]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording, out = tmp_path / "recording", tmp_path / "mine.safetensors"
    flags = (*EAGLE3, "--c2t", "--c2t-record", str(recording), "--c2t-record-roots", "every")
    with running(Launch("record", flags), logs) as server:
        told = c2t("record", str(prompts), "--url", server.url, "--max-new-tokens", "32")
    assert f"drafts in {recording}" in told
    c2t("train", str(recording), "--out", str(out), "--recipe", "c2t-log")
    told = c2t("evaluate", str(recording), "--classifier", str(out), "--out", str(tmp_path / "r"))
    assert "this classifier, c2t-log at 0.5" in told
    assert {"report.md", "report.json", "surfaces.png"} <= {
        p.name for p in (tmp_path / "r").iterdir()
    }
    policy = ("--c2t-policy", "c2t-log", "--c2t-classifier", str(out))
    with running(Launch("trained", (*EAGLE3, "--c2t", *policy)), logs) as server:
        served = run_load(server.url, [greedy(p.text, 32) for p in mix], concurrency=8)
    live = [answer.meta_info["spec_num_proposed_drafts"] for answer in served.answers]
    chains = Chains.from_recording(read_recording(recording))
    outcome = replay(build_policy(C2TConfig("c2t-log", classifier=str(out))), chains)
    verified = {
        rid.split("-")[0]: round(count)
        for rid, count in zip(chains.requests, outcome.num_proposed.tolist(), strict=True)
    }
    numbers: Counter[str] = Counter()
    replayed = []
    for prompt in mix:
        replayed.append(verified[f"{prompt.family}/{numbers[prompt.family]}"])
        numbers[prompt.family] += 1
    assert live == replayed
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in served.answers)
    assert 0 < sum(live) < 5 * steps, "the gate ended no draft, or all of them"


def c2t(*argv: str) -> str:
    """Run ``python -m sglang_c2t``; its output."""
    command = [sys.executable, "-m", "sglang_c2t", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_share_of_the_steps_is_recorded_under_any_policy(logs: Path, tmp_path: Path) -> None:
    """Recorded drafts are whole although the gate ends drafts early.

    Started by ``sglang serve``, the other documented way, which takes the same flags.
    """
    recording = tmp_path / "recording"
    flags = (*EAGLE3, "--c2t", "--c2t-record", str(recording), "--c2t-record-share", "0.5")
    bodies = [greedy(prompt.text, 48) for prompt in classifier_mix(24)]
    with running(ServeLaunch("share", flags), logs) as server:
        recorded = run_load(server.url, bodies, concurrency=12)
        told = server.c2t_state()["recording"]
    chains = read_recording(recording)
    assert chains.num_drafts == told["drafts_written"] == told["drafts"] > 20
    assert chains.num_nodes == 5 * chains.num_drafts
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in recorded.answers)
    assert 0.2 < chains.num_drafts / steps < 0.8  # half of about 40 steps of the batch
