from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from loramux.serving.tokenizer import StopAutomaton, StopMatcher

ALPHABET = "ab⚑ "
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def pieces(matcher: StopMatcher, text: str, cuts: list[int]) -> list[str]:
    """Push the text piece by piece and stop at a match, as an output processor does."""
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
    matcher = StopMatcher(StopAutomaton(stops))
    assert "".join(pieces(matcher, text, cuts)) == ends_with_first_stop(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_held_text_is_a_prefix_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    shown = ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.matched is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


class CountingList(list[int]):
    """Counts its reads."""

    reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return super().__getitem__(index)


def test_sixteen_long_stop_strings_cost_constant_steps_a_character() -> None:
    stops = StopAutomaton(["a" * 511 + chr(ord("b") + i) for i in range(16)])
    stops.fallback = CountingList(stops.fallback)
    matcher, text = StopMatcher(stops), ("a" * 510 + "x") * 20
    shown = "".join(matcher.push(text[start : start + 4]) for start in range(0, len(text), 4)) + matcher.flush()
    assert shown == text
    assert stops.fallback.reads <= len(text)
