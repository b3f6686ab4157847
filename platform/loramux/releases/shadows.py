"""Shadow traffic: a share of an adapter's requests also runs on a candidate revision, and both answers are compared.

    request to the main alias ── answered, settled ──> ShadowQueue ── when there is room ──> the candidate, class batch
                                                                           both answers ──> sums of comparisons

The caller of the request does not see the shadow. The ledger has the tokens as waived, in the service tier `shadow`. A
shadow ends when the tenant stops it, when the candidate is deleted, or when the candidate becomes the main revision.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import msgspec

from loramux.accounts.tenants.authority import actor_of
from loramux.accounts.tenants.entities import Change as AuditedChange
from loramux.accounts.tenants.tenants import system_principal
from loramux.batches.files import Files
from loramux.catalog.registry.changes import AdapterChange, ChangeService, Preconditions
from loramux.catalog.registry.errors import ChangeConflict, InvalidChange, PartNotFound
from loramux.catalog.registry.registry import AdapterQueries
from loramux.catalog.registry.resolver import parse_model
from loramux.common.identity import Principal, new_id
from loramux.common.jobs import run_periodically
from loramux.common.units import DAY, SECOND
from loramux.data.entities import EventDetail, ShadowNumbers
from loramux.data.records.aliases import DEFAULT_ALIAS
from loramux.data.records.comparisons import MILLION, RunningShadow, Shadow, ShadowEnd, ShadowRepository
from loramux.data.records.database import Database
from loramux.data.records.requests import BACKGROUND, OpenedRequest
from loramux.data.records.webhooks import SHADOW_ENDED, SHADOW_STARTED, EventRepository
from loramux.data.storage.blobs import BlobStore
from loramux.releases.likeness import Measure, measures_of
from loramux.releases.shadow_runner import DROPPED, ShadowRunner, ShadowTask, shadow_request
from loramux.serving.checks import ensure_storage_allowed
from loramux.serving.generation import Generation
from loramux.serving.messages import GenerationRequest
from loramux.serving.service import CompletionService, Recorder

TEND_SECONDS = 5.0
MAX_HISTORY = 20
MAX_TOKENS_PER_DAY = 10**12

logger = logging.getLogger(__name__)


class ShadowRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the requests that a shadow chose."""

    compared: int
    failed: int
    """The candidate gave no answer."""
    dropped: dict[str, int]
    """Number of shadows that did not run, by reason."""
    outputs_dropped: int


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """A shadow and its results. Times are in Unix seconds."""

    object: str = "adapter.shadow"
    id: str
    revision: int
    """The candidate."""
    share: float
    max_tokens_per_day: int
    keep_outputs: bool
    created_at: int
    ended_at: int | None
    ended_because: str | None
    tokens_today: int
    """Waived tokens of this day (UTC), plus the tokens that running shadows may still use."""
    requests: ShadowRequests
    current_tokens: int
    """Sums over the answers that were compared."""
    candidate_tokens: int
    measures: dict[str, Measure]
    """Means over requests with 95% confidence intervals; only measures that were observed."""


