"""Ten minutes on a GPU: kernels, answers, then tokens/s, the measurements that say most first.

    bash eval/gpu/sprint.sh        # calls this module

Each result is a line of ``results.jsonl`` as soon as it is there, so that a call that is killed
leaves what it measured; ``report.md`` and ``servers.log`` are written after each stage. Servers
start side by side while kernels and answers are checked; no cell is measured meanwhile.

Stages: kernels (``gpucheck.py`` of the kit, then ``pytest -m gpu``), answers (a trained pair:
chains on FA3 and trees on FlashInfer compared with no speculation), first and second (tokens/s of
the pair at the cost of an 8B Llama, see ``graft.py``), micro (``microbench.py``), little (tokens/s
at 1B), rest (the published gate, and trees, at 8B).

Exit code 0: the plan is done; 3: the time was over. A stage that fails is a row of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import requests

from eval.gpu import models
from eval.gpu.fleet import Fleet, end_leftovers, run_bounded
from eval.gpu.measure import Answers, Method, Speed, switch
from eval.gpu.plan import AUTO_AGAIN, BIG, EMULATED, GPU, LITTLE, REST, STAGES
from eval.gpu.results import Results, elapsed, report, start_clock
from eval.prompts import demo_mix
from sglang_c2t.offline.servers import interrupted_by_sigterm

#: Seconds of a call that are kept for stopping servers and for the last report.
RESERVE = 12.0
OUT_OF_TIME = 3

#: GiB of a GPU that holds four servers of the largest shape; a smaller one holds two.
FOUR_SERVERS_GIB = 120

#: Tests of kernels alone. ``tests/cuda/test_servers.py`` starts servers as the sprint does.
TESTS = (
    "tests/kernels",
    "tests/draft/test_chain.py",
    "tests/policies/test_fused.py",
)
GPUCHECK_SECONDS = 75.0


class Sprint:
    """The stages, each of which must end at its own time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._results = Results(options.out)
        work = Path(tempfile.mkdtemp(prefix="sprint-"))
        self._plan = EMULATED if options.rehearse else GPU
        if options.batches:
            self._plan = replace(self._plan, batches=tuple(options.batches))
        self._specs = self._plan.servers()
        self._fleet = Fleet(self._results, work, self._plan.flags, models.trained(models.DEMO))
        self._texts = [prompt.text for prompt in demo_mix(self._plan.prompts)]
        self._speed = Speed(self._results, self._fleet, self._texts, self._plan.new_tokens)
        self._tests = threading.Thread(target=self._test_kernels, daemon=True)

    def run(self) -> None:
        """Run the stages that were asked for; raises KeyboardInterrupt when the time is over."""
        gib, repeats = 0.0, self._plan.repeats
        with self._stage("about"):
            gib = self._about()
        answers = self._wanted("answers", ["answers-none", "answers-chains", "answers-trees"])
        early = ["none", "auto", *(["stock3", "fixed"] if gib > FOUR_SERVERS_GIB else [])]
        first = self._wanted("first", early)
        late = first if self._options.rehearse else []  # an emulated device starts fewer at once
        with self._stage("start"):
            self._start(*answers, *(name for name in first if name not in late))
        if "kernels" in self._options.stages:
            self._tests.start()
        if answers:
            with self._stage("answers"):
                self._check_answers(answers, self._at(170))
            self._fleet.stop(*answers)
        if first:
            with self._stage("first"):
                self._start(*late)
                self._measure_first(first, 30 if len(early) > 2 else 0)
            self._fleet.stop(*first)
        second = [n for n in self._wanted("second", ["stock3", "fixed"]) if n not in first]
        self._measure_late("second", BIG, second, 400, 450, repeats[:1])
        if "micro" in self._options.stages:
            with self._stage("micro"):
                argv = ["-m", "eval.gpu.microbench", *self._plan.microbench]
                argv += ["--out", str(self._results.folder / "micro.json")]
                seconds = min(75 * self._options.slow, self._at(530) - elapsed())
                self._command("microbench", argv, seconds)
        for name, methods, latest in (("little", LITTLE, 440), ("rest", REST, 430)):
            servers = self._wanted(name, list(dict.fromkeys(m.server for m in methods)))
            self._measure_late(name, methods, servers, latest, 528, repeats)

    def close(self) -> None:
        """Stop all servers and write the last report."""
        self._fleet.stop(*list(self._fleet.running))
        self._save()
        print(report(self._results))

    def _save(self) -> None:
        (self._results.folder / "report.md").write_text(report(self._results))
        (self._results.folder / "servers.log").write_text(self._fleet.logs())

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
        try:
            yield
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:500]
            self._results.add("error", stage=name, error=traceback.format_exc()[-2000:])
        finally:
            self._results.add("stage", name=name, seconds=round(elapsed() - began, 1), error=error)
        self._save()

    def _start(self, *servers: str) -> None:
        for name in servers:
            self._fleet.start(self._specs[name])

    def _about(self) -> float:
        """Keep versions, GPU and revision; the GPU's memory in GiB."""
        import torch

        from eval.bench import provenance

        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        self._results.add(
            "about",
            gpu=torch.cuda.get_device_name(),
            gib=round(gib, 1),
            versions=provenance.versions(),
            hardware=provenance.hardware(),
            revision=self._options.revision or provenance.git_revision(),
        )
        return gib

    def _test_kernels(self) -> None:
        """``gpucheck.py`` of the kit, if there is one, then ``pytest -m gpu``."""
        if self._options.kit:
            self._command("gpucheck", [f"{self._options.kit}/gpucheck.py"], GPUCHECK_SECONDS)
        argv = ["-m", "pytest", "-m", "gpu", *TESTS, "-p", "no:cacheprovider", "-v", "--tb=short"]
        self._command("pytest", [*argv, "-rfE", *self._plan.pytest], self._plan.pytest_seconds)

    def _command(self, part: str, argv: list[str], seconds: float) -> None:
        """Run a Python command that tests or times kernels; its output is in ``kernels.log``."""
        began, log = elapsed(), self._results.folder / "kernels.log"
        before = log.stat().st_size if log.exists() else 0
        code = run_bounded([sys.executable, *argv], seconds, log)
        lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
        passed = sum(line.startswith("ok ") or " PASSED" in line for line in lines)
        failed = [x[:300] for x in lines if x.startswith(("FAIL", "ERROR ")) or " FAILED" in x]
        took = round(elapsed() - began, 1)
        self._results.add(
            "kernels", part=part, code=code, seconds=took, passed=passed, failed=failed[:30]
        )

    def _check_answers(self, names: Sequence[str], until: float) -> None:
        if not self._fleet.wait(names[:1], until):
            raise RuntimeError("no server without speculation is ready")
        answers = self._answers(names[0])
        most = self._plan.answers
        batches = list(dict.fromkeys((most, max(most // 4, 1), 1)))
        for name in self._fleet.wait(names[1:2], until) + self._fleet.wait(names[2:], until):
            running = self._fleet.running[name]
            answers.compare(running, "auto", batches)
            if switch(self._results, running, {"policy": "c2t-plus"}):
                answers.compare(running, "c2t-plus", batches[:1])
            self._add_state(name)

    def _answers(self, name: str) -> Answers:
        texts = self._texts[: self._plan.answers]
        return Answers(self._results, self._fleet.running[name], texts, self._plan.new_tokens)

    def _measure_first(self, servers: Sequence[str], more: float) -> None:
        """No speculation and ``auto``, twice; then what shares their servers."""
        methods = self._ready(BIG, servers, self._at(200))
        if self._tests.ident:
            self._tests.join(timeout=max(0.0, self._at(205) - elapsed()))
        early = [m for m in methods if m.name in ("none", "auto")]
        gated = [m for m in methods if m.name == "c2t-plus"]
        others = [m for m in methods if m not in (*early, *gated)]
        once, again = self._plan.repeats[:1], self._plan.repeats[1:]
        for chosen, repeats, until in (
            (early, once, 270), (others, once, 310), (early, again, 310 + more),
            (gated, once, 330 + more),
        ):  # fmt: skip
            self._speed.measure(chosen, self._plan.batches, repeats, self._at(until))
        if gated:
            self._switch_back(self._at(345))

    def _switch_back(self, until: float) -> None:
        """Measure ``auto`` after ``c2t-plus``, and compare the answers of both."""
        answers = None
        none, auto = (self._fleet.running.get(name) for name in ("none", "auto"))
        if none and auto and elapsed() < until:
            answers = self._answers("none")
            answers.compare(auto, "c2t-plus", [self._plan.answers])
        if auto and switch(self._results, auto, {"policy": "auto"}):
            if answers and elapsed() < until:
                answers.compare(auto, "auto", [self._plan.answers])
            self._speed.measure([AUTO_AGAIN], self._plan.batches[:1], (0,), until + 10)

    def _measure_late(self, stage: str, methods: Sequence[Method], servers: Sequence[str],
                      latest: float, until: float, repeats: Sequence[int]) -> None:  # fmt: skip
        """Measure servers of their own, unless it is later than ``latest``."""
        if not servers or elapsed() >= self._at(latest):
            return
        with self._stage(stage):
            self._start(*servers)
            ready = self._ready(methods, servers, self._at(until - 28))
            self._speed.measure(ready, self._plan.batches, repeats, self._at(until))
        self._fleet.stop(*servers)

    def _ready(
        self, methods: Sequence[Method], servers: Sequence[str], until: float
    ) -> list[Method]:
        """Methods of servers that are ready in time; keeps how those with ``--c2t`` verify."""
        ready = self._fleet.wait(servers, until)
        for name in ready:
            if self._specs[name].c2t:
                self._add_state(name)
        return [method for method in methods if method.server in ready]

    def _add_state(self, name: str) -> None:
        try:
            state = requests.get(f"{self._fleet.running[name].server.url}/c2t", timeout=20).json()
        except (requests.RequestException, ValueError) as error:
            state = {"error": str(error)}
        state.pop("planner", None)  # each cell has it
        serving = (state.get("serving") or [{}])[0]
        packed, reason = serving.get("packed"), serving.get("unpacked_because")
        self._results.add("c2t state", server=name, packed=packed, reason=reason, state=state)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sprint; see the module for exit codes."""
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
    options = parser.parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(main())
