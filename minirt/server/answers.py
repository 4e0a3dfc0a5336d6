"""Answers, whole or streamed: what the APIs share.

`send` sends what a handler returns. `ChoicesAnswer` is for the APIs whose answers have choices,
`ReplyAnswer` for those that tell one reply in events of several types.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.processor import Call
from minirt.server.conversation import Prepared, ReplyReader
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice, Generation
from minirt.server.protocol import SamplingRequest, StreamOptions
from minirt.text.reply import ContentDelta, Event, ReasoningDelta, ToolCallStart
from minirt.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity
_KINDS: dict[type, str] = {ContentDelta: "text", ReasoningDelta: "reasoning"}  # other events belong to tool calls
StreamEvent = dict[str, Any]


class Answer:
    """What a request is answered with; one subclass for each API. Events are bytes in the form of server-sent events.

    Attributes:
        call: the engine's requests.
        streams: whether the answer is a stream of events.

    A subclass has these methods:
        whole: the body of an answer that is no stream, from its completions in the order of the call's streams.
        add: events with what a choice has that was not sent yet.
        end: the last events.
    """

    whole: Callable[[Sequence[Completion]], Any]
    add: Callable[[Choice], Iterable[bytes]]
    end: Callable[[], bytes]

    def __init__(self, call: Call, streams: bool | None) -> None:
        self.call, self.streams = call, bool(streams)

    def begin(self) -> bytes:
        """The events before the first text."""
        return b""


async def send(front: Front, exchange: Exchange, content: Any) -> None:
    """Send what a handler returns: an `Answer`, or the body of one."""
    if not isinstance(content, Answer):
        await exchange.answer(content)
    elif content.streams:
        await _stream(front, exchange, content)
    else:
        await exchange.answer(content.whole(await _collect(front, exchange, content.call)))


async def _stream(front: Front, exchange: Exchange, answer: Answer) -> None:
    with front.start(answer.call, front.options.stream_interval, exchange.drop) as generation:
        try:
            await generation.wait()  # an error before the first token sets the status of the answer
            await exchange.begin_events()
            events = [answer.begin()]
            while True:
                await generation.wait()
                for choice in generation.take():
                    events += answer.add(choice)
                    generation.sent(choice)
                if generation.done:
                    break
                if data := b"".join(events):
                    await exchange.send_events(data)
                events = []
            await exchange.send_events(b"".join([*events, answer.end()]))
        finally:
            exchange.log |= log_fields(answer.call, generation)
    await exchange.end_events()


async def _collect(front: Front, exchange: Exchange, call: Call) -> list[Completion]:
    """Run a call to its end."""
    with front.start(call, None) as generation:
        unread: int | None = 0
        try:
            await generation.wait()
        except asyncio.CancelledError:
            unread = await generation.count_unread(front.engine)
            raise
        finally:
            exchange.log |= log_fields(call, generation, unread)
    return [choice.stream.completion for choice in generation.choices]


class ChoicesAnswer(Answer):
    """An answer with choices. An event is three joined parts: a constant head, the new text as JSON, and a constant tail.

    Attributes:
        only_echo: the answer is about the prompts alone, without the generated tokens.

    A subclass has these methods:
        choice: a choice that has ended, from its index and its completion.
        deltas: what a choice's new text adds to the answer: one JSON value for each event. Only if the answer `parses`.
        logprobs: the `logprobs` of some tokens of a choice, from the place of the first one up to that after the last one.

    Args:
        fields: the first fields of the answer.
        chunk: the `object` of its events.
        frame: what is before and after the text, or a delta, of a choice in an event, up to its `logprobs`.
        tokenizer: None if the model has none. Its events have no text, but there are as many.
        wants_logprobs: whether events have the log-probabilities of their tokens.
        parses: whether `deltas` are sent instead of the text.
    """

    only_echo = False
    choice: Callable[[int, Completion], dict[str, Any]]
    deltas: Callable[[Choice], list[bytes]]
    logprobs: Callable[[Choice, int, int], Any]

    def __init__(
        self, front: Front, call: Call, request: SamplingRequest, fields: dict[str, Any], chunk: str, frame: tuple[bytes, bytes],
        tokenizer: Tokenizer | None, *, wants_logprobs: bool, parses: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(call, request.stream)
        self.fields = fields | {"created": int(time.time()), "model": request.model or front.options.names[0]}
        self.tokenizer, self.wants_logprobs, self.parses = tokenizer, wants_logprobs, parses
        self.start = b"data: " + encode_json(self.fields | {"object": chunk})[:-1] + b',"choices":['
        self._heads = [self.start + b'{"index":%d,%b' % (index, frame[0]) for index in range(len(call.streams))]
        self._after, self._tail = frame[1], frame[1] + b',"logprobs":null,"finish_reason":null}]}\n\n'
        usage = request.stream_options or StreamOptions()
        self._continuous, self._tells_usage = usage.continuous_usage_stats, usage.include_usage or usage.continuous_usage_stats
        self._is_plain, self._without_text = not (wants_logprobs or self._continuous), tokenizer is None
        self._num_sent = [0] * len(call.streams)  # tokens whose log-probabilities were sent

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self.choice(index, completion) for index, completion in enumerate(completions)]
        return self.fields | {"choices": choices, "usage": usage_of(self.call, self.only_echo)}

    def opening(self, choice: Choice) -> bytes:
        """The events before the first text of a choice."""
        return b""

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Why a choice has ended, by the reason of its completion; None while it runs. Called after `deltas`."""
        return reason

    def add(self, choice: Choice) -> list[bytes]:
        index, text = choice.index, choice.text
        head, tail = self._heads[index], self._tail
        events = [] if choice.begun else [self.opening(choice)]
        is_plain = self._is_plain and choice.finish_reason is None
        last = b"{}"  # an event without a delta
        if self.parses:
            deltas = self.deltas(choice)
            if not is_plain and deltas and choice.finish_reason is None:
                last = deltas.pop()
            for delta in deltas:
                events += head, delta, tail
        elif not is_plain:
            last = encode_json(text)
        elif text or self._without_text:  # else only part of a character, or of what may be a stop string, has come
            events += head, encode_json(text), tail
        if is_plain:
            return events
        logprobs = b"null"
        if self.wants_logprobs:
            stop = len(choice.stream.completion.token_ids)
            logprobs = encode_json(self.logprobs(choice, self._num_sent[index], stop))
            self._num_sent[index] = stop
        events += head, last, self._after, b',"logprobs":', logprobs
        events += b',"finish_reason":', encode_json(self.finish_reason(index, choice.finish_reason)), b"}]"
        if self._continuous:
            events += b',"usage":', encode_json(usage_of(self.call))
        events.append(b"}\n\n")
        return events

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._tells_usage:
            return done
        return b"".join((self.start, b'],"usage":', encode_json(usage_of(self.call)), b"}\n\n", done))


