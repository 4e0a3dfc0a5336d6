"""/v1/completions: prompts as texts or token ids, one or many, with the prompt's log-probabilities on request."""

from collections.abc import Sequence
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.processor import Call, decoder_after
from minirt.sampling_params import MAX_LOGPROBS
from minirt.server.answers import Answer, ChoicesAnswer, finite, prompt_rows, token_text, top_of
from minirt.server.errors import bad_field, shown
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice
from minirt.server.protocol import REFUSED, Int, Listed, SamplingRequest, check_copies, decode, sampling_params
from minirt.text.detokenizer import IncrementalDecoder, incremental_decoder, prompt_text

MAX_CHOICES = 4096  # prompts × n of one request
DEFAULT_MAX_TOKENS = 16  # OpenAI's
_CHOICE_BYTES = 50  # of a body that take as long to read as the request of one more choice takes to make
_CHATS = "is for chats"
_REFUSED = {
    **REFUSED, "top_logprobs": "is named logprobs here",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"), _CHATS),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), _CHATS),
}  # fmt: skip


class CompletionRequest(SamplingRequest, kw_only=True):
    """The fields of a request to continue prompts."""

    prompt_fields = ("prompt",)
    prompt: Any
    echo: bool | None = None
    logprobs: Listed | bool | None = None  # `false` is null
    best_of: Int | None = None
    add_special_tokens: bool | None = None


async def _prepare(front: Front, exchange: Exchange) -> Answer:
    body = await front.body(exchange)
    request, prompts = await front.aside(len(body), _read, front, exchange, body)
    size = len(body) + _CHOICE_BYTES * len(prompts) * (request.n or 1)
    call = await front.aside(size, _call, front, request, prompts)
    return _CompletionAnswer(front, exchange, request, call, prompts)


def _read(front: Front, exchange: Exchange, body: bytes) -> tuple[CompletionRequest, list[str | list[int]]]:
    """A request and its prompts."""
    request = decode(front, exchange, body, CompletionRequest, _REFUSED)
    prompts = _prompts(request.prompt)
    _check(request, len(prompts))
    exchange.grammar_field = None if request.structured_outputs not in (None, {}) else "response_format"
    return request, prompts


def _call(front: Front, request: CompletionRequest, prompts: list[str | list[int]]) -> Call:
    """The engine's requests for all choices."""
    processor, _ = front.check_ready()
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = sampling_params(
        request, max_tokens=max(limit, 1), logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo and request.logprobs is not None else request.prompt_logprobs,
        n=request.n or 1, structured_outputs=request.grammar,
    )  # fmt: skip
    if request.add_special_tokens is False:
        tokenizer, most = processor.text(), processor.limit(params)
        prompts = [tokenizer.encode_plain(prompt, most) if isinstance(prompt, str) else prompt for prompt in prompts]
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
    return [prompt if isinstance(prompt, str) else _ids(prompt, i) for i, prompt in enumerate(value)]


def _ids(prompt: list[Any], place: int) -> list[int]:
    if set(map(type, prompt)) == {int} and max(prompt) < 2**53 and min(prompt) > -(2**53):
        return prompt
    if prompt and all(type(token) in (int, float) and float(token).is_integer() and abs(token) < 2**53 for token in prompt):
        return [int(token) for token in prompt]
    raise bad_field(f"prompt[{place}]", "not token ids", expected="a list of integers", found=shown(prompt))


def _check(request: CompletionRequest, num_prompts: int) -> None:
    count = request.n or 1
    if num_prompts * count > MAX_CHOICES:
        raise bad_field("prompt", "too many completions", expected=f"at most {MAX_CHOICES}", found=num_prompts * count)
    check_copies(request, num_prompts * count)
    if request.best_of not in (None, count):
        raise bad_field("best_of", "is not supported", expected=f"null or n, which is {count}", found=request.best_of)
    if request.logprobs is True:
        raise bad_field("logprobs", "not an acceptable value", expected=f"an integer from 0 to {MAX_LOGPROBS}", found="true")
    request.logprobs = None if request.logprobs is False else request.logprobs
    if request.max_tokens is not None and request.max_tokens < (0 if request.echo else 1):
        expected = "an integer >= 1, or 0 with echo"
        raise bad_field("max_tokens", "not an acceptable value", expected=expected, found=request.max_tokens)
    if request.max_tokens == 0 and request.stream:
        raise bad_field("max_tokens", "0 is not for streams", expected="stream: false")


