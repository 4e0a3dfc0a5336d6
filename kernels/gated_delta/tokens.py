"""Gated DeltaNet of an invariant step: each sequence's new tokens one after the other, in one form for one token and for prompts.

The chunks of `chunk` round a state in another way than single tokens do. Here a token's bits do not depend on how many are
computed with it, and those of a prompt take longer: they are as many steps of one program, which keeps the matrix in registers.
"""

import triton
import triton.language as tl

from minirt.kernels.gated_delta.chunk import keep_inputs
from minirt.kernels.gated_delta.constants import WIDTH, Constants, convolve, gated_norm, gates, silu, unit
from minirt.kernels.gated_delta.decode import token
from minirt.kernels.gated_delta.operands import CHUNK, GatedDeltaInput
from minirt.kernels.launch import launch_options
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared
from minirt.kernels.step.table import MAX_SNAPSHOTS

_SNAPSHOTS = tl.constexpr(MAX_SNAPSHOTS)


@triton.jit
def _sequence(sequences, b):
    """(first row, number of new tokens, position of the first, slot; no tokens if there is no slot)."""
    row = tl.load(sequences.query_starts + b)
    count = tl.load(sequences.query_starts + b + 1) - row
    slot = tl.load(sequences.slots + b).to(tl.int64)
    return row, tl.where(slot >= 0, count, 0), tl.load(sequences.seq_lens + b) - count, slot


@triton.jit
def _keep(x_ptr, x_stride, conv_ptr, slot, h, start, count, C):
    """Store the last inputs of one value head, and of its key head, in the ring of a slot."""
    ring_ptr = conv_ptr + slot * C.RING * C.CHANNELS
    q_channels = h // C.GROUP * C.DK + tl.arange(0, C.DK)
    keep_inputs(x_ptr, x_stride, ring_ptr, 2 * C.KEYS + h * C.DV + tl.arange(0, C.DV), start, count, C)
    if h % C.GROUP == 0:
        keep_inputs(x_ptr, x_stride, ring_ptr, q_channels, start, count, C)
        keep_inputs(x_ptr, x_stride, ring_ptr, C.KEYS + q_channels, start, count, C)


@triton.jit
def _taps(weight_ptr, channels):
    """The weights of the convolution, the oldest input's first."""
    taps = ()
    for j in tl.static_range(WIDTH):
        taps += (tl.load(weight_ptr + channels * WIDTH + j).to(tl.float32),)
    return taps


@triton.jit
def _older(ring_ptr, channels, start, live, C):
    """The three inputs before `start`, the oldest first, in fp32."""
    inputs = ()
    for j in tl.static_range(WIDTH - 1):
        before = start - (WIDTH - 1 - j)
        at = ring_ptr + (before + C.RING) % C.RING * C.CHANNELS + channels
        inputs += (tl.load(at, mask=channels < tl.where(live & (before >= 0), C.CHANNELS, 0), other=0.0).to(tl.float32),)
    return inputs


@triton.jit
def _convolved(older, x, taps):
    """SiLU of the convolution, as `convolve`, and the inputs before the next token."""
    y = older[0] * taps[0] + older[1] * taps[1] + older[2] * taps[2] + x * taps[3]
    return silu(y), (older[1], older[2], x)