class ReplyAnswer(Answer):
    """An answer that tells one reply in parts: texts, reasoning and tool calls. Each begins, grows, and ends before the next one.

    Attributes:
        parts: those that have begun, as the API writes them.
        kind: of the part that grows: "text", "reasoning" or "call"; "": it has ended.

    A subclass has these methods; those of parts return the stream's events:
        message: the body of the answer, whose reply has ended.
        open_part: adds a part of this `kind` to `parts`, from the start of a tool call if it is one.
        delta: the part grows by a text.
        close_part: the part ends with this whole text; whether it is complete.
    """

    message: Callable[[], dict[str, Any]]
    open_part: Callable[[ToolCallStart | None], list[StreamEvent]]
    delta: Callable[[str], StreamEvent]
    close_part: Callable[[str, bool], list[StreamEvent]]

    def __init__(self, prepared: Prepared, streams: bool | None) -> None:
        super().__init__(prepared.call, streams)
        self.completion = prepared.call.streams[0].completion
        self._reader, self._texts = ReplyReader(prepared), list[str]()
        self.parts: list[StreamEvent] = []
        self.kind = ""

    def add(self, choice: Choice) -> list[bytes]:
        return list(map(self.encode, self.grow(self._reader.read(choice.text, choice.finish_reason is not None))))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        self.grow(self._reader.read(self.completion.text, ended=True))
        return self.message()

    def grow(self, events: Iterable[Event]) -> list[StreamEvent]:
        """Add events of the reply to the parts. Returns the stream's events."""
        told: list[StreamEvent] = []
        for event in events:
            call = event if isinstance(event, ToolCallStart) else None
            kind = _KINDS.get(type(event), "call")
            if call is not None or kind != self.kind:
                told += self.end_part()
                self.kind, self._texts = kind, []
                told += self.open_part(call)
            if not isinstance(event, ToolCallStart):
                self._texts.append(event.text)
                told.append(self.delta(event.text))
        return told

    def end_part(self, complete: bool = True) -> list[StreamEvent]:
        """End the part that grows, if there is one. `complete`: the reply was not cut off within it."""
        events = self.close_part("".join(self._texts), complete) if self.kind else []
        self.kind = ""
        return events

    def encode(self, event: StreamEvent) -> bytes:
        return named_event(event)


def named_event(event: StreamEvent) -> bytes:
    """A server-sent event with its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


def usage_of(call: Call, only_prompts: bool = False) -> dict[str, Any]:
    """The `usage` of a call so far. `only_prompts`: the generated tokens are not part of the answer."""
    firsts = [stream.completion for stream in call.streams if stream.sample == 0]
    prompt = sum(len(first.prompt_token_ids) for first in firsts)
    generated = 0 if only_prompts else sum(len(stream.completion.token_ids) for stream in call.streams)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in firsts)},
    }  # fmt: skip


def log_fields(call: Call, generation: Generation, unread: int | None = 0) -> dict[str, Any]:
    """What the log says about a call. `unread`: tokens that were made and did not come; None: it is not known how many."""
    counts = usage_of(call)
    reasons = [stream.completion.finish_reason or generation.reason for stream in call.streams]
    first = min((times[0] for stream in call.streams if (times := stream.completion.token_times_s)), default=None)
    queue = generation.queue_time_s
    return {
        "prompt_tokens": counts["prompt_tokens"], "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": None if unread is None else counts["completion_tokens"] + unread,
        "finish": reasons[0] if len(set(reasons)) == 1 else reasons,
        "queue_ms": None if queue is None else round(queue * 1e3, 1), "ttft_ms": None if first is None else round(first * 1e3, 1),
    }  # fmt: skip


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The text of one token. Bytes that are no complete character become U+FFFD."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if not math.isnan(logprob) else _LOWEST


def top_of(row: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The most probable tokens that an answer lists."""
    return [(token, finite(logprob)) for token, logprob in row.top[:count]]


def prompt_rows(tokenizer: Tokenizer | None, rows: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form of the log-probabilities of a prompt's tokens: token id → value, rank and text."""

    def by_id(row: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (rank, logprob) for rank, (token, logprob) in enumerate(row.top, 1)}
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}
            for token, (rank, logprob) in (ranked | {row.token_id: (row.rank, row.logprob)}).items()
        }

    return [None if row is None else by_id(row) for row in rows]
