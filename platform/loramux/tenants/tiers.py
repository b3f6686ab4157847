"""Levels of service: operators' to make."""

from __future__ import annotations

from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.records.tenancy import TierRepository
from loramux.records.tenancy_models import TierRow
from loramux.tenants.audit import Changes
from loramux.tenants.entities import Tier, tier_of
from loramux.tenants.errors import InvalidTenant, StillNeeded, TierNotFound

SERVICE_CLASSES = ("interactive", "standard", "batch")
"""As the scheduler has them (`engine.request.ServiceClass`)."""
MAX_WEIGHT = 1000
DEFAULT_TIER = "standard"


class Tiers:
    """Every tier, in the hands of one mandate."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def put(self, name: str, service_class: str, weight: int) -> Tier:
        """Make or change a tier; its tenants have it from their next request on. Raises InvalidTenant."""
        if not is_name(name):
            raise InvalidTenant(f"a tier's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        if service_class not in SERVICE_CLASSES:
            raise InvalidTenant(f"service_class is one of {', '.join(SERVICE_CLASSES)}", "service_class")
        if not 1 <= weight <= MAX_WEIGHT:
            raise InvalidTenant(f"weight is 1 to {MAX_WEIGHT}", "weight")
        async with self._changes.begin() as change:
            tiers = TierRepository(change.session)
            old = await tiers.named(name)
            before = None if old is None else tier_of(old)
            created_at = change.now if old is None else old.created_at
            row = TierRow(name=name, service_class=service_class, weight=weight, created_at=created_at)
            await tiers.put(row)
            await change.note("tier.put", name, tenant=None, before=before, after=tier_of(row))
        return tier_of(row)

    async def all(self) -> list[Tier]:
        """Every tier, by name."""
        async with self._changes.database.read() as session:
            return [tier_of(row) for row in await TierRepository(session).all()]

    async def remove(self, name: str) -> Tier:
        """Forget a tier that no tenant has. Raises TierNotFound, StillNeeded."""
        async with self._changes.begin() as change:
            tiers = TierRepository(change.session)
            row = await tiers.named(name) if is_name(name) else None
            if row is None:
                raise TierNotFound(f"there is no tier {name[:80]!r}", "tier")
            users = await tiers.used(name)
            if users or name == DEFAULT_TIER:
                why = f"{users} tenants have it" if users else "new tenants get it"
                raise StillNeeded(f"the tier {name!r} is needed: {why}", "tier")
            await tiers.remove(row)
            await change.note("tier.remove", name, tenant=None, before=tier_of(row))
        return tier_of(row)
