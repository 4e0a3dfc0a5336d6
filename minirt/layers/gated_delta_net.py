"""`GatedDeltaNet`: the residual layer of linear attention with a recurrent state (Yang et al. 2024), as in Qwen3.5."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.kernels.gated_delta import operands
from minirt.kernels.gated_delta import reference as gated_delta
from minirt.kernels.gated_delta.operands import CHUNK, HEAD_DIMS, WIDTH
from minirt.layers.base import Forward, Layer, LinearOp, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import Interleaved, NormWeight, PackedLinear, Part, Shard, Values, stacked
from minirt.step.batch import Batch
from minirt.step.kv_cache import LayerState, StateSpec


class GatedDeltaNet(Layer):
    """x + out_proj(gated_norm(gated_delta_rule(conv(qkv(norm(x)))))), x [T, H]; the state of each sequence is in its slot.

    Value head h uses the key head h // (Hv / Hk). The convolution has width 4 and SiLU; the norm after the rule is per value
    head, and gated by SiLU of z. in_proj_b, in_proj_a, the convolution and the norms are never quantized.

    Args:
        norm: checkpoint name of the norm of the layer's input. The others are below `prefix` (`….linear_attn`).
    """

    kind, adaptable = "gated_delta_net", ("in_proj", "in_proj_ba", "out_proj")
    needs_cache = "a gated DeltaNet layer needs a state for each sequence"
    kernel_tables = ("gated_delta.dispatch",)

    def __init__(self, config: ModelConfig, *, name: str, norm: str, prefix: str) -> None:
        super().__init__(config, name)
        if config.gated_delta_net is None:
            raise ConfigError("the model has no gated DeltaNet layers", where=name)
        self.heads = heads = config.gated_delta_net
        h, k_heads, v_heads, v_dim = config.hidden_size, heads.num_k_heads, heads.num_v_heads, heads.head_v_dim
        if v_heads % k_heads:
            what, expected = "the value heads cannot be divided evenly among the key heads", f"a multiple of {k_heads}"
            raise ConfigError(what, where=name, expected=expected, found=v_heads)
        values = v_heads * v_dim
        self.state_values = values * heads.head_k_dim  # of the matrices of all heads
        self.channels = 2 * k_heads * heads.head_k_dim + values  # of the convolution
        self.norm = NormWeight(norm, h, config.zero_centered_norms)
        if heads.grouped:
            group = v_heads // k_heads
            qkvz = heads.head_k_dim, heads.head_k_dim, group * v_dim, group * v_dim
            parts = _grouped(f"{prefix}.in_proj_qkvz", k_heads, qkvz)
            beside = _grouped(f"{prefix}.in_proj_ba", k_heads, (group, group))
        else:
            parts = [Part(f"{prefix}.in_proj_qkv", self.channels), Part(f"{prefix}.in_proj_z", values)]
            beside = [Part(f"{prefix}.in_proj_b", v_heads), Part(f"{prefix}.in_proj_a", v_heads)]
        self.in_proj_ba = _Beside(beside, h, quantizable=False)
        self.in_proj = _Joined(parts, h, self.in_proj_ba)
        self.conv = Values(f"{prefix}.conv1d.weight", (self.channels, 1, WIDTH), (-0.5, 0.5))
        self.A_log = Values(f"{prefix}.A_log", (v_heads,), (-4.6, 2.7), torch.float32)
        self.dt_bias = Values(f"{prefix}.dt_bias", (v_heads,), (-4.0, 1.0), torch.float32)
        self.gated_norm = NormWeight(f"{prefix}.norm", v_dim)
        self.out_proj = PackedLinear([Part(f"{prefix}.out_proj", h)], values)

    @property
    def cache_spec(self) -> StateSpec:  # type: ignore[override]  # it follows from the dtype, which is known at load
        """The last inputs of the convolution (a ring, see `kernels.gated_delta.operands`), and the matrix of each head.

        With `context.undoable`, also the gates of these inputs and the number of tokens in the matrices.
        """
        heads, undoable = self.heads.num_v_heads, self.context.undoable
        ring = WIDTH - 1 + 2 * undoable if undoable else WIDTH
        conv = ("conv", (ring, self.channels), self.context.dtype)
        recurrent = ("recurrent", (heads, self.heads.head_k_dim, self.heads.head_v_dim), torch.float32)
        undo = (("gates", (ring, 2, heads), torch.float32), ("folded", (heads,), torch.int32)) if undoable else ()
        return StateSpec((conv, recurrent, *undo), undoable, CHUNK)

    @property
    def step_state_bytes(self) -> int:
        """The matrices are read and written. Of the convolution's inputs, three rows are read and one is written."""
        return 8 * self.state_values + WIDTH * self.channels * self.context.dtype.itemsize

    def shard(self, shard: Shard) -> None:
        """By key heads, each with its value heads."""
        heads, (qkv, *rest) = self.heads, self.in_proj.parts
        first, count = shard.of(heads.num_k_heads, "key heads of gated DeltaNet", self.name)
        share, values = (first, count, heads.num_k_heads), heads.num_v_heads * heads.head_v_dim
        if not heads.grouped:
            keys = Part(qkv.name, heads.num_k_heads * heads.head_k_dim)
            self.in_proj.set_parts([*stacked(keys, keys, Part(qkv.name, values)), *rest])
        for linear in (self.in_proj, self.in_proj_ba):
            linear.shard_rows(share)
        self.out_proj.shard_columns(shard.rank, *share)
        parts = self.in_proj.parts[:3]  # the convolution has the channels of q, k and v
        self.conv.shard(*((sum(p.whole or 0 for p in parts[:i]) + part.start, part.rows) for i, part in enumerate(parts)))
        group = heads.num_v_heads // heads.num_k_heads
        self.A_log.shard((first * group, count * group))
        self.dt_bias.shard((first * group, count * group))
        self.heads = replace(heads, num_k_heads=count, num_v_heads=count * group)
        self.state_values, self.channels = self.out_proj.in_features * heads.head_k_dim, sum(part.rows for part in parts)
        self.sharded = True

    def linear_ops(self) -> Sequence[LinearOp]:
        out = LinearOp(self.out_proj, residual=not self.sharded)
        if self.in_proj.format is not None:
            return LinearOp(self.in_proj), LinearOp(self.in_proj_ba), out
        return LinearOp(PackedLinear([*self.in_proj.parts, *self.in_proj_ba.parts], self.config.hidden_size)), out

    @property
    def activation_values(self) -> int:
        """With what the kernels of prompts keep: q, k and v, U and W."""
        kept = self.heads.num_v_heads * (self.heads.head_k_dim + 2 * self.heads.head_v_dim)
        return super().activation_values + self.channels + kept

    def flops(self, rows: int) -> int:
        """With the convolution and the rule: Sᵀk, the update and Sᵀq of each value head."""
        return super().flops(rows) + rows * (6 * self.state_values + 2 * WIDTH * self.channels)

    def weights(self) -> operands.GatedDeltaWeights:
        """The weights beside the projections."""
        conv, eps = self.conv.weight.view(-1, WIDTH), self.config.rms_norm_eps
        return operands.GatedDeltaWeights(conv, self.A_log.weight, self.dt_bias.weight, self.gated_norm.weight, eps)

    def state(self, kv: LayerState) -> operands.GatedDeltaState:
        return operands.GatedDeltaState(kv["conv"], kv["recurrent"], kv.get("gates"), kv.get("folded"))


