"""Reads tokenizer files. Every failure becomes a `TokenizerError` that names the file."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirt.errors import TokenizerError


@contextlib.contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Turn any error about the file, including panics of the tokenizers library, into a `TokenizerError`."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A Rust panic arrives as PanicException, which derives from BaseException and cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"is damaged or unreadable: {error}", where=path, hint="get the file again") from error
        raise


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. {} if the file does not exist: all files read by this function are optional."""
    if not path.exists():
        return {}
    with damage_reported(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("not a JSON object")
        return value
