"""The registry's services over one database and one blob store, including those for queries, grants and pins.

`AdapterQueries` shows adapters to their owner. A grant lets another tenant call an adapter. A pin keeps a revision in
the adapter pool at its owner's cost; the serving layer applies pins to the engine. The resolution of names, moves of
aliases and deletion have separate modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from loramux.accounts.tenants.tenants import system_principal
from loramux.catalog.registry.aliases import AliasService
from loramux.catalog.registry.changes import UNCONDITIONAL, AdapterChange, ChangeService, Preconditions
from loramux.catalog.registry.deletion import BlobCollector, DeletionService
from loramux.catalog.registry.entities import (
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
from loramux.catalog.registry.errors import AdapterNotFound, InvalidChange, PartNotFound, TooManyAdapters, where_listed
from loramux.catalog.registry.resolver import BaseModels, ModelResolver, engine_key, own_adapter
from loramux.common.bundle import decode_bundle
from loramux.common.identity import GRAMMAR_IN_WORDS, Principal, is_name
from loramux.common.settings.serving import AdapterLimits
from loramux.common.units import SECOND
from loramux.data.entities import TrainingCard
from loramux.data.records.access import AccessRepository, GrantRepository
from loramux.data.records.adapters import (
    AdapterRepository,
    AdapterRow,
    DeletedAdapter,
    name_bases,
    names_of_digests,
)
from loramux.data.records.aliases import AliasRepository
from loramux.data.records.credentials import names_of_actors
from loramux.data.records.database import Database
from loramux.data.records.pins import IDLE, UNPINNED, ActivePin, ActivePinRepository, PinRepository
from loramux.data.records.training_versions import (
    TrainingVersionRepository,
    TrainingVersionRow,
    names_of_versions,
)
from loramux.data.storage.blobs import BlobStore


class AdapterQueries:
    """Read-only queries about adapters. Each raises AdapterNotFound if the caller has no such adapter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self, principal: Principal) -> list[AdapterInfo]:
        """List by name the caller's adapters that its allow-list permits."""
        return (await self.page(principal))[0]

    async def page(
        self, principal: Principal, after: str | None = None, limit: int | None = None, search: str | None = None
    ) -> tuple[list[AdapterInfo], bool]:
        """List at most `limit` of these adapters, beginning after the adapter with that id. Also return whether more
        adapters follow.

        `search` limits the list to names that contain this text.
        """
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            found = await adapters.page(after, None if limit is None else limit + 1, principal.own_adapters(), search)
            shown = found[:limit]
            aliases = await AliasRepository(session, principal.tenant).all(*(adapter.id for adapter in shown))
        infos = [adapter_info(principal.tenant_name, adapter, aliases[adapter.id]) for adapter in shown]
        return infos, len(found) > len(shown)

    async def names_of(self, engine_keys: Collection[str]) -> dict[str, str]:
        """Return the names of revisions (`tenant/adapter@3`) by their keys in the engines. For operators only."""
        async with self._database.read() as session:
            digests = {key.partition("/")[0] for key in engine_keys}
            names = await names_of_versions(session, digests) | await names_of_digests(session, digests)
        return {engine_key(owner, digest): name for (digest, owner), name in names.items()}

    async def deleted(self, principal: Principal, limit: int, search: str | None = None) -> list[DeletedAdapter]:
        """List at most `limit` deleted adapters that can be undeleted, the newest deletion first."""
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            return await adapters.deleted(limit, principal.own_adapters(), search)

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """Describe one adapter, given as `adapter` or `tenant/adapter`."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
        return adapter_info(principal.tenant_name, adapter, aliases[adapter.id])

    async def revisions(self, principal: Principal, name: str) -> list[RevisionInfo]:
        """List an adapter's revisions, newest first, including deleted revisions that can be undeleted."""
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            adapter = await _adapter(adapters, principal, name)
            rows = await adapters.revisions(adapter.id)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
            pins = await PinRepository(session, principal.tenant).of(adapter.id)
        full = f"{principal.tenant_name}/{adapter.name}"
        return [revision_info(full, row, aliases[adapter.id], pins.get(row.id)) for row in rows]

    async def revision(self, principal: Principal, name: str, number: int) -> RevisionInfo:
        """Describe a revision, its bundle and its training. Raises PartNotFound."""
        found = [one for one in await self.revisions(principal, name) if one.number == number]
        if not found:
            raise PartNotFound("revision", name, f"has no revision {number}; {where_listed(name, 'revisions')}.")
        async with self._database.read() as session:
            bundle, card = await AdapterRepository(session, principal.tenant).bundle_and_training(found[0].id)
        return msgspec.structs.replace(
            found[0],
            bundle=None if bundle is None else decode_bundle(bundle),
            training=None if card is None else msgspec.json.decode(card, type=TrainingCard),
        )

    async def history(self, principal: Principal, name: str, alias: str) -> list[AliasVersion]:
        """List the versions of an alias, newest first. Raises PartNotFound."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await AliasRepository(session, principal.tenant).history(adapter.id, alias)
            names = await names_of_actors(session, {row.changed_by for row in rows}, principal.tenant)
        if not rows:
            raise PartNotFound("alias", name, f"never had an alias {alias[:80]!r}; {where_listed(name, 'aliases')}.")
        return [version_info(row, names.get(row.changed_by)) for row in rows]

    async def grants(self, principal: Principal, name: str) -> list[GrantInfo]:
        """List the tenants that may call the adapter, by name."""
        async with self._database.read() as session:
            adapter = await _adapter(AdapterRepository(session, principal.tenant), principal, name)
            rows = await GrantRepository(session, principal.tenant).all(adapter.id)
            names = await names_of_actors(session, {row.granted_by for row in rows}, principal.tenant)
        return [grant_info(row, names.get(row.granted_by)) for row in rows]

    async def callable(
        self, principal: Principal, search: str | None = None, limit: int | None = None
    ) -> list[CallableAdapter]:
        """List the adapters that the caller may call: the tenant's, those of other tenants, and training adapters, each
        kind by name. A tenant may have ten thousand.

        `search` limits the tenant's adapters to names that contain this text, `limit` to so many.
        """
        async with self._database.read() as session:
            access = AccessRepository(session, principal.tenant, principal.tenant_name)
            own = await access.own(principal.own_adapters(), search, limit)
            granted = await access.granted()
            pushed = await TrainingVersionRepository(session, principal.tenant).all()
        found = [CallableAdapter(**row._mapping) for row in (*own, *granted)]
        found += _training(principal.tenant_name, pushed)
        return [one for one in found if principal.may_use(one.name.partition("@")[0])]


def _training(tenant_name: str, rows: Sequence[TrainingVersionRow]) -> Iterator[CallableAdapter]:
    """Yield training adapters: the newest version under the adapter's name, and older ones under their numbers."""
    newest = ""
    for row in sorted(rows, key=lambda row: (row.name, -row.number)):
        adapter = f"{tenant_name}/{row.name}"
        version = f"{adapter}@{row.number}"
        name = version if row.name == newest else adapter
        newest = row.name
        yield CallableAdapter(name=name, created_at=row.created_at, base_model=row.base_model, version=version)


