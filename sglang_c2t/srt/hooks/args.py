"""The ``--c2t`` flags: from argparse to a published :class:`C2TConfig`, or a refusal. This file and
``refusals.py`` refuse every user error in one line, before any model loads.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from sglang_c2t.config import C2TConfig, ConfigError, publish, resolve
from sglang_c2t.hints import hints_for
from sglang_c2t.policies import check_policy, policy_names
from sglang_c2t.srt import seams, versions
from sglang_c2t.srt.draft.state_file import require_state

logger = logging.getLogger(__name__)


class _EnableC2T(argparse._StoreTrueAction):
    """``--c2t``. It checks the seams while parsing: without the hook that reads the flags, SGLang
    would accept the flag and ignore it. It derives from argparse's own action because SGLang's YAML
    merger looks for that class.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        defects = seams.broken_seams() or seams.missing_hooks()
        if defects:
            parser.error(f"--c2t cannot be served: {'; '.join(defects)}")
        super().__call__(parser, namespace, values, option_string)


def add_arguments(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on ``ServerArgs.add_cli_args``."""
    shorten_our_errors(parser)
    group = parser.add_argument_group("C2T (sglang-c2t plugin)")
    group.add_argument(
        "--c2t",
        action=_EnableC2T,
        default=argparse.SUPPRESS,
        help="Draft and verify only as much of each request's draft as a classifier and the "
        "measured cost of a step justify. --c2t-policy chooses the rule.",
    )
    for setting in dataclasses.fields(C2TConfig):
        if setting.metadata["values"].flag is not None:
            group.add_argument("--c2t-" + setting.name.replace("_", "-"), **_flag(setting))
    group.add_argument(
        "--c2t-config",
        default=argparse.SUPPRESS,
        help="JSON file with any of these settings, and those that have no flag; flags win.",
    )


def _flag(setting: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return argparse's arguments for a setting. An omitted flag sets no attribute, so that it does
    not override the file.
    """
    values, unset = setting.metadata["values"], setting.metadata["unset"]
    meaning = setting.metadata["meaning"]
    if setting.name == "policy":
        meaning += f" Menu: {', '.join(policy_names())}."
    default = unset if setting.default in (None, False) else str(setting.default)
    told = {"default": argparse.SUPPRESS, "help": f"{meaning} Default: {default}."}
    if values.flag is bool:
        return {**told, "action": "store_true"}
    return {**told, "type": values.flag, "choices": values.choices}


def shorten_our_errors(parser: argparse.ArgumentParser) -> None:
    """Print one line for errors about our flags, without SGLang's usage of hundreds of lines."""
    with_usage = parser.error

    def error(message: str) -> NoReturn:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hints = hints_for(message, flags)
        if "--c2t" not in message + hints:
            with_usage(message)
        parser.exit(2, f"{parser.prog}: error: {message}{hints}\n")

    parser.error = error  # type: ignore[method-assign]


_parsed_from_command_line = False


def parsed_from_command_line() -> bool:
    """Whether this process got ``--c2t`` from its command line, not from ``Engine``."""
    return _parsed_from_command_line


def read_arguments(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """AROUND hook on ``ServerArgs.from_cli_args``: publish the config, or exit."""
    typed = {key: value for key, value in vars(args).items() if key.startswith("c2t")}
    if typed:
        global _parsed_from_command_line
        _parsed_from_command_line = True
        try:
            _publish_flags(typed)
        except ConfigError as error:
            exit_with(error)
    return original(cls, args)


def _publish_flags(typed: dict[str, Any]) -> None:
    if "c2t" not in typed:
        names = ", ".join("--" + key.replace("_", "-") for key in sorted(typed))
        raise ConfigError(f"{names} given without --c2t; add --c2t or drop them")
    flags = {key.removeprefix("c2t_"): value for key, value in typed.items() if "_" in key}
    file = flags.pop("config", None)
    config = resolve(file=file, flags=flags)
    check_policy(config)  # a broken classifier or option must not wait for the scheduler
    if config.record is not None:
        _require_directory(config.record)
    if config.state is not None:
        require_state(Path(config.state))
    if config.classifier_dir is not None and not os.path.isdir(config.classifier_dir):
        raise ConfigError(f"c2t classifier_dir {config.classifier_dir} is no directory")
    publish(config)
    if sentence := versions.untested():
        logger.warning("C2T: %s. See `python -m sglang_c2t check`.", sentence)


def _require_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write c2t recordings to {path}: {error.strerror}") from error


def exit_with(error: Exception) -> NoReturn:
    """End the launcher with one line, as argparse does, instead of a traceback."""
    print(f"sglang: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)
