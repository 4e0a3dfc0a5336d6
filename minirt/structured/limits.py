"""How large a schema, grammar or regular expression may be, and the checks of what llguidance does not bound itself.

llguidance recurses from rule to rule and from "$ref" to "$ref" with a few kB of stack for each, and an overflow of the stack ends
the process. It multiplies the character classes of patterns that must match together, which no limit of its own stops. Both are
bounded here, before it is called. Grammars are compiled in threads with `COMPILE_STACK`, twice what `MAX_LEVELS` needs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from minirt.errors import InputError, shortened
from minirt.guarded import Limits

SMALL = 1500  # characters of a grammar; larger ones are tried in a separate process first, within `MAX_TRIAL`
MAX_TRIAL = Limits(cpu_seconds=0.5, seconds=30, memory=4 << 30)
COMPILE_STACK = 64 << 20  # bytes; of address space until they are used
# Bounds what one path may have: rules, terminals and brackets of a grammar; the levels of all schemas that a "$ref" leads to.
MAX_LEVELS = 4096
MAX_NESTING = 100  # brackets within brackets in the JSON of a schema; serde reads 128, of which the form around it takes some
MAX_PATTERN_PROPERTIES = 32  # of one schema: llguidance compares each with each
MAX_COMBINATIONS = 50_000  # of the character classes of patterns that one text must match: some 20 µs each
MAX_NEGATIONS = 8  # "~" of one grammar: towers of them and of repetitions take exponential time
MAX_ROW = 2000  # items of the parser at one place of the text
MAX_SCHEMAS = 50_000  # that llguidance makes of one schema
MAX_ITEMS = 50_000  # of the parser for one mask
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, for each sequence
MAX_FUEL = 500_000  # expressions that llguidance makes for the lexer of a grammar
_FORMAT = 8  # character classes of a "format", at most

_STRING = re.compile(r'"(?:\\.|[^"\\])*+"?', re.DOTALL)
_NEGATION = re.compile(r"~(?!\s*[0-9])")  # with a number, it is a repetition
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*+\]|\\[pP](?:\{[^}]*\}|.)|\\[dDwWsS]|\.", re.DOTALL)

# What llguidance says where it reaches a limit, and the limit. The grammar is too complex then.
_REACHED = (
    ("schema too large", f"at most {MAX_SCHEMAS:,} schemas, with those that allOf, anyOf and oneOf combine"),
    ("stack level exceeded", "at most 128 levels of schemas that are combined"),
    ("too many items", f"at most {MAX_ITEMS:,} items of the parser for one token"),
    ("too many states", f"at most {MAX_LEXER_STATES:,} states of the lexer"),
    ("number of symbols", "at most 500,000 symbols"),
    ("unable to determine if regex is empty", "patterns whose combination is not so complex"),
    *(
        (words, f"at most {MAX_FUEL:,} expressions of the lexer, or 200,000 for one token")
        for words in ("too big (limit", "fuel", "too many expressions", "toocomplex", "precomputation failed")
    ),
)
_ROW = re.compile(r"Current row has (\d+) items")


def reached(message: str, where: str) -> InputError | None:
    """The error for a message of llguidance about one of its limits; None: it is about something else."""
    if row := _ROW.search(message):
        what, hint = "too many alternatives at one place", "an optional property is some four: require some, or nest them"
        return InputError(what, where=where, expected=f"at most {MAX_ROW:,}", found=f"{int(row[1]):,} or more", hint=hint)
    for words, expected in _REACHED:
        if words in message.lower():
            what = "the grammar is too complex"
            return InputError(what, where=where, expected=expected, found=shortened(message), hint="simplify it")
    return None


def check_nesting(text: str, where: str) -> None:
    """Check a JSON text before it is parsed. The nesting of a text that is no JSON means nothing."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        what, expected = "the schema is nested too deeply", f"at most {MAX_NESTING} brackets"
        raise InputError(what, where=where, expected=expected, found=deepest)


def check_levels(count: int, of: str, where: str) -> None:
    """`count`: an upper bound of how deeply llguidance recurses."""
    if count > MAX_LEVELS:
        raise InputError(f"too many {of} together", where=where, expected=f"at most {MAX_LEVELS:,}", found=f"{count:,}")


