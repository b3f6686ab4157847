"""Adapters, revisions, aliases and grants as their owner sees them."""

from __future__ import annotations

import msgspec

from loramux.bundle import decode_bundle
from loramux.records import Database, Principal
from loramux.records.access import AccessRepository
from loramux.records.adapters import AdapterRepository, AdapterRow
from loramux.records.aliases import AliasRepository
from loramux.records.grants import GrantRepository
from loramux.records.pins import PinRepository
from loramux.registry.entities import (
    AdapterInfo,
    AliasVersion,
    CallableAdapter,
    GrantInfo,
    RevisionInfo,
    adapter_info,
    grant_info,
    revision_info,
    version_info,
)
from loramux.registry.errors import AdapterNotFound, PartNotFound
from loramux.registry.resolver import own_adapter


class AdapterQueries:
    """Read-only questions about adapters. Each raises AdapterNotFound where the caller has no such adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self, principal: Principal) -> list[AdapterInfo]:
        """List the caller's adapters by name: those that its allow-list permits."""
        return (await self.page(principal))[0]

    async def page(
        self, principal: Principal, after: str | None = None, limit: int | None = None, search: str | None = None
    ) -> tuple[list[AdapterInfo], bool]:
        """List at most `limit` of them, beginning after the adapter with that id; return whether more follow.

        `search`: only those with it in their name.
        """
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            found = await adapters.page(after, None if limit is None else limit + 1, _own_names(principal), search)
            shown = found[:limit]
            aliases = await AliasRepository(session, principal.tenant).all(*(adapter.id for adapter in shown))
        infos = [adapter_info(principal.tenant_name, adapter, aliases[adapter.id]) for adapter in shown]
        return infos, len(found) > len(shown)

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """Describe one adapter, given as `adapter` or `tenant/adapter`."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
        return adapter_info(principal.tenant_name, adapter, aliases[adapter.id])

    async def revisions(self, principal: Principal, name: str) -> list[RevisionInfo]:
        """List an adapter's revisions, newest first; deleted ones as long as they can be undeleted."""
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            adapter = await _adapter(adapters, principal, name)
            rows = await adapters.revisions(adapter.id)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
            pins = await PinRepository(session, principal.tenant).of(adapter.id)
        full = f"{principal.tenant_name}/{adapter.name}"
        return [revision_info(full, row, aliases[adapter.id], pins.get(row.id)) for row in rows]

    async def revision(self, principal: Principal, name: str, number: int) -> RevisionInfo:
        """Describe one of those, and its bundle. Raises PartNotFound."""
        found = [one for one in await self.revisions(principal, name) if one.number == number]
        if not found:
            raise PartNotFound("revision", name, f"has no revision {number}; list them with GET .../revisions.")
        async with self._database.read() as session:
            bundle = await AdapterRepository(session, principal.tenant).bundle(found[0].id)
        return msgspec.structs.replace(found[0], bundle=None if bundle is None else decode_bundle(bundle))

    async def history(self, principal: Principal, name: str, alias: str) -> list[AliasVersion]:
        """List the versions of an alias, newest first. Raises PartNotFound."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await AliasRepository(session, principal.tenant).history(adapter.id, alias)
        if not rows:
            raise PartNotFound("alias", name, f"never had an alias {alias[:80]!r}; list them with GET .../aliases.")
        return [version_info(row) for row in rows]

    async def grants(self, principal: Principal, name: str) -> list[GrantInfo]:
        """List the tenants that may call the adapter, by name."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await GrantRepository(session, principal.tenant).all(adapter.id)
        return [grant_info(row) for row in rows]

    async def own(
        self, principal: Principal, search: str | None = None, limit: int | None = None
    ) -> list[CallableAdapter]:
        """List at most `limit` of the caller's own adapters that it may call, by name; there may be ten thousand.

        `search`: only those with it in their name.
        """
        async with self._database.read() as session:
            access = AccessRepository(session, principal.tenant, principal.tenant_name)
            found = await access.own(_own_names(principal), search, limit)
        return [CallableAdapter(**row._mapping) for row in found]

    async def granted(self, principal: Principal) -> list[CallableAdapter]:
        """List other tenants' adapters that the caller may call, by name."""
        async with self._database.read() as session:
            found = await AccessRepository(session, principal.tenant, principal.tenant_name).granted()
        return [CallableAdapter(**row._mapping) for row in found if principal.may_use(row.name)]


def _own_names(principal: Principal) -> list[str] | None:
    """Return the caller's own adapters that its allow-list permits; None: all."""
    if principal.models is None:
        return None
    owned = f"{principal.tenant_name}/"
    return [model.removeprefix(owned) for model in principal.models if model.startswith(owned)]


async def _adapter(adapters: AdapterRepository, principal: Principal, name: str) -> AdapterRow:
    adapter = await adapters.get(own_adapter(principal, name))
    if adapter is None:
        raise AdapterNotFound(name)
    return adapter
