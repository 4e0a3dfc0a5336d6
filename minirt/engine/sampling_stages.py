"""`SamplingStages`: from a step's logits to its tokens and log-probabilities on the host. docs/design/sampling.md has the order.

On a GPU nothing here waits, except `fill`. What a step needs is allocated before its tokens replace those of the step before: if
memory runs out, nothing has changed, and the step can be tried again.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minirt.engine import scheduler
from minirt.engine.cpu_gpu_buffer import CpuGpuBuffer
from minirt.engine.logits_processors import LogitsProcessors, Rules
from minirt.engine.logprobs import MAX_TOP, TokenLogprobs, columns, token_logprobs, unpack
from minirt.engine.sampler import SamplingBatch, SamplingBuffers, sample
from minirt.engine.step_input import Chunk
from minirt.sampling_params import EffectiveSampling

if TYPE_CHECKING:
    from minirt.kernels.sampling.logprobs import LogprobsWorkspace

SCORED_ROWS = 64  # of a prompt's logits that are scored at once
FillMasks = Callable[[Tensor], None]


class Row(NamedTuple):
    """A row of logits from which a token is drawn.

    Args:
        sampling: the request's settings.
        step: index of the token within the request.
        sequence: the sequence that the row belongs to; rows with `rules` need one.
        rules: what the request asks of its logits; None: nothing.
        slot: the sequence's slot in this step. By the time of the draw, the sequence may have ended and left it.
    """

    sampling: EffectiveSampling
    step: int
    sequence: "scheduler.Sequence | None" = None
    rules: Rules | None = None
    slot: int = -1

    @classmethod
    def of(cls, sampling: EffectiveSampling, sequence: "scheduler.Sequence", rules: Rules | None) -> "Row":
        """The row of a sequence's next token. Without `rules` if they change no logits any more."""
        step = sequence.num_generated
        return cls(sampling, step, sequence, rules if rules is not None and rules.apply(step) else None, sequence.slot)

    @property
    def num_top(self) -> int | None:
        """How many of the most probable tokens it lists; None if it wants no log-probabilities."""
        return self.sampling.logprobs


class Drawn(NamedTuple):
    """Tokens [B] int64 and what `unpack` needs for their log-probabilities, on the host or on their way there."""

    tokens: Tensor
    packed: Tensor | None = None
    wanted: Sequence[int] = ()

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        return None if self.packed is None else unpack(self.packed, self.tokens.tolist(), self.wanted)


class Scored(NamedTuple):
    """The log-probabilities of a chunk's targets, on the host or on their way there."""

    targets: Sequence[int]
    num_top: int
    packed: list[Tensor]

    def logprobs(self) -> list[TokenLogprobs]:
        rows, start = list[TokenLogprobs](), 0
        for part in self.packed:
            tokens = self.targets[start : start + len(part)]
            rows += filter(None, unpack(part, tokens, [self.num_top] * len(tokens)))
            start += len(part)
        return rows


