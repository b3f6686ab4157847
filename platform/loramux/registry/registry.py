"""The registry: uploads become revisions, model names become revisions, deletions become nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, ContentRepository
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.contents import Contents
from loramux.registry.entities import AdapterInfo, ResolvedModel, info_of
from loramux.registry.errors import AdapterNotFound
from loramux.registry.intake import Arrival, Intake
from loramux.registry.names import adapter_part
from loramux.registry.resolving import Resolving
from loramux.registry.threads import finished
from loramux.settings import AdapterLimits
from loramux.storage import BlobStore
from loramux.validation import Validator

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription


class Registry:
    """One base model's adapters, of every tenant."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        base: BaseDescription,
        served_model_name: str,
        limits: AdapterLimits,
        validator: Validator,
    ) -> None:
        self._database = database
        self._contents = Contents(database, blobs)
        self._blobs = blobs
        self.intake = Intake(database, blobs, self._contents, base, served_model_name, limits, validator)
        """For files that come in other ways than `upload`."""
        self._resolving = Resolving(database, blobs, base, served_model_name)

    def staging(self) -> AbstractContextManager[Path]:
        """A folder to receive an upload in, which `upload` then takes files from without copying; gone afterwards."""
        return self._blobs.staging()

    async def upload(self, principal: Principal, name: str, config_file: Path, weights_file: Path) -> AdapterInfo:
        """Make both files the next revision of `name` and its default; the same content again changes nothing.

        Files inside `staging()` are moved, others copied. Raises what `Intake.demand_place` and `Intake.accept` raise.
        """
        adapter = await self.intake.demand_place(principal, name)
        with self._blobs.staging() as folder:
            await finished(self._blobs.stage, folder, (config_file, weights_file))
            return info_of(principal, await self.intake.accept(principal, Arrival(adapter, folder)))

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """What `model` means to this caller now. Raises ModelNotFound, RevisionUnavailable."""
        return await self._resolving.resolve(principal, model)

    async def sweep(self) -> int:
        """At boot: remove what crashes left behind, staged or stored; the number of contents removed."""
        return await self._contents.sweep()

    async def trim_cache(self, most: int) -> int:
        """Keep this machine's cache to so many bytes: see `Contents.trim_cache`."""
        return await self._contents.trim_cache(most)

    async def list_adapters(self, principal: Principal) -> list[AdapterInfo]:
        """The caller's adapters with their current revisions, by name; those that its allow-list has."""
        async with self._database.read() as session:
            every = [info_of(principal, listed) for listed in await AdapterRepository(session, principal.tenant).all()]
        return [info for info in every if principal.may_use(info.name)]

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """One of the caller's adapters, as `adapter` or `tenant/adapter`. Raises AdapterNotFound."""
        adapter = _own(principal, name)
        async with self._database.read() as session:
            listed = await AdapterRepository(session, principal.tenant).default(adapter) if adapter else None
        if listed is None:
            raise AdapterNotFound(name)
        return info_of(principal, listed)

    async def delete(self, principal: Principal, name: str) -> frozenset[str]:
        """Forget an adapter; returns the digests that nobody has any more, for the engine to retire.

        Their files go too, unless an open request still runs with them: then a later delete or sweep takes them.
        Raises AdapterNotFound.
        """
        adapter = _own(principal, name)
        async with self._database.begin() as session:
            await exclusive(session, CONTENTS)
            adapters = AdapterRepository(session, principal.tenant)
            digests = await adapters.delete(adapter, self._database.now()) if adapter else None
            if digests is None:
                raise AdapterNotFound(name)
            unreferenced = await ContentRepository(session).unreferenced(digests)
        await self._contents.remove_unused(unreferenced)
        return unreferenced


def _own(principal: Principal, name: str) -> str | None:
    """The adapter's own name; None where it cannot be the caller's to know of."""
    adapter = adapter_part(principal.tenant_name, name)
    return adapter if adapter and principal.may_use(f"{principal.tenant_name}/{adapter}") else None
