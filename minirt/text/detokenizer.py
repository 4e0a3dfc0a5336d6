"""`IncrementalDecoder`: converts token ids to text one token at a time, and never emits part of a character."""

import codecs

from minirt.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes a growing token sequence piece by piece. The pieces join to exactly `tokenizer.decode(all ids)`.

    Byte-level tokenizers: the bytes of each token go through an incremental UTF-8 decoder, so no piece ends inside a
    character. Other tokenizers: each token is decoded together with the previous one, which determines leading spaces.
    A run of byte tokens (<0xE4>…) is held back until it ends, because one bad byte turns the whole run into U+FFFD.
    The work per token is amortized constant.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer._backend
        self._cache = tokenizer._decoded[bool(skip_special_tokens)]  # bytes by id, shared by all decoders of the tokenizer
        self._skipped = tokenizer._special_texts if skip_special_tokens else frozenset[str]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer._byte_level else None
        self._byte_fallback = tokenizer._byte_fallback
        self._window: list[int] = []  # the last token whose text was emitted, then the tokens held back
        self._sent = 0  # number of characters of the window's text already emitted

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, possibly "".

        Raises:
            InputError: `token_id` is not an integer from 0 to 2**32 - 1.
        """
        if self._utf8 is not None and type(token_id) is int:
            data = self._cache.get(token_id)
            if data is None:
                token = self._backend.id_to_token(token_id)
                skipped = token is None or token in self._skipped
                data = self._cache[token_id] = b"" if skipped else self._tokenizer.token_bytes(token_id)
            return self._utf8.decode(data)
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            return ""
        if self._utf8 is not None:  # an id of another type
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return ""
        text = self._unsent()
        if text:  # a token without text is no context for the next token
            self._window = [token_id]
            self._sent = len(self._backend.decode(self._window, False))
        return text

    def flush(self) -> str:
        """Return the text still held back. Call once, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text, self._window, self._sent = self._unsent(), [], 0
        return text

    def _unsent(self) -> str:
        return self._backend.decode(self._window, False)[self._sent :]
