"""Which revisions their owners keep in the pool, as the records have it."""

from __future__ import annotations

from collections.abc import Collection

from loramux.records import Database, Principal
from loramux.records.pins import IDLE, UNPINNED, StandingPin, StandingPinRepository
from loramux.registry.changing import UNCONDITIONAL, Changing, Terms, Turn
from loramux.registry.entities import RevisionInfo
from loramux.registry.errors import AdapterNotFound, PartNotFound, TooManyAdapters
from loramux.settings import AdapterLimits
from loramux.tenants import house_of

SECOND = 1_000_000
"""Microseconds."""


class Pinning:
    """Notes pins; that the engine keeps them is the gateway's to see to. Raises what `Changing.change` raises."""

    def __init__(self, database: Database, changing: Changing, limits: AdapterLimits) -> None:
        self._database = database
        self._changing = changing
        self._max_pins = limits.pins_per_tenant
        self._idle_seconds = limits.pin_idle_seconds

    async def pin(self, principal: Principal, name: str, number: int, terms: Terms = UNCONDITIONAL) -> RevisionInfo:
        """The tenant keeps this revision from now on. Raises PartNotFound, TooManyAdapters."""

        async def act(turn: Turn) -> RevisionInfo:
            revision = await turn.revision(number)
            if revision.id not in await turn.pins.of(turn.adapter.id):
                if await turn.pins.count() >= self._max_pins:
                    raise TooManyAdapters(
                        f"you have {self._max_pins} pins, the most that a tenant may have (adapters.pins_per_tenant); "
                        "unpin one first",
                        "revision",
                        "pins",
                    )
                await turn.pins.add(revision, turn.stamp)
                await turn.note("pin.put", f"@{number}", after=await turn.revision_info(revision))
            return await turn.revision_info(revision)

        return await self._changing.change(principal, name, terms, act, RevisionInfo)

    async def unpin(
        self, principal: Principal, name: str, number: int, terms: Terms = UNCONDITIONAL, why: str = UNPINNED
    ) -> RevisionInfo:
        """It is kept no longer. Raises PartNotFound."""

        async def act(turn: Turn) -> RevisionInfo:
            revision = await turn.revision(number)
            if revision.id not in await turn.pins.of(turn.adapter.id):
                raise PartNotFound("pin", f"{turn.name}@{number}", "is not pinned.")
            before = await turn.revision_info(revision)
            await turn.pins.end([revision.id], why, turn.now)
            await turn.note("pin.remove", f"@{number}", before=before)
            return await turn.revision_info(revision)

        return await self._changing.change(principal, name, terms, act, RevisionInfo)

    async def standing(self, used: Collection[str]) -> list[StandingPin]:
        """Every tenant's pins but those that are idle, which end; requests have just run with the contents `used`."""
        now = self._database.now()
        if used:
            async with self._database.begin() as session:
                await StandingPinRepository(session).touch(used, now)
        async with self._database.read() as session:
            pins = await StandingPinRepository(session).all()
        idle = [pin for pin in pins if self._idle(pin, now)]
        for pin in idle:
            await self.end(pin, IDLE)
        return [pin for pin in pins if pin not in idle]

    async def end(self, pin: StandingPin, why: str) -> None:
        """The house lets go of a pin that may have ended already."""
        house = house_of(pin.tenant, pin.tenant_name)
        try:
            await self.unpin(house, pin.adapter, pin.number, why=why)
        except (AdapterNotFound, PartNotFound):
            return  # its owner was quicker

    def _idle(self, pin: StandingPin, now: int) -> bool:
        return self._idle_seconds is not None and pin.used_at < now - self._idle_seconds * SECOND
