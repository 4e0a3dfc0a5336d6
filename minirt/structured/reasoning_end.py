"""`ReasoningEnd`: the text that ends a reasoning block, after which the grammar begins; `Messages`: those before it."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.text.addressed import MESSAGE, START
from minirt.text.harmony import CALLING

_MESSAGE = MESSAGE.encode()
_LONGEST = 1000  # bytes of a header
_MARKS = {end: re.compile("|".join(map(re.escape, (MESSAGE, START, *form.ends))).encode()) for end, form in CALLING.items()}


def bits(tokens: Iterable[int], words: int) -> Tensor:
    """[words] int32: a row of a mask in which these tokens are allowed."""
    row = bytearray(4 * words)
    for token in tokens:
        row[token >> 3] |= 1 << (token & 7)
    return torch.frombuffer(row, dtype=torch.int32)


class ReasoningEnd:
    """A text, and the tokens that go beyond it. They are not allowed, so the grammar's text begins with a token.

    Args:
        text: not empty. If it ends with `<|message|>`, which ends the header of a message (gpt-oss), the header may have a few
            words more, such as `<|constrain|>json`.
        tokens: the texts of all tokens with their ids, sorted.
        words: int32 words of a mask.

    Attributes:
        within: [words] int32: allows the tokens that do not hold `text` and more after it.
    """

    def __init__(self, text: str, tokens: Sequence[tuple[bytes, int]], words: int) -> None:
        end = text.encode()
        self._ends, self._most = re.compile(re.escape(end)), len(end)  # what ends the block, and its longest form
        if (header := end.removesuffix(_MESSAGE)) not in (b"", end):
            self._ends = re.compile(re.escape(header) + rb"[^<]{0,32}(?:<\|constrain\|>[^<]{0,32})?" + re.escape(_MESSAGE))
            self._most, end = len(end) + 77, _MESSAGE
        self._last = end
        containing = ((data, token) for data, token in tokens if end in data)
        self.within = ~bits((token for data, token in containing if data.index(end) + len(end) < len(data)), words)
        # For each number of its bytes that a text ends with: the tokens that begin with the others and are longer.
        self._after: dict[int, Tensor] = {}
        for count in range(1, len(end)):
            rest = end[count:]
            first = bisect_right(tokens, rest, key=lambda entry: entry[0])
            last = bisect_left(tokens, rest[:-1] + bytes([rest[-1] + 1]), key=lambda entry: entry[0])
            if first < last:
                self._after[count] = ~bits((token for _, token in tokens[first:last]), words)

    def ends(self, text: bytes) -> bool:
        """Whether the block has ended in this text."""
        return self._ends.search(text) is not None

    def tail(self, text: bytes) -> bytes:
        """The end of a text that has not ended the block. It may hold the beginning of what ends it."""
        return text[max(0, len(text) - self._most + 1) :]

    def restrict(self, mask: Tensor, tail: bytes) -> None:
        """Remove the tokens that complete a beginning of `text` in `tail` and go beyond it from a row of a mask."""
        if tail:
            for count, others in self._after.items():
                if tail.endswith(self._last[:count]):
                    mask &= others


class Messages(NamedTuple):
    """The messages of an answer, as far as it has come, before its grammar begins.

    Attributes:
        reasoning_end: a key of `CALLING`.
        called: whether one of them is addressed to a function.
        in_body: whether a message's text is read, in which no header begins.
        rest: the header that is read, or the end of that text, which may begin a marker.
    """

    reasoning_end: str
    called: bool = False
    in_body: bool = False
    rest: bytes = b""

    def after(self, text: bytes) -> "Messages":
        """What they are after more text."""
        text, called, in_body, end = self.rest + text, self.called, self.in_body, 0
        for mark in _MARKS[self.reasoning_end].finditer(text):
            header, end, opens = text[end : mark.start()].decode(errors="replace"), mark.end(), mark[0] == _MESSAGE
            called = called or (opens and not in_body and CALLING[self.reasoning_end].is_call(header))
            in_body = opens
        rest = text[end:]
        in_body = in_body or len(rest) > _LONGEST
        return Messages(self.reasoning_end, called, in_body, rest[-len(_MESSAGE) :] if in_body else rest)
