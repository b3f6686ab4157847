"""Read the input of a custom tool while the call arrives; the call is that of a function with one text.

A model writes `{"input": "a \\"quoted\\" text"}`. The caller gets `a "quoted" text`, in pieces that never split an
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
"""The next part of a JSON string that can be decoded separately. A surrogate pair is one escape."""


class InputReader:
    """Reads the text of one call."""

    def __init__(self) -> None:
        self._rest = ""
        """Text that has arrived and is not decoded yet."""
        self._is_begun = False

    def push(self, piece: str) -> str:
        """Return the new part of the text."""
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
    """Return the text of a whole call. If the call is cut off, return the text that exists."""
    return InputReader().push(arguments)
