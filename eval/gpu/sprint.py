"""Ten minutes on a GPU: kernels, answers, then tokens/s, the measurements that say most first.

    bash eval/gpu/sprint.sh        # calls this module

Each result is a line of ``results.jsonl`` as soon as it is there, so that a call that is killed
leaves what it measured; ``report.md`` and ``servers.log`` are written again after each stage.
Servers start side by side while kernels and answers are checked; no cell is measured meanwhile.

Stages: kernels (``gpucheck.py`` of the kit, then ``pytest -m gpu``), answers (a trained pair:
chains on FA3 and trees on FlashInfer compared with no speculation), first and second (tokens/s of
the pair at the cost of an 8B Llama, see ``graft.py``), micro (``roofline.py`` and
``microbench.py``), little (tokens/s at 1B), rest (the published gate, and trees, at 8B).

Exit code 0: the plan is done; 3: the time was over. A stage that fails is a row of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eval.gpu import models
from eval.gpu.answers import Answers
from eval.gpu.fleet import Fleet, end_leftovers
from eval.gpu.kernels import Kernels
from eval.gpu.plan import AUTO_AGAIN, BIG, GPU, LITTLE, REHEARSAL, REST, STAGES
from eval.gpu.results import Results, elapsed, report, start_clock
from eval.gpu.speed import Method, Speed
from eval.prompts import demo_mix
from eval.terminal import interrupted_by_sigterm

#: Seconds of a call that are kept for stopping servers and for the last report.
RESERVE = 12.0
OUT_OF_TIME = 3

#: GiB of a GPU that holds four servers of the largest shape; a smaller one holds two.
FOUR_SERVERS_GIB = 120


class Sprint:
    """The stages, each of which must end at its own time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._results = Results(options.out)
        self._work = Path(tempfile.mkdtemp(prefix="sprint-"))
        self._plan = REHEARSAL if options.rehearse else GPU
        if options.batches:
            self._plan = replace(self._plan, batches=tuple(options.batches))
        self._specs = self._plan.servers()
        pair = models.trained(models.DEMO)
        self._fleet = Fleet(self._results, self._work, self._plan.flags, pair)
        self._texts = [prompt.text for prompt in demo_mix(self._plan.prompts)]
        self._speed = Speed(self._results, self._fleet, self._texts, self._plan.new_tokens)
        self._kernels = Kernels(self._results, options.kit, self._plan)
        self._over = threading.Event()

    def run(self) -> None:
        """Run the stages that were asked for; raises KeyboardInterrupt when the time is over."""
        threading.Thread(target=self._save_often, daemon=True).start()
        gib, repeats = 0.0, self._plan.repeats
        with self._stage("about"):
            gib = self._about()
        answers = self._wanted("answers", ["answers-none", "answers-chains", "answers-trees"])
        early = ["none", "auto", *(["stock3", "fixed"] if gib > FOUR_SERVERS_GIB else [])]
        first = self._wanted("first", early)
        side_by_side = not self._options.in_turn
        with self._stage("start"):
            self._start(*answers, *(first if side_by_side else []))
        if "kernels" in self._options.stages:
            self._kernels.start()
        if answers:
            with self._stage("answers"):
                self._check_answers(answers, self._at(170))
            self._fleet.stop(*answers)
        if first:
            with self._stage("first"):
                self._start(*([] if side_by_side else first))
                self._measure_first(first, many=len(early) > 2)
            self._fleet.stop(*first)
        second = [n for n in self._wanted("second", ["stock3", "fixed"]) if n not in first]
        self._measure_late("second", BIG, second, 400, 450, repeats[:1])
        if "micro" in self._options.stages:
            with self._stage("micro"):
                self._kernels.microbench(min(75 * self._options.slow, self._at(530) - elapsed()))
        for name, methods, latest in (("little", LITTLE, 440), ("rest", REST, 430)):
            servers = self._wanted(name, list(dict.fromkeys(m.server for m in methods)))
            self._measure_late(name, methods, servers, latest, 528, repeats)

    def close(self) -> None:
        """Stop all servers and write the last report."""
        self._over.set()
        self._fleet.stop(*list(self._fleet.running))
        self.save()
        self._results.log("done")

    def save(self) -> None:
        """Write the files that are written as a whole."""
        for name, text in (("report.md", self.report), ("servers.log", self._fleet.logs)):
            with contextlib.suppress(Exception):  # the rows are on the disk already
                self._results.write(name, text())

    def report(self) -> str:
        """What has been measured, as Markdown."""
        return report(self._results)

    def _save_often(self) -> None:
        while not self._over.wait(12):
            self.save()

    def _at(self, second: float) -> float:
        """A second of the plan; ``--slow`` times later, and within the budget."""
        return min(second * self._options.slow, self._options.budget - RESERVE)

    def _wanted(self, stage: str, servers: Sequence[str]) -> list[str]:
        if stage not in self._options.stages:
            return []
        return [name for name in servers if not self._options.only or name in self._options.only]

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Keep how long a stage took. An error ends the stage, and not the sprint."""
        began, error = elapsed(), "cut off"
        self._results.log(f"== {name}")
        try:
            yield
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:500]
            self._results.add("error", stage=name, error=traceback.format_exc()[-2000:])
            self._results.log(f"ERROR in {name}: {error}")
        finally:
            seconds = round(elapsed() - began, 1)
            self._results.add(
                "stage", name=name, began=round(began, 1), seconds=seconds, error=error
            )
        self.save()

    def _start(self, *servers: str) -> None:
        for name in servers:
            self._fleet.start(self._specs[name])

    def _about(self) -> float:
        """Keep versions, GPU and revision; the GPU's memory in GiB."""
        import torch

        from eval.bench import provenance

        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = torch.cuda.get_device_name()
        self._results.add(
            "about",
            gpu=name,
            gib=round(gib, 1),
            capability=list(torch.cuda.get_device_capability()),
            versions=provenance.versions(),
            hardware=provenance.hardware(),
            revision=self._options.revision or provenance.git_revision(),
        )
        self._results.log(f"{name}, {gib:.0f} GiB")
        return gib

    def _check_answers(self, names: Sequence[str], until: float) -> None:
        if not self._fleet.wait(names[:1], until):
            raise RuntimeError("no server without speculation is ready")
        texts = self._texts[: self._plan.answers]
        answers = Answers(
            self._results, self._fleet.running[names[0]], texts, self._plan.new_tokens
        )
        batches = list(dict.fromkeys((len(texts), max(len(texts) // 4, 1), 1)))
        for name in self._fleet.wait(names[1:2], until) + self._fleet.wait(names[2:], until):
            running = self._fleet.running[name]
            answers.compare(running, "auto", batches)
            if self._speed.switch(running, {"policy": "c2t-plus"}):
                answers.compare(running, "c2t-plus", batches[:1])
            self._results.add("c2t state", server=name, state=running.c2t_state())
            self.save()

    def _measure_first(self, servers: Sequence[str], *, many: bool) -> None:
        """No speculation and ``auto``, twice; then what shares their servers."""
        methods = self._ready(BIG, servers, self._at(200))
        self._kernels.join(self._at(205))
        self._note_gpu()
        early = [m for m in methods if m.name in ("none", "auto")]
        gated = [m for m in methods if m.name == "c2t-plus"]
        others = [m for m in methods if m not in (*early, *gated)]
        more, once, again = 30 * many, self._plan.repeats[:1], self._plan.repeats[1:]
        self._measure(early, once, self._at(270))
        self._measure(others, once, self._at(310))
        self._measure(early, again, self._at(310 + more))
        self._measure(gated, once, self._at(330 + more))
        if gated:
            self._switch_back(self._at(345))

    def _switch_back(self, until: float) -> None:
        """``auto`` after ``c2t-plus``: whether the server plans again, as fast, equal answers."""
        none, auto = (self._fleet.running.get(name) for name in ("none", "auto"))
        answers = None
        texts = self._texts[: self._plan.answers]
        if none and auto and elapsed() < until:
            answers = Answers(self._results, none, texts, self._plan.new_tokens)
            answers.compare(auto, "c2t-plus", [len(texts)])
        if auto and self._speed.switch(auto, {"policy": "auto"}):
            if answers and elapsed() < until:
                answers.compare(auto, "auto", [len(texts)])
            batches = self._plan.batches[:1]
            self._speed.measure(self._plan.big, [AUTO_AGAIN], batches, (0,), until + 10)

    def _measure_late(self, stage: str, methods: Sequence[Method], servers: Sequence[str],
                      latest: float, until: float, repeats: Sequence[int]) -> None:  # fmt: skip
        """Servers of their own, unless it is later than ``latest``."""
        if not servers or elapsed() >= self._at(latest):
            return
        with self._stage(stage):
            self._start(*servers)
            ready = self._ready(methods, servers, self._at(until - 28))
            self._note_gpu()
            self._measure(ready, repeats, self._at(until))
        self._fleet.stop(*servers)

    def _ready(
        self, methods: Sequence[Method], servers: Sequence[str], until: float
    ) -> list[Method]:
        """Methods of servers that are ready in time; keeps how those with ``--c2t`` verify."""
        ready = self._fleet.wait(servers, until)
        for name in ready:
            if self._specs[name].c2t:
                state = self._fleet.running[name].c2t_state()
                self._results.add("c2t state", server=name, state=state)
        return [method for method in methods if method.server in ready]

    def _measure(self, methods: Sequence[Method], repeats: Sequence[int], until: float) -> None:
        if methods:
            shape = self._specs[methods[0].server].shape
            self._speed.measure(shape, methods, self._plan.batches, repeats, until)

    def _note_gpu(self) -> None:
        """Keep clocks and memory once all servers of a stage are ready."""
        query = "clocks.sm,clocks.mem,power.draw,memory.used,temperature.gpu,utilization.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            self._results.add("gpu", query=query, values=done.stdout.strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.gpu.sprint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    add("--budget", type=float, default=540, help="seconds of this call (%(default)s)")
    add("--kit", help="folder with gpucheck.py, which tests kernels before ours")
    add("--revision", help="of this code, where there is no git")
    add("--only", nargs="+", default=[], metavar="SERVER", choices=GPU.servers())
    add("--stages", nargs="+", default=STAGES, choices=STAGES, help="(%(default)s)")
    add("--batches", nargs="+", type=int, metavar="N", help="measure tokens/s at these")
    add("--rehearse", action="store_true", help="small shapes, for an emulated device")
    add("--slow", type=float, default=1.0, help="times of the plan are so many times later")
    add("--in-turn", action="store_true", help="start the first stage's servers after answers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sprint; see the module for exit codes."""
    options = _parser().parse_args(argv)
    start_clock()
    end_leftovers()
    sprint = Sprint(options)
    with interrupted_by_sigterm():
        try:
            sprint.run()
            return 0
        except KeyboardInterrupt:
            return OUT_OF_TIME
        finally:
            sprint.close()
            print(sprint.report())


if __name__ == "__main__":
    sys.exit(main())
