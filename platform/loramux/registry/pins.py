"""Pins in the records: revisions that their owners keep in the adapter pool and pay for."""

from __future__ import annotations

from collections.abc import Collection

from loramux.records import Database, Principal
from loramux.records.pins import IDLE, UNPINNED, ActivePin, ActivePinRepository
from loramux.registry.changes import UNCONDITIONAL, AdapterChange, ChangeService, Preconditions
from loramux.registry.entities import RevisionInfo
from loramux.registry.errors import AdapterNotFound, PartNotFound, TooManyAdapters
from loramux.settings import AdapterLimits
from loramux.tenants import system_principal
from loramux.units import SECOND


class PinService:
    """Records pins, which the gateway applies to the engine. Changes raise the errors of `ChangeService.change` too."""

    def __init__(self, database: Database, changes: ChangeService, limits: AdapterLimits) -> None:
        self._database = database
        self._changes = changes
        self._max_pins = limits.pins_per_tenant
        self._idle_seconds = limits.pin_idle_seconds

    async def pin(
        self, principal: Principal, name: str, number: int, preconditions: Preconditions = UNCONDITIONAL
    ) -> RevisionInfo:
        """Record a pin of this revision. Raises PartNotFound, TooManyAdapters."""

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            if revision.id not in await change.pins.of(change.adapter.id):
                if await change.pins.count() >= self._max_pins:
                    raise TooManyAdapters(
                        f"you have {self._max_pins} pins, the most that a tenant may have (adapters.pins_per_tenant); "
                        "unpin one first",
                        "revision",
                        "pins",
                    )
                await change.pins.add(revision, change.stamp)
                await change.record("pin.put", f"@{number}", after=await change.revision_info(revision))
            return await change.revision_info(revision)

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def unpin(
        self,
        principal: Principal,
        name: str,
        number: int,
        preconditions: Preconditions = UNCONDITIONAL,
        why: str = UNPINNED,
    ) -> RevisionInfo:
        """Record the end of a pin. Raises PartNotFound."""

        async def act(change: AdapterChange) -> RevisionInfo:
            revision = await change.revision(number)
            if revision.id not in await change.pins.of(change.adapter.id):
                raise PartNotFound("pin", f"{change.name}@{number}", "is not pinned.")
            before = await change.revision_info(revision)
            await change.pins.end([revision.id], why, change.now)
            await change.record("pin.remove", f"@{number}", before=before)
            return await change.revision_info(revision)

        return await self._changes.change(principal, name, preconditions, act, RevisionInfo)

    async def active(self, used: Collection[str]) -> list[ActivePin]:
        """List every tenant's pins; idle ones end. `used` are the revisions that requests ran with since last time."""
        now = self._database.now()
        if used:
            async with self._database.begin() as session:
                await ActivePinRepository(session).touch(used, now)
        async with self._database.read() as session:
            pins = await ActivePinRepository(session).all()
        idle = [pin for pin in pins if self._is_idle(pin, now)]
        for pin in idle:
            await self.end(pin, IDLE)
        return [pin for pin in pins if pin not in idle]

    async def end(self, pin: ActivePin, why: str) -> None:
        """End a pin in the system's name; it may have ended already."""
        system = system_principal(pin.tenant, pin.tenant_name)
        try:
            await self.unpin(system, pin.adapter, pin.number, why=why)
        except (AdapterNotFound, PartNotFound):
            return  # the owner has ended it meanwhile

    def _is_idle(self, pin: ActivePin, now: int) -> bool:
        return self._idle_seconds is not None and pin.used_at < now - self._idle_seconds * SECOND
