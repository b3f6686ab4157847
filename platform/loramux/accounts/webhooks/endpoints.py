"""A tenant's webhook endpoints: created, listed, enabled, disabled, deleted; every change is audited.

WebhookError
├── InvalidEndpoint      an address that cannot be called, or an unknown kind of event: 400
├── TooManyEndpoints     the tenant's limit is reached: 400
├── TooManyTests         the tenant tests too many webhooks at once: 429
└── EndpointNotFound     no such endpoint, or it is another tenant's: 404
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from http import HTTPStatus

import httpx
import msgspec

from loramux.accounts.tenants.entities import Changes
from loramux.accounts.tenants.errors import NotPermitted
from loramux.accounts.webhooks.dispatcher import Attempt, WebhookDispatcher
from loramux.accounts.webhooks.messages import endpoint_secret, write_secret
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, TenantId, new_id
from loramux.common.public_http import NotPublic, Resolver, parse_outside_url
from loramux.common.settings.server import WebhookSettings
from loramux.data.entities import Event, LoggedDelivery
from loramux.data.records.base import to_struct
from loramux.data.records.database import Database
from loramux.data.records.webhooks import KINDS, EndpointRepository, EndpointRow, EventRepository

MAX_URL = 2048
MAX_PORT = 65535
MAX_TESTS = 2
"""Maximum number of simultaneous tests of one tenant. It is limited because each test is a call to an address that the
tenant chose.
"""


class WebhookError(LoramuxError):
    """Base of this package's errors."""


class InvalidEndpoint(WebhookError):
    """The address cannot be called, or the kind of event is unknown; the message names the rule."""


class TooManyEndpoints(WebhookError):
    """The tenant has too many endpoints; the message names the limit."""

    code = "too_many_webhooks"


class TooManyTests(WebhookError):
    """The tenant tests too many webhooks at once; the message names the limit."""

    code = "too_many_webhook_tests"
    status = HTTPStatus.TOO_MANY_REQUESTS
    retry_after = 10


class EndpointNotFound(WebhookError):
    """The tenant has no such endpoint; the message repeats the id."""

    code = "webhook_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no webhook {id[:80]!r}", "webhook_id")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address that receives events. Times in microseconds since the epoch."""

    id: str
    url: str
    events: tuple[str, ...]
    created_at: int
    failing_since: int | None
    disabled_at: int | None
    disabled_because: str | None


class WebhookEndpoints:
    """One tenant's endpoints, changed by one caller."""

    def __init__(self, changes: Changes, tenant: TenantId, settings: WebhookSettings, resolver: Resolver) -> None:
        self._changes = changes
        self._tenant = tenant
        self._settings = settings
        self._resolver = resolver

    async def create(self, url: str, events: Collection[str] = KINDS) -> Endpoint:
        """Create an endpoint for events from now on. If the actor is bound to a project, the endpoint gets no events of
        other projects' batches and jobs.

        Raises InvalidEndpoint, TooManyEndpoints, NotPermitted.
        """
        if self._changes.actor.authority.models is not None:
            raise NotPermitted(
                "a webhook receives events of all of the tenant's adapters, and this key may use some of them only; "
                "use a key without a list of models",
                "models",
            )
        wanted = _checked(events)
        await self._check_address(url)
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
                project_id=self._changes.actor.authority.project,
            )
            await endpoints.add(row)
            await change.note("webhook.create", row.id, tenant=self._tenant, after=_endpoint(row))
        return _endpoint(row)

    async def all(self) -> list[Endpoint]:
        """List every endpoint, oldest first."""
        async with self._changes.database.read() as session:
            return [_endpoint(row) for row in await EndpointRepository(session, self._tenant).all()]

    async def get(self, id: str) -> Endpoint:
        """Return one endpoint. Raises EndpointNotFound."""
        async with self._changes.database.read() as session:
            return _endpoint(await _found(EndpointRepository(session, self._tenant), id))

    async def log(self, id: str, limit: int) -> list[LoggedDelivery]:
        """List the endpoint's last deliveries, newest first. Raises EndpointNotFound."""
        async with self._changes.database.read() as session:
            endpoints = EndpointRepository(session, self._tenant)
            await _found(endpoints, id)
            return await endpoints.log(id, limit)

    async def enable(self, id: str) -> Endpoint:
        """Enable an endpoint. Deliveries that were pending when the endpoint was disabled are sent first. Raises
        EndpointNotFound.
        """
        async with self._changes.begin() as change:
            row = await _found(EndpointRepository(change.session, self._tenant), id)
            before = _endpoint(row)
            row.failures, row.failing_since, row.quiet_until = 0, None, 0
            row.disabled_at, row.disabled_because = None, None
            await change.note("webhook.enable", id, tenant=self._tenant, before=before, after=_endpoint(row))
        return _endpoint(row)

    async def disable(self, id: str) -> Endpoint:
        """Disable an endpoint: its events are not delivered until it is enabled. Raises EndpointNotFound."""
        async with self._changes.begin() as change:
            row = await _found(EndpointRepository(change.session, self._tenant), id)
            before = _endpoint(row)
            if row.disabled_at is None:
                row.disabled_at, row.disabled_because = change.now, "its owner has switched it off"
            await change.note("webhook.disable", id, tenant=self._tenant, before=before, after=_endpoint(row))
        return _endpoint(row)

    async def remove(self, id: str) -> Endpoint:
        """Delete an endpoint with its pending deliveries. Raises EndpointNotFound."""
        async with self._changes.begin() as change:
            endpoints = EndpointRepository(change.session, self._tenant)
            row = await _found(endpoints, id)
            removed = _endpoint(row)
            await endpoints.remove(row)
            await change.note("webhook.delete", id, tenant=self._tenant, before=removed)
        return removed

    async def _check_address(self, url: str) -> None:
        try:
            parsed = parse_outside_url(url)
        except httpx.InvalidURL:
            raise InvalidEndpoint("that is not an address; write https://HOST/PATH", "url") from None
        if len(url) > MAX_URL or not parsed.host or parsed.userinfo or parsed.fragment:
            raise InvalidEndpoint(
                f"a webhook's address is https://HOST/PATH, at most {MAX_URL} characters, without a user or a fragment",
                "url",
            )
        if (port := parsed.port) is not None and not 1 <= port <= MAX_PORT:
            raise InvalidEndpoint(f"a webhook's port is 1 to {MAX_PORT}; got {port}", "url")
        if self._settings.allow_private_addresses and parsed.scheme in ("http", "https"):
            return
        if parsed.scheme != "https":
            raise InvalidEndpoint("a webhook's address begins with https://", "url")
        try:
            await self._resolver.addresses(parsed.host, self._tenant)
        except NotPublic as error:
            raise InvalidEndpoint(f"{error}; give a host that the internet can reach", "url") from None
        if (port := port or 443) not in self._settings.ports:
            allowed = ", ".join(map(str, self._settings.ports))
            raise InvalidEndpoint(f"a webhook's port is one of {allowed}; got {port}", "url")


