"""Files become a revision: checked in a sandbox, stored under their digest, registered in one transaction.

The stored and digested bytes are exactly the bytes that the engine reads later. A crash between storing and
registering leaves blobs without a row, which `BlobCollector.sweep` removes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.bundle import BUNDLE_FILE
from loramux.limits import AdapterQuota, adapter_quota
from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, RevisionContent, RevisionRow, Stamp
from loramux.records.aliases import AliasRepository
from loramux.records.locks import CONTENTS, advisory_lock
from loramux.records.registration import register_revision
from loramux.registry import AdapterInfo, AdapterNotFound, BlobCollector, TooManyAdapters, ValidationUnavailable
from loramux.registry.bases import BaseModels
from loramux.registry.entities import adapter_info, revision_info
from loramux.registry.errors import SHOWN, BaseRetired, RegistryError, RevisionUnavailable
from loramux.registry.resolver import check_adapter_name
from loramux.settings import AdapterLimits
from loramux.storage import BlobStore, files_of
from loramux.tenants import Change, actor_of
from loramux.threads import ThreadPool
from loramux.uploads.errors import InvalidUpload, UploadRejected, UploadSuperseded
from loramux.validation import BaseValidators, ReportWarning, SandboxDied, ValidationReport

THREADS = 8

OnRegistered = Callable[[AsyncSession, RevisionRow], Awaitable[None]]
"""Runs in the transaction that registers the revision; may raise UploadSuperseded to roll it back."""


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """Checked files of an upload, in a staging folder that belongs to the upload."""

    adapter: str
    """The adapter's own name."""
    promote: bool
    """True moves the default alias to a new revision."""
    folder: Path
    report: ValidationReport
    quota: AdapterQuota
    """The tenant's limits, read once for the check and the registration."""


