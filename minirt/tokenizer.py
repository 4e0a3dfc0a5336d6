"""Text to token ids and back: prompts, chat templates, streaming detokenization, stop strings, end-of-sequence ids.

`tokenizers` and jinja2 do the work; they are imported when a tokenizer is loaded or a template rendered, not before.
"""

import codecs
import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirt.errors import ConfigError, InputError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

# Files of other tokenizer formats: a folder that has one of them has a tokenizer, in a form that is not read here.
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Decoders that work token by token (beyond byte runs and the start of the text), so that a window decodes exactly.
_WINDOW_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a file, the tokenizers library's panics included, into a TokenizerError."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A Rust panic arrives as PanicException, which derives from BaseException and cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"is damaged or unreadable: {error}", where=path, hint="get the file again") from error
        raise


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file (all that are read so are optional)."""
    if not path.exists():
        return {}
    with _reported(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("not a JSON object")
        return value


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, … by name, from tokenizer_config.json; what is absent there, from the older map file."""
    texts: dict[str, str | None] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        values = _read_object(path)
        for name in filter(values.__contains__, _SPECIAL_NAMES):
            value = values[name]
            texts[name] = value.get("content", 0) if isinstance(value, dict) else value  # an AddedToken or its text
            if not isinstance(texts[name], str | None):
                raise TokenizerError(f"{name} is neither a string nor an AddedToken", where=path, found=repr(value))
    return {name: text for name, text in texts.items() if text}


def _read_template(folder: Path) -> tuple[str | None, Path]:
    """The chat template, or None, and the file that holds it. chat_template.jinja wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        with _reported(path):
            return path.read_text(encoding="utf-8"), path
    path = folder / "tokenizer_config.json"
    with _reported(path):
        value = _read_object(path).get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            if "default" not in named:
                raise KeyError("no chat template is named default")
            value = named["default"]
        if value is not None and not isinstance(value, str):
            raise TypeError("a chat_template is neither a string nor a list of named strings")
        return value, path


def _decoder_steps(backend: "tokenizers.Tokenizer", path: Path) -> list[str]:
    """The types of the decoder's steps, in order; [] for no decoder. Refuses those that cannot be streamed exactly."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())  # the library's own serialization
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    # A wider strip would need more than one token of context; one at the end takes back text that was already sent.
    bad = any(step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0) for step in steps)
    bad |= "Fuse" in names and not {"Strip"}.issuperset(names[names.index("Fuse") + 1 :])  # would see the whole text
    if names != ["ByteLevel"] and (bad or not _WINDOW_DECODERS.issuperset(names)):
        raise TokenizerError("this decoder cannot be streamed exactly", where=path, found=json.dumps(steps))
    return names


