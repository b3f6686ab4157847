"""Safeguards of an alias: a policy that a revision must pass before a release, and a guard that removes a bad canary.

*Release policies.* A revision gets most of an alias's requests only if it meets the owner's demands. A policy is
checked in the transaction that moves the alias, so nothing changes between the check and the move. A policy applies if
a revision gets at least the same share of the alias as the main revision. A smaller share is a canary, and canaries
provide the numbers for the check. A return to earlier targets of the alias is never refused.

*Canary guards.* A guard removes a revision that is worse than the one before from the alias. The target that was added
last is an alias's canary (`canary_of`); it is compared with the other targets. Their requests since the hour of the
alias's last change are compared by a sequential test (`statistics.drop_found`), which may be repeated as often as one
likes. Of a hundred canaries that are as good as the others, at most five are ever removed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated

import msgspec
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.tenants import system_principal
from loramux.catalog.registry.aliases import check_alias
from loramux.catalog.registry.changes import AdapterChange, ChangeService, Preconditions
from loramux.catalog.registry.entities import AliasInfo, WeightedRevision, etag
from loramux.catalog.registry.errors import PartNotFound
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import run_periodically
from loramux.common.units import DAY, SECOND
from loramux.data.entities import FIRST_TOKEN_BOUNDS, CanaryNumbers, EventDetail
from loramux.data.records.aliases import (
    CanaryGuardRepository,
    CanaryGuardRow,
    GuardedCanary,
    ReleasePolicyRepository,
    ReleasePolicyRow,
)
from loramux.data.records.comparisons import EvaluationRepository
from loramux.data.records.database import Database
from loramux.data.records.revision_metrics import FIRST_TOKENS, Counts, FeedbackSums, sums_of_models
from loramux.data.records.webhooks import CANARY_ROLLED_BACK, EventRepository
from loramux.releases.comparison import EvaluationResult
from loramux.releases.metrics import HOUR, THOUSAND, quantile
from loramux.releases.statistics import drop_found
from loramux.serving.adapters import AdapterService

OBSERVED = 30 * DAY
"""The period whose requests to a revision count: the last 30 days, of all tenants."""
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=10**9)]
ERRORS, FEEDBACK, LATENCY = "errors", "feedback", "latency"
MEASURES = (ERRORS, FEEDBACK, LATENCY)
ALPHA = 0.05
"""Maximum probability that one measure removes a canary that is as good as the earlier revision."""
WATCH_SECONDS = 10.0
Rate = tuple[float, int]
"""The number of good outcomes, and of all outcomes."""

logger = logging.getLogger(__name__)


class EvaluationRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Demand that in the newest evaluation the new revision is not worse than the current revision."""

    margin: Share = 0.0
    """The amount by which the lower end of the difference's confidence interval may be below 0."""
    min_questions: Count = 30
    file_id: Annotated[str, Meta(max_length=100)] | None = None
    """The set of questions that the evaluation must have used; None: any set."""


class ReleasePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Demands on a revision. A field that is left out demands nothing."""

    evaluation: EvaluationRule | None = None
    min_requests: Count | None = None
    """Minimum number of answered requests to the revision, without lines of batches."""
    max_error_rate: Share | None = None
    """Maximum share of the revision's requests that the server failed, or in which a choice was aborted."""
    max_first_token_p99_seconds: Annotated[float, Meta(gt=0)] | None = None
    min_tokens_per_second: Annotated[float, Meta(gt=0)] | None = None


class PolicyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One demand of a policy on one revision."""

    rule: str
    """The name of the policy's field."""
    passed: bool
    message: str
    """A sentence with the number that was found and the number that is demanded."""


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The current policy, and its checks of one revision."""

    policy: ReleasePolicy | None
    current: int | None
    """The revision that gets most of the alias's requests."""
    checks: tuple[PolicyCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether the revision may take most of the requests."""
        return all(check.passed for check in self.checks)


class InvalidPolicy(LoramuxError):
    """The policy is not valid; the message gives the reason."""


class ReleaseRefused(LoramuxError):
    """A revision does not pass the policy; the message has the numbers."""

    code = "release_policy"
    status = HTTPStatus.CONFLICT


class ReleasePolicies:
    """Policies of every tenant's aliases. A policy is checked before its alias moves."""

    def __init__(self, database: Database, adapters: AdapterService) -> None:
        self._database = database
        self._queries = adapters.queries
        self._changes = ChangeService(database)
        adapters.aliases.require(self.ensure_allowed)

    async def put(
        self, principal: Principal, adapter: str, alias: str, policy: ReleasePolicy, preconditions: Preconditions
    ) -> ReleasePolicy:
        """Set the policy of an alias, which need not exist yet. Raises InvalidPolicy, AdapterNotFound."""
        check_alias(alias)
        if policy == ReleasePolicy():
            names = ", ".join(ReleasePolicy.__struct_fields__)
            raise InvalidPolicy(f"A policy demands something: one or more of {names}. DELETE removes a policy.")

        async def act(change: AdapterChange) -> ReleasePolicy:
            policies = ReleasePolicyRepository(change.session)
            before = _policy_of(await policies.get(change.adapter.id, alias))
            row = ReleasePolicyRow(
                adapter_id=change.adapter.id,
                alias=alias,
                tenant_id=principal.tenant,
                policy=msgspec.json.encode(policy).decode(),
                changed_by=change.stamp.by,
                changed_at=change.now,
            )
            await policies.put(row)
            await change.record("policy.put", f":{alias}", before=before, after=policy)
            return policy

        return await self._changes.change(principal, adapter, preconditions, act, ReleasePolicy)

    async def remove(self, principal: Principal, adapter: str, alias: str, preconditions: Preconditions) -> None:
        """Remove the policy of an alias if it exists. Raises AdapterNotFound."""

        async def act(change: AdapterChange) -> bool:
            policies = ReleasePolicyRepository(change.session)
            before = _policy_of(await policies.get(change.adapter.id, alias))
            if before is not None:
                await policies.remove(change.adapter.id, alias)
                await change.record("policy.remove", f":{alias}", before=before)
            return True

        await self._changes.change(principal, adapter, preconditions, act, bool)

    async def report(self, principal: Principal, adapter: str, alias: str, revision: int | None) -> PolicyReport:
        """Return the policy of an alias and its present checks of a revision. Raises AdapterNotFound."""
        info = await self._queries.get(principal, adapter)
        if info.name.partition("/")[0] != principal.tenant_name:
            raise PartNotFound("alias", adapter, "is another tenant's adapter: its policies are its owner's.")
        present = next((one for one in info.aliases if one.name == alias), None)
        current = None if present is None else present.main
        async with self._database.read() as session:
            policy = _policy_of(await ReleasePolicyRepository(session).get(info.id, alias))
            if policy is None or revision is None or current in (None, revision):
                return PolicyReport(policy=policy, current=current)
            assert current is not None
            checks = await self._checked(session, principal, policy, info.name, revision, current)
        return PolicyReport(policy=policy, current=current, checks=checks)

    async def ensure_allowed(
        self, principal: Principal, change: AdapterChange, before: AliasInfo, targets: Sequence[WeightedRevision]
    ) -> None:
        """Raise ReleaseRefused if the targets give most of the alias's requests to a revision that does not pass."""
        weights = {target.revision: target.weight for target in targets}
        current = before.main
        rising = [number for number, weight in weights.items() if weight >= weights.get(current, 0)]
        candidates = [number for number in rising if number != current]
        row = await ReleasePolicyRepository(change.session).get(change.adapter.id, before.name)
        policy = _policy_of(row)
        if policy is None:
            return
        for number in candidates:
            checks = await self._checked(change.session, principal, policy, change.name, number, current)
            failed = [check.message for check in checks if not check.passed]
            if failed:
                raise ReleaseRefused(
                    f"{change.name}@{number} does not pass the release policy of `{before.name}`, which @{current} "
                    f"has now: {'; '.join(failed)}. A smaller share than that of @{current} is allowed (a canary); "
                    f"`loramux adapter policy {change.adapter.name}@{number}` shows every check.",
                    "revision",
                )

    async def _checked(
        self, session: AsyncSession, principal: Principal, policy: ReleasePolicy, name: str, number: int, current: int
    ) -> tuple[PolicyCheck, ...]:
        model, now = f"{name}@{number}", self._database.now()
        since = now - OBSERVED
        counts, _ = await sums_of_models(session, [model], since - since % HOUR)
        checks = observed(policy, counts.get(model))
        if (rule := policy.evaluation) is not None:
            found = await EvaluationRepository(session, principal.tenant).newest(
                f"{model} {name}@{current}", rule.file_id
            )
            result = None if found is None else msgspec.json.decode(found, type=EvaluationResult)
            checks.insert(0, evaluated(rule, result, number, current))
        return tuple(checks)


def evaluated(rule: EvaluationRule, result: EvaluationResult | None, number: int, current: int) -> PolicyCheck:
    """Check the newest evaluation of two revisions."""
    if result is None:
        on = "" if rule.file_id is None else f" on the set {rule.file_id}"
        message = f"evaluation: none of @{number} against @{current}{on} is completed"
        return PolicyCheck(rule="evaluation", passed=False, message=message)
    difference, least = result.difference, rule.min_questions
    passed = difference.low >= -rule.margin and result.questions >= least
    mine, other = result.candidate.score.mean, result.against.score.mean
    message = (
        f"evaluation: @{number} scores {mine:.3f}, @{current} {other:.3f} on {result.questions} questions (at least "
        f"{least} are demanded); the difference is {difference.mean:+.3f}, and its interval begins at "
        f"{difference.low:+.3f} (at least {-rule.margin:+.3f} is demanded)"
    )
    return PolicyCheck(rule="evaluation", passed=passed, message=message)


def observed(policy: ReleasePolicy, counts: Counts | None) -> list[PolicyCheck]:
    """Check the numbers of a revision in service. A revision without requests has no numbers."""
    seen = counts or {}
    first_tokens = [seen.get(name, 0) for name in FIRST_TOKENS]
    answered = sum(first_tokens)
    ended = seen.get("completed", 0) + seen.get("failed", 0)
    bad = min(ended, seen.get("failed", 0) + seen.get("abort", 0))
    decode_us = seen.get("decode_us", 0)
    pace = seen.get("decode_tokens", 0) * SECOND / decode_us if decode_us else None
    p99 = quantile(first_tokens, 0.99)
    checks = []
    if (least := policy.min_requests) is not None:
        message = f"min_requests: {answered} answered requests, {least} are demanded"
        checks.append(PolicyCheck(rule="min_requests", passed=answered >= least, message=message))
    if (most := policy.max_error_rate) is not None:
        message = f"max_error_rate: {bad} of {ended} requests failed, at most {100 * most:g}% may"
        checks.append(PolicyCheck(rule="max_error_rate", passed=bad <= most * ended and ended > 0, message=message))
    if (bound := policy.max_first_token_p99_seconds) is not None:
        shown = "no first token is counted" if p99 is None else f"{p99:g} s for 99 in 100 requests"
        message = f"max_first_token_p99_seconds: {shown}, at most {bound:g} s is allowed"
        passed = p99 is not None and p99 <= bound
        checks.append(PolicyCheck(rule="max_first_token_p99_seconds", passed=passed, message=message))
    if (slowest := policy.min_tokens_per_second) is not None:
        shown = "none is counted" if pace is None else f"{pace:,.1f} tokens/s"
        message = f"min_tokens_per_second: {shown}, at least {slowest:,g} tokens/s are demanded"
        passed = pace is not None and pace >= slowest
        checks.append(PolicyCheck(rule="min_tokens_per_second", passed=passed, message=message))
    return checks


def _policy_of(row: ReleasePolicyRow | None) -> ReleasePolicy | None:
    return None if row is None else msgspec.json.decode(row.policy, type=ReleasePolicy)


class InvalidGuard(LoramuxError):
    """The guard is not valid; the message gives the reason."""


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """The measures that the guard of an alias compares."""

    measures: tuple[str, ...]
    first_token_seconds: float | None = None
    """The bound in seconds for `latency`: a first token within this time is good."""


NO_GUARD = Guard(measures=())


class CanaryGuards:
    """Guards of every tenant's aliases."""

    def __init__(self, database: Database, adapters: AdapterService) -> None:
        self._database = database
        self._adapters = adapters

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
        """Return the measures of an alias's guard; empty without one. Raises AdapterNotFound, PartNotFound."""
        adapter_id = await self._own(principal, adapter, alias)
        async with self._database.read() as session:
            row = await CanaryGuardRepository(session).get(adapter_id, alias)
        if row is None:
            return NO_GUARD
        return Guard(measures=tuple(row.measures.split()), first_token_seconds=row.first_token_seconds)

    async def remove(self, principal: Principal, adapter: str, alias: str) -> None:
        """Remove the guard of an alias if it exists. Raises AdapterNotFound, PartNotFound."""
        adapter_id = await self._own(principal, adapter, alias)
        async with self._database.begin() as session:
            guards = CanaryGuardRepository(session)
            if (row := await guards.get(adapter_id, alias)) is not None:
                await guards.remove(row)

    async def watch(self) -> None:
        """Compare every guarded canary, and remove those that are worse."""
        async with self._database.read() as session:
            canaries = await CanaryGuardRepository(session).canaries()
        for canary in canaries:
            async with self._database.read() as session:
                others = [number for number, _ in canary.targets if number != canary.canary]
                models = [f"{canary.tenant_name}/{canary.adapter}@{number}" for number in (*others, canary.canary)]
                since = canary.since - canary.since % HOUR
                counts, feedback = await sums_of_models(session, models, since)
            for measure in canary.measures:
                numbers = compared(models, measure, counts, feedback, canary.first_token_seconds)
                good, total = numbers.candidate
                if drop_found(good, total, *numbers.before, ALPHA):
                    await self._take_back(canary, numbers)
                    break

    async def _take_back(self, canary: GuardedCanary, numbers: CanaryNumbers) -> None:
        """Point the alias at its other targets, unless the adapter has changed since the comparison."""
        principal = system_principal(canary.tenant, canary.tenant_name)
        name = f"{canary.tenant_name}/{canary.adapter}"
        try:
            info = await self._adapters.queries.get(principal, name)
            alias = next((one for one in info.aliases if one.name == canary.alias), None)
            targets = () if alias is None else tuple((one.revision, one.weight) for one in alias.targets)
            if targets != canary.targets:
                return
            others = [WeightedRevision(*target) for target in canary.targets if target[0] != canary.canary]
            condition = Preconditions(if_match=etag(info.version))
            await self._adapters.aliases.point(principal, name, canary.alias, others, condition, is_announced=False)
        except LoramuxError as error:
            logger.warning("the canary of %s:%s stays: %s", name, canary.alias, error)
            return
        logger.warning("the canary of %s:%s was taken back: %s", name, canary.alias, numbers)
        detail = EventDetail(revision=canary.canary, canary=numbers)
        async with self._database.begin() as session:
            events = EventRepository(session, canary.tenant)
            await events.add(CANARY_ROLLED_BACK, canary.adapter, detail, self._database.now())

    async def _own(self, principal: Principal, adapter: str, alias: str) -> str:
        """Return the id of the caller's own adapter that has the alias."""
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
    """Return the good and all outcomes of the canary (the last of `models`), and of all other targets together."""

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
async def open_canary_guards(database: Database, adapters: AdapterService) -> AsyncIterator[CanaryGuards]:
    """Watch guarded canaries while the block runs."""
    guards = CanaryGuards(database, adapters)
    async with run_periodically(WATCH_SECONDS, guards.watch):
        yield guards
