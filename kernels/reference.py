"""The eager PyTorch definition of the operations. Eager layers run it; tests and benchmarks compare with it.

Elsewhere: operations of folders with a `reference.py`, and steps (`step/table.py`).

Rounding follows Hugging Face transformers: norms normalize in fp32, cast to the activation dtype, then scale; rotary embedding
rotates halves in the activation dtype; softmax is in fp32.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0  # the largest finite e4m3 value; the format has NaN and no infinity
FP8_BLOCK = 128  # rows and columns of a block with one scale
INT4_CHUNK = 128  # columns that are packed together
INT4_GROUPS = (128, 64, 32)  # columns that share a scale
INT4_MAX_TOKENS = 256  # of a step whose kernels unpack weights as they multiply; on Hopper, of any step
INT4_ZERO = 8  # the zero point of symmetric weights
# dtypes of the scale words of weights of 4 bits: of integers, of symmetric ones with scales of 16 bits, of MXFP4
WORDS = (torch.int32, torch.bfloat16, torch.float16, torch.uint32)
MX_GROUP = 32  # columns that share a scale in MXFP4
MX_LARGEST = 190  # the largest byte of a scale, 2^63, that kernels take: some multiply by 2^64 times the scale, in bf16
FEW_TOKENS = 4  # the most that `few_tokens` calls few
_EXACT_SCORES = 1 << 24  # scores that `_exact_attention` holds at a time


# The formulas of `activations.ACTIVATIONS`.
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # fmt: skip


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [V, H] for `tokens` [T] → [T, H]."""
    return F.embedding(tokens, table)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x` [..., H] with `weight` [H]; None: without a weight."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def norm_residual(y: Tensor, weight: Tensor, eps: float, residual: Tensor, factor: Tensor | None = None) -> Tensor:
    """factor · (residual + rms_norm(y)): the norm after a layer, before its residual is added (Gemma's sandwich norms). All
    [..., H], the factor [1] or None."""
    y = residual + rms_norm(y, weight, eps)
    return y if factor is None else y * factor


def add_residual(x: Tensor, y: Tensor, multiplier: float = 1.0) -> Tensor:
    """x + multiplier · y."""
    return x + (y if multiplier == 1.0 else y * multiplier)


def cap_logits(logits: Tensor, multiplier: float = 1.0, softcap: float = 0.0) -> Tensor:
    """Logits times `multiplier`, then softcap · tanh(logits / softcap) (Gemma 2); softcap 0: no cap."""
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap == 0.0 else softcap * torch.tanh(logits / softcap)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, quantize: bool | None = None
) -> Tensor:
    """x [T, K] · weightᵀ [N, K] + bias [N] → [T, N].

    With `scale` fp32 the weight is fp8: `scale` [N] see `linear_fp8`, `scale` [S, ⌈K / 128⌉] see `linear_fp8_blocks`. With
    other dtypes of `scale` it has 4 bits: see `dequantize_mxfp4` for uint32, else `dequantize_int4`; activations are then never
    quantized.
    """
    if scale is None:
        return F.linear(x, weight, bias)
    if scale.dtype in WORDS:
        dequantize = dequantize_mxfp4 if scale.dtype == torch.uint32 else dequantize_int4
        return F.linear(x, dequantize(weight, scale, x.shape[1], x.dtype), bias)
    product = linear_fp8 if scale.ndim == 1 else linear_fp8_blocks
    return product(x, weight, scale, bias, quantize)


def weight_format(weight: Tensor, scale: Tensor | None, itemsize: int) -> str:
    """The name of a weight's format, as in `regimes.Limits`. itemsize: bytes of an activation."""
    if weight.dtype is torch.float8_e4m3fn:
        return "fp8" if scale is None or scale.ndim < weight.ndim else "fp8_blocks"
    if weight.dtype is torch.int16:
        return "int4" if itemsize == 2 else "int4_fp32"
    return "fp16" if itemsize == 2 else "fp32"


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, quantize: bool | None = None) -> Tensor:
    """x [T, K] · (weight · scale)ᵀ + bias [N] → [T, N]: weight [N, K] e4m3, scale [N] fp32.

    Two or more tokens are quantized first, each with a separate scale (`quantize_fp8`), because tensor cores multiply fp8 by fp8.
    A single token keeps 16-bit activations. `quantize` overrides this: the token of an expert may be one of several in the step.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype  # 448 · 448 exceeds fp16's range
    if x.shape[0] > 1 if quantize is None else quantize:
        values, x_scale = quantize_fp8(x)
        scale = scale * x_scale.unsqueeze(1)
    else:
        values = x
    y = (F.linear(values.to(dtype), weight.to(dtype)).float() * scale).to(x.dtype)  # either dtype holds e4m3 exactly
    return y if bias is None else y + bias


def linear_fp8_blocks(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, quantize: bool | None = None
) -> Tensor:
    """x [T, K] · (weight · scale)ᵀ + bias [N] → [T, N]: weight [N, K] e4m3, scale [⌈N / g⌉, ⌈K / 128⌉] fp32.

    The scale of weight[n, k] is scale[n // g, k // 128], see `block_rows`. Two or more tokens are quantized first, with a scale
    for each token and 128 channels; a single token is not. Products are of fp32 factors.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = x.to(wide)
    if x.shape[0] > 1 if quantize is None else quantize:
        rounded, x_scale = quantize_fp8_blocks(x, x.shape[0])
        values = dequantize_fp8(rounded, x_scale, wide)
    y = F.linear(values, dequantize_fp8(weight, scale, wide)).to(x.dtype)
    return y if bias is None else y + bias


def dequantize_fp8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """values [N, K] e4m3 · scale in `dtype`. The scale is [N], or [⌈N / g⌉, ⌈K / 128⌉], see `block_rows`."""
    out, scale = values.to(dtype), scale.to(dtype)
    if scale.ndim == 1:
        return out.mul_(scale.unsqueeze(1))
    N, K = values.shape
    rows, whole = scale.repeat_interleave(block_rows(N, scale.shape[0]), 0)[:N], K - K % FP8_BLOCK
    out[:, :whole].unflatten(1, (-1, FP8_BLOCK)).mul_(rows[:, : whole // FP8_BLOCK].unsqueeze(2))
    out[:, whole:].mul_(rows[:, -1:])
    return out


def quantize_fp8_blocks(x: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """x [N, K] → values [N, K] e4m3 and scales [blocks, ⌈K / 128⌉] fp32, one for each block of g rows and 128 columns.

    Each scale is as in `quantize_fp8`. g follows from the number of blocks, see `block_rows`; with N blocks it is 1.
    """
    N, K = x.shape
    g = block_rows(N, blocks)
    padded = F.pad(x, (0, -K % FP8_BLOCK, 0, -N % g)).unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, g))
    values, scale = quantize_fp8(padded.transpose(1, 2).flatten(2))  # [blocks, ⌈K / 128⌉, g · 128]
    values = values.unflatten(2, (g, FP8_BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    return values[:N, :K], scale


def block_rows(N: int, blocks: int) -> int:
    """Number of rows in a block of FP8 weights: the largest power of two up to 128 that splits N rows into `blocks` blocks."""
    g = FP8_BLOCK
    while g > 1 and -(-N // g) != blocks:
        g //= 2
    return g


def pack_int4(codes: Tensor) -> Tensor:
    """Codes [N, K] from 0 to 15 → words [N, ⌈K / 128⌉ · 32] int16: word 32c + s has the columns 128c + 32j + s, j = 0 lowest.

    Columns past K are filled with zeros.
    """
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % INT4_CHUNK)).unflatten(1, (-1, 4, INT4_CHUNK // 4))
    low, high = padded[:, :, 0] | padded[:, :, 1] << 4, padded[:, :, 2] | padded[:, :, 3] << 4  # bytes: little temporary memory
    return torch.stack((low, high), -1).view(torch.int16).flatten(1)


def unpack_int4(words: Tensor, K: int) -> Tensor:
    """The codes [N, K] uint8 of packed words, see `pack_int4`."""
    wide = words.unflatten(1, (-1, 1, INT4_CHUNK // 4)).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)[:, None]
    return (wide >> shifts & 15).to(torch.uint8).flatten(1)[:, :K]


def pack_int4_scale(scale: Tensor, zero: Tensor | int = INT4_ZERO) -> Tensor:
    """Scales [N, groups] and zero points from 0 to 15 of the same shape → scale words [groups, N] int32.

    A word is the fp32 scale with the zero point in its four lowest bits. Scales that are numbers of 16 bits have zeros there.
    Other scales are rounded, by a millionth at most.
    """
    bits = (scale.float().view(torch.int32) + 8) & -16
    return (bits | zero).T.contiguous()


def unpack_int4_scale(words: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N, groups] fp32 and zero points int32 of scale words, see `pack_int4_scale`. Words of 16 bits are scales of
    symmetric weights."""
    words = words.T.contiguous()
    if words.dtype != torch.int32:
        return words.float(), torch.full_like(words, INT4_ZERO, dtype=torch.int32)
    return (words & -16).view(torch.float32), words & 15


def dequantize_int4(words: Tensor, scale: Tensor, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(q − z) · s of packed words [N, ⌈K / 128⌉ · 32] and scale words [groups, N] → [N, K] in `dtype`, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor, zero = unpack_int4_scale(scale)
    g = int4_group(K, scale.shape[0])
    padded = F.pad(unpack_int4(words, K), (0, -K % g)).unflatten(1, (-1, g))
    values = (padded.to(wide) - zero.unsqueeze(2)) * factor.to(wide).unsqueeze(2)
    return values.to(dtype).flatten(1)[:, :K]


def quantize_int4(x: Tensor, group: int, symmetric: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, K] → codes [N, K] uint8, scales fp32 and zero points int32 [N, ⌈K / group⌉], with (codes − zero) · scale ≈ x.

    The 16 levels reach from a group's smallest value to its largest; 0 is one of them. The scale is 1 for a group of zeros.
    symmetric: all zero points are `INT4_ZERO`, and scales are rounded to this dtype.
    """
    K = x.shape[1]
    values = F.pad(x.float(), (0, -K % group)).unflatten(1, (-1, group))
    low, high = values.amin(2, keepdim=True).clamp_(max=0), values.amax(2, keepdim=True).clamp_(min=0)
    if symmetric is not None:
        high = torch.maximum(-low, high)
        low = -high
    scale = (high - low) / values.new_full((1,), 15)  # on a GPU, PyTorch multiplies by the inverse of a number
    if symmetric is not None:
        scale = scale.to(symmetric).float()
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-low / scale).round_() if symmetric is None else torch.full_like(scale, INT4_ZERO)
    codes = (values / scale).add_(zero).round_().clamp_(0, 15)
    return codes.to(torch.uint8).flatten(1)[:, :K], scale.squeeze(2), zero.squeeze(2).to(torch.int32)


def pack_mxfp4_scale(exponents: Tensor) -> Tensor:
    """E8M0 bytes [N, ⌈K / 32⌉] uint8 → scale words [⌈K / 128⌉, N] uint32. Byte j of a word is that of columns 32j … 32j + 31."""
    words = F.pad(exponents, (0, -exponents.shape[1] % (INT4_CHUNK // MX_GROUP))).contiguous().view(torch.int32)
    return words.T.contiguous().view(torch.uint32)


def dequantize_mxfp4(words: Tensor, scale: Tensor, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1 · 2^(e8m0 − 127) of packed words [N, ⌈K / 128⌉ · 32] and scale words [⌈K / 128⌉, N] uint32 → [N, K] in `dtype`.

    Exact in bf16, denormal numbers included, but for numbers of 2^128 and more, which are infinite; so they are in fp32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = unpack_int4(words, -(-K // INT4_CHUNK) * INT4_CHUNK).unflatten(1, (-1, MX_GROUP)).to(torch.int32)
    exponent, half = codes >> 1 & 3, (codes & 1) * 0.5
    values = torch.where(exponent == 0, half, torch.ldexp(1 + half, exponent - 1)).to(wide)
    exponents = scale.view(torch.int32).T.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    powers = torch.ldexp(values.new_ones(exponents.shape), exponents.to(torch.int32) - 127)
    return (torch.where(codes > 7, -values, values) * powers.unsqueeze(2)).to(dtype).flatten(1)[:, :K]


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] → E2M1 codes [N, K] and E8M0 bytes [N, ⌈K / 32⌉], both uint8.

    Of the two powers of two that map a group's largest magnitude to more than 3 and less than 8, the one with the smaller sum of
    squared errors. Values are rounded to the nearest, ties to the even code; those above 6 become 6.
    """
    K = x.shape[1]
    values = F.pad(x.float(), (0, -K % MX_GROUP)).unflatten(1, (-1, MX_GROUP))
    largest = values.abs().amax(2, keepdim=True)
    # largest = m · 2^e with m in [0.5, 1), so 4 … 8 of this power
    lower = (torch.frexp(largest).exponent - 3).clamp(-126, MX_LARGEST - 128)
    levels = values.new_tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    middles = (levels[1:] + levels[:-1]) / 2

    def rounded(exponent: Tensor) -> tuple[Tensor, Tensor]:
        scaled = torch.ldexp(values.abs(), -exponent)
        low, high = torch.bucketize(scaled, middles, right=False), torch.bucketize(scaled, middles, right=True)
        codes = torch.where(low % 2 == 0, low, high)  # they differ on a tie
        return codes, (torch.ldexp(levels[codes], exponent) - values.abs()).square().sum(2, keepdim=True)

    (codes, error), (other, error_of_other) = rounded(lower), rounded(lower + 1)
    better = error_of_other < error
    codes = torch.where(better, other, codes) | torch.signbit(values).to(torch.int64) << 3
    return codes.to(torch.uint8).flatten(1)[:, :K], (lower + better + 127).squeeze(2).to(torch.uint8)


def quantize_weight(weight: Tensor, format: str, part: int | None = None) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in "fp8", "fp8_blocks", "int4" or "mxfp4", and its scales as `linear` takes them.

    part: rows of gate, of up, or of an expert: no block has rows of two parts. None: blocks have 128 rows.
    """
    if format == "int4":
        codes, scale, zero = quantize_int4(weight, INT4_CHUNK)
        return pack_int4(codes), pack_int4_scale(scale, zero)
    if format == "mxfp4":
        codes, exponents = quantize_mxfp4(weight)
        return pack_int4(codes), pack_mxfp4_scale(exponents)
    if format == "fp8":
        return quantize_fp8(weight)
    values, scale = quantize_fp8_blocks(weight, -(-len(weight) // math.gcd(FP8_BLOCK, part or FP8_BLOCK)))
    return values.contiguous(), scale


@functools.lru_cache
def int4_group(K: int, groups: int) -> int:
    """Columns of a group: the largest of 128, 64 and 32 that splits K columns into `groups` groups."""
    return next(g for g in INT4_GROUPS if -(-K // g) == groups)


def gated(gate_up: Tensor, activation: str, limit: float = 0.0, alpha: float = 1.0) -> Tensor:
    """act(gate) · up for `gate_up` [T, 2I], gate in the first half → [T, I] (SwiGLU: Shazeer 2020).

    With a limit, the clamped SwiGLU of gpt-oss instead: (up + 1) · gate · sigmoid(alpha · gate), after gate is bounded by limit,
    and up by −limit and limit.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
    return ACTIVATE[activation](gate) * up


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`linear` of `rms_norm(x)`; without a norm_weight of x."""
    return linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight, bias, scale)


def norm_gate_up(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, activation: str, bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gated` of `norm_linear`."""
    return gated(norm_linear(x, norm_weight, eps, weight, bias, scale), activation)


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`linear` of x, plus the residual."""
    return residual + linear(x, weight, bias, scale)


