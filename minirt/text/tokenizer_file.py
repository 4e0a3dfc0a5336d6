"""Reads tokenizer.json: contradictions that the library accepts, the decoder's steps, a lower bound on the tokens of a text.

The library has already loaded the file, so its parts are well-formed. Fields that the library ignores may have any JSON type.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minirt.errors import TokenizerError, quoted, shortened
from minirt.text.tokenizers_library import TokenizersLibrary

# Decoders that work token by token, except for byte runs and the start of the text. With them, a window decodes exactly.
_WINDOW_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
# Unicode's White_Space, which an added token with lstrip or rstrip removes.
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_NOT_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that never occur in UTF-8
# How Mistral's own tokenizer splits texts. Files that older releases of transformers have converted split them otherwise.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_COMPOSED = 4  # maximum number of characters that NFC or NFKC combine into one


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level tokens (GPT-2). Printable Latin-1 bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decoder_steps(library: TokenizersLibrary, path: Path) -> list[str]:
    """The types of the decoder's steps; [] without a decoder. A decoder that cannot be streamed exactly is an error."""
    steps = list(steps_of(library.decoder(), "decoders"))
    names = [step["type"] for step in steps]
    # A strip of several characters needs more than one token of context. A strip at the end takes back emitted text.
    bad = any(step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0) for step in steps)
    bad |= "Fuse" in names and not {"Strip"}.issuperset(names[names.index("Fuse") + 1 :])  # steps after Fuse see the whole text
    if names != ["ByteLevel"] and (bad or not _WINDOW_DECODERS.issuperset(names)):
        raise TokenizerError("this decoder cannot be streamed exactly", where=path, found=shortened(json.dumps(steps)))
    return names


def check(content: Mapping[str, Any], library: TokenizersLibrary, path: Path) -> None:
    """Refuse a tokenizer.json that contradicts itself, or whose results vary.

    Raises:
        TokenizerError: BPE dropout is on, two tokens have one id, an added token has another id than the vocabulary says, or
            the model needs an unknown token that is not in its vocabulary.
    """
    model = _object(content.get("model"))
    if model.get("dropout"):
        hint = 'set "dropout" to null in tokenizer.json: it is for training, and the same text would give other tokens each time'
        raise TokenizerError("BPE dropout is on", where=path, expected="null", found=model["dropout"], hint=hint)
    vocabulary = _vocabulary(model)
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    if len(by_id) != len(vocabulary):
        token = next(token for token, token_id in vocabulary.items() if by_id[token_id] != token)
        shown = shortened(f"{vocabulary[token]} of {token!r} and {by_id[vocabulary[token]]!r}")
        raise TokenizerError("two tokens have one id", where=path, found=shown)
    for added in map(_object, content.get("added_tokens") or ()):
        text, expected = str(added.get("content")), added.get("id")
        given = library.token_to_id(text)
        if given is None or given != expected or library.id_to_token(given) != text:
            # The library gives a text of the vocabulary the vocabulary's id, and any other text the next free id.
            what = f"the added token {quoted(text)} cannot have its id"
            hint = "the vocabulary has the text with another id, or the id is taken, or ids before it are missing"
            raise TokenizerError(what, where=path, expected=expected, found=given, hint=hint)
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown not in vocabulary and _missing_bytes(content, model) != b"":
        raise TokenizerError(f"unk_token {quoted(unknown)} is not in the vocabulary", where=path)


def splits_wrongly(content: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether a tokenizer.json of a Mistral model splits texts otherwise than the model's own tokenizer.

    The signs are those of transformers (`fix_mistral_regex`). A file with the right regular expression is right in any case.

    Args:
        config: config.json of the model.
    """
    release = re.match("[0-9]+", str(config.get("transformers_version")))
    if config.get("model_type") not in _TEKKEN_TYPES or vocab_size <= 100_000 or (release and int(release[0]) >= 5):
        return False
    steps = list(steps_of(content.get("pre_tokenizer"), "pretokenizers"))
    return bool(steps) and all(step.get("pattern") != {"Regex": _TEKKEN} for step in steps)


def token_bound(content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Callable[[str], int]:
    """A lower bound on the number of tokens of a text. It takes milliseconds for a million characters.

    It is above 0 only for BPE, and only if every step `_keeps_length`, and each unknown character is its own token or an
    uncounted byte.

    Args:
        content: of a tokenizer.json.
        vocabulary: all tokens, added ones included.
    """
    model = _object(content.get("model"))
    normalizers = list(steps_of(content.get("normalizer"), "normalizers"))
    splitters = list(steps_of(content.get("pre_tokenizer"), "pretokenizers"))
    steps = (*normalizers, *splitters, *steps_of(content.get("post_processor"), "processors"))
    bare = not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or not bare or not vocabulary or not all(map(_keeps_length, steps)):
        return lambda text: 0
    composing = sum(step["type"] in ("NFC", "NFKC") for step in normalizers)
    # The most characters that the normalizer combines into one, in texts that are not ASCII.
    composed, same = _COMPOSED**composing, composing == len(normalizers)  # only these leave ASCII unchanged
    dropped = b""  # bytes that a byte-level vocabulary lacks, so they give no token
    if (missing := _missing_bytes(content, model)) != b"" and (model.get("unk_token") is None or model.get("fuse_unk")):
        changes = sum(step["type"] in ("ByteLevel", "Metaspace") for step in splitters)
        if missing is None or not same or changes != 1:  # the model gets other bytes than those of the text
            return lambda text: 0
        dropped = missing
    longest = max(1, *map(len, vocabulary))  # characters of the longest token, or bytes if bytes are counted
    added = [_object(token) for token in content.get("added_tokens") or ()]
    if dropped:  # bytes are counted: a byte-level token has one letter per byte, an added token is plain text
        longest = max(longest, *(len(str(token.get("content")).encode()) for token in added), 1)
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)  # whether they remove white space around them

    def bound(text: str) -> int:
        plain = composed == 1 or text.isascii()
        if dropped and not plain:
            return 0
        length = len(text.encode("utf-8", "surrogatepass").translate(None, dropped) if dropped else text)
        if strips:
            length -= sum(text.count(space) * (len(space.encode()) if dropped else 1) for space in _WHITESPACE)
        return max(0, -(-length // (longest * (1 if plain else composed))))

    return bound


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a step can neither drop characters nor merge any number of them into one token."""
    match step:
        case {"type": "NFC" | "NFKC" | "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 0 < len(old) <= len(new)
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "TemplateProcessing", "single": list(parts)}:
            return any(_object(_object(part).get("Sequence")).get("id") == "A" for part in parts)
    return False


def _missing_bytes(content: Mapping[str, Any], model: Mapping[str, Any]) -> bytes | None:
    """The bytes of UTF-8 text that the vocabulary lacks; b"" if it covers any text, None if it does not work on bytes."""
    vocabulary = _vocabulary(model)
    if model.get("type") != "BPE":
        return None
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return b""
    last = [step["type"] for step in steps_of(content.get("pre_tokenizer"), "pretokenizers")][-1:]
    if last != ["ByteLevel"]:
        return None
    return bytes(sorted(byte for letter, byte in byte_alphabet().items() if letter not in vocabulary and byte not in _NOT_UTF8))


def _vocabulary(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Token → id of the model itself; empty for Unigram, whose ids are positions in a list."""
    return _object(model.get("vocab"))


def steps_of(part: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of tokenizer.json, in order. A "Sequence" has them under the key `inner`, and may be nested."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for step in part.get(inner) or ():
            yield from steps_of(step, inner)
    elif part and isinstance(part, dict):
        part.setdefault("type", None)
        yield part


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
