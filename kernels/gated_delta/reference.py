"""Gated DeltaNet (Yang et al. 2024) in eager PyTorch. Rounding follows transformers.

S, the state of a value head, is a matrix [Dk, Dv]. A token decays it by e^g, then replaces what it holds for the token's key k,
in part (β), by the value v: S ← e^g S; S ← S + k · (β (v − Sᵀk))ᵀ. Its output is Sᵀq.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minirt.kernels.gated_delta.operands import CHUNK, L2_EPS, WIDTH, GatedDeltaState, GatedDeltaWeights
from minirt.kernels.step.rows import copy_rows
from minirt.kernels.step.table import MAX_SNAPSHOTS


def causal_conv1d(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution of each channel: x [B, T, C] after `history` [B, 3, C], weight [C, 4] → [B, T, C]."""
    channels = torch.cat((history, x), 1).transpose(1, 2)
    return F.silu(F.conv1d(channels, weight.unsqueeze(1), groups=weight.shape[0])).transpose(1, 2)


def l2_norm(x: Tensor) -> Tensor:
    """Rows divided by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gates(b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) of each value head: −e^A_log · softplus(a + dt_bias), and sigmoid(b) in b's dtype; [..., Hv] each."""
    return -A_log.exp() * F.softplus(a.to(A_log.dtype) + dt_bias), b.sigmoid()


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension with `weight`, then times SiLU of `gate`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)


def recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: q, k [B, T, H, Dk], v [B, T, H, Dv], g, beta [B, T, H], state [B, H, Dk, Dv] → out like v, and the state.

    q and k are normalized; q is also scaled by 1/√Dk. All are fp32, or fp64.
    """
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        held = (state * k[:, t].unsqueeze(-1)).sum(-2)
        change = (v[:, t] - held) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        out[:, t] = (state * q[:, t].unsqueeze(-1)).sum(-2)
    return out, state


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """`recurrent_gated_delta_rule` by chunks of tokens, in matrix products (the WY representation, Yang et al. 2024).

    Within a chunk, with G the running sum of g: A_ij = β_i (k_i · k_j) e^(G_i − G_j) for j < i, T = (I + A)⁻¹, U = T (β V),
    W = T (β e^G K). Then the changes of the state are V' = U − W S, the outputs (e^G Q) S + (Q Kᵀ e^(G_i − G_j), j ≤ i) V', and
    the next state is e^(G_last) S + (e^(G_last − G) K)ᵀ V'.
    """
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))  # [B, H, T, ...]
    outs = []
    for first in range(0, q.shape[2], chunk):
        part = slice(first, first + chunk)
        Q, K, V, b = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part, None]
        G = g[:, :, part].cumsum(-1)
        decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).tril().exp().tril()  # e^(a difference): no factor overflows
        A = (b * (K @ K.mT) * decay).tril(-1)
        rise = G.exp().unsqueeze(-1)
        U, W = torch.linalg.solve_triangular(A, torch.cat((b * V, b * rise * K), -1), upper=False, unitriangular=True).split(
            (V.shape[-1], K.shape[-1]), -1
        )
        change = U - W @ state
        outs.append((rise * Q) @ state + ((Q @ K.mT) * decay) @ change)
        last = G[:, :, -1:]
        state = last.exp().unsqueeze(-1) * state + ((last - G).exp().unsqueeze(-1) * K).mT @ change
    return torch.cat(outs, 2).transpose(1, 2), state


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: GatedDeltaWeights, state: GatedDeltaState, query_lens: Sequence[int],
    seq_lens: Sequence[int], slots: Sequence[int], snapshots: Sequence[Sequence[tuple[int, int]]] = (),
) -> Tensor:  # fmt: skip
    """A step of a layer after its projections, with the gated norm: qkvz [T, 2·Hk·Dk + 2·Hv·Dv], ba [T, 2·Hv] → [T, Hv·Dv].

    Updates the state of the sequences' slots, see `operands`. A sequence of slot −1 begins without a state and stores none.
    Several new tokens are computed by chunks, one alone by itself; sequences of as many new tokens together.

    Args:
        snapshots: (row, number of tokens) of each sequence's, as in `GatedDeltaSequences`. A sequence with snapshots is computed
            in parts, with a copy after each. Empty: no sequence has one.
    """
    layer = _Layer(weights, state)
    out, start = qkvz.new_zeros(qkvz.shape[0], layer.Hv * layer.Dv), 0
    parts = [defaultdict[int, list[tuple[int, int, int]]](list) for _ in range(1 + MAX_SNAPSHOTS)]  # by number of tokens
    copies = [list[tuple[int, int]]() for _ in parts]  # after each part
    for b, (count, length, slot) in enumerate(zip(query_lens, seq_lens, slots, strict=True)):
        begin, copied = 0, snapshots[b] if snapshots else ()
        for part, (row, end) in enumerate([*copied, (-1, count)]):
            if begin < end:
                parts[part][end - begin].append((start + begin, length - count + begin, slot))
            if row >= 0:
                copies[part].append((slot, row))
            begin = end
        start += count
    for groups, pairs in zip(parts, copies, strict=True):
        for count, members in groups.items():
            first, positions, rows = torch.tensor(members, device=qkvz.device).unbind(1)
            at = first.unsqueeze(1) + torch.arange(count, device=qkvz.device)
            out[at] = layer.step(qkvz[at], ba[at], positions, rows)
        for slot, row in pairs:
            copy_rows([tensor for tensor in state if tensor is not None], slot, row)
    return out


class _Layer:
    """The weights and the states of a layer."""

    def __init__(self, weights: GatedDeltaWeights, state: GatedDeltaState) -> None:
        self.weights, self.state = weights, state
        _, self.Hv, self.Dk, self.Dv = state.recurrent.shape
        _, self.ring, self.channels = state.conv.shape
        self.Hk = (self.channels - self.Hv * self.Dv) // (2 * self.Dk)

    def step(self, qkvz: Tensor, ba: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """The tokens [B, T, …] of sequences with T new tokens each, the first ones at `positions` [B]."""
        (B, T, _), state = qkvz.shape, self.state
        x, z = qkvz.split((self.channels, self.Hv * self.Dv), -1)
        A_log, dt_bias = self.weights.A_log, self.weights.dt_bias
        b, a = ba.chunk(2, -1)
        g, beta = gates(b, a, A_log, dt_bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = slots.clamp(min=0)
        begins = (positions.eq(0) | slots.lt(0)).view(B, 1, 1, 1)
        S = torch.where(begins, 0, state.recurrent[rows].to(wide))
        stored = slots >= 0
        self._fold(S, positions, slots)
        o, after = self._rule(x, self._history(positions, slots), g, beta, S)
        undone = state.drafts >= T
        state.recurrent[slots[stored]] = (S if undone else after)[stored].to(state.recurrent.dtype)
        kept = torch.arange(max(0, T - self.ring), T, device=x.device)
        at = slots[stored, None], (positions[stored, None] + kept) % self.ring
        state.conv[at] = x[stored][:, kept].to(state.conv.dtype)
        if state.gates is not None and state.folded is not None:
            state.gates[at] = torch.stack((g, beta.to(g.dtype)), 2)[stored][:, kept].to(state.gates.dtype)
            now = positions if undone else positions + T
            state.folded[slots[stored]] = now[stored, None].to(state.folded.dtype)
        y = gated_rms_norm(o.to(x.dtype), z.unflatten(-1, (self.Hv, self.Dv)), self.weights.norm, self.weights.eps)
        return y.flatten(2)

    def _history(self, positions: Tensor, slots: Tensor) -> Tensor:
        """The three inputs before `positions` [B]: [B, 3, C]. Before position 0 they are zeros."""
        before = positions.unsqueeze(1) + torch.arange(1 - WIDTH, 0, device=positions.device)
        kept = self.state.conv[slots.clamp(min=0).unsqueeze(1), before % self.ring]
        return torch.where(((before >= 0) & (slots >= 0).unsqueeze(1)).unsqueeze(-1), kept, 0)

    def _rule(self, x: Tensor, history: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [B, T, Hv, Dv] of raw inputs [B, T, C], and the state after them."""
        keys, values = self.Hk * self.Dk, self.Hv * self.Dv
        y = causal_conv1d(x, history.to(x.dtype), self.weights.conv).to(S.dtype)
        q, k, v = y.split((keys, keys, values), -1)
        q, k = (l2_norm(heads.unflatten(-1, (self.Hk, self.Dk))).repeat_interleave(self.Hv // self.Hk, 2) for heads in (q, k))
        rule = recurrent_gated_delta_rule if x.shape[1] == 1 else chunk_gated_delta_rule
        return rule(q * self.Dk**-0.5, k, v.unflatten(-1, (self.Hv, self.Dv)), g.to(S.dtype), beta.to(S.dtype), S)

    def _fold(self, S: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Fold the tokens before `positions` that S does not hold yet into S, in place."""
        state = self.state
        if state.gates is None or state.folded is None:
            return
        for i, (slot, end) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            first = int(state.folded[slot, 0]) if slot >= 0 and end else end
            if first < end:
                at = torch.arange(first, end, device=S.device) % self.ring
                history = self._history(positions[i : i + 1] - (end - first), slots[i : i + 1])
                g, beta = state.gates[slot, at].unsqueeze(0).unbind(2)
                x = state.conv[slot, at].unsqueeze(0).to(self.weights.conv.dtype)
                S[i : i + 1] = self._rule(x, history, g, beta, S[i : i + 1])[1]
