"""Measured releases: metrics of revisions, release policies, canary guards, shadows, and feedback on answers.

Evaluations, which compare two revisions on a file of questions, are in `evaluations`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody
from msgspec import Meta

from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.entities import RevisionNumber
from loramux.common.identity import Principal
from loramux.releases.metrics import RevisionMetrics, RevisionReport, VersionReport
from loramux.releases.policies import MEASURES, CanaryGuards, Guard, PolicyCheck, ReleasePolicies, ReleasePolicy
from loramux.releases.shadows import ShadowReport, Shadows
from loramux.serving.adapters import AdapterService
from loramux_api.auth import requires
from loramux_api.bodies import Body
from loramux_api.openapi import ApiController
from loramux_api.parameters import CHANGING, OneAdapterController, PathName, RevisionQuery, at
from loramux_api.schemas.bounds import Name
from loramux_api.schemas.tenancy import Listing


class FeedbackBody(Body, forbid_unknown_fields=True):
    """The caller's opinion of an answer."""

    score: Annotated[float, Meta(ge=0, le=1)]
    """Value of the answer: 0 is bad, 1 is good."""
    label: Annotated[str, Meta(max_length=64)] | None = None
    """Short label such as `wrong-language`: a-z, 0-9, '.', '_' and '-'."""


class FeedbackObject(msgspec.Struct, kw_only=True):
    """Stored feedback."""

    object: Literal["request.feedback"] = "request.feedback"
    request_id: str
    model: str
    """Revision that answered."""
    score: float
    label: str | None


class GuardBody(Body, forbid_unknown_fields=True):
    """Measures that a canary's guard compares."""

    measures: Annotated[list[Name], Meta(max_length=len(MEASURES))]
    """Some of errors (requests that failed, choices that were aborted), feedback (mean score) and latency."""
    first_token_seconds: float | None = None
    """Bound for the measure latency: a first token within this time is good. The value must be one of the bounds of the
    metrics.
    """


class GuardObject(msgspec.Struct, kw_only=True):
    """The guard of an alias."""

    object: Literal["alias.guard"] = "alias.guard"
    alias: str
    measures: list[str]
    """Measures of the guard; empty: the alias has no guard."""
    first_token_seconds: float | None = None


class PolicyBody(Body, forbid_unknown_fields=True):
    """The release policy of an alias."""

    policy: ReleasePolicy


class PolicyObject(msgspec.Struct, kw_only=True):
    """The release policy of an alias, and its checks of one revision."""

    object: Literal["alias.policy"] = "alias.policy"
    alias: str
    policy: ReleasePolicy | None
    """The policy; null: the alias can be moved freely."""
    current: int | None
    """Revision that gets most of the alias's requests."""
    revision: int | None
    """Revision that was checked."""
    passed: bool | None
    """True if that revision may take most of the requests."""
    checks: list[PolicyCheck]


