"""`LogitsProcessors`: masks, biases and penalties before the draw, and what the device keeps for them.

Each running sequence has a slot, whose data lives on the device as long as the sequence runs. `fill` writes it once, from tokens
that the host knows; after that `record` counts every token where it is drawn, so the next step needs nothing from the host.
docs/design/sampling.md describes the stages and the data.

On a GPU the kernels of `minirt.kernels.sampling.process` compute the result, elsewhere `minirt.kernels.sampling.reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minirt.device import is_nvidia, to_device
from minirt.kernels.sampling import reference
from minirt.kernels.sampling.limits import MOST_ENTRIES
from minirt.kernels.sampling.slots import ALLOWED, HISTORY, PENALTIES, Drafts, Slots, counts_dtype
from minirt.step.rules import Rules

PROCESSED_ROWS = 64  # of logits that are processed at once: their copy takes memory


class LogitsProcessors:
    """Masks, biases and penalties for the rows of a step.

    All memory that requests can ask for is allocated here, so that the plan of the device's memory holds it.

    Args:
        num_slots: sequences that run at once.
        vocab: columns of the logits.
        max_len: tokens of the longest sequence.
        rows: rows that `process` gets at once, at most.

    Attributes:
        slots: what the device keeps.
    """

    def __init__(
        self, num_slots: int, vocab: int, max_len: int, device: torch.device, impl: str = "auto", rows: int = PROCESSED_ROWS
    ) -> None:
        self._vocab, self._device = vocab, device
        self._triton = impl == "triton" or (impl == "auto" and is_nvidia(device))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.slots = Slots(
            zeros(4), zeros(4, dtype=torch.float32), zeros(vocab + vocab % 2, dtype=counts_dtype(max_len)),
            zeros(-(-vocab // 32)), zeros(MOST_ENTRIES), zeros(MOST_ENTRIES, dtype=torch.float32), zeros(MOST_ENTRIES, 4),
            zeros(MOST_ENTRIES), zeros(MOST_ENTRIES),
        )  # fmt: skip
        self._out = torch.empty(rows if self._triton else 0, vocab, dtype=torch.float32, device=device)

    def fill(self, slot: int, rules: Rules, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Write a slot's data for a sequence that was admitted, whose tokens the host knows. Does not wait for the device."""
        bans, slots = rules.bans, self.slots
        flags = PENALTIES * rules.penalizes | ALLOWED * (rules.allowed is not None) | HISTORY * any(ban[2] for ban in bans)
        if rules.penalizes:
            counts = slots.counts[slot].zero_()
            counts.index_fill_(0, self._sent(prompt, torch.int64), 1)
            counts.scatter_add_(0, self._sent(generated, torch.int64), self._sent([2] * len(generated), counts.dtype))
        if rules.allowed is not None:
            slots.allowed[slot].copy_(self._sent(_bitmask(rules.allowed, slots.allowed.shape[1]), torch.int32))
        if rules.bias:
            count = len(rules.bias)
            slots.bias_ids[slot, :count].copy_(self._sent(list(rules.bias), torch.int32))
            slots.biases[slot, :count].copy_(self._sent(list(rules.bias.values()), torch.float32))
        if bans:
            self._fill_bans(slot, bans, generated)
        penalties = [rules.presence, rules.frequency, rules.repetition, 0.0]
        slots.penalties[slot].copy_(self._sent(penalties, torch.float32))
        slots.meta[slot].copy_(self._sent([flags, len(rules.bias), len(bans), 0], torch.int32))

    def _fill_bans(self, slot: int, bans: list[tuple[int, int, tuple[int, ...]]], generated: Sequence[int]) -> None:
        prefixes: list[int] = []
        entries = []
        for token, until, prefix in bans:
            entries.append([token, until, len(prefixes), len(prefix)])
            prefixes += prefix
        self.slots.bans[slot, : len(bans)].copy_(self._sent(entries, torch.int32))
        if prefixes:
            self.slots.prefixes[slot, : len(prefixes)].copy_(self._sent(prefixes, torch.int32))
            last, place = generated[-MOST_ENTRIES:], max(0, len(generated) - MOST_ENTRIES) % MOST_ENTRIES
            last = [*last[len(last) - place :], *last[: len(last) - place]]  # the first of them belongs in column `place`
            self.slots.history[slot, : len(last)].copy_(self._sent(last, torch.int32))

    def _sent(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._device)

    def process(
        self, logits: Tensor, rows: Tensor, step: Tensor, mask: Tensor | None = None, *, any_bias: bool, any_ban: bool,
        drafts: Drafts | None = None
    ) -> Tensor:  # fmt: skip
        """The processed logits [B, V] fp32 of `logits` [B, V], which stay as they are. Valid until the next call. The eager form
        waits for the device.

        Args:
            rows: [B] int32 on the device: the slot of each row; -1: a row without rules.
            step: [B] int64 on the device: how many tokens were generated before.
            mask: [B, ceil(V / 32)] int32, a grammar's mask: bit v mod 32 of word v div 32 is 1 if token v is allowed.
            any_bias, any_ban: whether a row has biases, or forbidden tokens. Stages that no row uses are not launched.
            drafts: those before the rows, which count as generated tokens.
        """
        if self._triton:
            from minirt.kernels.sampling import process as kernels

            return kernels.process(
                logits.to(torch.float32).contiguous(), self._out[: len(logits)], rows, step, self.slots,
                any_bias=any_bias, any_ban=any_ban, mask=mask, drafts=drafts,
            )  # fmt: skip
        return reference.process(logits, rows, step, self.slots, mask, drafts)

    def record(self, tokens: Tensor, rows: Tensor, step: Tensor) -> None:
        """Count the `tokens` [B] int64 that were drawn at `step` from `process`ed rows; -1: no token."""
        if self._triton:
            from minirt.kernels.sampling import process as kernels

            kernels.record(tokens, rows, step, self.slots, self._vocab)
        else:
            reference.record(tokens, rows, step, self.slots)


def _bitmask(allowed: Sequence[int], words: int) -> list[int]:
    """int32 words whose bits are the allowed tokens."""
    bits = bytearray(4 * words)
    for token in allowed:
        bits[token >> 3] |= 1 << (token & 7)
    return memoryview(bits).cast("i").tolist()
