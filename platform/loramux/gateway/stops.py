"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete, and never any part of one.

    The text ends at the first moment at which it ends with a stop string; where two end there, the longer one counts.
    That moment depends on the text alone, never on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown and was not yet; call no more once `matched` is set."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, end, self.matched = min(found)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = "" if found else text[end:]
        return text[:end]

    def flush(self) -> str:
        """The text held back when no more comes: it only looked like the beginning of a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
