"""OpenAI's usage query and its answer, field for field: sums in buckets of time, in pages.

`BucketQuery` has the fields that the usage and costs endpoints share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from loramux.common.identity import ProjectId
from loramux.common.units import DAY, SECOND
from loramux.data.records.requests import service_tier
from loramux.data.records.usage import UsageTotals, UsageWindow
from loramux.money.usage.errors import InvalidQuery

Result = TypeVar("Result")

MAX_FILTER = 100
"""Maximum number of values in one filter."""
LATEST = 1 << 40
"""Latest valid time in seconds. In microseconds it fits into 64 bits."""

_page = re.compile(r"page_([0-9a-f]{1,11})_([0-9a-f]{1,11})")


class BucketWidth(msgspec.Struct, frozen=True):
    """A width by its OpenAI name: its seconds, and the default and the maximum number of buckets per page."""

    seconds: int
    default_limit: int
    max_limit: int


class Bucket(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """One span of time (Unix seconds, end exclusive) and its sums."""

    object: str = "bucket"
    start_time: int
    end_time: int
    results: tuple[Result, ...]


class Page(msgspec.Struct, Generic[Result], frozen=True, kw_only=True):
    """One page of buckets."""

    object: str = "page"
    data: tuple[Bucket[Result], ...]
    has_more: bool
    next_page: str | None


class BucketPlan(msgspec.Struct, frozen=True):
    """The buckets of one page. They start at multiples of `width`, UTC; the first and the last are cut to `start` and
    `end`. All times are in seconds.
    """

    width: int
    start: int
    end: int
    """The end of this page."""
    final: int
    """The end of the whole answer."""

    @property
    def indices(self) -> range:
        """Indices of the buckets, counted since the epoch."""
        return range(self.start // self.width, -(-self.end // self.width))

    def page(self, results: Mapping[int, Sequence[Result]]) -> Page[Result]:
        """Distribute the results over all buckets, empty ones too."""
        buckets = [
            Bucket(
                start_time=max(index * self.width, self.start),
                end_time=min((index + 1) * self.width, self.end),
                results=tuple(results.get(index, ())),
            )
            for index in self.indices
        ]
        more = self.end < self.final
        return Page(data=tuple(buckets), has_more=more, next_page=f"page_{self.end:x}_{self.final:x}" if more else None)


class BucketQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Times in Unix seconds, start_time inclusive, end_time exclusive. Raises InvalidQuery for an inconsistent one."""

    widths: ClassVar[Mapping[str, BucketWidth]]
    groups: ClassVar[tuple[str, ...]]

    start_time: int
    end_time: int | None = None
    """None: now."""
    bucket_width: str = "1d"
    group_by: tuple[str, ...] = ()
    limit: int | None = None
    """Maximum number of buckets per page."""
    page: str | None = None
    top_models: int | None = None
    """Number of models that keep their names if usage is grouped by model: the models with the most tokens from start
    to end.
    """

    def __post_init__(self) -> None:
        if self.bucket_width not in self.widths:
            raise InvalidQuery(f"bucket_width is one of {', '.join(self.widths)}", "bucket_width")
        if not 0 <= self.start_time <= LATEST:
            raise InvalidQuery(f"start_time is a Unix time in seconds, 0 to {LATEST}", "start_time")
        if self.end_time is not None and not self.start_time < self.end_time <= LATEST:
            raise InvalidQuery(f"end_time is a Unix time in seconds after start_time, at most {LATEST}", "end_time")
        unknown = [name for name in self.group_by if name not in self.groups]
        if unknown:
            raise InvalidQuery(f"group_by takes {', '.join(self.groups)}; not {unknown[0][:40]}", "group_by")
        if len(set(self.group_by)) < len(self.group_by):
            raise InvalidQuery("group_by names a column once", "group_by")
        if self.limit is not None and not 1 <= self.limit <= self.width.max_limit:
            raise InvalidQuery(f"limit is 1 to {self.width.max_limit} for bucket_width={self.bucket_width}", "limit")
        if self.top_models is not None and not (1 <= self.top_models <= MAX_FILTER and "model" in self.group_by):
            raise InvalidQuery(f"top_models is 1 to {MAX_FILTER}, together with group_by=model", "top_models")
        if self.page is not None and not self._continues():
            raise InvalidQuery("page is the next_page of an earlier answer to this query, unchanged", "page")

    @classmethod
    def most_buckets(cls) -> int:
        """Return the maximum number of buckets of a page over all widths."""
        return max(width.max_limit for width in cls.widths.values())

    @property
    def width(self) -> BucketWidth:
        """The width that `bucket_width` names."""
        return self.widths[self.bucket_width]

    def cut(self, start: int, end: int) -> tuple[int, int]:
        """Return the start of the first bucket and the end of the last bucket of an answer from `start` to `end`."""
        return start, end

    def plan(self, now: int) -> BucketPlan:
        """Return the requested page; a later page keeps its first page's end. `now` is in seconds."""
        start, final = self._page_span() if self.page is not None else self._span(now)
        width, limit = self.width.seconds, self.limit or self.width.default_limit
        return BucketPlan(width, start, min(final, (start // width + limit) * width), final)

    def whole(self, now: int) -> tuple[int, int]:
        """Return the start and the end of the whole answer over all its pages, in seconds."""
        return self.cut(self.start_time, 0)[0], self.plan(now).final

    def _span(self, now: int) -> tuple[int, int]:
        end = self.end_time if self.end_time is not None else max(now, self.start_time) + 1
        return self.cut(self.start_time, end)

    def _continues(self) -> bool:
        start, end = self._page_span()
        latest = self.cut(0, LATEST)[1]
        return self.start_time <= start < end <= latest and (self.end_time is None or end == self._span(0)[1])

    def _page_span(self) -> tuple[int, int]:
        match = _page.fullmatch(self.page or "")
        return (int(match[1], 16), int(match[2], 16)) if match else (0, 0)


class UsageQuery(BucketQuery, frozen=True, kw_only=True):
    """A query of token counts by time, groups and filters."""

    widths: ClassVar[Mapping[str, BucketWidth]] = {
        "1m": BucketWidth(60, 60, 1440),
        "1h": BucketWidth(3600, 24, 168),
        "1d": BucketWidth(86400, 7, 31),
    }
    groups: ClassVar[tuple[str, ...]] = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")

    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()
    user_ids: tuple[str, ...] = ()
    project_ids: tuple[str, ...] = ()
    batch: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("models", "api_key_ids", "user_ids", "project_ids"):
            values = getattr(self, field)
            if len(values) > MAX_FILTER or not all(value.isprintable() for value in values):
                raise InvalidQuery(f"{field} takes at most {MAX_FILTER} names, of printable characters", field)

    @property
    def recorded_groups(self) -> tuple[str, ...]:
        """The columns of the requested groups."""
        columns = [name for name in ("model", "api_key_id", "project_id", "user_id") if name in self.group_by]
        by_tier = "batch" in self.group_by or "service_tier" in self.group_by
        return (*columns, "tier") if by_tier else tuple(columns)

    def window(
        self, now: int, allowed: frozenset[str] | None = None, project_id: ProjectId | None = None
    ) -> UsageWindow:
        """Return the window of the ledger to sum; `now` in seconds."""
        plan = self.plan(now)
        return UsageWindow(
            start=plan.start * SECOND,
            end=plan.end * SECOND,
            width=plan.width * SECOND,
            models=self.models,
            api_key_ids=self.api_key_ids,
            user_ids=self.user_ids,
            project_ids=self.project_ids,
            batch=self.batch,
            shadows="service_tier" in self.group_by,
            allowed=allowed,
            project_id=project_id,
        )

    def whole_window(self, window: UsageWindow, now: int) -> UsageWindow:
        """Return the window over all pages, in buckets of a day."""
        start, end = self.whole(now)
        return msgspec.structs.replace(window, start=start * SECOND, end=end * SECOND, width=DAY)

    def answer(self, totals: list[UsageTotals], now: int) -> UsagePage:
        """Return the page with these sums."""
        by_bucket: dict[int, list[UsageResult]] = {}
        for (bucket, *_), total in self._merged(totals).items():
            by_bucket.setdefault(bucket, []).append(self._result(total))
        return self.plan(now).page(by_bucket)

    def _merged(self, totals: list[UsageTotals]) -> dict[tuple[Any, ...], UsageTotals]:
        """Add up the sums that differ only in columns that were not requested: a tenant's tiers, and perhaps service
        tiers."""
        merged: dict[tuple[Any, ...], UsageTotals] = {}
        for total in totals:
            tier = None if total.tier is None else service_tier(total.tier)
            if "service_tier" not in self.group_by and tier not in (None, "batch"):
                tier = "default"
            one = msgspec.structs.replace(total, tier=tier)
            key = (one.bucket, one.model, one.api_key_id, one.project_id, one.user_id, tier)
            same = merged.get(key)
            merged[key] = one if same is None else same + one
        return merged

    def _result(self, total: UsageTotals) -> UsageResult:
        by_tier = "service_tier" in self.group_by
        return UsageResult(
            input_tokens=total.tokens.prompt,
            output_tokens=total.tokens.output,
            input_cached_tokens=total.tokens.cached,
            input_image_tokens=total.tokens.image,
            num_model_requests=total.requests,
            waived_input_tokens=total.waived.prompt if by_tier else UNSET,
            waived_output_tokens=total.waived.output if by_tier else UNSET,
            project_id=total.project_id,
            user_id=total.user_id,
            api_key_id=total.api_key_id,
            model=total.model,
            batch=total.tier == "batch" if "batch" in self.group_by else None,
            service_tier=total.tier if by_tier else None,
        )


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sum of usage. The last six fields are null unless group_by names them."""

    object: str = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_image_tokens: int = 0
    """Tokens of images, without those among `input_cached_tokens`."""
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    waived_input_tokens: int | UnsetType = UNSET
    """Input tokens computed but not charged: for shadows, and for answers that no caller could read. The field is
    present only if usage is grouped by service tier.
    """
    waived_output_tokens: int | UnsetType = UNSET
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


UsageBucket = Bucket[UsageResult]
UsagePage = Page[UsageResult]
