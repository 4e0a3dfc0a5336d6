"""Gated DeltaNet of prompts and parts of prompts, by chunks of 64 tokens, for ragged batches.

`reference.chunk_gated_delta_rule` has the formulas. There are four kernels:

- the convolution, with the l2 norm;
- what a chunk needs of itself: the inverse T of its triangular system, U = T (β V) and W = T (β e^G K); all chunks in parallel;
- outputs and states: the chunks of a sequence one after the other, heads and blocks of Dv in parallel;
- the gated norm.

They leave out sequences of few new tokens, which `decode` computes.
"""

import torch
import triton
import triton.language as tl

from minirt.device import interpreting
from minirt.kernels.gated_delta.constants import Constants, convolve, find_chunk, gated_norm, gates, product, unit
from minirt.kernels.gated_delta.operands import CHUNK, GatedDeltaInput
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import prepared

_BLOCK = 16  # rows of the diagonal blocks that are inverted row by row
_BLOCK_V = 32  # channels of Dv of a program: few, so that the heads of one prompt occupy all SMs
_ROWS = tl.constexpr(_BLOCK)
_BLOCKS = tl.constexpr(CHUNK // _BLOCK)


@triton.jit
def _convolve_head(x_ptr, x_stride, ring_ptr, weight_ptr, out_ptr, channel, t, start, count, scale, C, D: tl.constexpr):
    """Tokens `t` of one head's D channels from `channel` on. scale 0: no l2 norm."""
    CHANNELS: tl.constexpr = 2 * C.HK * C.DK + C.HV * C.DV
    inside = (t < count)[:, None]
    channels = channel + tl.arange(0, D)[None, :]
    y = convolve(x_ptr, x_stride, ring_ptr, weight_ptr, channels, (start + t)[:, None], start, inside, C)
    if scale > 0:
        y = unit(y, 1) * scale
    tl.store(out_ptr + t.to(tl.int64)[:, None] * CHANNELS + channels, y.to(out_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit(do_not_specialize=["B", "x_stride"])
def _delta_conv_kernel(x_ptr, weights, state, sequences, qkv_ptr, B, x_stride, C):
    """One head (of q, k or v) of a chunk: convolution, SiLU, and of q and k the l2 norm; q is scaled by 1/√Dk."""
    CHANNELS: tl.constexpr = 2 * C.HK * C.DK + C.HV * C.DV
    head = tl.program_id(1)
    row, count, start, slot, first = find_chunk(tl.program_id(0), sequences, B, C)
    if first < count:
        t = first + tl.arange(0, C.CHUNK)
        x_ptr += row * x_stride
        qkv_ptr += row * CHANNELS
        ring_ptr = state.conv + slot * C.RING * CHANNELS
        if head < C.HK:
            _convolve_head(x_ptr, x_stride, ring_ptr, weights.conv, qkv_ptr, head * C.DK, t, start, count, C.DK**-0.5, C, C.DK)
        elif head < 2 * C.HK:
            _convolve_head(x_ptr, x_stride, ring_ptr, weights.conv, qkv_ptr, head * C.DK, t, start, count, 1.0, C, C.DK)
        else:
            channel = 2 * C.HK * C.DK + (head - 2 * C.HK) * C.DV
            _convolve_head(x_ptr, x_stride, ring_ptr, weights.conv, qkv_ptr, channel, t, start, count, 0.0, C, C.DV)


@triton.jit
def _inverse(A, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A [64, 64].

    Diagonal blocks are inverted by forward substitution, all four at once. With D their inverses and N what is below them,
    I + A = D⁻¹ (I + M), M = D N. Block rows make M⁴ = 0, so (I + M)⁻¹ = (I − M) (I + M²). (Powers of A itself may be huge where
    its inverse is not.)
    """
    row, column = tl.arange(0, _BLOCKS * _ROWS)[:, None], tl.arange(0, _BLOCKS * _ROWS)[None, :]
    diagonal = row // _ROWS == column // _ROWS
    # D holds the blocks, one below the other: [64, 16].
    D = -tl.sum(tl.reshape(tl.where(diagonal, A, 0.0), (_BLOCKS * _ROWS, _BLOCKS, _ROWS)), 1)
    D = tl.reshape(D, (_BLOCKS, _ROWS, _ROWS))
    i = tl.arange(0, _ROWS)[None, :, None]
    for r in range(1, _ROWS):
        current = tl.sum(tl.where(i == r, D, 0.0), 1)
        current += tl.sum(current[:, :, None] * D, 1)
        D = tl.where(i == r, current[:, None, :], D)
    D = tl.reshape(D, (_BLOCKS * _ROWS, 1, _ROWS))
    D = tl.reshape(tl.broadcast_to(D, (_BLOCKS * _ROWS, _BLOCKS, _ROWS)), (_BLOCKS * _ROWS, _BLOCKS * _ROWS))
    D = tl.where(diagonal, D, 0.0) + tl.where(row == column, 1.0, 0.0)
    M = product(D, tl.where(diagonal, 0.0, A), PRECISION)
    D -= product(M, D, PRECISION)  # (I − M) D; powers of M commute
    square = product(M, M, PRECISION)
    return D + product(square, D, PRECISION)


@prepared
@triton.jit(do_not_specialize=["B", "ba_stride"])
def _delta_prepare_kernel(qkv_ptr, ba_ptr, weights, sequences, u_ptr, w_ptr, decay_ptr, B, ba_stride, C):
    """One value head of a chunk: U, W, and G, the running sums of g."""
    KEYS: tl.constexpr = C.HK * C.DK
    CHANNELS: tl.constexpr = 2 * KEYS + C.HV * C.DV
    h = tl.program_id(1)
    row, count, _start, _slot, first = find_chunk(tl.program_id(0), sequences, B, C)
    if first < count:
        i = tl.arange(0, C.CHUNK)
        inside = first + i < count
        token = row + first + i
        dk, dv = tl.arange(0, C.DK)[None, :], tl.arange(0, C.DV)[None, :]
        at = qkv_ptr + token[:, None] * CHANNELS
        k = tl.load(at + KEYS + h // (C.HV // C.HK) * C.DK + dk, mask=inside[:, None], other=0.0)
        v = tl.load(at + 2 * KEYS + h * C.DV + dv, mask=inside[:, None], other=0.0).to(tl.float32)
        ba = ba_ptr + token * ba_stride + h
        b, a = tl.load(ba, mask=inside, other=0.0), tl.load(ba + C.HV, mask=inside, other=0.0)
        g, beta = gates(b, a, tl.load(weights.A_log + h), tl.load(weights.dt_bias + h))
        G = tl.cumsum(tl.where(inside, g, 0.0), 0)
        beta = tl.where(inside, beta, 0.0)[:, None]
        below = i[:, None] > i[None, :]
        decay = tl.exp(tl.where(below, G[:, None] - G[None, :], 0.0))
        A = tl.dot(k, tl.trans(k), input_precision=C.PRECISION) * decay * beta
        T = _inverse(tl.where(below, A, 0.0), C.PRECISION)
        u = product(T, v * beta, C.PRECISION)
        w = product(T, k.to(tl.float32) * (beta * tl.exp(G)[:, None]), C.PRECISION)
        head = (token * C.HV + h)[:, None]
        tl.store(u_ptr + head * C.DV + dv, u.to(u_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(w_ptr + head * C.DK + dk, w.to(w_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(decay_ptr + token * C.HV + h, G, mask=inside)


@triton.jit
def _keep_inputs(x_ptr, x_stride, ring_ptr, channels, start, count, C):
    """Store a sequence's last inputs in its ring, for `channels`."""
    CHANNELS: tl.constexpr = 2 * C.HK * C.DK + C.HV * C.DV
    t = (count - 4 + tl.arange(0, 4))[:, None]
    inside = t >= 0
    values = tl.load(x_ptr + t.to(tl.int64) * x_stride + channels[None, :], mask=inside)
    tl.store(ring_ptr + (start + t) % C.RING * CHANNELS + channels[None, :], values, mask=inside)


@prepared
@triton.jit(do_not_specialize=["x_stride"])
def _delta_state_kernel(x_ptr, qkv_ptr, u_ptr, w_ptr, decay_ptr, state, sequences, out_ptr, x_stride, C):
    """BLOCK_V channels of one value head of one sequence: its outputs, before the norm, and its next state."""
    GROUP: tl.constexpr = C.HV // C.HK
    KEYS: tl.constexpr = C.HK * C.DK
    VALUES: tl.constexpr = C.HV * C.DV
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    b, h = tl.program_id(0), tl.program_id(1)
    row = tl.load(sequences.query_starts + b).to(tl.int64)
    count = (tl.load(sequences.query_starts + b + 1) - row).to(tl.int32)
    start = tl.load(sequences.seq_lens + b) - count
    slot = tl.load(sequences.slots + b).to(tl.int64)
    if (slot >= 0) & (count > C.MOST):
        dk, dv = tl.arange(0, C.DK), tl.program_id(2) * C.BLOCK_V + tl.arange(0, C.BLOCK_V)
        S_ptrs = state.recurrent + ((slot * C.HV + h) * C.DK + dk[:, None]) * C.DV + dv[None, :]
        S = tl.load(S_ptrs, mask=dk[:, None] < tl.where(start > 0, C.DK, 0), other=0.0)
        i = tl.arange(0, C.CHUNK)
        q_channels = h // GROUP * C.DK + dk
        for first in range(0, count, C.CHUNK):
            inside = first + i < count
            token = row + first + i
            head = token * C.HV + h
            w = tl.load(w_ptr + head[:, None] * C.DK + dk[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            u = tl.load(u_ptr + head[:, None] * C.DV + dv[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            change = u - product(w, S, C.PRECISION)
            G = tl.load(decay_ptr + head, mask=inside, other=0.0)
            last = tl.load(decay_ptr + (row + tl.minimum(first + C.CHUNK, count) - 1) * C.HV + h)
            at = qkv_ptr + token[:, None] * CHANNELS + q_channels[None, :]
            q = tl.load(at, mask=inside[:, None], other=0.0)
            o = product(q.to(tl.float32) * tl.exp(G)[:, None], S, C.PRECISION)
            k = tl.load(at + KEYS, mask=inside[:, None], other=0.0)
            seen = (i[:, None] >= i[None, :]) & inside[:, None]
            P = tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * tl.exp(tl.where(seen, G[:, None] - G[None, :], 0.0))
            o += product(tl.where(seen, P, 0.0), change, C.PRECISION)
            out = out_ptr + token[:, None] * VALUES + h * C.DV + dv[None, :]
            tl.store(out, o.to(out_ptr.dtype.element_ty), mask=inside[:, None])
            k = k.to(tl.float32) * tl.exp(tl.where(inside, last - G, 0.0))[:, None]
            S = S * tl.exp(last) + product(tl.trans(k), change, C.PRECISION)
        tl.store(S_ptrs, S)
        x_ptr += row * x_stride
        ring_ptr = state.conv + slot * C.RING * CHANNELS
        _keep_inputs(x_ptr, x_stride, ring_ptr, 2 * KEYS + h * C.DV + dv, start, count, C)
        if tl.program_id(2) == 0:
            if h % GROUP == 0:
                _keep_inputs(x_ptr, x_stride, ring_ptr, q_channels, start, count, C)
                _keep_inputs(x_ptr, x_stride, ring_ptr, KEYS + q_channels, start, count, C)
            if C.DRAFTS > 0:
                tl.store(state.folded + slot * C.HV + h, start + count)


@prepared
@triton.jit(do_not_specialize=["B", "x_stride"])
def _delta_norm_kernel(x_ptr, weights, sequences, out_ptr, B, x_stride, C):
    """The gated norm of one value head of a chunk, in place."""
    VALUES: tl.constexpr = C.HV * C.DV
    row, count, _start, _slot, first = find_chunk(tl.program_id(0), sequences, B, C)
    if first < count:
        t = (first + tl.arange(0, C.CHUNK))[:, None]
        inside = t < count
        token = row + t
        dv = tl.program_id(1) * C.DV + tl.arange(0, C.DV)[None, :]
        out_ptrs = out_ptr + token * VALUES + dv
        o = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x_ptr + token * x_stride + 2 * C.HK * C.DK + VALUES + dv, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(weights.norm + tl.arange(0, C.DV)).to(tl.float32)[None, :]
        tl.store(out_ptrs, gated_norm(o, z, norm, weights.eps, 1, C.DV).to(out_ptr.dtype.element_ty), mask=inside)


def chunk(a: GatedDeltaInput) -> None:
    """Write `out` and the state of sequences of many new tokens. `dispatch` checks the operands before."""
    (T, _), (Hk, Hv, Dk, Dv), B, x = a.qkvz.shape, a.head_shape, a.sequences.slots.shape[0], a.qkvz
    wide = x.dtype == torch.float32
    C = Constants.of(a, max(256, next_power_of_2(B)), min(Dv, _BLOCK_V), CHUNK, "ieee" if wide or interpreting() else "tf32")
    qkv = x.new_empty(T, a.state.conv.shape[2])
    u, w = x.new_empty(T, Hv, Dv), x.new_empty(T, Hv, Dk)
    decay = x.new_empty(T, Hv, dtype=torch.float32)
    chunks, x_stride, ba_stride = T // CHUNK + B, x.stride(0), a.ba.stride(0)
    _delta_conv_kernel[(chunks, 2 * Hk + Hv)](
        x, a.weights, a.state, a.sequences, qkv, B, x_stride, C, num_warps=8, enable_fp_fusion=False
    )
    _delta_prepare_kernel[(chunks, Hv)](qkv, a.ba, a.weights, a.sequences, u, w, decay, B, ba_stride, C, num_warps=8)
    _delta_state_kernel[(B, Hv, Dv // C.BLOCK_V)](
        x, qkv, u, w, decay, a.state, a.sequences, a.out, x_stride, C, num_warps=8 if wide else 4, num_stages=1
    )
    _delta_norm_kernel[(chunks, Hv)](x, a.weights, a.sequences, a.out, B, x_stride, C, num_warps=4, enable_fp_fusion=False)
