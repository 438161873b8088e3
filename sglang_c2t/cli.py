"""``check`` the plugin, find its ``guides``, and ``compare`` a server with and without it.
``record`` drafts, ``train`` a classifier on them and ``evaluate`` it. For running servers,
``advise`` finds what to set and ``top`` shows their load.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sglang_c2t import __version__
from sglang_c2t.config import ConfigError
from sglang_c2t.hints import hints_for


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 on success, 1 if a check fails, 2 on bad input. It returns 3 if a
    check finds no fault, but the SGLang is untested.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ConfigError, OSError) as error:  # OSError: a disk that is full, or not writable
        print(f"error: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Suggests a known command or flag for one that does not exist."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and one line, as argparse does."""
        super().error(message + hints_for(message, self._names()))

    def _names(self) -> set[str]:
        """Return all flags and commands, with the flags of the commands."""
        names = {flag for action in self._actions for flag in action.option_strings}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, command in action.choices.items():
                    names |= {name, *command._names()}
        return names


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sglang_c2t", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser(
        "check",
        help="test whether a server with --c2t would start here",
        epilog="exit code: 0 yes; 1 no, and why; 3 yes, but on an SGLang that no test ran on",
    )
    check.set_defaults(run=_check)

    guides = commands.add_parser(
        "guides", help="print the folder of the guides and deployment files"
    )
    guides.set_defaults(run=_guides)
    _add_compare(commands)
    _add_training(commands)
    _add_watching(commands)
    return parser


def _add_compare(commands: Any) -> None:
    """Add the command that measures a user's own server."""
    compare = commands.add_parser(
        "compare",
        help="what --c2t gains with your models, on this machine",
        usage="python -m sglang_c2t compare [options] -- LAUNCH FLAGS",
        description="Starts your server without speculation, as it is, with SGLang's "
        "--speculative-adaptive, and with --c2t, sends each the same prompts at loads that change, "
        "and prints what was fastest at which, what it costs, and whether outputs agree.",
        epilog="exit code: 0; 1 if --c2t failed or changed more outputs than SGLang's own; 2 if "
        "your server does not start; 130 after ctrl-C",
    )
    compare.add_argument(
        "launch", nargs="+", metavar="LAUNCH FLAGS", help="those of python -m sglang.launch_server"
    )
    compare.add_argument("--data", help="JSON lines with prompt, text, turns or messages")
    compare.add_argument(
        "--against",
        nargs="+",
        default=["as-is", "adaptive"],
        metavar="SERVER",
        help="SGLang's servers: as-is, adaptive, numbers of drafts; default: as-is adaptive",
    )
    compare.add_argument(
        "--at-once", type=int, nargs="*", default=[1, 8, 32], help="loads; default: 1 8 32"
    )
    _add_open_loops(compare)
    compare.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        help="of the longest answer; the shortest gets a quarter; default: %(default)s",
    )
    compare.add_argument("--repeats", type=int, default=3, help="of each load; default: 3")
    compare.add_argument(
        "--side-by-side",
        action="store_true",
        help="start all servers at once; they run in turns of seconds, so that other work on the "
        "machine slows all alike; one by one if memory is short",
    )
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("c2t-compare"),
        help="for logs and figures; default: c2t-compare",
    )
    compare.set_defaults(run=_compare)


def _add_open_loops(compare: argparse.ArgumentParser) -> None:
    """Add the options of requests that arrive at random moments."""
    compare.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[],
        metavar="PER_SECOND",
        help="also send requests at random moments, so many per second; needs --goodput",
    )
    compare.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="of these moments: 1 is a Poisson process, less is more bursty; default: 1",
    )
    compare.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="KIND:MS",
        help="limits of a request, such as ttft:2000 tpot:100; kinds: ttft, tpot, e2el",
    )


