"""Masks, biases and penalties before the draw: the results of `reference.py`, which defines them.

`process` writes processed logits; `record` counts the tokens that were drawn from them. Rows without a slot are copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_tensor
from minirt.kernels.launch import cdiv
from minirt.kernels.prepared import prepared
from minirt.kernels.sampling.filters import BLOCK_V, row_block
from minirt.kernels.sampling.limits import MOST_ENTRIES
from minirt.kernels.sampling.slots import ALLOWED, HISTORY, PENALTIES, Drafts, Slots

_PENALTIES, _ALLOWED, _HISTORY = tl.constexpr(PENALTIES), tl.constexpr(ALLOWED), tl.constexpr(HISTORY)
_MOST_ENTRIES = tl.constexpr(MOST_ENTRIES)
_ENTRIES = 128  # of a list that a program handles at a time

VARIANTS = (False, True)  # with and without a grammar's mask


@triton.jit
def _masked(x, v, inside, mask_ptr):
    """`x`, with -inf where the bit of token v is 0."""
    word = tl.load(mask_ptr + v // 32, mask=inside, other=-1)
    return tl.where(((word >> (v % 32)) & 1) != 0, x, float("-inf"))


@triton.jit
def _count(counts_ptr, slot, b, v, inside, V, drafts_ptr, num_drafts_ptr, STRIDE, HAS_DRAFTS: tl.constexpr):
    """The counts of tokens v, with the drafts before row b counted as generated."""
    count = tl.load(counts_ptr + slot.to(tl.int64) * (V + V % 2) + v, mask=inside, other=0).to(tl.int32)
    if counts_ptr.dtype.element_ty == tl.int16:
        count &= 0xFFFF
    if HAS_DRAFTS:
        for i in range(tl.load(num_drafts_ptr + b)):
            count += 2 * (v == tl.load(drafts_ptr + slot.to(tl.int64) * STRIDE + i)).to(tl.int32)
    return count


@triton.jit
def _penalized(x, count, penalties_ptr, slot):
    """`x` after the penalties for tokens with these counts. Launches must not fuse products and sums, as PyTorch does not."""
    presence, frequency = tl.load(penalties_ptr + 4 * slot), tl.load(penalties_ptr + 4 * slot + 1)
    repetition = tl.load(penalties_ptr + 4 * slot + 2)
    generated = (count >> 1).to(tl.float32)
    x = tl.where(count > 0, tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition), x)
    x = x - frequency * generated
    return x - tl.where(generated > 0, presence, 0.0)


@prepared
@triton.jit(do_not_specialize=["STRIDE"], do_not_specialize_on_alignment=["drafts_ptr"])
def _process_kernel(
    logits_ptr, out_ptr, slots_ptr, meta_ptr, penalties_ptr, counts_ptr, allowed_ptr, mask_ptr, drafts_ptr, num_drafts_ptr, V,
    WORDS, STRIDE, HAS_MASK: tl.constexpr, HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Masks and penalties for all tokens of a block of a row."""
    b = tl.program_id(1)
    v, valid, x = row_block(logits_ptr, b, tl.program_id(0), V, BLOCK)
    if HAS_MASK:
        x = _masked(x, v, valid, mask_ptr + b.to(tl.int64) * WORDS)
    slot = tl.load(slots_ptr + b)
    if slot >= 0:
        flags = tl.load(meta_ptr + 4 * slot)
        if (flags & _ALLOWED) != 0:
            x = _masked(x, v, valid, allowed_ptr + slot.to(tl.int64) * WORDS)
        if (flags & _PENALTIES) != 0:
            count = _count(counts_ptr, slot, b, v, valid, V, drafts_ptr, num_drafts_ptr, STRIDE, HAS_DRAFTS)
            x = _penalized(x, count, penalties_ptr, slot)
    tl.store(out_ptr + b.to(tl.int64) * V + v, x, mask=valid)


