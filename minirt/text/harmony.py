"""`HarmonyParser`: answers in harmony, gpt-oss's format: messages, each with a channel, and calls addressed to a function.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The prompt ends with `<|start|>assistant`, so an answer begins within the header of its first message.
"""

from collections.abc import Callable

from minirt.text.addressed import ADDRESSED, MESSAGE, NAME, ROLE, START, TO, AddressedParser, opened
from minirt.text.reply import ContentDelta, Event, Parser, ReasoningDelta, Trimmer

_CHANNEL, _CONSTRAIN, _FUNCTIONS = "<|channel|>", "<|constrain|>", "functions."
_REASONING, _FINAL = "analysis", "final"
_LONGEST = 200  # characters of a header
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, MESSAGE, _CHANNEL, _CONSTRAIN, *_ENDS)
EFFORTS = ("low", "medium", "high")  # with which models are trained; templates write any text
# Where the reasoning is, and after what a grammar begins: `ReplyFormat.reasoning` of this form.
HARMONY = (f"{_CHANNEL}{_REASONING}{MESSAGE}", f"{_CHANNEL}{_FINAL}{MESSAGE}")


def is_harmony(template: str | None) -> bool:
    """Whether a chat template writes harmony's channels."""
    return template is not None and all(text in template for text in (START, MESSAGE, f"{_CHANNEL}{_REASONING}", _FINAL))


def finishes(prompt: str) -> bool:
    """Whether a prompt ends within a message of the channel "final"."""
    header, message, _ = opened(prompt, _ENDS).partition(MESSAGE)
    return bool(message) and header.strip().removeprefix(_CHANNEL) in ("", _FINAL)


class HarmonyParser(AddressedParser):
    """The channel "analysis" is reasoning. Messages to a function are its calls, whatever their channel is. The others, preambles
    in "commentary" and the channel "final", are content.

    A message to somebody else, or to a function whose arguments are no JSON object, is text of its channel, with its address.

    Args:
        begun: as of `AddressedParser`.
        calls: makes the parser of a call's arguments from the function's name; None: calls are not looked for.
        aside: what is neither reasoning, a call nor "final" is reasoning, because the content has a grammar.
    """

    ends = _ENDS
    begins = (START, TO, _CHANNEL)

    def __init__(self, begun: str = "", calls: Callable[[str], Parser] | None = None, aside: bool = False) -> None:
        self._of_function, self._part, self._has = calls, "", dict[str, str]()  # the address and the channel, by their markers
        super().__init__(begun, aside=aside)

    @staticmethod
    def calls(name: str) -> bool:
        """See `AddressedParser.calls`."""
        return name.startswith(_FUNCTIONS) and name != _FUNCTIONS

    def _between(self) -> list[Event] | None:
        """In a header, before one of its words."""
        marker = self._next(START, ROLE, TO, _CHANNEL, _CONSTRAIN, MESSAGE)
        if marker is None or (not marker and not self._has):
            return None if marker is None else self._no_header()
        if marker == MESSAGE:
            self._at += len(marker)
            return self._open(self._has.get(TO, ""))
        self._part = marker
        self._keep(len(marker))
        self._state = self._between if marker in (START, ROLE) else self._word
        return []

    def _word(self) -> list[Event] | None:
        """A word of a header: an address or a channel, after its marker, or another one, such as "json"."""
        word = NAME.match(self._text, self._at)[0]  # type: ignore[index]  # it also matches no character
        if self._at + len(word) == len(self._text):
            return None
        self._keep(len(word))
        if not (word or self._part) or sum(map(len, self._header)) > _LONGEST:
            return self._no_header()
        self._has.setdefault(self._part, word)
        self._state = self._between
        return []

    def _open(self, name: str) -> list[Event]:
        channel = self._has.get(_CHANNEL, "")
        self._has.clear()
        super()._open(name)
        self._kind = ContentDelta if channel == _FINAL or not (channel or name) else self._others
        self._trimmer = None
        if channel == _REASONING:
            self._kind, self._trimmer = ReasoningDelta, Trimmer()
        if self._of_function is not None and self.calls(name):
            self._calls = self._of_function(name.removeprefix(_FUNCTIONS))
        return []


# What ends the reasoning → the form in which a call may come before that.
CALLING: dict[str, type[AddressedParser]] = {ADDRESSED[1]: AddressedParser, HARMONY[1]: HarmonyParser}