class Tokenizer:
    """A model's tokenizer.json with its special tokens and chat template. Immutable after `load`."""

    def __init__(self, backend: "tokenizers.Tokenizer", folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._backend = backend
        backend.no_truncation()  # if tokenizer.json asks for it, prompts would be cut without a word
        backend.no_padding()
        steps = _decoder_steps(backend, path)
        self._byte_level, self._byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self._template, self._template_file = _read_template(folder)
        self._special = _read_special_tokens(folder)
        ids = {name: self.token_id(text) for name, text in self._special.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        if lost := [name for name in ("bos_token", "eos_token") if ids.get(name, 0) is None]:
            raise TokenizerError("is not in the vocabulary", where=path, found={n: self._special[n] for n in lost})
        # As transformers does: a token named special is one, also where tokenizer.json lacks the flag.
        flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        named = [text for name, text in self._special.items() if ids[name] is not None and text not in flagged]
        backend.add_special_tokens(named)
        self._special_texts = frozenset(flagged.union(named))
        with _reported(path):  # a faulty post-processor shows at the first use
            self._adds_bos = self.bos_token_id in backend.encode("", add_special_tokens=True).ids[:1]

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer in `folder`, or None if it has none. TokenizerError if damaged, or only in another format."""
        import tokenizers

        path = folder / "tokenizer.json"
        if path.exists():
            with _reported(path):
                return cls(tokenizers.Tokenizer.from_file(str(path)), folder)
        if found := [name for name in _OTHER_FILES if (folder / name).exists()]:
            hint = "convert it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError("is missing, and no other format is read", where=path, found=found, hint=hint)
        return None

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. The model's own vocabulary may be larger (padded)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text`, or None."""
        return self._backend.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what tokenizer.json's post-processor adds, but never a second BOS.

        It alone decides on the BOS, as in transformers 5: beside a tokenizer.json, `add_bos_token` counts for nothing.
        """
        ids = self._encode(text, add_special_tokens=True)
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_token_id] else ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of `render_chat(messages)`. The template writes the special tokens; none are added."""
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InputError("a prompt must be a string", found=type(text).__name__)
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise InputError("the text is not valid Unicode (a lone surrogate)", found=ascii(text[:80])) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids beyond the vocabulary (a model's padding) decode to nothing."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InputError(f"not token ids: {error}", expected="integers from 0 to 2**32 - 1") from error

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """`messages`, each {"role": str, "content": str}, through the chat template, with the assistant's header.

        Raises InputError for other messages, TokenizerError when there is no template, or when it fails or refuses.
        """
        plain = _checked_messages(messages)
        if self._template is None:
            raise TokenizerError("there is no chat template", where=self._template_file, hint="use a plain prompt")
        try:
            names = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
            return self._compiled_template.render(names | self._special)  # the names that transformers gives
        except Exception as error:  # the template is a program from outside: anything it raises is its fault
            what, hint = f"the chat template failed: {type(error).__name__}: {error}", "check the order of the roles"
            raise TokenizerError(what, where=self._template_file, hint=hint) from error

    @functools.cached_property
    def _compiled_template(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012  # marks what is trained on; when generating, a plain block

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        extensions = [Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._template or "")


def _checked_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("a chat is a list of one or more messages", found=repr(messages)[:80])
    for i, message in enumerate(messages):
        good = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not good or not all(isinstance(value, str) for value in message.values()):
            raise InputError(f"messages[{i}] is not a role and a content, both texts", found=repr(message)[:80])
    return [dict(message) for message in messages]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level token (GPT-2): printable Latin-1 is itself, others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class IncrementalDecoder:
    """Text of a growing token sequence. The pieces joined are exactly `tokenizer.decode(all ids)`.

    Byte-level tokenizers: each token's bytes go through an incremental UTF-8 decoder, so no piece ends inside a
    character. Others: a token is decoded after the one before it, which settles leading spaces; a run of byte tokens
    (<0xE4>…) is held until it ends, as one bad byte turns the whole run into U+FFFD. Amortized constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer._backend
        self._skipped = tokenizer._special_texts if skip_special_tokens else frozenset[str]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer._byte_level else None
        self._byte_fallback = tokenizer._byte_fallback
        self._window: list[int] = []  # the last token of the text sent, then the tokens held
        self._sent = 0  # how many characters of the window's text are sent

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly "". InputError for a negative id."""
        try:
            token = self._backend.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise InputError("not a token id", found=repr(token_id)) from error
        if token is None or token in self._skipped:
            return ""
        if self._utf8 is not None:
            alphabet = _byte_alphabet()
            in_alphabet = alphabet.keys() >= set(token)  # an added token need not be: then it stands for itself
            return self._utf8.decode(bytes(alphabet[c] for c in token) if in_alphabet else token.encode())
        self._window.append(token_id)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return ""
        text = self._unsent()
        if text:  # a token without text would be no context for the next
            self._window = [token_id]
            self._sent = len(self._backend.decode(self._window, skip_special_tokens=False))
        return text

    def flush(self) -> str:
        """What is still held; call once, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text, self._window, self._sent = self._unsent(), [], 0
        return text

    def _unsent(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=False)[self._sent :]


class StopStrings:
    """Finds the first stop string in streamed text and keeps it, and all that follows, from being sent.

    The first is the one completed first; of several that end at one character, the longest. So the outcome does not
    depend on how the text is cut into pieces, and nobody waits for a longer match once one is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError("not a list of non-empty strings", where="stop", found=repr(stops)[:80])
        self._stops = tuple(stops)
        self._longest_tail = max(map(len, stops), default=1) - 1
        self._held, self._found = "", False

    def push(self, text_piece: str) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string was found). After a find: ("", True) for good."""
        if self._found:
            return "", True
        text = self._held + text_piece
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        if matches := [(start + length, start) for start, length in starts if start >= 0]:
            self._found, self._held = True, ""
            return text[: min(matches)[1]], True
        tails = (text[-n:] for n in range(min(self._longest_tail, len(text)), 0, -1))
        self._held = next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stops)), "")
        return text[: len(text) - len(self._held)], False

    def flush(self) -> str:
        """The text held back, now that no more will come; "" after a find."""
        text, self._held = self._held, ""
        return text


def eos_token_ids(
    generation_config: dict[str, Any] | None, config: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every id that ends a sequence: generation_config.json's, else config.json's, else the tokenizer's.

    Each is an id or a list of ids; absent, null and empty pass on to the next. ConfigError when a value is not an id.
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
