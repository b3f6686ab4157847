"""Token ids to text, as they come: whatever is given out never has to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
_CUTS = range(4, 9)
"""Window lengths tried when cutting: a character is at most four byte tokens, so one of five cuts falls on an edge."""
_WINDOW = 24
"""Tokens of context before a cut is tried."""
_LONGEST_WINDOW = 96
"""Tokens before a text that ends in no whole character is given out all the same: it is no UTF-8, and never will be."""
_UNFINISHED = 3
"""The characters of such a text that may still become one: a lead byte and two more."""


class Detokenizer:
    """The text of one generation, token by token.

    It decodes a short window of the latest tokens instead of single ones, because a token's text depends on its
    neighbours: a character may span tokens, and a sentencepiece decoder drops the space of the first token it sees.
    The window begins with the end of the prompt, so that a continuation keeps its leading space. `decode` is the
    tokenizer's own and skips special tokens.

    A text that ends in U+FFFD waits for more: with byte fallback one unfinished character turns every character
    of its run of byte tokens into U+FFFD, so nothing about that moment's text can be trusted.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = _end_of_prompt(decode, list(prompt_token_ids[-_LONGEST_WINDOW:]))
        self._text = decode(self._ids)
        self._said = len(self._text)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty in the middle of a character."""
        self._ids.append(token_id)
        before, self._text = self._text, self._decode(self._ids)
        if not self._text.endswith(REPLACEMENT):
            return self._push_whole(before)
        if len(self._ids) < _LONGEST_WINDOW:
            return ""
        said = self._say(len(self._text) - _UNFINISHED)
        self._cut()
        return said

    def flush(self) -> str:
        """What is left at the end: an unfinished character comes out as U+FFFD."""
        return self._say(len(self._text))

    def _push_whole(self, before: str) -> str:
        if self._text and self._text == before:
            self._ids.pop()  # a special token: no text, so no context either
        said = self.flush()
        if len(self._ids) >= _WINDOW:
            self._cut()
        return said

    def _say(self, end: int) -> str:
        delta = self._text[self._said : end]
        self._said = max(self._said, end)
        return delta

    def _cut(self) -> None:
        """Forget old tokens, where the rest decodes to exactly the end of the same text."""
        unsaid = len(self._text) - self._said
        for keep in _CUTS:
            text = self._decode(self._ids[-keep:])
            if self._text.endswith(text) and len(text) >= unsaid and (text or not self._text):
                self._ids, self._text, self._said = self._ids[-keep:], text, len(text) - unsaid
                return


def _end_of_prompt(decode: Decode, ids: list[int]) -> list[int]:
    """The shortest end that reads as text; all of it where none does."""
    ends = (ids[-keep:] for keep in _CUTS)
    return next((end for end in ends if (text := decode(end)) and REPLACEMENT not in text), ids)
