"""/v1/completions: prompts as texts or token ids, one or many, with the prompt's log-probabilities on request."""

import time
from collections.abc import Sequence
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.processor import Call, decoder_after
from minirt.sampling_params import MAX_LOGPROBS
from minirt.server.answers import Format, collect, finite, stream, token_text, top_of, usage_of
from minirt.server.chat import row_by_id
from minirt.server.errors import bad_field, shown
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice
from minirt.server.protocol import (
    MAX_CHOICES,
    REFUSED,
    Int,
    Refused,
    Sampling,
    check_copies,
    decode,
    sampling_params,
    structured_outputs,
)
from minirt.text.detokenizer import IncrementalDecoder, incremental_decoder, prompt_text
from minirt.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_CHOICE_BYTES = 50  # of a body that take as long to read as the request of one more choice takes to make
_CHATS = "is for chats"
_REFUSED: Refused = {
    **REFUSED,
    "top_logprobs": "is named logprobs here",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"), _CHATS),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), _CHATS),
}


class CompletionRequest(Sampling, kw_only=True):
    """The fields of a request to continue prompts."""

    prompt: Any
    echo: bool | None = None
    logprobs: Int | bool | None = None  # `false` is null
    best_of: Int | None = None
    add_special_tokens: bool | None = None


async def completions(front: Front, exchange: Exchange) -> None:
    front.check_ready()
    body = await exchange.body(front.options.max_body_size)
    exchange.cancel_on_disconnect()
    request, prompts = await front.aside(len(body), _read, front, exchange, body)
    # A request for the prompt's log-probabilities alone generates a token that is not in the answer.
    only_echo = request.max_tokens == 0
    size = len(body) + _CHOICE_BYTES * len(prompts) * (request.n or 1)
    call = await front.aside(size, _prepare, front, request, prompts, only_echo)
    fields = {
        "id": f"cmpl-{exchange.id}", "object": "text_completion", "created": int(time.time()), "model": front.options.names[0]
    }  # fmt: skip
    answer = _Answer(front.tokenizer, request, call, prompts)
    if request.stream:
        await stream(front, exchange, request, call, _Events(fields, answer))
        return
    done = await collect(front, exchange, call)
    choices = [answer.choice(i, own, only_echo) for i, own in enumerate(done)]
    await exchange.answer(fields | {"choices": choices, "usage": usage_of(call, without_tokens=only_echo)})


def _read(front: Front, exchange: Exchange, body: bytes) -> tuple[CompletionRequest, list[str | list[int]]]:
    """A request and its prompts."""
    request = decode(front, body, CompletionRequest, _REFUSED)
    front.check_model(request.model)
    exchange.prompt_field = "prompt"
    prompts = _prompts(request.prompt)
    _check(request, len(prompts))
    if front.options.log_prompts:
        exchange.log["prompt"] = request.prompt
    exchange.grammar_field = None if request.structured_outputs not in (None, {}) else "response_format"
    return request, prompts


