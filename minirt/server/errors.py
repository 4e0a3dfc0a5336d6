"""Errors of the HTTP interface, and how every error becomes a status and a body in OpenAI's shape."""

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from minirt import errors
from minirt.errors import ContextLengthError, InputError, MinirtError, QueueFullError, TokenizerError


class HTTPError(MinirtError):
    """An answer with an error status that is about the HTTP request itself.

    Args:
        status: the HTTP status.
        param: the field of the request concerned.
        code: OpenAI's code, such as "model_not_found".
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self, status: int, what: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None,
        **details: Any,
    ) -> None:  # fmt: skip
        super().__init__(what, where=param, **details)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def at(self, where: object) -> "HTTPError":
        """The same error about another field."""
        return HTTPError(
            self.status, self.what, param=None if where is None else str(where), code=self.code, retry_after=self.retry_after,
            expected=self.expected, found=self.found, hint=self.hint,
        )  # fmt: skip


def bad_field(param: str, what: str, *, expected: object = None, found: object = None, hint: str | None = None) -> HTTPError:
    """400: a field of the request is not acceptable."""
    return HTTPError(400, what, param=param, expected=expected, found=found, hint=hint)


def named(error: Exception, what: str) -> MinirtError:
    """An error as one of minirt's. `what`: says what an unforeseen one has prevented."""
    if isinstance(error, MinirtError):
        return error
    unforeseen = MinirtError(f"{what}: {type(error).__name__}: {error}")
    unforeseen.__cause__ = error
    return unforeseen


def check_choice(param: str, value: object, options: Collection[str], what: str = "not an acceptable value") -> str:
    """The value, if it is one of these texts. Else 400."""
    if not isinstance(value, str) or value not in options:
        raise bad_field(param, what, expected=" or ".join(options), found=shown(value))
    return value


def shown(value: object) -> str:
    """A value of a request for an error's message. Long and nested ones are cut before they are written."""
    return _SHORT.repr(value)[:80]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error", 499: "cancelled",
    500: "server_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_type(status: int, others: Mapping[int, str] = {}) -> str:
    """OpenAI's type of an error. `others`: those of another API, by their statuses."""
    types = {**_TYPES, **others}
    return types.get(status, "invalid_request_error" if status < 500 else types[500])


_STATUSES: dict[type[MinirtError], int] = {
    InputError: 400, TokenizerError: 400, errors.UnsupportedError: 400, QueueFullError: 429, errors.SlowReaderError: 499,
    errors.EngineError: 503, errors.DeviceFailedError: 503,
}  # fmt: skip


def status_of(error: MinirtError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HTTPError):
        return error.status
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)


def param_of(error: MinirtError, prompt_field: str | None) -> str | None:
    """The field of the request that an error is about. `prompt_field`: the one of the prompt, which others do not name."""
    if isinstance(error, HTTPError):
        return error.param
    if isinstance(error, TokenizerError):
        return prompt_field
    name = str(error.where or "").partition(", /")[0].rpartition(", ")[2].removeprefix("SamplingParams.")  # no place in a schema
    if not isinstance(error, InputError) and not name.startswith("structured_outputs"):
        return None
    named = re.fullmatch(r"[a-z_]+(\.[a-z_]+|\[[0-9]+\])*", name) and not name.startswith("prompts[")
    return name if named else prompt_field


def error_fields(error: MinirtError, prompt_field: str | None = None) -> dict[str, Any]:
    """What an answer says about an error: message, type, param and code, as OpenAI does."""
    code = error.code if isinstance(error, HTTPError) else None
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    return {"message": str(error), "type": error_type(status_of(error)), "param": param_of(error, prompt_field), "code": code}


def error_body(error: MinirtError, prompt_field: str | None = None) -> bytes:
    """The body of an error's answer: {"error": {"message", "type", "param", "code"}}."""
    return msgspec.json.encode({"error": error_fields(error, prompt_field)})
