"""Units of time, and the token counts that engine, ledger and wire share.

Instants in records are whole microseconds since the epoch, durations whole microseconds; the API has whole seconds. The
conversion happens once, in the code that needs seconds.
"""

from __future__ import annotations

import msgspec

SECOND = 1_000_000
"""One second, in microseconds."""
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

SECONDS_PER_DAY = 86_400

QUIET_SECONDS = 10.0
"""Seconds without a request with a waiting caller, after which background work has no restriction."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request, one bucket or one total: read, found in the KV cache, and generated."""

    prompt: int = 0
    """Tokens of the prompt, including `cached`; each token counts once, even if it was computed several times."""
    cached: int = 0
    """Tokens of the prompt whose KV was found in the cache."""
    output: int = 0
    """Tokens generated and delivered."""
    image: int = 0
    """Tokens of the prompt that stand for images and were not found in the cache. Engines do not count them apart."""

    @property
    def total(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt + self.output

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            output=self.output + other.output,
            image=self.image + other.image,
        )

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            prompt=self.prompt - other.prompt,
            cached=self.cached - other.cached,
            output=self.output - other.output,
            image=self.image - other.image,
        )

    def drift(self, other: TokenCounts) -> int:
        """Return the number of tokens by which two counts of the same work differ; 0 if they agree. Images are no
        separate work.
        """
        return abs(self.prompt - other.prompt) + abs(self.cached - other.cached) + abs(self.output - other.output)