def check_lark(between: Sequence[str], regexes: Iterable[str], where: str) -> None:
    """Check a Lark grammar. `between`: its text without literals, comments and JSON."""
    count = sum(part.count(sign) for part in between for sign in ":([{")
    check_levels(count, "rules, terminals and opening brackets", where)
    negations = sum(len(_NEGATION.findall(part)) for part in between)
    if negations > MAX_NEGATIONS:
        raise InputError('too many "~"', where=where, expected=f"at most {MAX_NEGATIONS}", found=negations)
    joins = sum(part.count("&") for part in between)
    classes = {own for regex in regexes for own in _CLASS.findall(regex)}
    ranges = sum(part.count("..") + part.count("%import") for part in between)
    _check_combinations((1 + len(classes) + ranges) ** (1 + min(joins, 64)) if joins else 0, '"&"', where)


def _check_combinations(count: int, of: str, where: str) -> None:
    if count > MAX_COMBINATIONS:
        what = f"patterns that must match together, by {of}, have too many combinations of character classes"
        raise InputError(what, where=where, expected=f"at most {MAX_COMBINATIONS:,}", hint="write one pattern")


def check_patterns(schemas: Sequence[tuple[Mapping[str, Any], str]], target: Callable[[str], Any]) -> None:
    """Check the patterns of a document's schemas, each with its place, which have been checked otherwise.

    An upper bound of the combinations in a value: the product over all schemas that the value must fit. What is within objects
    and arrays counts once, by its greatest part.
    """
    places = {id(own): place for own, place in schemas}
    known = dict[int, int]()
    todo = [own for own, _ in reversed(schemas)]
    while todo:
        own = todo[-1]
        if id(own) in known and known[id(own)]:
            todo.pop()
            continue
        joined = [*own.get("allOf", ()), *([target(own["$ref"])] if "$ref" in own else [])]
        choices = [own[keyword] for keyword in ("anyOf", "oneOf") if own.get(keyword)]
        inner = [part for group in _inner(own) for part in group]
        parts = [part for part in (*joined, *(part for group in choices for part in group), *inner) if isinstance(part, dict)]
        if id(own) not in known:
            known[id(own)] = 0  # begun: what refers to itself counts once
            todo += [part for part in parts if id(part) not in known]
            continue

        def of(part: Any) -> int:
            return known.get(id(part), 1) or 1

        count = max([_factor(own), *map(of, inner)])
        for each in (*([part] for part in joined), *choices):
            count = min(count * max(map(of, each)), MAX_COMBINATIONS + 1)
        known[id(own)] = count
        _check_combinations(count, "allOf and $ref", places.get(id(own), ""))
        if len(own.get("patternProperties", ())) > MAX_PATTERN_PROPERTIES:
            expected, found = f"at most {MAX_PATTERN_PROPERTIES}", len(own["patternProperties"])
            raise InputError('too many "patternProperties"', where=places.get(id(own), ""), expected=expected, found=found)
        if (optional := len(own.get("properties", ())) - len(own.get("required", ()))) > MAX_ROW // 2:  # it would take seconds
            raise InputError("too many optional properties", where=places.get(id(own), ""), expected="about 480", found=optional)
        todo.pop()


def _factor(schema: Mapping[str, Any]) -> int:
    """Character classes of one schema's texts, and 1: characters that are none."""
    pattern = schema.get("pattern", "^$")
    count = 1 + len(set(_CLASS.findall(pattern))) + (not (pattern.startswith("^") and pattern.endswith("$")))
    lengths = count > 1 and not schema.keys().isdisjoint(("minLength", "maxLength"))
    return count * (_FORMAT if "format" in schema else 1) * (1 + lengths)


def _inner(schema: Mapping[str, Any]) -> Iterable[Iterable[Any]]:
    """The schemas of what a value contains."""
    for keyword in ("properties", "patternProperties"):
        yield schema.get(keyword, {}).values()
    for keyword in ("items", "additionalItems", "additionalProperties", "prefixItems"):
        value = schema.get(keyword)
        yield value if isinstance(value, list) else [value]
