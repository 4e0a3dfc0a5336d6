"""The tokenizer against transformers, and incremental decoding against decoding the whole text at once."""

import json
import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import decoded, llama_like
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from minirt.errors import ConfigError, InputError, TokenizerError
from minirt.text.detokenizer import incremental_decoder
from minirt.text.tokenizer import Tokenizer, eos_token_ids

BOS, EOS = "<s>", "</s>"
TEXTS = [
    *("Hello, world!", " leading and trailing ", "", " ", "\n\n\tdef f(x):\n    return x\n", "12345678901234567890"),
    *("你好，世界。龘", "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈 done", "naïve cafe\u0301 ﬁ", "שלום मस्ते", "nul \x00 and \x7f"),
    *("a<|im_end|>b <|im_start|> c", "\ufffd real replacement \ufffd"),
]
ONE = {"role": "user", "content": "Hi"}
CHATS = [
    [ONE], [{"role": "system", "content": "Be brief & <kind>."}, {"role": "user", "content": "你好 👩‍👩‍👧‍👦"}],
    [{"role": "user", "content": " one "}, {"role": "assistant", "content": "two\n"}, {"role": "user", "content": ""}],
]  # fmt: skip


def save(library: HFTokenizer, folder: Path, **tokenizer_config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config})
    return folder


