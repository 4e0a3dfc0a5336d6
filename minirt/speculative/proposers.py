"""`proposer_of`: who proposes drafts, by `LoadOptions.speculative`."""

from typing import TYPE_CHECKING

from minirt.speculative.draft_model import DraftModelProposer
from minirt.speculative.ngram import NgramProposer
from minirt.speculative.options import SpeculativeOptions
from minirt.step.kv_cache import KVCache

if TYPE_CHECKING:
    from minirt.engine.runner import Proposer
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
