"""Canary guards: a revision that is found worse than the one before leaves its alias by itself.

The newest target of an alias is its canary, the others are what it is compared with. Their requests since the hour of
the alias's last change are compared by a sequential test (`statistics.drop_found`), which may be looked at as often as
one likes: of a hundred canaries that are as good, at most five are ever taken back.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

import msgspec

from loramux.errors import LoramuxError
from loramux.gateway import Platform, run_periodically
from loramux.records import Principal
from loramux.records.canary_guards import CanaryGuardRepository, CanaryGuardRow, GuardedCanary
from loramux.records.revision_metrics import (
    FIRST_TOKEN_BOUNDS,
    FIRST_TOKENS,
    Counts,
    FeedbackSums,
    sums_of_models,
)
from loramux.records.webhooks import CANARY_ROLLED_BACK, CanaryNumbers, EventDetail, EventRepository
from loramux.registry import PartNotFound, Preconditions, WeightedRevision, etag
from loramux.releases.metrics import HOUR, THOUSAND
from loramux.releases.statistics import drop_found
from loramux.tenants import system_principal

ERRORS, FEEDBACK, LATENCY = "errors", "feedback", "latency"
MEASURES = (ERRORS, FEEDBACK, LATENCY)
ALPHA = 0.05
"""Of canaries that are as good as the revision before, the share that is ever taken back by one measure."""
WATCH_SECONDS = 10.0

logger = logging.getLogger(__name__)
Rate = tuple[float, int]
"""Good outcomes, and all of them."""


class InvalidGuard(LoramuxError):
    """The message says what is wrong."""


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard of an alias compares."""

    measures: tuple[str, ...]
    first_token_seconds: float | None = None
    """For `latency`: a first token within it is a good one."""


NO_GUARD = Guard(measures=())


