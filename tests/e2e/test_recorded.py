"""From a prompt file to a classifier that serves: the README's commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import requests

from eval.prompts import classifier_mix
from eval.server import DRAFTS, TARGET, Launch, running, speculative_flags
from sglang_c2t.classifier.pair import Pair, fingerprint
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import C2TConfig
from sglang_c2t.offline.client import greedy, run_load
from sglang_c2t.offline.replay import Chains, replay
from sglang_c2t.policies import build_policy

EAGLE3 = speculative_flags("EAGLE3")


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
    told = c2t("evaluate", str(recording), "--classifier", str(out))
    assert "drafts verified at equal accept length" in told.splitlines()[-1]
    policy = ("--c2t-policy", "c2t-log", "--c2t-classifier", str(out))
    with running(Launch("trained", (*EAGLE3, "--c2t", *policy)), logs) as server:
        served = run_load(server.url, [greedy(p.text, 32) for p in mix], concurrency=8)
        (scheduler,) = requests.get(f"{server.url}/c2t", timeout=60).json()["serving"]
    pair = Pair("EAGLE3", *(fingerprint(model) or "" for model in (TARGET, DRAFTS["EAGLE3"])))
    assert scheduler["pair"] == pair._asdict()
    assert scheduler["classifier"]["name"] == "mine.safetensors"
    assert scheduler["classifier"]["learnt_from"] == "this pair"
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
