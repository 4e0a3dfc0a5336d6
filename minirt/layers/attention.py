"""`Attention`: the residual layer of grouped-query attention over the paged KV cache."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from minirt.device import compute_capability, is_gpu
from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.kernels.attention.limits import HEAD_DIMS, MAX_GROUP
from minirt.kernels.attention.operands import AttentionInput, Rope, Scores, Sequences
from minirt.layers.base import Forward, Layer, LinearOp, checkpoint_names, register, triton_unsupported
from minirt.layers.mlp import triton_add
from minirt.modeling.config import AttentionSettings, ModelConfig
from minirt.modeling.formats import FP8
from minirt.modeling.parameters import OF_ADDED, Interleaved, NormWeight, PackedLinear, Part, Shard, Values, stacked
from minirt.step.batch import Batch
from minirt.step.kv_cache import LayerKV, PagesSpec


class Attention(Layer):
    """x + residual_multiplier · post_norm(o(gate · attention(rope(qk_norm(qkv(norm(x))))))), x [T, H].

    New K and V go to batch.slot_mapping. Grouped queries: Ainslie et al. 2023; rotary embedding: Su et al. 2021; QK-norm as in
    Qwen3 (per head, before rope); gate: Qiu et al. 2025. Q, K, V and the gate are packed in one matrix, in this order. What of
    this a layer has, `settings` say.

    Args:
        norm: checkpoint name of the norm of the layer's input; None: there is none.
        prefix: checkpoint prefix of the parts `q_proj`, `k_proj`, `v_proj`, `o_proj` and, if `settings` have them, `q_norm`,
            `k_norm`, `gate_proj` and `sinks`. `names`: those that a checkpoint calls differently ({"o_proj": "dense"}).
            Q, K and V with one name are one linear, which has their rows in this order.
        settings: what this layer computes; None: `config.attention()`. `decoder_layers` gives each layer its settings.
        post_norm: checkpoint name of a norm of what is added to x (a sandwich norm); None: there is none.
        post_norm_eps: its eps; None: that of the config.
        residual_multiplier: a factor of what is added to x.
    """

    kind, adaptable = "attention", ("qkv", "o")
    needs_cache = "an attention layer needs KV pages"
    kernel_tables = ("attention.dispatch", "attention.rope_write")

    def __init__(
        self, config: ModelConfig, *, name: str, norm: str | None, prefix: str, settings: AttentionSettings | None = None,
        post_norm: str | None = None, post_norm_eps: float | None = None, residual_multiplier: float = 1.0,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, name)
        self.settings = settings = settings or config.attention()
        h, d, centered = config.hidden_size, settings.head_dim, config.zero_centered_norms
        q_rows, kv_rows = settings.num_heads * d, settings.num_kv_heads * d
        q, k, v, o, gate, q_norm, k_norm = checkpoint_names(prefix, "q_proj k_proj v_proj o_proj gate_proj q_norm k_norm", names)
        self.ropes = () if settings.rope is None else ((settings.rope, settings.rotary_dim),)
        self.cache_spec, self.inner = PagesSpec(settings.num_kv_heads, d, settings.window), ("heads", q_rows)
        self.norm = NormWeight(norm, h, centered) if norm else None
        parts = stacked(Part(q, q_rows), Part(k, kv_rows), *(() if settings.v_is_k else (Part(v, kv_rows),)))
        if settings.gate is not None:
            of_q, of_gate = (Interleaved((d, d), i) if settings.gate == "q_proj" else None for i in range(2))
            parts = [replace(parts[0], of=of_q), *parts[1:], Part(gate if of_gate is None else q, q_rows, of_gate)]
        self.qkv = PackedLinear(parts, h, settings.qkv_bias)
        self.o = PackedLinear([Part(o, h)], q_rows, settings.o_bias)
        self.q_norm: NormWeight | None = None
        self.k_norm: NormWeight | None = None
        if settings.qk_norm not in (None, "plain"):
            sizes = (q_rows, kv_rows) if settings.qk_norm == "weighted_all" else (d, d)
            self.q_norm, self.k_norm = (NormWeight(*of, centered) for of in zip((q_norm, k_norm), sizes, strict=True))
        self.sinks = Values(f"{prefix}.sinks", (settings.num_heads,), (-1.0, 1.0)) if settings.sinks else None
        self.post_norm = NormWeight(post_norm, h, centered, typical=OF_ADDED) if post_norm else None
        self.post_norm_eps = config.rms_norm_eps if post_norm_eps is None else post_norm_eps
        self.residual_multiplier = residual_multiplier

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table [max_model_len, R] fp32, cosines | sines of R rotated channels; None: there is no rotary embedding."""
        return self.context.rope(*self.ropes[0]) if self.ropes else None

    @property
    def query_scales(self) -> Tensor | None:
        """The factors of q by position, [max_model_len] fp32; None: there are none."""
        return self.context.query_scales(self.settings.rope) if self.settings.rope else None

    def linear_ops(self) -> tuple[LinearOp, ...]:
        residual = self.post_norm is None and self.residual_multiplier == 1 and not self.sharded
        return LinearOp(self.qkv), LinearOp(self.o, residual=residual)

    def shard(self, shard: Shard) -> None:
        """By heads: those of q, and the KV heads that they use."""
        settings, d = self.settings, self.settings.head_dim
        if settings.qk_norm == "weighted_all":
            what, place = "a QK-norm over all heads cannot be divided among ranks", f"--tensor-parallel {shard.ranks}"
            raise UnsupportedError(f"{self.name}: {what}", where=place, expected="no norm, or one of each head", found="OLMo 3's")
        first, heads = shard.of(settings.num_heads, "attention heads", self.name)
        of_kv = shard.of(settings.num_kv_heads, "KV heads", self.name, repeated=True)
        q, kv = (first, heads, settings.num_heads), (*of_kv, settings.num_kv_heads)
        self.qkv.shard_rows(q, *(kv,) * (1 if settings.v_is_k else 2), *(q,) * (settings.gate is not None))
        self.o.shard_columns(shard.rank, *q)
        if self.sinks is not None:
            self.sinks.shard((first, heads))
        self.settings = replace(settings, num_heads=heads, num_kv_heads=of_kv[1])
        self.cache_spec, self.inner = PagesSpec(of_kv[1], d, settings.window), ("heads", heads * d)
        self.sharded = True

    def reserve(self, max_splits: int) -> None:
        if self.implementation == "triton":
            from minirt.kernels.attention import decode, decode_few

            heads = self.settings.num_heads, self.settings.head_dim
            self.context.workspace.reserve(decode_few.workspace_floats(max_splits, *heads))  # at least what other steps need
            self.context.side_stream.workspace.reserve(decode.workspace_floats(max_splits, *heads))


