"""The server of each method of a run, and the order in which cells are measured.

All servers get the same flags but those of speculation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.bench.config import BenchConfig, MethodConfig, ModelConfig, named
from eval.bench.records import CellKey, Method, slug
from eval.gpu import graft, models, plugins
from eval.gpu.models import SHAPES, SMOLLM2
from eval.server import (
    CPU_FLAGS,
    DRAFTS,
    Launch,
    gpu_environment,
    speculative_flags,
)
from eval.smollm2 import HEAD
from eval.smollm2.weighted import weighted_target


@dataclass(frozen=True)
class PlannedCell:
    """A cell to measure, and how many prompts it gets."""

    key: CellKey
    prompts: int


def launches(config: BenchConfig, folder: Path) -> dict[str, Launch]:
    """The server of each method; ``folder`` is where :func:`write_files` writes."""
    target = target_of(config.model, folder)
    return {
        method.name: Launch(
            slug(method.name),
            (*_common_flags(config), *method_flags(config.model, method, folder)),
            target, _environment(config, method), common=(),
        )
        for method in config.methods
    }  # fmt: skip


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
    return str(models.trained(pair).target if pair else model.target)


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
    return Method(method.name, method.kind, flags, method.beta, baseline=method.baseline)


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
            for concurrency, prompts in zip(load.concurrency, load.prompts, strict=True):
                order = rng.sample(names, len(names))  # drawn for all, so --only changes nothing
                cells += [
                    PlannedCell(CellKey(name, load.temperature, concurrency, repeat), prompts)
                    for name in order
                    if (not only or name in only) and (not at_once or concurrency in at_once)
                ]
    return cells


def rounds(
    config: BenchConfig, cells: Sequence[PlannedCell], names: Sequence[str]
) -> list[tuple[list[str], list[PlannedCell]]]:
    """The cells of a run with all servers at once: those of each repeat, and its servers.

    Servers are listed in the order in which to start them, which rotates from repeat to repeat:
    what is started last of six can pay 5 to 10 % more for a forward as long as it lives.
    """
    stride = max(1.0, len(names) / config.repeats)  # through all of the order, if not by ones
    result = []
    for repeat in range(config.repeats):
        if mine := [cell for cell in cells if cell.key.repeat == repeat]:
            first = int(repeat * stride) % len(names)
            needed = {cell.key.method for cell in mine}
            result.append(([n for n in (*names[first:], *names[:first]) if n in needed], mine))
    return result


def passes(
    config: BenchConfig, cells: Sequence[PlannedCell], names: Sequence[str]
) -> list[tuple[list[str], list[PlannedCell]]]:
    """The cells of a run with one server at a time: each repeat is a pass over the servers.

    The servers' order is drawn anew in each pass. In the mode "once" there is one pass with all
    repeats, in the order of the configuration, because large models start slowly.
    """
    rng = random.Random(f"{config.seed}/servers")
    if config.server.mode == "once":
        turns = [(name, range(config.repeats)) for name in names]
    else:
        turns = [(name, range(repeat, repeat + 1)) for repeat in range(config.repeats)
                 for name in rng.sample(list(names), len(names))]  # fmt: skip
    result = []
    for name, repeats in turns:
        mine = [c for c in cells if c.key.repeat in repeats and c.key.method == name]
        if mine:
            result.append(([name], mine))
    return result
