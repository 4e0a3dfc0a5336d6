"""`Tokenizer`: text to token ids and back, chat templates, and the ids that end a sequence.

Built on `tokenizers` and jinja2, which are imported only when a tokenizer is loaded or a template is rendered.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirt.errors import ConfigError, InputError, TokenizerError
from minirt.text.chat_template import ChatTemplate
from minirt.text.files import damage_reported, read_json_object

if TYPE_CHECKING:
    import tokenizers

# Files of tokenizer formats that minirt does not read. A folder with one of them but no tokenizer.json is an error.
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Decoders that work token by token, except for byte runs and the start of the text. With them, a window decodes exactly.
_WINDOW_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens, name → text (bos_token, …), from tokenizer_config.json, or else from special_tokens_map.json."""
    texts: dict[str, str | None] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        values = read_json_object(path)
        for name in filter(values.__contains__, _SPECIAL_NAMES):
            value = values[name]
            texts[name] = value.get("content", 0) if isinstance(value, dict) else value  # an AddedToken or its text
            if not isinstance(texts[name], str | None):
                raise TokenizerError(f"{name} is neither a string nor an AddedToken", where=path, found=repr(value))
    return {name: text for name, text in texts.items() if text}


def _decoder_steps(backend: "tokenizers.Tokenizer", path: Path) -> list[str]:
    """The types of the decoder's steps, in order; [] without a decoder.

    Raises:
        TokenizerError: the decoder cannot be streamed exactly.
    """
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())  # the library's own serialization
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    # A strip of several characters needs more than one token of context. A strip at the end takes back emitted text.
    bad = any(step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0) for step in steps)
    bad |= "Fuse" in names and not {"Strip"}.issuperset(names[names.index("Fuse") + 1 :])  # steps after Fuse see the whole text
    if names != ["ByteLevel"] and (bad or not _WINDOW_DECODERS.issuperset(names)):
        raise TokenizerError("this decoder cannot be streamed exactly", where=path, found=json.dumps(steps))
    return names


class Tokenizer:
    """A model's tokenizer.json with its special tokens and chat template. Immutable after `load`."""

    def __init__(self, backend: "tokenizers.Tokenizer", folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._backend = backend
        backend.no_truncation()  # truncation set in tokenizer.json would silently cut prompts
        backend.no_padding()
        steps = _decoder_steps(backend, path)
        self._byte_level, self._byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self._chat_template = ChatTemplate(folder)
        self._special = _read_special_tokens(folder)
        ids = {name: self.token_id(text) for name, text in self._special.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        if lost := [name for name in ("bos_token", "eos_token") if ids.get(name, 0) is None]:
            raise TokenizerError("is not in the vocabulary", where=path, found={n: self._special[n] for n in lost})
        # As in transformers, a token with a name such as bos_token is special even if tokenizer.json does not flag it.
        flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        named = [text for name, text in self._special.items() if ids[name] is not None and text not in flagged]
        backend.add_special_tokens(named)
        self._special_texts = frozenset(flagged.union(named))
        with damage_reported(path):  # a faulty post-processor fails at its first use
            self._adds_bos = self.bos_token_id in backend.encode("", add_special_tokens=True).ids[:1]

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Load the tokenizer in `folder`; None if the folder has none.

        Raises:
            TokenizerError: a file is damaged, or the tokenizer has another format than tokenizer.json.
        """
        import tokenizers

        path = folder / "tokenizer.json"
        if path.exists():
            with damage_reported(path):
                return cls(tokenizers.Tokenizer.from_file(str(path)), folder)
        if found := [name for name in _OTHER_FILES if (folder / name).exists()]:
            hint = "convert it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError("is missing, and other formats are not supported", where=path, found=found, hint=hint)
        return None

    @functools.cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included. The model's vocabulary may be larger (padded)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template.source is not None

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text`, or None."""
        return self._backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens of tokenizer.json's post-processor, but never a second BOS.

        As in transformers 5, only the post-processor decides whether a BOS is added; `add_bos_token` is ignored.
        """
        ids = self._encode(text, add_special_tokens=True)
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_token_id] else ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of `render_chat(messages)`. The template writes all special tokens; the tokenizer adds none."""
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InputError("a prompt must be a string", found=type(text).__name__)
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise InputError("the text is not valid Unicode (a lone surrogate)", found=ascii(text[:80])) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids outside the vocabulary (a model's padding) decode to ""."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InputError(f"not token ids: {error}", expected="integers from 0 to 2**32 - 1") from error

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """Render `messages` as text; see `ChatTemplate.render`."""
        return self._chat_template.render(messages, self._special)


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
