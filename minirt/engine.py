"""`Engine`: the loop. Requests of token ids go in, sampled token ids come out, one step at a time."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minirt.batch import Batch, Chunk
from minirt.errors import ContextLengthError, InputError
from minirt.kv_cache import KVCache
from minirt.sampler import SamplingBatch, sample
from minirt.sampling import EffectiveSampling
from minirt.scheduler import Scheduler, Sequence

EVALUATION_CHUNK = 512  # tokens whose logits are computed at once by `Engine.logits`


@dataclass(frozen=True)
class TokenOutput:
    """One new token of one request. `finish_reason` is None while the request goes on, then "stop", "length" or "error"."""

    request_id: int
    token: int
    finish_reason: str | None


@dataclass(eq=False)
class _Request:
    sequence: Sequence
    sampling: EffectiveSampling
    eos: frozenset[int]
    max_tokens: int = field(default=0)


class Engine:
    """Runs many requests at once on one model and one cache.

    Args:
        model: `model(batch, cache)` → logits [R, V]; a `Model`, or anything with this signature.
        vocab_size: ids at or above it are refused.
    """

    def __init__(
        self,
        model: Callable[[Batch, KVCache], Tensor],
        cache: KVCache,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._device = torch.device(device)
        self._scheduler = Scheduler(cache, max_num_seqs, max_num_batched_tokens, max_model_len)
        self._requests: dict[int, _Request] = {}
        self._ids = itertools.count()

    @property
    def max_len(self) -> int:
        """Prompt and generated tokens that one request can have, together."""
        return self._scheduler.max_len

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, prompt: Seq[int], sampling: EffectiveSampling, eos_token_ids: Seq[int] = ()) -> int:
        """Queue a request and return its id.

        Raises:
            InputError: an empty prompt, or an id outside the vocabulary.
            ContextLengthError: a prompt that can never fit.
        """
        self.check_tokens(prompt)
        sequence = Sequence(next(self._ids), list(prompt), len(prompt))
        self._scheduler.add(sequence)
        eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        max_tokens = min(sampling.max_tokens, self.max_len - len(prompt))
        self._requests[sequence.id] = _Request(sequence, sampling, eos, max_tokens)
        return sequence.id

    def abort(self, request_id: int) -> None:
        """Drop a request at any moment; unknown and finished ids are fine, since it may just have ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request.sequence)

    def step(self) -> list[TokenOutput]:
        """Compute one step and return its new tokens. No token comes of a step that ends in the middle of a prompt."""
        work = self._scheduler.schedule()
        if not work:
            return []
        batch = Batch.build([chunk for _, chunk in work], self._cache.page_size)
        logits = self._model(batch, self._cache)
        ends = []
        for sequence, chunk in work:
            sequence.num_computed += len(chunk.tokens)
            if chunk.wants_logits:
                ends.append(self._requests[sequence.id])
        if not ends:
            return []
        settings = [(r.sampling, r.sequence.num_generated) for r in ends]
        tokens = sample(logits, SamplingBatch.build(settings, self._device)).tolist()
        return [self._deliver(request, token) for request, token in zip(ends, tokens, strict=True)]

    def _deliver(self, request: _Request, token: int) -> TokenOutput:
        sequence = request.sequence
        reason = None
        if token < 0:  # the sampler's mark for logits that hold no number
            reason = "error"
        else:
            sequence.tokens.append(token)
            if token in request.eos:
                reason = "stop"
            elif sequence.num_generated >= request.max_tokens:
                reason = "length"
        if reason is not None:
            self.abort(sequence.id)
        return TokenOutput(sequence.id, token, reason)

    def logits(self, tokens: Seq[int]) -> Tensor:
        """Teacher-forced logits [T, V] fp32 on the CPU, for evaluation. The cache must have room for the tokens."""
        self.check_tokens(tokens)
        if len(tokens) > self.max_len:
            raise ContextLengthError("too many tokens", expected=f"at most {self.max_len}", found=len(tokens))
        needed, allocator = self._cache.pages_for(len(tokens)), self._cache.allocator
        if needed > allocator.num_free:
            raise ContextLengthError(
                "running requests hold the cache's pages", expected=needed, found=allocator.num_free
            )
        pages = allocator.allocate(needed)
        try:
            rows = []
            for start in range(0, len(tokens), EVALUATION_CHUNK):
                chunk = Chunk(tokens[start : start + EVALUATION_CHUNK], start, pages, all_logits=True)
                rows.append(self._model(Batch.build([chunk], self._cache.page_size), self._cache).cpu())
        finally:
            allocator.release(pages)
        return torch.cat(rows)

    def check_tokens(self, tokens: Seq[int]) -> None:
        if len(tokens) == 0:
            raise InputError("the prompt is empty", hint="give at least one token")
        for position, token in enumerate(tokens):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise InputError(
                    "not a token id of this model",
                    where=f"prompt token {position}",
                    expected=f"an integer from 0 to {self._vocab_size - 1}",
                    found=repr(token),
                )