class PolicyController(OneAdapterController):
    """Conditions that a revision must meet before it takes most of an alias's requests."""

    @put(
        at("/aliases/{alias:str}/policy"),
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Set a release policy",
    )
    async def put_policy(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        data: JSONBody[PolicyBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        policies: NamedDependency[ReleasePolicies],
    ) -> PolicyObject:
        """Set the policy. From now on, a revision cannot get most of the requests before it passes."""
        await policies.put(principal, adapter, alias, data.policy, preconditions)
        return await _policy_object(policies, principal, adapter, alias, None)

    @get(at("/aliases/{alias:str}/policy"), guards=[requires("read")], summary="Describe a release policy")
    async def get_policy(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        principal: NamedDependency[Principal],
        policies: NamedDependency[ReleasePolicies],
        revision: RevisionQuery = None,
    ) -> PolicyObject:
        """Describe the policy; with `revision`, check that revision now."""
        return await _policy_object(policies, principal, adapter, alias, revision)

    @delete(
        at("/aliases/{alias:str}/policy"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Remove a release policy",
    )
    async def delete_policy(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        policies: NamedDependency[ReleasePolicies],
    ) -> PolicyObject:
        """Remove the policy, so that the alias can be moved freely. The audit log records the caller."""
        await policies.remove(principal, adapter, alias, preconditions)
        return await _policy_object(policies, principal, adapter, alias, None)


async def _policy_object(
    policies: ReleasePolicies, principal: Principal, adapter: str, alias: str, revision: int | None
) -> PolicyObject:
    found = await policies.report(principal, adapter, alias, revision)
    is_checked = found.policy is not None and revision is not None
    return PolicyObject(
        alias=alias,
        policy=found.policy,
        current=found.current,
        revision=revision,
        passed=found.passed if is_checked else None,
        checks=list(found.checks),
    )


class GuardController(OneAdapterController):
    """Canaries that are rolled back automatically."""

    @put(at("/aliases/{alias:str}/guard"), guards=[requires("adapters")], summary="Guard a canary")
    async def put_guard(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        data: JSONBody[GuardBody],
        principal: NamedDependency[Principal],
        guards: NamedDependency[CanaryGuards],
    ) -> GuardObject:
        """Set a guard. The guard rolls back the newest target of the alias as soon as this target is worse than the
        others.
        """
        bound = data.first_token_seconds
        return _guard_object(alias, await guards.put(principal, adapter, alias, data.measures, bound))

    @get(at("/aliases/{alias:str}/guard"), guards=[requires("read")], summary="Describe a guard")
    async def get_guard(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        principal: NamedDependency[Principal],
        guards: NamedDependency[CanaryGuards],
    ) -> GuardObject:
        """Describe the measures that the guard of an alias compares."""
        return _guard_object(alias, await guards.get(principal, adapter, alias))

    @delete(at("/aliases/{alias:str}/guard"), guards=[requires("adapters")], status_code=200, summary="Remove a guard")
    async def delete_guard(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        principal: NamedDependency[Principal],
        guards: NamedDependency[CanaryGuards],
    ) -> GuardObject:
        """Remove the guard; the canary is not changed."""
        await guards.remove(principal, adapter, alias)
        return GuardObject(alias=alias, measures=[])


def _guard_object(alias: str, guard: Guard) -> GuardObject:
    return GuardObject(alias=alias, measures=list(guard.measures), first_token_seconds=guard.first_token_seconds)


class RevisionMetricsController(OneAdapterController):
    """Metrics of the revisions of an adapter."""

    @get(at("/metrics"), guards=[requires("usage")], summary="Metrics of an adapter's revisions")
    async def metrics(
        self,
        adapter: NamedDependency[str],
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        revision_metrics: NamedDependency[RevisionMetrics],
        window: FromQuery[Literal["1h", "24h", "7d", "30d"]] = "24h",
    ) -> Listing[RevisionReport]:
        """Report on each revision that your requests used in the window, newest first."""
        info = await adapters.queries.get(principal, adapter)
        return Listing(data=await revision_metrics.of(principal, info.name, window))

    @get(
        at("/aliases/{alias:str}/history/metrics"),
        guards=[requires("usage")],
        summary="Metrics of an alias's versions",
    )
    async def history_metrics(
        self,
        adapter: NamedDependency[str],
        alias: PathName,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        revision_metrics: NamedDependency[RevisionMetrics],
    ) -> Listing[VersionReport]:
        """Report on the targets of the alias's last 20 versions, each for the time in which it applied."""
        versions = await adapters.queries.history(principal, adapter, alias)
        info = await adapters.queries.get(principal, adapter)
        return Listing(data=await revision_metrics.of_versions(principal, info.name, versions))


class FeedbackController(ApiController):
    """Feedback on answers."""

    path = "/v1/requests"
    tags = ("Adapters",)
    guards = (requires("inference"),)

    @post("/{request_id:str}/feedback", status_code=200, summary="Rate an answer")
    async def put_feedback(
        self,
        request_id: PathName,
        data: JSONBody[FeedbackBody],
        principal: NamedDependency[Principal],
        revision_metrics: NamedDependency[RevisionMetrics],
    ) -> FeedbackObject:
        """Rate an answer of an adapter. A second rating replaces the first."""
        model = await revision_metrics.put_feedback(principal, request_id, data.score, data.label)
        return FeedbackObject(request_id=request_id, model=model, score=data.score, label=data.label)


class ShadowBody(Body, forbid_unknown_fields=True):
    """A shadow to start."""

    revision: RevisionNumber
    """Number of the candidate: any revision that does not get all requests."""
    share: Annotated[float, Meta(gt=0, le=1)]
    """Share of your own tenant's requests to the alias `default`; chosen by `user`, if a request names one."""
    max_tokens_per_day: Annotated[int, Meta(ge=1, le=10**12)] = 1_000_000
    """Maximum number of prompt and answer tokens on the candidate in a day (UTC), on all servers together."""
    keep_outputs: bool = False
    """Keep both answers of each request in files of the purpose `shadow_output`, in the request's project."""


class ShadowController(OneAdapterController):
    """Candidates that answer copies of an adapter's requests, without effect on the callers."""

    @post(
        at("/shadow"),
        status_code=201,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="Start a shadow",
    )
    async def start(
        self,
        adapter: NamedDependency[str],
        data: JSONBody[ShadowBody],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        shadows: NamedDependency[Shadows],
    ) -> ShadowReport:
        """Repeat a share of the requests on the candidate when the server has room, not charged, and compare the
        answers.
        """
        return await shadows.start(
            principal,
            adapter,
            data.revision,
            data.share,
            data.max_tokens_per_day,
            preconditions,
            keep_outputs=data.keep_outputs,
        )

    @get(at("/shadow"), guards=[requires("read")], summary="Describe a shadow")
    async def describe(
        self, adapter: NamedDependency[str], principal: NamedDependency[Principal], shadows: NamedDependency[Shadows]
    ) -> ShadowReport:
        """Describe the newest shadow: the results of its requests, and the similarity of the answers."""
        return await shadows.get(principal, adapter)

    @get(at("/shadow/history"), guards=[requires("read")], summary="List an adapter's shadows")
    async def history(
        self, adapter: NamedDependency[str], principal: NamedDependency[Principal], shadows: NamedDependency[Shadows]
    ) -> Listing[ShadowReport]:
        """List the last 20 shadows, newest first."""
        return Listing(data=await shadows.history(principal, adapter))

    @delete(
        at("/shadow"),
        status_code=200,
        dependencies=CHANGING,
        guards=[requires("adapters")],
        summary="End a shadow",
    )
    async def stop(
        self,
        adapter: NamedDependency[str],
        preconditions: NamedDependency[Preconditions],
        principal: NamedDependency[Principal],
        shadows: NamedDependency[Shadows],
    ) -> ShadowReport:
        """End the shadow; its results stay."""
        return await shadows.stop(principal, adapter, preconditions)
