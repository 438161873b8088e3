"""Is a ``--c2t`` server lossless? Thousands of requests against the server without speculation.

    python -m eval.lossless                     everything, on the demo models and the CPU
    python -m eval.lossless greedy --quick      one part, in minutes
    python -m eval.lossless --pair smollm2      on a real pair and real prompts, within 15 minutes
    python -m eval.lossless --model TARGET --algorithm EAGLE3 --draft DRAFT --flags "--tp-size 2"

Parts: greedy equality over mixed batches, where a request that diverges is scored again in float32
and called a defect or a floating-point tie; distribution tests of sampling; seeded equality. Exit
code 0 without a defect, 1 with one, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from eval import terminal
from eval.bench.provenance import provenance
from eval.lossless import greedy, sampling, seeded
from eval.lossless.greedy import POLICIES, Output
from eval.lossless.servers import FLOAT32, SHAPES, Broken, Models, visit_all
from eval.lossless.workload import LONGEST_ANSWER, Request, mixed
from eval.prompts import demo_mix
from eval.recordings import real_prompts, smollm2
from eval.server import DRAFTS, TARGET, Launch, Server
from eval.smollm2.target import TargetError
from sglang_c2t.files import write_texts
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.prompts import PromptRow, read_prompts
from sglang_c2t.offline.servers import interrupted_by_sigterm

PARTS = ("greedy", "sampling", "seeded")


class Size(NamedTuple):
    """How much a run asks for."""

    requests: int = 2952  # greedy ones, over all servers
    samples: int = 3000  # of each distribution test
    seeded_prompts: int = 60
    max_new_tokens: int = LONGEST_ANSWER  # of a greedy answer
    num_draft_tokens: int = 16  # of a tree
    at_once: int = 2  # servers


FULL, QUICK = Size(), Size(requests=408, samples=800)
#: The real pair has thirty times the demo models' weights.
REAL = Size(500, 300, seeded_prompts=8, max_new_tokens=32, num_draft_tokens=8)
#: Answers that measure the rounding noise.
NOISE_ANSWERS = 64
#: Characters of a prompt that a report shows.
SHOWN = 120
INTERRUPTED = 130

T = TypeVar("T")


def parse(argv: Sequence[str] | None) -> Namespace:
    """Arguments, with the defaults of the chosen models and size."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.lossless", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("part", nargs="?", choices=(*PARTS, "all"), default="all", help="which part (all)")
    add("--quick", action="store_true", help="fewer requests and samples")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="drafts (both)")
    add("--prompts", type=Path, help="JSONL, see sglang_c2t.offline.prompts (generated ones)")
    add("--stock", action="store_true",
        help="repeat all greedy requests on stock speculation and without speculation")  # fmt: skip
    add("--out", type=Path, default=Path("runs/lossless"), help="logs and summary.json")
    real = parser.add_argument_group("a real pair on the CPU; fewer and shorter requests")
    real.add_argument("--pair", choices=["smollm2"], help="instead of the demo models")
    real.add_argument("--data", type=Path, help="folder with public prompts (our own, HumanEval)")
    own = parser.add_argument_group("your own models")
    own.add_argument("--model", help="target: a folder or a name that SGLang can load")
    own.add_argument("--draft", help="its draft model")
    own.add_argument("--algorithm", nargs="+", choices=(*sorted(DRAFTS), "NEXTN"))
    own.add_argument("--flags", default="", help="of every server, in one string")
    own.add_argument("--float32-flags", default=shlex.join(FLOAT32), help="of the float32 server")
    own.add_argument("--num-steps", type=_positive, default=5)
    own.add_argument("--topk", type=_positive, default=4, help="of trees")
    own.add_argument("--num-draft-tokens", type=_positive, help="of trees (16; the real pair 8)")
    args = parser.parse_args(argv)
    args.size = REAL if args.pair else QUICK if args.quick else FULL
    if args.num_draft_tokens:
        args.size = args.size._replace(num_draft_tokens=args.num_draft_tokens)
    if args.model:
        args.size = args.size._replace(at_once=1)
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def models(args: Namespace) -> Models:
    """The demo models, the pair, or the user's models; ValueError for contradicting arguments."""
    size = args.num_steps, args.topk, args.size.num_draft_tokens
    flags, exact = shlex.split(args.flags), ("--dtype", "float32")
    if args.pair:
        if args.model or args.draft or args.algorithm:
            raise ValueError("--pair brings its models")
        pair = smollm2()
        drafts = {pair.algorithm: str(pair.draft)}
        return Models(str(pair.target), drafts, *size, flags, exact, True, pair.env)
    if args.model is None:
        if args.draft is not None:
            raise ValueError("--draft goes with --model")
        chosen = args.algorithm or sorted(DRAFTS)
        if missing := set(chosen) - set(DRAFTS):
            raise ValueError(f"--algorithm {missing.pop()} has no demo draft: {', '.join(DRAFTS)}")
        drafts = {algorithm: str(DRAFTS[algorithm]) for algorithm in chosen}
        return Models(str(TARGET), drafts, *size, flags, exact, on_cpu=True)
    if args.draft is None or args.algorithm is None or len(args.algorithm) != 1:
        raise ValueError("--model needs --draft and one --algorithm")
    own, drafts = shlex.split(args.float32_flags), {args.algorithm[0]: args.draft}
    return Models(args.model, drafts, *size, flags, own)


