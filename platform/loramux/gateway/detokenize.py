"""Token ids to text, as they come, up to a stop string: text that is given out never has to be taken back.

`StopAutomaton` is Aho and Corasick's (Efficient string matching, CACM 18(6), 1975): a trie of the stop strings in which
every state knows its longest proper suffix that is a state too. A text is read once, in constant time a character
(amortised), however many and however long the stop strings are; the state's depth says how much must be held back.
"""

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
_CHARACTERS = 0x110000
"""Unicode's code points: an edge of a StopAutomaton is the integer `state * _CHARACTERS + code point`."""


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
        self._num_given = len(self._text)

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty in the middle of a character."""
        self._ids.append(token_id)
        before, self._text = self._text, self._decode(self._ids)
        if not self._text.endswith(REPLACEMENT):
            return self._push_whole(before)
        if len(self._ids) < _LONGEST_WINDOW:
            return ""
        given = self._give(len(self._text) - _UNFINISHED)
        self._cut()
        return given

    def flush(self) -> str:
        """Return the rest at the end: an unfinished character comes out as U+FFFD."""
        return self._give(len(self._text))

    def _push_whole(self, before: str) -> str:
        if self._text and self._text == before:
            self._ids.pop()  # a special token: no text, so no context either
        given = self.flush()
        if len(self._ids) >= _WINDOW:
            self._cut()
        return given

    def _give(self, end: int) -> str:
        delta = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return delta

    def _cut(self) -> None:
        """Forget old tokens, where the rest decodes to exactly the end of the same text."""
        num_left = len(self._text) - self._num_given
        for keep in _CUTS:
            text = self._decode(self._ids[-keep:])
            if self._text.endswith(text) and len(text) >= num_left and (text or not self._text):
                self._ids, self._text, self._num_given = self._ids[-keep:], text, len(text) - num_left
                return


def _end_of_prompt(decode: Decode, ids: list[int]) -> list[int]:
    """The shortest end that reads as text; all of it where none does."""
    ends = (ids[-keep:] for keep in _CUTS)
    return next((end for end in ends if (text := decode(end)) and REPLACEMENT not in text), ids)


class StopAutomaton:
    """The stop strings of a request; its choices share it, each with a StopMatcher of its own."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: dict[int, int] = {}
        """The next state by state and character. One flat dict: thousands of small ones would wake the collector."""
        self.fallback: list[int] = [0]
        """Every state's longest proper suffix that is a state; state 0 is the empty text."""
        self.depth: list[int] = [0]
        """Characters of every state."""
        self.stop: list[str | None] = [None]
        """The longest stop string that every state ends with."""
        edges: list[tuple[int, int, str]] = []
        for stop in stops:
            self._add(stop, edges)
        self._link(edges)

    def _add(self, stop: str, edges: list[tuple[int, int, str]]) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            following = self.next.get(state * _CHARACTERS + ord(character))
            if following is None:
                following = self.next[state * _CHARACTERS + ord(character)] = len(self.depth)
                edges.append((depth, state, character))
                self.fallback.append(0)
                self.depth.append(depth)
                self.stop.append(None)
            state = following
        self.stop[state] = stop or None

    def _link(self, edges: list[tuple[int, int, str]]) -> None:
        """Set the fallbacks breadth first: a state's fallback is shorter, and therefore linked already."""
        edges.sort()
        for _, state, character in edges:
            following = self.next[state * _CHARACTERS + ord(character)]
            if state:
                self.fallback[following] = self.advance(self.fallback[state], character)
            self.stop[following] = self.stop[following] or self.stop[self.fallback[following]]

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        code = ord(character)
        while state and state * _CHARACTERS + code not in self.next:
            state = self.fallback[state]
        return self.next.get(state * _CHARACTERS + code, 0)


class StopMatcher:
    """Passes text on until a stop string is complete, and never any part of one.

    The text ends at the first moment at which it ends with a stop string; where two end there, the longer one counts.
    That moment depends on the text alone, never on how it was cut into pieces.
    """

    def __init__(self, stops: StopAutomaton) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        """The end of the text that may be the beginning of a stop string: as long as the state is deep."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Return the part of the text that can be shown and was not yet; call no more once `matched` is set."""
        if not self._stops.next:
            return text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._stops.advance(self._state, character)
            self.matched = self._stops.stop[self._state]
            if self.matched is not None:
                shown = (self._held + text)[: end - len(self.matched)]
                self._held = ""
                return shown
        text = self._held + text
        shown_until = len(text) - self._stops.depth[self._state]
        self._held = text[shown_until:]
        return text[:shown_until]

    def flush(self) -> str:
        """Return the text held back when no more comes: it only looked like the beginning of a stop string."""
        held, self._held = self._held, ""
        return held
