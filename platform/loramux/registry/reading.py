"""What there is, as its owner sees it."""

from __future__ import annotations

from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository
from loramux.records.aliases import AliasRepository
from loramux.records.grants import GrantRepository
from loramux.records.models import AdapterRow
from loramux.records.pins import PinRepository
from loramux.records.reach import ReachRepository
from loramux.registry.changing import own_adapter
from loramux.registry.entities import (
    AdapterInfo,
    AliasVersion,
    GrantInfo,
    RevisionInfo,
    adapter_info,
    grant_info,
    revision_info,
    version_info,
)
from loramux.registry.errors import AdapterNotFound, PartNotFound


class Reading:
    """Questions about adapters. Every one of them raises AdapterNotFound where the caller has no such adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self, principal: Principal) -> list[AdapterInfo]:
        """The caller's adapters, by name; those that its allow-list has."""
        async with self._database.read() as session:
            adapters = await AdapterRepository(session, principal.tenant).all()
            aliases = await AliasRepository(session, principal.tenant).all()
        infos = [adapter_info(principal.tenant_name, adapter, aliases[adapter.id]) for adapter in adapters]
        return [info for info in infos if principal.may_use(info.name)]

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """One of them, as `adapter` or `tenant/adapter`."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
        return adapter_info(principal.tenant_name, adapter, aliases[adapter.id])

    async def revisions(self, principal: Principal, name: str) -> list[RevisionInfo]:
        """Its revisions, newest first; deleted ones as long as they can be undeleted."""
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            adapter = await _adapter(adapters, principal, name)
            rows = await adapters.revisions(adapter.id)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
            pins = await PinRepository(session, principal.tenant).of(adapter.id)
        full = f"{principal.tenant_name}/{adapter.name}"
        return [revision_info(full, row, aliases[adapter.id], pins.get(row.id)) for row in rows]

    async def revision(self, principal: Principal, name: str, number: int) -> RevisionInfo:
        """One of those. Raises PartNotFound."""
        found = [one for one in await self.revisions(principal, name) if one.number == number]
        if not found:
            raise PartNotFound("revision", name, f"has no revision {number}; list them with GET .../revisions.")
        return found[0]

    async def history(self, principal: Principal, name: str, alias: str) -> list[AliasVersion]:
        """What the alias pointed at, newest first. Raises PartNotFound."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await AliasRepository(session, principal.tenant).history(adapter.id, alias)
        if not rows:
            raise PartNotFound("alias", name, f"never had an alias {alias[:80]!r}; list them with GET .../aliases.")
        return [version_info(row) for row in rows]

    async def grants(self, principal: Principal, name: str) -> list[GrantInfo]:
        """Who else may call it, by name."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await GrantRepository(session, principal.tenant).all(adapter.id)
        return [grant_info(row) for row in rows]

    async def granted(self, principal: Principal) -> list[tuple[str, int]]:
        """Others' adapters that the caller may call, by name, each with the time of its grant."""
        async with self._database.read() as session:
            found = await ReachRepository(session, principal.tenant, principal.tenant_name).granted()
        return [(name, at) for name, at in found if principal.may_use(name)]


async def _adapter(adapters: AdapterRepository, principal: Principal, name: str) -> AdapterRow:
    adapter = await adapters.get(own_adapter(principal, name))
    if adapter is None:
        raise AdapterNotFound(name)
    return adapter
