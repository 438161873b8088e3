"""Configurations of the benchmark: what they mean, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.bench import config as module
from eval.bench.config import LoadConfig, PhaseConfig, as_dict, read_config
from sglang_c2t.config import ConfigError
from tests.eval.bench_configs import config

CONFIGS = Path(__file__).parents[2] / "eval" / "configs"


def test_a_list_of_betas_is_one_method_of_each() -> None:
    assert [(m.name, m.beta) for m in config().methods][2:5] == [
        ("c2t", None),
        ("dyjoint beta 0.2", 0.2),
        ("dyjoint beta 0.5", 0.5),
    ]


RAMP = [{"prompts": 6, "rate": 2.0}, {"prompts": 2, "rate": 0.5}]

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"server__ports": 1}, r"unknown key server\.ports; known here: device"),
    "unknown table": ({"bogus": {}}, "unknown key bogus"),
    "missing key": ({"methods": [{"num_steps": 3}]}, r"methods\[0\]\.kind is missing"),
    "text for a number": ({"repeats": "3"}, "repeats must be a whole number, got '3'"),
    "true for a number": ({"repeats": True}, "repeats must be a whole number, got True"),
    "not one of": ({"server__mode": "both"}, "server.mode must be one of together, in-turn, auto"),
    "auto without memory": ({"server__mode": "auto"}, "set server.memory_gib"),
    "no repeats": ({"repeats": 0}, "repeats must be 1 or more, got 0"),
    "unknown kind": ({"methods": [{"kind": "magic"}]}, "must be one of none, fixed"),
    "unknown policy": ({"methods": [{"kind": "c2t", "policy": "best"}]}, "unknown c2t policy"),
    "beta out of range": (
        {"methods": [{"kind": "c2t", "policy": "c2t", "beta": 1.5}]},
        r"beta .*1\.5",
    ),
    "beta without a gate": ({"methods": [{"kind": "fixed", "beta": 0.5}]}, "fixed has no beta"),
    "chain policy in a tree": (
        {"methods": [{"kind": "c2t-tree", "policy": "fixed", "topk": 4, "num_draft_tokens": 9}]},
        "cuts chains only",
    ),
    "tree without nodes": ({"methods": [{"kind": "tree", "topk": 4}]}, "needs num_draft_tokens"),
    "tree without width": (
        {"methods": [{"kind": "tree", "num_draft_tokens": 16}]},
        "needs topk above 1",
    ),
    "chain with width": ({"methods": [{"kind": "fixed", "topk": 4}]}, "fixed has no topk"),
    "two baselines": (
        {"methods": [{"kind": "none"}, {"kind": "none", "name": "again"}]},
        "at most one may be of kind none",
    ),
    "two of a name": ({"methods": [{"kind": "fixed"}, {"kind": "fixed"}]}, "given twice"),
    "lists of two lengths": (
        {"load": [{"temperature": 0.0, "concurrency": [1, 2], "prompts": [4]}]},
        "lists of one length",
    ),
    "too few prompts for the batch": (
        {"load": [{"temperature": 0.0, "concurrency": [8], "prompts": [4]}]},
        "4 prompts never reach 8 at once",
    ),
    "more prompts than there are": (
        {"load": [{"temperature": 0.0, "concurrency": [8], "prompts": [9]}]},
        "asks for 9 prompts, dataset.parts give 8",
    ),
    "prompts beside phases": (
        {"load": [{"temperature": 0.0, "concurrency": [8], "prompts": [9], "phases": RAMP}]},
        r"the phases send 8 prompts, got \[9\]; drop it",
    ),
    "a ramp of two rungs": (
        {"load": [{"temperature": 0.0, "concurrency": [1, 8], "phases": RAMP}]},
        "lists of one length",
    ),
    "a phase without a rate": (
        {"load": [{"temperature": 0.0, "concurrency": [8], "phases": [{**RAMP[0], "rate": 0.0}]}]},
        r"load\.phases\.rate must be above 0, got 0\.0",
    ),
    "adaptive with a draft it does not serve": (
        {"model__algorithm": "STANDALONE", "methods": [{"kind": "adaptive"}]},
        "serves EAGLE and EAGLE3 drafts, got model.algorithm STANDALONE",
    ),
    "steps without a clock": ({"requests__timed": "decoding"}, 'put "step_clock"'),
    "seeds without the flag": ({"requests__seeded": True}, "--enable-deterministic-inference"),
    "sampled outputs without seeds": (
        {"requests__equal_outputs": "seeded"},
        "needs requests.seeded",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_requests_of_a_ramp_arrive_at_the_rates_of_its_phases_as_the_seed_says() -> None:
    """Gaps of a Poisson process: their mean is one over the rate, and so is their deviation."""
    phases = (PhaseConfig(prompts=2000, rate=4.0), PhaseConfig(prompts=2000, rate=0.5))
    load = LoadConfig(0.0, (8,), phases=phases)
    assert load.prompts == (4000,)
    gaps = np.diff(load.arrivals("a"), prepend=0.0)
    for mean, here in ((0.25, gaps[:2000]), (2.0, gaps[2000:])):
        assert here.mean() == pytest.approx(mean, rel=0.1)
        assert here.std() == pytest.approx(mean, rel=0.15)
    assert load.arrivals("a") == load.arrivals("a") != load.arrivals("b")


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"cannot read .*run\.toml"):
        read_config(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid_and_fits_json(path: Path) -> None:
    plain = as_dict(read_config(path))
    assert json.loads(json.dumps(plain)) == plain


def test_the_configuration_for_gpus_explains_every_key() -> None:
    text = (CONFIGS / "gpu.toml").read_text()
    classes = [c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__]
    classes = [c for c in classes if dataclasses.is_dataclass(c)]
    keys = {field.name for c in classes for field in dataclasses.fields(c)}  # type: ignore[arg-type]
    assert [key for key in sorted(keys) if key not in text] == []


def test_the_demo_has_every_kind_of_method_and_needs_no_files() -> None:
    demo = read_config(CONFIGS / "demo.toml")
    assert {m.kind for m in demo.methods} == {
        "none", "fixed", "adaptive", "tree", "c2t", "c2t-tree",
    }  # fmt: skip
    assert all(part.source.startswith("demo:") for part in demo.dataset.parts)
