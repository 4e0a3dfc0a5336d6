"""`ReasoningParser`: splits a block of reasoning, such as `<think>…</think>`, off the beginning of streamed text."""

from collections.abc import Sequence

from minirt.text.channels import CHANNEL
from minirt.text.reply import Event, ReasoningDelta, StatefulParser, Trimmer, content

OPEN, CLOSE = "<think>", "</think>"
# The markers of a block, as chat templates write them. The second ones are Mistral's, the third ones Gemma 4's.
BLOCKS = ((OPEN, CLOSE), ("[THINK]", "[/THINK]"), CHANNEL)


class ReasoningParser(StatefulParser):
    """Splits streamed text into the reasoning at its beginning and the content after it.

    A block counts only at the beginning, after white space: later markers are content. White space around the reasoning, and
    between it and the content, is left out. A block that does not end is reasoning up to the end.

    Args:
        inside: the prompt has opened the block already. An opening marker at the beginning is left out.
        opening, closing: the markers.
        ends: beginnings of content that also end a block, for models that leave out its closing marker.
    """

    def __init__(self, inside: bool = False, opening: str = OPEN, closing: str = CLOSE, ends: Sequence[str] = ()) -> None:
        super().__init__()
        self._inside, self._opening, self._closing, self._ends = inside, opening, closing, (closing, *ends)
        self._trimmer = Trimmer()
        self._state = self._beginning

    def _beginning(self) -> list[Event] | None:
        marker = self._next(self._opening)
        if marker is None:
            return None
        space, self._at = self._take_space(), self._at + len(marker)
        is_block = self._inside or bool(marker)
        self._state = self._reasoning if is_block else self._passing
        return [] if is_block else content(space)  # without a block, white space is part of the content

    def _reasoning(self) -> list[Event] | None:
        text, marker = self._up_to(self._ends)
        text = self._trimmer.feed(text)
        self._at += len(marker) if marker == self._closing else 0
        self._state = self._after if marker else self._state
        return [ReasoningDelta(text)] if text else [] if marker else None

    def _after(self) -> list[Event] | None:
        self._skip_space()
        self._space.clear()
        if self._at == len(self._text):
            return None
        self._state = self._passing
        return []

    def _passing(self) -> list[Event] | None:
        text, self._at = self._text[self._at :], len(self._text)
        return content(text) or None

    def _rest(self) -> list[Event]:
        if self._state == self._beginning and not self._inside:
            return content(self._unused())
        text = "" if self._state in (self._after, self._passing) else self._trimmer.feed(self._text[self._at :])
        return [ReasoningDelta(text)] if text else []
