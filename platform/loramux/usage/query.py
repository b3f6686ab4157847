"""OpenAI's usage query and its answer, field for field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from loramux.records import ProjectId
from loramux.records.service_tiers import service_tier
from loramux.records.usage import UsageTotals, UsageWindow
from loramux.units import DAY, SECOND
from loramux.usage.buckets import MAX_FILTER, Bucket, BucketQuery, BucketWidth, Page
from loramux.usage.errors import InvalidQuery


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
        """Return the window over all pages, as one bucket of days where its ends are."""
        start, end = self.whole(now)
        return msgspec.structs.replace(window, start=start * SECOND, end=end * SECOND, width=DAY)

    def answer(self, totals: list[UsageTotals], now: int) -> UsagePage:
        """Return the page of these sums."""
        by_bucket: dict[int, list[UsageResult]] = {}
        for (bucket, *_), total in self._merged(totals).items():
            by_bucket.setdefault(bucket, []).append(self._result(total))
        return self.plan(now).page(by_bucket)

    def _merged(self, totals: list[UsageTotals]) -> dict[tuple[Any, ...], UsageTotals]:
        """Add up the sums that differ only in what was not asked for: a tenant's tiers, and perhaps service tiers."""
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
    """One sum. The last six are null unless group_by names them."""

    object: str = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    waived_input_tokens: int | UnsetType = UNSET
    """Computed and not charged: of shadows, and of answers that no caller could read. Only by service tier."""
    waived_output_tokens: int | UnsetType = UNSET
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


UsageBucket = Bucket[UsageResult]
UsagePage = Page[UsageResult]
