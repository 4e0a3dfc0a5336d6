"""`Attention`: the residual layer of grouped-query attention over the paged KV cache."""

import torch
from torch import Tensor

from minirt.device import compute_capability
from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.kernels.attention.limits import HEAD_DIMS, MAX_GROUP
from minirt.kernels.attention.operands import AttentionInput, Rope, Scores, Sequences
from minirt.layers.base import Forward, Layer, LinearOp, register, triton_unsupported
from minirt.modeling.config import ModelConfig, RopeConfig
from minirt.modeling.formats import FP8
from minirt.modeling.parameters import NormWeight, PackedLinear, Part
from minirt.step.batch import Batch
from minirt.step.kv_cache import LayerKV, PagesSpec


class Attention(Layer):
    """x + o(attention(rope(qk_norm(qkv(norm(x)))))), x [T, H]; new K and V go to the pages at batch.slots.

    Grouped queries: Ainslie et al. 2023; rotary embedding: Su et al. 2021; QK-norm as in Qwen3 (per head, before rope).
    Q, K and V are packed in one matrix, in this order.

    Args:
        rope: the rotary embedding; None: that of the config.
        scale: factor of the scores; None: 1/√D.
        window: a token sees itself and at most window − 1 tokens before it (sliding-window attention, Beltagy et al. 2020); None:
            all tokens before it. Only the eager implementation has a window.
    """

    kind = "attention"

    def __init__(
        self,
        config: ModelConfig,
        *,
        name: str,
        norm: str,
        q: str,
        k: str,
        v: str,
        o: str,
        q_norm: str | None = None,
        k_norm: str | None = None,
        rope: RopeConfig | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(config, name)
        if config.qk_norm != (q_norm is not None) or config.qk_norm != (k_norm is not None):
            raise ConfigError("q_norm and k_norm must be given if the model has QK-norm, and only then", where=name)
        h, d = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
        self.cache_spec = PagesSpec(config.num_kv_heads, d)
        self.rope, self.scale, self.window = rope or config.rope, d**-0.5 if scale is None else scale, window
        self.norm = NormWeight(norm, h)
        self.qkv = PackedLinear([Part(q, q_rows), Part(k, kv_rows), Part(v, kv_rows)], h, config.qkv_bias)
        self.o = PackedLinear([Part(o, h)], q_rows, config.o_bias)
        self.q_norm = NormWeight(q_norm, d) if q_norm else None
        self.k_norm = NormWeight(k_norm, d) if k_norm else None

    @property
    def cos_sin(self) -> Tensor:
        """The rotary table [max_model_len, D] fp32, cosines | sines."""
        return self.context.rope(self.rope, self.config.head_dim)

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ((self.rope, self.config.head_dim),)

    def linear_ops(self) -> tuple[LinearOp, ...]:
        return LinearOp(self.qkv), LinearOp(self.o, residual=True)

    def attention_flops(self, pairs: int) -> int:
        return 4 * self.config.num_heads * self.config.head_dim * pairs

    def reserve(self, max_splits: int) -> None:
        if self.implementation == "triton":
            from minirt.kernels.attention.partial import workspace_floats  # at least what decode steps need

            self.context.workspace.reserve(workspace_floats(max_splits, self.config.num_heads, self.config.head_dim))

    def require(self, kv: LayerKV | None) -> LayerKV:
        if kv is None:
            raise ConfigError("an attention layer needs KV pages", where=self.name)
        return kv


@register("attention", "eager")
def eager(layer: Attention) -> Forward:
    config = layer.config
    eps, nq, nkv, d = config.rms_norm_eps, config.num_heads, config.num_kv_heads, config.head_dim
    norm, qkv, o, q_norm, k_norm = layer.norm, layer.qkv, layer.o, layer.q_norm, layer.k_norm

    def forward(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
        kv = layer.require(kv)
        h = reference.rms_norm(x, norm.weight, eps)
        heads = reference.linear(h, qkv.weight, qkv.bias, qkv.scale).view(-1, nq + 2 * nkv, d)
        qk, v = heads[:, : nq + nkv], heads[:, nq + nkv :]
        if q_norm is not None and k_norm is not None:
            q = reference.rms_norm(qk[:, :nq], q_norm.weight, eps)
            k = reference.rms_norm(qk[:, nq:], k_norm.weight, eps)
            qk = torch.cat((q, k), dim=1)
        qk = reference.rope(qk, layer.cos_sin[batch.positions])
        reference.write_kv(qk[:, nq:], kv.k, batch.slots, kv.k_scale)
        reference.write_kv(v, kv.v, batch.slots, kv.v_scale)
        a = reference.paged_attention(
            qk[:, :nq], kv.k, kv.v, batch.block_tables, batch.query_lens, batch.seq_lens, layer.scale, kv.k_scale,
            kv.v_scale, layer.window,
        )  # fmt: skip
        return x + reference.linear(a.view(-1, nq * d), o.weight, o.bias, o.scale)

    return forward


def _triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    config = layer.config
    if getattr(layer, "window", None) is not None:
        return "its kernels have no sliding window"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim} is neither {' nor '.join(map(str, HEAD_DIMS))}"
    if config.num_heads // config.num_kv_heads > MAX_GROUP:
        return f"{config.num_heads // config.num_kv_heads} query heads share a KV head, more than {MAX_GROUP}"
    if layer.context.kv_dtype == FP8 and device.type == "cuda":
        major, minor = compute_capability(device)
        if (0, 0) < (major, minor) < (8, 9):
            return f"compute capability {major}.{minor} is below 8.9 for fp8 KV pages"
    return triton_unsupported(layer, device)


@register("attention", "triton", unsupported=_triton_unsupported, capturable=True)
def triton(layer: Attention) -> Forward:
    """Kernels: norm + QKV + bias; QK-norm, RoPE, KV write and attention (`attention`); O + residual."""
    from minirt.kernels.attention.dispatch import attention
    from minirt.kernels.linear.dispatch import linear_residual, norm_linear

    config, workspace, pdl = layer.config, layer.context.workspace, layer.context.pdl
    norm, linear, o = layer.norm, layer.qkv, layer.o
    eps, nq, d = config.rms_norm_eps, config.num_heads, config.head_dim
    cos_sin = layer.cos_sin

    def forward(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
        kv = layer.require(kv)
        q_norm = layer.q_norm.weight if layer.q_norm else None
        k_norm = layer.k_norm.weight if layer.k_norm else None
        qkv = norm_linear(
            x, norm.weight, eps, linear.weight, linear.bias, scale=linear.scale, workspace=workspace, pdl=pdl, check=False
        )
        query_starts = None if batch.max_query_len == 1 else batch.query_starts_device
        sequences = Sequences(batch.block_tables, batch.seq_lens_device, batch.split_starts_device, query_starts)
        a = attention(AttentionInput(
            qkv, kv, sequences, Scores(layer.scale), qkv.new_empty(len(qkv), nq, d), Rope(cos_sin, q_norm, k_norm, eps),
            batch.positions, batch.slots, workspace, batch.max_splits, batch.max_seq_len, pdl=pdl,
        ))  # fmt: skip
        return linear_residual(
            a.view(-1, nq * d), o.weight, x, o.bias, scale=o.scale, workspace=workspace, pdl=pdl, check=False
        )

    return forward