class SamplingStages:
    """What the rows of a step go through, and the device memory for it.

    Args:
        previous: [max_num_seqs] int64 on the device; receives a step's tokens, for the next step.
        vocab: columns of the logits.
        max_len: tokens of the longest sequence.
    """

    def __init__(self, previous: Tensor, vocab: int, max_len: int) -> None:
        self._previous, self._vocab, self._max_len = previous, vocab, max_len
        max_num_seqs, device = len(previous), previous.device
        self._device, self._cuda = device, device.type == "cuda"
        self._processors = LogitsProcessors(max_num_seqs, vocab, max_len, device)
        self._owners: list[tuple[int, int] | None] = [None] * max_num_seqs  # of each slot that is filled: request, admission
        self._asked = CpuGpuBuffer((4, -(-max_num_seqs // 4) * 4), device)
        self._drawn = torch.zeros_like(previous)
        self._packed: Tensor | None = None  # [max_num_seqs, columns(MAX_TOP)], allocated when first asked for
        self._packed_host: list[Tensor] = []
        self._workspace: LogprobsWorkspace | None = None
        self._buffers: SamplingBuffers | None = None
        self._masks: CpuGpuBuffer | None = None  # allocated when first asked for
        if self._cuda:
            self._host = [torch.zeros(max_num_seqs, dtype=torch.int64).pin_memory() for _ in range(2)]
            self._buffers = SamplingBuffers(max_num_seqs, vocab, device)

    def _send_masks(self, count: int, fill: FillMasks) -> Tensor:
        """Masks of `count` rows, as `fill` writes them on the host, on their way to the device."""
        if self._masks is None:
            self._masks = CpuGpuBuffer((len(self._previous), -(-self._vocab // 32)), self._device)
        fill(self._masks.host()[:count])
        self._masks.send(count)
        return self._masks.device[:count]

    def draw(
        self, logits: Tensor, row_maxima: Tensor | None, rows: Sequence[Row], fill: FillMasks | None = None
    ) -> Drawn:
        """Draw a token from each row of `logits`.

        Args:
            row_maxima: see `sample`.
            fill: writes the masks of the rows, see `LogitsProcessors.process`. It may wait for earlier steps, so it is called
                after everything that the host can do without the masks. None: there are no masks.
        """
        count, raw = len(rows), logits
        ruled = any(row.rules is not None for row in rows)
        wanted = [-1 if row.num_top is None else self._num_top(row.num_top) for row in rows]
        num_top = max(wanted)
        if ruled or num_top >= 0 or fill is not None:
            slots, counts, steps = self._send(rows, wanted)
        if ruled:
            self._fill_slots(rows)
        packed = self._room(count, num_top) if num_top >= 0 else None
        tokens = self._previous[:count] if packed is None else self._drawn[:count]
        settings = [(row.sampling, row.step) for row in rows]
        batch = SamplingBatch.build(settings) if self._buffers is None else self._buffers.fill(settings)
        scratch = None if self._buffers is None else self._buffers.workspace
        mask = None if fill is None else self._send_masks(count, fill)
        if ruled or mask is not None:
            logits, row_maxima = self._processors.process(logits, slots, steps, [row.rules for row in rows], mask), None
        sample(logits, batch, workspace=scratch, row_maxima=row_maxima, out=tokens)
        if packed is not None:
            token_logprobs(raw, tokens, counts, num_top, out=packed, workspace=self._workspace)
            packed = self._packed_to_host(packed)
            self._previous[:count].copy_(tokens)
        if ruled:
            self._processors.record(tokens, slots, steps)
        return Drawn(self._tokens_to_host(tokens), packed, wanted)

    def score(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[Scored]:
        """Score the targets of chunks with the logits [R, V] of their step."""
        scored, start = [], 0
        for chunk in chunks:
            if chunk.targets:
                num_top, parts = self._num_top(chunk.num_top), []
                targets = self._to_device(torch.tensor(chunk.targets, dtype=torch.int64))
                wanted = torch.full((SCORED_ROWS,), num_top, dtype=torch.int32, device=self._device)
                for first in range(0, len(targets), SCORED_ROWS):
                    tokens = targets[first : first + SCORED_ROWS]
                    rows = logits[start + first : start + first + len(tokens)]
                    rows = rows.clone() if self._vocab % 4 else rows  # kernels are compiled for aligned rows
                    parts.append(token_logprobs(rows, tokens, wanted[: len(tokens)], num_top))
                scored.append(Scored(chunk.targets, num_top, [self._new_on_host(part) for part in parts]))
            start += chunk.num_logits
        return scored

    def compile(self) -> None:
        """Launch every kernel but those of `sample` on one row, so that warm-up compiles it."""
        from minirt.kernels.sampling.process import VARIANTS

        processors = LogitsProcessors(1, self._vocab, self._max_len, self._device)
        rules = Rules(presence=1.0, bias={0: 1.0}, allowed=(0,), bad_words=((0, 0),))
        processors.fill(0, rules, [0], [0])
        logits = torch.zeros(1, self._vocab, device=self._device)
        row, step = (torch.zeros(1, dtype=dtype, device=self._device) for dtype in (torch.int32, torch.int64))
        mask = torch.zeros(1, -(-self._vocab // 32), dtype=torch.int32, device=self._device)
        for masked in VARIANTS:
            processors.process(logits, row, step, [rules], mask if masked else None)
        processors.record(step, row, step)
        token_logprobs(logits, step, row, 1)

    def sampled_rows(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """The rows of a step's logits that are not scored."""
        rows, start = list[int](), 0
        for chunk in chunks:
            rows += range(start + len(chunk.targets), start + chunk.num_logits)
            start += chunk.num_logits
        return logits.index_select(0, self._to_device(torch.tensor(rows, dtype=torch.int64)))

    def _num_top(self, asked: int) -> int:
        return self._vocab if asked < 0 else min(asked, self._vocab)

    def _send(self, rows: Sequence[Row], wanted: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's slot (-1 without rules), number of most probable tokens, and step, on the device."""
        host, count = self._asked.host(), len(rows)
        slots = [-1 if row.rules is None else row.slot for row in rows]
        host[0, :count] = torch.tensor(slots, dtype=torch.int32)
        host[1, :count] = torch.tensor(wanted, dtype=torch.int32)
        host[2:].view(-1).view(torch.int64)[:count] = torch.tensor([row.step for row in rows])
        self._asked.send()
        device = self._asked.device
        return device[0, :count], device[1, :count], device[2:].view(-1).view(torch.int64)[:count]

    def _fill_slots(self, rows: Sequence[Row]) -> None:
        """Fill the slots of sequences that were admitted since. The host knows all their tokens: none was drawn since then."""
        for row in rows:
            if row.rules is not None and row.sequence is not None:
                sequence = row.sequence
                owner = sequence.id, sequence.admissions
                if self._owners[row.slot] != owner:
                    tokens, start = sequence.tokens, sequence.prompt_len
                    self._processors.fill(row.slot, row.rules, tokens[:start], tokens[start:])
                    self._owners[row.slot] = owner

    def _room(self, count: int, num_top: int) -> Tensor:
        """Where `token_logprobs` writes its result."""
        if num_top > MAX_TOP:
            return torch.empty(count, columns(num_top), dtype=torch.int32, device=self._device)
        if self._packed is None:
            shape = len(self._previous), columns(MAX_TOP)
            self._packed = torch.zeros(shape, dtype=torch.int32, device=self._device)
            if self._cuda:
                from minirt.kernels.sampling.logprobs import LogprobsWorkspace

                self._packed_host = [torch.zeros(shape, dtype=torch.int32).pin_memory() for _ in range(2)]
                self._workspace = LogprobsWorkspace(len(self._previous), self._vocab, self._device)
        return self._packed[:count]

    def _tokens_to_host(self, tokens: Tensor) -> Tensor:
        if not self._cuda:
            return tokens.clone()
        self._host.reverse()  # two, since the other's tokens may not have been read yet
        return self._host[0][: len(tokens)].copy_(tokens, non_blocking=True)

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

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._cuda else tensor
