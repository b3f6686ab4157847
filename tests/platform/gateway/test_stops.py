from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from loramux.gateway.stops import StopMatcher

ALPHABET = "ab⚑ "
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def pieces(matcher: StopMatcher, text: str, cuts: list[int]) -> list[str]:
    """Push the text piece by piece and stop at a match, as a transcript does."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown = []
    for start, end in pairwise(edges):
        shown.append(matcher.push(text[start:end]))
        if matcher.matched is not None:
            return shown
    return [*shown, matcher.flush()]


def ends_with_first_stop(text: str, stops: list[str]) -> str:
    """The text up to the first moment at which it ends with a stop string: read a character at a time."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="abab⚑", stops=["bab⚑", "ab"], cuts=[1, 2, 3])
@example(text="ab⚑ b", stops=["ab⚑ ", "b⚑"], cuts=[])
def test_pieces_join_to_the_text_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    assert "".join(pieces(matcher, text, cuts)) == ends_with_first_stop(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_what_is_held_back_is_the_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.matched is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
