"""`Tokenizer`: text to token ids and back, chat templates, and the ids that end a sequence.

Built on `tokenizers` and jinja2, which are imported only when a tokenizer is loaded or a template is rendered.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minirt.errors import ConfigError, ContextLengthError, InputError, TokenizerError, printable, quoted, shortened
from minirt.files import parse_json, present, read_json, read_text
from minirt.text.chat_template import ChatTemplate
from minirt.text.tokenizer_file import byte_alphabet, check, decoder_steps, splits_wrongly, token_bound
from minirt.text.tokenizers_library import TokenizersLibrary
from minirt.wording import warn

# Files of tokenizer formats that minirt does not read. A folder with one of them but no tokenizer.json is an error.
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BEFORE = ("", "\n", ".", "a", "0", "(", "文")  # texts before a part of a text, of different kinds
_MAX_PIECES = 1 << 18  # whose texts are kept
MAX_TOKENIZER_FILE = 128 << 20  # bytes; the largest known are about 35 MB
MAX_SMALL_FILE = 16 << 20  # tokenizer_config.json and special_tokens_map.json


class ChatTokens(list[int]):
    """Token ids of a conversation's prompt.

    `text`: the rendered conversation.
    `history_len`: how many of them come before the generation prompt, if somebody asked for it; 0: not known.
    """

    text, history_len = "", 0


class Tokenizer:
    """A model's tokenizer.json (`path`) with its special tokens and chat template. Immutable after `load`.

    Attributes:
        special_tokens: the texts of the special tokens, which `skip_special_tokens` leaves out.
        info: tokenizer_config.json with the special tokens as texts, and with the chat template, whichever files have them.
        piece: see `_piece`. It keeps what it has returned.
        serialized: returns it as the content of a tokenizer.json, in which all special tokens are flagged.
        tool_template: the source of the chat template for conversations with tools, by which their format can be recognised.
        min_tokens: a lower bound on the number of token ids of a text, from its number of characters; 0 if there is none. It
            takes almost no time, while tokenizing takes seconds for each megabyte and cannot be interrupted.
    """

    def __init__(self, folder: Path) -> None:
        """Load tokenizer.json and the optional files beside it; see `load`."""
        path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        self.path = path
        text = read_text(path, limit=MAX_TOKENIZER_FILE, error=TokenizerError)
        content = parse_json(text, path, error=TokenizerError)
        older_path = folder / "special_tokens_map.json"
        config, older = _optional(config_path), _optional(older_path)
        self._library = TokenizersLibrary(text.encode(), path)
        check(content, self._library, path)
        self.response_template: Any = config.get("response_template")  # see `minirt.text.response_template`
        steps = decoder_steps(self._library, path)
        self.is_byte_level, self._byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        # Whether a token's text depends on its neighbours, or that of a byte token on its run. Fuse and Strip keep characters.
        after_bytes = steps[steps.index("ByteFallback") + 1 :][:1] if self._byte_fallback else []
        self.has_neighbours = "BPEDecoder" in steps or after_bytes not in ([], ["Fuse"])
        self._special = {name: text for name, text in _joined(older_path, older, config_path, config).items() if text}
        self._chat_template = ChatTemplate(folder, config, self._special)
        self.info: dict[str, Any] = config | self._special | {"chat_template": self._chat_template.source}
        self.serialized = self._library.serialized
        self.has_chat_template, self.tool_template = self._chat_template.source is not None, self._chat_template.tool_source
        _check_added_tokens(config.get("added_tokens_decoder"), self._library, config_path, "added_tokens_decoder")
        older_added = {str(key): {"content": text} for text, key in _optional(folder / "added_tokens.json").items()}
        _check_added_tokens(older_added, self._library, folder, "added_tokens.json")
        ids = {name: self.token_id(text) for name, text in self._special.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        lost = {name: text for name, text in self._special.items() if ids[name] is None}
        if "bos_token" in lost or "eos_token" in lost:
            raise TokenizerError("is not in the vocabulary", where=path, found=shortened(lost))
        if lost:
            _warn(f"{config_path}: ignored, since the vocabulary has no such token: {lost}")
        # As in transformers, a token with a name such as bos_token is special even if tokenizer.json does not flag it.
        flagged = frozenset(text for text, is_special in self._library.added_tokens().items() if is_special)
        named = [text for name, text in self._special.items() if ids[name] is not None and text not in flagged]
        self._library.add_special_tokens(named)
        self.special_tokens = flagged.union(named)
        added = self._library.encode("", True)  # a faulty post-processor fails here
        self._adds_bos = self.bos_token_id in added[:1]
        _check_added_ends(config, {"bos": self._adds_bos, "eos": self.eos_token_id in added[-1:]}, config_path)
        vocabulary = self._library.vocabulary()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if splits_wrongly(content, _optional(folder / "config.json"), len(vocabulary)):
            what = "texts are split otherwise than by Mistral's own tokenizer, so some get other tokens than in training"
            _warn(f"{path}: {what}; load it in transformers with fix_mistral_regex=True, and save it")
        self.min_tokens = token_bound(content, vocabulary)
        # What `IncrementalDecoder` has found out about tokens, with and without special ones.
        self._decoded: dict[bool, dict[int, str | bytes]] = {False: {}, True: {}}
        self.piece = functools.lru_cache(_MAX_PIECES)(self._piece)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Load the tokenizer in `folder`; None if the folder has none.

        Raises:
            TokenizerError: a file is damaged or contradicts itself, or the tokenizer has another format than tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if present(path):
            return cls(folder)
        if others := [name for name in _OTHER_FILES if present(folder / name)]:
            hint = "convert it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError("is missing, and other formats are not supported", where=path, found=others, hint=hint)
        return None

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text`, or None."""
        return self._library.token_to_id(text)

    def ids(self) -> frozenset[int]:
        """All token ids. There may be gaps between them."""
        return frozenset(self._library.vocabulary().values())

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

    def encode_chat(
        self, messages: list[dict[str, Any]], max_tokens: int | None = None, *, with_history: bool = False, **options: Any
    ) -> ChatTokens:
        """Token ids of `render_chat(messages, **options)`. The template writes all special tokens; the tokenizer adds none.

        The text of a special token in a message's content becomes that token, as in transformers. Raises as `encode`.

        `with_history`: find `ChatTokens.history_len`, too, for which the template is rendered a second time.
        """
        text = self.render_chat(messages, **options)
        tokens = ChatTokens(self.encode_plain(text, max_tokens))
        tokens.text = text
        if with_history and options.get("add_generation_prompt", True):
            with suppress(TokenizerError):  # a template may render this conversation with a generation prompt only
                without = self.render_chat(messages, **options | {"add_generation_prompt": False})
                if text.startswith(without):
                    tokens.history_len = self._tokens_before(tokens, text[len(without) :])
        return tokens

    def _tokens_before(self, tokens: list[int], end: str) -> int:
        """Number of a text's tokens before the tokens of its `end`; 0 if the last tokens are not those of `end` alone."""
        for encode in (self.encode_plain, self.encode_inside):  # after a special token, some tokenizers begin as at the start
            last = encode(end) if end else []
            if tokens[len(tokens) - len(last) :] == last:
                return len(tokens) - len(last)
        return 0

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a part of a text, as they are in its middle: without the space that some tokenizers put before a text.

        The text is encoded after another one, if its tokens do not merge with those before. Where none fits, as with a part of a
        word that no token stands for, it is encoded as a whole text.
        """
        for before in _BEFORE:
            start, both = self._encode(before, False), self._encode(before + text, False)
            if both[: len(start)] == start and self._keeps_start(both[len(start) :], text):
                return both[len(start) :]
        return self._encode(text, False)

    def _keeps_start(self, ids: Sequence[int], text: str) -> bool:
        """Whether ids have the same white space at the beginning, inside a text, as `text`."""
        decoded = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return decoded[: len(decoded) - len(decoded.lstrip())] == text[: len(text) - len(text.lstrip())]

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word inside a text without special tokens: within a word, and after a space. Only those that differ.

        None if the word has no tokens, as if a normalizer removes it.
        """
        word = word.lstrip() or word
        plain, spaced = (tuple(self.encode_inside(prefix + word)) for prefix in ("", " "))
        return list(dict.fromkeys((plain, spaced))) if plain else []

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        if not isinstance(text, str):
            raise InputError("a prompt must be a string", found=type(text).__name__)
        if max_tokens is not None and self.min_tokens(text) > max_tokens:
            shown = f"at least {self.min_tokens(text)} tokens, for {len(text)} characters"
            hint = "shorten it; --max-model-len and --kv-cache-memory can raise the limit up to the model's own"
            raise ContextLengthError("the prompt is too long", expected=f"at most {max_tokens} tokens", found=shown, hint=hint)
        return self._library.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary (a model's padding) decode to ""."""
        return self._library.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text, possibly of a part of a character. Unknown ids have none."""
        piece = self.piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def _piece(self, token_id: int) -> bytes | str:
        """The bytes of a token that may stand for part of a character, the text of another; b"" of an unknown id.

        It is that inside a text, where a leading space counts.
        """
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            alphabet = byte_alphabet()
            in_alphabet = alphabet.keys() >= set(token)  # false for some added tokens, which are literal text
            return bytes(alphabet[c] for c in token) if in_alphabet else token.encode()
        first = self.decode([token_id], skip_special_tokens=False)
        text = self.decode([token_id, token_id], skip_special_tokens=False)[len(first) :]
        if self._byte_fallback and (digits := _BYTE_TOKEN.fullmatch(token)) is not None:
            byte = bytes.fromhex(digits[1])
            return byte if text == byte.decode("ascii", "replace") else text  # else a step before has changed it
        return text

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render `messages` as text; see `ChatTemplate.render`."""
        return self._chat_template.render(messages, **options)

    def template_uses(self, name: str) -> bool:
        """Whether a chat template, also one for conversations with tools, has a variable of this name, or at least the word."""
        sources = (self._chat_template.source, self._chat_template.tool_source)
        return any(re.search(rf"\b{re.escape(name)}\b", source or "") for source in sources)

    @functools.cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that the chat template writes at the end of each answer; None if there is no such token."""
        text = self._chat_template.end_of_turn(list(self._library.added_tokens()))
        return None if text is None else self.token_id(text)

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of tokens that were added to the vocabulary, such as ends of turns and the tags of tool calls."""
        ids = (self.token_id(text) for text in {*self._library.added_tokens(), *self.special_tokens})
        return frozenset(token for token in ids if token is not None)

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
            raise TokenizerError(f"{name} is neither a string nor an AddedToken", where=path, found=quoted(value, 80))
    return texts


def _joined(older_path: Path, older: Mapping[str, Any], path: Path, config: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens of special_tokens_map.json (`older`) and of tokenizer_config.json (`config`).

    As in transformers, the older file wins over a tokenizer_config.json without added_tokens_decoder, which is as old.
    """
    texts, named = _special_tokens(older_path, older), _special_tokens(path, config)
    used, ignored = (path, older_path) if "added_tokens_decoder" in config else (older_path, path)
    if other := [name for name in _SPECIAL_NAMES if texts.get(name) != named.get(name) and name in texts.keys() & named.keys()]:
        stated = ", ".join(f"{name} is {texts[name]!r} in {older_path.name}, {named[name]!r} in {path.name}" for name in other)
        _warn(f"{ignored}: {', '.join(other)} ignored, since {used.name} takes precedence: {stated}")
    return texts | named if used == path else named | texts


def _check_added_ends(config: Mapping[str, Any], adds: Mapping[str, bool], path: Path) -> None:
    """Warn if add_bos_token or add_eos_token says otherwise than tokenizer.json, which decides."""
    for name, is_added in adds.items():
        if config.get(f"add_{name}_token") is (not is_added):
            what = f"adds the {name}_token to prompts" if is_added else f"adds no {name}_token to prompts"
            _warn(f"{path}: add_{name}_token is ignored, as in transformers 5: tokenizer.json decides, and {what}")


def _check_added_tokens(added: Any, library: TokenizersLibrary, path: Path, name: str) -> None:
    """Warn of tokens in `added` (id → token; `name` in `path`) that tokenizer.json lacks or has with other ids."""
    tokens = added.items() if isinstance(added, dict) else ()
    texts = {key: token.get("content") for key, token in tokens if isinstance(token, dict)}
    other = [text for key, text in texts.items() if isinstance(text, str) and str(library.token_to_id(text)) != key]
    if other:
        _warn(f"{path}: {name} is ignored; tokenizer.json lacks these tokens, or has other ids: {other[:8]}")


def _warn(text: str) -> None:
    warn(printable(shortened(text, 1000)))


def eos_token_ids(
    generation_config: dict[str, Any] | None, config: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The ids that end a sequence: all that the model's files name as an end.

    These are `eos_token_id` (an id or a list of ids) of generation_config.json, or of config.json if that has none, as in
    transformers; the tokenizer's eos_token, as in vLLM; and the token with which the chat template ends an answer. A warning says
    which ids the latter add, and which of config.json are not used.

    Raises:
        ConfigError: a value is not a token id.
    """
    stated: dict[str, list[int]] = {}
    for file, source in (("generation_config.json", generation_config or {}), ("config.json", config)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise ConfigError("eos_token_id is not a token id", where=file, expected="integers ≥ 0", found=value)
        if ids:
            stated[file] = ids
    stating, ends = next(iter(stated.items()), ("", []))
    joined = list(dict.fromkeys(ends))
    if tokenizer is not None:
        turn = tokenizer.end_of_turn_id, "with which the chat template ends an answer"
        for token, what in ((tokenizer.eos_token_id, "the tokenizer's eos_token"), turn):
            if token is None or token in joined:
                continue
            joined.append(token)
            if stating:
                text = tokenizer.decode([token], skip_special_tokens=False)
                _warn(f"{stating}: eos_token_id is {ends}; {token} ({text!r}), {what}, ends a text, too")
    unused = [token for token in stated.get("config.json", ()) if token not in joined]
    if unused:
        _warn(f"config.json: the eos_token_id {unused} is not used: generation_config.json, which takes precedence, has {ends}")
    return tuple(joined)