@register("attention", "eager")
def eager(layer: Attention) -> Forward:
    settings, eps, post_norm_eps = layer.settings, layer.config.rms_norm_eps, layer.post_norm_eps
    nq, nkv, d = settings.num_heads, settings.num_kv_heads, settings.head_dim
    nv = 0 if settings.v_is_k else nkv
    norm, qkv, o, post_norm = layer.norm, layer.qkv, layer.o, layer.post_norm
    q_norm, k_norm, multiplier, window = layer.q_norm, layer.k_norm, layer.residual_multiplier, settings.window

    def normalized(qk: Tensor) -> Tensor:
        """The heads of q and k [T, Nq + Nkv, D], each with its norm, or all of q and all of k with one."""
        q, k = (part.flatten(1) if settings.qk_norm == "weighted_all" else part for part in qk.split((nq, nkv), 1))
        q = reference.rms_norm(q, None if q_norm is None else q_norm.weight, eps)
        k = reference.rms_norm(k, None if k_norm is None else k_norm.weight, eps)
        return torch.cat((q.view(-1, nq, d), k.view(-1, nkv, d)), 1)

    def forward(x: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        h = x if norm is None else reference.rms_norm(x, norm.weight, eps)
        heads = reference.linear(h, qkv.weight, qkv.bias, qkv.scale)
        if batch.adapters is not None:
            batch.adapters.add(qkv, heads, h)
        heads = heads.view(len(x), -1, d)
        qk, v, gate = heads.split((nq + nkv, nv, heads.shape[1] - nq - nkv - nv), 1)
        v = qk[:, nq:] if settings.v_is_k else v
        if settings.normalize_v:
            v = reference.rms_norm(v, None, eps)
        if settings.qk_norm in ("weighted", "plain", "weighted_all"):
            qk = normalized(qk)
        qk = reference.rope(qk, None if layer.cos_sin is None else layer.cos_sin[batch.positions])
        if settings.qk_norm == "weighted_after_rope":
            qk = normalized(qk)
        scales = None if layer.query_scales is None else layer.query_scales[batch.positions]
        q, k = reference.rope(qk[:, :nq], None, scales), qk[:, nq:]
        tables = batch if window is None else batch.tables(window)
        reference.write_kv(k, kv.k, tables.slot_mapping, kv.k_scale)
        reference.write_kv(v, kv.v, tables.slot_mapping, kv.v_scale)
        a = reference.paged_attention(
            q, kv.k, kv.v, tables.block_tables, batch.query_lens, batch.seq_lens, settings.scale, kv.k_scale, kv.v_scale, window,
            None if layer.sinks is None else layer.sinks.weight,
        ).view(-1, nq * d)  # fmt: skip
        if settings.gate is not None:
            a = reference.gate_output(a, gate.flatten(1))
        a = layer.hooked(a, batch)
        y = reference.linear(a, o.weight, o.bias, o.scale)
        if batch.adapters is not None:
            batch.adapters.add(o, y, a)
        y = layer.summed(y)
        y = y if post_norm is None else reference.rms_norm(y, post_norm.weight, post_norm_eps)
        return reference.add_residual(x, y, multiplier)

    return forward


def _triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    settings = layer.settings if isinstance(layer, Attention) else layer.config.attention()
    if settings.head_dim not in HEAD_DIMS:
        return f"head_dim {settings.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if settings.head_dim > 256 and layer.context.dtype == torch.float32 and is_gpu(device):
        return f"there is no kernel for heads of {settings.head_dim} channels in float32"
    if settings.head_dim > 256 and layer.context.invariant:
        return f"there is no batch-invariant kernel for heads of {settings.head_dim} channels"
    if (group := settings.num_heads // settings.num_kv_heads) > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    if layer.context.kv_dtype == FP8 and is_gpu(device):
        major, minor = compute_capability(device)
        if (0, 0) < (major, minor) < (8, 9):
            return f"compute capability {major}.{minor} is below 8.9 for fp8 KV pages"
    return triton_unsupported(layer, device)


@register("attention", "triton", unsupported=_triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: Attention) -> Forward:
    """Kernels: norm + QKV (and gate) + bias; QK-norm, RoPE, KV write, attention and gating (`attention`); O + residual.

    A QK-norm over all heads, or the rotation before a norm, are steps of their own before `attention`. With a norm or a factor of
    what is added: O; `triton_add`.
    """
    from minirt.kernels.attention.dispatch import attention
    from minirt.kernels.linear.dispatch import linear_residual, norm_linear
    from minirt.kernels.norm import rms_norm

    settings, context = layer.settings, layer.context
    workspace, side, pdl = context.workspace, context.side_stream, context.pdl
    norm, linear, o, residual_product = layer.norm, layer.qkv, layer.o, layer.linear_ops()[-1].residual
    eps, nq, d, window = layer.config.rms_norm_eps, settings.num_heads, settings.head_dim, settings.window
    scores = Scores(settings.scale, window)
    cos_sin, normalize, query_scales = layer.cos_sin, settings.qk_norm == "plain", layer.query_scales
    rows = nq * d, settings.num_kv_heads * d, (not settings.v_is_k) * settings.num_kv_heads * d  # of q, k and v
    of_rope, of_v = None if settings.qk_norm == "weighted_after_rope" else cos_sin, (settings.normalize_v, settings.v_is_k)

    def forward(x: Tensor, batch: Batch, kv: LayerKV) -> Tensor:
        q_norm = layer.q_norm.weight if layer.q_norm else None
        k_norm = layer.k_norm.weight if layer.k_norm else None
        norm_weight = norm.weight if norm else None
        added = None if batch.adapters is None else batch.adapters.of(linear)
        qkv = norm_linear(
            x, norm_weight, eps, linear.weight, linear.bias, scale=linear.scale, workspace=workspace, adapters=added, pdl=pdl,
            check=False,
        )  # fmt: skip
        if batch.adapters is not None and added is None:
            batch.adapters.add(linear, qkv, x, norm_weight, eps)
        gate = None
        if settings.gate is not None:
            qkv, gate = qkv[:, : sum(rows)], qkv[:, sum(rows) :].unflatten(1, (nq, d))
        if settings.qk_norm == "weighted_all" and q_norm is not None and k_norm is not None:
            q, k, _ = qkv.split(rows, 1)
            q.copy_(rms_norm(q.contiguous(), q_norm, eps, pdl=pdl, check=False))
            k.copy_(rms_norm(k.contiguous(), k_norm, eps, pdl=pdl, check=False))
            q_norm = k_norm = None
        elif of_rope is not cos_sin and cos_sin is not None:
            for heads in qkv.split(rows, 1)[:2]:
                turned = heads.unflatten(1, (-1, d))
                turned.copy_(reference.rope(turned, cos_sin[batch.positions]))
        query_starts = None if batch.max_query_len == 1 else batch.query_starts_device
        tables = batch if window is None else batch.tables(window)
        sequences = Sequences(tables.block_tables, batch.seq_lens_device, tables.split_starts_device, query_starts)
        a = attention(AttentionInput(
            qkv, kv, sequences, scores, qkv.new_empty(len(qkv), nq, d),
            Rope(of_rope, q_norm, k_norm, eps, normalize, query_scales, *of_v), batch.positions, tables.slot_mapping, workspace,
            batch.max_splits, batch.max_seq_len, batch.max_query_len, pdl=pdl, gate=gate, side=side,
            sinks=None if layer.sinks is None else layer.sinks.weight,
        )).view(-1, nq * d)  # fmt: skip
        a = layer.hooked(a, batch)
        if residual_product:
            added = None if batch.adapters is None else batch.adapters.of(o)
            if batch.adapters is not None and added is None:
                batch.adapters.add(o, x, a)
            return linear_residual(
                a, o.weight, x, o.bias, scale=o.scale, workspace=workspace, adapters=added, pdl=pdl, check=False
            )
        y = norm_linear(a, None, 0.0, o.weight, o.bias, scale=o.scale, workspace=workspace, pdl=pdl, check=False)
        if batch.adapters is not None:
            batch.adapters.add(o, y, a)
        return triton_add(layer, x, y)

    return forward
