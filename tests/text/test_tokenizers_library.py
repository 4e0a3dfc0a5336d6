"""The door to the tokenizers library: nothing fails behind it with another exception than minirt's, and nothing goes past it."""

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.package import ROOT
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from minirt.errors import TokenizerError
from minirt.text.tokenizer import Tokenizer as Loaded
from minirt.text.tokenizers_library import TokenizersLibrary

LETTERS = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def byte_level(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(LETTERS, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def load(tokenizer: Tokenizer, folder: Path) -> Loaded:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Loaded.load(folder) or pytest.fail("no tokenizer")


def test_a_panic_of_the_split_regex(tmp_path: Path) -> None:
    """Catastrophic backtracking: the library panics with an exception that is no `Exception`."""
    split = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer = load(byte_level(pre_tokenizer=split), tmp_path)
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"failed: .*retry-limit") as caught:
            tokenizer.encode("a" * 60 + "b")
        assert caught.value.where == tmp_path / "tokenizer.json"
        assert caught.value.hint
    assert tokenizer.encode("ab") == [LETTERS["a"], LETTERS["b"]]  # and it works on


class PanicException(BaseException):
    """As pyo3's, which cannot be imported or raised at will."""


CALLS: dict[str, Callable[[TokenizersLibrary], Any]] = {
    "encode_batch_fast": lambda library: library.encode("a", True), "decode": lambda library: library.decode([1], False),
    "id_to_token": lambda library: library.id_to_token(1), "token_to_id": lambda library: library.token_to_id("a"),
    "get_vocab": lambda library: library.vocabulary(), "get_added_tokens_decoder": lambda library: library.added_tokens(),
    "add_special_tokens": lambda library: library.add_special_tokens(["a"]), "decoder": lambda library: library.decoder(),
}  # fmt: skip


class Failing:
    """A library in which everything raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


@pytest.mark.parametrize("name", CALLS)
def test_every_call_turns_panics_and_exceptions_into_errors(name: str, tmp_path: Path) -> None:
    library = TokenizersLibrary(byte_level().to_str().encode(), tmp_path / "tokenizer.json")
    for error in (PanicException("p\x1b"), Exception("e"), ValueError("v" * 1000), MemoryError()):
        library._tokenizer = Failing(error)  # type: ignore[assignment]
        with pytest.raises(TokenizerError) as caught:
            CALLS[name](library)
        assert caught.value.__cause__ is error
        assert len(str(caught.value)) < 800
    for stop in (KeyboardInterrupt(), SystemExit()):  # are the caller's, not the library's
        library._tokenizer = Failing(stop)  # type: ignore[assignment]
        with pytest.raises(type(stop)):
            CALLS[name](library)


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Path) -> None:
    """Else the streams of a server would stop for as long. With the lock held, there are two turns at most."""
    file = smollm2 / "tokenizer.json"
    library = TokenizersLibrary(file.read_bytes(), file)
    done = threading.Event()

    def encode() -> None:
        library.encode("Once upon a time " * 40_000, False)
        done.set()

    thread, turns = threading.Thread(target=encode), 0
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def test_loading_is_behind_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    monkeypatch.setattr(tokenizers, "Tokenizer", Failing(PanicException("p")))
    with pytest.raises(TokenizerError, match="cannot be loaded: p"):
        TokenizersLibrary(b"{}", tmp_path)


def test_no_use_of_the_library_goes_past_the_door() -> None:
    """Only tokenizers_library.py imports the library, and there every use is inside a lambda that `_call` gets."""
    for path in (ROOT / "minirt").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }  # fmt: skip
        assert ("tokenizers" in imported) == (path.name == "tokenizers_library.py" and path.parent.name == "text"), path
    tree = ast.parse((ROOT / "minirt" / "text" / "tokenizers_library.py").read_text())
    behind = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._call"
        for inner in ast.walk(node.args[0])
    }  # fmt: skip
    uses = [
        node for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._tokenizer", "tokenizers"))
        or (isinstance(node, ast.Name) and node.id == "tokenizers")
    ]  # fmt: skip
    assert len(uses) > 8
    assert not [ast.unparse(node) for node in uses if id(node) not in behind]
    assert {node.attr for node in uses if isinstance(node, ast.Attribute)} >= CALLS.keys()  # the test above calls them all
