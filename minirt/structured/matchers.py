"""How llguidance's tokenizer and matchers are made, here and in the process that tries large grammars first.

That process imports this module, so it imports no PyTorch.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any

from minirt.structured import limits
from minirt.text.tokenizer_file import steps_of

_NEVER = -1e9  # the score of a piece that no text is tokenized to


def options() -> dict[str, Any]:
    """Of all matchers. Errors come without the state of the parser, which is long."""
    from llguidance import LLParserLimits

    bounds = LLParserLimits(
        max_lexer_states=limits.MAX_LEXER_STATES, max_items_in_row=limits.MAX_ROW, initial_lexer_fuel=limits.MAX_FUEL,
        step_max_items=limits.MAX_ITEMS, verbose_errors=False,
    )  # fmt: skip
    return {"log_level": 0, "limits": bounds}


def library_tokenizer(serialized: str, vocab: int, end_ids: Sequence[int]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(without_special(serialized), n_vocab=vocab, eos_token=list(end_ids))


def new(tokenizer: Any, source: str, options: dict[str, Any]) -> Any:
    """A new matcher, whose first mask is computed unless it has an error."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, **options)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def probed(matcher: Any) -> str | None:
    """llguidance's message if the mask after the first token has an error, where the grammar allows only one text."""
    if tokens := matcher.compute_ff_tokens():
        copy = matcher.deep_copy()
        copy.consume_token(tokens[0])
        copy.compute_bitmask()
        if copy.is_error():
            return str(copy.get_error())
    return None


def tries(first: tuple[str, int, Sequence[int]]) -> Callable[[str, int], str | None]:
    """The function of the process of `GrammarTokenizer.try_out`: from a grammar to llguidance's message of its error."""
    tokenizer, settings = library_tokenizer(*first), options()
    threading.stack_size(limits.COMPILE_STACK)
    thread = ThreadPoolExecutor(1)

    def message(source: str) -> str | None:
        matcher = new(tokenizer, source, settings)
        return str(matcher.get_error()) if matcher.is_error() else probed(matcher)

    def answer(source: str, size: int) -> str | None:
        try:
            return thread.submit(message, source).result()
        except MemoryError:
            raise
        except BaseException as error:  # panics, too; the caller compiles it again, and reports the error
            return str(error) if isinstance(error, Exception) else None

    return answer


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
    kept = [step for step in steps_of(content["normalizer"], "normalizers") if _keeps_bytes(step)]
    prefix = {"type": "Prepend", "prepend": token_hex(16)}  # in no text
    content["normalizer"] = {"type": "Sequence", "normalizers": [prefix, *kept]}
    for step in steps_of(content["pre_tokenizer"], "pretokenizers"):
        step |= {name: value for name, value in (("add_prefix_space", False), ("prepend_scheme", "never")) if name in step}
    return json.dumps(content)


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer only spells the text in the letters of the vocabulary."""
    return step["type"] == "ByteLevel" or (step["type"] == "Replace" and step["pattern"] == {"String": " "})