def _prepare(front: Front, request: CompletionRequest, prompts: list[str | list[int]], only_echo: bool) -> Call:
    """The requests of all choices. `only_echo`: only the prompts and their log-probabilities are asked for."""
    processor, _ = front.check_ready()
    params = sampling_params(
        request, {"max_tokens": "max_tokens"},
        max_tokens=1 if only_echo else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo and request.logprobs is not None else request.prompt_logprobs,
        n=request.n or 1, structured_outputs=structured_outputs(request),
    )  # fmt: skip
    if request.add_special_tokens is False:
        tokenizer, limit = processor.text(), processor.limit(params)
        prompts = [tokenizer.encode_plain(own, limit) if isinstance(own, str) else own for own in prompts]
    return processor.prepare(prompts, params, request.priority or 0, single=False, cache_salt=request.cache_salt)


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of either."""
    if isinstance(value, str):
        value = [value]
    types = set(map(type, value)) if isinstance(value, list) else set()
    if types and types <= {int, float}:
        value, types = [value], {list}
    if not types or not types <= {str, list}:
        expected = "a string, a list of token ids, or a list of these"
        raise bad_field("prompt", "not an acceptable prompt", expected=expected, found=shown(value))
    return [own if isinstance(own, str) else _ids(own, i) for i, own in enumerate(value)]


def _ids(prompt: list[Any], place: int) -> list[int]:
    if set(map(type, prompt)) == {int} and max(prompt) < 2**53 and min(prompt) > -(2**53):
        return prompt
    if prompt and all(type(own) in (int, float) and float(own).is_integer() and abs(own) < 2**53 for own in prompt):
        return [int(own) for own in prompt]
    raise bad_field(f"prompt[{place}]", "not token ids", expected="a list of integers", found=shown(prompt))


def _check(request: CompletionRequest, num_prompts: int) -> None:
    count = request.n or 1
    if num_prompts * count > MAX_CHOICES:
        raise bad_field("prompt", "too many completions", expected=f"at most {MAX_CHOICES}", found=num_prompts * count)
    check_copies(request, num_prompts * count)
    if request.best_of not in (None, count):
        raise bad_field("best_of", "is not supported", expected=f"null or n, which is {count}", found=request.best_of)
    if request.logprobs is False:
        request.logprobs = None
    if request.logprobs is True or (request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS):
        expected = f"an integer from 0 to {MAX_LOGPROBS}"
        raise bad_field("logprobs", "not an acceptable value", expected=expected, found=request.logprobs)
    if request.max_tokens is not None and request.max_tokens < (0 if request.echo else 1):
        expected = "an integer >= 1, or 0 with echo"
        raise bad_field("max_tokens", "not an acceptable value", expected=expected, found=request.max_tokens)
    if request.max_tokens == 0 and request.stream:
        raise bad_field("max_tokens", "0 is not for streams", expected="stream: false")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_field("prompt_logprobs", "is not for streams", expected="stream: false")


class _Answer:
    """The choices of a response."""

    def __init__(
        self, tokenizer: Tokenizer | None, request: CompletionRequest, call: Call, prompts: Sequence[str | list[int]]
    ) -> None:
        self.tokenizer, self.request, self._call, self._prompts = tokenizer, request, call, prompts

    def echoed(self, index: int) -> str:
        """The text of a choice's prompt, if the request asks for it."""
        if not self.request.echo:
            return ""
        prompt = self._prompts[self._call.streams[index].prompt]
        if isinstance(prompt, str):
            return prompt
        skips = self._call.streams[index].completion.sampling.skip_special_tokens
        return "" if self.tokenizer is None else prompt_text(self.tokenizer, prompt, skips)

    def first_sample(self, index: int) -> Completion:
        """The first sample of a choice's prompt, which has the prompt's log-probabilities."""
        return self._call.streams[index - self._call.streams[index].sample].completion

    def choice(self, index: int, done: Completion, only_echo: bool) -> dict[str, Any]:
        """A finished choice. `only_echo`: without the generated token."""
        first = self.first_sample(index)
        echoed, rows = self.echoed(index), [] if only_echo else list[TokenLogprobs | None](done.logprobs or ())
        scores = first.prompt_logprobs
        tokens = [] if only_echo else done.token_ids
        logprobs = None
        if self.request.logprobs is not None:
            if self.request.echo and scores is not None:
                rows, tokens = [*scores, *rows], [*first.prompt_token_ids, *tokens]
            logprobs = self.logprobs(tokens, rows, self.offsets(index))
        choice = {
            "index": index, "text": echoed + ("" if only_echo else done.text), "logprobs": logprobs,
            "finish_reason": "length" if only_echo else done.finish_reason,
        }  # fmt: skip
        if self.request.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = [None if row is None else row_by_id(self.tokenizer, row) for row in scores]
        return choice

    def offsets(self, index: int) -> "_Offsets":
        """Where the tokens of a choice begin in its text: those of the prompt, too, if it is echoed with its scores."""
        first = self.first_sample(index)
        scored = self.request.echo and first.prompt_logprobs is not None
        decoder = None
        if self.tokenizer is not None and scored:
            decoder = incremental_decoder(self.tokenizer, first.sampling.skip_special_tokens)
        elif self.tokenizer is not None:
            decoder = decoder_after(self.tokenizer, first.sampling, first.prompt_token_ids)
        return _Offsets(decoder, 0 if scored else len(self.echoed(index)))

    def logprobs(self, tokens: Sequence[int], rows: Sequence[TokenLogprobs | None], offsets: "_Offsets") -> dict[str, Any]:
        """OpenAI's form: parallel lists."""
        count = self.request.logprobs or 0
        return {
            "tokens": [token_text(self.tokenizer, token) for token in tokens], "text_offset": offsets.of(tokens),
            "token_logprobs": [None if row is None else finite(row.logprob) for row in rows],
            "top_logprobs": [None if row is None else self._top(row, count) for row in rows],
        }  # fmt: skip

    def _top(self, row: TokenLogprobs, count: int) -> dict[str, float]:
        """The most probable tokens by their text, and the token itself."""
        own = {token_text(self.tokenizer, row.token_id): finite(row.logprob)}
        return own | {token_text(self.tokenizer, token): logprob for token, logprob in reversed(top_of(row, count))}


class _Events(Format):
    def __init__(self, fields: dict[str, Any], answer: _Answer) -> None:
        super().__init__(fields, answer.tokenizer, answer.request.logprobs is not None)
        self._answer, self._offsets = answer, dict[int, _Offsets]()

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":' % index, b""

    def opening(self, choice: Choice) -> bytes:
        if not self._answer.request.echo:
            return b""
        echoed, logprobs = self._answer.echoed(choice.index), None
        scores = self._answer.first_sample(choice.index).prompt_logprobs
        if self.wants_logprobs and scores is not None:
            logprobs = self._answer.logprobs(choice.stream.completion.prompt_token_ids, scores, self._offsets_of(choice))
        fields = (choice.index, encode_json(echoed), encode_json(logprobs))
        return self.start + b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}]}\n\n' % fields

    def logprobs(self, choice: Choice, start: int, stop: int) -> Any:
        done = choice.stream.completion
        tokens, rows = done.token_ids[start:stop], (done.logprobs or [])[start:stop]
        return self._answer.logprobs(tokens, rows, self._offsets_of(choice))

    def _offsets_of(self, choice: Choice) -> "_Offsets":
        if choice.index not in self._offsets:
            self._offsets[choice.index] = self._answer.offsets(choice.index)
        return self._offsets[choice.index]


class _Offsets:
    """Where tokens begin in the text of a choice. A token that completes no character begins where the character does.

    Args:
        decoder: of the tokens; None: there is no text.
        start: where the text of the first token begins.
    """

    def __init__(self, decoder: IncrementalDecoder | None, start: int) -> None:
        self._decoder, self._end = decoder, start

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._end)
            self._end += 0 if self._decoder is None else len(self._decoder.push(token))
        return found


ROUTES = {"POST /v1/completions": completions}