def _grouped(name: str, heads: int, blocks: tuple[int, ...]) -> list[Part]:
    """The parts of a linear that has, for each key head, a block of rows of each of them."""
    return [Part(name, heads * rows, Interleaved(blocks, i)) for i, rows in enumerate(blocks)]


class _Joined(PackedLinear):
    """A `PackedLinear` with the rows of another one (`beside`), which keeps 16 or 32 bits.

    If both have the same format, they are one matrix, `joined` [N + M, K]: one product computes both. Else it is None.
    """

    def __init__(self, parts: Sequence[Part], in_features: int, beside: PackedLinear) -> None:
        super().__init__(parts, in_features)
        self._beside = beside
        self.joined: Tensor | None = None

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        rows, others = self.out_features, self._beside.out_features
        self.joined = None
        if self.format is not None:
            super().allocate(device, dtype)
            self._beside.weight = torch.empty(others, self.in_features, device=device, dtype=dtype)
        else:
            self.joined = torch.empty(rows + others, self.in_features, device=device, dtype=dtype)
            self.weight, self.scale = self.joined[:rows], None
            self._beside.weight = self.joined[rows:]


class _Beside(PackedLinear):
    """The other one of a `_Joined`, which allocates it."""

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        pass


@register("gated_delta_net", "eager")
def eager(layer: GatedDeltaNet) -> Forward:
    eps, norm, in_proj, in_proj_ba = layer.config.rms_norm_eps, layer.norm, layer.in_proj, layer.in_proj_ba

    def forward(x: Tensor, batch: Batch, kv: LayerState) -> Tensor:
        state = layer.state(kv)
        h = reference.rms_norm(x, norm.weight, eps)
        qkvz, ba = reference.linear(h, in_proj.weight, scale=in_proj.scale), reference.linear(h, in_proj_ba.weight)
        # The host's lengths are upper bounds where the step before had drafts.
        counts, lengths = batch.query_starts_device.diff().tolist(), batch.seq_lens_device.tolist()
        snapshots = list[list[tuple[int, int]]]()
        if batch.snapshots is not None and max(counts, default=0) > CHUNK:
            snapshots = [[(row, offset) for row, offset in rows if row >= 0] for rows in batch.snapshots.tolist()]
        if batch.adapters is not None:
            batch.adapters.add(in_proj, qkvz, h)
            batch.adapters.add(in_proj_ba, ba, h)
        y = gated_delta.gated_delta_net(qkvz, ba, layer.weights(), state, counts, lengths, batch.seq_slots.tolist(), snapshots)
        out = reference.linear(y, layer.out_proj.weight, scale=layer.out_proj.scale)
        return x + layer.summed(out if batch.adapters is None else batch.adapters.add(layer.out_proj, out, y))

    return forward


