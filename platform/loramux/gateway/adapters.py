"""Tenants' adapters: what the registry keeps, and what the engine must keep or forget."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from loramux.engine import EngineClient
from loramux.engine.request import AdapterRef
from loramux.gateway.errors import InvalidRequest
from loramux.gateway.pins import Pins
from loramux.registry import UNCONDITIONAL, AdapterInfo, Registry, RevisionInfo, Terms
from loramux.tenants import Principal


class AdapterService:
    """Everything that is done with adapters. `reading`, `releasing` and `sharing` concern the registry alone."""

    def __init__(self, registry: Registry, engine: EngineClient) -> None:
        self.reading = registry.reading
        self.releasing = registry.releasing
        self.sharing = registry.sharing
        self.retiring = registry.retiring
        self.pins = Pins(registry, engine)
        self._registry = registry
        self._engine = engine

    def staging(self) -> AbstractContextManager[Path]:
        """An empty folder to receive files in; gone when the block ends."""
        return self._registry.staging()

    async def upload(self, principal: Principal, name: str, config_file: Path, weights_file: Path) -> AdapterInfo:
        """Make two received files the next revision of `name`.

        Raises InvalidRequest with the field and the reason where they cannot be served on this base, and what
        Registry.upload raises.
        """
        from loramux_adapters import AdapterRejected  # torch: not for those who only make a key

        try:
            return await self._registry.upload(principal, name, config_file, weights_file)
        except AdapterRejected as rejected:
            raise InvalidRequest(rejected.message, param=rejected.field, code=rejected.code) from None

    async def preload(self, principal: Principal, model: str) -> str | None:
        """Have `model` in the engine's pool, and stay there; why not, where it cannot be.

        Raises ModelNotFound, RevisionUnavailable or EngineDied.
        """
        revision = (await self._registry.resolve(principal, model)).revision
        if revision is None:
            return None
        fault = await self._engine.pin(AdapterRef(revision.digest, str(revision.directory)))
        return fault.message if fault else None

    async def delete(
        self, principal: Principal, name: str, terms: Terms = UNCONDITIONAL, undo_seconds: int | None = None
    ) -> AdapterInfo:
        """Delete an adapter, here and in the engine, and say what it was: see `Retiring.delete`."""
        info, digests = await self.retiring.delete(principal, name, terms, undo_seconds)
        await self._retire(digests)
        return info

    async def delete_revision(
        self,
        principal: Principal,
        name: str,
        number: int,
        terms: Terms = UNCONDITIONAL,
        undo_seconds: int | None = None,
    ) -> RevisionInfo:
        """The same for one revision: see `Retiring.delete_revision`."""
        info = await self.retiring.delete_revision(principal, name, number, terms, undo_seconds)
        await self._retire(frozenset({info.digest}))
        return info

    async def keep_house(self) -> None:
        """Delete what has expired, forget what is gone, and see that the engine keeps what is pinned, and no more."""
        await self.retiring.expire()
        for digest in await self._registry.contents.departed():
            self._engine.retire(digest)
        await self._registry.contents.purge()
        await self.pins.renew()

    async def _retire(self, digests: frozenset[str]) -> None:
        for digest in await self._registry.contents.uncallable(digests):
            self._engine.retire(digest)
