"""Which drafts of packed rows are accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_c2t.srt.verify.accept import match_rows
from sglang_c2t.srt.verify.chain import ChainVerifyInput
from sglang_c2t.srt.verify.packing import Packing
from tests.doubles import double
from tests.srt.chains import full_chains

WIDTH, VOCAB = 4, 9


@pytest.mark.parametrize("full_width", [False, True])
def test_accept_ends_at_the_cut_of_a_chain(full_width: bool) -> None:
    """The target agrees with every draft; what is counted as verified bounds what is accepted."""
    lens = torch.tensor([2, 1, 4], dtype=torch.int32)
    drafts = torch.arange(3 * WIDTH) % VOCAB
    positions = torch.arange(3 * WIDTH)
    stock = full_chains(3, WIDTH, draft_token=drafts, positions=positions)
    chains = ChainVerifyInput.cut(stock, lens)
    packing = Packing.full(3, WIDTH, "cpu") if full_width else Packing(lens, WIDTH)
    batch = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(300).view(3, 100)),
        req_pool_indices=torch.arange(3),
        seq_lens=torch.full((3,), 7),
        sampling_info=double(
            "SamplingBatchInfo", is_all_greedy=True, acc_additive_penalties=None,
            acc_scaling_penalties=None, logit_bias=None,
        ),
    )  # fmt: skip
    runner = SimpleNamespace(decode_cuda_graph_runner=None)
    packing.forwarded(chains, batch, runner)
    wanted = drafts.roll(-1)[packing.rows]
    logits = torch.nn.functional.one_hot(wanted, VOCAB).float()
    output = double("LogitsProcessorOutput", next_token_logits=logits)
    paths = match_rows(chains, packing, batch, output)
    assert paths.accept_lens.tolist() == chains.num_rows.tolist() == [2, 1, 4]