def prompt_ids(args: Namespace, tokenizer: Any) -> list[list[int]]:
    """Prompts as token ids: generated, the real pair's, or those of a file."""

    def ids(row: PromptRow) -> list[int]:
        if row.text is not None:
            return tokenizer(row.text)["input_ids"]
        chat = {"tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(row.messages, **chat)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if args.prompts is not None:
        return [ids(row) for row in read_prompts(args.prompts)]
    found = real_prompts(80, args.data) if args.pair else demo_mix(600, seed=100)
    return [tokenizer(prompt.text)["input_ids"] for prompt in found]


# -- running --------------------------------------------------------------------------------


@dataclass
class Found:
    """Everything a run found."""

    control: list[greedy.Wave] = field(default_factory=list)  # of servers without --c2t
    waves: list[greedy.Wave] = field(default_factory=list)
    noise: float | None = None  # nats
    tests: list[sampling.SampleTest] = field(default_factory=list)
    seeded: list[seeded.Reproduced] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)

    @property
    def defects(self) -> int:
        """How much is wrong; servers without ``--c2t`` and unpromised repeats do not count."""
        return (
            sum(len(wave.divergences) - wave.ties for wave in self.waves)
            + sum(not test.passed for test in self.tests)
            + sum(len(run.differing) for run in self.seeded if run.promised)
            + len(self.broken)
        )