class _CompletionAnswer(ChoicesAnswer):
    def __init__(
        self, front: Front, exchange: Exchange, request: CompletionRequest, call: Call, prompts: Sequence[str | list[int]]
    ) -> None:
        fields = {"id": f"cmpl-{exchange.id}", "object": "text_completion"}
        super().__init__(
            front, call, request, fields, "text_completion", (b'"text":', b""), front.tokenizer,
            wants_logprobs=request.logprobs is not None,
        )  # fmt: skip
        # A request for the prompt's log-probabilities alone generates a token that is not in the answer.
        self.only_echo = request.max_tokens == 0
        self._request, self._prompts = request, prompts
        self._offsets: dict[int, tuple[IncrementalDecoder | None, int]] = {}  # decoders, and where their next texts begin

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        scores = self._scores(index)
        rows, tokens = list[TokenLogprobs | None](completion.logprobs or ()), list(completion.token_ids)
        text, reason = completion.text, completion.finish_reason
        if self.only_echo:
            rows, tokens, text, reason = [], [], "", "length"
        if self._request.echo and scores is not None:
            rows, tokens = [*scores, *rows], [*completion.prompt_token_ids, *tokens]
        logprobs = self._logprobs(index, tokens, rows) if self.wants_logprobs else None
        choice = {"index": index, "text": self._echoed(index) + text, "logprobs": logprobs, "finish_reason": reason}
        if self._request.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = prompt_rows(self.tokenizer, scores)
        return choice

    def opening(self, choice: Choice) -> bytes:
        if not self._request.echo:
            return b""
        index, scores, logprobs = choice.index, self._scores(choice.index), None
        if self.wants_logprobs and scores is not None:
            logprobs = self._logprobs(index, choice.stream.completion.prompt_token_ids, scores)
        fields = index, encode_json(self._echoed(index)), encode_json(logprobs)
        return self.start + b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}]}\n\n' % fields

    def logprobs(self, choice: Choice, start: int, stop: int) -> Any:
        completion = choice.stream.completion
        return self._logprobs(choice.index, completion.token_ids[start:stop], (completion.logprobs or [])[start:stop])

    def _echoed(self, index: int) -> str:
        """The text of a choice's prompt, if the request asks for it."""
        if not self._request.echo:
            return ""
        prompt = self._prompts[self.call.streams[index].prompt]
        if isinstance(prompt, str):
            return prompt
        skips = self.call.streams[index].completion.sampling.skip_special_tokens
        return "" if self.tokenizer is None else prompt_text(self.tokenizer, prompt, skips)

    def _scores(self, index: int) -> Sequence[TokenLogprobs | None] | None:
        """The prompt's log-probabilities, which the first sample of each prompt has."""
        return self.call.streams[index - self.call.streams[index].sample].completion.prompt_logprobs

    def _logprobs(self, index: int, tokens: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens of a choice in OpenAI's form: parallel lists."""
        decoder, end = self._offsets.get(index) or self._begin_offsets(index)
        offsets = []
        for token in tokens:  # one that completes no character begins at the same place as the character
            offsets.append(end)
            end += 0 if decoder is None else len(decoder.push(token))
        self._offsets[index] = decoder, end
        return {
            "tokens": [token_text(self.tokenizer, token) for token in tokens], "text_offset": offsets,
            "token_logprobs": [None if row is None else finite(row.logprob) for row in rows],
            "top_logprobs": [None if row is None else self._top(row) for row in rows],
        }  # fmt: skip

    def _begin_offsets(self, index: int) -> tuple[IncrementalDecoder | None, int]:
        """The decoder of a choice's tokens, and where their text begins. The prompt's come first if it is echoed with its scores.

        There is no decoder without a tokenizer.
        """
        completion, decoder = self.call.streams[index].completion, None
        with_prompt = self._request.echo and self._scores(index) is not None
        if self.tokenizer is not None and with_prompt:
            decoder = incremental_decoder(self.tokenizer, completion.sampling.skip_special_tokens)
        elif self.tokenizer is not None:
            decoder = decoder_after(self.tokenizer, completion.sampling, completion.prompt_token_ids)
        return decoder, 0 if with_prompt else len(self._echoed(index))

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens by their text, and the token itself."""
        top = [(row.token_id, finite(row.logprob)), *reversed(top_of(row, int(self._request.logprobs or 0)))]
        return {token_text(self.tokenizer, token): logprob for token, logprob in top}


ROUTES = {"POST /v1/completions": _prepare}
