"""The real launch commands: what they refuse, and that neither runs without the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from eval.prompts import classifier_mix
from eval.server import Launch, run_to_exit, running, speculative_flags
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.offline.client import greedy, run_load
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
        timeout=600,
        check=False,
    )
    assert "cap length 3.0" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-2000:]


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
