"""`TorchCpuAttnBackend` on hand-made forward batches: lengths by mode, ragged = uniform, counters.

Runs in a process of its own (`run`): SGLang decides once per process what machine it is on.
"""

from __future__ import annotations

import pytest

from tests.srt.cpu.test_engine import run

SETUP = """
import types, torch
from sglang_c2t.srt.cpu import engine as cpu_engine
cpu_engine.install()
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_c2t.srt.cpu.attention import TorchCpuAttnBackend, TorchCpuMultiStepDraftBackend
torch.manual_seed(0)
Bag = types.SimpleNamespace

class Pool:
    start_layer = 0
    def __init__(self):
        self.k, self.v = torch.randn(200, 2, 8), torch.randn(200, 2, 8)
    def get_key_buffer(self, layer_id): return self.k
    def get_value_buffer(self, layer_id): return self.v
    def set_kv_buffer(self, layer, loc, k, v): self.k[loc.loc], self.v[loc.loc] = k, v

def layer(layer_id=0):
    return Bag(layer_id=layer_id, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2,
               qk_head_dim=8, v_head_dim=8, scaling=0.3, logit_cap=0.0, sliding_window_size=-1,
               attn_type=AttentionType.DECODER, is_cross_attention=False)

table = (torch.randperm(199) + 1)[:180].view(3, 60).int()
runner = Bag(use_mla_backend=False, device="cpu", token_to_kv_pool=Pool(),
             req_to_token_pool=Bag(req_to_token=table), model_config=Bag(context_len=60))
rows = torch.tensor([2, 0])
committed = torch.tensor([7, 11])

def batch(mode, **fields):
    return Bag(forward_mode=mode, req_pool_indices=rows, seq_lens=committed, **fields)

def verify(q_lens, layout, mask=None, topk=1):
    locs = torch.cat([table[r, n:n + q] for r, n, q in zip(rows, committed, q_lens)]).long()
    spec = Bag(draft_token_num=4, custom_mask=mask, tree_topk=topk, ragged_verify_layout=layout)
    return batch(ForwardMode.TARGET_VERIFY, spec_info=spec, out_cache_loc=locs)

def run(backend, fb, q, k, v, layers=1):
    backend.init_forward_metadata(fb)
    return [backend.forward(q, k, v, layer(i), fb) for i in range(layers)][-1]
"""


@pytest.mark.timeout(900)
def test_verification_extend_decode_and_draft_agree():
    """One process, statements about the same keys and queries.

    * a ragged layout gives each row what the uniform batch gives it;
    * a chain's tree mask is the causal one;
    * extend and verification of the same rows are the same attention;
    * a decode is the first row of a verification;
    * counters see verification rows once per forward, in the first layer, and nothing else;
    * rows beyond the layout (a padded tier) come back as zeros;
    * draft rows attend to the path that led to them. Beams are re-sorted between the steps: a row's
      keys are the prefix and its ancestors. Without the table, rows would see their own beam row.
    """
    done = run(SETUP + MODES + PATHS + "print('agrees')", cpu_engine=True)
    assert done.stdout.endswith("agrees\n"), done.stderr[-3000:]