class Shadows:
    """Shadows of every tenant's adapters."""

    def __init__(
        self, database: Database, queries: AdapterQueries, completions: CompletionService, runner: ShadowRunner
    ) -> None:
        self._database = database
        self._queries = queries
        self._completions = completions
        self._changes = ChangeService(database)
        self._runner = runner
        self._running: Mapping[str, RunningShadow] = {}
        """Running shadows by `tenant/adapter`."""

    async def start(
        self,
        principal: Principal,
        adapter: str,
        revision: int,
        share: float,
        max_tokens_per_day: int,
        preconditions: Preconditions,
        *,
        keep_outputs: bool = False,
    ) -> ShadowReport:
        """Repeat a share of the requests to the main alias on a revision, from now on.

        Raises InvalidChange, NotAllowed for outputs of a tenant with zero retention, ChangeConflict if a shadow already
        runs or the revision has all requests, AdapterNotFound, PartNotFound.
        """
        millionths = round(share * MILLION)
        if not 1 <= millionths <= MILLION:
            raise InvalidChange("'share' is above 0 and at most 1: the share of the requests.", "share")
        if not 1 <= max_tokens_per_day <= MAX_TOKENS_PER_DAY:
            raise InvalidChange(f"'max_tokens_per_day' is 1 to {MAX_TOKENS_PER_DAY}.", "max_tokens_per_day")
        if keep_outputs:
            ensure_storage_allowed(principal, "keep_outputs")

        async def act(change: AdapterChange) -> Shadow:
            await self._ensure_startable(change, revision)
            shadow = Shadow(
                id=new_id("shadow"),
                tenant_id=principal.tenant,
                adapter_id=change.adapter.id,
                revision=revision,
                share=millionths,
                max_tokens_per_day=max_tokens_per_day,
                keep_outputs=keep_outputs,
                created_by=change.stamp.by,
                created_at=change.now,
                ended_at=None,
                ended_because=None,
                day=change.now // DAY,
                day_tokens=0,
            )
            await ShadowRepository(change.session).add(shadow)
            await change.record("shadow.start", f"@{revision}", after=shadow)
            detail = EventDetail(revision=revision, shadow=ShadowNumbers(id=shadow.id))
            events = EventRepository(change.session, principal.tenant)
            await events.add(SHADOW_STARTED, change.adapter.name, detail, change.now)
            return shadow

        shadow = await self._changes.change(principal, adapter, preconditions, act, Shadow)
        await self._learn()
        return self._report(shadow, {})

    async def stop(self, principal: Principal, adapter: str, preconditions: Preconditions) -> ShadowReport:
        """End the adapter's shadow. Raises AdapterNotFound, PartNotFound."""
        await self._runner.flush()

        async def act(change: AdapterChange) -> Shadow:
            shadows = ShadowRepository(change.session)
            found = await shadows.newest(change.adapter.id, 1)
            if not found or found[0].ended_at is not None:
                raise PartNotFound("shadow", change.name, "has no shadow that runs.")
            ended = msgspec.structs.replace(found[0], ended_at=change.now, ended_because="stopped")
            await shadows.end(ended.id, "stopped", change.now)
            await change.record("shadow.stop", f"@{ended.revision}", before=found[0], after=ended)
            numbers = _numbers(ended.id, "stopped", (await shadows.sums([ended.id]))[ended.id])
            detail = EventDetail(revision=ended.revision, shadow=numbers)
            events = EventRepository(change.session, principal.tenant)
            await events.add(SHADOW_ENDED, change.adapter.name, detail, change.now)
            return ended

        shadow = await self._changes.change(principal, adapter, preconditions, act, Shadow)
        await self._learn()
        return (await self._reports([shadow]))[0]

    async def get(self, principal: Principal, adapter: str) -> ShadowReport:
        """Return the adapter's newest shadow. Raises AdapterNotFound, PartNotFound."""
        found = await self.history(principal, adapter, 1)
        if not found:
            raise PartNotFound("shadow", adapter, "has had no shadow; POST starts one.")
        return found[0]

    async def history(self, principal: Principal, adapter: str, limit: int = MAX_HISTORY) -> list[ShadowReport]:
        """List the adapter's shadows, newest first. Raises AdapterNotFound, PartNotFound."""
        info = await self._queries.get(principal, adapter)
        if info.name.partition("/")[0] != principal.tenant_name:
            raise PartNotFound("shadow", adapter, "is another tenant's adapter: its shadows are its owner's.")
        await self._runner.flush()
        async with self._database.read() as session:
            found = await ShadowRepository(session).newest(info.id, limit)
        return await self._reports(found)

    async def tend(self) -> None:
        """Write the comparisons, end shadows whose comparison has become pointless, and read new shadows."""
        await self._runner.flush()
        async with self._database.read() as session:
            obsolete = await ShadowRepository(session).obsolete()
        for shadow, adapter, because in obsolete:
            await self._end(shadow, adapter, because)
        await self._learn()

    def choose(self, principal: Principal, asked: GenerationRequest, opened: OpenedRequest) -> Recorder | None:
        """Return the function that queues the request's shadow after the answer; None if the request has no shadow. A
        request with images has none, because they would be held in memory until the shadow runs.

        The choice follows `user`, or the request's id: either all requests of a user are repeated, or none.
        """
        name, _, number = opened.model.rpartition("@")
        running = self._running.get(name)
        if running is None or running.shadow.tenant_id != principal.tenant or asked.service_tier in BACKGROUND:
            return None
        shadow = running.shadow
        named = parse_model(asked.model if "/" in asked.model else f"{principal.tenant_name}/{asked.model}")
        is_main = named is not None and named.number is None and named.alias in (None, DEFAULT_ALIAS)
        has_images = any(turn.images for one in asked.prompts if isinstance(one, tuple) for turn in one)
        if (
            has_images
            or not is_main
            or int(number) == shadow.revision
            or not _is_chosen(shadow, asked.user or opened.id)
        ):
            return None

        def submit(generation: Generation) -> None:
            if generation.status != "completed":
                return
            task = ShadowTask(
                shadow=running,
                principal=principal,
                request=shadow_request(asked, f"{name}@{shadow.revision}"),
                request_id=opened.id,
                model=opened.model,
                base_model=opened.base_model,
                answer=generation.answer,
                tokens=opened.max_total,
                queued_at=time.monotonic(),
            )
            self._runner.submit(task)

        return submit

    async def _ensure_startable(self, change: AdapterChange, revision: int) -> None:
        await change.revision(revision)
        targets = await change.aliases.weights(change.adapter.id, DEFAULT_ALIAS)
        if not set(targets) - {revision}:
            raise ChangeConflict(
                "shadow_of_itself",
                f"All requests go to @{revision} already; a shadow compares another revision with it.",
                "revision",
            )
        found = await ShadowRepository(change.session).newest(change.adapter.id, 1)
        if found and found[0].ended_at is None:
            raise ChangeConflict(
                "shadow_exists",
                f"@{found[0].revision} is this adapter's shadow already; DELETE it first.",
                "revision",
            )

    async def _end(self, shadow: Shadow, adapter: str, because: ShadowEnd) -> None:
        """End a shadow on the server's behalf."""
        now = self._database.now()
        async with self._database.begin() as session:
            shadows = ShadowRepository(session)
            if not await shadows.end(shadow.id, because, now):
                return
            numbers = _numbers(shadow.id, because, (await shadows.sums([shadow.id]))[shadow.id])
            detail = EventDetail(revision=shadow.revision, shadow=numbers)
            await EventRepository(session, shadow.tenant_id).add(SHADOW_ENDED, adapter, detail, now)
            audit = AuditedChange(session, actor_of(system_principal(shadow.tenant_id, "")), now)
            ended = msgspec.structs.replace(shadow, ended_at=now, ended_because=because)
            await audit.note("shadow.end", shadow.id, tenant=shadow.tenant_id, before=shadow, after=ended)

    async def _learn(self) -> None:
        async with self._database.read() as session:
            running = await ShadowRepository(session).running()
        self._running = {one.adapter: one for one in running}
        self._completions.record_with(self.choose if running else None)

    async def _reports(self, shadows: list[Shadow]) -> list[ShadowReport]:
        async with self._database.read() as session:
            sums = await ShadowRepository(session).sums([shadow.id for shadow in shadows])
        return [self._report(shadow, sums[shadow.id]) for shadow in shadows]

    def _report(self, shadow: Shadow, sums: Mapping[str, int]) -> ShadowReport:
        return ShadowReport(
            id=shadow.id,
            revision=shadow.revision,
            share=shadow.share / MILLION,
            max_tokens_per_day=shadow.max_tokens_per_day,
            keep_outputs=shadow.keep_outputs,
            created_at=shadow.created_at // SECOND,
            ended_at=None if shadow.ended_at is None else shadow.ended_at // SECOND,
            ended_because=shadow.ended_because,
            tokens_today=shadow.day_tokens if shadow.day == self._database.now() // DAY else 0,
            requests=ShadowRequests(
                compared=sums.get("compared", 0),
                failed=sums.get("failed", 0),
                dropped={reason: sums.get(f"dropped.{reason}", 0) for reason in DROPPED},
                outputs_dropped=sums.get("outputs_dropped", 0),
            ),
            current_tokens=sums.get("current_tokens", 0),
            candidate_tokens=sums.get("candidate_tokens", 0),
            measures=measures_of(sums),
        )


