"""The one way in: received files are examined, stored and registered, however they came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.limits import AdapterCaps, adapter_caps
from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, Listed, RevisionContent
from loramux.records.aliases import Stamp
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.contents import Contents
from loramux.registry.entities import revision_info
from loramux.registry.errors import AdapterNotFound, RegistryError, TooManyAdapters, ValidationUnavailable
from loramux.registry.names import check_adapter_name
from loramux.registry.threads import finished
from loramux.settings import AdapterLimits
from loramux.storage import FILES, BlobStore
from loramux.tenants import Change, Mandate
from loramux.validation import Report, SandboxDied, Validator

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription

VALIDATIONS_AT_ONCE = 2


class Withdrawn(Exception):
    """Raised in `Arrival.settle`: nobody wants the registration any more; the message says why."""


async def _nothing_more(_session: AsyncSession, _listed: Listed) -> None:
    """What is done with a registration that nobody else has a row about."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Files that came for one of a tenant's adapters."""

    adapter: str
    """Its name, without the tenant's."""
    folder: Path
    """A staging folder with both files, which may be changed."""
    promote: bool = True
    """Whether the default alias moves to the new revision."""
    settle: Callable[[AsyncSession, Listed], Awaitable[None]] = _nothing_more
    """Done in the very transaction that registers the revision; may raise Withdrawn."""


class Intake:
    """Makes revisions of files. What is stored and digested is what is served."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        contents: Contents,
        base: BaseDescription,
        served_model_name: str,
        limits: AdapterLimits,
        validator: Validator,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._contents = contents
        self._base = base
        self._served_model_name = served_model_name
        self._limits = limits
        self._validator = validator
        self._places = asyncio.Semaphore(VALIDATIONS_AT_ONCE)

    async def demand_place(self, principal: Principal, name: str) -> str:
        """The adapter's own name, where the caller may upload under `name` and has room for one more.

        Raises InvalidName, AdapterNotFound or TooManyAdapters.
        """
        adapter = check_adapter_name(principal.tenant_name, name, self._served_model_name)
        if not principal.may_use(f"{principal.tenant_name}/{adapter}"):
            raise AdapterNotFound(name)
        async with self._database.read() as session:
            caps = await adapter_caps(session, principal, self._limits)
            await self._demand_room(AdapterRepository(session, principal.tenant), adapter, caps)
        return adapter

    async def accept(self, principal: Principal, arrival: Arrival) -> Listed:
        """Examine and keep. Raises loramux_adapters.AdapterRejected, and what the two of them raise."""
        report = await self.examine(principal, arrival.folder)
        report.demand_sound()
        return await self.keep(principal, arrival, report)

    async def examine(self, principal: Principal, folder: Path) -> Report:
        """Whether the folder's files can be served here, and what is in them. Raises ValidationUnavailable."""
        from loramux_adapters import Limits  # torch: not for those who only list or resolve

        async with self._database.read() as session:
            caps = await adapter_caps(session, principal, self._limits)
        limits = Limits(caps.rank, caps.file_bytes, self._limits.max_vocabulary_bytes)
        if caps.modules is not None:
            limits = replace(limits, max_modules=caps.modules)
        async with self._places:
            try:
                return await finished(self._validator.examine, folder, limits)
            except SandboxDied as error:
                raise ValidationUnavailable("uploads cannot be checked at present; try again in a minute") from error

    async def keep(self, principal: Principal, arrival: Arrival, report: Report) -> Listed:
        """Store and register files that were found sound; a crash in between leaves what `Contents.sweep` removes.

        Raises TooManyAdapters, Withdrawn or StorageUnavailable, and then nothing is registered.
        """
        content = await finished(self._seal, arrival.folder, report)
        listed = None
        try:
            while listed is None:  # again where somebody else's deletion has taken the same content meanwhile
                await finished(self._blobs.publish, arrival.folder, content.digest)
                listed = await self._register(principal, arrival, content)
        except (RegistryError, Withdrawn):
            await self._contents.remove_unused(frozenset({content.digest}))
            raise
        await finished(self._blobs.adopt, arrival.folder, content.digest)
        return listed

    def _seal(self, folder: Path, report: Report) -> RevisionContent:
        assert report.found is not None, "only what was found sound is kept"
        return RevisionContent(
            digest=self._blobs.seal(folder),
            rank=report.found.rank,
            size_bytes=sum((folder / name).stat().st_size for name in FILES),
            base=self._base.fingerprint,
        )

    async def _register(self, principal: Principal, arrival: Arrival, content: RevisionContent) -> Listed | None:
        """The registered revision; None where its content is stored no more."""
        async with self._database.begin() as session:
            await exclusive(session, CONTENTS)
            adapters = AdapterRepository(session, principal.tenant)
            caps = await adapter_caps(session, principal, self._limits)
            await self._demand_room(adapters, arrival.adapter, caps, content)
            if not await finished(self._blobs.is_stored, content.digest):
                return None
            version, stamp = await adapters.version(arrival.adapter), Stamp(self._database.now(), principal.key_id)
            adapter, revision = await adapters.register(arrival.adapter, content, stamp, arrival.promote)
            if adapter.version != version:
                info = revision_info(f"{principal.tenant_name}/{adapter.name}", revision)
                change = Change(session, Mandate(principal.key_id, principal.origin, principal.scopes), stamp.at)
                await change.note("adapter.upload", info.name, tenant=principal.tenant, after=info)
            await arrival.settle(session, (adapter, revision))
            return adapter, revision

    async def _demand_room(
        self, adapters: AdapterRepository, name: str, caps: AdapterCaps, content: RevisionContent | None = None
    ) -> None:
        if await adapters.count() >= caps.adapters and not await adapters.exists(name):
            raise TooManyAdapters(
                f"you have {caps.adapters} adapters, the most that is allowed; delete one first, or ask for more",
                "name",
            )
        if await adapters.count_revisions(name) >= self._limits.max_revisions:
            raise TooManyAdapters(
                f"`{name}` has {self._limits.max_revisions} revisions, the most that an adapter may have "
                "(adapters.max_revisions); delete some first, or let them expire (ttl_s)",
                "name",
                "revisions",
            )
        if caps.bytes_in_all is None or content is None:
            return
        have = await adapters.bytes_besides(content.digest)
        if have + content.size_bytes > caps.bytes_in_all:
            raise TooManyAdapters(
                f"your adapters have {have} bytes and this one {content.size_bytes}; together they may have "
                f"{caps.bytes_in_all} (adapter_bytes). Delete one first, or ask for more",
                "name",
            )
