"""`Slots`: what the device keeps of each running sequence for masks, biases and penalties. Knows no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from minirt.kernels.sampling.limits import MOST_ENTRIES

PENALTIES, ALLOWED, HISTORY = 1, 2, 4  # bits of a slot's flags: it has penalties, allowed tokens, a history of its tokens


def counts_dtype(max_len: int) -> torch.dtype:
    """The smaller type that can count the tokens of a sequence with at most `max_len` tokens, the prompt included."""
    return torch.int16 if max_len <= 2**15 else torch.int32


def slot_bytes(vocab: int, max_len: int) -> int:
    """Bytes of a slot in all buffers of `Slots`."""
    return vocab * counts_dtype(max_len).itemsize + vocab // 8 + MOST_ENTRIES * (2 + 4 + 1 + 1) * 4


class Drafts(NamedTuple):
    """Drafts before the rows of a step.

    Args:
        tokens: [S, D] int32 with any row stride: the drafts of each slot.
        counts: [B] int32: how many of them come before each row's draw.
    """

    tokens: Tensor
    counts: Tensor


class Slots(NamedTuple):
    """The buffers of all S slots. N is MOST_ENTRIES.

    Args:
        meta: [S, 4] int32: flags, biases, bans, 0.
        penalties: [S, 4] fp32: presence, frequency, repetition, 0.
        counts: [S, V], one column more if V is odd: 2 · (times generated) + (1 if in the prompt). int32, or the bits of uint16
            as int16 (`counts_dtype`).
        allowed: [S, ceil(V / 32)] int32: bit v mod 32 of word v div 32 is 1 if token v is allowed.
        bias_ids, biases: [S, N] int32 and fp32; the ids of a slot are all different.
        bans: [S, N, 4] int32: token, the step from which it is no longer forbidden, and first and number of the tokens in
            `prefixes` after which it is forbidden.
        prefixes: [S, N] int32.
        history: [S, N] int32: the last generated tokens, generated token i in column i mod N.
    """

    meta: Tensor
    penalties: Tensor
    counts: Tensor
    allowed: Tensor
    bias_ids: Tensor
    biases: Tensor
    bans: Tensor
    prefixes: Tensor
    history: Tensor
