"""A prompt that is surely too long is refused before it is tokenized, on every way into the generator."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minirt import Generator
from minirt.cli.options import encode_prompt
from minirt.errors import ContextLengthError
from minirt.text.chat_template import ChatTemplate

LONG = "One sunny day " * 700_000  # 10 MB
ASKED = [{"role": "user", "content": LONG}]
WAYS: dict[str, Callable[[Generator], Any]] = {
    "generate": lambda generator: generator.generate(LONG),
    "one of several": lambda generator: generator.generate(["Hi", LONG]),
    "completions": lambda generator: list(generator.completions([LONG])),
    "stream": lambda generator: list(generator.stream(LONG)),
    "chat": lambda generator: generator.chat(ASKED),
    "check": lambda generator: generator.check(LONG),
    "a prompt on the command line": lambda generator: encode_prompt(generator, LONG, False),
    "a message on the command line": lambda generator: encode_prompt(generator, LONG, True),
}


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    with Generator.from_pretrained(device="cpu", impl="eager", max_model_len=256, kv_cache_memory=1 << 24) as generator:
        assert generator.tokenizer is not None
        generator.tokenizer._chat_template = ChatTemplate(Path(), {"chat_template": "{{ messages[0].content }}"})
        yield generator


@pytest.mark.parametrize("way", WAYS)
def test_refused_before_it_is_tokenized(way: str, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator.tokenizer is not None
    lengths, encode = [], generator.tokenizer._backend.encode

    def counted(text: str, special: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, special)

    monkeypatch.setattr(generator.tokenizer._backend, "encode", counted)
    with pytest.raises(ContextLengthError, match=r"at most 255 tokens; found at least \d+ tokens, for 9800000 characters"):
        WAYS[way](generator)
    assert max(lengths, default=0) < 10


def test_a_long_text_can_still_be_tokenized(generator: Generator) -> None:
    """Perplexity is measured on texts of any length."""
    assert len(generator.encode("One sunny day " * 1000)) > 255