@dataclass
class Suite:
    """One run over models and prompts (token ids)."""

    models: Models
    args: Namespace
    prompts: Sequence[Sequence[int]]
    progress: Progress
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        """Run the parts; what breaks is found, not raised."""
        kinds, part = self.models.kinds(self.args.shapes), self.args.part
        if part != "seeded":
            self._greedy_and_sampling(kinds)
        if part in ("seeded", "all"):
            self._seeded(kinds)
        return self.found

    def _greedy_and_sampling(self, kinds: Sequence[tuple[str, str]]) -> None:
        """Greedy and sampled requests go to the same servers."""
        part, size = self.args.part, self.args.size
        wanted = -(-size.requests // len(kinds)) * len(kinds) if part != "sampling" else 0
        asked = mixed(self.prompts, wanted, longest=size.max_new_tokens)
        num_tests = (1 + len(kinds)) * len(sampling.CUTS)
        launch = self.models.plain()

        def reference(server: Server) -> tuple[list[Output], list[Any], sampling.Plan | None]:
            """Answers without speculation, answers to measure noise with, and what to sample."""
            expected, served, plan = list[Output](), list[Any](), None
            if asked:
                advance = self._bar(f"{launch.name}, greedy", len(asked))
                replies = greedy.ask(server, asked, greedy.REFERENCE_BATCH, advance)
                expected = [Output.of(reply) for reply in replies]
                again = slice(None if self.args.stock else max(len(asked) // 6, 1))
                self._control(launch.name, asked[again], expected[again], server)
                served = greedy.served_answers(server.url, self.prompts[:NOISE_ANSWERS])
            if part != "greedy":
                plan = sampling.Plan.of(server.url, self.prompts, size.samples, num_tests)
                self._sample(launch.name, server, plan, ())
            return expected, served, plan

        for expected, served, plan in self._visit([(launch, reference)]):
            self._compare(kinds, asked, expected, plan)
            self._classify(served)

    def _compare(
        self, kinds: Sequence[tuple[str, str]], asked: Sequence[Request],
        expected: Sequence[Output], plan: sampling.Plan | None,
    ) -> None:  # fmt: skip
        """Send each ``--c2t`` server its block of requests; with ``--stock`` others as well."""

        def work(name: str, shape: str, mine: slice, server: Server) -> None:
            if some := asked[mine]:
                advance = self._bar(f"{name}, greedy", len(some))
                self.found.waves += greedy.check(
                    server, name, POLICIES[shape], some, expected[mine], advance
                )
            if plan is not None:
                self._sample(name, server, plan, sampling.SAMPLED_UNDER[shape])

        works: list[tuple[Launch, Callable[[Server], None]]] = []
        stock: list[tuple[Launch, Callable[[Server], None]]] = []
        for kind, mine in zip(kinds, greedy.blocks(len(asked), len(kinds)), strict=True):
            launch = self.models.speculative(*kind)
            works.append((launch, partial(work, launch.name, kind[1], mine)))
            if self.args.stock and asked:
                launch = self.models.speculative(*kind, suffix=", stock", c2t=False)
                again = partial(self._control, launch.name, asked[mine], expected[mine])
                stock.append((launch, again))
        self._visit([*works, *stock])
        self.found.waves.sort(key=lambda wave: wave.server)

    def _control(
        self, name: str, some: Sequence[Request], wanted: Sequence[Output], server: Server
    ) -> None:
        """How far a server without ``--c2t`` repeats the reference."""
        advance = self._bar(f"{name}, again", len(some))
        self.found.control.append(greedy.wave(server, name, "-", some, wanted, advance))

    def _sample(self, name: str, server: Server, plan: sampling.Plan, under: Sequence[str]) -> None:
        advance = self._bar(f"{name}, distribution tests", len(sampling.CUTS))
        for cut in sampling.CUTS:
            self.found.tests.append(plan.test(server, name, cut, under))
            advance()

    def _classify(self, served: Sequence[Any]) -> None:
        """Score unclassified divergences on a float32 server, if there are any."""
        waves = [*self.found.control, *self.found.waves]
        every = [divergence for wave in waves for divergence in wave.divergences]

        def score(server: Server) -> None:
            self.found.noise = greedy.rounding_noise(server.url, served)
            greedy.classify(server.url, every, self.found.noise)

        if any(divergence.verdict == "unclassified" for divergence in every):
            self._visit([(self.models.float32(), score)])

    def _seeded(self, kinds: Sequence[tuple[str, str]]) -> None:
        prompts = self.prompts[: self.args.size.seeded_prompts]

        def check(name: str, batches: Any, expected: seeded.Expected, server: Server) -> None:
            advance = self._bar(name, 1)
            self.found.seeded += seeded.check(server, name, prompts, expected, batches)
            advance()

        def reference(server: Server) -> seeded.Expected:
            expected = seeded.expect(server, prompts)
            check(plain.name, seeded.CONTROL_BATCHES, expected, server)
            return expected

        plain = self.models.plain("no speculation, seeded", *seeded.FLAGS)
        launches = [
            self.models.speculative(*kind, *seeded.FLAGS, suffix=", seeded") for kind in kinds
        ]
        for expected in self._visit([(plain, reference)]):
            works = [partial(check, each.name, seeded.BATCHES, expected) for each in launches]
            self._visit(list(zip(launches, works, strict=True)))

    def _visit(self, works: Sequence[tuple[Launch, Callable[[Server], T]]]) -> list[T]:
        """Results of the servers that did not break; the others are found broken."""
        visited = visit_all(works, self.args.out / "logs", self.args.size.at_once)
        self.found.broken += [result for result in visited if isinstance(result, Broken)]
        return [result for result in visited if not isinstance(result, Broken)]

    def _bar(self, name: str, total: int) -> Callable[[], None]:
        return partial(self.progress.advance, self.progress.add_task(name, total=total))


# -- output ---------------------------------------------------------------------------------


def show(found: Found, decode: Callable[[Sequence[int]], str], console: Console) -> None:
    """Print a table per part, each divergence, and the verdict."""
    waves = [*found.control, *found.waves]
    tables = {
        "Greedy equality; policy -: without --c2t": [
            {
                **asdict(replace(wave, divergences=[])),
                "ties": wave.ties,
                "lead": max((d.lead for d in wave.divergences if d.lead is not None), default=None),
                "defects": len(wave.divergences) - wave.ties,
            }
            for wave in waves
        ],
        f"Distributions; {sampling.FAMILY_ALPHA:g} false alarms a run": [
            {**asdict(test), **asdict(test.fit), "passed": test.passed} for test in found.tests
        ],
        "Seeded equality; not promised: SGLang repeats no mixed batch": [
            {**asdict(run), "differing": len(run.differing)} for run in found.seeded
        ],
    }
    for title, rows in tables.items():
        if rows:
            frame = pd.DataFrame(rows).drop(columns=["divergences", "fit"], errors="ignore")
            console.print(f"\n{title}\n{frame.to_string(index=False, na_rep='-')}", markup=False)
    for wave in waves:
        for d in wave.divergences:
            one, other = (
                "the end" if token is None else f"{decode([token])!r} ({token})"
                for token in (d.expected, d.got)
            )
            console.print(
                f"{d.verdict.upper()}: {wave.server}, {wave.policy}, {d.concurrency} at once, "
                f"request {d.index} ({d.kind}), token {d.place}: {other} instead of {one}; {d.why}."
                f" Prompt: ...{decode(d.prompt_ids)[-SHOWN:]!r}",
                markup=False,
            )
    if found.noise is not None:
        console.print(f"Rounding noise: {found.noise:.2e} nats; a tie is within {greedy.SAFETY:g}x")
    for broken in found.broken:
        console.print(f"{broken.server} broke: {broken.message}", markup=False)
    verdict = "lossless: yes" if found.defects == 0 else f"lossless: NO, {found.defects} defects"
    requests = sum(wave.requests for wave in found.waves)
    ties = sum(wave.ties for wave in found.waves)
    console.print(
        f"{verdict} ({requests} greedy requests, {ties} ties; {len(found.tests)} distribution "
        f"tests; {sum(run.requests for run in found.seeded)} seeded requests)"
    )


def as_json(found: Found, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Everything found; divergences with the text of their prompts."""
    result: dict[str, Any] = {"lossless": found.defects == 0, "defects": found.defects}
    result |= asdict(found)
    for wave in (*result["control"], *result["waves"]):
        for divergence in wave["divergences"]:
            divergence["prompt"] = decode(divergence["prompt_ids"])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 without a defect."""
    args = parse(argv)
    try:
        chosen = models(args)
        tokenizer = AutoTokenizer.from_pretrained(chosen.target)
        prompts = prompt_ids(args, tokenizer)
    except (ValueError, OSError, TargetError) as error:
        print(f"python -m eval.lossless: error: {error}", file=sys.stderr)
        return 2
    console = terminal.console()
    try:
        with interrupted_by_sigterm(), progress_on(console) as progress:
            found = Suite(chosen, args, prompts, progress).run()
    except KeyboardInterrupt:
        console.print("interrupted; the servers are stopped")
        return INTERRUPTED
    command = ["python", "-m", "eval.lossless", *(sys.argv[1:] if argv is None else argv)]
    config = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    summary = {
        **as_json(found, tokenizer.decode), "config": config, "provenance": provenance(command),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    write_texts({args.out / "summary.json": json.dumps(summary, indent=1) + "\n"})
    show(found, tokenizer.decode, console)
    console.print(f"written: {args.out / 'summary.json'}")
    return 1 if found.defects else 0


if __name__ == "__main__":
    sys.exit(main())
