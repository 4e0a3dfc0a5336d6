"""`Processor`: from prompts to engine requests, and from the engine's outputs to text. `Call`: the requests of one call.

`Generator`, `AsyncGenerator` and the server use it alike. It knows the engine as an `EngineLike`, which may be in this
process or in another one. Imports no torch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral, Number
from typing import Any, Protocol, TypeGuard, TypeVar

from minirt.engine.request import Request, TokenLogprobs
from minirt.errors import InputError, NumericsError, TokenizerError, inside, quoted, shortened
from minirt.outputs import Completion, CompletionStream, Samples, Score
from minirt.sampling_params import EffectiveSampling, SamplingParams
from minirt.sampling_params import resolve as resolve_sampling
from minirt.text.detokenizer import IncrementalDecoder, incremental_decoder
from minirt.text.stop_strings import StopStrings, stop_tokens
from minirt.text.tokenizer import ChatTokens, Tokenizer
from minirt.wording import warn


class TokenArray(Protocol):
    """A NumPy array or a tensor of token ids: of one dimension, with an integer dtype."""

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | TokenArray
AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)  # a list[str] is no list[Prompt], since it cannot take token ids
Prompts = list[AnyPrompt] | tuple[AnyPrompt, ...]
# One for all prompts, or one for each.
Params = SamplingParams | Sequence[SamplingParams | None] | None
Priority = int | Sequence[int]
Messages = Sequence[dict[str, str]]
_MAX_SPACES = 64  # tokens of white space after a reasoning block that are looked at


class EngineLike(Protocol):
    """The engine as a `Processor` sees it: `EngineThread`, or the server's `RemoteEngine`."""

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a request, prompt and completion together."""

    @property
    def keeps_states(self) -> bool:
        """Whether it asks where the history of a conversation ends (`Request.history_len`)."""

    def new_id(self) -> int:
        """An id for a request."""

    def check(self, request: Request) -> None:
        """Raise the error with which a request would be refused. An engine in another process refuses it later."""


class Processor:
    """Encodes and checks the prompts of a model, and prepares their requests. All its methods may be called from any thread.

    Args:
        engine: the engine's limits.
        name: the model's name, for messages.
        vocab_size: of the model; a tokenizer may have more ids.
        peak_memory: for `Completion.peak_memory_bytes`.
    """

    def __init__(
        self, engine: EngineLike, name: str, tokenizer: Tokenizer | None, generation_config: dict | None,
        eos_token_ids: Sequence[int], vocab_size: int, peak_memory: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.engine, self._name, self._tokenizer, self._peak_memory = engine, name, tokenizer, peak_memory
        self._vocab_size = vocab_size
        self._generation_config, self._eos_token_ids = generation_config, tuple(eos_token_ids)
        resolve_sampling(None, {})  # reads the table of settings that are not supported, so that no request waits for it

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds. Token ids are returned unchanged.

        `max_tokens`: raise, without tokenizing, if the number of characters shows that the text has more tokens.
        """
        if isinstance(prompt, list | tuple):
            # Checking a long prompt's tokens one by one would take as long as launching its kernels.
            if set(map(type, prompt)) == {int}:
                return list(prompt)
            if any(isinstance(token, str | list | tuple) for token in prompt):
                what, expected = "a list of prompts where one prompt is expected", "a text, or token ids"
                raise InputError(what, expected=expected, found=quoted(prompt, 80))
            return [int(t) if isinstance(t, Integral) and not isinstance(t, bool) else t for t in prompt]
        if _is_array(prompt):
            return _array_tokens(prompt)
        if not isinstance(prompt, str):
            shown, expected = type(prompt).__name__, "a text, or a list, tuple or array of token ids"
            raise InputError("not a prompt", expected=expected, found=shown, hint=_instead(prompt))
        if not prompt:
            raise InputError("the prompt is empty", hint="give at least one character")
        return self.text().encode(prompt, max_tokens)

    def encode_chat(
        self, messages: Messages, max_tokens: int | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """See `Generator.encode_chat`."""
        if not isinstance(messages, list | tuple):
            raise InputError("not a conversation", where="messages", expected="a list of messages", found=type(messages).__name__)
        text, variables = self.text(), dict(chat_template_kwargs or {})
        if unused := [str(name) for name in variables if not text.template_uses(str(name))]:
            what = f"the model's chat template does not use {' or '.join(map(shortened, unused))}"
            raise InputError(what, where="chat_template_kwargs")
        return text.encode_chat(list(messages), max_tokens, with_history=self.engine.keeps_states, variables=variables)

    def check(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """See `Generator.check`."""
        self.prepare(token_ids, params, single=True)

    def effective_sampling(self, params: SamplingParams | None) -> EffectiveSampling:
        """The values that a request will run with, and where each comes from."""
        sampling = resolve_sampling(_one(params), self._generation_config)
        if tokens := self._stop_tokens(sampling):
            sampling = sampling.with_values(stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *tokens))))
        return sampling

    def _stop_tokens(self, sampling: EffectiveSampling) -> dict[int, str]:
        """The stop strings that are special tokens, by their ids."""
        if not sampling.stop or self._tokenizer is None:
            return {}
        try:
            return stop_tokens(self._tokenizer, sampling.stop, sampling.skip_special_tokens)
        except InputError as error:
            raise error if sampling.sources["stop"] == "user" else error.at(f"{sampling.sources['stop']}: stop_strings") from None

    def prepare(
        self, prompts: Any, params: Any, priority: Any = 0, *, single: bool, cache_salt: str | None = None,
        first: int | None = None,
    ) -> "Call":  # fmt: skip
        """Encode and check the requests of one call, without adding them to the engine.

        Args:
            single: whether `prompts` is one prompt.
            first: how many prompts to prepare now; None: all. `CallDriver` prepares the others and raises their errors. If
                priorities differ, all are prepared now, because the engine must know them.
        """
        prompts, params = ([prompts], [_one(params)]) if single else _one_for_each(prompts, params)
        priorities = [priority] * len(prompts) if not isinstance(priority, list | tuple) else priority
        if len(priorities) != len(prompts) or not set(map(type, priorities)) <= {int}:
            expected, shown = "an integer, or one for each prompt (lower values run first)", repr(priority)[:80]
            raise InputError("not an acceptable value", where="priority", expected=expected, found=shown)
        call = Call([], [], [], single)
        call.rest = self._prepared(call, prompts, params, priorities, cache_salt)
        for _ in islice(call.rest, None if len(set(priorities)) > 1 else first):
            pass
        return call

    def _prepared(
        self, call: "Call", prompts: Sequence[Any], params: Sequence[Any], priorities: Sequence[int], cache_salt: str | None
    ) -> Iterator[int]:
        """Prepare one prompt after the other, adding it to the call. Yields their numbers."""
        bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}  # of parameters by their identity: prompts often share them
        for i, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            with inside(f"prompts[{i}]" if len(prompts) > 1 else None):
                sampling = self.effective_sampling(chosen)
                tokens = self._encode(prompt, sampling)
                sampling = self._after_reasoning(tokens, sampling)
                count = 1 if chosen is None else chosen.n
                if id(chosen) not in bad_words:
                    bad_words[id(chosen)] = self._bad_words(sampling)
                first = Request(
                    self.engine.new_id(), tokens, sampling, self._eos_token_ids, cache_salt, priorities[i],
                    history_len=_history_len(prompt, tokens), bad_words=bad_words[id(chosen)],
                )  # fmt: skip
                self.engine.check(first)
            if count > 1:
                first = replace(first, group=first.id)
            for sample in range(count):
                request = first if sample == 0 else self._further_sample(first, sample)
                call.requests.append(request)
                call.streams.append(self._stream(request, prompt=i, sample=sample))
            outputs = [stream.completion for stream in call.streams[-count:]]
            call.results.append(Samples(tokens, outputs) if count > 1 else outputs[0])
            yield i

    def prepare_scores(self, prompts: Any, completions: Any, priority: Any = 0, lora: str | None = None) -> "Call":
        """The requests that score completions after their prompts; see `Generator.score`. `Call.scores` has the results."""
        if single := is_single(prompts) and is_single(completions):
            completions = [completions]
        elif not isinstance(completions, list | tuple) or is_single(completions):
            expected, kind = "a list, as the prompts are, or one prompt", type(completions).__name__
            raise InputError("not a completion, or a list of completions", where="completions", expected=expected, found=kind)
        if is_single(prompts):
            prompts = [prompts] * len(completions)
        elif _size(prompts) != len(completions):
            expected = f"one prompt, or a list of {len(completions)}, a prompt for each completion"
            raise InputError("not the prompts of the completions", where="prompts", expected=expected, found=_size(prompts))
        pairs = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            with inside(f"prompts[{i}]" if len(prompts) > 1 else None):
                pairs.append(self.encode_pair(prompt, completion))
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=1, lora=lora)
        call = self.prepare([tokens for tokens, _ in pairs], params, priority, single=False)
        call.single = single
        leaders: dict[tuple[int, ...], int] = {}  # by prompt: the request that computes it for all
        for i, (tokens, count) in enumerate(pairs):
            group = leaders.setdefault(tuple(tokens[:count]), call.requests[i].id)
            call.requests[i] = replace(call.requests[i], first_scored=count, group=group)
        return call

    def encode_pair(self, prompt: Prompt, completion: Prompt) -> tuple[list[int], int]:
        """Token ids of a prompt with its completion, and the number of those that belong to the prompt.

        Two texts are encoded together, since a tokenizer may split a text in another way than its two parts. As many tokens as
        the prompt alone has belong to it, without the white space at its end: that belongs to the completion, as tokens begin
        with spaces (the rule of lm-evaluation-harness).

        Raises:
            InputError: a text beside token ids; no token before the completion, or none in it.
        """
        both = isinstance(prompt, str) + isinstance(completion, str)
        if both == 1:
            shown = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise InputError("not a prompt and its completion", expected="two texts, or token ids for both", found=shown)
        if not both:
            tokens = self.encode(prompt)
            count, tokens = len(tokens), tokens + self.encode(completion)
        else:
            text, limit = self.text(), self.engine.max_len
            tokens, alone = text.encode(f"{prompt}{completion}", limit), text.encode(str(prompt).rstrip(), limit)
            count = len(alone)
            if tokens[:count] != alone and len(tokens) > count:
                what = "the tokenizer joins the end of the prompt and the beginning of the completion in one token"
                texts = f"{shortened(str(prompt)[-20:])!r} and {shortened(completion, 20)!r}"
                warn(f"{what}; the tokens after the first {count} are scored: {texts}")
        if not count:
            hint = "give a prompt; generate with max_tokens 0 and prompt_logprobs 0 scores a text from its second token on"
            raise InputError("there is no token before the completion, which its first token needs", hint=hint)
        if len(tokens) <= count:
            what = "the completion has no token of its own after the prompt"
            joined = isinstance(completion, str) and completion  # with the prompt's last token
            hint = "give token ids for both" if joined else "give a completion that is not empty"
            raise InputError(what, found=quoted(completion, 80), hint=hint)
        return tokens, count

    def _further_sample(self, first: Request, sample: int) -> Request:
        """The request of a further sample. The first one scores the prompt."""
        sampling = first.sampling.with_values(seed=(first.sampling.seed + sample) % 2**64, prompt_logprobs=None)
        return replace(first, id=self.engine.new_id(), sampling=sampling)

    def _stream(self, request: Request, prompt: int, sample: int) -> CompletionStream:
        sampling, decoder = request.sampling, None
        tokens: Any = request.prompt_token_ids
        if self._tokenizer is not None and sampling.detokenize:
            decoder = decoder_after(self._tokenizer, sampling, tokens)
        logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        completion = Completion(tokens, [], "", None, sampling, logprobs=logprobs, index=sample)
        stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output, self._stop_tokens(sampling))
        return CompletionStream(completion, decoder, stops, self._peak_memory, prompt, sample)

    def text(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the model has none.
        """
        if self._tokenizer is None:
            what, hint = "the model has no tokenizer", "give token ids instead of text; a conversation needs a tokenizer"
            raise TokenizerError(what, where=self._name, hint=hint)
        return self._tokenizer

    def limit(self, params: SamplingParams | EffectiveSampling | None) -> int | None:
        """The number of tokens above which a prompt is refused without tokenizing it. None: it will be truncated."""
        sampling = params if isinstance(params, EffectiveSampling) else _one(params)
        if sampling is None or sampling.truncate_prompt_tokens is None:
            return self.engine.max_len - (sampling is None or sampling.max_tokens != 0)
        return None

    def _encode(self, prompt: Prompt, sampling: EffectiveSampling) -> list[int]:
        """Token ids of a prompt: all, or as many of the last ones as `sampling` keeps."""
        tokens, kept = self.encode(prompt, self.limit(sampling)), sampling.truncate_prompt_tokens
        tokens = tokens if kept is None else tokens[-(self.engine.max_len - 1 if kept < 0 else kept) :]
        if self._tokenizer is not None and self._tokenizer.vocab_size > self._vocab_size:
            self._check_known(tokens)
        return tokens

    def _check_known(self, tokens: list[int]) -> None:
        """Refuse a token that the tokenizer has and the model has no embedding for. The engine refuses ids that neither has."""
        for i, token in enumerate(tokens):
            if type(token) is int and self._vocab_size <= token < self.text().vocab_size:
                shown = f'{token}, "{shortened(self.text().decode([token], skip_special_tokens=False))}"'
                hint = "the tokenizer has more tokens than the model was trained with: leave this one out"
                place, expected = f"prompt token {i}", f"ids from 0 to {self._vocab_size - 1}"
                raise InputError("the model has no such token", where=place, expected=expected, found=shown, hint=hint)

    def _after_reasoning(self, tokens: list[int], sampling: EffectiveSampling) -> EffectiveSampling:
        """`sampling`, without `reasoning_end` if the prompt ends with it and white space: its grammar begins at once."""
        spec = sampling.structured_outputs
        if spec is None or spec.reasoning_end is None or self._tokenizer is None:
            return sampling
        last = tokens[-4 * len(spec.reasoning_end) - _MAX_SPACES :]  # a token has at least a byte
        try:
            text = self._tokenizer.decode(last, skip_special_tokens=False)
        except InputError:  # no token ids, which the engine's check names
            return sampling
        _, end, rest = text.rpartition(spec.reasoning_end)
        if not end or rest.strip():
            return sampling
        return sampling.with_values(structured_outputs=replace(spec, reasoning_end=None, may_call=False))

    def _bad_words(self, sampling: EffectiveSampling) -> tuple[tuple[int, ...], ...]:
        """The bad words in token ids.

        Raises:
            TokenizerError: settings about text meet a model without a tokenizer.
            InputError: a bad word has no tokens, so that nothing would be forbidden.
        """
        for name, what in (("stop", "stop strings need"), ("bad_words", "bad words need")):
            if getattr(sampling, name) and self._tokenizer is None:
                raise TokenizerError(f"{what} a tokenizer", where=self._name, found=f"from {sampling.sources[name]}")
        spelled = [self.text().spellings(word) for word in sampling.bad_words]
        for word, spellings in zip(sampling.bad_words, spelled, strict=True):
            if not spellings:
                shown = f'"{shortened(word)}"'
                raise InputError("the tokenizer has no tokens for a text", where="bad_words", expected="texts", found=shown)
        return tuple(ids for spellings in spelled for ids in spellings)


def _history_len(prompt: Any, tokens: list[int]) -> int:
    """`Request.history_len` of a prompt, of which `tokens` are left."""
    return max(0, prompt.history_len - (len(prompt) - len(tokens))) if isinstance(prompt, ChatTokens) else 0


def decoder_after(tokenizer: Tokenizer, sampling: EffectiveSampling, prompt: Sequence[int]) -> IncrementalDecoder:
    """The decoder of the tokens that follow a prompt. A grammar's text has all that the grammar accepted."""
    grammar = sampling.structured_outputs
    keep_space = grammar is not None and grammar.reasoning_end is None
    return incremental_decoder(tokenizer, sampling.skip_special_tokens, prompt, keep_space)


@dataclass
class Call:
    """The requests of one call of the API, which `CallDriver` runs.

    Attributes:
        streams, requests: one of each for every sample of every prompt.
        results: one for each prompt, so far.
        single: whether the call is about one prompt, not a list.
        open: the streams of the requests that run, by their ids.
        rest: prepares further prompts, one at a time.
    """

    streams: list[CompletionStream]
    requests: list[Request]
    results: list[Completion | Samples]
    single: bool
    open: dict[int, CompletionStream] = field(default_factory=dict)
    rest: Iterator[int] = field(default_factory=lambda: iter(()))

    def result(self) -> Any:
        """What `generate` returns, once all requests have ended.

        Raises:
            MinirtError: one of them failed.
        """
        for i, result in enumerate(self.results):
            if (error := result.error) is not None:
                raise error if self.single else error.within(f"prompts[{i}]")
        return self.results[0] if self.single else self.results

    def scores(self) -> Any:
        """What `score` returns, once all requests of `Processor.prepare_scores` have ended. Raises as `result`."""
        self.result()
        pairs = zip(self.streams, self.requests, strict=True)
        scores = [_score(stream.completion, request.first_scored) for stream, request in pairs]
        return scores[0] if self.single else scores


def _score(completion: Completion, count: int) -> Score:
    """The score of a prompt's tokens after the first `count`."""
    tokens = completion.prompt_token_ids
    rows = [row for row in completion.prompt_logprobs or () if row is not None]
    if any(math.isnan(row.logprob) for row in rows):
        hint = "--check-weights finds damaged weights; --dtype float32 rules out overflow"
        raise NumericsError("the logits are NaN or +inf", where="score", hint=hint)
    return Score(tokens[:count], tokens[count:], rows, completion.cached_tokens)


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is a single prompt: a text, an array, or a list that can only be token ids."""
    if not isinstance(prompts, list | tuple):
        return isinstance(prompts, str) or _is_array(prompts)
    types = set(map(type, prompts))
    return bool(types) and types.isdisjoint((str, list, tuple)) and all(issubclass(t, Integral | float) for t in types)


def _instead(prompt: Any) -> str | None:
    """What to give in place of one of vLLM's dicts, such as {"prompt": "Once"}."""
    if not isinstance(prompt, Mapping):
        return None
    names = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
    return f"give the value of {names[0]!r} instead" if names else "for a conversation, use chat"


def _is_array(value: Any) -> TypeGuard[TokenArray]:
    """Whether it is a NumPy array, a tensor, or the like, but not a NumPy integer. (NumPy is not imported here.)"""
    return all(hasattr(value, name) for name in ("ndim", "dtype", "tolist")) and not isinstance(value, Number)


def _array_tokens(array: TokenArray) -> list[int]:
    dtype = getattr(array.dtype, "name", str(array.dtype).removeprefix("torch."))
    if array.ndim != 1 or re.fullmatch(r"u?int[0-9]+", dtype) is None:
        shown = f"{dtype} with {array.ndim} dimensions"
        hint = "list(array) makes one prompt of each row" if array.ndim == 2 else None
        raise InputError("not an array of token ids", expected="integers in one dimension", found=shown, hint=hint)
    try:
        return list(array.tolist())
    except (RuntimeError, TypeError) as error:  # a tensor without values, on the meta device
        raise InputError(f"not an array of token ids: {error}") from error


def _one(params: Any) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    what, shown = "one prompt takes one SamplingParams", type(params).__name__
    raise InputError(what, where="params", found=shown, hint=_params_hint(params))


def _params_hint(params: Any) -> str | None:
    return "SamplingParams(**…) takes the keys and values of a dict" if isinstance(params, Mapping) else None


def _one_for_each(prompts: Any, params: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The prompts, and as many SamplingParams."""
    if not isinstance(prompts, list | tuple):
        raise InputError("not a prompt, or a list of prompts", where="prompts", found=_size(prompts), hint=_instead(prompts))
    params = [params] * len(prompts) if isinstance(params, SamplingParams | None) else params
    if _size(params) != len(prompts):
        what, expected = "not one SamplingParams for each prompt", f"one for all, or a list of {len(prompts)}"
        raise InputError(what, where="params", expected=expected, found=_size(params), hint=_params_hint(params))
    return prompts, params


def _size(values: Any) -> int | str:
    """The length of a list or tuple; of anything else the name of its type, for messages."""
    return len(values) if isinstance(values, list | tuple) else type(values).__name__
