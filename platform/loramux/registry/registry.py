"""The registry: uploads become revisions, model names become revisions, deletions become nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from loramux.limits import AdapterCaps, adapter_caps
from loramux.records import Database, Principal
from loramux.records.adapters import DEFAULT_ALIAS, AdapterRepository, ContentRepository, Listed, RevisionContent
from loramux.records.locks import CONTENTS, exclusive
from loramux.registry.errors import AdapterNotFound, ModelNotFound, RevisionUnavailable, TooManyAdapters
from loramux.registry.names import adapter_part, check_adapter_name, parse_model
from loramux.settings import AdapterLimits
from loramux.storage import FILES, BlobStore, StorageError

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription

P = ParamSpec("P")
T = TypeVar("T")

VALIDATIONS_AT_ONCE = 2
SWEEP_PAGE = 500


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter and its current revision. `created_at` is the revision's, in microseconds since the epoch."""

    id: str
    name: str
    """`tenant/adapter`."""
    revision: int
    digest: str
    state: str
    rank: int
    """The largest of its modules'."""
    size_bytes: int
    created_at: int


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable weights: a digest, and the local folder with the verified files."""

    adapter_id: str
    number: int
    digest: str
    directory: Path


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model name means at this moment: `tenant/adapter@3`, or the base model (no revision)."""

    name: str
    base_model: str
    """The base model's served name."""
    revision: Revision | None


class Registry:
    """One base model's adapters, of every tenant."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        base: BaseDescription,
        served_model_name: str,
        limits: AdapterLimits,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._base = base
        self._served_model_name = served_model_name
        self._limits = limits
        self._validations = asyncio.Semaphore(VALIDATIONS_AT_ONCE)

    def staging(self) -> AbstractContextManager[Path]:
        """A folder to receive an upload in, which `upload` then takes files from without copying; gone afterwards."""
        return self._blobs.staging()

    async def upload(self, principal: Principal, name: str, config_file: Path, weights_file: Path) -> AdapterInfo:
        """Check both files and make them the next revision of `name`; the same content again changes nothing.

        Files inside `staging()` are moved, others copied. Validated, then stored, then registered: a crash
        in between leaves at most a content that `sweep` removes. Raises InvalidName, TooManyAdapters, or
        loramux_adapters.AdapterRejected, and then nothing is left behind.
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
        return _info(principal, listed)

    async def resolve(self, principal: Principal, model: str) -> ResolvedModel:
        """What `model` means to this caller now. Raises ModelNotFound, RevisionUnavailable."""
        if model == self._served_model_name and principal.may_use(model):
            return ResolvedModel(name=model, base_model=model, revision=None)
        name = parse_model(model)
        if name is None or name.tenant != principal.tenant_name:
            raise ModelNotFound(model)
        if not principal.may_use(f"{name.tenant}/{name.adapter}"):
            raise ModelNotFound(model)
        async with self._database.read() as session:
            adapters = AdapterRepository(session, principal.tenant)
            if name.number is not None:
                listed = await adapters.numbered(name.adapter, name.number)
            else:
                listed = await adapters.aliased(name.adapter, name.alias or DEFAULT_ALIAS)
        if listed is None:
            raise ModelNotFound(model)
        return await self._resolved(principal, listed)

    async def list_adapters(self, principal: Principal) -> list[AdapterInfo]:
        """The caller's adapters with their current revisions, by name; those that its allow-list has."""
        async with self._database.read() as session:
            every = [_info(principal, listed) for listed in await AdapterRepository(session, principal.tenant).all()]
        return [info for info in every if principal.may_use(info.name)]

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """One of the caller's adapters, as `adapter` or `tenant/adapter`. Raises AdapterNotFound."""
        adapter = _own(principal, name)
        async with self._database.read() as session:
            listed = await AdapterRepository(session, principal.tenant).default(adapter) if adapter else None
        if listed is None:
            raise AdapterNotFound(name)
        return _info(principal, listed)

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
        await self._remove_unused(unreferenced)
        return unreferenced

    async def sweep(self) -> int:
        """At boot: remove what crashes left behind, staged or stored; the number of contents removed."""
        await finished(self._blobs.sweep_incoming)
        stored = await finished(self._blobs.digests)
        pages = [stored[start : start + SWEEP_PAGE] for start in range(0, len(stored), SWEEP_PAGE)]
        return sum([await self._remove_unused(frozenset(page)) for page in pages])

    async def _remove_unused(self, digests: frozenset[str]) -> int:
        async with self._database.begin() as session:
            await exclusive(session, CONTENTS)
            unused = await ContentRepository(session).unused(digests)
            for digest in unused:
                await finished(self._blobs.remove, digest)
        return len(unused)

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
        from loramux_adapters import Limits, validate_adapter  # torch: not for those who only list or resolve

        self._blobs.stage(folder, config_file, weights_file)
        limits = Limits(max_rank=caps.rank, max_bytes=self._limits.max_bytes)
        plan = validate_adapter(folder, self._base, limits)
        digest = self._blobs.seal(folder)
        with suppress(StorageError):  # verified now, so that publishing it again reads nothing
            self._blobs.directory(digest)
        return RevisionContent(
            digest=digest,
            rank=plan.max_rank,
            size_bytes=sum((folder / name).stat().st_size for name in FILES),
            base=self._base.fingerprint,
        )

    async def _resolved(self, principal: Principal, listed: Listed) -> ResolvedModel:
        adapter, revision = listed
        name = f"{principal.tenant_name}/{adapter.name}@{revision.number}"
        if revision.base != self._base.fingerprint:
            raise RevisionUnavailable(
                f"`{name}` was made for another base model than {self._served_model_name}; upload one made for this",
                "model",
            )
        try:
            directory = self._blobs.known_directory(revision.digest)
            if directory is None:
                directory = await finished(self._blobs.directory, revision.digest)
        except StorageError as error:
            raise RevisionUnavailable(f"the files of `{name}` are damaged: {error}", "model") from error
        return ResolvedModel(
            name=name,
            base_model=self._served_model_name,
            revision=Revision(
                adapter_id=adapter.id, number=revision.number, digest=revision.digest, directory=directory
            ),
        )


async def finished(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function on a thread and leave only when it has ended, even when cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _own(principal: Principal, name: str) -> str | None:
    """The adapter's own name; None where it cannot be the caller's to know of."""
    adapter = adapter_part(principal.tenant_name, name)
    return adapter if adapter and principal.may_use(f"{principal.tenant_name}/{adapter}") else None


def _info(principal: Principal, listed: Listed) -> AdapterInfo:
    adapter, revision = listed
    return AdapterInfo(
        id=adapter.id,
        name=f"{principal.tenant_name}/{adapter.name}",
        revision=revision.number,
        digest=revision.digest,
        state=revision.state,
        rank=revision.rank,
        size_bytes=revision.size_bytes,
        created_at=revision.created_at,
    )
