"""OpenAI's question about usage and its answer, field for field."""

from __future__ import annotations

import re

import msgspec

from loramux.records.usage import UsageTotals, UsageWindow
from loramux.usage.errors import InvalidQuery

SECOND = 1_000_000
"""Microseconds."""


class BucketWidth(msgspec.Struct, frozen=True):
    """A width by its OpenAI name: seconds, and how many buckets a page has by default and at most."""

    seconds: int
    default_limit: int
    max_limit: int


BUCKET_WIDTHS = {"1m": BucketWidth(60, 60, 1440), "1h": BucketWidth(3600, 24, 168), "1d": BucketWidth(86400, 7, 31)}
GROUP_BY = ("project_id", "user_id", "api_key_id", "model", "batch")
LATEST = 1 << 40
"""A time in seconds that no clock shows for thirty thousand years; larger ones do not fit in microseconds."""

MAX_FILTER = 100

_page = re.compile(r"page_([0-9a-f]{1,11})_([0-9a-f]{1,11})")


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Times in Unix seconds, start_time inclusive, end_time exclusive. Raises InvalidQuery when it makes no sense."""

    start_time: int
    end_time: int | None = None
    """None: now."""
    bucket_width: str = "1d"
    group_by: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()
    limit: int | None = None
    """Buckets a page."""
    page: str | None = None

    def __post_init__(self) -> None:
        if self.bucket_width not in BUCKET_WIDTHS:
            raise InvalidQuery("bucket_width", f"bucket_width is one of {', '.join(BUCKET_WIDTHS)}")
        if not 0 <= self.start_time <= LATEST:
            raise InvalidQuery("start_time", f"start_time is a Unix time in seconds, 0 to {LATEST}")
        if self.end_time is not None and not self.start_time < self.end_time <= LATEST:
            raise InvalidQuery("end_time", f"end_time is a Unix time in seconds after start_time, at most {LATEST}")
        unknown = [name for name in self.group_by if name not in GROUP_BY]
        if unknown:
            raise InvalidQuery("group_by", f"group_by takes {', '.join(GROUP_BY)}; not {unknown[0][:40]}")
        if self.limit is not None and not 1 <= self.limit <= self.width.max_limit:
            raise InvalidQuery("limit", f"limit is 1 to {self.width.max_limit} for bucket_width={self.bucket_width}")
        for field, values in (("models", self.models), ("api_key_ids", self.api_key_ids)):
            if len(values) > MAX_FILTER or not all(value.isprintable() for value in values):
                raise InvalidQuery(field, f"{field} takes at most {MAX_FILTER} names, of printable characters")
        if self.page is not None and not self._continues():
            raise InvalidQuery("page", "page is the next_page of an earlier answer to this question, unchanged")

    @property
    def width(self) -> BucketWidth:
        """What `bucket_width` stands for."""
        return BUCKET_WIDTHS[self.bucket_width]

    def span(self, now: int) -> tuple[int, int]:
        """Where this page starts and the whole answer ends, in seconds; a page keeps its first page's end."""
        if self.page is not None:
            return self._page_span()
        return self.start_time, self.end_time if self.end_time is not None else max(now, self.start_time) + 1

    def _continues(self) -> bool:
        start, end = self._page_span()
        return self.start_time <= start < end <= LATEST and self.end_time in (None, end)

    def _page_span(self) -> tuple[int, int]:
        match = _page.fullmatch(self.page or "")
        return (int(match[1], 16), int(match[2], 16)) if match else (0, 0)


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sum. The last five are null unless group_by names them."""

    object: str = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None


class UsageBucket(msgspec.Struct, frozen=True, kw_only=True):
    """One span of time, Unix seconds, end exclusive. Buckets start at multiples of their width, UTC; the first
    and the last are cut to what was asked.
    """

    object: str = "bucket"
    start_time: int
    end_time: int
    results: tuple[UsageResult, ...]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    object: str = "page"
    data: tuple[UsageBucket, ...]
    has_more: bool
    next_page: str | None


class BucketPlan(msgspec.Struct, frozen=True):
    """The buckets of one page: indices since the epoch, and the exact seconds that they are cut to."""

    query: UsageQuery
    start: int
    end: int
    """Of this page."""
    final: int
    """Of the whole answer."""

    @property
    def window(self) -> UsageWindow:
        """What to ask of the ledger."""
        return UsageWindow(
            start=self.start * SECOND,
            end=self.end * SECOND,
            width=self.query.width.seconds * SECOND,
            models=self.query.models,
            api_key_ids=self.query.api_key_ids,
        )

    @property
    def group_by(self) -> tuple[str, ...]:
        """The asked groups that rows differ in; users and batches are not recorded."""
        return tuple(name for name in ("model", "api_key_id", "project_id") if name in self.query.group_by)

    def page(self, totals: list[UsageTotals]) -> UsagePage:
        """The sums laid out over all buckets of the page, empty ones too."""
        width = self.query.width.seconds
        by_bucket: dict[int, list[UsageResult]] = {}
        for total in totals:
            by_bucket.setdefault(total.bucket, []).append(self._result(total))
        buckets = [
            UsageBucket(
                start_time=max(index * width, self.start),
                end_time=min((index + 1) * width, self.end),
                results=tuple(by_bucket.get(index, ())),
            )
            for index in range(self.start // width, -(-self.end // width))
        ]
        more = self.end < self.final
        return UsagePage(
            data=tuple(buckets), has_more=more, next_page=f"page_{self.end:x}_{self.final:x}" if more else None
        )

    def _result(self, total: UsageTotals) -> UsageResult:
        return UsageResult(
            input_tokens=total.input_tokens,
            output_tokens=total.output_tokens,
            input_cached_tokens=total.cached_tokens,
            num_model_requests=total.requests,
            project_id=total.project_id,
            api_key_id=total.api_key_id,
            model=total.model,
            batch=False if "batch" in self.query.group_by else None,
        )


def plan_buckets(query: UsageQuery, now: int) -> BucketPlan:
    """The page of buckets that `query` asks for; `now` in seconds."""
    start, final = query.span(now)
    width, limit = query.width.seconds, query.limit or query.width.default_limit
    return BucketPlan(query, start, min(final, (start // width + limit) * width), final)
