"""One target token per verified row, by the sampler that serves decoding without speculation.

"Sample, then match": the output consists of the tokens sampled here, for any drafts. So it has the
target's distribution for chains and all trees, equal siblings included. A row samples at its own
position with its request's seed, so a seeded request gets the same tokens as without speculation.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from sglang.srt.layers.sampler import create_sampler
from torch import Tensor

from sglang_c2t.srt import compat
from sglang_c2t.srt.tensor_parallel import tp_group

# B requests, T verified rows of all requests, V vocabulary


def sample_rows(logits: Tensor, sampling_info: Any, request: Tensor, positions: Tensor) -> Tensor:
    """[T] int64: a sample from each row's target distribution, equal on all ranks.

    Args:
        logits: [T, V], penalties, bias and grammar applied.
        sampling_info: SGLang's ``SamplingBatchInfo`` of the B requests.
        request: [T] int64, the request of each row.
        positions: [T] int64, of the row itself.
    """
    tokens = _sampler()(
        types.SimpleNamespace(next_token_logits=logits.clone()),  # the sampler works in place
        per_row(sampling_info, request),
        False,  # return_logprob
        None,
        None,
        positions,
    ).to(torch.int64)
    group = tp_group()
    if group.world_size > 1:  # ranks must accept the same drafts
        group.broadcast(tokens, src=0)
    return tokens


def per_row(info: Any, request: Tensor) -> Any:
    """Expand a batch's sampling parameters to rows, each of one ``request`` [T]."""
    expanded = copy.copy(info)
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        values = getattr(info, name)  # [B, ...]
        setattr(expanded, name, None if values is None else values[request])
    # The caller has applied these.
    expanded.grammars = None
    expanded.has_custom_logit_processor = False
    return compat.without_sampling_masks(expanded)


@functools.lru_cache(maxsize=1)
def _sampler() -> Any:
    return create_sampler()