def _add_training(commands: Any) -> None:
    """Add the commands from prompts to a classifier."""
    record = commands.add_parser("record", help="drive a prompt file through a recording server")
    record.add_argument("prompts", help="JSON lines with prompt, text, turns or messages")
    record.add_argument("--url", default=URL, help="default: %(default)s")
    record.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    record.add_argument("--concurrency", type=int, default=32, help="default: %(default)s")
    _add_key(record)
    record.set_defaults(run=_record)

    train = commands.add_parser("train", help="fit a classifier to a recording")
    train.add_argument("recording", nargs="+", help="directories written by --c2t-record")
    train.add_argument("--out", type=Path, required=True, help="file to write, NAME.safetensors")
    train.add_argument("--recipe", default="c2t", help="what to train; default: %(default)s")
    train.add_argument("--fine-tune", metavar="FILE", help="start from this classifier")
    train.add_argument("--steps", type=int, help="default: 10000, fine-tuning 1000")
    train.add_argument("--mix-drafts", action="store_true", help="admit several draft models")
    train.add_argument("--seed", type=int, default=0, help="default: 0")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        help="test whether a classifier pays, and at which threshold",
        epilog="the last line is the answer and what to serve; exit code 0 whatever it is",
    )
    evaluate.add_argument("recording", nargs="+", help="directories written by --c2t-record")
    evaluate.add_argument("--classifier", default="c2t", help="shipped name or file; default: c2t")
    evaluate.add_argument(
        "--accept-length",
        type=float,
        metavar="TAU",
        help="tokens per verification wanted, bonus included; default: 98 %% of full drafts'",
    )
    evaluate.add_argument(
        "--policies",
        nargs="*",
        default=[],
        help="to replay as well, at their defaults; module:Class for your own",
    )
    evaluate.add_argument("--mix-drafts", action="store_true", help="admit several draft models")
    evaluate.set_defaults(run=_evaluate)


def _add_watching(commands: Any) -> None:
    """Add the commands for running servers."""
    advise = commands.add_parser(
        "advise",
        help="what to set on a running server, and why it is slow",
        description="Reads /server_info, /c2t and twice /metrics of a server that runs with --c2t "
        "and --enable-metrics, and changes nothing. Prints what costs it tokens a second, the most "
        "costly first, each with its numbers, and which flags to set. Run it under load.",
    )
    advise.add_argument("url", nargs="?", default=URL, help="default: %(default)s")
    advise.add_argument("--seconds", type=float, default=10, help="to watch; default: %(default)s")
    advise.add_argument(
        "--doctor", action="store_true", help="also print the causes that were ruled out"
    )
    _add_key(advise)
    advise.set_defaults(run=_advise)

    top = commands.add_parser(
        "top",
        help="watch a running server",
        description="Reads /metrics of a server that runs with --c2t and --enable-metrics once an "
        "interval, and /c2t now and then. Fills the terminal; into a pipe, or with --once, it "
        "prints a line of name=value an interval.",
    )
    top.add_argument("url", nargs="?", default=URL, help="default: %(default)s")
    top.add_argument("--interval", type=float, default=2, help="seconds; default: %(default)s")
    top.add_argument("--once", action="store_true", help="print the line of one interval and end")
    _add_key(top)
    top.set_defaults(run=_top)


#: Default address of SGLang's servers.
URL = "http://127.0.0.1:30000"


def _add_key(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's --api-key; safer in the environment variable SGLANG_API_KEY, which "
        "no list of processes shows",
    )


def _check(_args: argparse.Namespace) -> int:
    from sglang_c2t.srt.diagnosis import diagnose

    return diagnose(functools.partial(print, flush=True))


def _limit(text: str) -> tuple[str, float]:
    """Parse KIND:MS."""
    found = re.fullmatch(r"(ttft|tpot|e2el):(\d+\.?\d*)", text)
    if found is None or not float(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft, tpot or e2el, a colon, and ms")
    return found[1], float(found[2])


def _compare(args: argparse.Namespace) -> int:
    _require_extra("aiohttp", "rich")
    from rich.console import Console

    from sglang_c2t.offline.compare import MIXED, Settings, compare
    from sglang_c2t.offline.prompts import read_prompts

    for name, values in (
        ("at_once", args.at_once),
        ("max_new_tokens", [args.max_new_tokens]),
        ("repeats", [args.repeats]),
    ):
        if min(values, default=1) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be 1 or more, got {min(values)}")
    for flag, values in (("--rates", args.rates), ("--burstiness", [args.burstiness])):
        if wrong := [value for value in values if not 0.0 < value <= 1000.0]:  # nan too
            raise ConfigError(f"{flag} must be above 0 and at most 1000, got {wrong[0]:g}")
    if bool(args.rates) != bool(args.goodput):
        raise ConfigError("--rates and --goodput need each other: --rates 1 2 --goodput tpot:100")
    if not args.at_once and not args.rates:
        raise ConfigError("--at-once must name a load, unless --rates does")
    settings = Settings(
        read_prompts(args.data or MIXED),
        against=args.against,
        at_once=sorted(set(args.at_once)),
        rates=sorted(set(args.rates)),
        burstiness=args.burstiness,
        goodput=dict(args.goodput),
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        side_by_side=args.side_by_side,
        folder=args.out,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=120, highlight=False)
    return compare(args.launch, settings, console)


def _guides(_args: argparse.Namespace) -> int:
    folder = Path(__file__).with_name("guides")
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    print(folder)
    for name, path in sorted(files.items()):
        heading = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"  {name:<28} {heading.lstrip('# ') if heading.startswith('#') else ''}".rstrip())
    return 0


