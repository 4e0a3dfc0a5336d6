"""Stop strings in a stream, against a search in the whole text.

Catches missed stop strings across pieces, text that is held back too long or sent too early, and the wrong choice of two stops.
"""

from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minirt.text.stop_strings import StopStrings


def stop_at_once(stops: list[str], text: str, passed: int = 0, include: bool = False) -> tuple[str, str | None]:
    """The specification: the shortest prefix of the text that ends with a stop string, without the longest such; and that.

    A stop string that ends within the first `passed` characters does not count.
    """
    for end in range(passed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run_stops(stops: list[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    results = [matcher.push(piece) for piece in pieces]
    assert any(found for _, found in results) == (matcher.match is not None)
    return "".join(text for text, _ in results) + matcher.flush(), matcher.match


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab好", min_size=1, max_size=5), max_size=4), st.lists(st.text("ab好", max_size=4)))
@example(stops=["abc", "b"], pieces=["a", "b", "c"])
@example(stops=["aab"], pieces=["a", "a", "a", "b"])
@example(stops=["abab好"], pieces=["ababab", "好"])
@example(stops=["b", "ab"], pieces=["ab"])
def test_stops_against_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    expected = stop_at_once(stops, "".join(pieces))
    assert run_stops(stops, pieces) == run_stops(stops, "".join(pieces)) == expected


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab好", min_size=1, max_size=5), max_size=4), pieces=st.lists(st.text("ab好", max_size=4)),
    unchecked=st.integers(0, 4), include=st.booleans(),
)  # fmt: skip
@example(stops=["b", "abc"], pieces=["ab", "x"], unchecked=1, include=False)
@example(stops=["ab"], pieces=["a", "b"], unchecked=1, include=True)
def test_the_first_pieces_may_be_unchecked_and_the_stop_included(
    stops: list[str], pieces: list[str], unchecked: int, include: bool
) -> None:
    """A stop string that begins in an unchecked piece and ends in a checked one counts."""
    matcher, text, found = StopStrings(stops, include), "", False
    for i, piece in enumerate(pieces):
        new, found = matcher.push(piece, i >= unchecked)
        text += new
    text += matcher.flush()
    assert found == (matcher.match is not None)
    assert (text, matcher.match) == stop_at_once(stops, "".join(pieces), len("".join(pieces[:unchecked])), include)


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), text=st.text("ab", max_size=12))
def test_no_more_is_held_than_could_begin_a_stop(stops: list[str], text: str) -> None:
    matcher, sent = StopStrings(stops), ""
    for end, character in enumerate(text, start=1):
        safe, found = matcher.push(character)
        sent += safe
        if found:
            return
        held = text[len(sent) : end]
        starts = [tail for n in range(end + 1) if any(stop.startswith(tail := text[n:end]) for stop in stops)]
        assert held == max(starts, key=len, default="")


def test_after_a_stop_nothing_is_sent_and_held_text_is_flushed_once() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert matcher.push("text E") == ("text ", False)
    assert matcher.push("ND and\n\nmore") == matcher.push("more") == ("", True)
    assert matcher.flush() == ""
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert (matcher.flush(), matcher.flush()) == ("EN", "")
    assert StopStrings([]).push("all of it") == ("all of it", False)
