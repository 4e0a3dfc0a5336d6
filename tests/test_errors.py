"""Messages: one line of printable characters, whatever they quote."""

import pickle
import unicodedata

import pytest

from minirt.errors import ConfigError, MinirtError, inside, printable, shortened

NASTY = "\x1b[31mred\x1b]0;title\x07\r\n\t\x00\x7f\x85\x9b2J\u2028\u202eevil\u2066\ud800\ue000"


@pytest.mark.parametrize("part", ["what", "where", "expected", "found", "hint"])
def test_no_control_character_reaches_a_message(part: str) -> None:
    error = ConfigError(**({"what": "w"} | {part: NASTY}))
    for text in (str(error), error.args[0], str(error.within("a\x1bb")), str(pickle.loads(pickle.dumps(error)))):
        assert not [c for c in text if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"]
        assert r"\x1b[31mred\x1b]0;title\x07\r\n\t\x00\x7f\x85\x9b2J\u2028\u202eevil\u2066\ud800\ue000" in text
    assert getattr(error, part) == NASTY  # programs get the value as it is


def test_letters_of_all_languages_stay() -> None:
    text = "naïve 你好 שלום мир 👧 – ▁ {'a': \"b\"} \\x1b"
    assert printable(text) == text == str(MinirtError(text))


def test_what_is_no_text_is_quoted_too() -> None:
    assert str(MinirtError("w", found=["\x1b"], where=b"\x1b")) == r"b'\x1b': w; found ['\x1b']"
    with pytest.raises(MinirtError, match=r"^a\\nb: w$"), inside("a\nb"):
        raise MinirtError("w")


def test_shortened() -> None:
    assert shortened("a" * 300) == "a" * 300
    assert shortened("a" * 301) == "a" * 300 + "…"
    assert shortened(12345, 3) == "123…"