@prepared
@triton.jit(do_not_specialize=["STRIDE"], do_not_specialize_on_alignment=["drafts_ptr"])
def _bias_kernel(
    logits_ptr, out_ptr, slots_ptr, meta_ptr, penalties_ptr, counts_ptr, allowed_ptr, mask_ptr, drafts_ptr, num_drafts_ptr,
    ids_ptr, biases_ptr, V, WORDS, STRIDE, HAS_MASK: tl.constexpr, HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """All of stage 1 but bans, for the tokens of a row that have a bias."""
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    if slot >= 0:
        flags, count_biases = tl.load(meta_ptr + 4 * slot), tl.load(meta_ptr + 4 * slot + 1)
        for first in range(0, count_biases, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside, at = i < count_biases, slot.to(tl.int64) * _MOST_ENTRIES + i
            v = tl.load(ids_ptr + at, mask=inside, other=0)
            x = tl.load(logits_ptr + b.to(tl.int64) * V + v, mask=inside, other=0.0)
            if HAS_MASK:
                x = _masked(x, v, inside, mask_ptr + b.to(tl.int64) * WORDS)
            if (flags & _ALLOWED) != 0:
                x = _masked(x, v, inside, allowed_ptr + slot.to(tl.int64) * WORDS)
            x += tl.load(biases_ptr + at, mask=inside, other=0.0)
            if (flags & _PENALTIES) != 0:
                count = _count(counts_ptr, slot, b, v, inside, V, drafts_ptr, num_drafts_ptr, STRIDE, HAS_DRAFTS)
                x = _penalized(x, count, penalties_ptr, slot)
            tl.store(out_ptr + b.to(tl.int64) * V + v, x, mask=inside)


@prepared
@triton.jit(do_not_specialize=["STRIDE"], do_not_specialize_on_alignment=["drafts_ptr"])
def _ban_kernel(
    out_ptr, slots_ptr, step_ptr, meta_ptr, bans_ptr, prefixes_ptr, history_ptr, drafts_ptr, num_drafts_ptr, V, STRIDE,
    HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores -inf for the tokens of a row that are forbidden at this step."""
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    if slot >= 0:
        step, count = tl.load(step_ptr + b), tl.load(meta_ptr + 4 * slot + 2)
        entries = slot.to(tl.int64) * _MOST_ENTRIES
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside, ban_ptr = i < count, bans_ptr + (entries + i) * 4
            v, until = tl.load(ban_ptr, mask=inside, other=0), tl.load(ban_ptr + 1, mask=inside, other=0)
            first, length = tl.load(ban_ptr + 2, mask=inside, other=0), tl.load(ban_ptr + 3, mask=inside, other=0)
            banned = inside & (step < until) & (length <= step)
            for j in range(tl.max(tl.where(banned, length, 0), 0)):
                compared = banned & (j < length)
                wanted = tl.load(prefixes_ptr + entries + first + j, mask=compared, other=0)
                place = step - length + j
                token_ptr = history_ptr + entries + place % _MOST_ENTRIES
                if HAS_DRAFTS:  # they are not in the history
                    known = step - tl.load(num_drafts_ptr + b)
                    previous = tl.load(token_ptr, mask=compared & (place < known), other=0)
                    draft_ptr = drafts_ptr + slot.to(tl.int64) * STRIDE + (place - known)
                    previous = tl.where(place < known, previous, tl.load(draft_ptr, mask=compared & (place >= known), other=0))
                else:
                    previous = tl.load(token_ptr, mask=compared, other=0)
                banned = banned & (wanted == previous)
            minus_infinity = tl.full((BLOCK,), float("-inf"), tl.float32)
            tl.store(out_ptr + b.to(tl.int64) * V + v, minus_infinity, mask=banned)


@prepared
@triton.jit
def _record_kernel(tokens_ptr, slots_ptr, step_ptr, meta_ptr, counts_ptr, history_ptr, V, HALVES: tl.constexpr):
    """Counts a row's token and appends it to the slot's history. HALVES: a word has the counts of two tokens."""
    b = tl.program_id(0)
    slot, token, step = tl.load(slots_ptr + b), tl.load(tokens_ptr + b), tl.load(step_ptr + b)
    if (slot >= 0) & (token >= 0) & (step >= 0):  # a sequence whose first draw was unusable computes a token of its prompt again
        flags = tl.load(meta_ptr + 4 * slot)
        if (flags & _PENALTIES) != 0:
            at = slot.to(tl.int64) * (V + V % 2) + token
            # A step may draw a token of a sequence several times.
            if HALVES:  # little-endian: the lower half comes first
                tl.atomic_add(counts_ptr + at // 2, tl.where(at % 2 == 0, 2, 2 << 16), sem="relaxed")
            else:
                tl.atomic_add(counts_ptr + at, 2, sem="relaxed")
        if (flags & _HISTORY) != 0:
            tl.store(history_ptr + slot.to(tl.int64) * _MOST_ENTRIES + step % _MOST_ENTRIES, token.to(tl.int32))


def process(
    logits: Tensor, out: Tensor, rows: Tensor, step: Tensor, slots: Slots, *, any_bias: bool, any_ban: bool,
    mask: Tensor | None = None, drafts: Drafts | None = None
) -> Tensor:  # fmt: skip
    """Write the processed logits of `logits` [B, V] fp32 to `out` [B, V]. 1 launch, and 1 each for biases and bans.

    Args:
        rows: [B] int32: the slot of each row; -1: a row without one, which only `mask` changes.
        step: [B] int64: how many tokens were generated before.
        any_bias, any_ban: whether a slot of these rows has biases, or forbidden tokens.
        mask: [B, ceil(V / 32)] int32, a grammar's mask in the format of `Slots.allowed`.
    """
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    B, V = logits.shape
    check_tensor("out", out, (B, V), torch.float32, logits.device)
    check_tensor("rows", rows, (B,), torch.int32, logits.device)
    check_tensor("step", step, (B,), torch.int64, logits.device)
    words = cdiv(V, 32)
    if mask is not None:
        check_tensor("mask", mask, (B, words), torch.int32, logits.device)
    if out.data_ptr() == logits.data_ptr() != 0:
        raise InputError("must not be the logits, which later stages read", where="out")
    if not B:
        return out
    # PyTorch rounds each product. Fused products and sums would differ in the last bit.
    proposed = (slots.meta, slots.meta) if drafts is None else drafts
    stride, some = proposed[0].stride(0), {"HAS_DRAFTS": drafts is not None}
    options = {"HAS_MASK": mask is not None, "enable_fp_fusion": False, **some}
    shared = (slots.meta, slots.penalties, slots.counts, slots.allowed, slots.meta if mask is None else mask, *proposed)
    _process_kernel[(cdiv(V, BLOCK_V), B)](logits, out, rows, *shared, V, words, stride, BLOCK=BLOCK_V, **options)
    if any_bias:
        biases = (slots.bias_ids, slots.biases)
        _bias_kernel[(B,)](logits, out, rows, *shared, *biases, V, words, stride, BLOCK=_ENTRIES, **options)
    if any_ban:
        bans = (slots.bans, slots.prefixes, slots.history)
        _ban_kernel[(B,)](out, rows, step, slots.meta, *bans, *proposed, V, stride, BLOCK=_ENTRIES, **some)
    return out


def record(tokens: Tensor, rows: Tensor, step: Tensor, slots: Slots, vocab: int) -> None:
    """Count the `tokens` [B] int64 that were drawn at `step` [B], and append them to histories; -1 is no token. 1 launch."""
    if len(tokens):
        buffers = (slots.meta, slots.counts.view(torch.int32), slots.history)
        _record_kernel[(len(tokens),)](tokens, rows, step, *buffers, vocab, HALVES=slots.counts.dtype == torch.int16)
