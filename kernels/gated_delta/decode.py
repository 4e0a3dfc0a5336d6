"""Gated DeltaNet of one new token for each sequence, or of a few that can be undone: one kernel after the projections.

A program computes one value head of one sequence: convolution, gates, l2 norm, update of the state and the gated norm, which
needs all channels of the head. It reads and writes the head's matrix [Dk, Dv] fp32 once; that is what the time goes to. Value
heads that share a key head compute its convolution each.
"""

import triton
import triton.language as tl

from minirt.kernels.gated_delta.constants import WIDTH, Constants, convolve, gated_norm, gates, silu, unit
from minirt.kernels.gated_delta.operands import GatedDeltaInput
from minirt.kernels.launch import launch_options
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared


@triton.jit
def token(S, q, k, v, g, beta, scale: tl.constexpr):
    """The state [Dk, Dv] after a token, and the token's output [Dv] of scale · q, before the norm.

    The output is of the state after the token, S' = e^g S + k changeᵀ. So it is e^g Sᵀq + (k · q) change, and one pass over S
    has the sums of both.
    """
    decay = tl.exp(g)
    held, seen = tl.sum(S * k[:, None], 0), tl.sum(S * q[:, None], 0)
    change = (v - decay * held) * beta
    return tl.fma(k[:, None], change[None, :], S * decay), (decay * seen + tl.sum(k * q, 0) * change) * scale


@triton.jit
def store_output(o, z_ptrs, norm, eps, out_ptrs, D: tl.constexpr):
    """Store the gated norm of a token's output."""
    y = gated_norm(o, tl.load(z_ptrs).to(tl.float32), norm, eps, 0, D)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty))


@triton.jit
def _older_taps(ring_ptr, weight_ptr, channels, position, inside, C):
    """The part of the convolution at `position` of the inputs before it, and the weight of the input there."""
    y = channels * 0.0
    for j in tl.static_range(WIDTH - 1):
        before = position - (WIDTH - 1 - j)
        at = ring_ptr + (before + C.RING) % C.RING * C.CHANNELS + channels
        value = tl.load(at, mask=channels < tl.where(inside & (before >= 0), C.CHANNELS, 0), other=0.0)
        y += value.to(tl.float32) * tl.load(weight_ptr + channels * WIDTH + j).to(tl.float32)
    return y, tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1)).to(tl.float32)


@triton.jit
def _newest_tap(taps, x):
    return silu(taps[0] + taps[1] * x.to(tl.float32))


@prepared
@triton.jit(do_not_specialize=["x_stride", "ba_stride"])
def _delta_decode_kernel(x_ptr, ba_ptr, weights, state, sequences, out_ptr, x_stride, ba_stride, C, PDL: tl.constexpr):
    """One value head of one sequence of one new token."""
    b, h = tl.program_id(0) // C.HV, tl.program_id(0) % C.HV
    row = tl.load(sequences.query_starts + b).to(tl.int64)
    count = tl.load(sequences.query_starts + b + 1) - row
    position = tl.load(sequences.seq_lens + b) - 1
    slot = tl.load(sequences.slots + b).to(tl.int64)
    live = (slot >= 0) & (count == 1)
    if not PDL and not live:
        return
    dk, dv = tl.arange(0, C.DK), tl.arange(0, C.DV)
    S_ptrs = state.recurrent + ((slot * C.HV + h) * C.DK + dk[:, None]) * C.DV + dv[None, :]
    ring_ptr = state.conv + slot * C.RING * C.CHANNELS
    q_channels = h // C.GROUP * C.DK + dk
    k_channels, v_channels = C.KEYS + q_channels, 2 * C.KEYS + h * C.DV + dv
    # The state and older inputs are those of the step before, so they are read while the projections run.
    S = tl.load(S_ptrs, mask=dk[:, None] < tl.where(live & (position > 0), C.DK, 0), other=0.0)
    q_taps = _older_taps(ring_ptr, weights.conv, q_channels, position, live, C)
    k_taps = _older_taps(ring_ptr, weights.conv, k_channels, position, live, C)
    v_taps = _older_taps(ring_ptr, weights.conv, v_channels, position, live, C)
    A_log, dt_bias = tl.load(weights.A_log + h), tl.load(weights.dt_bias + h)
    norm = tl.load(weights.norm + dv).to(tl.float32)
    if PDL:
        wait_for_input(False)
    if live:
        x_ptr += row * x_stride
        ba_ptr += row * ba_stride + h
        raw_q, raw_k, raw_v = tl.load(x_ptr + q_channels), tl.load(x_ptr + k_channels), tl.load(x_ptr + v_channels)
        g, beta = gates(tl.load(ba_ptr), tl.load(ba_ptr + C.HV), A_log, dt_bias)
        q, k = unit(_newest_tap(q_taps, raw_q), 0), unit(_newest_tap(k_taps, raw_k), 0)
        S, o = token(S, q, k, _newest_tap(v_taps, raw_v), g, beta, C.DK**-0.5)
        tl.store(S_ptrs, S)
        at = h * C.DV + dv
        store_output(o, x_ptr + C.CHANNELS + at, norm, weights.eps, out_ptr + row * C.VALUES + at, C.DV)
        ring_ptr += position % C.RING * C.CHANNELS  # a row that no program of this step reads
        tl.store(ring_ptr + v_channels, raw_v)
        if h % C.GROUP == 0:
            tl.store(ring_ptr + q_channels, raw_q)
            tl.store(ring_ptr + k_channels, raw_k)


