"""`Sampler`: from a step's logits to its tokens and log-probabilities. docs/design/sampling.md has the order.

Nothing here waits. All buffers whose size does not depend on the step are allocated with the engine. What else a step needs is
allocated before its tokens reach the table of slots: if memory runs out, nothing has changed, and the step can be tried again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import is_out_of_memory, to_device
from minirt.engine.execute.logits_processors import PROCESSED_ROWS, LogitsProcessors
from minirt.engine.execute.step_buffers import CpuGpuBuffer, StepView
from minirt.engine.limits import EngineLimits
from minirt.engine.request import TokenLogprobs
from minirt.kernels.sampling.dispatch import columns, sample, token_logprobs
from minirt.kernels.sampling.limits import MAX_TOP
from minirt.kernels.sampling.slots import Drafts
from minirt.step.plan import SlotRules, StepPlan
from minirt.step.rules import Rules

SCORED_ROWS = 64  # of a prompt's logits that are scored at once


class StepOutOfMemory(Exception):
    """No memory for a step, or for the rules of the sequence in `slot` alone. The message is the allocator's."""

    def __init__(self, slot: int | None, message: str) -> None:
        super().__init__(message)
        self.slot = slot


def unpack(packed: Tensor, tokens: Sequence[int], wanted: Sequence[int]) -> list[TokenLogprobs | None]:
    """The rows of a result of `token_logprobs` on the host, each with as many of the most probable tokens as it wants."""
    room = (packed.shape[1] - 2) // 2
    floats = packed.view(torch.float32)
    logprobs, ranks = floats[:, 0].tolist(), packed[:, 1].tolist()
    ids, tops = packed[:, 2 : 2 + room].tolist(), floats[:, 2 + room :].tolist()
    rows = zip(tokens, wanted, logprobs, ranks, ids, tops, strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], values[:count], strict=True))) if count >= 0 else None
        for token, count, logprob, rank, top, values in rows
    ]


class ScoredRows(NamedTuple):
    """What a step computed for `Scored`, on the host or on its way there: logits, or packed log-probabilities of the targets."""

    targets: np.ndarray | None
    num_top: int
    parts: list[Tensor]

    def logits(self) -> Tensor:
        return torch.cat(self.parts)

    def logprobs(self) -> list[TokenLogprobs]:
        rows, start = list[TokenLogprobs](), 0
        for part in self.parts:
            tokens = [] if self.targets is None else self.targets[start : start + len(part)].tolist()
            rows += filter(None, unpack(part, tokens, [self.num_top] * len(tokens)))
            start += len(part)
        return rows


