"""SGLang's verify inputs of chains."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput


def full_chains(batch: int, width: int, **fields: Any) -> EagleVerifyInput:
    """Chains of ``width`` rows each, root included; what is neither given nor read is ``None``."""
    rows = torch.zeros(batch * width, dtype=torch.int64)
    links = torch.arange(1, width + 1).repeat(batch, 1)
    links[:, -1] = -1
    unread = dict.fromkeys(
        ("custom_mask", "retrieve_index", "retrieve_next_sibling", "retrieve_cum_len",
         "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")
    )  # fmt: skip
    given = {"draft_token": rows, "positions": rows, "retrieve_next_token": links, **fields}
    return EagleVerifyInput(**unread, **given, spec_steps=width - 1, draft_token_num=width, topk=1)
