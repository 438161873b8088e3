"""SGLang attention backends for CPUs without Intel AMX, on `sglang_c2t.cpu.attention`.

Translates SGLang's forward batches into plans (lengths, pool rows, masks); computes nothing itself.
Only processes that run a model import it, because it imports SGLang's model executor.

Keys of a forward, L = committed length, B requests, N verify rows, K beam width:

    mode               query rows per request     keys
    decode             1                          seq_lens (the new token included)
    extend, draft ext. extend_seq_lens            seq_lens (the new tokens included)
    target verify      N, or the ragged layout's  L + query rows, tree mask over the last ones
    draft decode i     K                          L + K*D slots, of which beam t sees t*D..t*D+i
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_c2t.cpu.attention import (
    AttentionPlan,
    Workspace,
    ancestor_mask,
    attend,
    draft_mask,
    make_plan,
)

__all__ = ["TorchCpuAttnBackend", "TorchCpuMultiStepDraftBackend"]


@dataclasses.dataclass
class _Lengths:
    """Lengths and mask of a forward's attention, for all layers."""

    req_rows: Tensor  # [B] int64
    q_lens: list[int]  # [B]
    kv_lens: list[int]  # [B]
    tree_mask: Tensor | None = None
    own_lens: list[int] | None = None


class TorchCpuAttnBackend(AttentionBackend):
    """Prefill, decode and (ragged, tree) verification in plain torch. `verify_rows_seen` counts the
    query rows that reached the first layer in TARGET_VERIFY forwards: the cost of verification,
    independent of other counters.
    """

    # EAGLE verification may carry `spec_info.ragged_verify_layout` outside of graphs
    supports_ragged_verify_eager = True

    def __init__(self, model_runner: Any, workspace: Workspace | None = None) -> None:
        super().__init__()
        if model_runner.use_mla_backend:
            _keep_latent()
        self.device = model_runner.device
        # Forward batches lose their pool fields later.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self.verify_rows_seen = 0
        self._first_layer = int(getattr(self.token_to_kv_pool, "start_layer", 0) or 0)
        self._workspace = workspace or Workspace()
        self._lengths: _Lengths | None = None
        self._plans: dict[tuple[bool, bool], AttentionPlan] = {}
        self._swa_write_loc: Tensor | None = None

    # -- per forward ----------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch's lengths; layers make the plans on demand."""
        self.use_lengths(_read_lengths(forward_batch))

    def use_lengths(self, lengths: _Lengths) -> None:
        """Use these lengths for the next layers."""
        self._lengths, self._plans = lengths, {}
        self._swa_write_loc = None

    def use_ancestors(self, ancestor_rows: Tensor) -> None:
        """Draft step i: beam t sees the slots of its ancestors, not those of its beam row.
        ``ancestor_rows`` [B, K, i + 1] int64 holds the beam row of each ancestor, its own last.
        """
        lengths = self._lengths
        assert lengths is not None
        assert lengths.own_lens is not None, "a draft step of beams has slots of its own"
        num_slots = lengths.own_lens[0]  # K * D, for every request
        mask = ancestor_mask(ancestor_rows, num_slots)
        self._lengths = dataclasses.replace(lengths, tree_mask=mask.flatten())
        self._plans = {}

    def forward_extend(
        self,
        q: Tensor,  # [T, H*D]
        k: Tensor | None,  # [T, G*D]
        v: Tensor | None,  # [T, G*Dv]
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,  # [H]
        **kwargs: Any,
    ) -> Tensor:
        """[T, H*Dv]: write this forward's keys and values, then attend."""
        _refuse_unsupported(layer, kwargs)
        if forward_batch.forward_mode.is_target_verify() and layer.layer_id == self._first_layer:
            self.verify_rows_seen += q.shape[0]
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            loc = self._write_loc(forward_batch.out_cache_loc)
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            pool.set_kv_buffer(layer, loc, keys, values)
        plan = self._plan(layer)
        out = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)[: plan.num_rows],
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            plan,
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
            window=layer.sliding_window_size if layer.sliding_window_size >= 0 else None,
            workspace=self._workspace,
            sinks=sinks,
        ).reshape(plan.num_rows, -1)
        if plan.num_rows < q.shape[0]:  # a ragged layout padded to a tier
            out = torch.nn.functional.pad(out, (0, 0, 0, q.shape[0] - plan.num_rows))
        return out

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Return false: a CPU has no Triton."""
        return False

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the tokens of padding requests in a batch of data-parallel ranks."""
        return 1

    # -- plans ----------------------------------------------------------------------------

    def _plan(self, layer: Any) -> AttentionPlan:
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        in_swa_pool = (
            self._has_swa_pool() and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        )
        key = (causal, bool(in_swa_pool))
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(self, causal: bool, in_swa_pool: bool) -> AttentionPlan:
        lengths = self._lengths
        assert lengths is not None, "init_forward_metadata did not run before the first layer"
        plan = make_plan(
            self.req_to_token_pool.req_to_token,
            lengths.req_rows,
            lengths.q_lens,
            lengths.kv_lens,
            lengths.tree_mask,
            lengths.own_lens,
            causal,
        )
        if in_swa_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            for group in plan.groups:
                group.kv_slots = translate(group.kv_slots).to(torch.int64)
        return plan

    def _write_loc(self, out_cache_loc: Tensor) -> KVWriteLoc:
        """Return where this forward's keys go, also in a sliding-window pool. The first layer
        computes it, because SGLang names a draft step's slots after the metadata.
        """
        if self._swa_write_loc is None and self._has_swa_pool():
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._swa_write_loc = translate(out_cache_loc)
        return KVWriteLoc(out_cache_loc, self._swa_write_loc)

    def _has_swa_pool(self) -> bool:
        return getattr(self.token_to_kv_pool, "swa_layer_nums", 0) > 0


