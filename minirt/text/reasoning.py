"""`ReasoningParser`: splits `<think>…</think>` off the beginning of streamed text."""

from minirt.text.reply import ContentDelta, Event, ReasoningDelta, held_length

OPEN, CLOSE = "<think>", "</think>"


def opens_reasoning(prompt: str, continued: str = "", opening: str = OPEN, closing: str = CLOSE) -> bool:
    """Whether a rendered prompt ends inside a reasoning block.

    Its chat template has opened the block for the model, or the final message has, if the model continues it. Markers elsewhere,
    such as those in a question about them, do not count.

    Args:
        continued: the final message, if the model continues it.
    """
    if continued.rfind(opening) > continued.rfind(closing):
        return True
    return prompt.rfind(opening) > prompt.rfind(closing) and prompt.rstrip().endswith(opening)


class ReasoningParser:
    """Splits streamed text into the reasoning at its beginning and the content after it.

    A block counts only at the beginning, after white space: later markers are content. White space around the reasoning, and
    between it and the content, is left out. A block that does not end is reasoning up to the end.

    Args:
        inside: the prompt has opened the block already (see `opens_reasoning`). An opening marker at the beginning is left out.
        opening, closing: the markers.
    """

    def __init__(self, inside: bool = False, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._opening, self._closing = opening, closing
        self._inside = inside
        self._begun = False  # whether it is decided that there is an opening marker, or none
        self._after = False  # after the block, or there is none
        self._text = ""  # not used yet
        self._empty = True  # nothing of the current part is sent yet, so white space is left out

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        self._text += text
        if not self._begun and not self._begin():
            return []
        events: list[Event] = []
        if not self._after:
            events += self._reasoning()
        if self._after and self._text:
            events += self._content()
        return events

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        text, self._text = self._text, ""
        if self._begun and self._after:
            return []
        if not self._begun and not self._inside:
            return [ContentDelta(text)] if text else []
        text = text.rstrip()
        text = text.lstrip() if self._empty else text
        return [ReasoningDelta(text)] if text else []

    def _begin(self) -> bool:
        """Look for the opening marker. Returns whether it is decided."""
        text = self._text.lstrip()
        if text.startswith(self._opening):
            self._text = text[len(self._opening) :]
            self._begun = True
        elif not self._opening.startswith(text):
            self._begun, self._after = True, not self._inside
            self._empty = self._inside  # without a block, white space is part of the content
        return self._begun

    def _reasoning(self) -> list[Event]:
        place = self._text.find(self._closing)
        if place >= 0:
            found, self._text = self._text[:place].rstrip(), self._text[place + len(self._closing) :]
            self._after = True
        else:
            found = self._text[: len(self._text) - held_length(self._text, [self._closing])].rstrip()
            self._text = self._text[len(found) :]
        sent = found.lstrip() if self._empty else found
        self._empty = self._after or (self._empty and not sent)
        return [ReasoningDelta(sent)] if sent else []

    def _content(self) -> list[Event]:
        text = self._text.lstrip() if self._empty else self._text
        self._text = ""
        self._empty = self._empty and not text
        return [ContentDelta(text)] if text else []
