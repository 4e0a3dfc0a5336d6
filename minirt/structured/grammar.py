"""`Grammar`: a `StructuredOutputsParams` compiled for one tokenizer, and all calls of llguidance that compile.

llguidance (https://github.com/guidance-ai/llguidance) parses with Earley's algorithm over a lexer of regular-expression
derivatives, which it builds while it is used. Its limits bound the work of compiling, of each mask, and the memory.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from secrets import token_hex
from typing import Any, TypeVar

from minirt.errors import InputError, MinirtError, UnsupportedError, shortened
from minirt.structured import limits
from minirt.structured.enforceable import enforceable
from minirt.structured.params import StructuredOutputsParams
from minirt.structured.reasoning import ReasoningEnd
from minirt.structured.schema import check_multiples, check_schema, parse_schema, subschemas
from minirt.text.tokenizer import Tokenizer

_T = TypeVar("_T")
# Between two JSON tokens, unless there is nothing. (llama.cpp bounds it in the same way.)
WHITESPACE = r"( |\n[ \t]{0,20})"
# Without \u: an additional property could be a stated one in disguise, such as "\u0061" for "a", with a value of another type.
ESCAPES = 'nrbtf\\"'
# Lexemes of llguidance's Lark: a string, a regular expression, a comment, a special token, and the keywords that JSON follows.
# Those without an end are lexemes, too, and no repetition gives characters back: so each character is looked at once.
_LARK = re.compile(
    r'''"(?:\\.|[^"\\\n])*+"?|/(?!/)(?:\\.|[^/\\])++/?|(?:#|//)[^\n]*|<[^<>\s]+>|%(?:json|regex|llguidance)''', re.DOTALL
)
_MAX_REASONING_ENDS = 16  # that are kept
_NEVER = -1e9  # the score of a piece that no text is tokenized to
FORCED_TOO_LONG = "ff_tokens"  # is said where the limit is reached by the only text that a grammar allows
_MAX_WORK = 4  # how often a schema's length may be compiled again, to find the place of an error in it


class Grammar:
    """A spec that compiles, and the matchers that it has ready. A matcher (`llguidance.LLMatcher`) is the state of one sequence.

    Matchers are not copied from one another: copies share their lexer. They would wait for each other, and the states that other
    requests have built would count towards `limits.MAX_LEXER_STATES`.

    Attributes:
        tokens_named: whether the grammar may name token ids, so that masks may have ids that the tokenizer lacks.
        end_ids: the tokens that masks allow where the text may end.
        reasoning_end: the end of the reasoning block, after which the grammar begins.
    """

    def __init__(self, spec: StructuredOutputsParams, tokenizer: "GrammarTokenizer") -> None:
        """Compile the first matcher. Takes milliseconds, for large grammars up to about a second, and releases the GIL.

        Raises:
            InputError, UnsupportedError: the grammar is wrong, contradicts itself, is too complex, or has a feature that is not
                supported.
        """
        self.tokens_named, self.end_ids = spec.kind == "grammar", frozenset(tokenizer.end_ids)
        self.reasoning_end = None if spec.reasoning_end is None else tokenizer.reasoning_end(spec.reasoning_end)
        self._where = f"structured_outputs.{spec.kind}"
        self._tokenizer = tokenizer
        self._source = _call(lambda: _checked_source(spec, self._where), "cannot be compiled", self._where)
        try:
            matcher = self.compile()
            tokenizer.probe(matcher, self._where)
            self._ready = [matcher]
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
        try:
            return self._ready.pop()
        except IndexError:
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

    Raises:
        UnsupportedError: llguidance is not installed, or cannot use this tokenizer with this model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            what, hint = "structured output needs llguidance, which is not installed", "pip install llguidance"
            raise UnsupportedError(what, where="structured_outputs", hint=hint) from error
        self._library, self.vocab = llguidance, vocab
        self.known_ids = tokenizer.ids()
        self.end_ids = tuple(token for token in end_ids if token in self.known_ids)
        if not self.end_ids:
            what = "a text of a grammar ends with an end-of-sequence token, and the tokenizer has none of the model's"
            raise UnsupportedError(what, where="structured_outputs", found=list(end_ids))
        if max(self.known_ids) >= vocab:
            what, expected = "the tokenizer has ids that the model has no logits for", f"ids below {vocab}"
            raise UnsupportedError(what, where="structured_outputs", expected=expected, found=max(self.known_ids))
        self._tokenizer = _call(
            lambda: llguidance.LLTokenizer(without_special(tokenizer.serialized()), n_vocab=vocab, eos_token=list(self.end_ids)),
            "the tokenizer cannot be used for structured output", error=UnsupportedError,
        )
        self.text_ends = frozenset(token for token in self.end_ids if not self._tokenizer.is_special_token(token))
        for name in sorted(tokenizer.special_tokens):
            if any(map(self._tokenizer.is_special_token, self._tokenizer.tokenize_str(name))):  # see `without_special`
                what, hint = "this version of llguidance takes the text of a special token for the token", "install 1.9"
                raise UnsupportedError(what, where="structured_outputs", found=shortened(name), hint=hint)
        self._reasoning_ends = dict[str, ReasoningEnd]()
        # Errors without the state of the parser, which is long.
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=limits.MAX_LEXER_STATES, max_items_in_row=limits.MAX_ROW, initial_lexer_fuel=limits.MAX_FUEL,
            step_max_items=limits.MAX_ITEMS, verbose_errors=False,
        )  # fmt: skip

    def executor(self, threads: int) -> Any:
        """What computes the masks of many matchers (`llguidance.LLExecutor`)."""
        return self._library.LLExecutor(threads)

    def text(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token])

    @cached_property
    def texts(self) -> list[tuple[bytes, int]]:
        """The texts of all tokens with their ids, sorted."""
        return sorted((self.text(token), token) for token in self.known_ids)

    def reasoning_end(self, text: str) -> ReasoningEnd:
        """The end of a reasoning block. To look at the texts of all tokens takes some 50 ms, so the last ends are kept."""
        found = self._reasoning_ends.get(text)
        if found is None:
            found = ReasoningEnd(text, self.texts, -(-self.vocab // 32))
            if len(self._reasoning_ends) >= _MAX_REASONING_ENDS:
                self._reasoning_ends.clear()
            self._reasoning_ends[text] = found
        return found

    def compile(self, source: str, where: str) -> Any:
        """A matcher in its initial state, with the mask of the first token computed."""
        options = {"log_level": 0, "limits": self._limits}
        matcher = _call(lambda: self._library.LLMatcher(self._tokenizer, source, **options), "cannot be compiled", where)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _compile_error(matcher.get_error(), where)
        return matcher

    def probe(self, matcher: Any, where: str) -> None:
        """Compute the mask after the first token, too, where the grammar allows one text only. Leaves the matcher as it is.

        Raises:
            InputError: that text is endless, or too long.
        """
        if tokens := matcher.compute_ff_tokens():
            copy = matcher.deep_copy()
            copy.consume_token(tokens[0])
            copy.compute_bitmask()
            if copy.is_error():
                raise _compile_error(copy.get_error(), where)


def without_special(serialized: str) -> str:
    """A tokenizer.json for llguidance, with which the text of a special token, such as "<|endoftext|>", is ordinary text.

    Where a grammar allows only one text, llguidance tokenizes that text, and allows only the first token. It must stand for the
    text's bytes. So no special token may match in a text, and neither a normalizer nor a space that is put in front of texts may
    change it. Lark grammars refer to special tokens by their names, which therefore stay. With "normalized", texts are searched
    for the normalized name. The normalizer puts a prefix in front of it, and llguidance removes this kind of normalizer once the
    tokenizer is loaded.
    """
    content = json.loads(serialized)
    special = set()
    for token in content["added_tokens"]:
        name = token["content"]
        token["normalized"] = token["special"] or (name.startswith("<") and name.endswith(">"))  # special for llguidance
        special |= {name} if token["normalized"] else set()
    if content["model"]["type"] == "Unigram":  # names may be pieces of text
        content["model"]["vocab"] = [(piece, _NEVER if piece in special else score) for piece, score in content["model"]["vocab"]]
    kept = [step for step in _steps(content["normalizer"], "normalizers") if _keeps_bytes(step)]
    prefix = {"type": "Prepend", "prepend": token_hex(16)}  # in no text
    content["normalizer"] = {"type": "Sequence", "normalizers": [prefix, *kept]}
    for step in _steps(content["pre_tokenizer"], "pretokenizers"):
        step |= {name: value for name, value in (("add_prefix_space", False), ("prepend_scheme", "never")) if name in step}
    return json.dumps(content)


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer. A "Sequence" has them under the key `inner`."""
    if part is None:
        return []
    return [step for own in part[inner] for step in _steps(own, inner)] if part["type"] == "Sequence" else [part]


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer only spells the text in the letters of the vocabulary."""
    return step["type"] == "ByteLevel" or (step["type"] == "Replace" and step["pattern"] == {"String": " "})


def _place(schema: Any, spec: StructuredOutputsParams, error: MinirtError, tokenizer: GrammarTokenizer) -> str:
    """", /pointer" of the smallest subschema that by itself has the same error, or of its pattern."""
    pointer, smallest, todo = "", schema, list(subschemas(schema)) if isinstance(schema, dict) else []
    work = _MAX_WORK * len(str(spec.json))
    while todo and work > 0:
        name, part = todo.pop()
        if isinstance(part, dict) and part:
            source = _json_source(part, spec)
            work -= len(source)
            try:
                tokenizer.compile(source, "")
            except MinirtError as own:
                if own.found == error.found:
                    pointer, smallest = f"/{name}", part
                    todo = [(f"{name}/{inner}", value) for inner, value in subschemas(part)]
    if isinstance(smallest, dict) and "pattern" in smallest and "regex" in str(error.found).lower():
        pointer += "/pattern"
    return f", {pointer}" if pointer else ""


def _checked_source(spec: StructuredOutputsParams, where: str) -> str:
    """The grammar in a language of llguidance."""
    from llguidance import LLMatcher

    if spec.json is not None:
        schema = parse_schema(str(spec.json), where)
        check_schema(schema, where)
        return _json_source(schema, spec)
    if spec.json_object:
        return _json_source({"type": "object"}, spec)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:  # one terminal, so that all choices are matched at once
        choices = " | ".join(json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in spec.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    return LLMatcher.grammar_from_lark(_checked_lark(str(spec.grammar), where))


def _checked_lark(source: str, where: str) -> str:
    """A Lark grammar whose schemas after "%json" are checked, and have the options of `json`."""
    parts, between, regexes, schemas, done = list[str](), list[str](), list[str](), list[Any](), 0
    while (lexeme := _LARK.search(source, done)) is not None:
        start = lexeme.end()
        parts.append(source[done:start])
        between.append(source[done : lexeme.start()])
        regexes += [lexeme[0]] if lexeme[0].startswith("/") else []
        done = _json_end(source, start) if lexeme[0].startswith("%") else start
        text = source[start:done]
        if lexeme[0] == "%json":
            place = f"{where}, %json at line {source.count(chr(10), 0, start) + 1}"
            schema = parse_schema(text, place)
            check_schema(schema, place)
            schemas.append(schema)
            lines = "\n" * text.count("\n")  # so that llguidance counts them as in `source`
            text = f"{lines} {json.dumps({**_as_object(schema), 'x-guidance': _json_options(compact=False)})}"
        parts.append(text)
    check_multiples(schemas, where)
    limits.check_lark([*between, source[done:]], regexes, where)
    return "".join([*parts, source[done:]])


def _json_end(source: str, start: int) -> int:
    """The end of the JSON text that begins at `start`, or of `source` if it is none."""
    spaces = re.compile(r"[ \t\r\n]*").match(source, start)
    try:
        return json.JSONDecoder().raw_decode(source, spaces.end() if spaces else start)[1]
    except (ValueError, RecursionError):
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


def _compile_error(message: str, where: str) -> InputError | UnsupportedError:
    """llguidance's message, as one line, in an error of minirt."""
    own = re.split(r"\n *\d+ \| ", message.partition("<non-verbose/>")[0])[0]  # without lines of the source
    text = _readable(" ".join(own.split()), where)
    if FORCED_TOO_LONG in text:
        what, hint = "the grammar allows only one text, which is endless or too long", "let the text end, or choose between texts"
        return InputError(what, where=where, found=shortened(text), hint=hint)
    if (error := limits.reached(text, where)) is not None:
        return error
    if any(words in text.lower() for words in ("not support", "unimplemented", "only supported", "not disjoint")):
        return UnsupportedError("not supported in a grammar", where=where, found=shortened(text))
    if "NoExtension" in text or "nsatisfiable" in text:
        return InputError("no text fits", where=where, found=shortened(text))
    return InputError("the grammar is wrong", where=where, found=shortened(text))


def _readable(text: str, where: str) -> str:
    """llguidance's message without the marks below a line, and with its place in words; a regular expression is one line."""
    def invalid(match: re.Match[str]) -> str:
        return f"invalid regex {shortened(match[1], 100)}: "

    text = re.sub(r"invalid regex (.*) \(in regex\): regex parse error: .* \^+ error: ", invalid, text)
    text = re.sub(r"regex parse error: (.*) \^+ error: ", invalid, text)
    place = "" if where.endswith("regex") else r"line \1, column \2: "
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", place, text)


def _call(
    function: Callable[[], _T], what: str, where: str = "structured_outputs", error: type[MinirtError] = InputError
) -> _T:
    """Call llguidance. It is written in Rust, whose panics derive from BaseException and cannot be imported."""
    try:
        return function()
    except MinirtError:
        raise
    except BaseException as cause:
        if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
            raise  # Ctrl-C
        raise error(f"{what}: {shortened(cause)}", where=where) from cause
