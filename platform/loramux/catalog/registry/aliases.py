"""Movable names for revisions: promote, canary, rollback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

from loramux.catalog.registry.changes import UNCONDITIONAL, AdapterChange, ChangeService, Preconditions
from loramux.catalog.registry.entities import AdapterInfo, AliasInfo, WeightedRevision
from loramux.catalog.registry.errors import ChangeConflict, InvalidChange, PartNotFound, TooManyAdapters, where_listed
from loramux.common.identity import GRAMMAR_IN_WORDS, Principal, is_name
from loramux.data.entities import AliasMove
from loramux.data.records.aliases import DEFAULT_ALIAS, WHOLE, AliasVersionRow, Target, targets_of
from loramux.data.records.webhooks import CANARY_STARTED, PROMOTED, ROLLED_BACK

MAX_TARGETS = 10
"""Maximum number of targets of an alias. All targets occupy the adapter pool at the same time."""
MAX_WEIGHT = 1_000_000

AliasCondition = Callable[[Principal, AdapterChange, AliasInfo, Sequence[WeightedRevision]], Awaitable[None]]
"""A condition, which is called with the caller, the change, the current alias and its new targets."""


class AliasService:
    """Points aliases at revisions. Every change also raises the errors of `ChangeService.change`."""

    def __init__(self, changes: ChangeService, max_aliases: int) -> None:
        self._changes = changes
        self._max_aliases = max_aliases
        self._conditions: list[AliasCondition] = []

    def require(self, condition: AliasCondition) -> None:
        """Register a condition. The condition runs in a change's transaction, and raises an error if an alias must not
        move or lose a revision.
        """
        self._conditions.append(condition)

    async def ensure_allowed(
        self, principal: Principal, change: AdapterChange, alias: AliasInfo, targets: Sequence[WeightedRevision]
    ) -> None:
        """Raise the error of a condition if the alias must not have these targets instead of its current targets."""
        for condition in self._conditions:
            await condition(principal, change, alias, targets)

    async def promote(
        self,
        principal: Principal,
        name: str,
        number: int,
        alias: str = DEFAULT_ALIAS,
        preconditions: Preconditions = UNCONDITIONAL,
    ) -> AdapterInfo:
        """Point `alias` only at this revision. Raises InvalidChange, PartNotFound, TooManyAdapters."""
        return await self.point(principal, name, alias, [WeightedRevision(number, WHOLE)], preconditions)

    async def point(
        self,
        principal: Principal,
        name: str,
        alias: str,
        targets: Sequence[WeightedRevision],
        preconditions: Preconditions = UNCONDITIONAL,
        *,
        is_announced: bool = True,
    ) -> AdapterInfo:
        """Point `alias`, new or existing, at these revisions by their weights.

        With `is_announced`, write an event for the change; otherwise the caller writes it. Raises InvalidChange,
        PartNotFound, TooManyAdapters.
        """
        check_alias(alias)
        check_targets(targets)

        async def act(change: AdapterChange) -> AdapterInfo:
            before = await alias_of(change, alias)
            if before is None:
                await self._check_count(change)
            rows = [Target(await change.revision(target.revision), target.weight) for target in targets]
            if before is not None:
                await self.ensure_allowed(principal, change, before, targets)
            if before is None or before.targets != tuple(sorted(targets, key=lambda target: target.revision)):
                await change.aliases.point(change.adapter.id, alias, rows, change.stamp)
                after = await alias_of(change, alias)
                await change.record("alias.put", f":{alias}", before=before, after=after)
                if is_announced:
                    kind = PROMOTED if len(targets) == 1 else CANARY_STARTED
                    await change.announce(kind, _move(alias, before, after))
            return await change.info()

        return await self._changes.change(principal, name, preconditions, act, AdapterInfo)

    async def remove(
        self, principal: Principal, name: str, alias: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> AdapterInfo:
        """Remove `alias`. Raises ChangeConflict for the default alias, PartNotFound."""

        async def act(change: AdapterChange) -> AdapterInfo:
            before = await existing_alias(change, alias)
            if alias == DEFAULT_ALIAS:
                raise ChangeConflict(
                    "alias_needed",
                    f"`{DEFAULT_ALIAS}` is what the adapter's bare name means: point it elsewhere.",
                    "alias",
                )
            await change.aliases.remove(change.adapter.id, alias, change.stamp)
            await change.record("alias.remove", f":{alias}", before=before)
            return await change.info()

        return await self._changes.change(principal, name, preconditions, act, AdapterInfo)

    async def roll_back(
        self,
        principal: Principal,
        name: str,
        alias: str,
        version: int | None,
        preconditions: Preconditions = UNCONDITIONAL,
    ) -> AdapterInfo:
        """Point `alias` at the targets of `version`, by default at its previous targets.

        A second rollback goes one step further back. Raises ChangeConflict if no earlier version is left, PartNotFound.
        """

        async def act(change: AdapterChange) -> AdapterInfo:
            before = await existing_alias(change, alias)
            history = await change.aliases.history(change.adapter.id, alias)
            callable_ = {
                revision.number: revision
                for revision in await change.adapters.revisions(change.adapter.id)
                if revision.deleted_at is None
            }
            row = earlier(history, callable_.keys()) if version is None else at_version(history, version)
            if row is None or not callable_.keys() >= targets_of(row).keys() or not targets_of(row):
                raise ChangeConflict(
                    "nothing_to_roll_back_to",
                    f"`{change.name}:{alias}` has no {'earlier version' if version is None else f'version {version}'} "
                    "whose revisions are all still there; see `loramux adapter history`, or promote a revision.",
                    "version",
                )
            targets = [Target(callable_[number], weight) for number, weight in targets_of(row).items()]
            await change.aliases.point(change.adapter.id, alias, targets, change.stamp, row.version)
            after = await alias_of(change, alias)
            await change.record("alias.rollback", f":{alias}", before=before, after=after)
            await change.announce(ROLLED_BACK, _move(alias, before, after))
            return await change.info()

        return await self._changes.change(principal, name, preconditions, act, AdapterInfo)

    async def _check_count(self, change: AdapterChange) -> None:
        have = len((await change.aliases.all(change.adapter.id))[change.adapter.id])
        if have >= self._max_aliases:
            raise TooManyAdapters(
                f"`{change.name}` has {have} aliases, the most that an adapter may have (adapters.max_aliases); "
                "remove one first",
                "alias",
                "aliases",
            )


def check_alias(alias: str) -> None:
    """Raise InvalidChange if the text cannot be an alias."""
    if not is_name(alias):
        raise InvalidChange(f"an alias is {GRAMMAR_IN_WORDS}; got {alias[:80]!r}", "alias")


def check_targets(targets: Sequence[WeightedRevision]) -> None:
    """Raise InvalidChange if no alias can have these targets."""
    if not 1 <= len(targets) <= MAX_TARGETS or len({target.revision for target in targets}) < len(targets):
        raise InvalidChange(f"an alias has 1 to {MAX_TARGETS} targets, each another revision", "targets")
    for number, target in enumerate(targets):
        if not 1 <= target.weight <= MAX_WEIGHT:
            raise InvalidChange(
                f"a weight is a whole number from 1 to {MAX_WEIGHT}, the target's part of the sum of all; "
                "leave a target out instead of giving it 0",
                f"targets[{number}].weight",
            )


async def alias_of(change: AdapterChange, alias: str) -> AliasInfo | None:
    """Describe the alias as this transaction sees it."""
    row = await change.aliases.get(change.adapter.id, alias)
    if row is None:
        return None
    weights = await change.aliases.weights(change.adapter.id, alias)
    targets = tuple(WeightedRevision(number, weight) for number, weight in weights.items())
    return AliasInfo(name=alias, targets=targets, version=row.version, updated_at=row.updated_at)


async def existing_alias(change: AdapterChange, alias: str) -> AliasInfo:
    """Describe the alias; raises PartNotFound."""
    found = await alias_of(change, alias)
    if found is None:
        raise PartNotFound(
            "alias", change.name, f"has no alias {alias[:80]!r}; {where_listed(change.name, 'aliases')}."
        )
    return found


def at_version(history: Sequence[AliasVersionRow], version: int) -> AliasVersionRow | None:
    """Return the history's entry of that version."""
    return next((row for row in history if row.version == version), None)


def earlier(history: Sequence[AliasVersionRow], callable_: AbstractSet[int]) -> AliasVersionRow | None:
    """Return the last earlier entry whose targets differ from the current targets and can all be called.

    `history` is newest first. If the current entry is itself a rollback, it counts as the version that it restored, so
    that a second rollback goes further back.
    """
    present = history[0]
    origin = present
    while origin.restores is not None and (restored := at_version(history, origin.restores)) is not None:
        origin = restored
    now = targets_of(present)
    for row in history:
        then = targets_of(row)
        if row.version < origin.version and then and then != now and then.keys() <= callable_:
            return row
    return None


def _move(name: str, before: AliasInfo | None, after: AliasInfo | None) -> AliasMove:
    """Return the change of an alias for its event. The alias must have targets after the change."""
    assert after is not None, "it was pointed at revisions"
    weights = [{t.revision: t.weight for t in one.targets} if one else {} for one in (before, after)]
    return AliasMove(name=name, before=weights[0], after=weights[1])
