"""`DraftModelProposer`: drafts by a model that continues from the hidden states of its target, such as multi-token prediction.

A `minirt.engine.proposer.Proposer`. After a step, the draft model runs over the step's rows, which gives the first draft of each
sequence and fills the draft model's pages, also those of prompts. Each further draft is one pass over the draft before it. The
pages are those of the target: page numbers mean the same tokens in every layer.
"""

from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.errors import UnsupportedError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.speculative import reference
from minirt.kernels.speculative.reference import DraftTokens
from minirt.kernels.step.table import Columns, Rows
from minirt.step.batch import Batch
from minirt.step.kv_cache import KVCache

if TYPE_CHECKING:
    from minirt.modeling.model import Model


class DraftModelProposer:
    """Proposes the most probable tokens of a draft model, or tokens drawn from it at a temperature.

    Args:
        model: with a `draft_model`, whose weights are loaded.
        cache: of the model.
        max_drafts: number of drafts of a sequence, at most.
    """

    needs_history = False
    capturable = True  # `propose` may be part of a CUDA graph

    def __init__(self, model: "Model", cache: KVCache, max_drafts: int) -> None:
        if model.draft_model is None:
            what, hint = "the model was built without a draft model", "load it with the same speculative options"
            raise UnsupportedError(what, where="speculative", expected="Model(…, draft_layers=…)", hint=hint)
        self.max_drafts, self._model, self._cache = max_drafts, model.draft_model, cache
        # Eager attention reads lengths on the host; a layer of the user's may. Kernels read them on the device.
        kinds = {layer.implementation for layer in self._model.layers}
        self._exact = "eager" in kinds or (model.device.type == "cpu" and kinds != {"triton"})
        ids = getattr(self._model.layers[-1].lm_head, "ids", None)  # type: ignore[attr-defined]  # of a reduced vocabulary
        self._ids: Tensor | None = None if ids is None else ids.to(model.device)

    def propose(self, table: Tensor, columns: Columns, rows: Rows, batch: Batch, wanted: int) -> None:
        """See `engine.proposer.Proposer`."""
        forms, model, page_size = _forms(table.device), self._model, self._cache.page_size
        ids, last = forms.first_pass(table, rows, batch.input_ids, batch.positions, batch.query_starts_device)
        once = batch.every_row and batch.max_query_len == 1  # each sequence has one row, in order
        step = replace(
            batch, input_ids=ids, logits_indices=batch.logits_indices if once else last, every_row=once, hidden=batch.taps,
            taps=self._states(len(rows.slots)), logits=None, row_maxima=None,
        )  # fmt: skip
        for number in range(1, wanted + 1):
            logits, out = model(step, self._cache), _buffers(len(rows.slots), table.device)
            forms.draw(
                logits, self._ids, table, columns, rows, out, number=number, most=wanted, page_size=page_size,
                kv_split=KV_SPLIT,
            )  # fmt: skip
            if number == wanted:
                break
            if self._exact:
                going_on = (out.seq_lens > 0).nonzero().squeeze(1)
                if not len(going_on):
                    break
                rows = rows._replace(slots=rows.slots[going_on])
                step = self._few(step, out, going_on)
            else:
                step = self._all(step, out, rows, batch)

    def _states(self, count: int) -> Tensor:
        model = self._model
        return torch.empty(count, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def _few(self, step: Batch, out: DraftTokens, kept: Tensor) -> Batch:
        """The next pass of the sequences that get a further draft. The host knows their lengths."""
        count, lens = len(kept), tuple(out.seq_lens[kept].tolist())
        splits = [-(-length // KV_SPLIT) for length in lens]
        starts = torch.tensor([0, *accumulate(splits)], dtype=torch.int32, device=kept.device)
        drafts = DraftTokens(out.tokens[kept], out.positions[kept], out.slot_mapping[kept], out.seq_lens[kept], starts)
        hidden = None if step.taps is None else step.taps[kept]
        slots, tables = step.seq_slots[kept], step.block_tables[kept]
        return self._pass(drafts, slots, tables, lens, max(lens), sum(splits), hidden=hidden, count=count)

    def _all(self, step: Batch, out: DraftTokens, rows: Rows, batch: Batch) -> Batch:
        """The next pass of all sequences, in bounds of their lengths. No row begins a page, so they grow to whole pages."""
        size = self._cache.page_size
        lens = tuple(-(-length // size) * size for length in batch.seq_lens)
        longest = -(-batch.max_seq_len // size) * size
        return self._pass(
            out, rows.slots, batch.block_tables, lens, longest, batch.max_splits, hidden=step.taps, count=len(rows.slots)
        )

    def _pass(
        self, out: DraftTokens, seq_slots: Tensor, block_tables: Tensor, lens: tuple[int, ...], longest: int, splits: int, *,
        hidden: Tensor | None, count: int,
    ) -> Batch:  # fmt: skip
        """A pass with one row of each sequence."""
        device = out.tokens.device
        return Batch(
            out.tokens, out.positions, out.slot_mapping, torch.arange(count, device=device),
            torch.arange(count + 1, dtype=torch.int32, device=device), out.seq_lens, out.split_starts, seq_slots, block_tables,
            (1,) * count, lens, longest, splits, every_row=True, taps=self._states(count), hidden=hidden,
        )  # fmt: skip


def _buffers(count: int, device: torch.device) -> DraftTokens:
    """Uninitialized."""
    tokens, positions, slots = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(3))
    lens, starts = (torch.empty(count + i, dtype=torch.int32, device=device) for i in range(2))
    return DraftTokens(tokens, positions, slots, lens, starts)


@cache
def _forms(device: torch.device) -> ModuleType:
    """The kernels, or their eager forms."""
    if not is_nvidia(device):
        return reference
    from minirt.kernels.speculative import draft_model

    return draft_model
