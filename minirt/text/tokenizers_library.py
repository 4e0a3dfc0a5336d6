"""`TokenizersLibrary`: all calls of the `tokenizers` library. Every failure in them becomes a `TokenizerError`."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from minirt.errors import InputError, MinirtError, TokenizerError, shortened

_T = TypeVar("_T")
_DAMAGED = "get the file again"
_TEXT = "the tokenizer of this model cannot process this text, such as a very long run of one character"


def call_rust(function: Callable[[], _T], failure: Callable[[BaseException], MinirtError]) -> _T:
    """The result of a function that calls a library in Rust. `failure`: from its exception to the error.

    Where such a library panics, it raises PanicException, which derives from BaseException and cannot be imported.
    """
    try:
        return function()
    except MinirtError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        raise failure(error) from error


class TokenizersLibrary:
    """A `tokenizers.Tokenizer`, loaded from the content of a tokenizer.json. Each use of the library goes through `_call`."""

    def __init__(self, content: bytes, path: Path) -> None:
        """Load `content`, which was read from `path`. Errors name `path`."""
        import tokenizers

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time needs no pool of threads
        self._path = path
        self._tokenizer = self._call(lambda: tokenizers.Tokenizer.from_buffer(content), "cannot be loaded")
        # Truncation set in tokenizer.json would silently cut prompts.
        self._call(lambda: self._tokenizer.no_truncation(), "cannot be loaded")
        self._call(lambda: self._tokenizer.no_padding(), "cannot be loaded")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: include those that the post-processor adds.

        Other threads run meanwhile: of the library's functions, only those for batches release Python's lock.
        """
        (encoding,) = self._call(
            lambda: self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens), hint=_TEXT,
            refusal=lambda error: InputError("the text is not valid Unicode (a lone surrogate)", found=ascii(text[:80])),
        )  # fmt: skip
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`. Unknown ids decode to ""."""
        return self._call(
            lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
            refusal=lambda error: InputError(f"not token ids: {error}", expected="integers from 0 to 2**32 - 1"),
        )

    def id_to_token(self, token_id: int) -> str | None:
        """The token of an id, as the vocabulary spells it."""
        return self._call(
            lambda: self._tokenizer.id_to_token(token_id),
            refusal=lambda error: InputError("not a token id", found=repr(token_id)[:80]),
        )

    def token_to_id(self, token: str) -> int | None:
        return self._call(lambda: self._tokenizer.token_to_id(token))

    def vocabulary(self) -> dict[str, int]:
        """Token → id, added tokens included."""
        return self._call(lambda: self._tokenizer.get_vocab(with_added_tokens=True))

    def added_tokens(self) -> dict[str, bool]:
        """The texts of the added tokens, each of which becomes that token in a text; and whether they are flagged as special."""
        return {token.content: token.special for token in self._call(lambda: self._tokenizer.get_added_tokens_decoder()).values()}

    def add_special_tokens(self, tokens: list[str]) -> None:
        self._call(lambda: self._tokenizer.add_special_tokens(tokens))

    def serialized(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return self._call(lambda: self._tokenizer.to_str())

    def decoder(self) -> dict[str, Any] | None:
        """The decoder in the library's serialization; None without one."""
        state = self._call(lambda: self._tokenizer.decoder and self._tokenizer.decoder.__getstate__())
        return None if state is None else json.loads(state)

    def _call(
        self, function: Callable[[], _T], what: str = "failed", hint: str = _DAMAGED,
        refusal: Callable[[BaseException], InputError] | None = None,
    ) -> _T:  # fmt: skip
        """The function's result. `refusal` makes the error for an argument that the library does not take."""

        def failure(error: BaseException) -> MinirtError:
            if refusal is not None and isinstance(error, TypeError | OverflowError | UnicodeError):
                return refusal(error)
            return TokenizerError(f"{what}: {shortened(error)}", where=self._path, hint=hint)

        return call_rust(function, failure)
