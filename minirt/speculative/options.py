"""`SpeculativeOptions`: how drafts are proposed, as plain values. Names are vLLM's. Imports no torch."""

import re
from typing import Any, NamedTuple

from minirt.errors import ConfigError, MinirtError, UnsupportedError, quoted, shortened
from minirt.files import parse_json
from minirt.kernels.speculative.limits import LONGEST, MAX_DRAFTS
from minirt.settings import Integer, Settings, setting, settings_of, switch

METHODS = {"ngram": 4, "mtp": 3}  # with the default of num_speculative_tokens
DRAFT_VOCAB = 32768  # the default of draft_vocab_size
# Fields that one method alone has.
_OF_METHOD = {"ngram": ("prompt_lookup_min", "prompt_lookup_max"), "mtp": ("draft_vocab_size", "draft_vocab_text")}
# vLLM's names of the methods.
_ALSO = {"ngram_gpu": "ngram", "qwen3_5_mtp": "mtp", "qwen3_next_mtp": "mtp"}

# Keys of vLLM's config, and arguments of the same name, that have no meaning here.
_REFUSED = {
    "model": 'not supported: minirt has no draft models in files of their own; write "method": "ngram" or "mtp"',
    **dict.fromkeys((
        "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend", "attention_backend",
        "kv_cache_dtype", "max_model_len", "revision", "code_revision", "draft_load_config", "draft_sample_method",
        "draft_lm_head_quantization", "use_heterogeneous_vocab", "use_local_argmax_reduction", "parallel_drafting",
        "disable_padded_drafter_batch", "disable_eagle_block_drop", "index_share_for_mtp_iteration", "dspark_draft_topk",
    ), "not supported: minirt has no draft models in files of their own"),
    **dict.fromkeys((
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ), "not supported: minirt has no suffix decoding"),
    **dict.fromkeys((
        "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    ), "not supported: the sampler verifies drafts, which changes no distribution"),
    **dict.fromkeys((
        "num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "disable_by_batch_size",
    ), "not needed: the number of drafts adapts to the batch by itself"),
    "enforce_eager": "not supported for drafts alone: --no-cuda-graphs is for the whole model",
}  # fmt: skip
_LOOKUP = _OF_METHOD["ngram"]
_EXAMPLE = 'write an object such as {"method": "ngram", "num_speculative_tokens": 4}'


class SpeculativeOptions(Settings):
    """How drafts are proposed. Drafts change no distribution of tokens, only how many tokens a step yields.

    Raises:
        ConfigError: a value is out of range, or of the wrong type.
        UnsupportedError: minirt does not have the method.
    """

    _error = _name_error = ConfigError
    _elsewhere = _REFUSED

    # fmt: off
    method: str = setting(
        '"ngram": what followed the last tokens where they occurred before (prompt lookup decoding). "mtp": the layers of '
        "multi-token prediction that the checkpoint has beside the decoder.", "ngram")
    num_speculative_tokens: int = setting(
        'Drafts of a sequence in a step, at most; 1 to 7. None: 4 with "ngram", 3 with "mtp".', check=Integer(1, MAX_DRAFTS))
    prompt_lookup_min: int = setting('Of "ngram": tokens that must match, at least; 1 to 16.', 2, check=Integer(1, LONGEST))
    prompt_lookup_max: int = setting('Of "ngram": tokens that must match, at most; 1 to 16.', 4, check=Integer(1, LONGEST))
    draft_vocab_size: int = setting(
        'Of "mtp": drafts are among so many ids, so that their head is small; 0: all.', DRAFT_VOCAB,
        check=Integer(0, (1 << 31) - 1, text="a number of ids, or 0 for all"))
    draft_vocab_text: str | None = setting(
        'Of "mtp": a text file whose most frequent tokens these ids are.',
        details="None: the first ids of the tokenizer, which are those of its first merges, and its special tokens.")
    adaptive: bool = setting("Fewer drafts, or none, where measured step times say that they do not pay.", True, check=switch)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            what, shown = "minirt does not have this method of speculative decoding", quoted(self.method, 80)
            raise UnsupportedError(what, where="method", expected=" or ".join(METHODS), found=shown)
        if self.num_speculative_tokens is None:
            self._set("num_speculative_tokens", METHODS[self.method])
        for method, names in _OF_METHOD.items():
            for name in names if method != self.method else ():
                if getattr(self, name) != settings_of(type(self))[name].default:
                    what, hint = f"only method {method!r} has this option", f"leave it out, or use {method!r}"
                    raise ConfigError(what, where=name, found=quoted(getattr(self, name), 80), hint=hint)
        super().__post_init__()
        text, size = self.draft_vocab_text, self.draft_vocab_size
        if text is not None and (not isinstance(text, str) or not text or size == 0):
            expected = "the name of a text file" + ", with a draft_vocab_size other than 0" * (size == 0)
            shown = quoted(text, 80)
            raise ConfigError("not an acceptable value", where="draft_vocab_text", expected=expected, found=shown)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            expected = f"at most prompt_lookup_max, {self.prompt_lookup_max}"
            what, least = "is larger than the maximum", self.prompt_lookup_min
            raise ConfigError(what, where="prompt_lookup_min", expected=expected, found=least, hint="give both")

    @classmethod
    def _place(cls, name: str) -> str:
        return name

    @property
    def has_draft_model(self) -> bool:
        """Whether drafts come from layers with weights, which are loaded with the model."""
        return self.method == "mtp"

    def draft_rows(self, vocab: int) -> int | None:
        """How many of `vocab` ids drafts may have; None: all."""
        return self.draft_vocab_size if 0 < self.draft_vocab_size < vocab else None

    @classmethod
    def parse(cls, text: str, place: str = "--speculate") -> "SpeculativeOptions":
        """The options that a short text states: a method, or "ngram:k" or "mtp:k" with k drafts.

        Raises as the constructor does.
        """
        method, colon, count = text.partition(":")
        given: dict[str, Any] = {"method": method}
        if colon:
            given["num_speculative_tokens"] = int(count) if re.fullmatch("[0-9]{1,4}", count) else shortened(count, 80)
        try:
            return cls(**given)
        except MinirtError as error:  # it names a field, which nobody has typed
            raise error.at(f"{place} {shortened(text, 80)}") from None

    @classmethod
    def from_config(cls, text: str, place: str = "--speculative-config") -> "SpeculativeOptions":
        """The options that vLLM's `--speculative-config` states: a JSON object with "method". "ngram_gpu" is "ngram",
        "qwen3_5_mtp" and "qwen3_next_mtp" are "mtp". "draft_vocab_size" and "draft_vocab_text" are keys of minirt alone.

        As in vLLM, a prompt_lookup_min or prompt_lookup_max that is not given is equal to the other. If neither is, minirt's
        defaults apply.

        Raises:
            ConfigError: it is no such object, or a value is out of range.
            UnsupportedError: a key or a method of vLLM that minirt does not have.
        """
        given: dict[str, Any] = {}
        for key, value in parse_json(text, place, error=ConfigError, hint=_EXAMPLE).items():
            if key in _REFUSED:
                raise UnsupportedError("minirt does not have this key of vLLM", where=place, found=key, hint=_REFUSED[key])
            if key not in (known := [name for name in settings_of(cls) if name != "adaptive"]):
                raise ConfigError("unknown key", where=place, expected=", ".join(known), found=shortened(key, 80))
            given[key] = value
        given = {key: value for key, value in given.items() if value is not None}  # as in vLLM, null is not given
        if "method" not in given:
            raise ConfigError("the method is missing", where=place, expected='"method": "ngram" or "mtp"')
        if isinstance(given["method"], str):
            given["method"] = _ALSO.get(given["method"], given["method"])
        for one, other in (_LOOKUP, _LOOKUP[::-1]):
            value = given.get(one)
            if other not in given and type(value) is int and 1 <= value <= LONGEST:  # another value is refused by its own name
                given[other] = value
        try:
            return cls(**given)
        except MinirtError as error:
            raise error.at(f"{place}, {error.where}") from None


class DraftNeeds(NamedTuple):
    """What an engine keeps for drafts.

    Attributes:
        max_drafts: drafts of a sequence, at most.
        needs_history: whether the proposer reads the tokens of sequences.
    """

    max_drafts: int = 0
    needs_history: bool = False


def draft_needs(speculative: Any) -> DraftNeeds:
    """What an engine keeps for `LoadOptions.speculative`.

    Raises:
        ConfigError: it is neither options nor a proposer.
    """
    if speculative is None:
        return DraftNeeds()
    if isinstance(speculative, SpeculativeOptions):
        return DraftNeeds(speculative.num_speculative_tokens, not speculative.has_draft_model)
    drafts, history = getattr(speculative, "max_drafts", None), getattr(speculative, "needs_history", None)
    if not callable(getattr(speculative, "propose", None)) or type(history) is not bool or type(drafts) is not int:
        expected = "SpeculativeOptions, or a proposer: propose(table, columns, rows, batch, wanted), max_drafts, needs_history"
        shown = quoted(speculative, 80)
        raise ConfigError("not options of speculative decoding", where="speculative", expected=expected, found=shown)
    if not 0 <= drafts <= MAX_DRAFTS:
        raise ConfigError("too many drafts", where="speculative.max_drafts", expected=f"0 to {MAX_DRAFTS}", found=drafts)
    return DraftNeeds(drafts, history)
