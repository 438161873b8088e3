"""The ``--c2t`` flags: from argparse to a published :class:`C2TConfig`, or a refusal.

Everything a user can get wrong is refused here or in ``refusals.py``, in one line and
before any model loads.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_c2t.config import RECORD_ROOTS, VERIFY_MODES, ConfigError, publish, resolve
from sglang_c2t.draft_layer import known_measurement
from sglang_c2t.hints import hints_for
from sglang_c2t.policies import POLICIES, check_policy, tree_policy_names
from sglang_c2t.srt import seams, versions

logger = logging.getLogger(__name__)

# argparse destination -> field of C2TConfig
_FLAG_FIELDS = {
    "c2t_policy": "policy",
    "c2t_beta": "beta",
    "c2t_classifier": "classifier",
    "c2t_verify": "verify",
    "c2t_max_verify_rows": "max_verify_rows",
    "c2t_record": "record",
    "c2t_record_share": "record_share",
    "c2t_record_roots": "record_roots",
    "c2t_classifier_dir": "classifier_dir",
    "c2t_loopback_control": "loopback_control",
}


class _EnableC2T(argparse._StoreTrueAction):
    """``--c2t``. Checks the seams while parsing: should the hook that reads the flags
    be gone, the flag would otherwise be accepted and do nothing. Derived from
    argparse's own action because SGLang's YAML merger looks for that class.
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
    unset = argparse.SUPPRESS  # a flag the user did not type must not override --c2t-config
    group.add_argument(
        "--c2t",
        action=_EnableC2T,
        default=unset,
        help="End each request's draft where a classifier says the target would reject it.",
    )
    group.add_argument(
        "--c2t-policy",
        default=unset,
        help=f"Which drafts are verified: {', '.join(sorted({*POLICIES, *tree_policy_names()}))}, "
        "or module:Class. Default: c2t.",
    )
    group.add_argument(
        "--c2t-beta",
        type=float,
        default=unset,
        help="Threshold of the policy, in (0, 1). Default: the policy's own.",
    )
    group.add_argument(
        "--c2t-classifier",
        default=unset,
        help="'default' or a .safetensors file with its card. Default: default.",
    )
    group.add_argument(
        "--c2t-verify",
        choices=VERIFY_MODES,
        default=unset,
        help="Whether the target verifies packed rows. Default: auto.",
    )
    group.add_argument(
        "--c2t-max-verify-rows",
        type=int,
        default=unset,
        help="Trees: nodes one target forward verifies over the whole batch. Default: no limit.",
    )
    group.add_argument(
        "--c2t-record",
        default=unset,
        help="Directory for features and accept labels of drafted tokens. Default: off.",
    )
    group.add_argument(
        "--c2t-record-share",
        type=float,
        default=unset,
        help="Share of steps that verify full drafts and are recorded, in (0, 1]. Default: 0.01.",
    )
    group.add_argument(
        "--c2t-record-roots",
        choices=RECORD_ROOTS,
        default=unset,
        help="'every' records the draft behind every token, for replay; slow. Default: visited.",
    )
    group.add_argument(
        "--c2t-classifier-dir",
        default=unset,
        help="Directory whose classifiers POST /c2t may name. Default: only those shipped.",
    )
    group.add_argument(
        "--c2t-loopback-control",
        action="store_true",
        default=unset,
        help="Without an admin key: take POST /c2t from the machine itself. Default: from nobody.",
    )
    group.add_argument(
        "--c2t-config",
        default=unset,
        help="JSON file with any of these settings; flags win over the file.",
    )


def shorten_our_errors(parser: argparse.ArgumentParser) -> None:
    """One line for errors about our flags.

    argparse would print SGLang's usage first, which is hundreds of lines long.
    """
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
    """Whether this process took ``--c2t`` from its command line, not from ``Engine``."""
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
    flags = {field: typed[dest] for dest, field in _FLAG_FIELDS.items() if dest in typed}
    config = resolve(file=typed.get("c2t_config"), flags=flags)
    check_policy(config)  # a broken classifier or option must not wait for the scheduler
    check_extra(config.record_extra)
    if config.record is not None:
        _require_directory(config.record)
    if config.classifier_dir is not None and not os.path.isdir(config.classifier_dir):
        raise ConfigError(f"c2t classifier_dir {config.classifier_dir} is no directory")
    publish(config)
    if sentence := versions.untested():
        logger.warning("C2T: %s. See `python -m sglang_c2t check`.", sentence)


def check_extra(names: tuple[str, ...]) -> None:
    """Refuse to record what nobody can measure."""
    for name in names:
        if not known_measurement(name):
            raise ConfigError(
                f"c2t record_extra: unknown measurement {name!r}; known: hidden, topk_prob, "
                "entropy_topM with a number M"
            )


def _require_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write c2t recordings to {path}: {error.strerror}") from error


def exit_with(error: Exception) -> NoReturn:
    """End the launcher with one line, as argparse does; a traceback would bury it."""
    print(f"sglang: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)
