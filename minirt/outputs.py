"""`Completion`, `Samples`, `Score` and `Piece`: the results of requests. `CompletionStream` builds completions token by token.

Imports no torch.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, overload

from minirt.engine.request import TokenLogprobs, TokenOutput
from minirt.errors import MinirtError, shortened
from minirt.hooks.capture import save
from minirt.sampling_params import EffectiveSampling
from minirt.text.detokenizer import IncrementalDecoder
from minirt.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 60  # characters of a text in a repr


class Piece(NamedTuple):
    """One element of a stream: new text and its token ids. `text` is "" while a character or a stop string is incomplete.

    `sample`: which of the prompt's `n` samples it belongs to.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    sample: int = 0


@dataclass(repr=False)
class Completion:
    """The result of one prompt.

    `index`: which of the prompt's `n` samples it is.
    `finish_reason`: "stop" (an EOS token, a stop token or a stop string), "length", "error" (see `error`), or None while the
    request runs.
    `token_times_s`: when each token reached Python, in seconds since the start of the request.
    `cached_tokens`: tokens of the prompt whose KV values were found in the prefix cache.
    `num_draft_tokens`, `num_accepted_tokens`: drafts that were verified, and those that were right (speculative decoding).
    `logprobs`: of each token; None unless the request asks. `prompt_logprobs`: of each token of the prompt, None for the first;
    None unless the request asks, and before the first token.
    `captured`: the hidden states that the request asks for, [N, H] for each place, or the file with them (`Capture`).
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    sampling: EffectiveSampling
    token_times_s: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: MinirtError | None = None
    index: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    captured: "dict[str, Tensor] | Path | None" = None

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step has yielded, on average, the accepted drafts included; 1 without speculative decoding."""
        steps = len(self.token_ids) - self.num_accepted_tokens
        return len(self.token_ids) / steps if steps > 0 else 1.0

    @property
    def outputs(self) -> "list[Completion]":
        """[self]: a result has this list whatever `n` is, as in vLLM."""
        return [self]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None without `logprobs`."""
        return None if self.logprobs is None else math.fsum(row.logprob for row in self.logprobs)

    def __repr__(self) -> str:
        which = f"index={self.index}, " if self.index else ""
        what = f"{len(self.token_ids)} tokens, {self.finish_reason or 'running'}"
        return f"<minirt.Completion {which}{shortened(self.text, _SHOWN)!r}, {what}{f': {self.error}' if self.error else ''}>"

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from the start of the request to its first token; 0 before that."""
        return self.token_times_s[0] if self.token_times_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """The rate of the tokens after the first; 0 before the second token."""
        times = self.token_times_s
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


@dataclass(repr=False)
class Samples:
    """The result of one prompt with `n` > 1: a sequence of its samples.

    `outputs`: a `Completion` for each sample, in the order of their seeds.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def error(self) -> MinirtError | None:
        """The error of the first sample that failed, if any."""
        return next((completion.error for completion in self.outputs if completion.error is not None), None)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Those of the prompt, which the first sample has."""
        return self.outputs[0].prompt_logprobs

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.outputs)

    @overload
    def __getitem__(self, index: int) -> Completion: ...

    @overload
    def __getitem__(self, index: slice) -> list[Completion]: ...

    def __getitem__(self, index: int | slice) -> Completion | list[Completion]:
        return self.outputs[index]

    if not TYPE_CHECKING:  # a type checker is to refuse the name

        def __getattr__(self, name: str) -> NoReturn:
            """Says where a single completion's attribute is: `Samples` has one for each sample."""
            known = name in Completion.__dataclass_fields__ or name in vars(Completion)
            hint = f": each sample has its own, samples[0].{name} for the first" if known and not name.startswith("_") else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        texts = ", ".join(repr(shortened(completion.text, _SHOWN)) for completion in self.outputs[:3])
        return f"<minirt.Samples {len(self)}: {texts}{', …' if len(self) > 3 else ''}>"


