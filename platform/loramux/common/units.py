"""Units of time, and the three token counts that engine, ledger and wire share.

Instants in records are whole microseconds since the epoch, durations whole microseconds; the wire has whole seconds.
The conversion happens once, at the edge that needs seconds.
"""

from __future__ import annotations

import msgspec

SECOND = 1_000_000
"""Microseconds."""
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

SECONDS_PER_DAY = 86_400

QUIET_SECONDS = 10.0
"""Without a request whose caller waits for so long, a server has no others: background work need not give way."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request, one bucket or one total: read, of those found in the KV cache, and generated."""

    prompt: int = 0
    """Tokens of the prompt, each counted once however often it was computed; `cached` included."""
    cached: int = 0
    """Tokens of the prompt whose KV was found in the cache."""
    output: int = 0
    """Tokens generated and delivered."""

    @property
    def total(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt + self.output

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt + other.prompt, cached=self.cached + other.cached, output=self.output + other.output
        )

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt - other.prompt, cached=self.cached - other.cached, output=self.output - other.output
        )

    def drift(self, other: TokenCounts) -> int:
        """Tokens by which two counts of the same work differ; 0 where they agree."""
        return abs(self.prompt - other.prompt) + abs(self.cached - other.cached) + abs(self.output - other.output)
