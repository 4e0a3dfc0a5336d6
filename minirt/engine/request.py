"""`Request`, `TokenOutput` and `EngineStats`: plain values between an engine and its callers.

Callers may be in another process. Imports no torch.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from minirt.errors import MinirtError
from minirt.sampling_params import EffectiveSampling
from minirt.step.rules import Rules


@dataclass
class Request:
    """A request for completion. It has plain values only, so it can be sent to another thread or process.

    Args:
        id: unique among the open requests of an engine.
        prompt_token_ids: the prompt, at least one token.
        sampling: the sampling parameters, including the maximum number of tokens.
        eos_token_ids: the tokens that end the completion, unless `sampling.ignore_eos`.
        cache_salt: requests with different salts share no cached prefix.
        bad_words: `sampling.bad_words` in token ids.
        priority: requests with lower values run first.
        group: prompts of one group are the same, or begin alike. All but one of them wait until its pages can be shared.
        first_scored: with `sampling.prompt_logprobs`: the first token of the prompt that gets a log-probability, at least 1.
        logits_only: no token is drawn; the output has the logits of all tokens of the prompt.
        final_only: all tokens come in one output, at the end (vLLM's `RequestOutputKind.FINAL_ONLY`).
        history_len: tokens of a conversation's prompt before its generation prompt: those that its next prompt is likely to begin
            with. 0: not known.
    """

    id: int
    prompt_token_ids: Seq[int]
    sampling: EffectiveSampling
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    priority: int = 0
    group: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    first_scored: int = 1
    logits_only: bool = False
    final_only: bool = False
    history_len: int = 0

    @property
    def rules(self) -> Rules | None:
        """What it asks of its logits; None if nothing."""
        return Rules.of(self.sampling, self.eos_token_ids, self.bad_words)


class TokenLogprobs(NamedTuple):
    """The log-probability of one token, and of the most probable tokens in its place.

    Args:
        token_id: the token.
        logprob: its natural logarithm of the probability: log_softmax of the model's logits.
        rank: 1 for the most probable token: 1 + the number of tokens with a larger logit.
        top: (token id, logprob) of the most probable tokens, the most probable first, the lower id first among equals.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(NamedTuple):
    """The new tokens of one request.

    `finish_reason` is None while the request continues, then "stop", "length" or "error". With "error" there is no token, and
    `error` says what happened. `num_cached`: tokens of the prompt that were found in the prefix cache. `logprobs`: of each token,
    if the request asks. `prompt_logprobs`: of each token of the prompt from `Request.first_scored` on, with the first
    output of a request that asks; else None. A request with max_tokens 0 has one output, without a token. `queue_time_s`: how
    long the request waited for its first step, with its first output; else None. `logits`: [T, V] fp32 on the CPU, of a request
    with `logits_only`, whose only output has no token. `times`: the `time.perf_counter` at which each token was known, of a
    request with `final_only`. `num_draft_tokens`, `num_accepted_tokens`: how many drafts were verified for the request so
    far, and how many of them were right. `captured`: the hidden states that the request asks for, [N, H] on the CPU for each
    place, with its last output.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: MinirtError | None = None
    num_cached: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    queue_time_s: float | None = None
    logits: Any = None  # a Tensor; messages between processes are read without torch
    times: tuple[float, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    captured: Any = None


class DraftStats(NamedTuple):
    """Counters of drafts.

    Args:
        num_drafts: how often drafts of a sequence were verified.
        num_draft_tokens, num_accepted_tokens: drafts that were verified, and that were right.
        num_accepted_per_position: of these, the first, second, … draft of a step.
        num_proposals: how often drafts of a sequence were proposed.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()
    num_proposals: int = 0


class EngineStats(NamedTuple):
    """The state of an engine, and counters since it was made.

    Args:
        num_running, num_waiting: requests with and without KV pages.
        kv_cache_usage: the share of KV pages in use. Pages that only the prefix cache keeps are not in use.
        num_preemptions: how often a running request lost its pages to another one.
        prefix_cache_queries, prefix_cache_hits: see `PrefixCacheStats`.
        generation_tokens: generated tokens, those of requests that still run included.
        drafts: counters of speculative decoding; zeros without it.
        prefix_cache_recomputed: see `PrefixCacheStats`; None: no states are kept.
        adapter_requests: requests by the names of adapters that are loaded.
        num_graphs_to_capture: CUDA graphs that warm-up has still to capture; until then, some steps are padded to larger ones.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    generation_tokens: int = 0
    drafts: DraftStats = DraftStats()
    prefix_cache_recomputed: int | None = None
    num_graphs_to_capture: int = 0
    adapter_requests: dict[str, int] = {}  # noqa: RUF012  (never changed)