async def _adapter(adapters: AdapterRepository, principal: Principal, name: str) -> AdapterRow:
    adapter = await adapters.get(own_adapter(principal, name))
    if adapter is None:
        raise AdapterNotFound(name)
    return adapter


class GrantService:
    """Grants and revokes access. Every change also raises the errors of `ChangeService.change`."""

    def __init__(self, changes: ChangeService, max_grants: int) -> None:
        self._changes = changes
        self._max_grants = max_grants

    async def grant(
        self, principal: Principal, name: str, grantee: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> GrantInfo:
        """Let the tenant of that name call the adapter, at its own cost.

        The answer is the same whether or not such a tenant exists.

        Raises InvalidChange, TooManyAdapters.
        """
        if not is_name(grantee) or grantee == principal.tenant_name:
            raise InvalidChange(
                f"a grant is for another tenant, by its name: {GRAMMAR_IN_WORDS}; got {grantee[:80]!r}", "tenant"
            )

        async def act(change: AdapterChange) -> GrantInfo:
            grants = {row.grantee: row for row in await change.grants.all(change.adapter.id)}
            if grantee in grants:
                return await change.grant_info(grants[grantee])
            if len(grants) >= self._max_grants:
                raise TooManyAdapters(
                    f"`{change.name}` has {len(grants)} grants, the most that an adapter may have "
                    "(adapters.max_grants); take one back first",
                    "tenant",
                    "grants",
                )
            made = await change.grant_info(await change.grants.add(change.adapter.id, grantee, change.stamp))
            await change.record("grant.put", f" {grantee}", after=made)
            return made

        return await self._changes.change(principal, name, preconditions, act, GrantInfo)

    async def revoke(
        self, principal: Principal, name: str, grantee: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> GrantInfo:
        """Refuse that tenant's requests from now on; running requests finish. Raises PartNotFound."""

        async def act(change: AdapterChange) -> GrantInfo:
            rows = [row for row in await change.grants.all(change.adapter.id) if row.grantee == grantee]
            if not rows:
                raise PartNotFound("grant", change.name, f"has no grant for {grantee[:80]!r}.")
            before = await change.grant_info(rows[0])
            await change.grants.remove(rows[0])
            await change.record("grant.remove", f" {grantee}", before=before)
            return before

        return await self._changes.change(principal, name, preconditions, act, GrantInfo)


class PinService:
    """Records pins, which the serving layer applies. Changes raise the errors of `ChangeService.change` too."""

    def __init__(self, database: Database, changes: ChangeService, limits: AdapterLimits) -> None:
        self._database = database
        self._changes = changes
        self._max_pins = limits.pins_per_tenant
        self._idle_seconds = limits.pin_idle_seconds

    async def pin(
        self, principal: Principal, name: str, number: int, preconditions: Preconditions = UNCONDITIONAL
    ) -> RevisionInfo:
        """Record a pin of this revision. Raises PartNotFound, TooManyAdapters."""

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            if revision.id not in await change.pins.of(change.adapter.id):
                if await change.pins.count() >= self._max_pins:
                    raise TooManyAdapters(
                        f"you have {self._max_pins} pins, the most that a tenant may have (adapters.pins_per_tenant); "
                        "unpin one first",
                        "revision",
                        "pins",
                    )
                await change.pins.add(revision, change.stamp)
                await change.record("pin.put", f"@{number}", after=await change.revision_info(revision))
            return await change.revision_info(revision)

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def unpin(
        self,
        principal: Principal,
        name: str,
        number: int,
        preconditions: Preconditions = UNCONDITIONAL,
        why: str = UNPINNED,
    ) -> RevisionInfo:
        """Record the end of a pin. Raises PartNotFound."""

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            if revision.id not in await change.pins.of(change.adapter.id):
                raise PartNotFound("pin", f"{change.name}@{number}", "is not pinned.")
            before = await change.revision_info(revision)
            await change.pins.end([revision.id], why, change.now)
            await change.record("pin.remove", f"@{number}", before=before)
            return await change.revision_info(revision)

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def active(self, used: Collection[str]) -> list[ActivePin]:
        """List every tenant's pins, and end idle pins. `used` are the revisions with requests since the last call."""
        now = self._database.now()
        if used:
            async with self._database.begin() as session:
                await ActivePinRepository(session).touch(used, now)
        async with self._database.read() as session:
            pins = await ActivePinRepository(session).all()
        idle = [pin for pin in pins if self._is_idle(pin, now)]
        for pin in idle:
            await self.end(pin, IDLE)
        return [pin for pin in pins if pin not in idle]

    async def end(self, pin: ActivePin, why: str) -> None:
        """End a pin in the system's name, unless the pin has already ended."""
        system = system_principal(pin.tenant, pin.tenant_name)
        try:
            await self.unpin(system, pin.adapter, pin.number, why=why)
        except (AdapterNotFound, PartNotFound):
            return  # the owner has ended the pin since

    def _is_idle(self, pin: ActivePin, now: int) -> bool:
        return self._idle_seconds is not None and pin.used_at < now - self._idle_seconds * SECOND


@dataclass(frozen=True, slots=True)
class Registry:
    """The services for the adapters of every tenant."""

    queries: AdapterQueries
    aliases: AliasService
    deletion: DeletionService
    grants: GrantService
    pins: PinService
    resolver: ModelResolver
    blob_gc: BlobCollector
    database: Database

    async def name_bases(self, bases: BaseModels) -> int:
        """Record the base of revisions from a release that had only one base; return their number."""
        names = {base.description.fingerprint: base.name for base in reversed(list(bases))}
        async with self.database.begin() as session:
            return await name_bases(session, names)


def open_registry(database: Database, blobs: BlobStore, bases: BaseModels, limits: AdapterLimits) -> Registry:
    """Build the services."""
    changes = ChangeService(database)
    aliases = AliasService(changes, limits.max_aliases)
    return Registry(
        queries=AdapterQueries(database),
        aliases=aliases,
        deletion=DeletionService(database, changes, aliases, limits),
        grants=GrantService(changes, limits.max_grants),
        pins=PinService(database, changes, limits),
        resolver=ModelResolver(database, blobs, bases),
        blob_gc=BlobCollector(database, blobs),
        database=database,
    )
