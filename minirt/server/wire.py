"""Messages between the front process and the engine's process: plain values, as MessagePack, in frames with their length.

The engine sends one message a step, with the new tokens of all sequences. docs/design/serving.md describes both processes.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from minirt import errors
from minirt.engine.request import EngineStats, Request, TokenOutput
from minirt.errors import InputError, MinirtError

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30  # bytes; a larger length means that the stream is damaged
# How long a thread of either process may keep Python's lock while another one waits for it. The engine's thread and the event
# loop give the lock up many times a step. With Python's own 5 ms, a thread that checks a large schema multiplies a step's time.
SWITCH_SECONDS = 0.0005


# ── from the front ──


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message.

    Attributes:
        options: the fields of `LoadOptions`.
        progress: draw progress bars on stderr.
        warm_prompts: names and texts of prompts that are computed at load and kept.
        imports: Python files that are run first.
    """

    options: dict[str, Any]
    progress: bool
    warm_prompts: list[tuple[str, str]] = []
    imports: list[str] = []


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Requests of one call. If the engine refuses one, all end with an error in their outputs.

    Samples have no prompt, except the first one of their group. Use `of` and `whole`.
    """

    requests: list[Request]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Submit":
        return cls([_with_prompt(request, ()) for request in requests])

    def whole(self) -> list[Request]:
        """The requests, each with its prompt."""
        prompts: dict[int | None, Any] = {request.id: request.prompt_token_ids for request in self.requests}
        return [_with_prompt(request, prompts.get(request.group)) for request in self.requests]


def _with_prompt(request: Request, prompt: Any) -> Request:
    """The request with this prompt if it is a sample, but not the first one of its group."""
    return request if request.group in (None, request.id) else replace(request, prompt_token_ids=prompt)


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Drop requests."""

    request_ids: list[int]


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Ask for the engine's state, and how many tokens these requests have generated."""

    request_ids: list[int] = []


class ChangeAdapter(msgspec.Struct, tag=True, array_like=True):
    """Load an adapter from a folder; None: unload it. `AdapterChanged` answers."""

    name: str
    folder: str | None = None


# ── from the engine ──


class FilesReady(msgspec.Struct, tag=True, array_like=True):
    """The model's files are on the disk, and loading begins. `folder` is None if there is no tokenizer to load."""

    folder: str | None


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded and warmed up, and warm prompts are computed. `facts`: what /server_info shows. `keeps_states`: see
    `Engine.keeps_states`. `loras`: the names of adapters."""

    max_len: int
    vocab_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any] | None
    facts: dict[str, Any]
    keeps_states: bool = False
    loras: list[str] = []


class AdapterChanged(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ChangeAdapter`, in the order of these. `loras`: the names of all adapters."""

    loras: list[str]
    error: MinirtError | None = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded, or the engine cannot go on. The process ends after this message."""

    error: MinirtError


class StepOutputs(msgspec.Struct, tag=True, array_like=True):
    """The outputs of one step."""

    outputs: list[TokenOutput]


class EngineState(msgspec.Struct, tag=True, array_like=True):
    """The answer to `Ask`. `counts`: a number for each request, 0 if the engine does not have it."""

    stats: EngineStats
    counts: list[int]


ToEngine = Start | Submit | Abort | Ask | ChangeAdapter
ToFront = FilesReady | Ready | Failed | StepOutputs | EngineState | AdapterChanged


_DETAILS = ("where", "expected", "found", "hint")


def _encode_error(value: Any) -> Any:
    if isinstance(value, MinirtError):
        texts = (None if (detail := getattr(value, name)) is None else str(detail) for name in _DETAILS)
        return [type(value).__name__, value.what, *texts]
    raise TypeError(f"{type(value).__name__} is no plain value")


def _decode_error(_: type, value: Any) -> MinirtError:
    name, what, *details = value
    return getattr(errors, name, MinirtError)(what, **dict(zip(_DETAILS, details, strict=True)))


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_error)
TO_ENGINE = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_error)
TO_FRONT = msgspec.msgpack.Decoder(ToFront, dec_hook=_decode_error)


def frame(message: ToEngine | ToFront) -> bytearray:
    """A message in its frame.

    Raises:
        InputError: it is too large.
        OverflowError: an integer has more than 64 bits.
    """
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    if len(buffer) - 4 > MAX_FRAME:
        raise InputError("the request is too large", expected=f"at most {MAX_FRAME:,} bytes", found=f"{len(buffer) - 4:,}")
    _LENGTH.pack_into(buffer, 0, len(buffer) - 4)
    return buffer


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; yields each body that is complete."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise errors.EngineError("the messages between the processes are damaged", found=f"a length of {length}")
            end = start + 4 + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + 4 : end])
            start = end
        del self._buffer[:start]
