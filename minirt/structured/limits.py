"""How large a schema, grammar or regular expression may be.

llguidance recurses from rule to rule and from "$ref" to "$ref" with a few kB of stack for each, and an overflow of the stack ends
the process. So the levels are counted before it is called, and grammars are compiled in threads with `COMPILE_STACK`, twice what
`MAX_LEVELS` needs. Its own limits (`reached`) bound most of its work, but neither the combinations of patterns that must match
together nor the remainders of "multipleOf". What may need those (`is_costly`) compiles in a separate process first.
"""

import re
from itertools import accumulate

from minirt.errors import InputError, shortened
from minirt.text.limited_processes import ProcessLimits

MAX_TRIAL = ProcessLimits(cpu_seconds=0.5, seconds=30, memory=4 << 30)  # of that process
COMPILE_STACK = 64 << 20  # bytes; of address space until they are used
# Bounds what one path may have: rules, terminals and brackets of a grammar; the levels of all schemas that a "$ref" leads to.
MAX_LEVELS = 4096
MAX_NESTING = 100  # brackets within brackets in the JSON of a schema; serde reads 128, of which the form around it takes some
MAX_ROW = 2000  # items of the parser at one place of the text
MAX_SCHEMAS = 50_000  # that llguidance makes of one schema
MAX_ITEMS = 50_000  # of the parser for one mask
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, for each sequence
MAX_FUEL = 500_000  # expressions that llguidance makes for the lexer of a grammar
_SMALL = 1500  # characters of a grammar

_STRING = re.compile(r'"(?:\\.|[^"\\])*+"?', re.DOTALL)
_COSTLY = re.compile(r'multipleOf|[&~]|"(?:pattern|format).*"(?:pattern|format)', re.DOTALL)
_MULTIPLY = ("multipleOf", "allOf", "anyOf", "oneOf", "patternProperties", "pattern", "&", "~")

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


def reached(message: str, place: str) -> InputError | None:
    """The error for a message of llguidance about one of its limits; None: it is about something else."""
    if row := _ROW.search(message):
        what, hint = "too many alternatives at one place", "an optional property is some four: require some, or nest them"
        return InputError(what, where=place, expected=f"at most {MAX_ROW:,}", found=f"{int(row[1]):,} or more", hint=hint)
    for words, expected in _REACHED:
        if words in message.lower():
            what = "the grammar is too complex"
            return InputError(what, where=place, expected=expected, found=shortened(message), hint="simplify it")
    return None


def check_nesting(text: str, place: str) -> None:
    """Check a JSON text before it is parsed. The nesting of a text that is no JSON means nothing."""
    brackets = re.findall(r"[\[\]{}]", _STRING.sub("", text))
    deepest = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    if deepest > MAX_NESTING:
        what, expected = "the schema is nested too deeply", f"at most {MAX_NESTING} brackets"
        raise InputError(what, where=place, expected=expected, found=deepest)


def check_levels(count: int, of: str, place: str) -> None:
    """`count`: an upper bound of how deeply llguidance recurses."""
    if count > MAX_LEVELS:
        raise InputError(f"too many {of} together", where=place, expected=f"at most {MAX_LEVELS:,}", found=f"{count:,}")


def is_costly(text: str) -> bool:
    """Whether a grammar compiles in a separate process first."""
    return len(text) > _SMALL or _COSTLY.search(text) is not None


def too_costly(text: str, place: str, why: str) -> InputError:
    """The error for a grammar that cannot be compiled within `MAX_TRIAL`. Names what of it may be the reason."""
    names = [name for name in _MULTIPLY if name in text]
    expected, hint = f"one that compiles in {MAX_TRIAL.cpu_seconds} s of CPU", f"simplify its {' and '.join(names) or 'rules'}"
    return InputError("the grammar is too complex", where=place, expected=expected, found=why, hint=hint)
