"""`Grammar`: a `StructuredOutputsParams` compiled for one tokenizer, and all calls of llguidance that compile.

llguidance (https://github.com/guidance-ai/llguidance) parses with Earley's algorithm over a lexer of regular-expression
derivatives, which it builds while it is used. Its limits bound the work of compiling, of each mask, and the memory.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from torch import Tensor

from minirt.errors import InputError, MinirtError, UnsupportedError, quoted, shortened
from minirt.structured import limits, matchers
from minirt.structured.enforceable import enforceable
from minirt.structured.params import StructuredOutputsParams
from minirt.structured.reasoning_end import Messages, ReasoningEnd, bits
from minirt.structured.schema import check_schema, parse_schema, subschemas
from minirt.text.harmony import CALLING
from minirt.text.limited_processes import LimitedProcesses, Stopped
from minirt.text.tokenizer import Tokenizer
from minirt.text.tokenizers_library import call_rust
from minirt.threads import usable_cpus

_T = TypeVar("_T")
# Between two JSON tokens, unless there is nothing. (llama.cpp bounds it in the same way.)
WHITESPACE = r"( |\n[ \t]{0,20})"
# Without \u: an additional property could be a stated one in disguise, such as "\u0061" for "a", with a value of another type.
ESCAPES = 'nrbtf\\"'
# Lexemes of llguidance's Lark: a string, a regular expression, a comment, a special token, and the keywords that JSON follows.
# Unterminated ones are lexemes, too. No repetition gives characters back, so each character is looked at once.
_LARK = re.compile(
    r'''"(?:\\.|[^"\\\n])*+"?|/(?!/)(?:\\.|[^/\\])++/?|(?:#|//)[^\n]*|<[^<>\s]+>|%(?:json|regex|llguidance)''', re.DOTALL
)
_MASKERS = 16  # threads that compute masks, at most
_MAX_REASONING_ENDS = 16  # that are kept
FORCED_TOO_LONG = "ff_tokens"  # is said where the limit is reached by the only text that a grammar allows
_PLACE_SECONDS = 0.2  # how long the place of an error within a schema is looked for


class Grammar:
    """A spec that compiles, and the matchers that it has ready. A matcher (`llguidance.LLMatcher`) is the state of one sequence.

    Matchers are not copied from one another: copies share their lexer. They would wait for each other, and the states that other
    requests have built would count towards `limits.MAX_LEXER_STATES`.

    Attributes:
        tokens_named: whether the grammar may name token ids, so that masks may have ids that the tokenizer lacks.
        end_ids: the tokens that masks allow where the text may end.
        reasoning_end: the end of the reasoning block, after which the grammar begins.
        messages: those before it, if one of them may be a call, with which the text may end.
    """

    def __init__(self, spec: StructuredOutputsParams, tokenizer: "GrammarTokenizer") -> None:
        """Compile the first matcher. Takes milliseconds, for large grammars up to about a second, and releases the GIL.

        Raises:
            InputError, UnsupportedError: the grammar is wrong, contradicts itself, is too complex, or has a feature that is not
                supported.
        """
        self.tokens_named, self.end_ids = spec.kind == "grammar", frozenset(tokenizer.end_ids)
        self.reasoning_end = None if spec.reasoning_end is None else tokenizer.reasoning_end(spec.reasoning_end)
        if spec.may_call and spec.reasoning_end not in CALLING:
            what, expected = "the form of calls is not known", f"reasoning_end: {' or '.join(CALLING)}"
            raise InputError(what, where="structured_outputs.may_call", expected=expected, found=quoted(spec.reasoning_end))
        self.messages = Messages(str(spec.reasoning_end)) if spec.may_call else None
        self._where = f"structured_outputs.{spec.kind}"
        self._tokenizer = tokenizer
        self._source = _call(lambda: _checked_source(spec, self._where), "cannot be compiled", self._where)
        try:
            self._ready = [tokenizer.first(self._source, str(spec), self._where)]
        except MinirtError as error:
            if spec.json is None or error.expected is not None:  # a limit of the whole
                raise
            schema = parse_schema(str(spec.json), self._where)
            raise error.at(f"{self._where}{_place(schema, spec, error, tokenizer)}") from error

    def compile(self) -> Any:
        """A new matcher. It takes as long as the first."""
        return self._tokenizer.compile(self._source, self._where)

    def take(self) -> Any | None:
        """A matcher that is ready, if there is one."""
        with suppress(IndexError):
            return self._ready.pop()
        return None

    def restock(self) -> None:
        """Have a matcher ready for the next sequence."""
        if not self._ready:
            self._ready.append(self.compile())


class GrammarTokenizer:
    """The tokenizer and the ends of a text as llguidance needs them.

    Args:
        vocab: columns of the logits; those above the tokenizer's ids are never allowed.
        end_ids: the model's end-of-sequence tokens.

    Attributes:
        known_ids: the ids of the tokenizer.
        end_ids: those of `end_ids` that it knows.
        text_ends: those of them that are ordinary text for llguidance.
        known, no_text_ends: rows of masks that allow `known_ids`, or all but `text_ends`.
        executor: what computes the masks of many matchers (`llguidance.LLExecutor`).

    Raises:
        UnsupportedError: llguidance is not installed, or cannot use this tokenizer with this model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            what, hint = "structured output needs llguidance, which is not installed", "pip install llguidance"
            raise UnsupportedError(what, where="structured_outputs", hint=hint) from error
        self.vocab, self._text = vocab, tokenizer.serialized
        self.known_ids = tokenizer.ids()
        self.end_ids = tuple(token for token in end_ids if token in self.known_ids)
        if not self.end_ids:
            what = "a text of a grammar ends with an end-of-sequence token, and the tokenizer has none of the model's"
            raise UnsupportedError(what, where="structured_outputs", found=list(end_ids))
        if max(self.known_ids) >= vocab:
            what, expected = "the tokenizer has ids that the model has no logits for", f"ids below {vocab}"
            raise UnsupportedError(what, where="structured_outputs", expected=expected, found=max(self.known_ids))
        self._tokenizer = _call(
            lambda: matchers.library_tokenizer(tokenizer.serialized(), vocab, self.end_ids),
            "the tokenizer cannot be used for structured output", error=UnsupportedError,
        )
        self.text_ends = frozenset(token for token in self.end_ids if not self._tokenizer.is_special_token(token))
        for name in sorted(tokenizer.special_tokens):
            if any(map(self._tokenizer.is_special_token, self._tokenizer.tokenize_str(name))):  # see `without_special`
                what, hint = "this version of llguidance takes the text of a special token for the token", "install 1.9"
                raise UnsupportedError(what, where="structured_outputs", found=shortened(name), hint=hint)
        # To look at the texts of all tokens takes some 50 ms, so the last ends of reasoning blocks are kept.
        self.reasoning_end = lru_cache(_MAX_REASONING_ENDS)(lambda text: ReasoningEnd(text, self.texts, -(-vocab // 32)))
        self._options = matchers.options()
        self.executor = llguidance.LLExecutor(min(_MASKERS, usable_cpus()))
        self.known, self.no_text_ends = self.bits(self.known_ids), ~self.bits(self.text_ends)

    def bits(self, tokens: frozenset[int]) -> Tensor:
        """A row of a mask in which these tokens are allowed."""
        return bits(tokens, -(-self.vocab // 32))

    def text(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token])

    @cached_property
    def texts(self) -> list[tuple[bytes, int]]:
        """The texts of all tokens with their ids, sorted."""
        return sorted((self.text(token), token) for token in self.known_ids)

    def compile(self, source: str, place: str) -> Any:
        """A matcher in its initial state, with the mask of the first token computed."""
        matcher = _call(lambda: matchers.new(self._tokenizer, source, self._options), "cannot be compiled", place)
        if matcher.is_error():
            raise _compile_error(matcher.get_error(), place)
        return matcher

    def first(self, source: str, text: str, place: str) -> Any:
        """The first matcher of a grammar. Where the grammar allows one text only, also computes the mask after the first token.

        A costly grammar compiles in a separate process first, where it can do no harm.

        Args:
            text: the grammar as it was given.
        Raises:
            InputError, UnsupportedError: it takes too long or too much memory, ends that process, or is wrong.
        """
        if limits.is_costly(text):
            try:
                message = self._trials.ask(source)
            except Stopped as error:
                raise limits.too_costly(text, place, str(error)) from None
            if message is not None:
                raise _compile_error(message, place)
        matcher = self.compile(source, place)
        if message := matchers.probed(matcher):
            raise _compile_error(message, place)
        return matcher

    @cached_property
    def _trials(self) -> LimitedProcesses:
        return LimitedProcesses(f"{matchers.__name__}:tries", [self._text(), self.vocab, self.end_ids], limits.MAX_TRIAL)


def _place(schema: Any, spec: StructuredOutputsParams, error: MinirtError, tokenizer: GrammarTokenizer) -> str:
    """", /pointer" of the smallest subschema that by itself has the same error, or of its pattern."""
    pointer, smallest, todo = "", schema, list(subschemas(schema)) if isinstance(schema, dict) else []
    deadline = time.monotonic() + _PLACE_SECONDS
    while todo and time.monotonic() < deadline:
        name, part = todo.pop()
        if isinstance(part, dict) and part:
            try:
                tokenizer.first(_json_source(part, spec), json.dumps(part), "")
            except MinirtError as other:
                if other.found == error.found:
                    pointer, smallest = f"/{name}", part
                    todo = [(f"{name}/{inner}", value) for inner, value in subschemas(part)]
    if isinstance(smallest, dict) and "pattern" in smallest and "regex" in str(error.found).lower():
        pointer += "/pattern"
    return f", {pointer}" if pointer else ""


def _checked_source(spec: StructuredOutputsParams, place: str) -> str:
    """The grammar in a language of llguidance."""
    from llguidance import LLMatcher

    if spec.json is not None:
        schema = parse_schema(str(spec.json), place)
        check_schema(schema, place)
        return _json_source(schema, spec)
    if spec.json_object:
        return _json_source({"type": "object"}, spec)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:  # one terminal, so that all choices are matched at once
        choices = " | ".join(json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    return LLMatcher.grammar_from_lark(_checked_lark(str(spec.grammar), place))


def _checked_lark(source: str, place: str) -> str:
    """A Lark grammar whose schemas after "%json" are checked, and have the options of `json`."""
    parts, done, levels = list[str](), 0, 0
    while (lexeme := _LARK.search(source, done)) is not None:
        start = lexeme.end()
        parts.append(source[done:start])
        levels += _brackets(source[done : lexeme.start()])
        done = _json_end(source, start) if lexeme[0].startswith("%") else start
        text = source[start:done]
        if lexeme[0] == "%json":
            inner = f"{place}, %json at line {source.count(chr(10), 0, start) + 1}"
            schema = parse_schema(text, inner)
            check_schema(schema, inner)
            lines = "\n" * text.count("\n")  # so that llguidance counts them as in `source`
            text = f"{lines} {json.dumps({**_as_object(schema), 'x-guidance': _json_options(compact=False)})}"
        parts.append(text)
    levels += _brackets(source[done:])
    limits.check_levels(levels, "rules, terminals and opening brackets", place)
    return "".join([*parts, source[done:]])


def _brackets(text: str) -> int:
    return sum(map(text.count, ":([{"))


def _json_end(source: str, start: int) -> int:
    """The end of the JSON text that begins at `start`, or of `source` if it is none."""
    spaces = re.compile(r"[ \t\r\n]*").match(source, start)
    with suppress(ValueError, RecursionError):
        return json.JSONDecoder().raw_decode(source, spaces.end() if spaces else start)[1]
    return len(source)


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A checked schema as llguidance gets it."""
    return {} if isinstance(schema, bool) else enforceable(schema)


def _json_source(schema: dict[str, Any] | bool, spec: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    options: Any = _json_options(compact=spec.disable_any_whitespace)
    return LLMatcher.grammar_from_json_schema(json.dumps(_as_object(schema)), overrides=options)


def _json_options(compact: bool) -> dict[str, Any]:
    space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    return {"json_allowed_escapes": ESCAPES, **space}


def _compile_error(message: str, place: str) -> InputError | UnsupportedError:
    """llguidance's message, as one line, in an error of minirt."""
    line = re.split(r"\n *\d+ \| ", message.partition("<non-verbose/>")[0])[0]  # without lines of the source
    text = _readable(" ".join(line.split()), place)
    if FORCED_TOO_LONG in text:
        what, hint = "the grammar allows only one text, which is endless or too long", "let the text end, or choose between texts"
        return InputError(what, where=place, found=shortened(text), hint=hint)
    if (error := limits.reached(text, place)) is not None:
        return error
    if any(words in text.lower() for words in ("not support", "unimplemented", "only supported", "not disjoint")):
        return UnsupportedError("not supported in a grammar", where=place, found=shortened(text))
    if "NoExtension" in text or "nsatisfiable" in text:
        return InputError("no text fits", where=place, found=shortened(text))
    return InputError("the grammar is wrong", where=place, found=shortened(text))


def _readable(text: str, place: str) -> str:
    """llguidance's message without the marks below a line, and with its place in words; a regular expression is one line."""
    def invalid(match: re.Match[str]) -> str:
        return f"invalid regex {shortened(match[1], 100)}: "

    text = re.sub(r"invalid regex (.*) \(in regex\): regex parse error: .* \^+ error: ", invalid, text)
    text = re.sub(r"regex parse error: (.*) \^+ error: ", invalid, text)
    prefix = "" if place.endswith("regex") else r"line \1, column \2: "
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", prefix, text)


def _call(function: Callable[[], _T], what: str, place: str = "structured_outputs", error: type[MinirtError] = InputError) -> _T:
    """Call llguidance."""
    return call_rust(function, lambda cause: error(f"{what}: {shortened(cause)}", where=place))
