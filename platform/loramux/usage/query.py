"""OpenAI's question about usage and its answer, field for field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from loramux.records.usage import UsageTotals, UsageWindow
from loramux.usage.buckets import Bucket, BucketQuery, BucketWidth, Page
from loramux.usage.errors import InvalidQuery

SECOND = 1_000_000
"""Microseconds."""

MAX_FILTER = 100


class UsageQuery(BucketQuery, frozen=True, kw_only=True):
    """How many tokens, by what, and of whom."""

    widths: ClassVar[Mapping[str, BucketWidth]] = {
        "1m": BucketWidth(60, 60, 1440),
        "1h": BucketWidth(3600, 24, 168),
        "1d": BucketWidth(86400, 7, 31),
    }
    groups: ClassVar[tuple[str, ...]] = ("project_id", "user_id", "api_key_id", "model", "batch")

    models: tuple[str, ...] = ()
    api_key_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, values in (("models", self.models), ("api_key_ids", self.api_key_ids)):
            if len(values) > MAX_FILTER or not all(value.isprintable() for value in values):
                raise InvalidQuery(field, f"{field} takes at most {MAX_FILTER} names, of printable characters")

    @property
    def recorded_groups(self) -> tuple[str, ...]:
        """The asked groups that rows differ in; users and batches are not recorded."""
        return tuple(name for name in ("model", "api_key_id", "project_id") if name in self.group_by)

    def window(self, now: int) -> UsageWindow:
        """What to ask of the ledger; `now` in seconds."""
        plan = self.plan(now)
        return UsageWindow(
            start=plan.start * SECOND,
            end=plan.end * SECOND,
            width=plan.width * SECOND,
            models=self.models,
            api_key_ids=self.api_key_ids,
        )

    def answer(self, totals: list[UsageTotals], now: int) -> UsagePage:
        """The page of these sums."""
        by_bucket: dict[int, list[UsageResult]] = {}
        for total in totals:
            by_bucket.setdefault(total.bucket, []).append(self._result(total))
        return self.plan(now).page(by_bucket)

    def _result(self, total: UsageTotals) -> UsageResult:
        return UsageResult(
            input_tokens=total.input_tokens,
            output_tokens=total.output_tokens,
            input_cached_tokens=total.cached_tokens,
            num_model_requests=total.requests,
            project_id=total.project_id,
            api_key_id=total.api_key_id,
            model=total.model,
            batch=False if "batch" in self.group_by else None,
        )


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


UsageBucket = Bucket[UsageResult]
UsagePage = Page[UsageResult]
