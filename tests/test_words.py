"""The project's prose: no words that readers have to read twice, as far as a pattern finds them."""

from __future__ import annotations

import pytest

from words import ROOT, Prose, files, offences, prose_of, sentences


def test_prose_has_no_words_that_are_read_twice() -> None:
    found = [str(one) for one in offences(prose_of(files()))]
    assert found == [], "python tools/words.py"


@pytest.mark.parametrize(
    "text",
    [
        "Of one answer, after its first token.",
        "What a request may use.",
        "It goes on behind the last token.",
        "The page is kept, for it is needed again.",
        "One runs beside the others.",
        "The row stands in the table.",
        "It was deleted meanwhile.",
        "A thread of its own.",
        "Nobody reads it.",
    ],
)
def test_words_that_are_read_twice_are_found(text: str) -> None:
    assert list(offences([Prose("x.py", 1, text, True)])) != []


@pytest.mark.parametrize(
    "text", ["A server behind a reverse proxy.", "Formats, for example JSON.", "The list `stands in`."]
)
def test_words_of_the_field_are_not_found(text: str) -> None:
    assert list(offences([Prose("x.py", 1, text, True)])) == []


def test_sentences_are_drawn_from_code_and_pages() -> None:
    places = {place.partition("/")[0] for place, _ in sentences(prose_of(files()))}
    assert {"platform", "api", "docs", "tests"} <= places
    assert all((ROOT / place).exists() for place in places if ":" not in place)
