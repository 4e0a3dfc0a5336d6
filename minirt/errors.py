"""The exception classes. Every message says what is wrong, where, what was expected and found, and what to do."""

from types import TracebackType
from typing import Any, Self

from minirt.wording import worded, worded_place


def printable(text: object) -> str:
    """`text` with every character that is not printable escaped as in a Python literal.

    What a message quotes may come from a file or a network. Control characters would reach the terminal as escape sequences, and
    line breaks or characters that change the direction of text would forge other output.
    """
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: object, length: int = 300) -> str:
    """The start of a text that another library wrote, or that is quoted from a file."""
    text = str(text)
    return text if len(text) <= length else f"{text[:length]}…"


def quoted(value: object, length: int = 300) -> str:
    """The start of a value's `repr`. A value from a caller may be nested more deeply than `repr` recurses."""
    try:
        return shortened(repr(value), length)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"


class MinirtError(Exception):
    """Base of every error that minirt raises on purpose. Its message is one line of printable characters.

    Args:
        what: the problem in one sentence.
        where: the file, tensor, field or argument concerned; of an option of the command line "--name", or "--name value".
            In all texts but `found`, callers from Python see arguments in place of options (`minirt.wording`).
        expected, found: the two sides of a mismatch.
        hint: what the user can do about it.
    """

    def __init__(
        self, what: str, *, where: object = None, expected: object = None, found: object = None, hint: str | None = None
    ) -> None:
        self.what, self.where, self.expected, self.found, self.hint = what, where, expected, found, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        what = worded(self.what)
        text = f"{worded_place(str(self.where))}: {what}" if self.where is not None else what
        if self.expected is not None:
            text += f"; expected {worded(str(self.expected))}"
        if self.found is not None:
            text += f"; found {self.found}"
        if self.hint:
            text += f" ({worded(self.hint)})"
        return printable(text)

    def changed(self, **changes: Any) -> Self:
        """The same error with other arguments."""
        names = ("what", "where", "expected", "found", "hint")
        return type(self)(**{name: getattr(self, name) for name in names} | changes)

    def at(self, where: object) -> Self:
        """The same error with another `where`: the caller's name for the value."""
        return self.changed(where=where)

    def copy(self) -> Self:
        """The same error as another exception: one exception must not be raised in several threads."""
        copy = self.at(self.where)
        copy.__cause__ = self.__cause__
        return copy

    def within(self, place: str) -> Self:
        """The same error with `place` in front of its `where`."""
        return self.at(place if self.where is None else f"{place}, {self.where}")

    @property
    def is_usage(self) -> bool:
        """Whether an option of the command line has a value that it does not take: `where` begins with the option."""
        return str(self.where).startswith("--")


class ConfigError(MinirtError):
    """A model's config.json, or a setting of the runtime, is wrong."""


class UnsupportedError(ConfigError):
    """A valid request for something that minirt does not support: an architecture, rope type, layer implementation…"""


class CheckpointError(MinirtError):
    """A weight file or one of its tensors is missing, damaged, unexpected or misshapen."""


class TokenizerError(MinirtError):
    """The tokenizer or the chat template is missing or damaged, or cannot process the request."""


class ModelNotFoundError(MinirtError):
    """The folder, preset or Hub repository does not exist, or one of its files is missing."""


class InputError(MinirtError, ValueError):
    """A prompt, a token id or a sampling value is not acceptable."""


class ContextLengthError(InputError):
    """A request is longer than the model or the KV cache allows."""


class DeviceError(MinirtError):
    """The requested device is absent or unusable."""


class DeviceFailedError(DeviceError):
    """The GPU failed during the work. Only a new process can use it again."""


class RankFailedError(DeviceFailedError):
    """One of the processes that compute a model together has ended, or does not answer. Load the model again."""


class OutOfMemoryError(DeviceError):
    """Not enough device memory. The message says how much is needed, how much is free and what to change."""


class EngineError(MinirtError):
    """The engine cannot go on with a request: the generator was closed, or an unforeseen exception occurred (`__cause__`)."""


class QueueFullError(MinirtError):
    """As many requests wait as `max_waiting` allows, so that this one is refused. It may succeed later."""


class SlowReaderError(MinirtError):
    """A stream of `AsyncGenerator` was aborted, because more of its pieces waited for their reader than `max_unread` allows."""


class NumericsError(MinirtError):
    """The model computed logits that are NaN or +inf, or only -inf."""


class inside:
    """Context in which every `MinirtError` gets `place` in front of its `where`, unless `place` is None."""

    def __init__(self, place: str | None) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._place is not None and isinstance(error, MinirtError):
            raise error.within(self._place) from error
