"""Figures of one drive of a workload, measured by its clients."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from workloads import Item


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one request. Seconds count from its due time, so that waiting before sending is included."""

    id: str
    ttft_s: float | None = None
    """Seconds until the first token; None without a token."""
    total_s: float
    output_tokens: int = 0
    token_ids: list[int] = []
    """Token ids of the answer, if the server sends them (`return_token_ids`)."""
    error: str | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of a drive. Latencies and tokens are those of served requests."""

    requests: int
    failed: int
    wrong_length: int
    """Number of answers without the requested number of tokens."""
    wall_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    total_p50_s: float | None
    total_p99_s: float | None
    first_error: str | None = None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return a percentile, interpolated linearly between ranks; None without values."""
    return float(np.quantile(values, share)) if values else None


def summarise(items: Sequence[Item], outcomes: Sequence[Outcome], wall_s: float) -> Figures:
    """The figures of `outcomes`, one for each of `items` in any order."""
    asked = {item.id: item.max_tokens for item in items}
    served = [o for o in outcomes if o.error is None]
    firsts = [o.ttft_s for o in served if o.ttft_s is not None]
    totals = [o.total_s for o in served]
    output_tokens = sum(o.output_tokens for o in served)
    return Figures(
        requests=len(items),
        failed=len(items) - len(served),
        wrong_length=sum(o.output_tokens != asked[o.id] for o in served),
        wall_s=wall_s,
        input_tokens=sum(len(item.prompt_token_ids) for item in items),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        ttft_p50_s=percentile(firsts, 0.5),
        ttft_p99_s=percentile(firsts, 0.99),
        total_p50_s=percentile(totals, 0.5),
        total_p99_s=percentile(totals, 0.99),
        first_error=next((o.error for o in outcomes if o.error is not None), None),
    )


def same_answers(reference: Sequence[Outcome], answers: Sequence[Outcome]) -> int:
    """Count the answers that are the reference's, token for token."""
    expected = {o.id: o.token_ids for o in reference}
    return sum(expected.get(o.id) == o.token_ids for o in answers if o.error is None)