class Sampler:
    """What the rows of a step go through, and the device memory for it.

    Args:
        vocab: columns of the logits.
        max_draws: draws of the largest step.
    """

    def __init__(self, limits: EngineLimits, vocab: int, max_draws: int, device: torch.device) -> None:
        self._limits, self._vocab, self._device = limits, vocab, device
        self._cuda = device.type == "cuda"
        rows = min(PROCESSED_ROWS, max_draws)
        self._processors = LogitsProcessors(limits.max_num_seqs, vocab, limits.max_model_len, device, rows=rows)
        self._drawn = torch.zeros(max_draws, dtype=torch.int64, device=device)
        packed = max_draws, columns(MAX_TOP)
        self._packed = torch.zeros(packed, dtype=torch.int32, device=device)
        self._packed_host = [torch.zeros(packed, dtype=torch.int32, pin_memory=True) for _ in range(2)] if self._cuda else []
        self._masks = CpuGpuBuffer((max_draws, -(-vocab // 32)), device)
        self._workspace: Any = None  # of the kernels
        self._logprobs_workspace: Any = None
        if self._cuda:
            from minirt.kernels.sampling import filters, logprobs

            self._workspace = filters.SamplingWorkspace(max_draws, vocab, device)
            self._logprobs_workspace = logprobs.LogprobsWorkspace(max_draws, vocab, device)

    def masks(self, count: int) -> Tensor:
        """The host's buffer for the masks of `count` draws, [count, ceil(V / 32)] int32, to be written before `draw`."""
        return self._masks.next_host()[:count]

    def written_masks(self, count: int) -> np.ndarray:
        """What was written to `masks`."""
        return self._masks.written()[:count]

    def fill_slots(self, rules: Sequence[SlotRules]) -> None:
        """Write what the device keeps for the rules of admitted sequences. The host knows all their tokens.

        Raises:
            StepOutOfMemory: no memory for what is sent to the device, with the slot.
        """
        for slot, asked, prompt, generated in rules:
            try:
                self._processors.fill(slot, asked, prompt.tolist(), generated.tolist())
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise StepOutOfMemory(slot, str(error)) from None

    def draw(
        self, logits: Tensor, row_maxima: Tensor | None, view: StepView, plan: StepPlan, proposed: Tensor | None = None,
        process: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Draw a token from each row of `logits` [Q, V].

        Args:
            row_maxima: see `sample`.
            view: of a step with Q draws.
            proposed: [S, drafts] int32, the drafts of each slot; None: there are none.
            process: logits → those with which the draw begins; None: the model's.
        Returns:
            The tokens [Q] int64 on the device, and the packed log-probabilities on the host, or on their way there, if one asks.
        """
        count, raw, needs, step, settings = plan.sequences.total_draws, logits, plan.sampling, view.tensors, view.settings
        num_top = max(needs.logprobs, default=-1)
        packed = self._packed[:count] if num_top >= 0 else None
        if num_top > MAX_TOP:
            packed = torch.empty(count, columns(num_top), dtype=torch.int32, device=self._device)
        if process is not None:
            logits, row_maxima = process(logits), None
        if needs.masked:
            self._masks.send(count)
        batch = settings.needed(needs.filters, all_greedy=needs.all_greedy)
        tokens = self._drawn[:count]
        if needs.any_rules or needs.masked:
            for first in range(0, count, PROCESSED_ROWS):
                rows = slice(first, min(first + PROCESSED_ROWS, count))
                mask = self._masks.device[rows] if needs.masked else None
                drafts = None if proposed is None else Drafts(proposed, step.draw_drafts[rows])
                processed = self._processors.process(
                    logits[rows], step.draw_slots[rows], batch.step[rows], mask, any_bias=needs.any_bias, any_ban=needs.any_ban,
                    drafts=drafts,
                )  # fmt: skip
                sample(processed, batch.part(rows), workspace=self._workspace, out=tokens[rows])
        else:
            sample(logits, batch, workspace=self._workspace, row_maxima=row_maxima, out=tokens)
        if packed is not None:
            token_logprobs(raw, tokens, step.draw_logprobs, num_top, out=packed, workspace=self._logprobs_workspace)
            packed = self._packed_to_host(packed)
        return tokens, packed

    def row_maxima(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Row maxima of logits [Q, V], as a head stores them, if `wanted` [1] int32 is not 0. On a GPU."""
        from minirt.kernels.sampling import sample as kernels

        workspace = self._workspace or kernels.SamplingWorkspace(len(logits), self._vocab, self._device)
        return kernels.row_maxima(logits, wanted, workspace)

    def record(self, tokens: Tensor, view: StepView) -> None:
        """Count the tokens of a step whose sequences have rules. After `commit`, which says which drawn tokens count."""
        self._processors.record(tokens, view.tensors.draw_slots, view.settings.step)

    def score(self, logits: Tensor, plan: StepPlan) -> list[ScoredRows]:
        """What the rows of logits [R, V] give that are for callers."""
        ends, scored = plan.sequences.num_logits.cumsum(), list[ScoredRows]()
        for index, count, targets, num_top in plan.scored:
            start = int(ends[index] - plan.sequences.num_logits[index])
            rows = logits[start : start + count]
            if targets is None:
                scored.append(ScoredRows(None, 0, [self._new_on_host(rows.float())]))
                continue
            parts, wanted = [], torch.full((SCORED_ROWS,), num_top, dtype=torch.int32, device=self._device)
            known = to_device(torch.from_numpy(targets.astype(np.int64)), self._device)
            for first in range(0, count, SCORED_ROWS):
                tokens, part = known[first : first + SCORED_ROWS], rows[first : first + SCORED_ROWS]
                part = part.clone() if self._vocab % 4 else part  # kernels are compiled for aligned rows
                parts.append(token_logprobs(part, tokens, wanted[: len(tokens)], num_top))
            scored.append(ScoredRows(targets, num_top, [self._new_on_host(part) for part in parts]))
        return scored

    def compile(self) -> None:
        """Launch every kernel but those of `sample` on one row, so that warm-up compiles it."""
        from minirt.kernels.sampling.process import VARIANTS

        processors = self._processors
        rules = Rules(presence=1.0, bias={0: 1.0}, allowed=(0,), bad_words=((0, 0),))
        processors.fill(0, rules, [0], [0])
        logits = torch.zeros(1, self._vocab, dtype=torch.float32, device=self._device)
        row, step = (torch.zeros(1, dtype=dtype, device=self._device) for dtype in (torch.int32, torch.int64))
        mask = torch.zeros(1, -(-self._vocab // 32), dtype=torch.int32, device=self._device)
        drafts = Drafts(row.view(1, 1), row) if self._limits.max_drafts else None
        for masked in VARIANTS:
            processors.process(logits, row, step, mask if masked else None, any_bias=True, any_ban=True, drafts=drafts)
        processors.record(step, row, step)
        token_logprobs(logits, step, row, 1)

    def _packed_to_host(self, packed: Tensor) -> Tensor:
        if not self._cuda or packed.shape[1] > columns(MAX_TOP):
            return self._new_on_host(packed)
        self._packed_host.reverse()
        return self._packed_host[0][: len(packed)].copy_(packed, non_blocking=True)

    def _new_on_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, in new memory."""
        if not self._cuda:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
