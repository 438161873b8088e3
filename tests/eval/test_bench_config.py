"""Configurations of the benchmark: what they mean, and how wrong ones are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eval.bench import config as module
from eval.bench.config import as_dict, changed, read_config
from sglang_c2t.config import ConfigError
from tests.eval.bench_configs import config

CONFIGS = Path(__file__).parents[2] / "eval" / "configs"


def load(**keys: Any) -> dict[str, Any]:
    return {"load": [{"temperature": 0.0, "concurrency": [8], **keys}]}


def methods(*tables: dict[str, Any]) -> dict[str, Any]:
    return {"methods": list(tables)}


#: Changes of a valid configuration, and the field and the reason in the error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"server__ports": 1}, r"server\.ports: unknown key"),
    "missing key": (methods({"num_steps": 3}), r"methods\[0\]\.kind: Field required"),
    "text as number": ({"repeats": "3"}, "repeats: Input should be a valid integer; got '3'"),
    "true as number": ({"repeats": True}, "repeats: Input should be a valid integer; got True"),
    "unknown choice": ({"server__mode": "both"}, r"server\.mode: .*'in-turn', .*; got 'both'"),
    "auto without memory": ({"server__mode": "auto"}, r"server: .*set server\.memory_gib"),
    "no repeats": ({"repeats": 0}, "repeats: .*greater than or equal to 1; got 0"),
    "no methods": (methods(), "methods: .*at least 1 item"),
    "unknown policy": (methods({"kind": "c2t", "policy": "best"}), "unknown c2t policy"),
    "beta out of range": (methods({"kind": "c2t", "beta": 1.5}), r"beta .*1\.5"),
    "beta without a gate": (methods({"kind": "fixed", "beta": 0.5}), "kind fixed has no beta"),
    "chain policy in a tree": (
        methods({"kind": "c2t-tree", "policy": "fixed", "topk": 4, "num_draft_tokens": 9}),
        "cuts chains only",
    ),
    "tree without nodes": (methods({"kind": "tree", "topk": 4}), "needs num_draft_tokens"),
    "chain with width": (methods({"kind": "fixed", "topk": 4}), "kind fixed has no topk, got 4"),
    "two baselines": (methods({"kind": "none"}, {"kind": "none", "name": "b"}), "at most one"),
    "two of a name": (methods({"kind": "fixed"}, {"kind": "fixed"}), "'fixed 5' is given twice"),
    "lists of two lengths": (load(prompts=[8, 9]), r"load\[0\]: .*lists of one length"),
    "fewer prompts than at once": (load(prompts=[4]), "4 prompts never reach 8 at once"),
    "more prompts than there are": (load(prompts=[9]), "asks for 9 prompts, dataset.parts give 8"),
    "adaptive with an unsupported draft": (
        {"model__algorithm": "STANDALONE", **methods({"kind": "adaptive"})},
        "serves EAGLE and EAGLE3 drafts, got model.algorithm STANDALONE",
    ),
    "seeds without the flag": ({"requests__seeded": True}, "--enable-deterministic-inference"),
    "sampled outputs without seeds": ({"requests__equal_outputs": "seeded"}, "requests.seeded"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_value_is_refused_with_field_value_and_what_is_allowed(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_methods_are_named_by_policy_and_beta() -> None:
    made = config()
    assert [m.name for m in made.methods][2:5] == ["c2t", "dyjoint beta 0.2", "dyjoint beta 0.5"]
    assert changed(made, repeats=2) == made


def test_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"cannot read .*run\.toml"):
        read_config(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configuration_is_valid_and_fits_json(path: Path) -> None:
    plain = as_dict(read_config(path))
    assert json.loads(json.dumps(plain)) == plain


def test_gpu_configuration_explains_every_key() -> None:
    text = (CONFIGS / "gpu.toml").read_text()
    classes = [c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__]
    keys = {f.name for c in classes if dataclasses.is_dataclass(c) for f in dataclasses.fields(c)}
    assert [key for key in sorted(keys) if key not in text] == []
