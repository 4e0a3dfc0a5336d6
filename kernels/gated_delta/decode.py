"""Gated DeltaNet of one new token for each sequence, or of a few that can be undone: one kernel after the projections.

A program computes one value head of one sequence: convolution, gates, l2 norm, update of the state and the gated norm, which needs
all channels of the head. It reads and writes the head's matrix [Dk, Dv] fp32 once; that is what the time goes to. Value heads that
share a key head compute its convolution each.
"""

import triton
import triton.language as tl

from minirt.kernels.gated_delta.constants import Constants, convolve, gated_norm, gates, unit
from minirt.kernels.gated_delta.operands import GatedDeltaInput
from minirt.kernels.launch import launch_options
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared


@triton.jit
def _update(S, k, v, g, beta):
    """The state [Dk, Dv] after a token."""
    S *= tl.exp(g)
    change = (v - tl.sum(S * k[:, None], 0)) * beta
    return S + k[:, None] * change[None, :]


@triton.jit
def _store_input(x_ptrs, ring_ptrs):
    tl.store(ring_ptrs, tl.load(x_ptrs))


@prepared
@triton.jit(do_not_specialize=["x_stride", "ba_stride"])
def _decode_kernel(x_ptr, ba_ptr, weights, state, sequences, out_ptr, x_stride, ba_stride, C, PDL: tl.constexpr):
    """One value head of one sequence of up to MOST new tokens. Of a longer sequence, older tokens are folded into the state."""
    GROUP: tl.constexpr = C.HV // C.HK
    KEYS: tl.constexpr = C.HK * C.DK
    VALUES: tl.constexpr = C.HV * C.DV
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    b, h = tl.program_id(0) // C.HV, tl.program_id(0) % C.HV
    row = tl.load(sequences.query_starts + b)
    count = tl.load(sequences.query_starts + b + 1) - row
    start = tl.load(sequences.seq_lens + b) - count
    slot = tl.load(sequences.slots + b).to(tl.int64)
    live = (slot >= 0) & (count > 0)
    if C.DRAFTS == 0:
        live = live & (count == 1)
    dk, dv = tl.arange(0, C.DK), tl.arange(0, C.DV)
    S_ptrs = state.recurrent + ((slot * C.HV + h) * C.DK + dk[:, None]) * C.DV + dv[None, :]
    # The state is that of the step before, so it is read while the projections run.
    S = tl.load(S_ptrs, mask=dk[:, None] < tl.where(live & (start > 0), C.DK, 0), other=0.0)
    A_log, dt_bias = tl.load(weights.A_log + h), tl.load(weights.dt_bias + h)
    norm = tl.load(weights.norm + dv).to(tl.float32)
    if PDL:
        wait_for_input(False)
    if live:
        x_ptr += row.to(tl.int64) * x_stride
        ba_ptr += row.to(tl.int64) * ba_stride
        ring_ptr = state.conv + slot * C.RING * CHANNELS
        q_channels = h // GROUP * C.DK + dk
        k_channels, v_channels = KEYS + q_channels, 2 * KEYS + h * C.DV + dv
        if C.DRAFTS > 0:
            gates_ptr = state.gates + slot * C.RING * 2 * C.HV + h
            folded_ptr = state.folded + slot * C.HV + h
            folded = tl.load(folded_ptr, mask=start > 0, other=0)
            for p in range(folded, start):
                k = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, k_channels, p + 0 * dk, start, dk >= 0, C), 0)
                v = convolve(x_ptr, x_stride, ring_ptr, weights.conv, v_channels, p + 0 * dv, start, dv >= 0, C)
                at = gates_ptr + p % C.RING * 2 * C.HV
                S = _update(S, k, v, tl.load(at), tl.load(at + C.HV))
            tl.store(S_ptrs, S)
            tl.store(folded_ptr, start)
        if count <= C.MOST:
            for t in range(count):
                p = start + t
                q = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, q_channels, p + 0 * dk, start, dk >= 0, C), 0) * (C.DK**-0.5)
                k = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, k_channels, p + 0 * dk, start, dk >= 0, C), 0)
                v = convolve(x_ptr, x_stride, ring_ptr, weights.conv, v_channels, p + 0 * dv, start, dv >= 0, C)
                ba = ba_ptr + t * ba_stride + h
                g, beta = gates(tl.load(ba), tl.load(ba + C.HV), A_log, dt_bias)
                S = _update(S, k, v, g, beta)
                token = x_ptr + t * x_stride
                z = tl.load(token + CHANNELS + h * C.DV + dv).to(tl.float32)
                y = gated_norm(tl.sum(S * q[:, None], 0), z, norm, weights.eps, 0, C.DV)
                out = out_ptr + (row + t).to(tl.int64) * VALUES + h * C.DV + dv
                tl.store(out, y.to(out_ptr.dtype.element_ty))
                # Rows of the ring that no program of this step reads.
                ring = ring_ptr + p % C.RING * CHANNELS
                _store_input(token + v_channels, ring + v_channels)
                if h % GROUP == 0:
                    _store_input(token + q_channels, ring + q_channels)
                    _store_input(token + k_channels, ring + k_channels)
                if C.DRAFTS > 0:
                    at = gates_ptr + p % C.RING * 2 * C.HV
                    tl.store(at, g)
                    tl.store(at + C.HV, beta)
            if C.DRAFTS == 0:
                tl.store(S_ptrs, S)


def decode(a: GatedDeltaInput) -> None:
    """Write `out` and the state of sequences of few new tokens. `dispatch` checks the operands before."""
    _, Hv, Dk, Dv = a.head_shape
    _decode_kernel[(a.sequences.slots.shape[0] * Hv,)](
        a.qkvz, a.ba, a.weights, a.state, a.sequences, a.out, a.qkvz.stride(0), a.ba.stride(0), C=Constants.of(a),
        **launch_options(8 if Dk * Dv >= 8192 else 4, 1, a.pdl),
    )  # fmt: skip
