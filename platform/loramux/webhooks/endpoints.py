"""A tenant's webhook endpoints: made, listed, switched on again, deleted; every change audited."""

from __future__ import annotations

from collections.abc import Collection

import httpx
import msgspec

from loramux.outward import NotPublic, public_addresses
from loramux.records import TenantId
from loramux.records.events import KINDS
from loramux.records.identity import new_id
from loramux.records.webhook_models import EndpointRow
from loramux.records.webhooks import EndpointRepository, Logged
from loramux.settings import WebhookSettings
from loramux.tenants import Changes, NotPermitted
from loramux.webhooks.errors import EndpointNotFound, InvalidEndpoint, TooManyEndpoints

MAX_URL = 2048


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address that is told what happens. Times in microseconds since the epoch."""

    id: str
    url: str
    events: tuple[str, ...]
    created_at: int
    failing_since: int | None
    disabled_at: int | None
    disabled_because: str | None


class Endpoints:
    """One tenant's, in the hands of one mandate."""

    def __init__(self, changes: Changes, tenant: TenantId, settings: WebhookSettings) -> None:
        self._changes = changes
        self._tenant = tenant
        self._settings = settings

    async def create(self, url: str, events: Collection[str] = KINDS) -> Endpoint:
        """A new endpoint, told of what happens from now on. Raises InvalidEndpoint, TooManyEndpoints, NotPermitted."""
        if self._changes.mandate.may_allow is not None:
            raise NotPermitted(
                "a webhook hears of all of the tenant's adapters, and you may name some only; "
                "use a key without a list of models",
                "models",
            )
        wanted = _checked(events)
        await self._demand_reachable(url)
        async with self._changes.begin() as change:
            endpoints = EndpointRepository(change.session, self._tenant)
            if await endpoints.count() >= self._settings.max_per_tenant:
                raise TooManyEndpoints(
                    f"you have {self._settings.max_per_tenant} webhooks, the most that is allowed; delete one first",
                    "url",
                )
            row = EndpointRow(
                id=new_id("webhook"),
                tenant_id=self._tenant,
                url=url,
                events=wanted,
                created_at=change.now,
                failures=0,
                quiet_until=0,
            )
            await endpoints.add(row)
            await change.note("webhook.create", row.id, tenant=self._tenant, after=_endpoint(row))
        return _endpoint(row)

    async def all(self) -> list[Endpoint]:
        """Every endpoint, oldest first."""
        async with self._changes.database.read() as session:
            return [_endpoint(row) for row in await EndpointRepository(session, self._tenant).all()]

    async def get(self, id: str) -> Endpoint:
        """One of them. Raises EndpointNotFound."""
        async with self._changes.database.read() as session:
            return _endpoint(await _found(EndpointRepository(session, self._tenant), id))

    async def log(self, id: str, limit: int) -> list[Logged]:
        """What it was told last, newest first. Raises EndpointNotFound."""
        async with self._changes.database.read() as session:
            endpoints = EndpointRepository(session, self._tenant)
            await _found(endpoints, id)
            return await endpoints.log(id, limit)

    async def enable(self, id: str) -> Endpoint:
        """Tell it again, and first what was on its way when it was switched off. Raises EndpointNotFound."""
        async with self._changes.begin() as change:
            row = await _found(EndpointRepository(change.session, self._tenant), id)
            before = _endpoint(row)
            row.failures, row.failing_since, row.quiet_until = 0, None, 0
            row.disabled_at, row.disabled_because = None, None
            await change.note("webhook.enable", id, tenant=self._tenant, before=before, after=_endpoint(row))
        return _endpoint(row)

    async def disable(self, id: str) -> Endpoint:
        """Tell it nothing more until it is enabled. Raises EndpointNotFound."""
        async with self._changes.begin() as change:
            row = await _found(EndpointRepository(change.session, self._tenant), id)
            before = _endpoint(row)
            if row.disabled_at is None:
                row.disabled_at, row.disabled_because = change.now, "its owner has switched it off"
            await change.note("webhook.disable", id, tenant=self._tenant, before=before, after=_endpoint(row))
        return _endpoint(row)

    async def remove(self, id: str) -> Endpoint:
        """Forget it, and what was on its way to it. Raises EndpointNotFound."""
        async with self._changes.begin() as change:
            endpoints = EndpointRepository(change.session, self._tenant)
            row = await _found(endpoints, id)
            removed = _endpoint(row)
            await endpoints.remove(row)
            await change.note("webhook.delete", id, tenant=self._tenant, before=removed)
        return removed

    async def _demand_reachable(self, url: str) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            raise InvalidEndpoint("that is no address; write https://HOST/PATH", "url") from None
        if len(url) > MAX_URL or not parsed.host or parsed.userinfo or parsed.fragment:
            raise InvalidEndpoint(
                f"a webhook's address is https://HOST/PATH, at most {MAX_URL} characters, without a user or a fragment",
                "url",
            )
        if self._settings.allow_private_addresses and parsed.scheme in ("http", "https"):
            return
        if parsed.scheme != "https":
            raise InvalidEndpoint("a webhook's address begins with https://", "url")
        try:
            await public_addresses(parsed.host)
        except NotPublic as error:
            raise InvalidEndpoint(f"{error}; give a host that the internet can reach", "url") from None


async def _found(endpoints: EndpointRepository, id: str) -> EndpointRow:
    row = await endpoints.get(id)
    if row is None:
        raise EndpointNotFound(id)
    return row


def _checked(events: Collection[str]) -> str:
    unknown = sorted(set(events) - set(KINDS))
    if unknown or not events:
        wrong = f"unknown: {', '.join(unknown)[:80]}" if unknown else "none given"
        raise InvalidEndpoint(f"a webhook hears of one or more of {', '.join(KINDS)}; {wrong}", "events")
    return " ".join(sorted(set(events)))


def _endpoint(row: EndpointRow) -> Endpoint:
    return Endpoint(
        id=row.id,
        url=row.url,
        events=tuple(row.events.split()),
        created_at=row.created_at,
        failing_since=row.failing_since,
        disabled_at=row.disabled_at,
        disabled_because=row.disabled_because,
    )
