"""`Completion`, what a prompt becomes, and `Stream`, the way there: token ids to text, piece by piece."""

import time
from dataclasses import dataclass

from minirt.engine import TokenOutput
from minirt.errors import MinirtError
from minirt.sampling import EffectiveSampling
from minirt.tokenizer import IncrementalDecoder, StopStrings
from minirt.usage import peak_memory


@dataclass(frozen=True)
class Piece:
    """A step of a stream: new text (empty while a character or a stop string is incomplete) and its token ids."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass
class Completion:
    """The result of one prompt. Times in seconds; `decode_tokens_per_s` counts the tokens after the first.

    `finish_reason`: "stop" (an EOS token or stop string), "length", "error" (see `error`), or None while it goes on.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    sampling: EffectiveSampling
    time_to_first_token_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    peak_memory_bytes: int = 0
    error: MinirtError | None = None


@dataclass
class Stream:
    """One request on its way from tokens to text."""

    completion: Completion
    decoder: IncrementalDecoder | None
    stops: StopStrings
    started: float = 0.0
    first: float = 0.0

    def push(self, output: TokenOutput) -> Piece:
        now = time.perf_counter()
        done = self.completion
        if output.error is not None:
            done.finish_reason, done.error = output.finish_reason, output.error
            return Piece("", (), output.finish_reason)
        if not done.token_ids:
            self.first = now
            done.time_to_first_token_s = now - self.started
        done.token_ids.append(output.token)
        done.finish_reason = output.finish_reason
        text, stopped = "", False
        if self.decoder is not None:
            text, stopped = self.stops.push(self.decoder.push(output.token))
            if not stopped and output.finish_reason is not None:
                tail, stopped = self.stops.push(self.decoder.flush())
                text += tail if stopped else tail + self.stops.flush()
            if stopped:
                done.finish_reason = "stop"
        done.text += text
        if done.finish_reason is not None:
            done.peak_memory_bytes = peak_memory()
            if len(done.token_ids) > 1 and now > self.first:
                done.decode_tokens_per_s = (len(done.token_ids) - 1) / (now - self.first)
        return Piece(text, (output.token,), done.finish_reason)