def write(folder: Path, name: str, value: Any) -> Path:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def spaces() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def sentencepiece_like() -> HFTokenizer:
    """Like Llama 2's: ▁ for spaces, byte tokens for characters outside the vocabulary, a BOS before each text."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehlow好\ufffd", "▁a", "▁b", "ab", "▁ab", "▁▁", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("h", "e"), ("l", "l"), ("he", "ll")]
    merges += [("hell", "o"), ("▁", "hello")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = HFTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(spaces())
    library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    library.add_special_tokens(["<unk>", BOS, EOS])
    return library


def byte_level() -> HFTokenizer:
    """A byte-level BPE whose merges split Chinese characters and emoji, with added tokens of unusual spelling."""
    library = HFTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": [BOS, EOS], "initial_alphabet": letters, "show_progress": False}
    library.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=330, **options))
    # Two tokens outside the byte alphabet ("好", a space), two inside it and so read as bytes ("é" is byte E9). None is special.
    library.add_tokens(["<好>", "two words", "é", "plain"])
    return library


def other(model: models.Model, decoder: decoders.Decoder | None) -> HFTokenizer:
    library = HFTokenizer(model)
    library.decoder = decoder  # type: ignore[assignment]
    library.add_special_tokens([BOS, EOS])
    return library


words = ["<unk>", BOS, EOS, "▁", "▁a", "a", "the", "##re", ".", "do", "n't", "##!", "好", "b</w>", "c</w>"]
WORDS = {word: i for i, word in enumerate(words)}
KINDS: dict[str, Callable[[], HFTokenizer]] = {
    "sentencepiece_like": sentencepiece_like, "byte_level": byte_level,
    "metaspace": lambda: other(models.BPE(WORDS, []), decoders.Metaspace()),
    "wordpiece": lambda: other(models.WordPiece(WORDS, unk_token="<unk>"), decoders.WordPiece(cleanup=True)),
    "end_of_word": lambda: other(models.BPE(WORDS, []), decoders.BPEDecoder()),
    "no_decoder": lambda: other(models.BPE(WORDS, []), None),
    "emptying": lambda: other(models.BPE(WORDS, []), decoders.Sequence([decoders.Replace("the", ""), *spaces()])),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: save(build(), root / name, bos_token=BOS, eos_token=EOS) for name, build in KINDS.items()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path], smollm2: Path) -> dict[str, Tokenizer]:
    return {name: load(folder) for name, folder in folders.items()} | {"smollm2": load(smollm2)}


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder) or pytest.fail(f"no tokenizer in {folder}")


def hf(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece_like", "byte_level"])
def test_encode_and_decode_agree_with_transformers(name: str, smollm2: Path, folders: dict[str, Path]) -> None:
    folder = smollm2 if name == "smollm2" else folders[name]
    ours, theirs = load(folder), hf(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.token_id(EOS if name != "smollm2" else "<|im_end|>") == ours.eos_token_id
    assert ours.token_id("no such token") is None
    assert ours.decode([ours.vocab_size, *ours.encode("hello"), 10**6]) == "hello"  # ids of a padded vocabulary decode to ""


@pytest.mark.parametrize("post_processor", ["none", "empty", "bos"])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_decided_as_transformers_does(post_processor: str, add_bos_token: bool | None, tmp_path: Path) -> None:
    library = sentencepiece_like()
    single, tokens = (f"{BOS} $A", [(BOS, 1)]) if post_processor == "bos" else ("$A", [])
    template = processors.TemplateProcessing(single=single, special_tokens=tokens)
    library.post_processor = None if post_processor == "none" else template  # type: ignore[assignment]
    options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    folder = save(library, tmp_path, bos_token=BOS, eos_token=EOS, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ids = load(folder).encode("hello")
    told = [str(w.message) for w in seen if "add_bos_token is ignored, as in transformers 5" in str(w.message)]
    assert len(told) == len(seen) == (add_bos_token is not None and add_bos_token != (post_processor == "bos"))
    assert ids == hf(folder).encode("hello")
    assert (ids[0] == 1) == (post_processor == "bos")


def test_never_a_second_bos(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece_like"]
    assert tokenizer.encode(BOS + "hello") == [1, *tokenizer.encode("hello")[1:]]
    assert tokenizer.encode(BOS) == tokenizer.encode("") == [1]
    assert tokenizer.encode("a" + BOS).count(1) == 2  # a BOS later in the user's text is kept
    for text in (BOS + "a", "a" + BOS):
        assert len(tokenizers["byte_level"].encode(text)) == 2  # this tokenizer adds no BOS, so none is removed


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(max_length=4)
    library.enable_padding(length=50)
    assert load(save(library, tmp_path)).encode(TEXTS[0]) == byte_level().encode(TEXTS[0]).ids


def test_eos_without_the_special_flag_is_skipped_all_the_same(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, eos_token="plain")
    tokenizer, ids = load(folder), load(folder).encode("aplainb")
    assert tokenizer.eos_token_id in ids
    assert join(tokenizer, ids) == tokenizer.decode(ids) == hf(folder).decode(ids, skip_special_tokens=True) == "ab"


def test_special_tokens_as_objects_and_null(tmp_path: Path) -> None:
    added = {"__type": "AddedToken", "content": EOS, "lstrip": False, "normalized": False, "rstrip": False}
    folder = save(byte_level(), tmp_path, bos_token=None, eos_token=added)
    assert (load(folder).bos_token_id, load(folder).eos_token_id) == (None, 1)
    with pytest.raises(TokenizerError, match=r"eos_token.*<gone>"):
        load(save(byte_level(), tmp_path, bos_token=BOS, eos_token="<gone>"))
    with pytest.warns(UserWarning, match=r"pad_token.*<gone>"):  # accepted, because generation needs no padding
        load(save(byte_level(), tmp_path, pad_token="<gone>"))


OLDER: list[dict[str, Any]] = [
    {"bos_token": BOS, "eos_token": BOS}, {"bos_token": None, "eos_token": EOS}, {"eos_token": EOS}, {},
]  # fmt: skip


@pytest.mark.parametrize("older", OLDER, ids=range(len(OLDER)))
@pytest.mark.parametrize("newer", [{}, {"bos_token": None, "eos_token": EOS}, {"bos_token": BOS, "eos_token": EOS}], ids=range(3))
@pytest.mark.parametrize("current", [False, True])
def test_special_tokens_in_two_files(older: dict, newer: dict, current: bool, tmp_path: Path) -> None:
    """Catches the wrong file that wins, and one that wins without a word: another end of a text, or a BOS that is not added."""
    decoder: dict[str, Any] = {"added_tokens_decoder": {}} if current else {}
    folder = write(save(byte_level(), tmp_path, **newer, **decoder), "special_tokens_map.json", older)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = load(folder)
    differ = [name for name in ("bos_token", "eos_token") if name in older and name in newer and older[name] != newer[name]]
    assert [name for name in ("bos_token", "eos_token") if any(name in str(w.message) for w in seen)] == differ
    assert all(("tokenizer_config.json takes precedence" in str(w.message)) == current for w in seen)
    theirs = hf(folder)
    if newer or not current:  # of a current tokenizer_config.json that names no tokens, transformers knows none
        assert (found.bos_token_id, found.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_what_is_no_text_and_no_id_is_an_input_error(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    bad_texts: list[Any] = [None, b"bytes", 3, ["list"], "lone \ud800 surrogate"]
    bad_ids: list[Any] = [-1, 2**40, "a", None, 1.5]
    for text, token in zip(bad_texts, bad_ids, strict=True):
        with pytest.raises(InputError):
            tokenizer.encode(text)
        with pytest.raises(InputError):
            tokenizer.decode([token])
        with pytest.raises(InputError):
            incremental_decoder(tokenizer).push(token)


def test_no_tokenizer_and_foreign_tokenizers(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    assert Tokenizer.load(tmp_path) is None
    for name in ("tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(TokenizerError, match=rf"tokenizer\.json: is missing.*{name}"):
            Tokenizer.load(tmp_path)
        (tmp_path / name).unlink()


def with_part(**parts: dict[str, Any]) -> str:
    return json.dumps(json.loads(sentencepiece_like().to_str()) | parts)


# It uses a token that it does not define: the library panics at the first encode.
UNDEFINED: list[dict] = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
PANIC = {"type": "TemplateProcessing", "single": UNDEFINED, "pair": [], "special_tokens": {}}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
CTC = {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True}
LATE = {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}
BAD: dict[str, list[str | bytes]] = {
    "tokenizer.json": [
        *("", "[]", '{"version": "1.0"}', b'{"version": "\xff"}', byte_level().to_str()[:-20]),
        *(with_part(post_processor=PANIC), with_part(added_tokens=PANIC)),
        *(with_part(decoder=decoder) for decoder in (CTC, LATE, STRIP | {"start": 2}, STRIP | {"stop": 1})),
    ],
    "tokenizer_config.json": [
        *("{", "[]", b"\xff\xfe", "[" * 100_000, '{"eos_token": 7}', '{"eos_token": {"special": true}}'),
        *('{"chat_template": 7}', '{"chat_template": [7]}', '{"chat_template": [{"name": "rag", "template": "x"}]}'),
        '{"chat_template": [{"name": "default", "template": 3}]}',
    ],
    "special_tokens_map.json": ['"text"'],
    "added_tokens.json": ["[]"],
    "chat_template.jinja": [b"\xff"],
    "chat_template.json": ["[]", '{"chat_template": 7}', '{"chat_template": {"rag": "x"}}'],
    "additional_chat_templates/tool_use.jinja": [b"\xff"],
}
BAD_FILES = [(name, content) for name, contents in BAD.items() for content in contents]


@pytest.mark.parametrize(("name", "content"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_damaged_file_is_named(name: str, content: str | bytes, tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder)
    assert caught.value.where == folder / name


@pytest.mark.parametrize(("template", "history"), [
    ("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[a]<t>{% endif %}", True),
    ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", True),  # it adds nothing
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ 'a' if add_generation_prompt else 'b' }}", False),  # no beginning
    ("{{ messages[0].content if add_generation_prompt else raise_exception('no') }}", False),
])  # fmt: skip
@pytest.mark.parametrize("library", [byte_level, llama_like])
def test_where_the_history_of_a_conversation_ends(library: Any, template: str, history: bool, tmp_path: Path) -> None:
    """The tokens before it are those of the text without a generation prompt, also in vocabularies that add a space."""
    tokenizer = Tokenizer.load(save(library(), tmp_path, chat_template=template))
    for chat in ([ONE], [{"role": "user", "content": "Once upon a time\n"}]):
        tokens = tokenizer.encode_chat(chat, with_history=True)
        assert tokens == tokenizer.encode_chat(chat)
        assert tokenizer.encode_chat(chat).history_len == 0, "nobody asked"
        if history:
            text = tokenizer.render_chat(chat, add_generation_prompt=False)
            assert tokens[: tokens.history_len] == tokenizer.encode_plain(text)
        else:
            assert tokens.history_len == 0


FAILING = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    *((text, "UndefinedError") for text in ("{{ messages[7].content }}", "{{ nothing.at_all }}")),
    *((text, "TemplateSyntaxError") for text in ("{% for %}", "{% generation %}", "{{ messages")),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ raise_exception.__globals__[0] }}", "SecurityError"),
    ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ("{{ 1 + 'a' }}", "TypeError"),
    ("{% include 'file' %}", "TypeError"),
]


@pytest.mark.parametrize(("template", "word"), FAILING, ids=range(len(FAILING)))
def test_failing_template(template: str, word: str, tmp_path: Path) -> None:
    tokenizer = load(save(byte_level(), tmp_path, chat_template=template))
    for _ in range(2):
        with pytest.raises(TokenizerError, match=word) as caught:
            tokenizer.encode_chat([ONE])
        assert caught.value.where == tmp_path / "tokenizer_config.json"
        assert ("correct the template" in str(caught.value)) == (word == "TemplateSyntaxError")
    assert tokenizer.encode("a")  # plain prompts still work
    tokenizer = load(save(byte_level(), tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="plain prompt"):
        tokenizer.render_chat(CHATS[0])


def pieces_of(tokenizer: Tokenizer, ids: Iterable[int], skip: bool = True) -> list[str]:
    decoder = incremental_decoder(tokenizer, skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def whole(name: str, tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The text of all tokens at once. With byte tokens, wrong bytes do not change characters before them, as in the library."""
    if name == "sentencepiece_like":
        return decoded(tokenizer._library._tokenizer, ids, skip)
    return tokenizer.decode(ids, skip)