def _require_extra(*packages: str) -> None:
    """Raise :class:`ConfigError` if a package of the extra ``train`` is missing. Commands check
    this first, so that no minutes of work are lost.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'sglang-c2t[train]'")


def _record(args: argparse.Namespace) -> int:
    _require_extra("aiohttp", "rich")
    from sglang_c2t.offline.prompts import read_prompts
    from sglang_c2t.offline.record import record_prompts

    for name in ("max_new_tokens", "concurrency"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be 1 or more, got {getattr(args, name)}")
    state = record_prompts(
        args.url.rstrip("/"),
        read_prompts(args.prompts),
        max_new_tokens=args.max_new_tokens,
        concurrency=args.concurrency,
        api_key=_api_key(args),
    )
    print(f"recorded {state['new_drafts']} drafts in {state['directory']}")
    if not state["named"]:
        print(
            f"{state['directory']} is not on this machine, or not ours to write: reports will not "
            "tell the groups of this prompt file apart"
        )
    return 0


def _api_key(args: argparse.Namespace) -> str | None:
    """Return the key from the flag or the environment."""
    from sglang_c2t.offline.client import API_KEY_ENV

    key: str | None = args.api_key or os.environ.get(API_KEY_ENV) or None
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ConfigError("the API key must be ASCII without spaces; it is not shown here")
    return key


def _advise(args: argparse.Namespace) -> int:
    if not 1.0 <= args.seconds <= 3600.0:
        raise ConfigError(f"--seconds must be from 1 to 3600, got {args.seconds:g}")
    _require_extra("aiohttp", "prometheus_client", "rich")
    from rich.console import Console

    from sglang_c2t.offline.advise import SAMPLE_EVERY, advice_text, watch
    from sglang_c2t.offline.observe import Server
    from sglang_c2t.offline.progress import progress_on

    server = Server(args.url.rstrip("/"), _api_key(args))
    with progress_on(Console(stderr=True), transient=True) as progress:
        task = progress.add_task("watching: seconds", total=args.seconds)
        facts = watch(server, args.seconds, lambda: progress.advance(task, SAMPLE_EVERY))
    print(advice_text(facts, doctor=args.doctor))
    return 0


def _top(args: argparse.Namespace) -> int:
    if not 0.2 <= args.interval <= 3600.0:
        raise ConfigError(f"--interval must be from 0.2 to 3600 seconds, got {args.interval:g}")
    _require_extra("aiohttp", "prometheus_client", "rich")
    from sglang_c2t.offline.observe import Server
    from sglang_c2t.offline.top import watch

    server = Server(args.url.rstrip("/"), _api_key(args), patience=5.0)
    watch(server, interval=args.interval, once=args.once)
    return 0


def _train(args: argparse.Namespace) -> int:
    _require_extra("rich")
    from sglang_c2t.classifier.checkpoint import load_classifier, require_suffix, save_classifier
    from sglang_c2t.classifier.recording import read_recording
    from sglang_c2t.offline.train import FINE_TUNE, TrainSettings, recipe_named, train_classifier

    require_suffix(args.out)  # before minutes of work
    start = load_classifier(args.fine_tune) if args.fine_tune else None
    settings = replace(FINE_TUNE if start else TrainSettings(), seed=args.seed)
    if args.steps is not None:
        settings = replace(settings, steps=args.steps)
    classifier = train_classifier(
        read_recording(*args.recording, mix_drafts=args.mix_drafts),
        recipe_named(args.recipe),
        settings=settings,
        start=start,
        show_progress=True,
    )
    save_classifier(classifier, args.out)
    facts = classifier.training
    print(
        f"wrote {args.out}: {facts['parameters']} parameters, trained on {facts['trained_on']} of "
        f"{facts['tokens']} tokens, held-out AUC {facts['heldout_auc']} (joint probability alone: "
        f"{facts['heldout_auc_joint_alone']}), calibration error {facts['heldout_ece']}"
    )
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    _require_extra("rich")
    from sglang_c2t.classifier.recording import read_recording
    from sglang_c2t.offline.evaluation import evaluate

    lines = evaluate(
        read_recording(*args.recording, mix_drafts=args.mix_drafts),
        args.classifier,
        accept_length=args.accept_length,
        others=args.policies,
    )
    print("\n".join(lines))
    return 0
