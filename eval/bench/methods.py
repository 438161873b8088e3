"""Which servers a run needs, which methods each of them serves, and in which order it measures.

All servers get the same flags but those of speculation. Methods of ours that draft the same
shape may share a server: they are switched over ``/c2t`` while it runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import requests

from eval.bench.config import BenchConfig, MethodConfig, ModelConfig, named
from eval.bench.records import CellKey, Method, slug
from eval.gpu import graft, models, plugins
from eval.gpu.models import SHAPES, SMOLLM2
from eval.server import (
    CPU_FLAGS,
    DRAFTS,
    Launch,
    Server,
    SwitchError,
    gpu_environment,
    speculative_flags,
)
from eval.smollm2 import HEAD
from eval.smollm2.weighted import weighted_target
from sglang_c2t.classifier.checkpoint import shipped


@dataclass(frozen=True)
class Host:
    """A server to start and the methods it serves, several only where it can be switched."""

    launch: Launch
    methods: tuple[MethodConfig, ...]
    shared: bool = False

    @property
    def name(self) -> str:
        """Name of the server and of its log."""
        return self.launch.name


@dataclass(frozen=True)
class PlannedCell:
    """A cell to measure, how many prompts it gets, and in a ramp when these arrive (seconds)."""

    key: CellKey
    prompts: int
    arrivals: tuple[float, ...] = ()


def hosts(config: BenchConfig, folder: Path) -> list[Host]:
    """All servers of a run; ``folder`` is where :func:`write_files` writes."""
    shared: dict[tuple[str, ...], list[MethodConfig]] = {}
    alone: list[list[MethodConfig]] = []
    for method in config.methods:
        if method.gated and config.server.share and not method.own_server:
            # A server takes no classifier file over HTTP but the one it was started with.
            kind = (*drafting(config.model, method, folder), method.classifier)
            shared.setdefault(kind, []).append(method)
        else:
            alone.append([method])
    together = [group for group in shared.values() if len(group) > 1]
    alone += [group for group in shared.values() if len(group) == 1]
    return [
        *(Host(_launch(config, slug(one.name), one, folder), (one,)) for (one,) in alone),
        *(
            Host(_launch(config, f"shared-{n}", group[0], folder), tuple(group), shared=True)
            for n, group in enumerate(together, start=1)
        ),
    ]


def _launch(config: BenchConfig, name: str, first: MethodConfig, folder: Path) -> Launch:
    flags = (*_common_flags(config), *method_flags(config.model, first, folder))
    target = target_of(config.model, folder)
    return Launch(name, flags, target, _environment(config, first), common=())


def target_of(model: ModelConfig, folder: Path) -> Path:
    """Folder of the target model, or its name on the hub."""
    pair, size = named(model.target)
    if size in SHAPES:
        return models.pair(size, folder).target
    if size:
        return weighted_target(int(size))
    return models.trained(pair).target if pair else Path(model.target)


def tokenizer_of(model: ModelConfig) -> str:
    """Path or name of what the client counts tokens with."""
    pair, _ = named(model.target)
    return model.tokenizer or str(models.trained(pair).target if pair else model.target)


def _draft_of(model: ModelConfig, folder: Path) -> Path:
    pair, size = named(model.draft)
    if size:
        return models.pair(size, folder).draft
    if pair:
        return HEAD if pair == SMOLLM2 else DRAFTS[model.algorithm]
    return Path(model.draft)


def _common_flags(config: BenchConfig) -> tuple[str, ...]:
    for_cpu = CPU_FLAGS if config.server.device == "cpu" else ()
    metrics = ("--enable-metrics",) if config.server.metrics else ()
    return (*for_cpu, *metrics, *config.server.flags)


def _environment(config: BenchConfig, method: MethodConfig) -> dict[str, str]:
    """Variables on top of :func:`eval.server.environment`, which suits a CPU."""
    env = gpu_environment() if config.server.device == "cuda" else {}
    measuring = config.server.plugins
    pair, size = named(config.model.target)
    if size in SHAPES:
        measuring = (*measuring, "graft")
        env |= graft.to_env(models.trained(pair))
    if measuring:
        # On a CPU no server starts without what the plugin stands in for.
        needed = method.gated or method.plugin_off or config.server.device == "cpu"
        ours = ("c2t",) if needed else ()
        env |= plugins.environment((*ours, *measuring))
    return env


def drafting(model: ModelConfig, method: MethodConfig, folder: Path) -> tuple[str, ...]:
    """Flags that say how it drafts; () without speculation."""
    if method.kind == "none":
        return method.flags
    flags = speculative_flags(
        model.algorithm, method.num_steps, method.topk, method.num_draft_tokens,
        draft=_draft_of(model, folder),
    )  # fmt: skip
    return (*flags, *method.flags)


def method_flags(model: ModelConfig, method: MethodConfig, folder: Path) -> tuple[str, ...]:
    """Flags of one method; policy options, which have no flag, are in a file in ``folder``."""
    flags = drafting(model, method, folder)
    if method.kind == "adaptive":
        return (*flags, "--speculative-adaptive")
    if not method.gated:
        return flags
    c2t = ["--c2t", "--c2t-policy", method.policy, "--c2t-classifier", method.classifier]
    if method.beta is not None:
        c2t += ["--c2t-beta", str(method.beta)]
    if method.policy_options:
        c2t += ["--c2t-config", str(_options_file(method, folder))]
    if method.plans:  # its next server goes on, or each repeat would measure how it starts cold
        c2t += ["--c2t-state", str(folder / f"{slug(method.name)}.state.json")]
    return (*flags, *c2t)


def write_files(config: BenchConfig, folder: Path) -> None:
    """Write the files that the servers' flags name: policy options, models of a shape."""
    folder.mkdir(parents=True, exist_ok=True)
    pair, size = named(config.model.target)
    if size in SHAPES:
        models.write(size, folder, models.trained(pair))
    for method in config.methods:
        if method.policy_options:
            text = json.dumps({"policy_options": method.policy_options}) + "\n"
            _options_file(method, folder).write_text(text)


