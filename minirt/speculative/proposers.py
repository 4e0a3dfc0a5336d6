"""`proposer_of`: who proposes drafts, by `LoadOptions.speculative`. `NgramProposer`: drafts from the sequence itself."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.kernels.speculative import reference
from minirt.kernels.step.table import Columns, Rows
from minirt.speculative.draft_model import DraftModelProposer
from minirt.speculative.options import SpeculativeOptions
from minirt.step.batch import Batch
from minirt.step.kv_cache import KVCache

if TYPE_CHECKING:
    from minirt.engine.proposer import Proposer
    from minirt.modeling.model import Model


def proposer_of(speculative: "SpeculativeOptions | Proposer | None", model: "Model", cache: KVCache) -> "Proposer | None":
    """The proposer of `LoadOptions.speculative`, for a model with its cache.

    Raises:
        UnsupportedError: the options ask for a draft model, which `model` does not have.
    """
    if not isinstance(speculative, SpeculativeOptions):
        return speculative
    if speculative.has_draft_model:
        return DraftModelProposer(model, cache, speculative.num_speculative_tokens)
    return NgramProposer(speculative.num_speculative_tokens, speculative.prompt_lookup_min, speculative.prompt_lookup_max)


class NgramProposer:
    """Proposes what followed the last tokens of a sequence where they occurred before, in the prompt or in the generated text
    (prompt lookup decoding, Saxena 2023).

    Args:
        max_drafts: number of drafts of a sequence, at most.
        shortest, longest: tokens of a match. The longest match counts, and of equally long ones the last.
    """

    needs_history = True

    def __init__(self, max_drafts: int = 4, shortest: int = 2, longest: int = 4) -> None:
        self.max_drafts, self._shortest, self._longest = max_drafts, shortest, longest

    def propose(
        self, table: Tensor, columns: Columns, rows: Rows, batch: Batch | None = None, wanted: int | None = None
    ) -> None:
        """See `engine.proposer.Proposer`, and `kernels.speculative.reference` for the rule and its InputError.

        It needs no `batch`, and all drafts take the time of one.
        """
        _propose(table.device)(table, columns, rows, most=self.max_drafts, shortest=self._shortest, longest=self._longest)


@cache
def _propose(device: torch.device) -> Callable[..., None]:
    """The kernel, or its eager form."""
    if not is_nvidia(device):
        return reference.propose
    from minirt.kernels.speculative import ngram

    return ngram.propose
