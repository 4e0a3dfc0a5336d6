"""Gated DeltaNet of prompts and parts of prompts, by chunks of 64 tokens, for ragged batches.

`reference.chunk_gated_delta_rule` has the formulas. There are four kernels:

- the convolution, with the l2 norm. It also writes the work list;
- what a chunk needs of itself: the inverse T of its triangular system, U = T (β V), W = T (β e^G K) and P = Q Kᵀ with its
  decays; all chunks in parallel;
- outputs and states: the chunks of a sequence one after the other, heads and blocks of Dv in parallel;
- the gated norm.

They leave out sequences of few new tokens, which `decode` computes.

**The work list** [1 + chunks, 4] int32, for the kernels after the first: row 0 has the numbers of chunks and of prompts. Row
1 + i has the first row of chunk i, how many tokens its sequence has from there on, and the number of prompt i in the batch. In
CUDA graphs, most sequences may be padding. So a grid has as many programs as `_PROMPTS` prompts need at most. With more prompts,
programs loop over chunks, or over prompts. `disable_licm`: what is the same for all of them would fill registers over the loop.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minirt.device import interpreting
from minirt.kernels.gated_delta.constants import WIDTH, Constants, gated_norm, gates, product, silu, unit
from minirt.kernels.gated_delta.operands import CHUNK, GatedDeltaInput
from minirt.kernels.launch import capability, next_power_of_2, shared_limit, sm_count
from minirt.kernels.prepared import prepared
from minirt.kernels.step.table import MAX_SNAPSHOTS

_BLOCK = 16  # rows of the diagonal blocks that are inverted row by row
_PROMPTS = 8  # prompts up to which each has separate programs
_SPLIT_FROM = 32  # channels of a head: products with fewer columns as bf16 gave wrong results on an H100
_PARTS = 4  # of a chunk, for the norm: small programs, of which many share an SM
_RUN = tl.constexpr(8)  # consecutive tokens of the convolution that a thread computes
_WORK = tl.constexpr(4)  # values of a row of the work list
_ROWS = tl.constexpr(_BLOCK)
_BLOCKS = tl.constexpr(CHUNK // _BLOCK)
_SNAPSHOTS = tl.constexpr(MAX_SNAPSHOTS)


@triton.jit
def _find_prompts(sequences, B, C):
    """Of each sequence: 1 if chunks compute it, else 0, and the number of chunks up to its end."""
    index = tl.arange(0, C.BLOCK_B)
    starts = tl.load(sequences.query_starts + index, mask=index < B, other=0)
    counts = tl.load(sequences.query_starts + index + 1, mask=index < B, other=0) - starts
    slots = tl.load(sequences.slots + index, mask=index < B, other=-1)
    prompts = ((counts > C.MOST) & (slots >= 0)).to(tl.int32)
    return prompts, tl.cumsum(prompts * ((counts + C.CHUNK - 1) // C.CHUNK), 0)


@triton.jit
def _taps(weight_ptr, channel, D: tl.constexpr):
    """The weights of D channels from `channel` on, the oldest token's first: four of [1, D]."""
    channels = channel + tl.arange(0, D)[:, None]
    weight = tl.load(weight_ptr + channels * WIDTH + tl.arange(0, WIDTH)[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(weight, (D, WIDTH // 2, 2)))
    even, odd = tl.split(even), tl.split(odd)
    return even[0][None, :], odd[0][None, :], even[1][None, :], odd[1][None, :]


@triton.jit
def _convolve_head(x_ptr, x_stride, ring_ptr, weight_ptr, out_ptr, channel, first, start, count, scale, C, D: tl.constexpr):
    """A chunk of one head's D channels from `channel` on. scale None: no l2 norm.

    A row of the tile is a run of consecutive tokens, whose inputs are loaded once, with the three before them.
    """
    channels = channel + tl.arange(0, D)[None, :]
    taps = _taps(weight_ptr, channel, D)
    t = first + tl.arange(0, C.CHUNK // _RUN)[:, None] * _RUN
    x_ptrs, out_ptrs = x_ptr + t.to(tl.int64) * x_stride + channels, out_ptr + t.to(tl.int64) * C.CHANNELS + channels
    inputs = ()
    for j in tl.static_range(1 - WIDTH, _RUN):
        ptrs, inside = x_ptrs + j * x_stride, t + j < count
        if j < 0:  # before a sequence's first new token are inputs of earlier steps
            position = start + t + j
            ring_ptrs = ring_ptr + (position + C.RING) % C.RING * C.CHANNELS + channels
            ptrs, inside = tl.where(t + j < 0, ring_ptrs, ptrs), inside & (position >= 0)
        inputs += (tl.load(ptrs, mask=inside, other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(_RUN):
        y = inputs[j].to(tl.float32) * taps[0]
        for tap in tl.static_range(1, WIDTH):
            y += inputs[j + tap].to(tl.float32) * taps[tap]
        y = silu(y)
        if scale is not None:
            y = unit(y, 1) * scale
        tl.store(out_ptrs + j * C.CHANNELS, y.to(out_ptr.dtype.element_ty), mask=t + j < count)


@prepared
@triton.jit(do_not_specialize=["B"])
def _delta_conv_kernel(x_ptr, weights, state, sequences, qkv_ptr, work_ptr, B, x_stride, C):
    """One head (of q, k or v) of a chunk: convolution, SiLU, and of q and k the l2 norm; q is scaled by 1/√Dk.

    The programs of the first head write the work list.
    """
    head = tl.program_id(0)
    prompts, ends = _find_prompts(sequences, B, C)
    chunks = tl.max(ends, 0)
    if (head == 0) & (tl.program_id(1) == 0):
        tl.store(work_ptr, chunks)
        tl.store(work_ptr + 1, tl.sum(prompts, 0))
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), disable_licm=True):
        done = ends <= chunk  # sequences whose chunks come before
        b = tl.sum(done.to(tl.int32), 0)
        first = (chunk - tl.max(tl.where(done, ends, 0), 0)) * C.CHUNK
        row = tl.load(sequences.query_starts + b)
        count = tl.load(sequences.query_starts + b + 1) - row
        start = tl.load(sequences.seq_lens + b) - count
        ring_ptr = state.conv + tl.load(sequences.slots + b).to(tl.int64) * C.RING * C.CHANNELS
        if head == 0:
            tl.store(work_ptr + (1 + chunk) * _WORK, row + first)
            tl.store(work_ptr + (1 + chunk) * _WORK + 1, count - first)
            if first == 0:
                prompt = tl.sum(tl.where(done, prompts, 0), 0)
                tl.store(work_ptr + (1 + prompt) * _WORK + 2, b)
        inputs, outputs = x_ptr + row.to(tl.int64) * x_stride, qkv_ptr + row.to(tl.int64) * C.CHANNELS
        if head < 2 * C.HK:
            scale = tl.where(head < C.HK, C.DK**-0.5, 1.0)
            _convolve_head(inputs, x_stride, ring_ptr, weights.conv, outputs, head * C.DK, first, start, count, scale, C, C.DK)
        else:
            channel = 2 * C.KEYS + (head - 2 * C.HK) * C.DV
            _convolve_head(inputs, x_stride, ring_ptr, weights.conv, outputs, channel, first, start, count, None, C, C.DV)


@triton.jit
def _listed_chunk(work_ptr, chunk):
    """(first row, number of its sequence's tokens from there on) of a chunk in the work list."""
    at = work_ptr + (1 + chunk) * _WORK
    return tl.load(at).to(tl.int64), tl.load(at + 1)


@triton.jit
def _inverse(A, C):
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
    M = product(D, tl.where(diagonal, 0.0, A), C)
    D -= product(M, D, C)  # (I − M) D; powers of M commute
    square = product(M, M, C)
    return D + product(square, D, C)


@prepared
@triton.jit(do_not_specialize=["ba_stride"])
def _delta_prepare_kernel(qkv_ptr, ba_ptr, weights, work_ptr, u_ptr, w_ptr, p_ptr, decay_ptr, ba_stride, C):
    """One value head of a chunk: U, W, P = Q Kᵀ with its decays, and G, the running sums of g."""
    h = tl.program_id(0)
    for chunk in tl.range(tl.program_id(1), tl.load(work_ptr), tl.num_programs(1), disable_licm=True):
        row, left = _listed_chunk(work_ptr, chunk)
        i = tl.arange(0, C.CHUNK)
        inside = i < left
        token = row + i
        dk, dv = tl.arange(0, C.DK)[None, :], tl.arange(0, C.DV)[None, :]
        at = qkv_ptr + token[:, None] * C.CHANNELS
        keys = at + h // C.GROUP * C.DK + dk
        k = tl.load(keys + C.KEYS, mask=inside[:, None], other=0.0)
        ba = ba_ptr + token * ba_stride + h
        b, a = tl.load(ba, mask=inside, other=0.0), tl.load(ba + C.HV, mask=inside, other=0.0)
        g, beta = gates(b, a, tl.load(weights.A_log + h), tl.load(weights.dt_bias + h))
        G = tl.cumsum(tl.where(inside, g, 0.0), 0)
        beta = tl.where(inside, beta, 0.0)
        head = token * C.HV + h
        tl.store(decay_ptr + head, G, mask=inside)
        seen = (i[:, None] >= i[None, :]) & inside[:, None]
        decay = tl.exp(tl.where(seen, G[:, None] - G[None, :], 0.0))
        q = tl.load(keys, mask=inside[:, None], other=0.0)
        P = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * decay, 0.0)
        tl.store(p_ptr + head[:, None] * C.CHUNK + i[None, :], P.to(p_ptr.dtype.element_ty), mask=inside[:, None])
        A = tl.dot(k, tl.trans(k), input_precision=C.PRECISION) * decay * beta[:, None]
        T = _inverse(tl.where(i[:, None] > i[None, :], A, 0.0), C) * beta[None, :]
        v = tl.load(at + 2 * C.KEYS + h * C.DV + dv, mask=inside[:, None], other=0.0)
        u = product(T, v, C)
        tl.store(u_ptr + head[:, None] * C.DV + dv, u.to(u_ptr.dtype.element_ty), mask=inside[:, None])
        w = product(T * tl.exp(G)[None, :], k, C)
        tl.store(w_ptr + head[:, None] * C.DK + dk, w.to(w_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def keep_inputs(x_ptr, x_stride, ring_ptr, channels, start, count, C):
    """Store a sequence's last inputs in its ring, for `channels`."""
    t = (count - 4 + tl.arange(0, 4))[:, None]
    inside = t >= 0
    values = tl.load(x_ptr + t.to(tl.int64) * x_stride + channels[None, :], mask=inside)
    tl.store(ring_ptr + (start + t) % C.RING * C.CHANNELS + channels[None, :], values, mask=inside)


@prepared
@triton.jit
def _delta_state_kernel(x_ptr, qkv_ptr, u_ptr, w_ptr, p_ptr, decay_ptr, state, sequences, work_ptr, out_ptr, x_stride, C):
    """BLOCK_V channels of one value head of a sequence: its outputs, before the norm, its next state and its snapshots."""
    h = tl.program_id(1)
    for prompt in tl.range(tl.program_id(2), tl.load(work_ptr + 1), tl.num_programs(2), disable_licm=True):
        b = tl.load(work_ptr + (1 + prompt) * _WORK + 2)
        row = tl.load(sequences.query_starts + b).to(tl.int64)
        count = (tl.load(sequences.query_starts + b + 1) - row).to(tl.int32)
        start = tl.load(sequences.seq_lens + b) - count
        slot = tl.load(sequences.slots + b).to(tl.int64)
        inputs = x_ptr + row * x_stride
        begin, num_snapshots = 0, 0
        if sequences.snapshots is not None:
            snapshot_ptr = sequences.snapshots + b * (2 * _SNAPSHOTS)
            for j in tl.static_range(_SNAPSHOTS):
                num_snapshots += (tl.load(snapshot_ptr + 2 * j) >= 0).to(tl.int32)
        dk, dv = tl.arange(0, C.DK), tl.program_id(0) * C.BLOCK_V + tl.arange(0, C.BLOCK_V)
        matrix = state.recurrent + (h * C.DK + dk[:, None]) * C.DV + dv[None, :]
        S = tl.load(matrix + slot * C.HV * C.DK * C.DV, mask=dk[:, None] < tl.where(start > 0, C.DK, 0), other=0.0)
        i = tl.arange(0, C.CHUNK)
        q_channels = h // C.GROUP * C.DK + dk
        last = tl.load(decay_ptr + (row + tl.minimum(C.CHUNK, count) - 1) * C.HV + h)
        # Up to each snapshot, and on to the end. A store within one loop would take registers from its products.
        for part in range(num_snapshots + 1):
            end, target = count, slot
            if sequences.snapshots is not None:
                within = part < num_snapshots
                target = tl.load(snapshot_ptr + 2 * part, mask=within, other=0).to(tl.int64)
                target = tl.where(within, target, slot)
                end = tl.where(within, tl.load(snapshot_ptr + 2 * part + 1, mask=within, other=0), count)
            for first in range(begin, end, C.CHUNK):
                inside = first + i < count
                token = row + first + i
                head = token * C.HV + h
                G, now = tl.load(decay_ptr + head, mask=inside, other=0.0), last
                last = tl.load(decay_ptr + (row + tl.minimum(first + 2 * C.CHUNK, count) - 1) * C.HV + h)  # of the next chunk
                w = tl.load(w_ptr + head[:, None] * C.DK + dk[None, :], mask=inside[:, None], other=0.0)
                u = tl.load(u_ptr + head[:, None] * C.DV + dv[None, :], mask=inside[:, None], other=0.0)
                change = u.to(tl.float32) - product(w, S, C)
                at = qkv_ptr + token[:, None] * C.CHANNELS + q_channels[None, :]
                q = tl.load(at, mask=inside[:, None], other=0.0)
                o = product(q, S, C) * tl.exp(G)[:, None]
                P = tl.load(p_ptr + head[:, None] * C.CHUNK + i[None, :], mask=inside[:, None], other=0.0)
                o += product(P, change, C)
                out = out_ptr + token[:, None] * C.VALUES + h * C.DV + dv[None, :]
                tl.store(out, o.to(out_ptr.dtype.element_ty), mask=inside[:, None])
                k = tl.load(at + C.KEYS, mask=inside[:, None], other=0.0)
                change *= tl.exp(tl.where(inside, now - G, 0.0))[:, None]
                S = S * tl.exp(now) + product(tl.trans(k), change, C)
            tl.store(matrix + target * C.HV * C.DK * C.DV, S)
            ring_ptr = state.conv + target * C.RING * C.CHANNELS
            keep_inputs(inputs, x_stride, ring_ptr, 2 * C.KEYS + h * C.DV + dv, start, end, C)
            if tl.program_id(0) == 0:
                if h % C.GROUP == 0:
                    keep_inputs(inputs, x_stride, ring_ptr, q_channels, start, end, C)
                    keep_inputs(inputs, x_stride, ring_ptr, C.KEYS + q_channels, start, end, C)
                if C.DRAFTS > 0:
                    tl.store(state.folded + target * C.HV + h, start + end)
            begin = end


@prepared
@triton.jit
def _delta_norm_kernel(x_ptr, weights, work_ptr, out_ptr, x_stride, C, PARTS: tl.constexpr):
    """The gated norm of one value head of a part of a chunk, in place."""
    ROWS: tl.constexpr = C.CHUNK // PARTS
    i = tl.program_id(1) % PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    dv = tl.program_id(0) * C.DV + tl.arange(0, C.DV)[None, :]
    norm = tl.load(weights.norm + tl.arange(0, C.DV)).to(tl.float32)[None, :]
    for chunk in range(tl.program_id(1) // PARTS, tl.load(work_ptr), tl.num_programs(1) // PARTS):
        row, left = _listed_chunk(work_ptr, chunk)
        inside, token = i < left, row + i
        out_ptrs = out_ptr + token * C.VALUES + dv
        o = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x_ptr + token * x_stride + 2 * C.KEYS + C.VALUES + dv, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptrs, gated_norm(o, z, norm, weights.eps, 1, C.DV).to(out_ptr.dtype.element_ty), mask=inside)


class _StateConfig(NamedTuple):
    """block_v: channels of Dv of a program. num_stages: of loads; 3 load two chunks ahead."""

    block_v: int
    num_warps: int
    num_stages: int


def _state_config(a: GatedDeltaInput) -> _StateConfig:
    """The narrowest programs that all run at once, one on each SM; if there are more, two share an SM and none loads ahead.

    No result depends on it. It depends on the model, the GPU and the number of prompts only, as `dispatch.CHUNK_PROMPTS`
    declares, so that no step after warm-up compiles another variant. Prompts are counted as if each were as long as the longest;
    in a CUDA graph, whose sequences may all have any length, as one.
    """
    _, Hv, Dk, Dv = a.head_shape
    dtype, device = a.qkvz.dtype, a.qkvz.device
    prompts = max(1, (a.qkvz.shape[0] + a.max_query_len // 2) // a.max_query_len)
    if dtype == torch.float32:
        return _StateConfig(min(Dv, 32), 8, 1)
    if dtype != torch.bfloat16 or max(Dk, Dv) < 128 or shared_limit(capability(device)) < 200 << 10:
        return _StateConfig(min(Dv, 32), 4, 1)
    for block_v in (min(Dv, 32), min(Dv, 64)):
        if prompts * Hv * Dv // block_v <= sm_count(device):
            return _StateConfig(block_v, 4, 3)
    return _StateConfig(min(Dv, 64), 4, 1)


def chunk(a: GatedDeltaInput) -> None:
    """Write `out` and the state of sequences of many new tokens. `dispatch` checks the operands before."""
    (T, _), (Hk, Hv, Dk, Dv), B, x = a.qkvz.shape, a.head_shape, a.sequences.slots.shape[0], a.qkvz
    wide = x.dtype == torch.float32
    config = _state_config(a)
    C = Constants.of(
        a, BLOCK_B=max(256, next_power_of_2(B)), BLOCK_V=config.block_v, CHUNK=CHUNK,
        PRECISION="ieee" if wide or interpreting() else "tf32", SPLIT=x.dtype == torch.bfloat16 and min(Dk, Dv) >= _SPLIT_FROM,
    )  # fmt: skip
    qkv = x.new_empty(T, a.state.conv.shape[2])
    u, w, p = x.new_empty(T, Hv, Dv), x.new_empty(T, Hv, Dk), x.new_empty(T, Hv, CHUNK)
    decay = x.new_empty(T, Hv, dtype=torch.float32)
    x_stride, ba_stride = x.stride(0), a.ba.stride(0)
    work = a.sequences.slots.new_empty(1 + T // CHUNK + B, _WORK.value)
    prompts = min(B, _PROMPTS)
    chunks = T // CHUNK + prompts  # the most that these prompts have
    _delta_conv_kernel[(2 * Hk + Hv, chunks)](
        x, a.weights, a.state, a.sequences, qkv, work, B, x_stride, C, num_warps=4, enable_fp_fusion=False
    )
    _delta_prepare_kernel[(Hv, chunks)](qkv, a.ba, a.weights, work, u, w, p, decay, ba_stride, C, num_warps=8 if wide else 4)
    _delta_state_kernel[(Dv // C.BLOCK_V, Hv, prompts)](
        x, qkv, u, w, p, decay, a.state, a.sequences, work, a.out, x_stride, C,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    _delta_norm_kernel[(Hv, chunks * _PARTS)](
        x, a.weights, work, a.out, x_stride, C, PARTS=_PARTS, num_warps=4, enable_fp_fusion=False
    )
