"""Pins: what the records say is kept in the pool, and what the engine keeps there."""

from __future__ import annotations

import logging

from loramux.engine import EngineClient
from loramux.engine.messages import EngineFault
from loramux.engine.request import AdapterRef
from loramux.registry import (
    UNCONDITIONAL,
    ChangeConflict,
    Registry,
    RegistryError,
    RevisionInfo,
    StandingPin,
    Terms,
)
from loramux.tenants import Principal, house_of

logger = logging.getLogger(__name__)
LIMIT = "pin_limit"
"""The engine's code where there is no room for a pin."""

Held = tuple[str, str]
"""A digest, and the tenant that keeps it."""


class Pins:
    """Keeps one engine and the records of the same mind; other servers of the database do it for theirs."""

    def __init__(self, registry: Registry, engine: EngineClient) -> None:
        self._registry = registry
        self._engine = engine
        self._held: set[Held] = set()
        self._coming: set[Held] = set()

    async def pin(self, principal: Principal, name: str, number: int, terms: Terms = UNCONDITIONAL) -> RevisionInfo:
        """Keep a revision in the pool; waits until it is there.

        Raises ChangeConflict where the engine has no room for it, RevisionUnavailable, EngineDied, and what Pinning.pin
        raises.
        """
        info = await self._registry.reading.revision(principal, name, number)
        held = (info.digest, principal.tenant)
        if held in self._held:
            return await self._registry.pinning.pin(principal, name, number, terms)
        self._coming.add(held)
        try:
            if fault := await self._keep(principal, info.name):
                raise ChangeConflict(
                    fault.code, f"`{info.name}` cannot be kept in the pool: {fault.message}", "revision"
                )
            pinned = await self._registry.pinning.pin(principal, name, number, terms)
            self._held.add(held)
        finally:
            self._coming.discard(held)
            if held not in self._held:
                self._engine.unpin(*held)
        return pinned

    async def unpin(self, principal: Principal, name: str, number: int, terms: Terms = UNCONDITIONAL) -> RevisionInfo:
        """Keep it no longer; it goes when somebody needs the room. Raises what Pinning.unpin raises."""
        info = await self._registry.pinning.unpin(principal, name, number, terms)
        self._let_go((info.digest, principal.tenant))
        return info

    async def renew(self) -> None:
        """Let go of what is pinned no longer or idle, and keep what is pinned: at boot, and again and again."""
        pins = await self._registry.pinning.standing(self._registry.take_used())
        standing = {(pin.digest, pin.tenant): pin for pin in pins}
        for held in self._held - standing.keys():
            self._let_go(held)
        for held in standing.keys() - self._held - self._coming:
            await self._renew(standing[held])

    async def _renew(self, pin: StandingPin) -> None:
        house = house_of(pin.tenant, pin.tenant_name)
        name = f"{pin.tenant_name}/{pin.adapter}@{pin.number}"
        try:
            fault = await self._keep(house, name)
        except RegistryError as error:
            fault = EngineFault(error.code, error.message)
        if fault is None:
            self._held.add((pin.digest, pin.tenant))
            return
        logger.warning("a pin cannot be kept: %s: %s", name, fault.message)
        if fault.code == LIMIT:
            await self._registry.pinning.end(pin, LIMIT)

    async def _keep(self, principal: Principal, model: str) -> EngineFault | None:
        revision = (await self._registry.resolve(principal, model)).revision
        assert revision is not None, "only revisions are pinned"
        return await self._engine.pin(AdapterRef(revision.digest, str(revision.directory)), principal.tenant)

    def _let_go(self, held: Held) -> None:
        self._held.discard(held)
        self._engine.unpin(*held)
