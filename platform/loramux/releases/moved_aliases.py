"""Aliases that move from revisions for one base to those for another, as their owners would move them."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from loramux.errors import LoramuxError
from loramux.gateway import AdapterService, Platform
from loramux.records import Principal, RecordsError
from loramux.records.base_migrations import BaseMigrationRepository, MigrationItem
from loramux.registry import (
    AdapterInfo,
    AliasInfo,
    InvalidChange,
    PreconditionFailed,
    Preconditions,
    WeightedRevision,
    etag,
)
from loramux.registry.aliases import MAX_WEIGHT

TRIES = 3
"""Times that a change of an adapter is tried that others change at the same time."""


class Shifted(msgspec.Struct, frozen=True, kw_only=True):
    """What a shift did with one revision."""

    item: MigrationItem
    aliases: tuple[str, ...] = ()
    """Those that were moved."""
    error: LoramuxError | None = None
    """The reason why none, or not all, were moved."""


async def move_aliases(platform: Platform, operator: Principal, item: MigrationItem, weight: int) -> Shifted:
    """Give the new revision of an item `weight` percent of the old one's share of every alias; 0 rolls back."""
    system = await platform.tenants.system_principal(item.tenant_name)
    principal = msgspec.structs.replace(system, key_id=operator.key_id, origin=operator.origin)
    moved: tuple[str, ...] = ()
    try:
        for tried in range(1, TRIES + 1):
            try:
                moved += await _move(platform.adapters, principal, item, weight)
                break
            except PreconditionFailed:
                if tried == TRIES:
                    raise
    except LoramuxError as error:
        if isinstance(error, RecordsError):
            raise
        return Shifted(item=item, aliases=moved, error=error)
    item = msgspec.structs.replace(item, weight=weight)
    async with platform.database.begin() as session:
        await BaseMigrationRepository(session).change(item)
    return Shifted(item=item, aliases=moved)


async def _move(adapters: AdapterService, principal: Principal, item: MigrationItem, weight: int) -> tuple[str, ...]:
    moved = []
    info = await adapters.queries.get(principal, item.name)
    for alias in info.aliases:
        numbers = {target.revision for target in alias.targets}
        same = Preconditions(if_match=etag(info.version))
        if weight == 0 and item.new_number in numbers:
            info = await _roll_back(adapters, principal, item, alias, same)
        elif weight and (targets := _shares(alias, item, weight)) != alias.targets:
            info = await adapters.aliases.point(principal, item.name, alias.name, targets, same)
        else:
            continue
        moved.append(alias.name)
    return tuple(moved)


async def _roll_back(
    adapters: AdapterService, principal: Principal, item: MigrationItem, alias: AliasInfo, same: Preconditions
) -> AdapterInfo:
    """Point an alias at its last targets without the new revision."""
    for version in await adapters.queries.history(principal, item.name, alias.name):
        numbers = {target.revision for target in version.targets}
        if version.version < alias.version and numbers and item.new_number not in numbers:
            return await adapters.aliases.roll_back(principal, item.name, alias.name, version.version, same)
    raise InvalidChange(f"`{alias.name}` has had no targets without @{item.new_number}; point it yourself", "alias")


def _shares(alias: AliasInfo, item: MigrationItem, weight: int) -> tuple[WeightedRevision, ...]:
    """Return an alias's targets after the new revision has got `weight` percent of the share of the two.

    All others keep theirs. Raises InvalidChange where no whole numbers up to MAX_WEIGHT say so.
    """
    assert item.new_number is not None, "it fits"
    pair = (item.number, item.new_number)
    weights = {target.revision: target.weight for target in alias.targets}
    both = sum(weights.pop(number, 0) for number in pair)
    if not both:
        return alias.targets
    shares = {number: 100 * share for number, share in weights.items()}
    shares |= {item.number: both * (100 - weight), item.new_number: both * weight}
    targets = _reduced(shares)
    if max(targets.values()) > MAX_WEIGHT:
        raise InvalidChange(
            f"{weight}% of the weights of `{alias.name}` are no whole numbers; point it by hand", "weight"
        )
    if _reduced(weights | dict(_present(alias, pair))) == targets:
        return alias.targets
    return tuple(WeightedRevision(number, share) for number, share in sorted(targets.items()))


def _present(alias: AliasInfo, pair: Collection[int]) -> list[tuple[int, int]]:
    return [(target.revision, target.weight) for target in alias.targets if target.revision in pair]


def _reduced(shares: dict[int, int]) -> dict[int, int]:
    """Return the least whole numbers in the same proportion; a single target has the weight of a whole alias."""
    present = {number: share for number, share in shares.items() if share}
    divisor = math.gcd(*present.values())
    return {number: 100 if len(present) == 1 else share // divisor for number, share in present.items()}
