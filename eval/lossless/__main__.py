"""Is a ``--c2t`` server lossless? Thousands of requests against the server without speculation.

    python -m eval.lossless                     everything, on the demo models and the CPU
    python -m eval.lossless greedy --quick      one part, in minutes
    python -m eval.lossless --pair smollm2      on a real pair and real prompts, within 15 minutes
    python -m eval.lossless --model TARGET --algorithm EAGLE3 --draft DRAFT --flags "--tp-size 2"

Parts: greedy equality over mixed batches, where a request that parts is scored again in float32
and called a defect or a floating-point tie; distribution tests of sampling; seeded equality;
SGLang's own kits. Exit code 0 without a defect, 1 with one, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eval import terminal
from eval.bench.provenance import provenance
from eval.lossless import greedy, summary
from eval.lossless.servers import FLOAT32, SHAPES, DraftSize, Models
from eval.lossless.suite import PARTS, Settings, Suite
from eval.lossless.workload import LONGEST_ANSWER
from eval.prompts import demo_mix
from eval.recordings import real_prompts, smollm2
from eval.server import DRAFTS
from eval.smollm2.target import TargetError
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.offline.progress import progress_on
from sglang_c2t.offline.prompts import PromptRow, read_prompts
from sglang_c2t.policies import build_policy, build_tree_policy

#: Greedy requests over all servers, and samples per distribution test.
FULL, QUICK = (2952, 3000), (408, 800)

#: The same on the real pair, which weighs thirty times the demo models; tokens of an answer,
#: prompts of each kind of sampling, nodes of trees.
REAL = argparse.Namespace(requests=500, samples=300, longest=32, seeded_prompts=8, nodes=8)

INTERRUPTED = 130

OWN_ALGORITHMS = (*sorted(DRAFTS), "NEXTN")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m eval.lossless", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = result.add_argument
    add("part", nargs="?", choices=(*PARTS, "all"), default="all", help="which part (all)")
    add("--quick", action="store_true", help="fewer requests and samples")
    add("--requests", type=_positive, help=f"greedy ones over all servers ({FULL[0]}; {QUICK[0]})")
    add("--samples", type=_positive, help=f"per distribution test ({FULL[1]}; {QUICK[1]})")
    add("--seeded-prompts", type=_positive, help="of each kind of sampling (60)")
    add("--max-new-tokens", type=_positive, help=f"of a greedy answer, at most ({LONGEST_ANSWER})")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="drafts (both)")
    add("--policies", nargs="+", metavar="NAME", help="for shapes that know them (several)")
    add("--prompts", type=Path, help="JSONL, see sglang_c2t.offline.prompts (generated ones)")
    add(
        "--stock",
        action="store_true",
        help="send all greedy requests to stock speculation, and to the plain server again, too",
    )
    add("--seed", type=int, default=0, help="of the mixed batches (0)")
    add("--out", type=Path, default=Path("runs/lossless"), help="logs and summary.json")
    add("--at-once", type=_positive, help="servers alive at a time (2; own models 1)")
    real = result.add_argument_group("a real pair on the CPU; fewer and shorter requests, no kits")
    real.add_argument("--pair", choices=["smollm2"], help="instead of the demo models")
    real.add_argument("--data", type=Path, help="folder with public prompts (our own, HumanEval)")
    own = result.add_argument_group("your own models; the kits do not run on them")
    own.add_argument("--model", help="target: a folder or a name that SGLang can load")
    own.add_argument("--draft", help="its draft model")
    own.add_argument("--algorithm", nargs="+", choices=OWN_ALGORITHMS, help="EAGLE3, ...")
    own.add_argument("--flags", default="", help="of every server, in one string")
    own.add_argument(
        "--float32-flags", default=shlex.join(FLOAT32), help="of the server that scores again"
    )
    size = DraftSize()
    own.add_argument("--num-steps", type=_positive, default=size.num_steps)
    own.add_argument("--topk", type=_positive, default=size.topk, help="of trees")
    own.add_argument(
        "--num-draft-tokens", type=_positive, help=f"of trees ({size.num_draft_tokens})"
    )
    return result


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def models(args: argparse.Namespace) -> Models:
    """The demo models, or the user's; ValueError for arguments that do not go together."""
    usual = REAL.nodes if args.pair else DraftSize().num_draft_tokens
    size = DraftSize(args.num_steps, args.topk, args.num_draft_tokens or usual)
    flags = shlex.split(args.flags)
    if args.pair:
        if args.model or args.draft or args.algorithm or args.part == "kits":
            raise ValueError("--pair brings its models; the kits are scaled to the demo models")
        return Models.of_the_pair(smollm2(), flags, size)
    if args.model is None:
        if args.draft is not None:
            raise ValueError("--draft goes with --model")
        demo = Models.of_the_demo(flags, size)
        chosen = args.algorithm or sorted(DRAFTS)
        missing = sorted(set(chosen) - set(DRAFTS))
        if missing:
            raise ValueError(f"--algorithm {missing[0]} has no demo draft: {', '.join(DRAFTS)}")
        return demo.only(chosen)
    if args.draft is None or args.algorithm is None or len(args.algorithm) != 1:
        raise ValueError("--model needs --draft and one --algorithm")
    if args.part == "kits":
        raise ValueError("the kits are scaled to the demo models; leave --model away")
    return Models(
        args.model, {args.algorithm[0]: args.draft}, flags, shlex.split(args.float32_flags), size
    )


