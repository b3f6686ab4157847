"""Files become revisions: received, examined, stored, registered."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.limits import AdapterCaps, adapter_caps
from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, RevisionContent
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.entities import AdapterInfo, info_of
from loramux.registry.errors import AdapterNotFound, TooManyAdapters, ValidationUnavailable
from loramux.registry.names import check_adapter_name
from loramux.registry.threads import finished
from loramux.settings import AdapterLimits
from loramux.storage import FILES, BlobStore, StorageError
from loramux.validation import SandboxDied, Validator

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription

VALIDATIONS_AT_ONCE = 2


class Uploading:
    """Takes uploads for one base model."""

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
        self._blobs = blobs
        self._base = base
        self._served_model_name = served_model_name
        self._limits = limits
        self._validator = validator
        self._validations = asyncio.Semaphore(VALIDATIONS_AT_ONCE)

    def staging(self) -> AbstractContextManager[Path]:
        """A folder to receive an upload in, which `upload` then takes files from without copying; gone afterwards."""
        return self._blobs.staging()

    async def upload(self, principal: Principal, name: str, config_file: Path, weights_file: Path) -> AdapterInfo:
        """Check both files and make them the next revision of `name`; the same content again changes nothing.

        Files inside `staging()` are moved, others copied. Validated, then stored, then registered: a crash
        in between leaves at most a content that `sweep` removes. Raises InvalidName, TooManyAdapters, or
        ValidationUnavailable or loramux_adapters.AdapterRejected, and then nothing is left behind.
        """
        adapter = check_adapter_name(principal.tenant_name, name, self._served_model_name)
        if not principal.may_use(f"{principal.tenant_name}/{adapter}"):
            raise AdapterNotFound(name)
        async with self._database.read() as session:
            caps = await adapter_caps(session, principal, self._limits)
            await self._check_room(AdapterRepository(session, principal.tenant), adapter, caps)
        with self._blobs.staging() as folder:
            async with self._validations:
                content = await finished(self._examine, folder, config_file, weights_file, caps)
            async with self._database.begin() as session:
                await exclusive(session, CONTENTS)
                adapters = AdapterRepository(session, principal.tenant)
                await self._check_room(adapters, adapter, caps, content)
                await finished(self._blobs.publish, folder, content.digest)
                listed = await adapters.register(adapter, content, self._database.now())
        return info_of(principal, listed)

    async def _check_room(
        self, adapters: AdapterRepository, name: str, caps: AdapterCaps, content: RevisionContent | None = None
    ) -> None:
        if await adapters.count() >= caps.adapters and not await adapters.exists(name):
            raise TooManyAdapters(
                f"you have {caps.adapters} adapters, the most that is allowed; delete one first, or ask for more",
                "name",
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

    def _examine(self, folder: Path, config_file: Path, weights_file: Path, caps: AdapterCaps) -> RevisionContent:
        from loramux_adapters import Limits

        self._blobs.stage(folder, config_file, weights_file)
        limits = Limits(max_rank=caps.rank, max_bytes=self._limits.max_bytes)
        try:
            report = self._validator.examine(folder, limits)
        except SandboxDied as error:
            raise ValidationUnavailable("uploads cannot be checked at present; try again in a minute") from error
        report.demand_sound()
        assert report.found is not None
        digest = self._blobs.seal(folder)
        with suppress(StorageError):  # verified now, so that publishing it again reads nothing
            self._blobs.directory(digest)
        return RevisionContent(
            digest=digest,
            rank=report.found.rank,
            size_bytes=sum((folder / name).stat().st_size for name in FILES),
            base=self._base.fingerprint,
        )
