"""`StepBuffers`: the table of slots, and every buffer that a step reads or writes, at addresses that CUDA graphs can keep."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.engine.cpu_gpu_buffer import CpuGpuBuffer
from minirt.engine.limits import EngineLimits
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.sampling.batch import DTYPES, SamplingBatch
from minirt.kernels.step import table as eager
from minirt.kernels.step.table import MAX_SNAPSHOTS, NEXT_TOKENS, Columns, Rows, StepTensors
from minirt.step.kv_cache import KVCache
from minirt.step.plan import StepPlan

if TYPE_CHECKING:
    from minirt.kernels.linear.product import RowMaxima

_MOST_VIEWS = 512
_SIZED = [StepTensors._fields.index(name) for name in ("tokens", "seq_lens", "logits_indices", "draw_rows")]
_NUM_ROWS = 5  # of `Rows`, beside the tokens
_HEAD = 4  # words of a message before them: number of edits, whether logits are needed, whether `commit_greedy` is
_INT64 = "tokens", "positions", "slots", "logits_indices", "draw_rows"  # of `StepTensors`; the others are int32
T = TypeVar("T")


def _sizes(tokens: int, seqs: int, logits: int, draws: int) -> tuple[int, ...]:
    """The first dimensions of `StepTensors`, except for the block tables."""
    return (tokens,) * 3 + (seqs + 1, seqs, seqs + 1, seqs, seqs, 0, logits, *((draws,) * 4))


def _kept(make: Callable[..., T]) -> Callable[..., T]:
    """A method whose views are kept for each size: those of a step are often those of the step before."""

    @wraps(make)
    def kept(self: "StepBuffers", *sizes: int) -> T:
        key = make, *sizes
        if (views := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = make(self, *sizes)
        return views

    return kept


class StepBuffers:
    """One of each buffer, for all steps, which run one after the other.

    The host sends a message for each step: its sequences, edits of the table, its tokens, and the words of the edits. On the
    device, `prepare` applies the edits and derives the step's input, and `commit` writes what was drawn into the table. CUDA
    graphs begin with `prepare` and end with `commit_greedy`: nothing that these do on the host depends on the values.

    Args:
        limits: of the engine; its `max_model_len` is the number of tokens of the longest sequence.
        max_seqs, max_tokens, max_draws: of the largest step, padding included.
        vocab_size: columns of the logits.
        row_maxima_tiles: columns of the head's row maxima.
        logits_rows: rows of the logits that CUDA graphs write; 0: there are none.

    Attributes:
        columns, table: of the slots.
        drafts: [S, drafts] int32, the drafts of each slot; None: there are none.
        logits_needed: [1] int32: whether a head that stores row maxima must write logits, too.
        greedy: [1] int32: whether `commit_greedy` does anything in this step.
        logits, row_maxima: those that CUDA graphs write.
    """

    def __init__(
        self, cache: KVCache, limits: EngineLimits, device: torch.device, vocab_size: int, max_seqs: int, max_tokens: int,
        max_draws: int, row_maxima_tiles: int = 0, logits_rows: int = 0,
    ) -> None:  # fmt: skip
        self._page_size, self._device, self._vocab_size = cache.page_size, device, vocab_size
        self._kernels = None
        if is_nvidia(device):
            from minirt.kernels.step import kernels

            self._kernels = kernels
        self._forms: Any = self._kernels or eager
        self._views: dict[tuple[Any, ...], Any] = {}
        history = limits.max_model_len if limits.keeps_history else 0
        self.columns = Columns(limits.max_drafts, 1, cache.pages_for(limits.max_model_len), history)
        self.table = torch.zeros(limits.max_num_seqs, self.columns.words, dtype=torch.int32, device=device)
        self._max_seqs = -(-max_seqs // 4) * 4
        self._snapshots_at = _HEAD + _NUM_ROWS * self._max_seqs
        self._edits_at = self._snapshots_at + (2 * MAX_SNAPSHOTS * self._max_seqs if cache.has_states else 0)
        self._tokens_at, self._max_tokens = self._edits_at + 4 * 2 * self._max_seqs, max_tokens
        words = self._tokens_at + max_tokens + self._max_seqs * (self.columns.page_tables + self.columns.pages)
        self._message = CpuGpuBuffer((words,), device)
        self.logits_needed, self.greedy = self._message.device[1:2], self._message.device[2:3]
        drafts = self.table[:, NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + limits.max_drafts]
        self.drafts = drafts if limits.max_drafts else None
        sizes = _sizes(max_tokens, max_seqs, max(limits.max_logits_rows, logits_rows), max_draws)
        dtypes = [torch.int64 if name in _INT64 else torch.int32 for name in StepTensors._fields]
        step = StepTensors(*(torch.zeros(n, dtype=d, device=device) for n, d in zip(sizes, dtypes, strict=True)))
        self._settings = SamplingBatch(*(torch.zeros(max_draws, dtype=dtype, device=device) for dtype in DTYPES))
        tables = torch.zeros(self.columns.groups, max_seqs, self.columns.pages, dtype=torch.int32, device=device)
        snapshots = self._message.device[self._snapshots_at : self._edits_at].view(-1, MAX_SNAPSHOTS, 2)
        self._step = step._replace(block_tables=tables, snapshots=snapshots)
        shape = 1 + (limits.max_drafts > 0), max_seqs, 2 + limits.max_drafts  # the result, and the drafts for the next step
        self._result = torch.zeros(shape, dtype=torch.int32, device=device)
        results = [torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._result_host = [(result, result.numpy()) for result in results]
        self.logits = torch.zeros(logits_rows, vocab_size, dtype=torch.float32, device=device)
        self.row_maxima = torch.zeros(logits_rows, row_maxima_tiles, dtype=torch.int64, device=device)

    def send(self, plan: StepPlan, *, logits_needed: bool = True, greedy: bool = False) -> None:
        """Queue the copy of a step's message to the device. Call `sent` when the step is queued.

        Args:
            logits_needed: whether a head that stores row maxima must write logits, too.
            greedy: whether `commit_greedy` does anything in this step.
        """
        edits, tokens, count, size = plan.edits, plan.tokens, len(plan.sequences), self._max_seqs
        if self.columns.history:  # of unbounded size, so it is not a part of the message
            for slot, first, values in [edit for edit in edits if edit.column >= self.columns.tokens]:
                known = torch.from_numpy(values)
                known = known.pin_memory() if self._device.type == "cuda" else known
                self.table[slot, first : first + len(values)].copy_(known, non_blocking=True)
            edits = tuple(edit for edit in edits if edit.column < self.columns.tokens)
        words = self._message.array()
        words[:3] = len(edits), logits_needed, greedy
        rows = words[_HEAD : self._snapshots_at].reshape(_NUM_ROWS, size)
        rows[:, :count] = plan.sequences.values[:_NUM_ROWS]
        rows[:, count:], rows[0, count:] = 0, -1
        if self._edits_at > self._snapshots_at:
            snapshots = words[self._snapshots_at : self._edits_at].reshape(size, MAX_SNAPSHOTS, 2)
            snapshots[:] = -1
            for place, row, offset in plan.snapshots:
                snapshots[place, (snapshots[place, :, 0] >= 0).sum()] = row, offset
        end = self._edits_at
        if edits or len(tokens):
            heads, end = list[int](), self._tokens_at + len(tokens)
            words[self._tokens_at : end] = tokens
            for slot, first, values in edits:  # their words follow the tokens, whose number differs
                heads += slot, first, len(values), end
                words[end : end + len(values)] = values
                end += len(values)
            words[self._edits_at : self._edits_at + len(heads)] = heads
        step = max(64, 1 << end.bit_length() - 4)  # at most an eighth more, in few sizes: the views for them are kept
        self._message.copy(-(-end // step) * step)

    def sent(self) -> None:
        """Guard the host's copy of the message until the device has it."""
        self._message.copied()

    @_kept
    def rows(self, seqs: int) -> Rows:
        """The rows of a step with `seqs` sequences, padding included."""
        message, size = self._message.device, self._max_seqs
        slots, starts, counts, logits, draws = (message[_HEAD + i * size :][:seqs] for i in range(_NUM_ROWS))
        return Rows(slots, starts, counts, logits, draws, message[self._tokens_at : self._tokens_at + self._max_tokens])

    @_kept
    def tensors(self, tokens: int, seqs: int, logits: int, draws: int) -> StepTensors:
        """The tensors of a step of this size, padding included."""
        step, width = self._step, self.columns.pages
        tables = step.block_tables.view(-1)[: self.columns.groups * seqs * width].view(self.columns.groups, seqs, width)
        parts = [tensor[:size] for tensor, size in zip(step, _sizes(tokens, seqs, logits, draws), strict=True)]
        return StepTensors(*parts)._replace(block_tables=tables)

    @_kept
    def settings(self, draws: int) -> SamplingBatch:
        """The settings of a step's draws."""
        return self._settings.part(slice(draws))

    @_kept
    def _row_arrays(self, seqs: int) -> tuple[Any, Rows]:
        return self._message.device.numpy(), eager.arrays(self.rows(seqs))

    @_kept
    def _arrays_of(self, tokens: int, seqs: int, logits: int, draws: int) -> Any:
        return eager.arrays(self.tensors(tokens, seqs, logits, draws)), eager.arrays(self.settings(draws))

    def prepare(self, step: StepTensors, *, one_token: bool, settings: bool = True) -> None:
        """Apply the message's edits to the table, and derive the input of the step.

        Args:
            one_token: as in `derive`.
            settings: whether what the step has for each draw is needed.
        """
        seqs, sizes = len(step.seq_lens), (self._page_size, KV_SPLIT)
        if (kernels := self._kernels) is not None:
            message = self._message.device
            edits = message[self._edits_at : self._tokens_at].view(-1, 4)
            kernels.edit_table(self.table, edits, message, message[:1])
            draws = self.settings(len(step.draw_rows))
            kernels.derive(self.table, self.columns, self.rows(seqs), step, draws, *sizes, one_token=one_token)
        else:
            words, rows = self._row_arrays(seqs)
            if words[0]:
                edits = words[self._edits_at : self._edits_at + 4 * words[0]].reshape(-1, 4)
                eager.edit_table(self.table, edits, words)
            to, of_draws = self._arrays_of(*(len(step[i]) for i in _SIZED))
            eager.derive(self.table, self.columns, rows, to, of_draws if settings else None, *sizes, one_token=one_token)

    @_kept
    def _operands(self, seqs: int) -> tuple[Rows, Tensor, Tensor]:
        """Of the forms of `commit` and `report`: the rows, the result [B, 2 + drafts], and the report of drafts."""
        rows = self._row_arrays(seqs)[1] if self._kernels is None else self.rows(seqs)
        return rows, self._result[0, :seqs], self._result[-1, :seqs]

    def commit(self, step: StepTensors, drawn: Tensor) -> None:
        """Write the drawn tokens [Q] into the table, and the result, for `to_host`; see `eager.commit`."""
        rows, result, _ = self._operands(len(step.seq_lens))
        self._forms.commit(self.table, self.columns, rows, step.seq_lens, drawn, result)

    def commit_greedy(self, step: StepTensors, row_maxima: Tensor) -> None:
        """`commit` of the token with the largest logit of each row, by its row maxima [Q, P]. On a GPU."""
        if self._kernels is not None:
            rows, result, _ = self._operands(len(step.seq_lens))
            self._kernels.commit_greedy(self.table, self.columns, rows, step.seq_lens, row_maxima, self.greedy, result)

    def report(self, seqs: int) -> None:
        """Copy the drafts of a step's sequences, for `to_host`."""
        rows, _, report = self._operands(seqs)
        self._forms.report(self.table, self.columns, rows, report, self._vocab_size)

    def to_host(self, seqs: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A step's result [B, 2 + drafts], and what `report` has copied, on the host or on their way there.

        They are valid until the result of the step after next.
        """
        self._result_host.reverse()  # two, since the other's tokens may not have been read yet
        host, array = self._result_host[0]
        if len(array) == 1:
            host[0, :seqs].copy_(self._operands(seqs)[1], non_blocking=True)
            return array[0, :seqs], None
        host.copy_(self._result, non_blocking=True)
        return array[0, :seqs], array[1, :seqs]

    def row_maxima_of(self, rows: int, tiles: int) -> "RowMaxima | None":
        """Buffers for the row maxima of `rows` rows; None: too many rows need logits, or the head stores none."""
        if not tiles or rows > len(self.row_maxima):
            return None
        from minirt.kernels.linear.product import RowMaxima

        return RowMaxima(self.row_maxima[:rows, :tiles], self.logits_needed)
