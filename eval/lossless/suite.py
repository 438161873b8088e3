"""The parts of a run, one after the other, and everything they found.

Greedy equality and distribution tests share their servers: first the one without speculation,
then each ``--c2t`` one. Seeded equality has servers with deterministic inference, the kits have
their own. A float32 server is started only if answers parted, to tell defects from ties.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.progress import Progress

from eval.lossless import diverge, greedy, sampling, seeded
from eval.lossless.outcome import Outcome
from eval.lossless.servers import Broken, Models, visit_all
from eval.lossless.workload import LONGEST_ANSWER, Asked, mixed
from eval.server import Launch, Server
from sglang_c2t.offline.client import run_load

PARTS = ("greedy", "sampling", "seeded", "kits")

#: Policies under which samples are drawn, an equal part under each: pruned and whole drafts.
SAMPLED_UNDER = {"chains": ("c2t", "fixed"), "trees": ("c2t", "eagle2")}

#: Tokens whose probabilities are asked for at each place; the demo models have no more, and what
#: they leave to the others of a larger vocabulary is far below what a test can find.
LIKELIEST = 2048

#: Answers on which the rounding noise is measured.
NOISE_ANSWERS = 64

T = TypeVar("T")
Checked = tuple[list[greedy.Wave], list[sampling.SampleTest]]
Expected = dict[str, list[tuple[int, ...]]]  # seeded outputs by cut


@dataclass(frozen=True)
class Settings:
    """What is run, and how much of it."""

    parts: Sequence[str]
    shapes: Sequence[str]
    policies: Mapping[str, Sequence[str]]  # by shape
    requests: int  # greedy ones, over all --c2t servers
    samples: int  # per distribution test
    at_once: int  # servers
    seed: int
    logs: Path
    seeded_prompts: int = 60  # of each kind of sampling
    longest: int = LONGEST_ANSWER  # tokens of a greedy answer
    stock: bool = False  # ask stock speculation, and the plain server again, all of it as well


@dataclass
class Found:
    """Everything a run found."""

    control: list[greedy.Wave] = field(default_factory=list)  # of servers without --c2t
    waves: list[greedy.Wave] = field(default_factory=list)
    noise: diverge.Noise | None = None
    tests: list[sampling.SampleTest] = field(default_factory=list)
    seeded: list[seeded.Reproduced] = field(default_factory=list)
    kits: list[Outcome] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)

    @property
    def defects(self) -> int:
        """How much is wrong. What stock servers repeat differently is not, nor is what nobody
        promises to repeat.
        """
        return (
            sum(len(wave.divergences) - wave.count("tie") for wave in self.waves)
            + sum(not test.passed for test in self.tests)
            + sum(len(run.differing) for run in self.seeded if run.promised)
            + sum(not outcome.passed for outcome in self.kits)
            + len(self.broken)
        )


@dataclass(frozen=True)
class Oracle:
    """What the server without speculation says."""

    expected: list[diverge.Output]
    control: list[greedy.Wave]
    leads: list[diverge.Led]
    plan: sampling.Plan | None
    control_tests: list[sampling.SampleTest]


@dataclass
class Suite:
    """One run: models, settings, prompts (token ids), progress bars, and what was found."""

    models: Models
    settings: Settings
    prompts: Sequence[Sequence[int]]
    progress: Progress
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        """All parts; what breaks is found, not raised."""
        parts = self.settings.parts
        if "greedy" in parts or "sampling" in parts:
            self._greedy_and_sampling()
        if "seeded" in parts:
            self._seeded()
        if "kits" in parts:
            self._kits()
        return self.found

    # -- greedy and sampling: the same servers -------------------------------------------

    def _greedy_and_sampling(self) -> None:
        kinds = self.models.kinds(self.settings.shapes)
        asked = self._asked(len(kinds))
        oracles = self._visit([self.models.plain()], partial(self._ask_oracle, asked))
        if not oracles:
            return
        oracle = oracles[0]
        self.found.control, self.found.tests = oracle.control, list(oracle.control_tests)
        shape_of = {self.models.gated(*kind).name: kind[1] for kind in kinds}
        shares = dict(zip(shape_of, greedy.blocks(len(asked), len(kinds)), strict=True))

        def work(launch: Launch, server: Server) -> Checked:
            mine, shape = shares[launch.name], shape_of[launch.name]
            return (
                self._check_greedy(launch.name, server, shape, asked[mine], oracle.expected[mine]),
                self._check_samples(launch.name, server, oracle.plan, SAMPLED_UNDER[shape]),
            )

        for waves, tests in self._visit([self.models.gated(*kind) for kind in kinds], work):
            self.found.waves += waves
            self.found.tests += tests
        if self.settings.stock and asked:
            self._ask_stock(kinds, list(shares.values()), asked, oracle.expected)
        self._classify(oracle.leads)

    def _ask_stock(
        self, kinds: Sequence[tuple[str, str]], shares: Sequence[slice], asked: Sequence[Asked],
        expected: Sequence[diverge.Output],
    ) -> None:  # fmt: skip
        """How far SGLang's own speculation repeats the plain server, on the same requests."""
        launches = [self.models.stock(*kind) for kind in kinds]
        share_of = dict(zip([launch.name for launch in launches], shares, strict=True))

        def work(launch: Launch, server: Server) -> list[greedy.Wave]:
            mine = share_of[launch.name]
            some, wanted = asked[mine], expected[mine]
            advance = self._bar(f"{launch.name}, greedy", len(some))
            return greedy.in_batches(server, launch.name, "-", some, wanted, advance)

        for waves in self._visit(launches, work):
            self.found.control += waves

    def _asked(self, num_servers: int) -> list[Asked]:
        """No greedy requests where that part is not asked for."""
        wanted = self.settings.requests if "greedy" in self.settings.parts else 0
        wanted = -(-wanted // num_servers) * num_servers
        return mixed(self.prompts, wanted, self.settings.seed, self.settings.longest)

    def _ask_oracle(self, asked: Sequence[Asked], launch: Launch, server: Server) -> Oracle:
        name, expected = launch.name, []
        control: list[greedy.Wave] = []
        leads: list[diverge.Led] = []
        if asked:
            some = asked if self.settings.stock else asked[: max(len(asked) // 6, 1)]
            advance = self._bar(f"{name}, greedy answers", len(asked) + len(some))
            expected = greedy.ask(server, asked, greedy.REFERENCE_BATCH, advance).outputs
            control = greedy.in_batches(server, name, "-", some, expected[: len(some)], advance)
            leads = diverge.leads(server.url, self.prompts[:NOISE_ANSWERS])
        plan = self._plan(server)
        tests = self._check_samples(name, server, plan)
        return Oracle(expected, control, leads, plan, tests)

    def _plan(self, server: Server) -> sampling.Plan | None:
        if "sampling" not in self.settings.parts:
            return None
        num_servers = 1 + len(self.models.kinds(self.settings.shapes))
        num_tests = num_servers * len(sampling.CUTS)
        return sampling.Plan.of(server, self.prompts, self.settings.samples, num_tests, LIKELIEST)

    def _check_greedy(
        self, name: str, server: Server, shape: str, asked: Sequence[Asked],
        expected: Sequence[diverge.Output],
    ) -> list[greedy.Wave]:  # fmt: skip
        if not asked:
            return []
        advance = self._bar(f"{name}, greedy", len(asked))
        policies = self.settings.policies[shape]
        return greedy.check(server, name, policies, asked, expected, advance)

    def _check_samples(
        self, name: str, server: Server, plan: sampling.Plan | None, policies: Sequence[str] = ()
    ) -> list[sampling.SampleTest]:
        if plan is None:
            return []
        choices = [partial(server.switch, policy=policy) for policy in policies]
        advance = self._bar(f"{name}, samples", plan.num_answers(len(choices)) * len(sampling.CUTS))
        return [plan.test(server, name, cut, advance, choices) for cut in sampling.CUTS]

    def _classify(self, leads: Sequence[diverge.Led]) -> None:
        """Ask a float32 server whether divergences are ties, if there are any to be asked for."""
        waves = [*self.found.control, *self.found.waves]
        found = [d for wave in waves for d in wave.divergences]
        if not any(d.verdict == "unclassified" for d in found):
            return

        def work(_: Launch, server: Server) -> tuple[diverge.Noise, list[diverge.Score]]:
            return diverge.rounding_noise(server.url, leads), diverge.scores_of(server.url, found)

        for noise, scores in self._visit([self.models.float32()], work):
            judged = iter(diverge.classify(found, scores, noise))
            renewed = [replace(w, divergences=[next(judged) for _ in w.divergences]) for w in waves]
            count = len(self.found.control)
            self.found.control, self.found.waves = renewed[:count], renewed[count:]
            self.found.noise = noise

    # -- seeded --------------------------------------------------------------------------

    def _seeded(self) -> None:
        prompts = self.prompts[: self.settings.seeded_prompts]
        plain = self.models.plain("no speculation, seeded", *seeded.FLAGS)

        def expect(launch: Launch, server: Server) -> tuple[Expected, list[seeded.Reproduced]]:
            expected = {
                kind: run_load(
                    server.url, seeded.bodies(prompts, kind), concurrency=seeded.REFERENCE_BATCH
                ).outputs
                for kind in seeded.KINDS
            }
            batches = (seeded.CONTROL_BATCH,)
            advance = self._bar(launch.name, seeded.num_answers(len(prompts), batches))
            runs = seeded.check(server, launch.name, prompts, expected, batches, advance)
            return expected, runs

        oracles = self._visit([plain], expect)
        if not oracles:
            return
        expected, control = oracles[0]

        def work(launch: Launch, server: Server) -> list[seeded.Reproduced]:
            advance = self._bar(launch.name, seeded.num_answers(len(prompts), seeded.BATCHES))
            return seeded.check(server, launch.name, prompts, expected, seeded.BATCHES, advance)

        kinds = self.models.kinds(self.settings.shapes)
        gated = [self.models.gated(*kind, *seeded.FLAGS, suffix=", seeded") for kind in kinds]
        self.found.seeded = [*control, *(run for runs in self._visit(gated, work) for run in runs)]

    # -- kits ----------------------------------------------------------------------------

    def _kits(self) -> None:
        from eval.lossless import kits  # imports much of SGLang

        plain = self.models.plain("no speculation, kits")
        oracles = self._visit([plain], lambda _, server: kits.References.of(server.url))
        if not oracles:
            return
        hosts = kits.hosts(self.models, self.settings.shapes)

        def work(launch: Launch, server: Server) -> list[Outcome]:
            host = hosts[launch.name]
            kits.attach(host.kit, server, oracles[0])
            tests = kits.tests_of(host.kit)
            advance = self._bar(launch.name, len(tests))
            return [kits.run_test(launch.name, test, advance) for test in tests]

        # What kits print would go between the progress bars; failures carry their message.
        with kits.demo_scale(oracles[0]), contextlib.redirect_stdout(io.StringIO()):
            for outcomes in self._visit([host.launch for host in hosts.values()], work):
                self.found.kits += outcomes

    # -- shared --------------------------------------------------------------------------

    def _visit(self, launches: Sequence[Launch], work: Callable[[Launch, Server], T]) -> list[T]:
        """Results of the servers that did not break; the others go into what was found."""
        starting = self.progress.add_task(f"servers: {launches[0].name}", total=len(launches))

        def visit(launch: Launch, server: Server) -> T:
            result = work(launch, server)
            self.progress.advance(starting)
            return result

        visited = visit_all(launches, visit, self.settings.logs, self.settings.at_once)
        self.found.broken += [result for result in visited if isinstance(result, Broken)]
        return [result for result in visited if not isinstance(result, Broken)]

    def _bar(self, what: str, total: int) -> Callable[[], None]:
        task = self.progress.add_task(what, total=total)
        return partial(self.progress.advance, task)
