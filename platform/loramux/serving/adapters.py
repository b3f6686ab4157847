"""Tenants' adapters on a running server: the registry's records, and the engines that must keep or forget the weights.

`AdapterService` deletes, preloads and pins: it changes the records through the registry, and then tells every engine.
`PinnedRevisions` applies the recorded pins to this server's engines. `LocalFolders` offers operators vLLM's way to load
and unload an adapter at run time, from a folder of the server's own machine. That folder must be below a root that the
settings name. The adapter is uploaded in the same way as other adapters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from loramux.accounts.tenants.errors import NotPermitted
from loramux.accounts.tenants.tenants import system_principal
from loramux.catalog.registry.changes import UNCONDITIONAL, Preconditions
from loramux.catalog.registry.entities import AdapterInfo, RevisionInfo
from loramux.catalog.registry.errors import AdapterNotFound, BaseRetired, ChangeConflict, RegistryError
from loramux.catalog.registry.registry import Registry
from loramux.catalog.registry.resolver import engine_key
from loramux.catalog.uploads.imports import MAX_LISTED, FolderSource
from loramux.catalog.uploads.sessions import UploadRequest, UploadSessions
from loramux.common.bundle import SOURCES, explain_absence
from loramux.common.identity import Principal, TenantId
from loramux.data.records.pins import ActivePin
from loramux.data.storage.blobs import FILES
from loramux.engine.messages import AdapterRef, EngineFault
from loramux.fleet.group import EngineGroup
from loramux.serving.errors import FolderNotFound, InvalidRequest

logger = logging.getLogger(__name__)
ENDING = ("pin_limit", BaseRetired.code)
"""Error codes that end a pin: the engine has no room for it, or its base is retired."""


class PinKey(NamedTuple):
    """A pin in the form by which engines identify it."""

    digest: str
    """The engine's key of the revision."""
    tenant: TenantId
    base_model: str
    """Base that the revision was uploaded for."""


