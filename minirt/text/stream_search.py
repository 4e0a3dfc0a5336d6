"""`StreamPattern`: finds literals or a regular expression in text that is still growing, in time that a pattern cannot blow up.

Python's `re` cannot say whether a match has begun at the end of the text, and it backtracks. Here all alternatives advance
together, in the order in which `re` would try them (R. Pike's virtual machine; R. Cox, "Regular Expression Matching: the Virtual
Machine Approach"), so the first match is that of `re`, with its groups.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from minirt.errors import InputError, UnsupportedError, shortened
from minirt.modeling.patterns import accepts, parsed
from minirt.text.reply import first_marker, held_length

MAX_MATCH = 1000  # characters of a match in text that is still growing
_MAX_PROGRAM = 5000
_MAX_RESCANS = 16  # how often each character may be looked at to find all matches, on average


class Match(NamedTuple):
    """A match, with the texts of its named groups."""

    start: int
    end: int
    groups: dict[str, str]


class _Node:
    """An instruction. `then`: those that follow it, in the order in which `re` would try them.

    Its `kind` is "match", "save" (a place of a group), "split" (to none, if no match goes on here), or that of a node of Python's
    syntax tree for one character.
    """

    __slots__ = ("argument", "kind", "then")

    def __init__(self, kind: Any, argument: Any = None, then: "Sequence[_Node]" = ()) -> None:
        self.kind, self.argument, self.then = kind, argument, then

    def accepts(self, character: str) -> bool:
        return self.kind is ops.ANY or accepts(self.kind, self.argument, character)


class StreamPattern:
    """Literals, of which any counts, or a regular expression in which a dot also stands for a newline."""

    def __init__(self, literals: Sequence[str] = (), pattern: str | None = None) -> None:
        """
        Raises:
            UnsupportedError: the pattern uses what is not known, or can match nothing.
        """
        self.literals, self._size = list(literals), 0
        self.names: dict[int, str] = {}  # of groups, by their numbers
        self.begins = lru_cache(_MAX_PROGRAM)(self._begins)
        if pattern is None:
            return
        tree = parsed(pattern)
        self.names = {number: name for name, number in tree.state.groupdict.items()}
        self.first = self._compile(tree, _Node("match"))
        if StreamSearch(self).next("", 0, 0, final=True)[0] is not None:
            raise UnsupportedError("the pattern can match nothing", found=pattern)

    def find_all(self, text: str) -> Iterator[Match]:
        """All matches, one after the other. Raises an InputError if the pattern looks at the same text again and again."""
        place, work = 0, 0
        search = StreamSearch(self)
        while (match := search.next(text, 0, place, final=True)[0]) is not None:
            yield match
            work += search.place - place
            place = match.end
            if work > _MAX_RESCANS * (len(text) + MAX_MATCH):
                raise InputError("the text takes too long to search", found=shortened(text, 80))

    # --- the virtual machine ---

    def _compile(self, nodes: Any, then: _Node) -> _Node:
        """The first instruction of nodes of Python's syntax tree. `then`: what comes after them."""
        for operation, argument in reversed(nodes):
            then = self._node(operation, argument, then)
        return then

    def _node(self, operation: Any, argument: Any, then: _Node) -> _Node:
        self._size += 1
        if self._size > _MAX_PROGRAM:
            raise UnsupportedError("the pattern is too large")
        if operation is ops.BRANCH:
            return _Node("split", None, [self._compile(branch, then) for branch in argument[1]])
        if operation is ops.SUBPATTERN:
            name = self.names.get(argument[0])
            if name is None:
                return self._compile(argument[3], then)
            return _Node("save", (name, 0), [self._compile(argument[3], _Node("save", (name, 1), [then]))])
        if operation in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, body = argument
            return self._repeat(least, most, body, then, -1 if operation is ops.MIN_REPEAT else 1)
        if operation is not ops.AT:
            return _Node(operation, argument, [then])
        if argument not in (ops.AT_END, ops.AT_END_STRING):
            raise UnsupportedError("the pattern has an anchor that a stream does not know")
        return _Node("split")  # a region ends at the end of the text anyway

    def _repeat(self, least: int, most: Any, body: Any, then: _Node, order: int) -> _Node:
        """`order`: 1, or -1 if fewer repetitions are preferred."""
        if int(most) > 1 and body.getwidth()[0] == 0:
            raise UnsupportedError("the pattern repeats what can be empty")
        first = _Node("split") if most is ops.MAXREPEAT else then
        if most is ops.MAXREPEAT:
            first.then = [self._compile(body, first), then][::order]
        for _ in range(0 if most is ops.MAXREPEAT else most - least):
            first = _Node("split", None, [self._compile(body, first), then][::order])
        for _ in range(least):
            first = self._compile(body, first)
        return first

    def _begins(self, character: str) -> bool:
        """Whether a match can begin with this character. Most characters of a text cannot, and need no threads."""
        threads: list[tuple[_Node, int, dict]] = []
        self.add(threads, set(), self.first, 0, {}, 0)
        return any(node.accepts(character) for node, _, _ in threads)

    def add(self, threads: list, seen: set[_Node], node: _Node, begun: int, saved: dict, place: int) -> None:
        """Add the threads that `node` leads to without a character, in order, each node once."""
        stack = [(node, saved)]
        while stack:
            node, saved = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.kind == "save":
                name, is_end = node.argument
                saved = saved | {name: (saved[name][0], place) if is_end else (place, -1)}
            if node.kind in ("save", "split"):
                stack += [(then, saved) for then in reversed(node.then)]
            else:
                threads.append((node, begun, saved))