def _triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    if isinstance(layer, GatedDeltaNet):
        for what, size in (("linear_key_head_dim", layer.heads.head_k_dim), ("linear_value_head_dim", layer.heads.head_v_dim)):
            if size not in HEAD_DIMS:
                return f"{what} {size} is neither {' nor '.join(map(str, HEAD_DIMS))}"
    return triton_unsupported(layer, device)


@register("gated_delta_net", "triton", unsupported=_triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: GatedDeltaNet) -> Forward:
    """Kernels of one token: norm + projections (two products if quantized); convolution, rule, gated norm; output + residual."""
    from minirt.kernels.gated_delta.dispatch import gated_delta_net
    from minirt.kernels.linear.dispatch import linear_residual, norm_linear

    context, eps = layer.context, layer.config.rms_norm_eps
    workspace, side, pdl = context.workspace, context.side_stream, context.pdl
    norm, proj, proj_ba, out_proj = layer.norm, layer.in_proj, layer.in_proj_ba, layer.out_proj

    def forward(x: Tensor, batch: Batch, kv: LayerState) -> Tensor:
        state = layer.state(kv)
        if proj.joined is not None:
            both = norm_linear(x, norm.weight, eps, proj.joined, workspace=workspace, pdl=pdl, check=False)
            qkvz, ba = both[:, : proj.out_features], both[:, proj.out_features :]
        else:
            with side.fork():
                ba = norm_linear(x, norm.weight, eps, proj_ba.weight, workspace=side.workspace, pdl=pdl, check=False)
            qkvz = norm_linear(x, norm.weight, eps, proj.weight, scale=proj.scale, workspace=workspace, pdl=pdl, check=False)
            side.join()
        if batch.adapters is not None:
            batch.adapters.add(proj, qkvz, x, norm.weight, eps)
            batch.adapters.add(proj_ba, ba, x, norm.weight, eps)
        starts, lengths = batch.query_starts_device, batch.seq_lens_device
        sequences = operands.GatedDeltaSequences(starts, lengths, batch.seq_slots, batch.snapshots)
        y = gated_delta_net(
            qkvz, ba, layer.weights(), state, sequences, batch.max_query_len, invariant=context.invariant, pdl=pdl, check=False
        )
        if batch.adapters is not None:
            batch.adapters.add(out_proj, x, y)
        if layer.sharded:
            out = norm_linear(y, None, 0.0, out_proj.weight, scale=out_proj.scale, workspace=workspace, pdl=pdl, check=False)
            return layer.added(x, out)
        return linear_residual(y, out_proj.weight, x, scale=out_proj.scale, workspace=workspace, pdl=pdl, check=False)

    return forward
