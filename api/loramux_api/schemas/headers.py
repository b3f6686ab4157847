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

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="1 to 255 visible ASCII characters, a UUID for instance. The same request again under the same key "
        "gets the same answer, billed once; 409 while it runs, 422 with another body. Kept for a day.",
    ),
]
"""By which a request can be sent again."""

IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-Match",
        description="The adapter's ETag as you read it: the change is made only if nobody has changed the adapter "
        "since, else the answer is 412.",
    ),
]
"""What the adapter must still be."""

IfNoneMatch = Annotated[
    str | None,
    HeaderParameter(name="If-None-Match", description="The adapter's ETag as you have it: 304 if it is the same."),
]
"""What the adapter was."""