@dataclass(frozen=True, repr=False)
class Score:
    """How probable a completion is after a prompt.

    Attributes:
        prompt_token_ids, token_ids: the tokens of the prompt, and those that were scored.
        logprobs: of each scored token, with the most probable token in its place.
        cached_tokens: tokens of the prompt whose KV values were found in the prefix cache.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cached_tokens: int = 0

    @property
    def logprob(self) -> float:
        """The natural logarithm of the completion's probability: the sum over its tokens."""
        return math.fsum(row.logprob for row in self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have generated these tokens. Of equal logits it takes the token with the lowest id."""
        return all(row.top[0][0] == row.token_id for row in self.logprobs)

    def __repr__(self) -> str:
        greedy = "greedy" if self.is_greedy else "not greedy"
        return f"<minirt.Score {self.logprob:.4f}, {len(self.token_ids)} tokens, {greedy}>"


@dataclass
class CompletionStream:
    """Turns the tokens of one request into text, and fills its `Completion`. Without a decoder there is no text.

    `prompt`: the index of its prompt among those of the call. `sample`: which of the prompt's samples it is.
    `peak_memory`: called at the end for `Completion.peak_memory_bytes`.
    """

    completion: Completion
    decoder: IncrementalDecoder | None
    stops: StopStrings
    peak_memory: Callable[[], int]
    prompt: int = 0
    sample: int = 0
    started: float = 0.0

    def push(self, output: TokenOutput) -> Piece:
        """Add the tokens of one output, up to a stop string. Returns the new piece."""
        done = self.completion
        if output.error is not None:
            done.finish_reason, done.error = output.finish_reason, output.error
            return Piece("", (), output.finish_reason, self.sample)
        done.cached_tokens = output.num_cached
        if (states := output.captured) is not None:
            folder = done.sampling.capture.folder
            done.captured = states if folder is None else save(states, folder, output.request_id)
        if output.prompt_logprobs is not None:
            done.prompt_logprobs = [None, *output.prompt_logprobs]
        tokens, finish_reason, text = output.token_ids, output.finish_reason, ""
        if self.decoder is not None and tokens:
            if self.stops:
                text, tokens, finish_reason = self._up_to_stop(self.decoder, output)
            else:  # the token that ends the text is not part of it
                left_out = finish_reason == "stop" and not done.sampling.include_stop_str_in_output
                text = self.decoder.push_all(tokens[:-1] if left_out else tokens)
                if finish_reason is not None:
                    text += self.decoder.flush()
        count = len(tokens)
        done.token_ids += tokens
        times, started = output.times or (time.perf_counter(),) * count, self.started
        done.token_times_s += [known - started for known in times[:count]]
        done.finish_reason = finish_reason
        # What a stop string leaves out are right drafts: an output has at least one other token.
        left = len(output.token_ids) - count
        done.num_draft_tokens, done.num_accepted_tokens = output.num_draft_tokens, output.num_accepted_tokens - left
        if done.logprobs is not None:
            done.logprobs += output.logprobs[:count]
        done.text += text
        if finish_reason is not None:
            done.peak_memory_bytes = self.peak_memory()
        return Piece(text, tokens, finish_reason, self.sample)

    def _up_to_stop(self, decoder: IncrementalDecoder, output: TokenOutput) -> tuple[str, tuple[int, ...], str | None]:
        """Text and tokens of an output up to a stop string, and how the request has ended, if it has. Tokens after one do not
        count."""
        sampling, text, last = self.completion.sampling, "", len(output.token_ids)
        for count, token in enumerate(output.token_ids, 1):
            finish_reason = output.finish_reason if count == last else None
            left_out = finish_reason == "stop"  # the token that ends the text is not part of it
            check = len(self.completion.token_ids) + count > sampling.min_tokens
            new = "" if left_out and not sampling.include_stop_str_in_output else decoder.push(token)
            new, stopped = self.stops.push(new, check)
            text += new
            if finish_reason is not None and not stopped:  # at the end nothing is held back
                new, stopped = self.stops.push(decoder.flush(), check)
                text += new if stopped else new + self.stops.flush()
                if left_out:
                    text += self.stops.end(token)
            if stopped:
                return text, output.token_ids[:count], "stop"
        return text, output.token_ids, output.finish_reason