class AdapterService:
    """Operations on adapters that also concern the engines. `queries`, `aliases`, `grants` and `deletion` concern only
    the registry.
    """

    def __init__(self, registry: Registry, engines: Mapping[str, EngineGroup]) -> None:
        """`engines` has the engines of each base, by the base's name."""
        self.queries = registry.queries
        self.aliases = registry.aliases
        self.grants = registry.grants
        self.deletion = registry.deletion
        self.pins = PinnedRevisions(registry, engines)
        self._registry = registry
        self._engines = engines

    async def preload(self, principal: Principal, model: str) -> str | None:
        """Load `model` into the engine's pool permanently. If that is impossible, return the reason.

        Raises ModelNotFound, RevisionUnavailable or EngineDied.
        """
        resolved = await self._registry.resolver.resolve(principal, model)
        revision = resolved.revision
        if revision is None:
            return None
        ref = AdapterRef(revision.engine_key, str(revision.directory))
        fault = await self._engines[resolved.base_model].pin(ref)
        return fault.message if fault else None

    async def delete(
        self,
        principal: Principal,
        name: str,
        preconditions: Preconditions = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> AdapterInfo:
        """Delete an adapter in the registry and the engine, and return its last description. See
        `DeletionService.delete`.
        """
        info, digests = await self.deletion.delete(principal, name, preconditions, undo_seconds)
        await self._retire(principal, digests)
        return info

    async def delete_revision(
        self,
        principal: Principal,
        name: str,
        number: int,
        preconditions: Preconditions = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> RevisionInfo:
        """Delete one revision in the registry and the engine. See `DeletionService.delete_revision`."""
        info = await self.deletion.delete_revision(principal, name, number, preconditions, undo_seconds)
        await self._retire(principal, frozenset({info.digest}))
        return info

    async def run_maintenance(self) -> None:
        """Delete expired adapters, collect unneeded blobs, and reconcile the engines' pins with the records."""
        await self.deletion.expire()
        self.retire(await self._registry.blob_gc.recently_uncallable())
        await self._registry.blob_gc.purge()
        await self.pins.reconcile()

    async def _retire(self, principal: Principal, digests: frozenset[str]) -> None:
        self.retire(await self._registry.blob_gc.uncallable(principal.tenant, digests))

    def retire(self, keys: Iterable[str]) -> None:
        """Let every engine forget weights that no name leads to any more, as soon as no request uses them."""
        for key in keys:
            for engine in self._engines.values():
                engine.retire(key)


class PinnedRevisions:
    """Applies the recorded pins to this server's engines. Each other server of the database does the same for its own
    engines.
    """

    def __init__(self, registry: Registry, engines: Mapping[str, EngineGroup]) -> None:
        self._registry = registry
        self._engines = engines
        self._applied: dict[PinKey, EngineGroup] = {}
        self._starting: set[PinKey] = set()

    async def pin(
        self, principal: Principal, name: str, number: int, preconditions: Preconditions = UNCONDITIONAL
    ) -> RevisionInfo:
        """Keep a revision in the pool. The call returns when the revision is loaded.

        Raises ChangeConflict if the engine has no space for the revision, RevisionUnavailable, EngineDied, and the
        errors of `PinService.pin`.
        """
        info = await self._registry.queries.revision(principal, name, number)
        key = PinKey(engine_key(principal.tenant, info.digest), principal.tenant, info.base_model)
        if key in self._applied.keys() - self._starting:
            return await self._registry.pins.pin(principal, name, number, preconditions)
        self._starting.add(key)
        try:
            if fault := await self._apply(principal, info.name, key):
                raise ChangeConflict(
                    fault.code, f"`{info.name}` cannot be kept in the pool: {fault.message}", "revision"
                )
            return await self._registry.pins.pin(principal, name, number, preconditions)
        except BaseException:
            self._release(key)
            raise
        finally:
            self._starting.discard(key)

    async def unpin(
        self, principal: Principal, name: str, number: int, preconditions: Preconditions = UNCONDITIONAL
    ) -> RevisionInfo:
        """End a pin; the revision is evicted when its pages are needed. Raises the errors of `PinService.unpin`."""
        info = await self._registry.pins.unpin(principal, name, number, preconditions)
        self._release(PinKey(engine_key(principal.tenant, info.digest), principal.tenant, info.base_model))
        return info

    async def reconcile(self) -> None:
        """Release pins that have ended, and apply pins that are not applied yet. Runs at the start, and
        periodically.
        """
        unloaded = [key for key, engine in self._applied.items() if engine not in self._engines.values()]
        for key in unloaded:
            del self._applied[key]
        pins = await self._registry.pins.active(self._registry.resolver.take_used())
        active = {PinKey(engine_key(pin.tenant, pin.digest), pin.tenant, pin.base_model): pin for pin in pins}
        for key in self._applied.keys() - active.keys() - self._starting:
            self._release(key)
        for key in active.keys() - self._applied.keys() - self._starting:
            await self._reapply(active[key], key)

    async def _reapply(self, pin: ActivePin, key: PinKey) -> None:
        principal = system_principal(pin.tenant, pin.tenant_name)
        name = f"{pin.tenant_name}/{pin.adapter}@{pin.number}"
        try:
            fault = await self._apply(principal, name, key)
        except RegistryError as error:
            fault = EngineFault(error.code, error.message)
        if fault is None:
            return
        logger.warning("a pin cannot be kept: %s: %s", name, fault.message)
        if fault.code in ENDING:
            await self._registry.pins.end(pin, fault.code)

    async def _apply(self, principal: Principal, model: str, key: PinKey) -> EngineFault | None:
        resolved = await self._registry.resolver.resolve(principal, model)
        revision, engine = resolved.revision, self._engines[resolved.base_model]
        assert revision is not None, "only revisions are pinned"
        self._applied[key] = engine
        fault: EngineFault | None = EngineFault("unknown", "The pin was interrupted.")
        try:
            fault = await engine.pin(AdapterRef(revision.engine_key, str(revision.directory)), principal.tenant)
        finally:
            if fault is not None:
                self._release(key)
        return fault

    def _release(self, key: PinKey) -> None:
        if engine := self._applied.pop(key, None):
            engine.unpin(key.digest, key.tenant)


class LocalFolders:
    """Loads and unloads adapters at run time, as vLLM does. Each adapter is checked, versioned and stored like an
    upload.
    """

    def __init__(self, adapters: AdapterService, uploads: UploadSessions, root: str | None) -> None:
        self._adapters = adapters
        self._uploads = uploads
        self._root = Path(root).resolve() if root else None

    @property
    def is_open(self) -> bool:
        """Return whether the settings name a root."""
        return self._root is not None

    async def load(self, principal: Principal, name: str, path: str, load_inplace: bool) -> AdapterInfo:
        """Point `name` at the adapter in the folder `path`. With `load_inplace`, an existing adapter is replaced.

        Raises InvalidRequest, NotPermitted, and the errors of `UploadSessions.run`.
        """
        folder = self._folder(path)
        if not load_inplace and await self._exists(principal, name):
            raise InvalidRequest(
                f"The lora adapter '{name[:160]}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                field="lora_name",
                code="adapter_already_loaded",
            )
        for file in (*FILES, *(name for name in SOURCES if (folder / name).exists())):
            self._inside(folder / file)
        return await self._uploads.run(principal, UploadRequest(name, None, FolderSource(path=str(folder))))

    async def unload(self, principal: Principal, name: str) -> AdapterInfo:
        """Delete the adapter. Raises NotPermitted, AdapterNotFound."""
        self._check_allowed()
        return await self._adapters.delete(principal, name)

    async def _exists(self, principal: Principal, name: str) -> bool:
        try:
            await self._adapters.queries.get(principal, name)
        except AdapterNotFound:
            return False
        return True

    def _folder(self, path: str) -> Path:
        root = self._check_allowed()
        if not path or "\0" in path:
            raise InvalidRequest("'lora_path' is the path of a folder.", field="lora_path", code="invalid_value")
        folder = self._inside(root / path)
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing:
            raise FolderNotFound(
                f"No adapter found in '{path[:160]}': it has no {' and no '.join(missing)}. "
                + explain_absence(islice(_names_in(folder), MAX_LISTED), "send its path as 'lora_path'"),
                "lora_path",
            )
        return folder

    def _inside(self, path: Path) -> Path:
        """Return the real path below the root. A path outside of the root gets the same answer as an absent path."""
        real, root = path.resolve(), self._check_allowed()
        if not real.is_relative_to(root) or not real.exists():
            raise FolderNotFound(
                "'lora_path' leads to nothing below the folder that the operator has set (adapters.local_root).",
                "lora_path",
            )
        return real

    def _check_allowed(self) -> Path:
        if self._root is None:
            raise NotPermitted(
                "This server loads no adapters from its own folders: set adapters.local_root in its settings, or "
                "upload them with POST /v1/adapters.",
                "lora_path",
            )
        return self._root


def _names_in(folder: Path) -> Iterator[str]:
    """Yield the names of the files in a folder and the folders below it, without following links."""
    for place, _, files in os.walk(folder):
        yield from (str(Path(place, name).relative_to(folder)) for name in sorted(files))
