"""One request to an OpenAI-compatible server, the `Target`: `StreamedCompletion` reads its events, `Outcome` is what it saw."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minirt.bench.serve.http import HTTPClient, ProtocolError, Response
from minirt.errors import printable, shortened

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls")  # of a delta of /v1/chat/completions


@dataclass(frozen=True)
class Target:
    """The server: its URL without /v1, the path that requests go to, headers of each request, seconds of silence allowed."""

    base_url: str
    path: str
    headers: dict[str, str]
    timeout: float

    def client(self) -> HTTPClient:
        return HTTPClient(self.base_url, self.headers, self.timeout)


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request, in seconds. `planned`, `start` and `end` count from the start of the run.

    Attributes:
        index: the request's number in the workload.
        planned: when the request should have been sent.
        start: when it was sent.
        ttft: from `start` to the first token.
        itls: times between events with tokens.
        latency: from `start` to the last event.
        end: when the response was complete, or the request had failed.
        prompt_tokens, output_tokens: as the server counts them (`usage`); None if it does not say.
        events: number of events with tokens.
        error: why the request failed; "" if it did not.
    """

    index: int
    planned: float
    start: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    events: int = 0
    error: str = ""

    @property
    def delay(self) -> float:
        """How late the request was sent."""
        return self.start - self.planned

    @property
    def output_len(self) -> int:
        """Its tokens: the server's count, else the number of events."""
        return self.events if self.output_tokens is None else self.output_tokens

    @property
    def tpot(self) -> float:
        """Time per output token after the first one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class StreamedCompletion:
    """Reads the events of one streamed completion.

    An event counts as a token if it carries text, or if it carries neither a role nor a reason to finish: some tokens have no
    text of their own. So a chunk that only opens the message does not count as the first token.
    """

    def __init__(self) -> None:
        self.times: list[float] = []  # of events with tokens
        self.last = 0.0  # time of the last event with a choice
        self.finished = False
        self.usage: dict[str, Any] = {}
        self.error = ""
        # The bytes before and after the text of the last event that was a token and nothing else. An event with the same bytes
        # around its text is one, too, and is not parsed: that would take 4 µs.
        self._head, self._tail = b"\0", b""

    def events(self, payloads: list[bytes], now: float) -> None:
        """Read events that arrived at time `now`."""
        for payload in payloads:
            if payload.startswith(self._head) and payload.endswith(self._tail) and b'"role"' not in payload:
                self.times.append(now)
                self.last = now
            else:
                self._read(payload, now)

    def _read(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(payload)
            if not isinstance(event, dict):
                raise ValueError("not an object")
            if event.get("error"):
                self._fail(f"the stream has an error: {_message(event)}")
                return
            if usage := event.get("usage"):
                self.usage = usage
            if choices := event.get("choices"):
                self.last = now
                choice = choices[0]
                delta = choice.get("delta") or choice
                reason = choice.get("finish_reason")
                self.finished = self.finished or reason is not None
                if any(map(delta.get, _TEXTS)) or choice.get("text") or ("role" not in delta and reason is None):
                    self.times.append(now)
                    if "role" not in delta and reason is None and not usage:
                        self._head, self._tail = _frame(payload)
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            self._fail(f"an event of the stream is no completion: {_shown(payload)}")

    def _fail(self, error: str) -> None:
        self.error = self.error or error

    def fill(self, outcome: Outcome, sent: float) -> None:
        """Write what was read to `outcome`; `sent`: the time of the request."""
        times = self.times
        outcome.events = len(times)
        if times:
            outcome.ttft, outcome.latency = times[0] - sent, self.last - sent
            outcome.itls = [after - before for before, after in pairwise(times)]
        for name, key in (("prompt_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            count = self.usage.get(key) if isinstance(self.usage, dict) else None
            setattr(outcome, name, count if type(count) is int else None)
        if not self.error and not times:
            self.error = "the stream ended without a token"
        elif not self.error and not self.finished:
            self.error = f"the stream ended early, after {len(times)} events with tokens"


def _frame(payload: bytes) -> tuple[bytes, bytes]:
    """The bytes before the text of an event, and those from its reason to finish on. Text cannot contain either of these keys,
    since JSON escapes the quotes in it."""
    text = payload.find(b'"delta"')
    text = payload.find(b'"text"') if text < 0 else text
    reason = payload.rfind(b'"finish_reason"')
    if text < 0 or reason < 0:
        return b"\0", b""
    return payload[:text], payload[reason:] if reason > text else payload[-2:]


async def generate(client: HTTPClient, request: bytes, outcome: Outcome, started: float) -> None:
    """Send a request, and write to `outcome` what came back. `started`: time.perf_counter() at the start of the run."""
    generation = StreamedCompletion()
    sent = time.perf_counter()
    outcome.start = sent - started
    try:
        response = await client.send(request, generation.events)
        outcome.error = refusal(response)
    except ProtocolError as error:
        outcome.error = str(error)
    except asyncio.CancelledError:
        outcome.error = "cancelled"
        raise
    outcome.end = time.perf_counter() - started
    generation.fill(outcome, sent)
    outcome.error = outcome.error or generation.error


def refusal(response: Response) -> str:
    """Why a response is no event stream; "" if it is one."""
    if response.status != 200:
        text = f"HTTP {response.status} {printable(response.reason)}".rstrip()
        try:
            detail = _message(json.loads(response.body))
        except (ValueError, RecursionError):
            detail = _shown(response.body)
        return f"{text}: {detail}" if response.body.strip() else text
    if not response.is_event_stream:
        kind = printable(response.headers.get("content-type", "no content-type"))
        return f"the answer is no event stream but {shortened(kind, 60)}: {_shown(response.body)}"
    return ""


def _message(body: Any) -> str:
    """The message of an error in OpenAI's form, or in FastAPI's; else the start of the body."""
    error = body.get("error") or body.get("detail") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return shortened(printable(message if isinstance(message, str) else json.dumps(body, ensure_ascii=False)), 200)


def _shown(body: bytes | bytearray) -> str:
    return shortened(printable(body[:2000].decode("utf-8", "replace").strip()), 120) or "nothing"
