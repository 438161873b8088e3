"""Commands: ``check`` (is the plugin active, on what) and ``train`` (fit a classifier)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_c2t import __version__
from sglang_c2t.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 when a check fails, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m sglang_c2t", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser("check", help="is the plugin active, on which SGLang and seams")
    check.set_defaults(run=_check)

    train = commands.add_parser("train", help="fit a classifier to a recording")
    train.add_argument("recording", help="directory written by --c2t-record")
    train.add_argument("--out", required=True, help="file to write, NAME.safetensors")
    train.add_argument("--seed", type=int, default=0, help="default: 0")
    train.set_defaults(run=_train)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(_args: argparse.Namespace) -> int:
    from sglang_c2t.srt.diagnosis import diagnose

    report = diagnose()
    for line in report.lines:
        print(line)
    return 0 if report.healthy else 1


def _train(args: argparse.Namespace) -> int:
    from sglang_c2t.classifier.checkpoint import save_classifier
    from sglang_c2t.classifier.recording import read_recording
    from sglang_c2t.classifier.train import TrainSettings, train_classifier

    rows, origins = read_recording(args.recording)
    settings = TrainSettings(seed=args.seed)
    classifier = train_classifier(rows, origins=origins, settings=settings, show_progress=True)
    save_classifier(classifier, args.out)
    facts = classifier.training
    print(
        f"wrote {args.out}: {facts['rows']} rows, held-out AUC {facts['heldout_auc']} "
        f"(joint probability alone: {facts['heldout_auc_joint_alone']})"
    )
    return 0