def _options_file(method: MethodConfig, folder: Path) -> Path:
    return folder / f"{slug(method.name)}.json"


def record_of(config: BenchConfig, method: MethodConfig, folder: Path) -> Method:
    """The method as run.json records it."""
    flags = list(method_flags(config.model, method, folder))
    assert not isinstance(method.beta, tuple)
    return Method(method.name, method.kind, flags, method.beta, baseline=method.baseline)


# -- switching ------------------------------------------------------------------------------


def switch(server: Server, method: MethodConfig) -> None:
    """Make a running ``--c2t`` server serve ``method``, and ask it whether it does."""
    wanted = method.c2t_settings()
    server.switch(**wanted)
    in_force = requests.get(f"{server.url}/c2t", timeout=60).json()
    name = wanted["classifier"]  # clients see no paths
    expected = {**wanted, "classifier": name if shipped(name) else Path(name).name}
    differing = {key: in_force.get(key) for key in expected if in_force.get(key) != expected[key]}
    if differing:
        raise SwitchError(f"POST /c2t for {method.name} asked for {wanted}, in force: {differing}")


# -- order ----------------------------------------------------------------------------------


def plan(
    config: BenchConfig, only: Sequence[str] = (), at_once: Sequence[int] = ()
) -> list[PlannedCell]:
    """All cells, or those of some methods or concurrencies, in the order of measuring, if all
    servers are up together.

    Repeat by repeat, rung by rung; on each rung every method once, in an order drawn anew, so
    that drift of the machine affects all methods equally.
    """
    rng = random.Random(f"{config.seed}/cells")
    names = [method.name for method in config.methods]
    cells = []
    for repeat in range(config.repeats):
        for load in config.load:
            arrivals = load.arrivals(f"{config.seed}/arrivals/{repeat}")  # the same for all methods
            for concurrency, prompts in zip(load.concurrency, load.prompts, strict=True):
                order = rng.sample(names, len(names))  # drawn for all, so --only changes nothing
                cells += [
                    PlannedCell(
                        CellKey(name, load.temperature, concurrency, repeat), prompts, arrivals
                    )
                    for name in order
                    if (not only or name in only) and (not at_once or concurrency in at_once)
                ]
    return cells


def rounds(
    config: BenchConfig, cells: Sequence[PlannedCell], servers: Sequence[Host]
) -> list[tuple[list[Host], list[PlannedCell]]]:
    """The cells of a run with all servers at once: each repeat's, and who serves them.

    Servers are listed in the order in which to start them, which rotates from repeat to repeat:
    what is started last of six can pay 5 to 10 % more for a forward as long as it lives.
    """
    stride = max(1.0, len(servers) / config.repeats)  # through all of the order, if not by ones
    result = []
    for repeat in range(config.repeats):
        if mine := [cell for cell in cells if cell.key.repeat == repeat]:
            first = int(repeat * stride) % len(servers)
            turned = [*servers[first:], *servers[:first]]
            result.append((reduced(turned, {cell.key.method for cell in mine}), mine))
    return result


def passes(
    config: BenchConfig, cells: Sequence[PlannedCell], servers: Sequence[Host]
) -> list[tuple[list[Host], list[PlannedCell]]]:
    """The cells of a run with one server at a time: each repeat is a pass over the servers.

    The servers' order is drawn anew in each pass. On a server the rungs come in their order, and
    methods that share it take turns on each rung. In the mode "once" there is one pass with all
    repeats, in the order of the configuration, because large models start slowly.
    """
    rng = random.Random(f"{config.seed}/servers")
    names = [method.name for method in config.methods]
    ordered = sorted(servers, key=lambda host: names.index(host.methods[0].name))
    if config.server.mode == "once":
        turns = [(host, range(config.repeats)) for host in ordered]
    else:
        turns = [(host, range(repeat, repeat + 1)) for repeat in range(config.repeats)
                 for host in rng.sample(list(servers), len(servers))]  # fmt: skip
    result = []
    for host, repeats in turns:
        members = {method.name for method in host.methods}
        mine = [c for c in cells if c.key.repeat in repeats and c.key.method in members]
        if mine:
            result.append(([host], mine))
    return result


def reduced(servers: Sequence[Host], names: set[str]) -> list[Host]:
    """Servers that are still needed, for methods of these names."""
    kept = [
        replace(host, methods=tuple(m for m in host.methods if m.name in names)) for host in servers
    ]
    return [host for host in kept if host.methods]
