"""`AddressedParser`: answers that are a sequence of messages, each with the name of whom it is addressed to (Muse-Glimmer).

    to=self<|message|>REASONING<|eom|><|start|>assistant to=TOOL<|message|>CALL<|eom|><|start|>assistant to=user<|message|>CONTENT

The prompt ends with `<|start|>assistant`, so an answer begins within the header of its first message.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from minirt.text.reply import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
    StatefulParser,
    ToolCallStart,
    Trimmer,
    content,
)

START, ROLE, TO, MESSAGE = "<|start|>", "assistant", "to=", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
NAME = re.compile(r"[^\s<]{0,200}")
_BREAK = "\n\n"  # between two messages of one kind
MARKERS = (START, MESSAGE, *_ENDS)
# Whose messages are reasoning, and after what a grammar begins: `ReplyFormat.reasoning` of this form.
ADDRESSED = (f"{TO}self{MESSAGE}", f"{TO}user{MESSAGE}")


def is_addressed(template: str | None) -> bool:
    """Whether a chat template writes addressed messages."""
    return template is not None and "to=self" in template and ("<|eom|>" in template or "<atem:function_calls>" in template)


def opened(prompt: str, ends: Sequence[str] = _ENDS) -> str:
    """What a prompt has of the answer's first message, after `<|start|>assistant`. `ends`: what ends a message."""
    last = prompt.rpartition(START)[2] if START in prompt else ""
    return last.removeprefix(ROLE) if last.startswith(ROLE) and not any(end in last for end in ends) else ""


def answers(prompt: str) -> bool:
    """Whether a prompt ends within a message to the user."""
    header, message, _ = opened(prompt).partition(MESSAGE)
    return bool(message) and header.strip() in ("", f"{TO}user")


class AddressedParser(StatefulParser):
    """Messages to self are reasoning, those to the user are content; those to others are searched for calls.

    Text without a header is searched for calls, too. A message to others without a call is content, with its address, and so is
    what begins like a header and is none. A header that is cut off at the end of the text is left out.

    Args:
        begun: the text of the answer that the prompt has: see `opened`.
        calls: makes a parser of calls; None: calls are not looked for.
        aside: messages to others are reasoning, as far as they are no calls, because the content has a grammar.
    """

    ends: Sequence[str] = _ENDS  # of messages
    begins: Sequence[str] = (START, TO)  # of headers: one that is cut off is left out

    def __init__(self, begun: str = "", calls: Callable[[], Parser] | None = None, aside: bool = False) -> None:
        super().__init__()
        self._make, self._others = calls, ReasoningDelta if aside else ContentDelta
        self._header: list[str] = []  # as far as it has come
        self._name, self._lead = "", ""  # of whom the message is addressed to; the address that is shown with its text
        self._state = self._between
        self._started = 0  # calls in earlier messages
        self._shown, self._earlier = set[type](), set[type]()  # kinds of text so far; those with text in earlier messages only
        self.feed(begun)

    @staticmethod
    def calls(name: str) -> bool:
        """Whether calls are looked for in messages that are addressed to `name`."""
        return name not in ("self", "user")

    @classmethod
    def is_call(cls, header: str) -> bool:
        """Whether a header, without `MESSAGE`, is that of a message to a function."""
        parser = cls()
        parser.feed(header + MESSAGE)
        return parser._lead != "" and cls.calls(parser._lead[len(TO) : -len(MESSAGE)])

    def _between(self) -> list[Event] | None:
        """In a header, before its address."""
        marker = self._next(START, ROLE, TO, MESSAGE)
        if not marker:
            return None if marker is None else self._no_header()
        self._keep(len(marker))
        if marker == MESSAGE:
            return self._open("")
        self._state = self._address if marker == TO else self._between
        return []

    def _keep(self, length: int) -> None:
        """The next text, and the white space before it, belong to a header."""
        self._header += [self._take_space(), self._text[self._at : self._at + length]]
        self._at += length

    def _address(self) -> list[Event] | None:
        self._name = NAME.match(self._text, self._at)[0]  # type: ignore[index]  # it also matches no character
        if self._at + len(self._name) == len(self._text):
            return None
        self._keep(len(self._name))
        self._state = self._after_address
        return []

    def _after_address(self) -> list[Event] | None:
        marker = self._next(MESSAGE)
        if not marker:
            return None if marker is None else self._no_header()
        self._at += len(marker)
        return self._open(self._name)

    def _no_header(self) -> list[Event]:
        """What has come is no header, so it is text."""
        text = "".join(self._header) + self._take_space()
        return [*self._open(""), *self._write(text)]

    def _open(self, name: str) -> list[Event]:
        self._header.clear()
        self._space.clear()
        self._kind = ReasoningDelta if name == "self" else ContentDelta if name in ("user", "") else self._others
        self._trimmer = Trimmer() if name == "self" else None
        self._lead = f"{TO}{name}{MESSAGE}" if name not in ("self", "user", "") else ""
        self._calls = self._make() if self._make is not None and self.calls(name) else None
        self._count, self._state = 0, self._body
        return []

    def _body(self) -> list[Event] | None:
        text, marker = self._up_to((*self.ends, START))
        events = self._write(text)
        if marker:
            self._at += len(marker) if marker != START else 0
            events += self._close()
        return events if events or marker else None

    def _write(self, text: str) -> list[Event]:
        """More text of the message."""
        if self._calls is not None:
            return self._shown_as(self._called(self._calls.feed(text)))
        text = self._trimmer.feed(text) if self._trimmer is not None else text
        return self._shown_as([self._kind(text)] if text else [])

    def _close(self) -> list[Event]:
        """The message ends."""
        events = self._shown_as(self._called(self._calls.finish()) if self._calls is not None else [])
        if self._lead:
            events += self._shown_as([self._kind("")])
        self._started, self._earlier, self._state = self._started + self._count, set(self._shown), self._between
        return events

    def _called(self, events: list[Event]) -> list[Event]:
        """Events of the parser of calls: what is no call is text of the message."""
        return [self._kind(event.text) if isinstance(event, ContentDelta) else event for event in events]

    def _shown_as(self, events: list[Event]) -> list[Event]:
        """Events of the message, as those of the whole answer: calls are numbered on, and text has its address or a break."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart | ArgumentsDelta):
                self._count += isinstance(event, ToolCallStart)
                result.append(replace(event, index=event.index + self._started))
            else:
                kind = type(event)
                before = _BREAK if kind in self._earlier else ""
                result.append(kind(before + self._lead + event.text))
                self._earlier.discard(kind)
                self._shown.add(kind)
            self._lead = ""
        return result

    def _rest(self) -> list[Event]:
        if self._state == self._body:
            text, self._at = self._text[self._at :], len(self._text)
            return [*self._write(text), *self._close()]
        text = "".join(self._header) + self._unused()
        is_between = not text.strip() and (self._shown or self._started)
        return [] if is_between or any(begin in text for begin in self.begins) else self._shown_as(content(text))
