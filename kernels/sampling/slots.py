"""`Slots`: what the device keeps of each running sequence for masks, biases and penalties. Knows no Triton."""

from typing import NamedTuple

from torch import Tensor

PENALTIES, ALLOWED, HISTORY = 1, 2, 4  # bits of a slot's flags: it has penalties, allowed tokens, a history of its tokens


class Drafts(NamedTuple):
    """Drafts before the rows of a step: a row draws the token after its sequence's tokens and so many drafts.

    Args:
        tokens: [S, D] int32 with any row stride: the drafts of each slot.
        counts: [B] int32: how many of them come before each row.
    """

    tokens: Tensor
    counts: Tensor


class Slots(NamedTuple):
    """The buffers of all S slots. Except for the first two they have no columns until a request needs them.

    Args:
        meta: [S, 4] int32: flags, biases, bans, 0.
        penalties: [S, 4] fp32: presence, frequency, repetition, 0.
        counts: [S, V] int32: 2 · (times generated) + (1 if in the prompt).
        allowed: [S, ceil(V / 32)] int32: bit v mod 32 of word v div 32 is 1 if token v is allowed.
        bias_ids, biases: [S, N] int32 and fp32; the ids of a slot are all different.
        bans: [S, M, 4] int32: token, the step from which it is no longer forbidden, and first and number of the tokens in
            `prefixes` after which it is forbidden.
        prefixes: [S, P] int32.
        history: [S, L] int32: the generated tokens.
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
