"""`IncrementalDecoder`: converts the token ids after a prompt to text one at a time, and never emits part of a character."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from minirt.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # stands for a byte that is part of no character


class IncrementalDecoder:
    """Decodes the tokens that follow a prompt: decode(prompt) + text = decode(prompt + tokens). `incremental_decoder` makes one.

    So a space at the beginning of the text, which many tokenizers drop at the beginning of what they decode, is dropped only if
    nothing stands before it. If the prompt ends inside a character, the text begins with that character; the text of the prompt
    is then what `prompt_text` returns, without it.

    The text is that of `tokenizer.decode`, with one exception. If a run of byte tokens (<0xE4>…) is not valid UTF-8,
    `tokenizer.decode` makes each byte of the run one U+FFFD. Here its characters stay, since they were emitted before the wrong
    byte came, and only the other bytes become U+FFFD.

    The work for each token is amortized constant. That for the prompt is constant, too, in all but made-up cases: only the tokens
    before its first visible text and the bytes of its last character matter.

    A subclass has these methods:
        push: adds a token and returns the text that it completes, possibly "". Raises an InputError unless it is a token id.
        flush: returns the text still held back. Called once, after the last token.
        enter: takes the state after a prompt. Called before the first token.
    """

    push: Callable[[int], str]
    flush: Callable[[], str]
    enter: Callable[[Sequence[int]], None]

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._library = tokenizer, tokenizer._library
        # By id: the bytes of a token that is part of a character, the text of another. All decoders of the tokenizer share it.
        self._cache = tokenizer._decoded[skip_special_tokens]
        self._skipped = tokenizer.special_tokens if skip_special_tokens else frozenset[str]()

    def push_all(self, token_ids: Sequence[int]) -> str:
        """`push` for several tokens, all of them ids."""
        return "".join(map(self.push, token_ids))

    def _piece(self, token_id: int) -> str | bytes:
        """The entry of `_cache` for a token. A token that is left out, and one that does not exist, have no bytes."""
        if type(token_id) is int and (piece := self._cache.get(token_id)) is not None:
            return piece
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""  # not kept: there are 2**32 of them
        decoded = self._cache[int(token_id)] = b"" if token in self._skipped else self._tokenizer.piece(token_id)
        return decoded

    def _push_last(self, prompt: Sequence[int], enough: Callable[[list[Any]], bool], first: int = 0) -> None:
        """Push the last tokens of a prompt with text, from `first` on: as many as are `enough`, by their pieces."""
        pieces, tokens = list[str | bytes](), list[int]()
        for i in range(len(prompt) - 1, first - 1, -1):
            if _is_id(prompt[i]) and (piece := self._piece(prompt[i])) != b"":
                pieces.append(piece)
                tokens.append(prompt[i])
                if enough(pieces):
                    break
        self.push_all(tokens[::-1])


class _ByteLevelDecoder(IncrementalDecoder):
    """For byte-level tokenizers, whose tokens are bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = self._cache.get(token_id) if type(token_id) is int else None
        return self._utf8.decode(self._piece(token_id) if piece is None else piece)  # type: ignore[arg-type]

    def push_all(self, token_ids: Sequence[int]) -> str:
        pieces = list(map(self._cache.get, token_ids))
        if None in pieces:
            pieces = list(map(self._piece, token_ids))
        return self._utf8.decode(b"".join(pieces))  # type: ignore[arg-type]

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def enter(self, prompt: Sequence[int]) -> None:
        self._push_last(prompt, lambda pieces: sum(map(len, pieces)) >= 3)  # a character that is not complete has at most 3 bytes


class _PieceDecoder(IncrementalDecoder):
    """For tokenizers whose tokens have one text each, except at the beginning, and whose byte tokens join to characters.

    Args:
        keep_space: the first token's text is that of a token inside a text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, keep_space: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._start: list[int] | None = None if keep_space else []  # the tokens so far; None once they have text
        self._held = b""  # the first bytes of a character
        self._held_ids: list[int] = []  # their tokens

    def push(self, token_id: int) -> str:
        piece = self._cache.get(token_id) if type(token_id) is int else None
        if piece is None:
            piece = self._piece(token_id)
        if isinstance(piece, bytes):
            return self._push_byte(token_id, piece) if piece else ""
        if self._held:
            return self.flush() + piece
        return piece if self._start is None else self._begin([token_id], piece)

    def flush(self) -> str:
        return self._broken(b"")

    def enter(self, prompt: Sequence[int]) -> None:
        first = 0
        while self._start is not None and first < len(prompt):
            if _is_id(prompt[first]):
                self.push(prompt[first])
            first += 1
        self._push_last(prompt, lambda pieces: isinstance(pieces[-1], str) or len(pieces) == 3, first)

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        data = self._held + byte
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return self.flush() + self._push_byte(token_id, byte) if self._held else self._broken(byte)
        self._held_ids.append(token_id)
        if not used:
            self._held = data
            return ""
        ids, self._held, self._held_ids = self._held_ids, b"", []
        return text if self._start is None else self._begin(ids, text)

    def _broken(self, data: bytes) -> str:
        """The text of bytes that are no character: those that are held, and `data`."""
        text, self._held, self._held_ids = _BROKEN * len(self._held + data), b"", []
        if text:
            self._start = None
        return text

    def _begin(self, ids: list[int], inner: str) -> str:
        """Add tokens before which there is no text. `inner`: their text inside a text."""
        start = self._start or []
        text = self._library.decode(start + ids, False)
        if text:
            self._start = None
        elif inner or not start:  # other tokens do not matter to those that follow
            self._start = start + ids
        return text


class _WindowDecoder(IncrementalDecoder):
    """For tokenizers whose decoder looks at neighbouring tokens, or at whole runs of byte tokens, which are held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._window: list[int] = []  # the last token whose text was emitted, then the tokens held back
        self._sent = 0  # number of characters of the window's text already emitted

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece == b"":
            return ""
        self._window.append(token_id)
        if isinstance(piece, bytes):
            return ""
        text = self._unsent()
        if text:  # a token without text is no context for the next token
            self._window = [token_id]
            self._sent = len(self._library.decode(self._window, False))
        return text

    def flush(self) -> str:
        text, self._window, self._sent = self._unsent(), [], 0
        return text

    def enter(self, prompt: Sequence[int]) -> None:
        self._push_last(prompt, lambda pieces: bool(pieces[-1]) and isinstance(pieces[-1], str))

    def _unsent(self) -> str:
        return self._library.decode(self._window, False)[self._sent :]


def incremental_decoder(
    tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = (), keep_space: bool = False
) -> IncrementalDecoder:
    """A decoder of the tokens that follow a prompt.

    Args:
        prompt: token ids. What is no token id has no text.
        keep_space: keep the space at the beginning of the text, also if the prompt has no text.
    """
    decoder: IncrementalDecoder
    if tokenizer.is_byte_level:
        decoder = _ByteLevelDecoder(tokenizer, skip_special_tokens)
    elif tokenizer.has_neighbours:
        decoder = _WindowDecoder(tokenizer, skip_special_tokens)
    else:
        decoder = _PieceDecoder(tokenizer, skip_special_tokens, keep_space)
    decoder.enter(prompt)
    return decoder


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of a prompt, up to where the text of a completion begins: without a character that is not complete."""
    return "".join(map(incremental_decoder(tokenizer, skip_special_tokens).push, prompt))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32
