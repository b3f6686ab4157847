"""The doors to webhooks: a tenant's endpoints, what happened to its adapters, and the courier."""

from __future__ import annotations

import httpx

from loramux.records import Database, Principal
from loramux.records.events import Event, EventRepository
from loramux.settings import WebhookSettings
from loramux.tenants import Changes
from loramux.webhooks.courier import Courier, Outcome
from loramux.webhooks.endpoints import Endpoint, Endpoints
from loramux.webhooks.signing import endpoint_secret, write_secret


class Webhooks:
    """Every tenant's, in one database."""

    def __init__(self, database: Database, client: httpx.AsyncClient, pepper: bytes, settings: WebhookSettings) -> None:
        """`client`: see `webhook_client`."""
        self._database = database
        self._pepper = pepper
        self._settings = settings
        self.courier = Courier(database, client, pepper)

    def endpoints(self, changes: Changes, principal: Principal) -> Endpoints:
        """The caller's own."""
        return Endpoints(changes, principal.tenant, self._settings)

    def secret(self, endpoint: Endpoint) -> str:
        """What an endpoint's messages are signed with, as `whsec_...`."""
        return write_secret(endpoint_secret(self._pepper, endpoint.id))

    async def test(self, endpoint: Endpoint) -> Outcome:
        """Tell an endpoint that it can be told."""
        return await self.courier.test(endpoint.id, endpoint.url)

    async def events(self, principal: Principal, adapter: str | None, before: str | None, limit: int) -> list[Event]:
        """What happened to the caller's adapters, newest first; to one of them, or to all that its key may name.

        `before`: the last page's last event.
        """
        async with self._database.read() as session:
            return await EventRepository(session, principal.tenant).before(before, limit, _readable(principal, adapter))


def _readable(principal: Principal, adapter: str | None) -> frozenset[str] | None:
    """The own names of the adapters that are asked for and may be named; None: all of the tenant's."""
    prefix = f"{principal.tenant_name}/"
    if adapter is not None:
        name = adapter.removeprefix(prefix)
        return frozenset({name} if principal.may_use(prefix + name) else ())
    if principal.models is None:
        return None
    return frozenset(model.removeprefix(prefix) for model in principal.models)