def policies(
    names: Sequence[str] | None, shapes: Sequence[str], topk: int
) -> dict[str, tuple[str, ...]]:
    """Policies per shape; ValueError for a name that none of the shapes knows."""
    if names is None:
        return {shape: greedy.POLICIES[shape] for shape in shapes}
    refusals: dict[str, str] = {}
    found: dict[str, list[str]] = {shape: [] for shape in shapes}
    for shape in shapes:
        for name in names:
            try:
                build = build_tree_policy if shape == "trees" and topk > 1 else build_policy
                build(C2TConfig(policy=name))
                found[shape].append(name)
            except ConfigError as error:
                refusals[name] = str(error)
    for name in names:
        if not any(name in known for known in found.values()):
            raise ValueError(f"--policies: {refusals[name]}")
    for shape, known in found.items():
        if not known:
            raise ValueError(f"--policies: none of {', '.join(names)} is for {shape}")
    return {shape: tuple(known) for shape, known in found.items()}


def settings(args: argparse.Namespace, demo: bool) -> Settings:
    """What is run, and how much of it."""
    requests, samples = QUICK if args.quick else FULL
    if args.pair:
        requests, samples = REAL.requests, REAL.samples
    parts = PARTS if args.part == "all" else (args.part,)
    return Settings(
        parts=tuple(part for part in parts if demo or part != "kits"),
        shapes=tuple(args.shapes),
        policies=policies(args.policies, args.shapes, args.topk),
        requests=args.requests or requests,
        samples=args.samples or samples,
        at_once=args.at_once or (2 if demo or args.pair else 1),
        seed=args.seed,
        logs=args.out / "logs",
        seeded_prompts=args.seeded_prompts or (REAL.seeded_prompts if args.pair else 60),
        longest=args.max_new_tokens or (REAL.longest if args.pair else LONGEST_ANSWER),
        stock=args.stock,
    )


def prompt_ids(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Prompts as token ids: generated ones, the real pair's, or those of a file."""
    if args.prompts is not None:
        return [_ids(row, tokenizer) for row in read_prompts(args.prompts)]
    found = real_prompts(80, args.data) if args.pair else demo_mix(600, seed=100 + args.seed)
    return [tokenizer(prompt.text)["input_ids"] for prompt in found]


def _ids(row: PromptRow, tokenizer: Any) -> list[int]:
    if row.text is not None:
        ids: list[int] = tokenizer(row.text)["input_ids"]
        return ids
    text = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def main(argv: Sequence[str] | None = None) -> int:
    """Run, tell, write; 0 if nothing was wrong."""
    args = parser().parse_args(argv)
    try:
        chosen = models(args)
        what = settings(args, chosen.demo)
        tokenizer = AutoTokenizer.from_pretrained(chosen.target)
        prompts = prompt_ids(args, tokenizer)
    except (ValueError, OSError, TargetError) as error:
        print(f"python -m eval.lossless: error: {error}", file=sys.stderr)
        return 2
    console = terminal.console()
    try:
        with terminal.interrupted_by_sigterm(), progress_on(console) as progress:
            found = Suite(chosen, what, prompts, progress).run()
    except KeyboardInterrupt:
        console.print("interrupted; the servers are stopped")
        return INTERRUPTED
    command = ["python", "-m", "eval.lossless", *(sys.argv[1:] if argv is None else argv)]
    config = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    path = summary.write(found, config, provenance(command), tokenizer.decode, args.out)
    summary.show(found, tokenizer.decode, console)
    console.print(f"written: {path}")
    return 1 if found.defects else 0


if __name__ == "__main__":
    sys.exit(main())
