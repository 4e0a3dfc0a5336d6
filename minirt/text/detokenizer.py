"""`IncrementalDecoder`: token ids back to text, token by token, without a broken character."""

import codecs
import functools

from minirt.errors import InputError
from minirt.text.tokenizer import Tokenizer


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level token (GPT-2): printable Latin-1 is itself, others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class IncrementalDecoder:
    """Text of a growing token sequence. The pieces joined are exactly `tokenizer.decode(all ids)`.

    Byte-level tokenizers: each token's bytes go through an incremental UTF-8 decoder, so no piece ends inside a
    character. Others: a token is decoded after the one before it, which settles leading spaces; a run of byte tokens
    (<0xE4>…) is held until it ends, as one bad byte turns the whole run into U+FFFD. Amortized constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer._backend
        self._skipped = tokenizer._special_texts if skip_special_tokens else frozenset[str]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer._byte_level else None
        self._byte_fallback = tokenizer._byte_fallback
        self._window: list[int] = []  # the last token of the text sent, then the tokens held
        self._sent = 0  # how many characters of the window's text are sent

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly "". InputError for a negative id."""
        try:
            token = self._backend.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise InputError("not a token id", found=repr(token_id)) from error
        if token is None or token in self._skipped:
            return ""
        if self._utf8 is not None:
            alphabet = _byte_alphabet()
            in_alphabet = alphabet.keys() >= set(token)  # an added token need not be: then it stands for itself
            return self._utf8.decode(bytes(alphabet[c] for c in token) if in_alphabet else token.encode())
        self._window.append(token_id)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return ""
        text = self._unsent()
        if text:  # a token without text would be no context for the next
            self._window = [token_id]
            self._sent = len(self._backend.decode(self._window, skip_special_tokens=False))
        return text

    def flush(self) -> str:
        """What is still held; call once, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text, self._window, self._sent = self._unsent(), [], 0
        return text

    def _unsent(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=False)[self._sent :]