@prepared
@triton.jit(do_not_specialize=["x_stride", "ba_stride"])
def _delta_tokens_kernel(x_ptr, ba_ptr, weights, state, sequences, out_ptr, x_stride, ba_stride, C, PDL: tl.constexpr):
    """One value head of one sequence. If steps can be undone (see `operands`), tokens of earlier steps are folded first."""
    b, h = tl.program_id(0) // C.HV, tl.program_id(0) % C.HV
    row, count, start, slot = _sequence(sequences, b)
    dk, dv = tl.arange(0, C.DK), tl.arange(0, C.DV)
    at = (h * C.DK + dk[:, None]) * C.DV + dv[None, :]
    slot = tl.maximum(slot, 0)
    S_ptrs = state.recurrent + slot * C.HV * C.DK * C.DV + at
    ring_ptr = state.conv + slot * C.RING * C.CHANNELS
    q_channels = h // C.GROUP * C.DK + dk
    k_channels, v_channels = C.KEYS + q_channels, 2 * C.KEYS + h * C.DV + dv
    # The state and older inputs are those of the step before, so they are read while the projections run.
    S = tl.load(S_ptrs, mask=dk[:, None] < tl.where((count > 0) & (start > 0), C.DK, 0), other=0.0)
    qs, ks = _older(ring_ptr, q_channels, start, count > 0, C), _older(ring_ptr, k_channels, start, count > 0, C)
    vs = _older(ring_ptr, v_channels, start, count > 0, C)
    q_taps, k_taps, v_taps = _taps(weights.conv, q_channels), _taps(weights.conv, k_channels), _taps(weights.conv, v_channels)
    A_log, dt_bias = tl.load(weights.A_log + h), tl.load(weights.dt_bias + h)
    norm = tl.load(weights.norm + dv).to(tl.float32)
    if PDL:
        wait_for_input(False)
    if count > 0:
        x_ptr += row.to(tl.int64) * x_stride
        ba_ptr += row.to(tl.int64) * ba_stride + h
        if C.DRAFTS > 0:
            gates_ptr = state.gates + slot * C.RING * 2 * C.HV + h
            folded_ptr = state.folded + slot * C.HV + h
            for p in range(tl.load(folded_ptr, mask=start > 0, other=0), start):
                k = unit(convolve(x_ptr, x_stride, ring_ptr, weights.conv, k_channels, p + 0 * dk, start, dk >= 0, C), 0)
                v = convolve(x_ptr, x_stride, ring_ptr, weights.conv, v_channels, p + 0 * dv, start, dv >= 0, C)
                gate = gates_ptr + p % C.RING * 2 * C.HV
                S, _ = token(S, k, k, v, tl.load(gate), tl.load(gate + C.HV), 1.0)
            tl.store(S_ptrs, S)
            tl.store(folded_ptr, start)
        x_row, out_ptrs = x_ptr, out_ptr + row.to(tl.int64) * C.VALUES + h * C.DV + dv
        for t in range(count):
            raw_q, raw_k = tl.load(x_row + q_channels).to(tl.float32), tl.load(x_row + k_channels).to(tl.float32)
            raw_v, z = tl.load(x_row + v_channels).to(tl.float32), tl.load(x_row + C.CHANNELS + h * C.DV + dv).to(tl.float32)
            g, beta = gates(tl.load(ba_ptr), tl.load(ba_ptr + C.HV), A_log, dt_bias)
            q, qs = _convolved(qs, raw_q, q_taps)
            k, ks = _convolved(ks, raw_k, k_taps)
            v, vs = _convolved(vs, raw_v, v_taps)
            S, o = token(S, unit(q, 0), unit(k, 0), v, g, beta, C.DK**-0.5)
            y = gated_norm(o, z, norm, weights.eps, 0, C.DV)
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty))
            x_row += x_stride
            ba_ptr += ba_stride
            out_ptrs += C.VALUES
            if C.DRAFTS > 0:
                gate = gates_ptr + (start + t) % C.RING * 2 * C.HV
                tl.store(gate, g)
                tl.store(gate + C.HV, beta)
            if sequences.snapshots is not None:
                for i in tl.static_range(_SNAPSHOTS):
                    snapshot_ptr = sequences.snapshots + (b * _SNAPSHOTS + i) * 2
                    target, end = tl.load(snapshot_ptr).to(tl.int64), tl.load(snapshot_ptr + 1)
                    if (target >= 0) & (end == t + 1):
                        tl.store(state.recurrent + target * C.HV * C.DK * C.DV + at, S)
                        _keep(x_ptr, x_stride, state.conv, target, h, start, end, C)
                        if C.DRAFTS > 0:
                            tl.store(state.folded + target * C.HV + h, start + end)
        if count > C.DRAFTS:
            tl.store(S_ptrs, S)
            if C.DRAFTS > 0:
                tl.store(folded_ptr, start + count)


@prepared
@triton.jit(do_not_specialize=["x_stride"])
def _delta_inputs_kernel(x_ptr, state, sequences, x_stride, C, PDL: tl.constexpr):
    """The last inputs of each sequence, in its ring, which programs of the kernel before read: three, and those to be undone."""
    b, h = tl.program_id(0) // C.HV, tl.program_id(0) % C.HV
    row, count, start, slot = _sequence(sequences, b)
    if PDL:
        wait_for_input(False)
    if count > 0:
        for i in range((tl.minimum(count, max(C.DRAFTS, 4)) + 3) // 4):
            _keep(x_ptr + row.to(tl.int64) * x_stride, x_stride, state.conv, slot, h, start, count - 4 * i, C)


def tokens(a: GatedDeltaInput) -> None:
    """Write `out` and the state of all sequences. `dispatch` checks the operands before."""
    grid, C, options = (a.sequences.slots.shape[0] * a.head_shape[1],), Constants.of(a, CHUNK=CHUNK), launch_options(4, 1, a.pdl)
    _delta_tokens_kernel[grid](
        a.qkvz, a.ba, a.weights, a.state, a.sequences, a.out, a.qkvz.stride(0), a.ba.stride(0), C=C, enable_fp_fusion=False,
        **options,
    )  # fmt: skip
    _delta_inputs_kernel[grid](a.qkvz, a.state, a.sequences, a.qkvz.stride(0), C=C, **options)
