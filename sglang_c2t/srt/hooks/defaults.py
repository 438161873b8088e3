"""What SGLang sets for speculation where nobody typed it, and what we set instead."""

from __future__ import annotations

import logging
from typing import Any

from sglang_c2t.srt import compat

logger = logging.getLogger(__name__)


def draft_chains(server_args: Any) -> None:
    """Chains, where nothing was typed and SGLang would draft trees.

    For a Llama it chooses trees of 8 nodes, and on some GPUs before that an attention backend
    that reads no masks of ours. Chains of as many layers are what ``--c2t`` gains most with.
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
    """More running requests than SGLang sets under speculation, where memory was kept for them.

    It sets 48, whatever the GPU, and lets the others wait; without speculation it sets thousands.
    A server that drafts and verifies as much as pays need not be kept small: as many may run as
    SGLang's CUDA graphs hold, if a prefill chunk is not less than all their rows, since for both
    SGLang keeps memory free. That KV slots suffice it sees to by itself.
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
