"""What a model folder says about its tokenizer: contradictions are refused, links and special files are errors, and the least
number of tokens that is told from a text's length is never more than it has."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzz.tokenizer_cases import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import add_tokenizer
from tokenizers import Tokenizer as Library
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from minirt.errors import ContextLengthError, TokenizerError
from minirt.text.tokenizer import Tokenizer
from minirt.text.tokenizer_file import _TEKKEN, splits_wrongly, token_bound

BYTE_LEVEL, BYTE_FALLBACK, WORDPIECE, UNIGRAM = (build() for build in BUILDERS[:4])


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder) or pytest.fail("no tokenizer")


def changed(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(text)
    change(content)
    return json.dumps(content)


def save(folder: Path, text: str, **config: Any) -> Path:
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def added(**entry: Any) -> Callable[[dict[str, Any]], Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return lambda content: content["added_tokens"].append(flags | entry)


def last_id(text: str) -> int:
    return max(Library.from_str(text).get_vocab().values())


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "dropout": (BYTE_LEVEL, lambda c: c["model"].update(dropout=0.1), r"dropout is on.*expected null; found 0\.1"),
    "two tokens of one id": (BYTE_LEVEL, lambda c: c["model"]["vocab"].update(b=5), "two tokens have one id"),
    "an added token of the vocabulary": (BYTE_LEVEL, added(id=7, content="a"), "added token 'a'.*expected 7"),
    "an added token on a taken id": (BYTE_LEVEL, added(id=5, content="<x>"), "added token '<x>'.*expected 5"),
    "ids are missing before an added token": (BYTE_LEVEL, added(id=10_000, content="<x>"), "added token '<x>'.*expected 10000"),
    "an unknown token that is missing": (WORDPIECE, lambda c: c["model"].update(unk_token="<no>"), "unk_token '<no>'"),
    "an unknown token that BPE needs": (
        changed(BYTE_FALLBACK, lambda c: c["model"].update(byte_fallback=False)),
        lambda c: c["model"].update(unk_token="\x1b"),
        r"unk_token '\\x1b' is not in the vocabulary",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused(name: str, tmp_path: Path) -> None:
    """The library accepts all of these. Some fail at the first use, the others give wrong or varying tokens."""
    text, change, match = CONTRADICTIONS[name]
    assert load(save(tmp_path, text))
    Library.from_str(changed(text, change))
    with pytest.raises(TokenizerError, match=match) as caught:
        load(save(tmp_path, changed(text, change)))
    assert caught.value.where == tmp_path / "tokenizer.json"


def test_what_is_no_contradiction_loads(tmp_path: Path) -> None:
    for dropout in (None, 0.0):
        load(save(tmp_path, changed(BYTE_LEVEL, lambda c, d=dropout: c["model"].update(dropout=d))))
    load(save(tmp_path, changed(BYTE_LEVEL, lambda c: c["model"].update(unk_token="<no>"))))  # it covers every text without
    next_id = last_id(BYTE_LEVEL) + 1
    tokenizer = load(save(tmp_path, changed(BYTE_LEVEL, added(id=next_id, content="<x>"))))
    assert tokenizer.token_id("<x>") == next_id
    twice = changed(changed(BYTE_LEVEL, added(id=next_id, content="<x>")), added(id=next_id, content="<x>"))
    assert load(save(tmp_path, twice)).token_id("<x>") == next_id


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_repeated_keys_are_refused(name: str, tmp_path: Path) -> None:
    folder = add_tokenizer(tmp_path)
    path = folder / name
    content = path.read_text() if path.exists() else '{"eos_token": "</s>"}'
    path.write_text('{"eos_token": "<s>", "eos_token": "</s>", ' + content.lstrip()[1:])
    with pytest.raises(TokenizerError, match=r"key is repeated.*eos_token") as caught:
        Tokenizer.load(folder)
    assert caught.value.where == path


def test_added_tokens_of_the_other_file(tmp_path: Path) -> None:
    """tokenizer.json decides. What tokenizer_config.json says otherwise is told."""
    known = {"1": {"content": "<s>"}, "2": {"content": "</s>"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decoder in (known, {}, None, [1], {"x": 3}):
            load(save(tmp_path, BYTE_LEVEL, added_tokens_decoder=decoder))
    for extra in ({"9999": {"content": "<new>"}}, {"7": {"content": "<s>"}}):
        with pytest.warns(UserWarning, match=r"added_tokens_decoder is ignored.*(<new>|<s>)"):
            load(save(tmp_path, BYTE_LEVEL, added_tokens_decoder=known | extra))
    older = save(tmp_path, BYTE_LEVEL) / "added_tokens.json"
    older.write_text('{"<s>": 1}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(older.parent)
    older.write_text('{"<new>": 9999}')
    with pytest.warns(UserWarning, match=r"added_tokens\.json is ignored.*<new>"):
        load(older.parent)


FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
FILES += ["chat_template.jinja", "chat_template.json"]


@pytest.mark.parametrize("kind", ["dangling", "loop", "fifo", "device", "folder", "sparse"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_not_a_file_is_an_error_and_not_an_absent_file(name: str, kind: str, tmp_path: Path) -> None:
    folder = add_tokenizer(tmp_path)
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(3 << 30)
    else:
        path.symlink_to({"dangling": "nowhere", "loop": name, "device": "/dev/zero"}[kind])
    with pytest.raises(TokenizerError, match=r"not a regular file|leads nowhere|symbolic links|too large") as caught:
        Tokenizer.load(folder)
    assert caught.value.where == path


def bound(text: str) -> Callable[[str], int]:
    return token_bound(json.loads(text), Library.from_str(text).get_vocab())


def stripping(text: str) -> str:
    return changed(text, added(id=last_id(text) + 1, content="<strip>", lstrip=True, rstrip=True))


def without_letters(text: str, letters: str = "Ġz©ð") -> str:
    """A byte-level vocabulary that has no token for some bytes, among them the space's: the library drops them."""

    def change(content: dict[str, Any]) -> None:
        keep = {token: i for token, i in content["model"]["vocab"].items() if not set(token) & set(letters)}
        content["model"]["vocab"] = keep
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if {*pair, "".join(pair)} <= keep.keys()]
        content["added_tokens"] = []
        content["post_processor"] = None
        content["normalizer"] = None

    return changed(text, change)


