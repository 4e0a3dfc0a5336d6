"""`Anchor`: finds literals or a regular expression in text that is still growing, in time that a pattern cannot blow up.

Python's `re` cannot say whether a match has begun at the end of the text, and it backtracks. Here all alternatives advance
together, in the order in which `re` would try them (R. Pike's virtual machine; R. Cox, "Regular Expression Matching: the Virtual
Machine Approach"), so the first match is that of `re`, with its groups.
"""

from collections.abc import Iterator, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from minirt.errors import UnsupportedError
from minirt.modeling.patterns import accepts, parsed

_MAX_PROGRAM = 5000


class Found(NamedTuple):
    """A match, with the texts of its named groups."""

    start: int
    end: int
    groups: dict[str, str]


class Anchor:
    """Literals, of which any counts, or a regular expression in which a dot also stands for a newline."""

    def __init__(self, literals: Sequence[str] = (), pattern: str | None = None) -> None:
        """
        Raises:
            UnsupportedError: the pattern uses what is not known, or can match nothing.
        """
        self._literals = sorted(literals, key=len, reverse=True)  # of two at one place, the longer one
        self._program: list[tuple] = []
        self._first: dict[str, bool] = {}  # character → whether a match can begin with it
        if pattern is None:
            return
        tree = parsed(pattern)
        self._names = {number: name for name, number in tree.state.groupdict.items()}
        self._compile(tree)
        self._program.append(("match",))
        if self._run("", 0, final=True)[0] is not None:
            raise UnsupportedError("the pattern can match nothing", found=pattern)

    @property
    def names(self) -> set[str]:
        """The named groups."""
        return set(self._names.values()) if self._program else set()

    def search(self, text: str, start: int, final: bool) -> tuple[Found | None, int]:
        """The first match from `start` on, and the place from which text must be kept, because a match may have begun there.

        Args:
            final: no text follows, so nothing is kept. Else a match that more text could replace by another is not returned yet.
        """
        return self._find_literal(text, start, final) if self._literals else self._run(text, start, final)

    def find_all(self, text: str) -> Iterator[Found]:
        """All matches, one after the other."""
        place = 0
        while (found := self.search(text, place, final=True)[0]) is not None:
            yield found
            place = found.end

    def _find_literal(self, text: str, start: int, final: bool) -> tuple[Found | None, int]:
        places = [(place, i) for i, literal in enumerate(self._literals) if (place := text.find(literal, start)) >= 0]
        kept = len(text)
        if not final:
            for length in range(min(len(self._literals[0]) - 1, len(text) - start), 0, -1):
                tail = text[-length:]
                if any(literal.startswith(tail) and literal != tail for literal in self._literals):
                    kept = len(text) - length
                    break
        if not places or min(places)[0] >= kept:
            return None, kept
        place, i = min(places)
        return Found(place, place + len(self._literals[i]), {}), kept

    # --- the virtual machine ---

    def _compile(self, nodes: Any) -> None:
        program = self._program
        for operation, argument in nodes:
            if len(program) > _MAX_PROGRAM:
                raise UnsupportedError("the pattern is too large")
            if operation is ops.SUBPATTERN:
                name = self._names.get(argument[0])
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
        ends = []
        for i, branch in enumerate(branches):
            split = len(self._program)
            last = i == len(branches) - 1
            self._program += [] if last else [("split", 0, 0)]
            self._compile(branch)
            if not last:
                ends.append(len(self._program))
                self._program.append(("jump", 0))
                self._program[split] = ("split", split + 1, len(self._program))
        for end in ends:
            self._program[end] = ("jump", len(self._program))

    def _repeat(self, least: int, most: Any, body: Any, lazy: bool) -> None:
        program = self._program
        if int(most) > 1 and body.getwidth()[0] == 0:
            raise UnsupportedError("the pattern repeats what can be empty")
        for _ in range(int(least)):
            self._compile(body)
            self._check_size()
        splits = []
        if most is ops.MAXREPEAT:
            splits.append(len(program))
            program.append(("split", 0, 0))
            self._compile(body)
            program.append(("jump", splits[0]))
        else:
            for _ in range(int(most) - int(least)):
                splits.append(len(program))
                program.append(("split", 0, 0))
                self._compile(body)
                self._check_size()
        for split in splits:
            ways = (split + 1, len(program))
            program[split] = ("split", *(reversed(ways) if lazy else ways))

    def _check_size(self) -> None:
        if len(self._program) > _MAX_PROGRAM:
            raise UnsupportedError("the pattern is too large")

    def _run(self, text: str, start: int, final: bool) -> tuple[Found | None, int]:
        best: Found | None = None
        threads: list[tuple[int, int, dict]] = []  # (instruction, start of the match, saved places), best first
        for place in range(start, len(text) + 1):
            if best is None and place < len(text) and not (threads or self._begins(text[place])):
                continue
            if best is None and place < len(text) + final:
                self._add(threads, {thread[0] for thread in threads}, 0, place, {}, place)
            if not threads:
                if best is not None:
                    break
                continue
            following: list[tuple[int, int, dict]] = []
            seen: set[int] = set()
            for instruction, begun, saved in threads:
                kind = self._program[instruction]
                if kind[0] == "match":
                    best = Found(begun, place, {name: text[a:b] for name, (a, b) in saved.items() if b >= 0})
                    break
                if place == len(text):
                    following.append((instruction, begun, saved))  # waits for the next character
                elif kind[0] == "any" or accepts(kind[1], kind[2], text[place]):
                    self._add(following, seen, instruction + 1, begun, saved, place + 1)
            threads = following
        if final or not threads:
            return best, len(text)
        return None, min(begun for _, begun, _ in threads)

    def _begins(self, character: str) -> bool:
        """Whether a match can begin with this character. Most characters of a text cannot, and need no threads."""
        if character not in self._first:
            threads: list[tuple[int, int, dict]] = []
            self._add(threads, set(), 0, 0, {}, 0)
            kinds = [self._program[instruction] for instruction, _, _ in threads]
            begins = any(kind[0] != "one" or accepts(kind[1], kind[2], character) for kind in kinds)
            if len(self._first) >= _MAX_PROGRAM:
                self._first.clear()
            self._first[character] = begins
        return self._first[character]

    def _add(self, threads: list, seen: set[int], instruction: int, begun: int, saved: dict, place: int) -> None:
        """Add the threads that `instruction` leads to without a character, in order, each instruction once."""
        stack = [(instruction, saved)]
        while stack:
            instruction, saved = stack.pop()
            if instruction in seen:
                continue
            seen.add(instruction)
            kind = self._program[instruction]
            if kind[0] == "jump":
                stack.append((kind[1], saved))
            elif kind[0] == "split":
                stack += [(kind[2], saved), (kind[1], saved)]
            elif kind[0] == "save":
                begin = place if kind[2] == 0 else saved[kind[1]][0]
                stack.append((instruction + 1, saved | {kind[1]: (begin, -1 if kind[2] == 0 else place)}))
            elif kind[0] != "never":
                threads.append((instruction, begun, saved))