class Ingest:
    """Turns files into revisions."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        blob_gc: BlobCollector,
        bases: BaseModels,
        limits: AdapterLimits,
        validators: BaseValidators,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._blob_gc = blob_gc
        self._bases = bases
        self._limits = limits
        self._validators = validators
        self._threads = ThreadPool("ingest", THREADS)

    async def check_name(self, principal: Principal, name: str) -> str:
        """Return the adapter's own name where the caller may upload under `name` and has room for a revision.

        Raises InvalidName, AdapterNotFound or TooManyAdapters.
        """
        adapter = check_adapter_name(principal.tenant_name, name, self._bases.names)
        if not principal.may_use(f"{principal.tenant_name}/{adapter}"):
            raise AdapterNotFound(name)
        async with self._database.read() as session:
            quota = await adapter_quota(session, principal, self._limits)
            await self._check_counts(AdapterRepository(session, principal.tenant), adapter, quota)
        return adapter

    def check_base(self, name: str | None) -> None:
        """Raise InvalidUpload where a base is named that this server does not serve, BaseRetired for a retired one."""
        if name is None or self._bases.named(name) is not None:
            return
        absent = self._bases.absent(name)
        if absent is not None and absent.is_retired:
            raise BaseRetired(
                f"the base model `{name}` is retired and takes no more adapters; train and upload one for "
                f"{self._bases.way_out(absent)}",
                "base_model",
            )
        if absent is not None:
            raise RevisionUnavailable(
                f"the base model `{name}` is being loaded, or cannot be at present; try again later", "base_model"
            )
        raise InvalidUpload(
            f"'{name[:SHOWN]}' is no base model of this server: it serves {', '.join(self._bases.names)}", "base_model"
        )

    async def check_files(
        self, principal: Principal, folder: Path, base_model: str | None, ignored: Sequence[str] = ()
    ) -> tuple[ValidationReport, AdapterQuota]:
        """Check the folder's files against a base and the tenant's limits. Raises as `check_base` does, and
        ValidationUnavailable.

        `base_model`: the base that the caller has named; None: the files decide. The report names the `ignored` files,
        which were announced and not taken.
        """
        from loramux_adapters import Limits  # torch: commands that only list or resolve do not load it

        self.check_base(base_model)
        async with self._database.read() as session:
            quota = await adapter_quota(session, principal, self._limits)
        limits = Limits(quota.rank, quota.file_bytes, self._limits.max_vocabulary_bytes)
        if quota.modules is not None:
            limits = replace(limits, max_modules=quota.modules)
        try:
            report = await self._threads.run(self._validators.examine, folder, limits, base_model)
        except SandboxDied as error:
            raise ValidationUnavailable("uploads cannot be checked at present; try again in a minute") from error
        return report.followed_by(ValidationReport(checks=(), warnings=_notes(ignored))), quota

    async def register(self, principal: Principal, staged: StagedUpload, on_registered: OnRegistered) -> AdapterInfo:
        """Store and register sound files; return the adapter as the registering transaction sees it.

        Raises UploadRejected, TooManyAdapters, UploadSuperseded or StorageUnavailable, and then nothing is registered.
        """
        if staged.report.refusal is not None:
            raise UploadRejected(staged.report.refusal)
        content = await self._threads.run(self._seal, staged)
        info = None
        try:
            while info is None:  # again where a concurrent deletion has removed the same content meanwhile
                await self._threads.run(self._blobs.publish, staged.folder, content.digest)
                info = await self._register(principal, staged, content, on_registered)
        except (RegistryError, UploadSuperseded):
            await self._blob_gc.remove_unused(frozenset({content.digest}))
            raise
        except BaseException:  # the registration may have been committed or not: the collector asks the rows
            self._blob_gc.remove_later(content.digest)
            raise
        await self._threads.run(self._blobs.adopt, staged.folder, content.digest)
        return info

    def _seal(self, staged: StagedUpload) -> RevisionContent:
        assert staged.report.found is not None, "only sound files are registered"
        base = self._bases.named(staged.report.base_model or "")
        if base is None:
            raise ValidationUnavailable("the base model was unloaded while the upload was checked; try again later")
        return RevisionContent(
            digest=self._blobs.seal(staged.folder),
            rank=staged.report.found.rank,
            size_bytes=sum((staged.folder / name).stat().st_size for name in files_of(staged.folder)),
            base=base.description.fingerprint,
            base_model=base.name,
            bundle=bundle.read_text() if (bundle := staged.folder / BUNDLE_FILE).exists() else None,
        )

    async def _register(
        self, principal: Principal, staged: StagedUpload, content: RevisionContent, on_registered: OnRegistered
    ) -> AdapterInfo | None:
        """Register the content; None where the store does not have it any more."""
        async with self._database.begin() as session:
            await advisory_lock(session, CONTENTS)
            adapters = AdapterRepository(session, principal.tenant)
            await self._check_counts(adapters, staged.adapter, staged.quota)
            await self._check_bytes(adapters, staged.quota, content)
            if not await self._threads.run(self._blobs.is_stored, content.digest):
                return None
            version, stamp = await adapters.version(staged.adapter), Stamp(self._database.now(), principal.key_id)
            adapter, revision = await register_revision(
                session, principal.tenant, staged.adapter, content, stamp, promote=staged.promote
            )
            if adapter.version != version:
                info = revision_info(f"{principal.tenant_name}/{adapter.name}", revision)
                audit = Change(session, actor_of(principal), stamp.at)
                await audit.note("adapter.upload", info.name, tenant=principal.tenant, after=info)
            await on_registered(session, revision)
            aliases = await AliasRepository(session, principal.tenant).all(adapter.id)
            return adapter_info(principal.tenant_name, adapter, aliases[adapter.id])

    async def _check_counts(self, adapters: AdapterRepository, name: str, quota: AdapterQuota) -> None:
        if await adapters.count() >= quota.adapters and not await adapters.exists(name):
            raise TooManyAdapters(
                f"you have {quota.adapters} adapters, the most that is allowed; delete one first, or ask for more",
                "name",
            )
        if await adapters.count_revisions(name) >= self._limits.max_revisions:
            raise TooManyAdapters(
                f"`{name}` has {self._limits.max_revisions} revisions, the most that an adapter may have "
                "(adapters.max_revisions); delete some first, or let them expire (ttl_s)",
                "name",
                "revisions",
            )

    async def _check_bytes(self, adapters: AdapterRepository, quota: AdapterQuota, content: RevisionContent) -> None:
        if quota.total_bytes is None:
            return
        have = await adapters.bytes_besides(content.digest)
        if have + content.size_bytes > quota.total_bytes:
            raise TooManyAdapters(
                f"your adapters have {have} bytes and this one {content.size_bytes}; together they may have "
                f"{quota.total_bytes} (adapter_bytes). Delete one first, or ask for more",
                "name",
            )


def _notes(ignored: Sequence[str]) -> tuple[ReportWarning, ...]:
    if not ignored:
        return ()
    message = f"These files mean nothing for serving and were not taken: {', '.join(ignored)[:2000]}."
    return (ReportWarning(code="files_ignored", field="files", message=message),)
