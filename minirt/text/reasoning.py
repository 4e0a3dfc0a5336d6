"""`ReasoningParser`: splits a block of reasoning, such as `<think>…</think>`, off the beginning of streamed text."""

from collections.abc import Sequence

from minirt.text.reply import ContentDelta, Event, ReasoningDelta, first_marker, held_length, space_end

OPEN, CLOSE = "<think>", "</think>"
# The markers of a block, as chat templates write them. The second ones are Mistral's.
BLOCKS = ((OPEN, CLOSE), ("[THINK]", "[/THINK]"))


def detect_block(template: str | None) -> tuple[str, str] | None:
    """The markers of reasoning in a chat template; None: it has none that are known."""
    return next((block for block in BLOCKS if template is not None and all(marker in template for marker in block)), None)


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
        ends: beginnings of content that also end a block, for models that leave out its closing marker.
    """

    def __init__(
        self, inside: bool = False, opening: str = OPEN, closing: str = CLOSE, ends: Sequence[str] = ()
    ) -> None:
        self._opening, self._closing, self._ends = opening, closing, (closing, *ends)
        self._inside = inside
        self._begun = False  # whether it is decided that there is an opening marker, or none
        self._after = False  # after the block, or there is none
        self._text = ""  # what could be the beginning of a marker
        self._space: list[str] = []  # white space before that, which counts only if text follows
        self._empty = True  # nothing of the current part is sent yet, so white space is left out

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        text, self._text = self._text + text, ""
        events: list[Event] = []
        if not self._begun:
            text = self._begin(text)
        if self._begun and not self._after:
            found, text = self._reasoning(text)
            events += found
        if self._after and text:
            events += self._content(text)
        return events

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        text, self._text = self._text, ""
        if self._begun and self._after:
            return []
        if not self._begun and not self._inside:
            text = "".join(self._space) + text
            return [ContentDelta(text)] if text else []
        return self._sent(text)

    def _begin(self, text: str) -> str:
        """Look for the opening marker. Returns the text after it, once it is decided."""
        start = space_end(text)
        self._space.append(text[:start])
        text = text[start:]
        if text.startswith(self._opening):
            self._begun = True
            self._space.clear()
            return text[len(self._opening) :]
        if self._opening.startswith(text):
            self._text = text
            return ""
        self._begun, self._after = True, not self._inside
        self._empty = self._inside  # without a block, white space is part of the content
        if self._after:
            text = "".join(self._space) + text
            self._space.clear()
        return text

    def _reasoning(self, text: str) -> tuple[list[Event], str]:
        """Returns events, and the text after the block."""
        place, marker = first_marker(text, self._ends)
        if not marker:
            end = len(text) - held_length(text, self._ends)
            self._text = text[end:]
            return self._sent(text[:end]), ""
        events = self._sent(text[:place])
        self._after, self._empty = True, True
        self._space.clear()
        return events, text[place + len(marker) if marker == self._closing else place :]

    def _sent(self, text: str) -> list[Event]:
        """More text of the reasoning, without white space at its end, which may be that of the block."""
        shown = text.rstrip()
        events: list[Event] = []
        if shown:
            sent = shown.lstrip() if self._empty else "".join(self._space) + shown
            self._space.clear()
            self._empty = False
            events.append(ReasoningDelta(sent))
        self._space.append(text[len(shown) :])
        return events

    def _content(self, text: str) -> list[Event]:
        text = text.lstrip() if self._empty else text
        self._empty = self._empty and not text
        return [ContentDelta(text)] if text else []
