"""Metrics of revisions: requests are counted in memory, added every few seconds to a row per hour, and summed over
windows.

A tenant sees its own requests, both to its own adapters and to adapters that are granted to it. A key of a project sees
the project's requests. The number of rows is bounded: one per hour for each revision that got requests. A server that
dies loses the counts since the last write.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.catalog.registry.entities import AliasVersion
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import run_periodically
from loramux.common.units import DAY, SECOND
from loramux.data.entities import FIRST_TOKEN_BOUNDS
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.requests import OpenedRequest, is_shadow, service_tier
from loramux.data.records.revision_metrics import (
    FIRST_TOKENS,
    Caller,
    Counts,
    Feedback,
    FeedbackRepository,
    FeedbackRow,
    RevisionHour,
    RevisionMetricsRepository,
)
from loramux.serving.generation import Generation
from loramux.serving.service import CompletionService

HOUR = 3600 * SECOND
WINDOWS = {"1h": HOUR, "24h": DAY, "7d": 7 * DAY, "30d": 30 * DAY}
KEPT = 90 * DAY
FLUSH_SECONDS = 5.0
FORGET_SECONDS = 3600.0
MAX_MODELS = 1000
"""Models in one report of service levels."""
MAX_LABELS = 200
"""Labels, over all revisions, in one answer."""
MAX_VERSIONS = 20
"""Versions of an alias in one answer."""
THOUSAND = 1000
_label = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

logger = logging.getLogger(__name__)


class InvalidFeedback(LoramuxError):
    """A score or a label out of range."""


class RequestNotFound(LoramuxError):
    """The request does not exist, was not answered by an adapter, or belongs to another tenant or project."""

    code = "request_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"No such request: '{id[:80]}'. The id is the `id` of the answer.", "request_id")


class FeedbackSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Opinions of a revision's answers."""

    count: int
    mean_score: float | None
    labels: dict[str, int]
    """Number of opinions by label, of the most frequent labels."""


class RevisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a revision in a window of time."""

    model: str
    """The revision, as `tenant/adapter@3`."""
    requests: int
    """Number of all requests, including refused requests."""
    completed: int
    cancelled: int
    """Number of requests that their callers cancelled."""
    failed: int
    refused: int
    """Number of requests that limits refused before they began."""
    finish_reasons: dict[str, int]
    """Number of choices by finish reason."""
    prompt_tokens: int
    output_tokens: int
    first_token_seconds: dict[str, float | None]
    """Seconds until the first token: quantiles p50, p90, p99, as exact as the counters' bounds. Batches are not
    included.
    """
    tokens_per_second: float | None
    """Output tokens per second of one answer, measured from its first token."""
    feedback: FeedbackSummary


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Service levels that a model has reached for a tenant in a window of time."""

    model: str
    """The model: `tenant/adapter@3`, or the base model's name."""
    requests: int
    """Requests that were accepted and have ended."""
    availability: float | None
    """The share of these requests that the server did not fail, 0 to 1; null without requests."""
    first_tokens: int
    """Number of answers that began, without lines of batches."""
    first_tokens_in_time: float | None
    """The share of these answers whose first token came in time, 0 to 1; null without answers."""


class VersionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of an alias's targets while it had them. Times in Unix seconds."""

    version: int
    """The number of the version in the alias's history."""
    since: int
    until: int
    """The time of the next change, or now. Counts are by the hour, and the first and the last hour count whole."""
    revisions: list[RevisionReport]
    """The version's targets that got requests, newest first."""