PROVEN = {
    "byte level, NFC": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK, "byte level with holes": without_letters(BYTE_LEVEL),
    "byte level, NFC, strips": stripping(BYTE_LEVEL), "byte fallback, strips": stripping(BYTE_FALLBACK),
    "byte level with holes, strips": changed(without_letters(BYTE_LEVEL), added(id=10**6, content="<strip>", lstrip=True)),
    "embedded": BUILDERS[4](),
}  # fmt: skip
# Letters that compose (jamo, Greek with three marks), whitespace, special tokens, bytes that holes drop.
WORDS = ["a", "the ", "the quick", " ", "\n", "\u3000", "<s>", "<strip>", "z", "é", "好", "👧", "\0", "1", "<0x41>"]
COMPOSED = ["\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "e\u0301", "\u212b", "\u0344"]
RUNS = st.lists(st.tuples(st.sampled_from(WORDS + COMPOSED), st.integers(1, 60)))


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=40, deadline=None)
@given(text=RUNS.map(lambda runs: "".join(part * count for part, count in runs)))
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    library = Library.from_str(PROVEN[name])
    for special in (False, True):
        assert bound(PROVEN[name])(text) <= len(library.encode(text, add_special_tokens=special).ids)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
HOLES = without_letters(BYTE_LEVEL, "âĸģ")  # the bytes of ▁
FEW_TOKENS = {
    "an added token strips": (stripping(BYTE_LEVEL), " " * 5000 + "<strip>" + "\u3000" * 5000),
    "holes, and it strips": (stripping(without_letters(BYTE_LEVEL)), "\u3000" * 5000 + "<strip>" + "\n" * 5000),
    "a long added token of letters with several bytes": (
        changed(without_letters(BYTE_LEVEL), added(id=10**6, content="好" * 200)), "好" * 200,
    ),
    "spaces become letters that are dropped": (
        changed(HOLES, lambda c: c["pre_tokenizer"]["pretokenizers"].insert(0, METASPACE)), " " * 5000,
    ),
    "only letters that are dropped": (without_letters(BYTE_LEVEL), "z " * 5000),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_TOKENS)
def test_long_texts_of_few_tokens(name: str) -> None:
    tokenizer, text = FEW_TOKENS[name]
    assert bound(tokenizer)(text) <= len(Library.from_str(tokenizer).encode(text).ids) < 5002


