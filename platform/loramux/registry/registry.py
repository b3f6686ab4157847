"""The registry's services, built over one database and one blob store."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.records import Database
from loramux.records.adapters import name_bases
from loramux.registry.aliases import AliasService
from loramux.registry.bases import BaseModels
from loramux.registry.blob_gc import BlobCollector
from loramux.registry.changes import ChangeService
from loramux.registry.deletion import DeletionService
from loramux.registry.grants import GrantService
from loramux.registry.pins import PinService
from loramux.registry.queries import AdapterQueries
from loramux.registry.resolver import ModelResolver
from loramux.settings import AdapterLimits
from loramux.storage import BlobStore


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
        """Record the base of revisions of a release that served one base; return their number."""
        names = {base.description.fingerprint: base.name for base in reversed(list(bases))}
        async with self.database.begin() as session:
            return await name_bases(session, names)


def open_registry(database: Database, blobs: BlobStore, bases: BaseModels, limits: AdapterLimits) -> Registry:
    """Build the services."""
    changes = ChangeService(database)
    return Registry(
        queries=AdapterQueries(database),
        aliases=AliasService(changes, limits.max_aliases),
        deletion=DeletionService(database, changes, limits),
        grants=GrantService(changes, limits.max_grants),
        pins=PinService(database, changes, limits),
        resolver=ModelResolver(database, blobs, bases),
        blob_gc=BlobCollector(database, blobs),
        database=database,
    )
