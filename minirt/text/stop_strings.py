"""`StopStrings`: ends streamed text at the first of the user's stop strings."""

from collections.abc import Mapping, Sequence

from minirt.errors import InputError, quoted, shortened
from minirt.text.reply import held_length
from minirt.text.tokenizer import Tokenizer


class StopStrings:
    """Finds the first stop string in streamed text. Withholds the stop string (unless it is included) and everything after it.

    The first stop string is the one that is complete first; if several end at the same character, the longest one.
    So the result does not depend on how the text is cut into pieces, and a complete match never waits for a longer one.

    Args:
        stops: the stop strings; none is empty.
        include: whether the text includes the stop string.
        tokens: the special tokens among `stops`; see `stop_tokens`.

    Attributes:
        match: the stop string that has ended the text; None before.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, tokens: Mapping[int, str] | None = None) -> None:
        self._stops = tuple(stops)
        self.match: str | None = None
        self._held, self._include, self._tokens = "", include, tokens or {}
        self._passed = 0  # characters of the held text in which no stop string may end

    def __bool__(self) -> bool:
        """Whether there are any. If so, the text decides where a request ends: the engine alone cannot."""
        return bool(self._stops)

    def push(self, text_piece: str, check: bool = True) -> tuple[str, bool]:
        """Add text. Returns (text that is safe to emit, whether a stop string was found); after a match always ("", True).

        `check`: whether a stop string that ends in this text counts.
        """
        if not self._stops:
            return text_piece, False
        if self.match is not None:
            return "", True
        text = self._held + text_piece
        passed = self._passed if check else len(text)
        starts = [(text.find(stop, max(0, passed - len(stop) + 1)), len(stop)) for stop in self._stops]
        if matches := [(start + length, start) for start, length in starts if start >= 0 and start + length > passed]:
            end, start = min(matches)
            self.match, self._held = text[start:end], ""
            return text[: end if self._include else start], True
        emitted = len(text) - held_length(text, self._stops)
        self._held, self._passed = text[emitted:], max(0, passed - emitted)
        return text[:emitted], False

    def end(self, token_id: int) -> str:
        """Tell which token has ended the text, after `flush`. If it is a stop string, returns what the text includes of it."""
        stop = self._tokens.get(token_id)
        if stop is None or self.match is not None:
            return ""
        self.match = stop
        return stop if self._include else ""

    def flush(self) -> str:
        """Return the text still held back; "" after a match. Call after the last piece."""
        text, self._held = self._held, ""
        return text


def stop_tokens(tokenizer: Tokenizer, stops: Sequence[str], skip_special_tokens: bool) -> dict[int, str]:
    """The stop strings that are special tokens, by their ids. As tokens they end a text that leaves special tokens out.

    Raises:
        InputError: a stop string holds a special token and other text. It would never be found.
    """
    special, tokens = tokenizer.special_tokens, dict[int, str]()
    for stop in stops:
        token_id = tokenizer.token_id(stop) if stop in special else None
        if token_id is not None:
            tokens[token_id] = stop
        elif skip_special_tokens and (inside := [token for token in special if token in stop]):
            what = f"a stop string holds the special token {shortened(max(inside, key=len))}, which is left out of the text"
            expected = "the special token alone, text without it, or skip_special_tokens=False"
            raise InputError(what, where="stop", expected=expected, found=quoted(stop))
    return tokens