class RevisionMetrics:
    """Counts requests by revision on this server, and reports the counts of all servers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: defaultdict[RevisionHour, Counter[str]] = defaultdict(Counter)

    def note_ended(self, generation: Generation) -> None:
        """Count a request that has ended. Shadows do not count, because they have no caller."""
        opened = generation.opened
        if is_shadow(opened.tier):
            return
        usage, first, seconds = generation.usage, generation.seconds_to_first_token, generation.seconds
        counts = self._counts_of(opened)
        counts[generation.status] += 1
        for reason in generation.finish_reasons:
            counts[reason if reason in ("length", "abort") else "stop"] += 1
        counts["prompt_tokens"] += usage.prompt
        counts["output_tokens"] += usage.output
        if first is not None and service_tier(opened.tier) != "batch":
            counts[FIRST_TOKENS[bisect_left(FIRST_TOKEN_BOUNDS, first)]] += 1
        if first is not None and seconds is not None and len(generation.finish_reasons) == 1 and usage.output > 1:
            counts["decode_tokens"] += usage.output - 1
            counts["decode_us"] += round((seconds - first) * SECOND)

    def note_refused(self, opened: OpenedRequest) -> None:
        """Count a request that limits have refused."""
        self._counts_of(opened)["refused"] += 1

    async def flush(self) -> None:
        """Write the counts. If the database does not accept them, keep them."""
        counts, self._counts = self._counts, defaultdict(Counter)
        if not counts:
            return
        try:
            async with self._database.begin() as session:
                await RevisionMetricsRepository(session).add({key: dict(one) for key, one in counts.items()})
        except RecordsUnavailable as error:
            logger.warning("metrics of %d revisions are written later: %s", len(counts), error)
            for key, one in counts.items():
                self._counts[key] += one

    async def forget(self) -> None:
        """Delete hours that are older than the longest window."""
        async with self._database.begin() as session:
            await RevisionMetricsRepository(session).forget(self._database.now() - KEPT)

    async def of(self, principal: Principal, adapter: str, window: str) -> list[RevisionReport]:
        """Report on the revisions of `owner/adapter` that the caller has used in a window, newest first."""
        now = self._database.now()
        async with self._database.read() as session:
            return await _reports(session, _caller(principal), adapter, now - WINDOWS[window], now)

    async def of_versions(
        self, principal: Principal, adapter: str, versions: Sequence[AliasVersion]
    ) -> list[VersionReport]:
        """Report on the newest versions of an alias of `owner/adapter`, which come newest first."""
        until, reports = self._database.now(), []
        async with self._database.read() as session:
            for version in versions[:MAX_VERSIONS]:
                names = {f"{adapter}@{target.revision}" for target in version.targets}
                found = await _reports(session, _caller(principal), adapter, version.changed_at, until)
                reports.append(
                    VersionReport(
                        version=version.version,
                        since=version.changed_at // SECOND,
                        until=until // SECOND,
                        revisions=[report for report in found if report.model in names],
                    )
                )
                until = version.changed_at
        return reports

    async def service_levels(self, principal: Principal, window: str, first_token_s: float) -> list[ServiceLevel]:
        """Report the service levels of each model that the caller may use, over the caller's requests in a window.

        `first_token_s` is one of FIRST_TOKEN_BOUNDS, because there are no counters between two bounds.
        """
        within = FIRST_TOKENS[: FIRST_TOKEN_BOUNDS.index(first_token_s) + 1]
        since = self._database.now() - WINDOWS[window]
        async with self._database.read() as session:
            metrics = RevisionMetricsRepository(session)
            sums = await metrics.sums_by_model(_caller(principal), since - since % HOUR, MAX_MODELS)
        return [
            _service_level(model, counts, within)
            for model, counts in sums.items()
            if principal.may_use(model.partition("@")[0])
        ]

    async def put_feedback(self, principal: Principal, request_id: str, score: float, label: str | None) -> str:
        """Store the caller's rating of an answer; return the model that gave the answer.

        Raises InvalidFeedback, RequestNotFound.
        """
        if not 0 <= score <= 1:
            raise InvalidFeedback("'score' is 0 (bad) to 1 (good).", "score")
        if label is not None and not _label.fullmatch(label):
            raise InvalidFeedback("'label' is 1 to 64 of a-z, 0-9, '.', '_' and '-'.", "label")
        async with self._database.begin() as session:
            feedback = FeedbackRepository(session, _caller(principal))
            model = await feedback.model_of(request_id)
            if model is None or "@" not in model or not principal.may_use(model.partition("@")[0]):
                raise RequestNotFound(request_id)
            row = FeedbackRow(
                request_id=request_id,
                tenant_id=principal.tenant,
                model=model,
                score=round(score * THOUSAND),
                label=label,
                created_at=self._database.now(),
            )
            await feedback.put(row)
        return model

    def _counts_of(self, opened: OpenedRequest) -> Counter[str]:
        now = self._database.now()
        return self._counts[RevisionHour(opened.tenant_id, opened.project_id or "", opened.model, now - now % HOUR)]


def _caller(principal: Principal) -> Caller:
    return Caller(principal.tenant, principal.bound_project)


async def _reports(session: AsyncSession, caller: Caller, adapter: str, since: int, until: int) -> list[RevisionReport]:
    sums = await RevisionMetricsRepository(session).sums(caller, adapter, since - since % HOUR, until)
    opinions = list(await FeedbackRepository(session, caller).sums(adapter, since, until, MAX_LABELS))
    reports = [_report(model, counts, opinions) for model, counts in sums.items()]
    return sorted(reports, key=lambda report: int(report.model.rpartition("@")[2]), reverse=True)


def _report(model: str, counts: Counts, opinions: list[Feedback]) -> RevisionReport:
    first_tokens = [counts[name] for name in FIRST_TOKENS]
    decode_us = counts["decode_us"]
    return RevisionReport(
        model=model,
        requests=sum(counts[name] for name in ("completed", "cancelled", "failed", "refused")),
        completed=counts["completed"],
        cancelled=counts["cancelled"],
        failed=counts["failed"],
        refused=counts["refused"],
        finish_reasons={name: counts[name] for name in ("stop", "length", "abort")},
        prompt_tokens=counts["prompt_tokens"],
        output_tokens=counts["output_tokens"],
        first_token_seconds={f"p{percent}": quantile(first_tokens, percent / 100) for percent in (50, 90, 99)},
        tokens_per_second=round(counts["decode_tokens"] * SECOND / decode_us, 3) if decode_us else None,
        feedback=_summary([one for one in opinions if one.model == model]),
    )


def _service_level(model: str, counts: Counts, within: Sequence[str]) -> ServiceLevel:
    answered = sum(counts[name] for name in FIRST_TOKENS)
    ended = counts["completed"] + counts["cancelled"] + counts["failed"]
    return ServiceLevel(
        model=model,
        requests=ended,
        availability=1 - counts["failed"] / ended if ended else None,
        first_tokens=answered,
        first_tokens_in_time=sum(counts[name] for name in within) / answered if answered else None,
    )


def _summary(opinions: list[Feedback]) -> FeedbackSummary:
    count = sum(one.count for one in opinions)
    mean = sum(one.total for one in opinions) / THOUSAND / count if count else None
    labels = {one.label: one.count for one in opinions if one.label is not None}
    return FeedbackSummary(count=count, mean_score=mean, labels=labels)


def quantile(counts: list[int], share: float) -> float | None:
    """Return the seconds that `share` of the first tokens do not exceed; interpolate linearly between two bounds."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, bounds = 0.0, (*FIRST_TOKEN_BOUNDS, FIRST_TOKEN_BOUNDS[-1])
    for number, count in enumerate(counts):
        if count and wanted <= count:
            return round(below + (bounds[number] - below) * wanted / count, 4)
        wanted -= count
        below = bounds[number]
    return below


@asynccontextmanager
async def open_revision_metrics(database: Database, completions: CompletionService) -> AsyncIterator[RevisionMetrics]:
    """Count while the block runs; at its end, write the remaining counts."""
    metrics = RevisionMetrics(database)
    completions.on_ended(metrics.note_ended)
    completions.on_refused(metrics.note_refused)
    async with run_periodically(FLUSH_SECONDS, metrics.flush), run_periodically(FORGET_SECONDS, metrics.forget):
        yield metrics
    try:
        await metrics.flush()
    except Exception:
        logger.exception("the last metrics of revisions are lost")