def route(logits: Tensor, top_k: int, normalize: bool, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token (Shazeer et al. 2017): logits [T, E] → weights [T, k] in their dtype, experts [T, k] int64.

    The softmax and the sum for `normalize` are in fp32. `factors` [E], if given, multiply the weights last. Experts are in
    descending order of weight; of equal ones, the lower comes first. A row with a NaN has the experts 0 to k − 1, with NaN as
    weights.
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)  # `topk` promises no order of ties
    weights = ordered[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if factors is not None:
        weights = weights * factors[experts[:, :top_k]]
    return weights.to(logits.dtype), experts[:, :top_k]


def expert_tiles(experts: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """The pairs of a token and an expert, sorted by expert, and tiles of up to `block_t` pairs of one expert.

    experts: [T, k]. Pair t · k + j is token t with its j-th expert.
    → order [T · k] int32, the pairs in ascending order of expert, then of pair; tiles [3, tiles] int32: each tile's expert, its
    first place in `order`, and the end of its expert's places there.
    """
    flat = experts.flatten()
    tiles, start = [], 0
    for e, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        tiles += [(e, first, start + count) for first in range(start, start + count, block_t)]
        start += count
    rows = torch.tensor(tiles, dtype=torch.int32, device=experts.device).reshape(-1, 3)
    return flat.argsort(stable=True).int(), rows.T.contiguous()


def few_tokens(T: int, k: int, E: int) -> bool:
    """Whether T tokens, rounded up to a power of two, are so few that hardly two of them use the same of E experts, k each.

    Their activations are not quantized.
    """
    return T <= 1 or (T <= FEW_TOKENS and 2 * k << (T - 1).bit_length() <= E)


class SharedExpert(NamedTuple):
    """An expert that every token of a mixture uses, a gated MLP without biases.

    Attributes:
        gate_up: [2S, H], gate rows first. down: [H, S]. gate: [1, H], of the activations' dtype.
        gate_up_scale, down_scale: of quantized weights, as those of `linear`.
    """

    gate_up: Tensor
    down: Tensor
    gate: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


def shared_expert(h: Tensor, expert: SharedExpert, activation: str, quantize: bool | None = None) -> Tensor:
    """sigmoid(gate · h) · down · gated(gate_up · h): h [T, H] → [T, H]. `quantize`: see `linear`."""
    y = gated(linear(h, expert.gate_up, scale=expert.gate_up_scale, quantize=quantize), activation)
    return linear(h, expert.gate).sigmoid() * linear(y, expert.down, scale=expert.down_scale, quantize=quantize)


def computes_shared(
    T: int, top_k: int, gate_up: Tensor, down: Tensor, gate_up_scale: Tensor | None, down_scale: Tensor | None,
    shared: SharedExpert,
) -> bool:  # fmt: skip
    """Whether a mixture computes this shared expert as a further expert of each token, with activations that are not quantized:
    there are `few_tokens`, and weights and scales have the form of an expert's, which is not 4 bits."""
    alike = gate_up.dtype != torch.int16
    for shared_part, part in (
        (shared.gate_up, gate_up), (shared.down, down), (shared.gate_up_scale, gate_up_scale), (shared.down_scale, down_scale)
    ):  # fmt: skip
        if shared_part is None or part is None:
            alike &= shared_part is part
        else:
            alike &= shared_part.dtype == part.dtype and shared_part.shape == part.shape[1:]
    return alike and few_tokens(T, top_k, gate_up.shape[0])


def mixture(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None, quantize: bool | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float = 0.0, alpha: float = 1.0,
) -> Tensor:  # fmt: skip
    """Σ_j weights[t, j] · expert_{experts[t, j]}(x[t]), expert_e(x) = down_e · gated(gate_up_e · x) → [T, H].

    A token's terms are rounded and added in ascending order of its experts, as in transformers. With FP8 weights, activations are
    quantized unless these are `few_tokens`; `quantize` overrides that.

    Args:
        x: [T, H]. weights, experts: [T, k], see `route`.
        gate_up: [E, 2I, H]. down: [E, H, I].
        gate_up_scale, down_scale: scales of FP8 weights, [E, 2I] and [E, H]; of blocks [E, 2I / g, ⌈H / 128⌉] and
            [E, ⌈H / g⌉, ⌈I / 128⌉].
        gate_up_bias, down_bias: [E, 2I] and [E, H], biases of each expert's products. limit, alpha: see `gated`.
    """
    T, k = experts.shape
    out, quantize = torch.zeros_like(x), not few_tokens(T, k, gate_up.shape[0]) if quantize is None else quantize
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    start = 0
    for e, count in enumerate(counts):
        if not count:
            continue
        pairs = order[start : start + count]
        start += count
        tokens = pairs // k
        scales = (None, None) if gate_up_scale is None or down_scale is None else (gate_up_scale[e], down_scale[e])
        biases = [None if bias is None else bias[e] for bias in (gate_up_bias, down_bias)]
        h = gated(linear(x[tokens], gate_up[e], biases[0], scales[0], quantize), activation, limit, alpha)
        y = linear(h, down[e], biases[1], scales[1], quantize) * weights.flatten()[pairs, None]
        out.index_add_(0, tokens, y)
    return out


def mixture_residual(
    h: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor, top_k: int, normalize: bool, activation: str,
    norm_weight: Tensor | None = None, eps: float = 0.0, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float = 0.0, alpha: float = 1.0,
) -> Tensor:  # fmt: skip
    """residual + `mixture` of the experts that `route` chooses, of the normalized h (unless norm_weight is None)."""
    h = h if norm_weight is None else rms_norm(h, norm_weight, eps)
    weights, experts = route(logits, top_k, normalize)
    rest = gate_up_scale, down_scale, None, gate_up_bias, down_bias, limit, alpha
    return residual + mixture(h, weights, experts, gate_up, down, activation, *rest)


def rope(x: Tensor, cos_sin: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first R channels of each head, by halves of R as in Llama → [T, N, D].

    x: [T, N, D]. cos_sin: [T, R] fp32 (cos | sin), R ≤ D and even; None: nothing is rotated. scales: [T] fp32, factors of the
    rotated heads (Llama 4's scale of queries by their position).
    """
    if cos_sin is not None:
        R = cos_sin.shape[1]
        cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
        first, second = x[..., :R].chunk(2, dim=-1)
        x = torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., R:]), dim=-1)
    return x if scales is None else x * scales.to(x.dtype)[:, None, None]


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    """Attention's output [T, N, D] times sigmoid(gate), as Qwen3-Next gates it."""
    return x * torch.sigmoid(gate)


def norm_rope(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMSNorm of each head (with `norm_weight` [D]), then rotary embedding as in transformers' `apply_rotary_pos_emb`.

    x is [B, heads, T, D], cos and sin are [B or 1, T, D]; they are rounded to x's dtype. The result has x's order in memory.
    """
    out = torch.empty_like(x)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return out.copy_(x * cos + torch.cat((-second, first), dim=-1) * sin)


def qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`norm_rope` of q and of k."""
    return norm_rope(q, cos, sin, q_norm, eps), norm_rope(k, cos, sin, k_norm, eps)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] of any float dtype → values [..., K] e4m3 and scales [...] fp32, with values · scale ≈ x.

    The scale maps a row's largest finite magnitude to 448. It is 1 for a row of zeros. NaN and infinities become NaN and do not
    affect the scale, so they stay visible instead of turning into numbers. Does not synchronize with the device.
    """
    wide = x.float()
    finite = torch.isfinite(wide)
    largest = torch.where(finite, wide, 0).abs().amax(-1)
    # Divide by a tensor. To divide by a number, PyTorch on a GPU multiplies by its inverse, which may differ in the last bit.
    scale = torch.where(largest > 0, largest / largest.new_full((), FP8_MAX), 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    # Rounding may lift the quotient above 448, and the cast would turn that into NaN.
    values = (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(finite, values, torch.nan).to(torch.float8_e4m3fn), scale


def empty_quantized(x: Tensor, blocks: bool = False, **rest: Any) -> tuple[Tensor, Tensor]:
    """The results of `quantize` of x [T, K], with any values."""
    T, K = x.shape
    scale = (T, -(-K // FP8_BLOCK)) if blocks else (T,)
    return x.new_empty((T, K), dtype=torch.float8_e4m3fn), x.new_empty(scale, dtype=torch.float32)


def quantize(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, K] → values [T, K] e4m3 and scale fp32: `quantize_fp8` [T] or, with `blocks`, for each 128 columns [T, ⌈K / 128⌉]."""
    out, ones = empty_quantized(x, blocks)
    if not x.shape[1]:  # a row without values has no largest one
        return out, ones.fill_(1.0)
    values, scale = quantize_fp8_blocks(x, x.shape[0]) if blocks else quantize_fp8(x)
    return out.copy_(values), scale


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """`quantize` of `rms_norm`."""
    return quantize(rms_norm(x, weight, eps), blocks)


def write_kv(x: Tensor, pages: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Store x [T, Nkv, D] (K or V) at `slots` [T] of the pages [P, page_size, Nkv, D].

    FP8 pages take a scale for each token and head: `scales` [P, page_size, Nkv] fp32.
    """
    if scales is not None:
        x, x_scales = quantize_fp8(x)
        scales.view(-1, scales.shape[-1]).index_copy_(0, slots, x_scales)
        x, pages = x.view(torch.uint8), pages.view(torch.uint8)  # as bytes: not every operation supports fp8
    pages.view(-1, *x.shape[1:]).index_copy_(0, slots, x)


def _gather(pages: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of the pages at `slots` [...] → [..., Nkv, D] in `dtype`."""
    rows = slots.flatten()  # to select rows of a matrix is several times as fast on a CPU as to index with `slots`
    if scales is None:
        return pages.flatten(0, 1).index_select(0, rows).unflatten(0, slots.shape)
    values = pages.view(torch.uint8).flatten(0, 1).index_select(0, rows).view(pages.dtype)
    return (values.float() * scales.flatten(0, 1).index_select(0, rows).unsqueeze(-1)).to(dtype).unflatten(0, slots.shape)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_lens: Sequence[int],
    seq_lens: Sequence[int], scale: float, k_scales: Tensor | None = None, v_scales: Tensor | None = None,
    window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's new tokens on its cached tokens, the new ones included.

    Sequences with one new token are computed together, padded to the longest context; the others one by one. A row is NaN if one
    of its scores is NaN or +inf, or if all are -inf.

    Args:
        q: [T, Nq, D], the new tokens of all sequences, one sequence after the other. The result has its shape.
        k_pages, v_pages: [P, page_size, Nkv, D]. k_scales, v_scales: scales of FP8 pages, see `write_kv`.
        block_tables: [B, pages].
        query_lens, seq_lens: [B], the numbers of new and of cached tokens of each sequence, the new ones cached too.
        scale: factor of the scores.
        window: each token sees itself and the window − 1 tokens before it; None: all tokens before it.
        sinks: [Nq], a further score of each head, of a token whose V is 0; None: there is none.
    """
    out = torch.empty_like(q)
    starts = list(accumulate(query_lens, initial=0))
    cached = (k_pages, k_scales), (v_pages, v_scales)
    single = [i for i, n in enumerate(query_lens) if n == 1]
    if single:
        everyone = len(single) == len(seq_lens)
        rows = slice(None) if everyone else [starts[i] for i in single]
        tables = block_tables if everyone else block_tables[single]
        slots, mask = _slots(tables, [seq_lens[i] for i in single], k_pages.shape[1])
        if window is not None:
            ends = torch.tensor([seq_lens[i] for i in single], device=q.device)[:, None]
            inside = torch.arange(slots.shape[1], device=q.device) >= ends - window
            slots = slots.where(inside, slots.gather(1, ends.long() - 1))  # what is hidden may be NaN: it reads the last token
            mask = inside[:, None, None] if mask is None else mask & inside[:, None, None]
        k, v = (_gather(*pages, slots, q.dtype).transpose(1, 2) for pages in cached)
        out[rows] = _attention(q[rows].unsqueeze(2), k, v, scale, mask, sinks=sinks).squeeze(2)
    for i, new in enumerate(query_lens):
        if new > 1:
            rows, total = slice(starts[i], starts[i] + new), seq_lens[i]
            slots, _ = _slots(block_tables[i : i + 1], [total], k_pages.shape[1])
            if window is not None:  # what no row sees may be NaN
                slots, total = slots[:, max(0, total - new - window + 1) :], min(total, new + window - 1)
            k, v = (_gather(*pages, slots, q.dtype).transpose(1, 2) for pages in cached)
            mask = None
            if new < total or window is not None:
                mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
                mask = mask if window is None else mask.triu(total - new - window + 1)
            queries = q[rows].transpose(0, 1).unsqueeze(0)
            out[rows] = _attention(queries, k, v, scale, mask, causal=mask is None, sinks=sinks)[0].transpose(0, 1)
    return out


def _slots(tables: Tensor, lens: list[int], page_size: int) -> tuple[Tensor, Tensor | None]:
    """Slots [B, longest] of each sequence's tokens, and a mask [B, 1, 1, longest] of the valid ones; None if all are valid.

    Past the end of a shorter sequence, the slot of its last token is repeated and masked. The rest of its page may hold NaN,
    which a mask does not stop.
    """
    longest = max(lens)
    t, mask = torch.arange(longest, device=tables.device).unsqueeze(0), None
    if min(lens) < longest:
        ends = torch.tensor(lens, device=tables.device).unsqueeze(1)
        mask = (t < ends)[:, None, None, :]
        t = torch.minimum(t, ends - 1)
    else:
        t = t.expand(len(lens), -1)
    return tables.gather(1, t // page_size).long() * page_size + t % page_size, mask


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool = False, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q · kᵀ · scale) · v: q [B, Nq, T, D], k and v [B, Nkv, L, D] → [B, Nq, T, D].

    `mask`, [T, L] or [B, 1, 1, L], is True where a row sees a token.
    """
    if sinks is not None:
        masks = [mask if mask is None or mask.ndim == 2 else mask[i, 0] for i in range(q.shape[0])]
        return torch.stack([_exact_attention(q[i], k[i], v[i], scale, seen, causal, sinks) for i, seen in enumerate(masks)])
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    # On a CPU, PyTorch's function returns finite numbers for many scores that are NaN or infinite. On a GPU, a look would sync.
    if q.device.type == "cpu" and not _finite_scores(q, k):
        for i in range(q.shape[0]):
            if not _finite_scores(q[i], k[i]):
                out[i] = _exact_attention(q[i], k[i], v[i], scale, mask if mask is None or mask.ndim == 2 else mask[i, 0], causal)
    return out


def _finite_scores(q: Tensor, k: Tensor) -> bool:
    """Whether all scores are finite for certain: |q · k| ≤ |q| · |k|, also for the norms of all rows together."""
    dtype = torch.float32 if q.dtype == torch.float16 else None  # a norm can exceed fp16's range
    bound = torch.linalg.vector_norm(q, dtype=dtype).item() * torch.linalg.vector_norm(k, dtype=dtype).item()
    return bound < 3e38  # 10% below the largest fp32 number, since norms are rounded


def _exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, sinks: Tensor | None = None
) -> Tensor:
    """`_attention` of one sequence in single fp32 operations, which keep NaN and infinities, some queries at a time."""
    nkv, length, wide = k.shape[0], k.shape[1], torch.promote_types(q.dtype, torch.float32)
    if causal:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    out = torch.empty_like(q)
    step = max(1, _EXACT_SCORES // (q.shape[0] * length))
    for start in range(0, q.shape[1], step):
        rows = slice(start, start + step)
        queries = q[:, rows].to(wide).unflatten(0, (nkv, -1))  # [Nkv, Nq / Nkv, T, D]
        scores = queries @ k.to(wide).unsqueeze(1).mT * scale
        if mask is not None:
            scores = scores.masked_fill(~mask[rows], -torch.inf)
        if sinks is not None:
            further = sinks.to(wide).view(nkv, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, further), -1)
        probabilities = scores.softmax(-1)[..., :length]
        out[:, rows] = (probabilities @ v.to(wide).unsqueeze(1)).flatten(0, 1).to(q.dtype)
    return out