def _is_chosen(shadow: Shadow, caller: str) -> bool:
    """Return whether the caller's hash is within the shadow's share: the result is always the same for one shadow and
    caller.
    """
    point = hashlib.blake2b(caller.encode(), key=shadow.id.encode(), digest_size=8)
    return int.from_bytes(point.digest(), "big") * MILLION < shadow.share << 64


def _numbers(id: str, because: ShadowEnd, sums: Mapping[str, int]) -> ShadowNumbers:
    exact = measures_of(sums).get("exact")
    return ShadowNumbers(
        id=id,
        ended_because=because,
        compared=sums.get("compared", 0),
        exact=None if exact is None else (exact.mean, exact.low, exact.high),
    )


@asynccontextmanager
async def open_shadows(
    database: Database, blobs: BlobStore, completions: CompletionService, queries: AdapterQueries, files: Files
) -> AsyncIterator[Shadows]:
    """Run shadows while the block runs; at its end, waiting shadows are dropped."""
    runner = ShadowRunner(database, blobs, completions, files)
    shadows = Shadows(database, queries, completions, runner)
    running = asyncio.create_task(runner.run(), name="shadows")
    try:
        async with run_periodically(TEND_SECONDS, shadows.tend):
            yield shadows
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        try:
            await runner.stop()
        except Exception:
            logger.exception("the last comparisons of shadows are lost")