class CanaryGuards:
    """Guards of every tenant's aliases."""

    def __init__(self, platform: Platform) -> None:
        self._database = platform.database
        self._adapters = platform.adapters

    async def put(
        self,
        principal: Principal,
        adapter: str,
        alias: str,
        measures: Collection[str],
        first_token_seconds: float | None = None,
    ) -> Guard:
        """Guard an alias. Raises InvalidGuard, AdapterNotFound, PartNotFound."""
        chosen = tuple(sorted(set(measures)))
        if not chosen or not set(chosen) <= set(MEASURES):
            raise InvalidGuard(f"'measures' are some of {', '.join(MEASURES)}.", "measures")
        if (LATENCY in chosen) != (first_token_seconds is not None) or (
            first_token_seconds is not None and first_token_seconds not in FIRST_TOKEN_BOUNDS
        ):
            bounds = ", ".join(f"{bound:g}" for bound in FIRST_TOKEN_BOUNDS)
            raise InvalidGuard(
                "'first_token_seconds' belongs to the measure 'latency', and is one of the bounds that first tokens "
                f"are counted by: {bounds}.",
                "first_token_seconds",
            )
        adapter_id = await self._own(principal, adapter, alias)
        async with self._database.begin() as session:
            row = CanaryGuardRow(
                adapter_id=adapter_id,
                alias=alias,
                tenant_id=principal.tenant,
                measures=" ".join(chosen),
                first_token_seconds=first_token_seconds,
                created_at=self._database.now(),
            )
            await CanaryGuardRepository(session).put(row)
        return Guard(measures=chosen, first_token_seconds=first_token_seconds)

    async def get(self, principal: Principal, adapter: str, alias: str) -> Guard:
        """Return what the guard of an alias compares; nothing without one. Raises AdapterNotFound, PartNotFound."""
        adapter_id = await self._own(principal, adapter, alias)
        async with self._database.read() as session:
            row = await CanaryGuardRepository(session).get(adapter_id, alias)
        if row is None:
            return NO_GUARD
        return Guard(measures=tuple(row.measures.split()), first_token_seconds=row.first_token_seconds)

    async def remove(self, principal: Principal, adapter: str, alias: str) -> None:
        """Remove the guard of an alias, if it has one. Raises AdapterNotFound, PartNotFound."""
        adapter_id = await self._own(principal, adapter, alias)
        async with self._database.begin() as session:
            guards = CanaryGuardRepository(session)
            if (row := await guards.get(adapter_id, alias)) is not None:
                await guards.remove(row)

    async def watch(self) -> None:
        """Look at every guarded canary, and take back those that are worse."""
        async with self._database.read() as session:
            canaries = await CanaryGuardRepository(session).canaries()
        for canary in canaries:
            async with self._database.read() as session:
                models = [f"{canary.tenant_name}/{canary.adapter}@{number}" for number, _ in canary.targets]
                since = canary.since - canary.since % HOUR
                counts, feedback = await sums_of_models(session, models, since)
            for measure in canary.measures:
                numbers = compared(models, measure, counts, feedback, canary.first_token_seconds)
                good, total = numbers.candidate
                if drop_found(good, total, *numbers.before, ALPHA):
                    await self._take_back(canary, numbers)
                    break

    async def _take_back(self, canary: GuardedCanary, numbers: CanaryNumbers) -> None:
        """Point the alias at its other targets, unless the adapter has changed since it was looked at."""
        principal = system_principal(canary.tenant, canary.tenant_name)
        name = f"{canary.tenant_name}/{canary.adapter}"
        try:
            info = await self._adapters.queries.get(principal, name)
            alias = next((one for one in info.aliases if one.name == canary.alias), None)
            targets = () if alias is None else tuple((one.revision, one.weight) for one in alias.targets)
            if targets != canary.targets:
                return
            others = [WeightedRevision(number, weight) for number, weight in canary.targets[:-1]]
            condition = Preconditions(if_match=etag(info.version))
            await self._adapters.aliases.point(principal, name, canary.alias, others, condition)
        except LoramuxError as error:
            logger.warning("the canary of %s:%s stays: %s", name, canary.alias, error)
            return
        logger.warning("the canary of %s:%s was taken back: %s", name, canary.alias, numbers)
        detail = EventDetail(revision=canary.targets[-1][0], canary=numbers)
        async with self._database.begin() as session:
            events = EventRepository(session, canary.tenant)
            await events.add(CANARY_ROLLED_BACK, canary.adapter, detail, self._database.now())

    async def _own(self, principal: Principal, adapter: str, alias: str) -> str:
        """Return the id of the caller's own adapter, which has the alias."""
        info = await self._adapters.queries.get(principal, adapter)
        is_own = info.name.partition("/")[0] == principal.tenant_name
        if not is_own or alias not in [one.name for one in info.aliases]:
            raise PartNotFound("alias", adapter, f"has no alias {alias[:80]!r} of yours.")
        return info.id


def compared(
    models: list[str],
    measure: str,
    counts: Mapping[str, Counts],
    feedback: Mapping[str, FeedbackSums],
    first_token_seconds: float | None = None,
) -> CanaryNumbers:
    """Return the good and all outcomes of the canary, the last of `models`, and of the others together."""

    def rate(of: list[str]) -> Rate:
        if measure == FEEDBACK:
            sums = [feedback.get(model, FeedbackSums(0, 0)) for model in of]
            return sum(one.total for one in sums) / THOUSAND, sum(one.number for one in sums)
        rows = [counts[model] for model in of if model in counts]
        if measure == LATENCY:
            assert first_token_seconds is not None, "a guard of latency has a bound"
            good = FIRST_TOKENS[: FIRST_TOKEN_BOUNDS.index(first_token_seconds) + 1]
            in_time, all_ = (sum(row[name] for row in rows for name in names) for names in (good, FIRST_TOKENS))
            return in_time, all_
        completed, failed = (sum(row[name] for row in rows) for name in ("completed", "failed"))
        aborted = sum(row["abort"] for row in rows)
        return max(0, completed - aborted), completed + failed

    return CanaryNumbers(measure=measure, candidate=rate(models[-1:]), before=rate(models[:-1]))


@asynccontextmanager
async def open_canary_guards(platform: Platform) -> AsyncIterator[CanaryGuards]:
    """Watch guarded canaries while the block runs."""
    guards = CanaryGuards(platform)
    async with run_periodically(WATCH_SECONDS, guards.watch):
        yield guards
