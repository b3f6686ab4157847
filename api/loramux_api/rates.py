"""The x-ratelimit headers, as OpenAI has them."""

from __future__ import annotations

from loramux.limits import Standing

MICRO = 1_000_000


def rate_headers(standing: Standing | None) -> dict[str, str]:
    """Limit, remaining and reset of requests and tokens a minute; nothing of what has no limit."""
    headers: dict[str, str] = {}
    if standing is None:
        return headers
    for kind, rate in (("requests", standing.requests), ("tokens", standing.tokens)):
        if rate is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(rate.reset)
    return headers


def duration(microseconds: int) -> str:
    """`6m0s`, `1.5s`, `20ms`, rounded up to a millisecond."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, left = divmod(milliseconds, 60_000)
    seconds = f"{left / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