class StreamSearch:
    """The search for one anchor in text that grows. Each character is looked at once, and after a match those that it read ahead.

    Attributes:
        place: how far the text has been looked at. Places count from the beginning of all text.
    """

    def __init__(self, anchor: StreamPattern) -> None:
        self._anchor = anchor
        self._restart(0)

    def _restart(self, place: int) -> None:
        self.place = place  # no match begins before it, but those of `_best` and `_threads`
        self._best: Match | None = None
        self._threads: list[tuple[_Node, int, dict]] = []  # (node, start of the match, saved places), best first

    def next(self, text: str, base: int, start: int, final: bool) -> tuple[Match | None, int]:
        """The first match from `start` on, and the place from which text must be kept, because a match may have begun there.

        Args:
            text: the text from place `base` on.
            start: at least that of the last call.
            final: no text follows, so nothing is kept. Else a match that more text could replace by another is not returned yet.
        """
        best = [] if self._best is None else [self._best.start]
        if min([*best, *(begun for _, begun, _ in self._threads)], default=start) < start:
            self._restart(start)
        self.place = max(self.place, start)
        return self._literal(text, base, final) if self._anchor.literals else self._pattern(text, base, final)

    def _literal(self, text: str, base: int, final: bool) -> tuple[Match | None, int]:
        literals = self._anchor.literals
        kept = len(text) - (0 if final else held_length(text, literals, self.place - base))
        place, literal = first_marker(text, literals, self.place - base)
        if not literal or place >= kept:
            self.place = base + (place if literal else kept)
            return None, base + kept
        self.place = base + place
        return Match(base + place, base + place + len(literal), {}), base + kept

    def _pattern(self, text: str, base: int, final: bool) -> tuple[Match | None, int]:
        anchor, end = self._anchor, base + len(text)
        while self._best is None or self._threads:
            place, threads = self.place, self._threads
            if self._best is None and place < end and not (threads or anchor.begins(text[place - base])):
                self.place += 1
                continue
            if self._best is None and place < end + final:
                anchor.add(threads, {node for node, _, _ in threads}, anchor.first, place, {}, place)
            following, seen = list[tuple[_Node, int, dict]](), set[_Node]()
            for node, begun, saved in threads:
                if node.kind == "match":
                    groups = {name: text[a - base : b - base] for name, (a, b) in saved.items() if b >= 0}
                    self._best = Match(begun, place, groups)
                    break
                if place == end:
                    following.append((node, begun, saved))  # waits for the next character
                elif (final or place - begun < MAX_MATCH) and node.accepts(text[place - base]):
                    anchor.add(following, seen, node.then[0], begun, saved, place + 1)
            self._threads = following
            if place == end:
                break
            self.place += 1
        if final:
            self._threads = []
        if self._threads:
            return None, min(begun for _, begun, _ in self._threads)
        return self._best, end
