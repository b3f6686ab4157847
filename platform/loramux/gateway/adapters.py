"""Tenants' adapters: what the registry keeps, and what the engine must forget."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from loramux.engine import EngineClient
from loramux.engine.request import AdapterRef
from loramux.gateway.errors import InvalidRequest
from loramux.registry import AdapterInfo, Registry
from loramux.tenants import Principal


class AdapterService:
    """Upload, list and delete."""

    def __init__(self, registry: Registry, engine: EngineClient) -> None:
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

    async def all(self, principal: Principal) -> list[AdapterInfo]:
        """The caller's adapters, by name."""
        return await self._registry.list_adapters(principal)

    async def get(self, principal: Principal, name: str) -> AdapterInfo:
        """One of the caller's adapters. Raises AdapterNotFound."""
        return await self._registry.get(principal, name)

    async def delete(self, principal: Principal, name: str) -> AdapterInfo:
        """Forget an adapter, here and in the engine, and say what it was. Raises AdapterNotFound."""
        info = await self._registry.get(principal, name)
        for digest in await self._registry.delete(principal, name):
            self._engine.retire(digest)
        return info