class TorchCpuMultiStepDraftBackend:
    """One backend per draft forward; each step sees one more of the beam's own slots."""

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        workspace = Workspace()  # steps run in sequence, so they can share it
        self.attn_backends = [
            TorchCpuAttnBackend(model_runner, workspace) for _ in range(speculative_num_steps - 1)
        ]
        self.device = model_runner.device

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute lengths and masks of all draft forwards of one round."""
        for step, backend in enumerate(self.attn_backends):
            backend.use_lengths(self._step_lengths(forward_batch, step))

    def _step_lengths(self, forward_batch: Any, step: int) -> _Lengths:
        committed = forward_batch.seq_lens.tolist()
        rows = forward_batch.req_pool_indices.to(torch.int64)
        if self.topk == 1:  # the chain's slots follow the prefix: plain decode
            return _Lengths(rows, [1] * len(committed), [n + step + 1 for n in committed])
        own = self.topk * self.speculative_num_steps
        return _Lengths(
            rows,
            [self.topk] * len(committed),
            [n + own for n in committed],
            draft_mask(len(committed), self.topk, self.speculative_num_steps, step),
            [own] * len(committed),
        )


def _read_lengths(forward_batch: Any) -> _Lengths:
    """Query and key lengths of a batch, by its forward mode (table at the top of the file)."""
    rows = forward_batch.req_pool_indices.to(torch.int64)
    seq_lens = forward_batch.seq_lens.tolist()
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return _verify_lengths(rows, seq_lens, forward_batch.spec_info)
    if mode.is_decode_or_idle():
        return _Lengths(rows, [1] * len(seq_lens), seq_lens)
    return _Lengths(rows, forward_batch.extend_seq_lens.tolist(), seq_lens)


def _verify_lengths(rows: Tensor, committed: list[int], spec_info: Any) -> _Lengths:
    """Return lengths for verification, where `seq_lens` holds the committed lengths only. Rows are
    packed. With a ragged layout the mask, if any, is packed as well: one verify_len x verify_len
    block per request.
    """
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is None:
        q_lens = [int(spec_info.draft_token_num)] * len(committed)
    else:
        q_lens = layout.verify_lens.tolist()
    kv_lens = [n + q for n, q in zip(committed, q_lens, strict=True)]
    mask = spec_info.custom_mask
    is_chain = spec_info.tree_topk == 1  # a chain's mask is the causal one
    if is_chain or mask is None or mask.numel() == 0:
        return _Lengths(rows, q_lens, kv_lens)
    return _Lengths(rows, q_lens, kv_lens, mask)


def _keep_latent() -> None:
    """Make MLA models attend to the pool's latent keys and values of one head in all forwards.
    SGLang would expand a prompt's for all heads, and pass them separately.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("intel_amx", lambda *_: AttnForwardMethod.MLA)


def _refuse_unsupported(layer: Any, kwargs: dict[str, Any]) -> None:
    if layer.is_cross_attention:
        raise NotImplementedError("the portable CPU attention has no cross-attention")
    extra = [name for name, value in kwargs.items() if value is not None]
    if extra:
        raise NotImplementedError(f"the portable CPU attention does not take {', '.join(extra)}")
