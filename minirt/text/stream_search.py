"""`StreamPattern`: finds literals or a regular expression in text that is still growing, in time that a pattern cannot blow up.

Python's `re` cannot say whether a match has begun at the end of the text, and it backtracks. Here all alternatives advance
together, in the order in which `re` would try them (R. Pike's virtual machine; R. Cox, "Regular Expression Matching: the Virtual
Machine Approach"), so the first match is that of `re`, with its groups.
"""

from collections.abc import Iterator, Sequence
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


class StreamPattern:
    """Literals, of which any counts, or a regular expression in which a dot also stands for a newline.

    Attributes:
        names: the named groups, by their numbers.
    """

    def __init__(self, literals: Sequence[str] = (), pattern: str | None = None) -> None:
        """
        Raises:
            UnsupportedError: the pattern uses what is not known, or can match nothing.
        """
        self.literals = list(literals)
        self.program: list[tuple] = []
        self.names: dict[int, str] = {}
        self._first: dict[str, bool] = {}  # character → whether a match can begin with it
        if pattern is None:
            return
        tree = parsed(pattern)
        self.names = {number: name for name, number in tree.state.groupdict.items()}
        self._compile(tree)
        self.program.append(("match",))
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

    def _compile(self, nodes: Any) -> None:
        program = self.program
        for operation, argument in nodes:
            if len(program) > _MAX_PROGRAM:
                raise UnsupportedError("the pattern is too large")
            if operation is ops.SUBPATTERN:
                name = self.names.get(argument[0])
                program += [("save", name, 0)] if name else []
                self._compile(argument[3])
                program += [("save", name, 1)] if name else []
            elif operation is ops.BRANCH:
                self._branch(argument[1])
            elif operation in (ops.MAX_REPEAT, ops.MIN_REPEAT):
                self._repeat(argument[0], argument[1], argument[2], operation is ops.MIN_REPEAT)
            elif operation is ops.AT:
                if argument not in (ops.AT_END, ops.AT_END_STRING):
                    raise UnsupportedError("the pattern has an anchor that a stream does not know")
                program.append(("never",))  # a region ends at the end of the text anyway
            else:
                program.append(("any",) if operation is ops.ANY else ("one", operation, argument))

    def _branch(self, branches: Sequence[Any]) -> None:
        program, jumps = self.program, []
        for branch in branches[:-1]:
            split = len(program)
            program.append(("split", 0, 0))
            self._compile(branch)
            jumps.append(len(program))
            program.append(("jump", 0))
            program[split] = ("split", split + 1, len(program))
        self._compile(branches[-1])
        for jump in jumps:
            program[jump] = ("jump", len(program))

    def _repeat(self, least: int, most: Any, body: Any, lazy: bool) -> None:
        program = self.program
        if int(most) > 1 and body.getwidth()[0] == 0:
            raise UnsupportedError("the pattern repeats what can be empty")
        for _ in range(int(least)):
            self._compile(body)
        splits = []
        for _ in range(1 if most is ops.MAXREPEAT else int(most) - int(least)):
            splits.append(len(program))
            program.append(("split", 0, 0))
            self._compile(body)
        if most is ops.MAXREPEAT:
            program.append(("jump", splits[0]))
        for split in splits:
            ways = (split + 1, len(program))
            program[split] = ("split", *(reversed(ways) if lazy else ways))

    def begins(self, character: str) -> bool:
        """Whether a match can begin with this character. Most characters of a text cannot, and need no threads."""
        if character not in self._first:
            threads: list[tuple[int, int, dict]] = []
            self.add(threads, set(), 0, 0, {}, 0)
            kinds = [self.program[instruction] for instruction, _, _ in threads]
            begins = any(kind[0] != "one" or accepts(kind[1], kind[2], character) for kind in kinds)
            if len(self._first) >= _MAX_PROGRAM:
                self._first.clear()
            self._first[character] = begins
        return self._first[character]

    def add(self, threads: list, seen: set[int], instruction: int, begun: int, saved: dict, place: int) -> None:
        """Add the threads that `instruction` leads to without a character, in order, each instruction once."""
        stack = [(instruction, saved)]
        while stack:
            instruction, saved = stack.pop()
            if instruction in seen:
                continue
            seen.add(instruction)
            kind = self.program[instruction]
            if kind[0] == "jump":
                stack.append((kind[1], saved))
            elif kind[0] == "split":
                stack += [(kind[2], saved), (kind[1], saved)]
            elif kind[0] == "save":
                begin = place if kind[2] == 0 else saved[kind[1]][0]
                stack.append((instruction + 1, saved | {kind[1]: (begin, -1 if kind[2] == 0 else place)}))
            elif kind[0] != "never":
                threads.append((instruction, begun, saved))


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
        self._threads: list[tuple[int, int, dict]] = []  # (instruction, start of the match, saved places), best first

    def next(self, text: str, base: int, start: int, final: bool) -> tuple[Match | None, int]:
        """The first match from `start` on, and the place from which text must be kept, because a match may have begun there.

        Args:
            text: the text from place `base` on.
            start: at least that of the last call.
            final: no text follows, so nothing is kept. Else a match that more text could replace by another is not returned yet.
        """
        begun = [self._best.start] if self._best is not None else []
        if min([*begun, *(thread[1] for thread in self._threads)], default=start) < start:
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
                anchor.add(threads, {thread[0] for thread in threads}, 0, place, {}, place)
            following: list[tuple[int, int, dict]] = []
            seen: set[int] = set()
            for instruction, begun, saved in threads:
                kind = anchor.program[instruction]
                if kind[0] == "match":
                    groups = {name: text[a - base : b - base] for name, (a, b) in saved.items() if b >= 0}
                    self._best = Match(begun, place, groups)
                    break
                if place == end:
                    following.append((instruction, begun, saved))  # waits for the next character
                elif (final or place - begun < MAX_MATCH) and (kind[0] == "any" or accepts(kind[1], kind[2], text[place - base])):
                    anchor.add(following, seen, instruction + 1, begun, saved, place + 1)
            self._threads = following
            if place == end:
                break
            self.place += 1
        if final:
            self._threads = []
        if self._threads:
            return None, min(begun for _, begun, _ in self._threads)
        return self._best, end