MODES = """
q, k, v = torch.randn(8, 32), torch.randn(8, 16), torch.randn(8, 16)
backend = TorchCpuAttnBackend(runner)
uniform = run(backend, verify([4, 4], None), q, k, v, layers=3)
assert backend.verify_rows_seen == 8

tril = torch.ones(4, 4, dtype=torch.bool).tril().flatten().repeat(2)
masked = run(backend, verify([4, 4], None, tril, topk=2), q, k, v)
assert (uniform - masked).abs().max() < 1e-6

keep = torch.tensor([0, 4, 5, 6])
layout = Bag(verify_lens=torch.tensor([1, 3], dtype=torch.int32))
ragged = run(backend, verify([1, 3], layout), q[keep], k[keep], v[keep])
assert (ragged - uniform[keep]).abs().max() < 1e-6
tree = torch.cat([torch.ones(1).bool(), torch.ones(3, 3).bool().tril().flatten()])
packed = run(backend, verify([1, 3], layout, tree, topk=2), q[keep], k[keep], v[keep])
assert (packed - uniform[keep]).abs().max() < 1e-6
fb = verify([1, 3], layout)
fb.out_cache_loc = torch.cat([fb.out_cache_loc, torch.zeros(2).long()])
pad = torch.tensor([0, 0])
tier = run(backend, fb, torch.cat([q[keep], q[pad]]), torch.cat([k[keep], k[pad]]),
           torch.cat([v[keep], v[pad]]))
assert (tier[:4] - ragged).abs().max() == 0 and tier[4:].abs().max() == 0
assert backend.verify_rows_seen == 8 + 8 + 4 + 4 + 6

locs = verify([4, 4], None).out_cache_loc
fb = batch(ForwardMode.EXTEND, extend_seq_lens=torch.tensor([4, 4]), out_cache_loc=locs)
fb.seq_lens = committed + 4
assert (run(backend, fb, q, k, v) - uniform).abs().max() < 1e-6

first = torch.tensor([0, 4])
fb = batch(ForwardMode.DECODE, out_cache_loc=locs[first])
fb.seq_lens = committed + 1
decoded = run(backend, fb, q[first], k[first], v[first])
assert (decoded - uniform[first]).abs().max() < 1e-6
assert backend.verify_rows_seen == 8 + 8 + 4 + 4 + 6

draft = TorchCpuMultiStepDraftBackend(runner, topk=1, speculative_num_steps=3)
fb = batch(ForwardMode.DECODE, out_cache_loc=None)
draft.init_forward_metadata(fb)
for step in range(2):
    at = torch.tensor([step, 4 + step])
    fb.out_cache_loc = locs[at]
    got = draft.attn_backends[step].forward(q[at], k[at], v[at], layer(), fb)
    assert (got - uniform[at]).abs().max() < 1e-6
"""

PATHS = """
TOPK, STEPS = 3, 5
draft = TorchCpuMultiStepDraftBackend(runner, topk=TOPK, speculative_num_steps=STEPS)
fb = batch(ForwardMode.DECODE, out_cache_loc=None)
draft.init_forward_metadata(fb)
slot = lambda b, t, s: int(table[rows[b], committed[b] + t * STEPS + s])

def dense(query, slots):  # [4, 8] heads, one row over the keys in these slots
    keys = runner.token_to_kv_pool.k[slots].repeat_interleave(2, dim=1)
    values = runner.token_to_kv_pool.v[slots].repeat_interleave(2, dim=1)
    weights = (torch.einsum("hd,khd->hk", query, keys) * 0.3).softmax(dim=1)
    return torch.einsum("hk,khd->hd", weights, values).flatten()

paths = {(b, t): [t] for b in range(2) for t in range(TOPK)}
misled = 0.0
for step in range(STEPS - 1):
    if step:  # each beam hangs below some beam of the step before
        above = torch.randint(TOPK, (2, TOPK)).tolist()
        paths = {(b, t): [*paths[b, above[b][t]], t] for b, t in paths}
        ancestors = [[paths[b, t] for t in range(TOPK)] for b in range(2)]
    q, k, v = torch.randn(6, 32), torch.randn(6, 16), torch.randn(6, 16)
    fb.out_cache_loc = torch.tensor([slot(b, t, step) for b in range(2) for t in range(TOPK)])
    backend = draft.attn_backends[step]
    told = lambda: backend.forward(q, k, v, layer(), fb).view(2, TOPK, 32)
    stock = told()
    if step:
        backend.use_ancestors(torch.tensor(ancestors))
    got = told()
    misled = max(misled, float((stock - got).abs().max()))
    for b in range(2):
        prefix = table[rows[b], :committed[b]].tolist()
        for t in range(TOPK):
            own = [slot(b, row, s) for s, row in enumerate(paths[b, t])]
            want = dense(q.view(2, TOPK, 4, 8)[b, t], prefix + own)
            assert (got[b, t] - want).abs().max() < 1e-5, (step, b, t)
assert misled > 0.01, misled
draft.init_forward_metadata(fb)  # the next round starts from stock's rows
assert draft.attn_backends[1]._lengths.tree_mask.view(2, TOPK, -1).sum() == 2 * TOPK * 2
"""
