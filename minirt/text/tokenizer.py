"""`Tokenizer`: text to token ids and back, chat templates, and the ids that end a sequence.

Built on `tokenizers` and jinja2, which are imported only when a tokenizer is loaded or a template is rendered.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minirt.errors import ConfigError, ContextLengthError, InputError, TokenizerError, printable, shortened
from minirt.files import parse_json, present, read_json, read_text
from minirt.text.backend import Backend
from minirt.text.chat_template import ChatTemplate
from minirt.text.tokenizer_file import TokenBound, byte_alphabet, check, decoder_steps

# Files of tokenizer formats that minirt does not read. A folder with one of them but no tokenizer.json is an error.
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TOKENIZER_FILE = 128 << 20  # bytes; the largest known are about 35 MB
MAX_SMALL_FILE = 16 << 20  # tokenizer_config.json and special_tokens_map.json


class Tokenizer:
    """A model's tokenizer.json with its special tokens and chat template. Immutable after `load`."""

    def __init__(self, folder: Path) -> None:
        """Load tokenizer.json and the optional files beside it; see `load`."""
        path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        text = read_text(path, limit=MAX_TOKENIZER_FILE, error=TokenizerError)
        content = parse_json(text, path, error=TokenizerError)
        config, older = _optional(config_path), _optional(folder / "special_tokens_map.json")
        self._backend = Backend(text.encode(), path)
        check(content, self._backend, path)
        self.response_template: Any = config.get("response_template")  # see `minirt.text.response_template`
        steps = decoder_steps(self._backend, path)
        self._byte_level, self._byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self._chat_template = ChatTemplate(folder, config)
        texts = _special_tokens(folder / "special_tokens_map.json", older) | _special_tokens(config_path, config)
        self._special = {name: text for name, text in texts.items() if text}
        self._config = config
        _check_added_tokens(config.get("added_tokens_decoder"), self._backend, config_path)
        ids = {name: self.token_id(text) for name, text in self._special.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        lost = {name: text for name, text in self._special.items() if ids[name] is None}
        if "bos_token" in lost or "eos_token" in lost:
            raise TokenizerError("is not in the vocabulary", where=path, found=shortened(lost))
        if lost:
            _warn(f"{config_path}: ignored, since the vocabulary has no such token: {lost}")
        # As in transformers, a token with a name such as bos_token is special even if tokenizer.json does not flag it.
        flagged = self._backend.special_tokens()
        named = [text for name, text in self._special.items() if ids[name] is not None and text not in flagged]
        self._backend.add_special_tokens(named)
        self._special_texts = flagged.union(named)
        self._adds_bos = self.bos_token_id in self._backend.encode("", True)[:1]  # a faulty post-processor fails here
        vocabulary = self._backend.vocabulary()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bound = TokenBound.of(content, vocabulary)
        # What `IncrementalDecoder` has found out about tokens, with and without special ones.
        self._decoded: dict[bool, dict[int, bytes]] = {False: {}, True: {}}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Load the tokenizer in `folder`; None if the folder has none.

        Raises:
            TokenizerError: a file is damaged or contradicts itself, or the tokenizer has another format than tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if present(path):
            return cls(folder)
        if found := [name for name in _OTHER_FILES if present(folder / name)]:
            hint = "convert it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError("is missing, and other formats are not supported", where=path, found=found, hint=hint)
        return None

    @property
    def info(self) -> dict[str, Any]:
        """tokenizer_config.json with the special tokens as texts, and with the chat template, whichever files have them."""
        return self._config | self._special | {"chat_template": self._chat_template.source}

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template.source is not None

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text`, or None."""
        return self._backend.token_to_id(text)

    def ids(self) -> frozenset[int]:
        """All token ids. There may be gaps between them."""
        return frozenset(self._backend.vocabulary().values())

    def serialized(self) -> str:
        """It as the content of a tokenizer.json, in which all special tokens are flagged."""
        return self._backend.serialized()

    def min_tokens(self, text: str) -> int:
        """A lower bound on the number of token ids of `text`, from its number of characters; 0 if there is none.

        It takes almost no time, while tokenizing takes seconds for each megabyte and cannot be interrupted.
        """
        return self._bound(text)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with the special tokens of tokenizer.json's post-processor, but never a second BOS.

        As in transformers 5, only the post-processor decides whether a BOS is added; `add_bos_token` is ignored. The text of a
        special token in `text` becomes that token.

        Args:
            max_tokens: raise, without tokenizing, if `min_tokens` shows that the text has more tokens. Other texts are encoded
                completely, even if they have more.
        Raises:
            ContextLengthError: see `max_tokens`.
            InputError: `text` is not a string, or has a lone surrogate.
            TokenizerError: the library fails.
        """
        ids = self._encode(text, True, max_tokens)
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_token_id] else ids

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """As `encode`, without the special tokens that the post-processor adds."""
        return self._encode(text, False, max_tokens)

    def encode_chat(self, messages: list[dict[str, Any]], max_tokens: int | None = None, **options: Any) -> list[int]:
        """Token ids of `render_chat(messages, **options)`. The template writes all special tokens; the tokenizer adds none.

        The text of a special token in a message's content becomes that token, as in transformers. Raises as `encode`.
        """
        return self.encode_plain(self.render_chat(messages, **options), max_tokens)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word without special tokens: as it is, and after a space. Only those that differ.

        None if the word has no tokens, as if a normalizer removes it.
        """
        word = word.lstrip() or word
        plain, spaced = (tuple(self._encode(prefix + word, False)) for prefix in ("", " "))
        return list(dict.fromkeys((plain, spaced))) if plain else []

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        if not isinstance(text, str):
            raise InputError("a prompt must be a string", found=type(text).__name__)
        if max_tokens is not None and self.min_tokens(text) > max_tokens:
            found = f"at least {self.min_tokens(text)} tokens, for {len(text)} characters"
            hint = "shorten it, or raise --max-model-len or --kv-cache-memory if the model and the memory allow"
            raise ContextLengthError("the prompt is too long", expected=f"at most {max_tokens} tokens", found=found, hint=hint)
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary (a model's padding) decode to ""."""
        return self._backend.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: those of a text, or of a part of a character. Unknown ids have none."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = byte_alphabet()
            in_alphabet = alphabet.keys() >= set(token)  # false for some added tokens, which are literal text
            return bytes(alphabet[c] for c in token) if in_alphabet else token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render `messages` as text; see `ChatTemplate.render`."""
        return self._chat_template.render(messages, self._special, **options)

    def template_uses(self, name: str) -> bool:
        """Whether a chat template, also one for conversations with tools, has a variable of this name, or at least the word."""
        sources = (self._chat_template.source, self._chat_template.tool_source)
        return any(re.search(rf"\b{re.escape(name)}\b", source or "") for source in sources)

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the special tokens, which `skip_special_tokens` leaves out."""
        return frozenset(self._special_texts)

    @property
    def tool_template(self) -> str | None:
        """The source of the chat template for conversations with tools, by which their format can be recognised."""
        return self._chat_template.tool_source


def _optional(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; {} if it is absent."""
    return read_json(path, limit=MAX_SMALL_FILE, error=TokenizerError) if present(path) else {}


def _special_tokens(path: Path, values: Mapping[str, Any]) -> dict[str, str | None]:
    """Name → text of the special tokens (bos_token, …) that a file sets, possibly to null."""
    texts: dict[str, str | None] = {}
    for name in filter(values.__contains__, _SPECIAL_NAMES):
        value = values[name]
        texts[name] = value.get("content", 0) if isinstance(value, dict) else value  # an AddedToken or its text
        if not isinstance(texts[name], str | None):
            raise TokenizerError(f"{name} is neither a string nor an AddedToken", where=path, found=shortened(repr(value), 80))
    return texts


def _check_added_tokens(added: Any, backend: Backend, path: Path) -> None:
    """Warn of tokens in `added` (id → token, from tokenizer_config.json) that tokenizer.json lacks or has with other ids."""
    tokens = added.items() if isinstance(added, dict) else ()
    texts = {key: token.get("content") for key, token in tokens if isinstance(token, dict)}
    other = [text for key, text in texts.items() if isinstance(text, str) and str(backend.token_to_id(text)) != key]
    if other:
        _warn(f"{path}: added_tokens_decoder is ignored; tokenizer.json lacks these tokens, or has other ids: {other[:8]}")


def _warn(text: str) -> None:
    warnings.warn(printable(shortened(text, 1000)), stacklevel=2)


def eos_token_ids(
    generation_config: dict[str, Any] | None, config: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The ids that end a sequence, from generation_config.json, else config.json, else the tokenizer.

    `eos_token_id` is an id or a list of ids. If it is absent, null or empty, the next source decides.

    Raises:
        ConfigError: a value is not a token id.
    """
    for where, source in (("generation_config.json", generation_config or {}), ("config.json", config)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if type(token) is not int or token < 0:
                raise ConfigError("eos_token_id is not a token id", where=where, expected="integers ≥ 0", found=value)
        if ids:
            return tuple(dict.fromkeys(ids))
    return () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