def join(tokenizer: Tokenizer, ids: Iterable[int], skip: bool = True) -> str:
    return "".join(pieces_of(tokenizer, ids, skip))


@pytest.mark.parametrize("name", [*KINDS, "smollm2"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_text(name: str, data: st.DataObject, skip: bool, tokenizers: dict[str, Tokenizer]) -> None:
    """For any ids: broken characters, byte runs cut by special tokens, ids that do not exist."""
    tokenizer = tokenizers[name]
    low = st.integers(0, min(290, tokenizer.vocab_size - 1))  # bytes and special tokens
    ids = data.draw(st.lists(low | st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert join(tokenizer, ids, skip) == whole(name, tokenizer, ids, skip)


@pytest.mark.parametrize("name", [*KINDS, "smollm2"])
def test_texts_and_every_low_token_alone_and_in_a_row(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    row = list(range(min(tokenizer.vocab_size, 400)))
    texts = [tokenizer.encode(text) for text in [*TEXTS, "👩‍👩‍👧‍👦好\ufffd好 \ufffd".join(TEXTS)]]
    for ids in [row, row[::-1], *([i] for i in row), *texts]:
        assert join(tokenizer, ids, False) == whole(name, tokenizer, ids, False)


@pytest.mark.parametrize("name", ["smollm2", "byte_level"])
def test_character_is_sent_with_its_last_byte(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """With one byte per token, a character is sent when its last byte arrives: not earlier, and only once."""
    tokenizer = tokenizers[name]
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = [tokenizer.token_id(letter) for letter in splitter.pre_tokenize_str("a龘👧")[0][0]]
    assert len(ids) == 8
    whole = [i for i in ids if i is not None]
    assert pieces_of(tokenizer, whole) == ["a", "", "", "龘", "", "", "", "👧", ""]
    lead, letter = whole[4], whole[0]  # a broken character is sent as soon as it is known to be broken
    assert pieces_of(tokenizer, [lead, lead, letter, lead]) == ["", "\ufffd", "\ufffda", "", "\ufffd"]


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece_like"])
def test_work_per_token_does_not_grow(name: str, tokenizers: dict[str, Tokenizer], monkeypatch: Any) -> None:
    """Counts the ids passed to the library's decode: a few per token, amortized, even in a run of byte tokens."""
    tokenizer = tokenizers[name]
    decoder, library = incremental_decoder(tokenizer), Mock(wraps=tokenizer._library)
    monkeypatch.setattr(decoder, "_library", library)
    ids = [3 + 0xF0] * 1000 + random.Random(1).choices(range(tokenizer.vocab_size), k=1000)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert text == whole(name, tokenizer, ids, True)
    assert sum(len(call.args[0]) for call in library.decode.call_args_list) <= 5 * len(ids)


# generation_config.json, config.json, the ends that they state, these with the tokenizer's, and the warning.
ENDS: list[tuple[dict | None, dict, tuple[int, ...], tuple[int, ...], str]] = [
    ({"eos_token_id": [5, 1, 5]}, {"eos_token_id": 5}, (5, 1), (5, 1), ""), ({"eos_token_id": 1}, {}, (1,), (1,), ""),
    ({"eos_token_id": 0}, {}, (0,), (0, 1), "eos_token_id is [0]; 1 ('</s>'), the tokenizer's eos_token, ends a text, too"),
    ({"eos_token_id": [5, 1]}, {"eos_token_id": [1, 9]}, (5, 1), (5, 1), "config.json: the eos_token_id [9] is not used"),
    ({"eos_token_id": None}, {"eos_token_id": [9, 1]}, (9, 1), (9, 1), ""),
    ({"eos_token_id": []}, {"eos_token_id": 9}, (9,), (9, 1), "config.json: eos_token_id is [9]; 1 ('</s>'), the tokenizer's"),
    (None, {"eos_token_id": None}, (), (1,), ""), ({}, {}, (), (1,), ""),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "config", "stated", "expected", "told"), ENDS, ids=range(len(ENDS)))
def test_a_text_ends_with_each_end_that_the_files_name(
    generation: dict | None, config: dict, stated: tuple, expected: tuple, told: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """Catches an answer that runs on to max_tokens, because one file silently wins over another."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert eos_token_ids(generation, config, tokenizers["byte_level"]) == expected
    assert [told in str(w.message) for w in seen] == ([True] if told else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert eos_token_ids(generation, config, None) == stated


def test_the_end_of_a_turn_in_the_template_ends_a_text(tmp_path: Path) -> None:
    """Catches a tokenizer whose eos_token is that of the base model: the chat template ends each answer with another token."""
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}plain\n{% endfor %}"
    tokenizer = load(save(byte_level(), tmp_path, bos_token=BOS, eos_token=EOS, chat_template=template))
    end = tokenizer.token_id("plain")
    assert end is not None
    assert tokenizer.end_of_turn_id == end
    assert eos_token_ids(None, {}, tokenizer) == (1, end)
    with pytest.warns(UserWarning, match=rf"eos_token_id is 1?.*{end} \('plain'\), with which the chat template ends an answer"):
        assert eos_token_ids({"eos_token_id": 1}, {}, tokenizer) == (1, end)
    assert load(save(byte_level(), tmp_path / "none", eos_token=EOS)).end_of_turn_id is None


def test_bad_eos_ids() -> None:
    for value in (True, False, -1, "2", 2.0, [1, None], [[1]], {"a": 1}):
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
            eos_token_ids({"eos_token_id": value}, {}, None)
        with pytest.raises(ConfigError, match=r"^config\.json: eos_token_id"):
            eos_token_ids(None, {"eos_token_id": value}, None)