@pytest.mark.parametrize("name", PROVEN)
def test_the_bound_says_something(name: str) -> None:
    assert bound(PROVEN[name])("x" * 10_000) >= 100
    assert bound(PROVEN[name])("") == 0


def test_composed_letters_are_counted() -> None:
    """NFC makes one letter of four. Without that, the bound would say too much."""
    text = "\u03b1\u0313\u0300\u0345" * 100
    assert 4 * bound(BYTE_LEVEL)(text) <= bound(BYTE_LEVEL)("x" * 400)


def part(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.update({name: value})


SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
UNPROVEN: dict[str, str] = {
    "wordpiece": WORDPIECE,
    "unigram": UNIGRAM,
    "a normalizer that strips": changed(
        BYTE_LEVEL, part("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True})
    ),
    "a normalizer that shortens": changed(
        BYTE_FALLBACK, part("normalizer", {"type": "Replace", "pattern": {"String": "aaa"}, "content": "a"})
    ),
    "a regex": changed(BYTE_FALLBACK, part("normalizer", {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aa"})),
    "inside a sequence": changed(
        BYTE_FALLBACK, part("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]})
    ),
    "a pre-tokenizer that removes": changed(BYTE_FALLBACK, part("pre_tokenizer", SPLIT)),
    "whitespace": changed(BYTE_FALLBACK, part("pre_tokenizer", {"type": "Whitespace"})),
    "a template without the text": changed(
        BYTE_FALLBACK,
        part("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ),
    "unknown letters are dropped": changed(BYTE_FALLBACK, lambda c: c["model"].update(byte_fallback=False, unk_token=None)),
    "unknown letters are fused": changed(BYTE_FALLBACK, lambda c: c["model"].update(byte_fallback=False)),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_where_nothing_can_be_proven_nothing_is_claimed(name: str) -> None:
    Library.from_str(UNPROVEN[name])
    assert bound(UNPROVEN[name])("x" * 10**6) == 0


def test_a_text_that_is_surely_too_long_is_not_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(add_tokenizer(tmp_path))
    texts: list[str] = []
    encode = tokenizer._library.encode

    def counted(text: str, special: bool) -> list[int]:
        texts.append(text)
        return encode(text, special)

    monkeypatch.setattr(tokenizer._library, "encode", counted)
    for call in (tokenizer.encode, lambda text, most: tokenizer.encode_chat([{"role": "user", "content": text}], most)):
        with pytest.raises(ContextLengthError, match=r"at most 255 tokens; found at least \d+ tokens, for 10000\d+ characters"):
            call("the fox " * 1_250_000, 255)
        assert not texts
        assert call("the fox", 8) == call("the fox", None)
        with pytest.raises(ContextLengthError):
            call("the fox", 0)
        assert len(texts) == 2
        texts.clear()


def test_a_regular_expression_that_is_known_to_be_wrong(tmp_path: Path) -> None:
    """As transformers tells it. Catches prompts with other tokens than in training, without a word; and a right file that is
    blamed."""
    contents = []
    for pattern in ("[a-z]+", _TEKKEN):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        contents.append(json.loads(BYTE_LEVEL) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}})
    kinds = [("mistral3", "4.50.0.dev0"), ("mistral", None), ("mistral", "5.0.0"), ("pixtral", "4.9"), ("llama", "4.50.0")]
    for kind, release in kinds:
        config = {"model_type": kind, "transformers_version": release}
        (tmp_path / "config.json").write_text(json.dumps(config))
        library = SimpleNamespace()
        TokenizersBackend._patch_mistral_regex(library, tmp_path, is_local=True, init_kwargs={})
        wrong = hasattr(library, "fix_mistral_regex")
        assert [splits_wrongly(content, config, 131072) for content in contents] == [wrong, False]
        assert not splits_wrongly(contents[0], config, 32768)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    vocabulary = contents[0]["model"]["vocab"]
    vocabulary |= {f"{i}." * 5: i + len(vocabulary) for i in range(100_000)}
    with pytest.warns(UserWarning, match="split otherwise than by Mistral's own tokenizer.* fix_mistral_regex=True"):
        load(save(tmp_path, json.dumps(contents[0] | {"added_tokens": []})))
