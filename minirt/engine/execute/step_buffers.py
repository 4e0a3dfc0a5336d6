"""`StepBuffers`: the table of slots, and every buffer that a step reads or writes, at addresses that CUDA graphs can keep."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import is_nvidia
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
_NUM_ROWS = 5  # of `Rows`, beside the tokens
_HEAD = 4  # words of a message before them: number of edits, whether logits are needed, whether `commit_greedy` is
_GROUPS = "slot_mapping", "split_starts", "block_tables"  # of `StepTensors`: with a row for each cache group
_INT64 = "tokens", "positions", "slot_mapping", "logits_indices", "draw_rows"  # of `StepTensors`; the others are int32


def _sizes(tokens: int, seqs: int, logits: int, draws: int) -> tuple[int, ...]:
    """The first dimensions of `StepTensors`, except for the block tables and that of groups."""
    return (tokens,) * 3 + (seqs + 1, seqs, seqs + 1, seqs, seqs, 0, logits, *((draws,) * 4))


class CpuGpuBuffer:
    """An int32 device buffer that is refilled for each step; on a CUDA device through pinned memory.

    There are two pinned buffers, because the copy from one may still be queued when the next step's values are written. Each has
    an event, because its copy may still be queued one step later, if the host has not waited for the device since.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._turn = 0  # which of the two is written
        self._views: dict[int | None, list[Tensor]] = {}  # the first rows of all three tensors, by their number

    def next_host(self) -> Tensor:
        """The host buffer for the next step's values. Waits until its previous values have reached the device."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def array(self) -> np.ndarray:
        """`next_host` as an array."""
        self.next_host()
        return self._arrays[self._turn]

    def written(self) -> np.ndarray:
        """The host buffer that `next_host` has returned last."""
        return self._arrays[self._turn]

    def send(self, count: int | None = None) -> None:
        """Queue the copy of the last buffer returned by `next_host` to the device: its first `count` rows, or all rows."""
        self.copy(count)
        self.copied()

    def copy(self, count: int | None = None) -> None:
        """The first part of `send`, so that urgent work can be queued before `copied`. Keeps views for each `count`."""
        if (views := self._views.get(count)) is None:
            views = self._views[count] = [tensor[:count] for tensor in (*self._host, self.device)]
        views[2].copy_(views[self._turn], non_blocking=True)

    def copied(self) -> None:
        """The second part of `send`: from now on, `next_host` waits for the copy."""
        if self._copied:
            self._copied[self._turn].record()


class StepSizes(NamedTuple):
    """Of the largest step, padding included.

    Args:
        row_maxima_tiles: columns of the head's row maxima.
        logits_rows: rows of the logits that CUDA graphs write; 0: there are none.
    """

    seqs: int
    tokens: int
    draws: int
    row_maxima_tiles: int = 0
    logits_rows: int = 0


class StepView(NamedTuple):
    """The parts of the buffers that steps of one size use.

    Args:
        tensors: the input of the layers, and what the step has for each draw. `settings`: of the draws.
        rows: the sequences, in the step's message.
        result: [B, 2 + drafts], from `commit`.
        operands: table, rows, tensors, settings, result and report for the functions of the table; on a CPU as arrays.
    """

    tensors: StepTensors
    settings: SamplingBatch
    rows: Rows
    result: Tensor
    operands: Any


class _Operands(NamedTuple):
    table: Any
    rows: Any
    tensors: Any
    settings: Any
    result: Any
    report: Any


class StepBuffers:
    """One of each buffer, for all steps, which run one after the other.

    The host sends a message for each step: its sequences, edits of the table, its tokens, and the words of the edits. On the
    device, `prepare` applies the edits and derives the step's input, and `commit` writes what was drawn into the table. CUDA
    graphs begin with `prepare` and end with `commit_greedy`: nothing that these do on the host depends on the values.

    Args:
        limits: of the engine; its `max_model_len` is the number of tokens of the longest sequence.
        vocab_size: columns of the logits.

    Attributes:
        columns, table: of the slots.
        drafts: [S, drafts] int32, the drafts of each slot; None: there are none.
        logits_needed: [1] int32: whether a head that stores row maxima must write logits, too.
        greedy: [1] int32: whether `commit_greedy` does anything in this step.
        logits, row_maxima: those that CUDA graphs write.
    """

    def __init__(self, cache: KVCache, limits: EngineLimits, device: torch.device, vocab_size: int, largest: StepSizes) -> None:
        max_seqs, max_tokens, max_draws, row_maxima_tiles, logits_rows = largest
        self._page_size, self._device, self._vocab_size = cache.page_size, device, vocab_size
        self._kernels = None
        if is_nvidia(device):
            from minirt.kernels.step import kernels

            self._kernels = kernels
        self._forms: Any = self._kernels or eager
        self._views: dict[tuple[int, ...], StepView] = {}
        history = limits.max_model_len if limits.keeps_history else 0
        self.columns = Columns(limits.max_drafts, tuple(cache.window_allocators), cache.pages_for(limits.max_model_len), history)
        self.table = torch.zeros(limits.max_num_seqs, self.columns.words, dtype=torch.int32, device=device)
        self._max_seqs = -(-max_seqs // 4) * 4
        self._snapshots_at = _HEAD + _NUM_ROWS * self._max_seqs
        self._edits_at = self._snapshots_at + (2 * MAX_SNAPSHOTS * self._max_seqs if cache.has_states else 0)
        groups = self.columns.groups
        self._tokens_at, self._max_tokens = self._edits_at + 4 * (1 + groups) * self._max_seqs, max_tokens
        words = self._tokens_at + max_tokens + self._max_seqs * (self.columns.page_tables + groups * self.columns.pages)
        self._message = CpuGpuBuffer((words,), device)
        self._words = self._message.device.numpy() if self._kernels is None else np.zeros(1, np.int32)  # on a CPU
        self.logits_needed, self.greedy = self._message.device[1:2], self._message.device[2:3]
        drafts = self.table[:, NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + limits.max_drafts]
        self.drafts = drafts if limits.max_drafts else None
        sizes = _sizes(max_tokens, max_seqs, max(limits.max_logits_rows, logits_rows), max_draws)
        dtypes = [torch.int64 if name in _INT64 else torch.int32 for name in StepTensors._fields]
        rows = [(groups, -(-n // 4) * 4) if name in _GROUPS else (n,) for name, n in zip(StepTensors._fields, sizes, strict=True)]
        step = StepTensors(*(torch.zeros(*n, dtype=d, device=device) for n, d in zip(rows, dtypes, strict=True)))
        self._settings = SamplingBatch(*(torch.zeros(max_draws, dtype=dtype, device=device) for dtype in DTYPES))
        tables = torch.zeros(groups, -(-max_seqs * self.columns.pages // 4) * 4, dtype=torch.int32, device=device)
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
        edits, tokens, count, size = plan.edits, plan.tokens, len(plan.sequences.slots), self._max_seqs
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

    def view(self, tokens: int, seqs: int, logits: int, draws: int) -> StepView:
        """The parts for steps of this size, padding included. They are kept, since most steps have the size of one before."""
        key = tokens, seqs, logits, draws
        if (view := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self._new_view(*key)
        return view

    def _new_view(self, tokens: int, seqs: int, logits: int, draws: int) -> StepView:
        step, width, message, size = self._step, self.columns.pages, self._message.device, self._max_seqs
        tables = step.block_tables[:, : seqs * width].unflatten(1, (seqs, width))
        counts = dict(zip(StepTensors._fields, _sizes(tokens, seqs, logits, draws), strict=True))
        parts = [x[:, : counts[name]] if name in _GROUPS else x[: counts[name]] for name, x in step._asdict().items()]
        tensors, settings = StepTensors(*parts)._replace(block_tables=tables), self._settings.part(slice(draws))
        columns = [message[_HEAD + i * size :][:seqs] for i in range(_NUM_ROWS)]
        rows = Rows._make([*columns, message[self._tokens_at : self._tokens_at + self._max_tokens]])
        result, report = self._result[0, :seqs], self._result[-1, :seqs]
        operands = _Operands(self.table, rows, tensors, settings, result, report)
        if self._kernels is None:
            operands = _Operands(*(eager.arrays(part) if isinstance(part, tuple) else part.numpy() for part in operands))
        return StepView(tensors, settings, rows, result, operands)

    def prepare(self, view: StepView, *, one_token: bool, settings: bool = True) -> None:
        """Apply the message's edits to the table, and derive the input of the step.

        Args:
            one_token: as in `derive`.
            settings: whether what the step has for each draw is needed.
        """
        table, rows, tensors, of_draws, *_ = view.operands
        if self._kernels is not None:
            message = self._message.device
            room = message[self._edits_at : self._tokens_at].view(-1, 4)
            self._kernels.edit_table(table, room, message, message[:1])
        elif self._words[0]:
            edits = self._words[self._edits_at : self._edits_at + 4 * self._words[0]].reshape(-1, 4)
            self._forms.edit_table(table, edits, self._words)
        of_draws = of_draws if settings or self._kernels is not None else None
        self._forms.derive(table, self.columns, rows, tensors, of_draws, self._page_size, KV_SPLIT, one_token=one_token)

    def commit(self, view: StepView, drawn: Tensor) -> None:
        """Write the drawn tokens [Q] into the table, and the result, for `to_host`; see `eager.commit`."""
        table, rows, tensors, _, result, _ = view.operands
        self._forms.commit(table, self.columns, rows, tensors.seq_lens, drawn, result)

    def commit_greedy(self, view: StepView, row_maxima: Tensor) -> None:
        """`commit` of the token with the largest logit of each row, by its row maxima [Q, P]. On a GPU."""
        if self._kernels is not None:
            table, rows, tensors, _, result, _ = view.operands
            self._kernels.commit_greedy(table, self.columns, rows, tensors.seq_lens, row_maxima, self.greedy, result)

    def report(self, view: StepView) -> None:
        """Copy the drafts of a step's sequences, for `to_host`."""
        self._forms.report(self.table, self.columns, view.operands.rows, view.operands.report, self._vocab_size)

    def to_host(self, view: StepView) -> tuple[np.ndarray, np.ndarray | None]:
        """A step's result [B, 2 + drafts], and what `report` has copied, on the host or on their way there.

        They are valid until the result of the step after next.
        """
        self._result_host.reverse()  # two, since the other's tokens may not have been read yet
        (host, array), seqs = self._result_host[0], len(view.result)
        if len(array) == 1:
            host[0, :seqs].copy_(view.result, non_blocking=True)
            return array[0, :seqs], None
        host.copy_(self._result, non_blocking=True)
        return array[0, :seqs], array[1, :seqs]

    def of_graphs(self) -> dict[str, Tensor]:
        """The device tensors of all steps that CUDA graphs read or write."""
        return {
            "table": self.table, "message": self._message.device, "logits": self.logits, "row_maxima": self.row_maxima,
            "result": self._result,
        }  # fmt: skip

    def row_maxima_of(self, rows: int, tiles: int) -> "RowMaxima | None":
        """Buffers for the row maxima of `rows` rows; None: too many rows need logits, or the head stores none."""
        if not tiles or rows > len(self.row_maxima):
            return None
        from minirt.kernels.linear.product import RowMaxima

        return RowMaxima(self.row_maxima[:rows, :tiles], self.logits_needed)