@prepared
@triton.jit(do_not_specialize=["x_stride", "ba_stride"])
def _delta_drafts_kernel(x_ptr, ba_ptr, weights, state, sequences, out_ptr, x_stride, ba_stride, C, PDL: tl.constexpr):
    """One value head of one sequence, of steps that can be undone (see `operands`): older tokens are folded into the state, then
    up to MOST new tokens get outputs. A sequence of more new tokens is left to the kernels of `chunk`, with its state folded."""
    b, h = tl.program_id(0) // C.HV, tl.program_id(0) % C.HV
    row = tl.load(sequences.query_starts + b)
    count = tl.load(sequences.query_starts + b + 1) - row
    start = tl.load(sequences.seq_lens + b) - count
    slot = tl.load(sequences.slots + b).to(tl.int64)
    live = (slot >= 0) & (count > 0)
    if not PDL and not live:
        return
    dk, dv = tl.arange(0, C.DK), tl.arange(0, C.DV)
    S_ptrs = state.recurrent + ((slot * C.HV + h) * C.DK + dk[:, None]) * C.DV + dv[None, :]
    S = tl.load(S_ptrs, mask=dk[:, None] < tl.where(live & (start > 0), C.DK, 0), other=0.0)
    A_log, dt_bias = tl.load(weights.A_log + h), tl.load(weights.dt_bias + h)
    norm = tl.load(weights.norm + dv).to(tl.float32)
    if PDL:
        wait_for_input(False)
    if live:
        x_ptr += row.to(tl.int64) * x_stride
        ba_ptr += row.to(tl.int64) * ba_stride + h
        ring_ptr, gates_ptr = state.conv + slot * C.RING * C.CHANNELS, state.gates + slot * C.RING * 2 * C.HV + h
        q_channels = h // C.GROUP * C.DK + dk
        k_channels, v_channels = C.KEYS + q_channels, 2 * C.KEYS + h * C.DV + dv
        folded_ptr = state.folded + slot * C.HV + h
        folded = tl.load(folded_ptr, mask=start > 0, other=0)
        for p in range(folded, start):
            k = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, k_channels, p + 0 * dk, start, dk >= 0, C), 0)
            v = convolve(x_ptr, x_stride, ring_ptr, weights.conv, v_channels, p + 0 * dv, start, dv >= 0, C)
            at = gates_ptr + p % C.RING * 2 * C.HV
            S, _ = token(S, k, k, v, tl.load(at), tl.load(at + C.HV), 1.0)
        tl.store(S_ptrs, S)
        tl.store(folded_ptr, start)
        for t in range(tl.where(count <= C.MOST, count, 0)):
            p, x_row = start + t, x_ptr + t * x_stride
            q = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, q_channels, p + 0 * dk, start, dk >= 0, C), 0)
            k = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, k_channels, p + 0 * dk, start, dk >= 0, C), 0)
            v = convolve(x_ptr, x_stride, ring_ptr, weights.conv, v_channels, p + 0 * dv, start, dv >= 0, C)
            ba = ba_ptr + t * ba_stride
            g, beta = gates(tl.load(ba), tl.load(ba + C.HV), A_log, dt_bias)
            S, o = token(S, q, k, v, g, beta, C.DK**-0.5)
            head = h * C.DV + dv
            out_ptrs = out_ptr + (row + t).to(tl.int64) * C.VALUES + head
            store_output(o, x_row + C.CHANNELS + head, norm, weights.eps, out_ptrs, C.DV)
            # Rows of the ring that no program of this step reads.
            ring = ring_ptr + p % C.RING * C.CHANNELS
            tl.store(ring + v_channels, tl.load(x_row + v_channels))
            if h % C.GROUP == 0:
                tl.store(ring + q_channels, tl.load(x_row + q_channels))
                tl.store(ring + k_channels, tl.load(x_row + k_channels))
            at = gates_ptr + p % C.RING * 2 * C.HV
            tl.store(at, g)
            tl.store(at + C.HV, beta)


def decode(a: GatedDeltaInput) -> None:
    """Write `out` and the state of sequences of few new tokens. `dispatch` checks the operands before."""
    Hv = a.head_shape[1]
    kernel = _delta_drafts_kernel if a.state.drafts else _delta_decode_kernel
    # With more than 4 warps, Triton loads the head's inputs for each row of the matrix. Without fused sums, all lanes that hold a
    # sum over lanes have the same, so it does not matter which of them stores it.
    kernel[(a.sequences.slots.shape[0] * Hv,)](
        a.qkvz, a.ba, a.weights, a.state, a.sequences, a.out, a.qkvz.stride(0), a.ba.stride(0), C=Constants.of(a),
        enable_fp_fusion=False, **launch_options(4, 1, a.pdl),
    )  # fmt: skip
