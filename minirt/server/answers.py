"""Answers, streamed or whole: what the APIs share.

`stream` is for the APIs whose answers have choices: an event is three joined parts, which are a constant head, the new text as
JSON, and a constant tail. `stream_reply` is for those that tell one reply in events of several types.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.processor import Call
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice, Generation
from minirt.server.protocol import Sampling, usage
from minirt.server.replies import ReplyPlan
from minirt.text.reply import Event
from minirt.text.tokenizer import Tokenizer

_DONE = b"data: [DONE]\n\n"
_LOWEST = -9999.0  # OpenAI's value for a probability of 0; JSON has no infinity


class Format:
    """The form of the events of a stream. Subclasses say what a choice looks like.

    Args:
        fields: the first fields of every event: id, object, created, model.
        tokenizer: None if the model has none. Its events have no text, but there are as many.
        wants_logprobs: whether events have the log-probabilities of their tokens.
        parses: whether `deltas` are sent instead of the text.
    """

    def __init__(
        self, fields: dict[str, Any], tokenizer: Tokenizer | None, wants_logprobs: bool, parses: bool = False
    ) -> None:
        self.tokenizer, self.wants_logprobs, self.parses = tokenizer, wants_logprobs, parses
        self.start = b"data: " + encode_json(fields)[:-1] + b',"choices":['

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What is before and after the text, or a delta, of a choice, up to its `logprobs`."""
        raise NotImplementedError

    def opening(self, choice: Choice) -> bytes:
        """The events before the first text of a choice."""
        return b""

    def deltas(self, choice: Choice) -> list[bytes]:
        """What a choice's new text adds to the answer: one JSON value for each event. Only if the form `parses`."""
        raise NotImplementedError

    def finish_reason(self, choice: Choice) -> str | None:
        """Why a choice has ended; None while it runs. Called after `deltas`."""
        return choice.finish_reason

    def logprobs(self, choice: Choice, start: int, stop: int) -> Any:
        """The `logprobs` of the tokens `start` to `stop` of a choice."""
        raise NotImplementedError


async def stream(front: Front, exchange: Exchange, request: Sampling, call: Call, form: Format) -> None:
    """Answer with server-sent events."""
    with front.start(call, front.options.stream_interval, exchange.drop) as generation:
        try:
            await generation.wait()  # an error before the first token has a status of its own
            await exchange.begin_events()
            await _send_all(exchange, request, call, form, generation)
        finally:
            exchange.log |= log_fields(call, generation)
    await exchange.end_events()


async def _send_all(exchange: Exchange, request: Sampling, call: Call, form: Format, generation: Generation) -> None:
    parts = [form.around_text(choice.index) for choice in generation.choices]
    heads = [form.start + before for before, _ in parts]
    tails = [after + b',"logprobs":null,"finish_reason":null}]}\n\n' for _, after in parts]
    continuous, wants_logprobs = request.continuous_usage, form.wants_logprobs
    without_text = form.tokenizer is None
    num_sent = [0] * len(parts)  # tokens whose log-probabilities were sent
    events: list[bytes] = []
    while True:
        await generation.wait()
        for choice in generation.take():
            index, text = choice.index, choice.text
            if not choice.begun:
                events.append(form.opening(choice))
            plain = choice.finish_reason is None and not wants_logprobs and not continuous
            last = b"{}"  # an event without a delta
            if form.parses:
                deltas = form.deltas(choice)
                if not plain and deltas and choice.finish_reason is None:
                    last = deltas.pop()
                for delta in deltas:
                    events += heads[index], delta, tails[index]
            elif not plain:
                last = encode_json(text)
            elif text or without_text:  # else only part of a character, or of what may be a stop string, has come
                events += heads[index], encode_json(text), tails[index]
            if not plain:
                logprobs = b"null"
                if wants_logprobs:
                    stop = len(choice.stream.completion.token_ids)
                    logprobs = encode_json(form.logprobs(choice, num_sent[index], stop))
                    num_sent[index] = stop
                events += heads[index], last, parts[index][1], b',"logprobs":', logprobs
                events += b',"finish_reason":', encode_json(form.finish_reason(choice)), b"}]"
                if continuous:
                    events += b',"usage":', encode_json(usage_of(call))
                events.append(b"}\n\n")
            generation.sent(choice)
        if generation.done:
            break
        if events:
            await exchange.send_events(b"".join(events))
            events = []
    if request.include_usage:
        events += form.start, b'],"usage":', encode_json(usage_of(call)), b"}\n\n"
    events.append(_DONE)
    await exchange.send_events(b"".join(events))


class ReplyEvents:
    """The events of a stream that tells one reply. Subclasses make them, as bytes in the form of server-sent events."""

    def begin(self, call: Call) -> bytes:
        """The events before the first text."""
        raise NotImplementedError

    def more(self, events: Sequence[Event]) -> bytes:
        """What `events` add. They may be none."""
        raise NotImplementedError

    def end(self, call: Call) -> bytes:
        """The last events, after the whole reply."""
        raise NotImplementedError


async def stream_reply(front: Front, exchange: Exchange, call: Call, plan: ReplyPlan, form: ReplyEvents) -> None:
    """Answer with the server-sent events of one reply. `exchange.error_event` says how an error after the first one looks."""
    with front.start(call, front.options.stream_interval, exchange.drop) as generation:
        try:
            await generation.wait()  # an error before the first token has a status of its own
            await exchange.begin_events()
            reader, data = plan.reader(), [form.begin(call)]
            while True:
                await generation.wait()
                for choice in generation.take():
                    data.append(form.more(reader.read(choice.text, choice.finish_reason is not None)))
                    generation.sent(choice)
                if generation.done:
                    break
                if sent := b"".join(data):
                    await exchange.send_events(sent)
                data = []
            await exchange.send_events(b"".join([*data, form.end(call)]))
        finally:
            exchange.log |= log_fields(call, generation)
    await exchange.end_events()


async def collect(front: Front, exchange: Exchange, call: Call) -> list[Completion]:
    """Run a call to its end. Returns its completions, in the order of the response's choices."""
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


def usage_of(call: Call, without_tokens: bool = False) -> dict[str, Any]:
    """The `usage` of a call so far. `without_tokens`: the generated tokens are not part of the answer."""
    firsts = [stream.completion for stream in call.streams if stream.sample == 0]
    generated = 0 if without_tokens else sum(len(stream.completion.token_ids) for stream in call.streams)
    return usage([len(first.prompt_token_ids) for first in firsts], generated, sum(first.cached_tokens for first in firsts))


def log_fields(call: Call, generation: Generation, unread: int | None = 0) -> dict[str, Any]:
    """What the log says about a call. `unread`: tokens that were made and did not come; None: it is not known how many."""
    counts = usage_of(call)
    reasons = [stream.completion.finish_reason or generation.reason for stream in call.streams]
    first = min((own.token_times_s[0] for s in call.streams if (own := s.completion).token_times_s), default=None)
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
