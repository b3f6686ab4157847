"""The endpoints that a batch's lines may go to, as the API gives them: bodies in, answers out.

A batch reads and writes the same JSON as its endpoint does, so the API brings the two ends along and this package knows
no wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loramux.errors import LoramuxError
from loramux.gateway import Answer, Delta, GenerationRequest
from loramux.units import TokenCounts


class AnswerWriter(Protocol):
    """Gives one answer its endpoint's shape."""

    def collect(self, delta: Delta) -> None:
        """Take a part of the answer."""

    def whole(self, usage: TokenCounts) -> msgspec.Struct:
        """Return the whole answer."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that its endpoint would take."""

    request: GenerationRequest
    writer: Callable[[Answer], AnswerWriter]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What lines may ask for."""

    parsers: Mapping[str, Callable[[bytes], ParsedBody]]
    """By path. A parser runs on a thread, and raises InvalidRequest."""
    error_body: Callable[[LoramuxError], msgspec.Struct]
    """Writes an error as the endpoints do."""
    max_line_bytes: int
    """The largest line."""
