"""Servers a benchmark needs, their flags, and the order of its cells."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from eval.bench.methods import (
    launches,
    method_flags,
    plan,
    rounds,
    write_files,
)
from tests.eval.bench_configs import config

METHODS = [m.name for m in config().methods]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_measuring_plugin_keeps_ours_where_a_server_needs_it(device: str, tmp_path: Path) -> None:
    """On a CPU SGLang itself does not start without; on a GPU only methods of ours load it."""
    ran = config(server={"device": device, "plugins": ["step_clock"]})
    for method, launch in zip(ran.methods, launches(ran, tmp_path).values(), strict=True):
        ours = device == "cpu" or method.gated
        loaded = launch.env["SGLANG_PLUGINS"].split(",")
        assert loaded == (["c2t", "step_clock"] if ours else ["step_clock"])


def test_methods_take_turns_on_a_rung_in_an_order_that_changes() -> None:
    cells = plan(config(repeats=6))
    orders = [
        tuple(c.key.method for c in cells[at : at + len(METHODS)])
        for at in range(0, len(cells), len(METHODS))
    ]
    assert all(sorted(order) == sorted(METHODS) for order in orders)
    assert len(set(orders)) > len(orders) / 2
    assert plan(config(repeats=6)) == cells, "the order is seeded"


@pytest.mark.parametrize("repeats", [2, 4, 9])
def test_servers_that_run_together_start_anew_for_each_repeat_in_an_order_that_turns(
    tmp_path: Path, repeats: int
) -> None:
    settings = config(repeats=repeats)
    cells, servers = plan(settings), list(launches(settings, tmp_path))
    turns = rounds(settings, cells, servers)
    assert [cell for _, mine in turns for cell in mine] == cells
    assert [{c.key.repeat for c in mine} for _, mine in turns] == [{r} for r in range(repeats)]
    orders = [started for started, _ in turns]
    assert all(sorted(order) == sorted(servers) for order in orders)
    firsts = Counter(order[0] for order in orders)
    assert len(firsts) == min(repeats, len(servers))
    assert max(firsts.values()) - min(firsts.values()) <= 1
    left = [cell for cell in cells if cell.key.method == "fixed 3" and cell.key.repeat == 1]
    (alone,) = rounds(settings, left, servers)
    assert alone == (["fixed 3"], left)


def test_servers_differ_in_speculation_only(tmp_path: Path) -> None:
    servers = launches(config(), tmp_path)
    assert list(servers) == METHODS
    names = ("no speculation", "fixed 3", "c2t-plus tree", "c2t")
    plain, fixed, tree, chain = (list(servers[name].argv(1)) for name in names)
    assert fixed[: len(plain)] == tree[: len(plain)] == chain[: len(plain)] == plain
    assert "--enable-metrics" in plain
    assert fixed[len(plain) :][::2] == [
        "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
        "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    ]  # fmt: skip
    assert "--c2t" in chain
    assert "--c2t" in tree
    assert tree[tree.index("--speculative-eagle-topk") + 1] == "4"
    assert tree[tree.index("--speculative-num-draft-tokens") + 1] == "16"


def test_policy_options_reach_the_server_in_a_file(tmp_path: Path) -> None:
    fixed = {"kind": "c2t", "policy": "fixed", "policy_options": {"length": 3}}
    folder = tmp_path / "logs"
    (launch,) = launches(config(methods=[fixed]), folder).values()
    assert not folder.exists(), "a listing must not write"
    write_files(config(methods=[fixed]), folder)
    argv = launch.argv(1)
    written = json.loads(Path(argv[argv.index("--c2t-config") + 1]).read_text())
    assert written == {"policy_options": {"length": 3}}


@pytest.mark.parametrize("kind", ["c2t", "c2t-tree"])
def test_what_a_method_that_plans_has_learnt_is_kept_for_its_next_server(
    tmp_path: Path, kind: str
) -> None:
    shape = {"topk": 4, "num_draft_tokens": 16} if kind == "c2t-tree" else {}
    methods = [{"kind": kind, "policy": policy, **shape} for policy in ("auto", "c2t-plus")]
    settings = config(methods=methods, server={"device": "cpu"})
    keeps = [
        "--c2t-state" in method_flags(settings.model, method, tmp_path)
        for method in settings.methods
    ]
    assert ([method.plans for method in settings.methods], keeps) == ([True, False], [True, False])
