"""Defaults for speculation that replace SGLang's if the user set none."""

from __future__ import annotations

import logging
from typing import Any

from sglang_c2t.srt import compat

logger = logging.getLogger(__name__)


def draft_chains(server_args: Any) -> None:
    """Set chains if the user set no shape and SGLang would draft trees. For a Llama SGLang chooses
    trees of 8 nodes, and on some GPUs an attention backend that reads no custom masks. ``--c2t``
    gains most with chains of as many layers.
    """
    shape = compat.default_shape(server_args)
    if shape.topk == 1:
        return
    compat.decide(
        server_args,
        speculative_num_steps=shape.num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=shape.num_steps + 1,
    )
    logger.info(
        "C2T: drafts chains of %d tokens. SGLang's default, trees of %d nodes, is "
        "--speculative-num-steps %d --speculative-eagle-topk %d --speculative-num-draft-tokens %d",
        shape.num_steps,
        shape.num_draft_tokens,
        shape.num_steps,
        shape.topk,
        shape.num_draft_tokens,
    )


def raise_running_requests(server_args: Any) -> None:
    """Raise the limit of running requests above SGLang's, as far as it reserved memory.

    Under speculation SGLang sets 48 on any GPU and queues other requests; without it, thousands.
    The new limit is what SGLang's CUDA graphs hold, if a prefill chunk has at least that many rows.
    SGLang reserves memory for both, and checks the KV slots itself.
    """
    cfg = compat.resolved(server_args)
    sglangs = compat.argument(cfg, "max_running_requests")
    chunk = compat.argument(cfg, "chunked_prefill_size")
    if chunk <= 0:  # not chunked
        chunk = compat.argument(cfg, "max_prefill_tokens")
    held = min(
        compat.largest_graph(cfg), chunk // compat.argument(cfg, "speculative_num_draft_tokens")
    )
    how = "--max-running-requests sets another number"
    if held <= sglangs:
        why = f"memory is kept for {held}"
    elif compat.is_hybrid(cfg):
        why = "each needs recurrent states"
    else:
        compat.decide(server_args, max_running_requests=held)
        logger.info(
            "C2T: up to %d requests run at once, in place of the %d that SGLang sets under "
            "speculation: memory is kept for them. %s",
            held,
            sglangs,
            how,
        )
        return
    logger.info("C2T: up to %d requests run at once, as SGLang sets: %s. %s", sglangs, why, how)