async def _found(endpoints: EndpointRepository, id: str) -> EndpointRow:
    row = await endpoints.get(id)
    if row is None:
        raise EndpointNotFound(id)
    return row


def _checked(events: Collection[str]) -> str:
    unknown = sorted(set(events) - set(KINDS))
    if unknown or not events:
        wrong = f"unknown: {', '.join(unknown)[:80]}" if unknown else "none given"
        raise InvalidEndpoint(f"a webhook receives one or more of {', '.join(KINDS)}; {wrong}", "events")
    return " ".join(sorted(set(events)))


def _endpoint(row: EndpointRow) -> Endpoint:
    return to_struct(Endpoint, row, events=tuple(row.events.split()))


class WebhookService:
    """Every tenant's webhooks in one database: endpoints, events and the dispatcher."""

    def __init__(
        self,
        database: Database,
        client: httpx.AsyncClient,
        pepper: bytes,
        settings: WebhookSettings,
        resolver: Resolver | None = None,
    ) -> None:
        """`client` is a client of `webhook_client`, and `resolver` the resolver that the client uses."""
        self._database = database
        self._pepper = pepper
        self._settings = settings
        self._resolver = resolver or Resolver("webhooks")
        self._tests: Counter[TenantId] = Counter()
        self.dispatcher = WebhookDispatcher(database, client, pepper)

    def endpoints(self, changes: Changes, principal: Principal) -> WebhookEndpoints:
        """Return the caller's own endpoints."""
        return WebhookEndpoints(changes, principal.tenant, self._settings, self._resolver)

    def secret(self, endpoint: Endpoint) -> str:
        """Return the key that an endpoint's messages are signed with, as `whsec_...`."""
        return write_secret(endpoint_secret(self._pepper, endpoint.id))

    async def test(self, endpoint: Endpoint, principal: Principal) -> Attempt:
        """Send a test message to an endpoint. Raises TooManyTests."""
        tenant = principal.tenant
        if self._tests[tenant] >= MAX_TESTS:
            raise TooManyTests(f"{self._tests[tenant]} tests are running, the most at once; wait until one has ended")
        self._tests[tenant] += 1
        try:
            return await self.dispatcher.test(endpoint.id, endpoint.url, tenant)
        finally:
            self._tests[tenant] -= 1
            if not self._tests[tenant]:
                del self._tests[tenant]

    async def events(self, principal: Principal, adapter: str | None, before: str | None, limit: int) -> list[Event]:
        """List events of the caller's adapters, newest first: of one adapter, or of all adapters that the caller's key
        may use. A key that is bound to a project sees only this project's batches and jobs.

        `before` is the last event of the previous page.
        """
        async with self._database.read() as session:
            events = EventRepository(session, principal.tenant)
            return await events.before(before, limit, _readable(principal, adapter), principal.bound_project)


def _readable(principal: Principal, adapter: str | None) -> frozenset[str] | None:
    """Return the own names of the requested adapters that the caller may use; None: all adapters of the tenant."""
    prefix = f"{principal.tenant_name}/"
    if adapter is not None:
        name = adapter.removeprefix(prefix)
        return frozenset({name} if principal.may_use(prefix + name) else ())
    if principal.models is None:
        return None
    return frozenset(model.removeprefix(prefix) for model in principal.models)
