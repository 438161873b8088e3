"""Refuses unsupported combinations while SGLang resolves arguments, before a model loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sglang_c2t.config import ConfigError, active
from sglang_c2t.policies import policy_for
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt import compat, environment
from sglang_c2t.srt.hooks.args import exit_with, parsed_from_command_line
from sglang_c2t.srt.hooks.defaults import draft_chains, raise_running_requests
from sglang_c2t.srt.hooks.refusals import (
    ALGORITHMS,
    PAGES_OF_TREES,
    REFUSALS,
    Refusal,
    has_http_workers,
    trees,
)

#: The flags that set the shape of drafts.
SHAPE_FLAGS = {
    "--speculative-num-steps": "speculative_num_steps",
    "--speculative-eagle-topk": "speculative_eagle_topk",
    "--speculative-num-draft-tokens": "speculative_num_draft_tokens",
}


def missing_shape_flags(cfg: Any) -> list[str]:
    """Return which of :data:`SHAPE_FLAGS` are missing, from arguments before SGLang chooses any."""
    if (cfg.speculative_algorithm or "").upper() not in ALGORITHMS or cfg.speculative_adaptive:
        return []
    missing = [flag for flag, name in SHAPE_FLAGS.items() if getattr(cfg, name) is None]
    # With one branch, SGLang computes the number of nodes.
    completed = ["--speculative-num-draft-tokens"] if cfg.speculative_eagle_topk == 1 else []
    return [] if missing == completed else missing


def shape_refusal(missing: Sequence[str]) -> Refusal:
    """Return a refusal of drafts whose shape lacks the ``missing`` flags."""
    return Refusal(
        lambda cfg: missing_shape_flags(cfg) == missing,
        f"{' and '.join(flag for flag in SHAPE_FLAGS if flag not in missing)} alone",
        "SGLang chooses the shape of drafts only where none of its flags is given",
        f"add {' and '.join(missing)}, or drop all of them",
    )


def refusals(cfg: Any) -> list[str]:
    """Return the refusals for these resolved arguments; empty if all is supported."""
    sentences = [refusal.sentence for refusal in REFUSALS if refusal.applies(cfg)]
    return sentences or _policy_error(cfg)


def _policy_error(cfg: Any) -> list[str]:
    """Return why the policy cannot serve these arguments; empty if it can."""
    config = active()
    if config is None:
        return []
    shape = TreeShape(
        cfg.speculative_eagle_topk if trees(cfg) else 1,
        cfg.speculative_num_steps,
        cfg.speculative_num_draft_tokens,
    )
    try:
        policy_for(config, shape)
    except ConfigError as error:
        return [str(error)]
    return []


def check_resolved_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook around SGLang's own speculative checks."""
    if active() is None:
        previous(server_args)
        return
    typed = compat.resolved(server_args)
    if len(missing := missing_shape_flags(typed)) == len(SHAPE_FLAGS):
        draft_chains(server_args)
    elif missing:  # SGLang's own checks would answer with a traceback
        _refuse([shape_refusal(missing).sentence])
    if PAGES_OF_TREES.applies(typed):
        _refuse([PAGES_OF_TREES.sentence])
    limited = compat.argument(typed, "max_running_requests") is not None
    previous(server_args)
    try:
        sentences = refusals(compat.resolved(server_args))
    except ConfigError as unbuildable:
        sentences = [str(unbuildable)]
    if sentences:
        _refuse(sentences)
    if has_http_workers(compat.resolved(server_args)):
        os.environ[environment.HTTP_APP] = environment.OUR_HTTP_APP
    if not limited:
        raise_running_requests(server_args)


def _refuse(sentences: list[str]) -> NoReturn:
    error = ConfigError("; ".join(sentences))
    if parsed_from_command_line():
        exit_with(error)
    raise error
