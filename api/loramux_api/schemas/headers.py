"""The request headers that are ours."""

from __future__ import annotations

from typing import Annotated

from litestar.params import HeaderParameter

MAX_DEADLINE_MS = 3_600_000

Deadline = Annotated[
    int | None,
    HeaderParameter(
        name="x-loramux-deadline-ms",
        ge=1,
        le=MAX_DEADLINE_MS,
        description="Milliseconds to the first token. A request that would come later is refused at once, with 429, "
        "Retry-After and the expected wait; one that waits longer than this is refused then.",
    ),
]
"""When the client stops caring for an answer."""
