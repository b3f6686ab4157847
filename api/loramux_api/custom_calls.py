"""The input of a custom tool, read from the call of a function with one text as it comes.

A model writes `{"input": "a \\"quoted\\" text"}`; the caller gets `a "quoted" text`, in pieces that hold no half of an
escape.
"""

from __future__ import annotations

import json
import re

from loramux_api.schemas.tools import INPUT

_head = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_piece = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt])*'
)
"""The next part of a JSON string that can be decoded by itself: a surrogate pair is one escape."""


class InputReader:
    """Reads the text of one call."""

    def __init__(self) -> None:
        self._rest = ""
        """What has come and is not decoded."""
        self._is_begun = False

    def push(self, piece: str) -> str:
        """Return the news of the text."""
        self._rest += piece
        if not self._is_begun:
            if (head := _head.match(self._rest)) is None:
                return ""
            self._rest, self._is_begun = self._rest[head.end() :], True
        found = _piece.match(self._rest)
        assert found is not None, "it matches the empty text"
        self._rest = self._rest[found.end() :]
        return str(json.loads(f'"{found[0]}"', strict=False))


def input_of(arguments: str) -> str:
    """Return the text of a whole call, or of as much of it as there is."""
    return InputReader().push(arguments)
