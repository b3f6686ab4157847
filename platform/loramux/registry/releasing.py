"""What aliases point at: promote, canary, rollback."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from loramux.records import Principal
from loramux.records.aliases import DEFAULT_ALIAS, WHOLE, Target, targets_of
from loramux.records.lifecycle_models import AliasVersionRow
from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.registry.changing import UNCONDITIONAL, Changing, Terms, Turn
from loramux.registry.entities import AdapterInfo, AliasInfo, WeightedRevision
from loramux.registry.errors import ChangeConflict, InvalidChange, PartNotFound, TooManyAdapters

MAX_TARGETS = 10
"""Of an alias: each takes room in the pool at the same time."""
MAX_WEIGHT = 1_000_000


class Releasing:
    """Moves aliases. Every change raises what `Changing.change` raises."""

    def __init__(self, changing: Changing, max_aliases: int) -> None:
        self._changing = changing
        self._max_aliases = max_aliases

    async def promote(
        self, principal: Principal, name: str, number: int, alias: str = DEFAULT_ALIAS, terms: Terms = UNCONDITIONAL
    ) -> AdapterInfo:
        """Have `alias` mean this revision alone. Raises InvalidChange, PartNotFound, TooManyAdapters."""
        return await self.point(principal, name, alias, [WeightedRevision(number, WHOLE)], terms)

    async def point(
        self,
        principal: Principal,
        name: str,
        alias: str,
        targets: Sequence[WeightedRevision],
        terms: Terms = UNCONDITIONAL,
    ) -> AdapterInfo:
        """Have `alias`, new or not, mean these revisions by their weights.

        Raises InvalidChange, PartNotFound, TooManyAdapters.
        """
        check_alias(alias)
        check_targets(targets)

        async def act(turn: Turn) -> AdapterInfo:
            before = await alias_of(turn, alias)
            if before is None:
                await self._demand_room(turn)
            rows = [Target(await turn.revision(target.revision), target.weight) for target in targets]
            if before is None or before.targets != tuple(sorted(targets, key=lambda target: target.revision)):
                await turn.aliases.point(turn.adapter.id, alias, rows, turn.stamp)
                await turn.note("alias.put", f":{alias}", before=before, after=await alias_of(turn, alias))
            return await turn.info()

        return await self._changing.change(principal, name, terms, act, AdapterInfo)

    async def remove(self, principal: Principal, name: str, alias: str, terms: Terms = UNCONDITIONAL) -> AdapterInfo:
        """`alias` means nothing any more. Raises ChangeConflict for the default, PartNotFound."""

        async def act(turn: Turn) -> AdapterInfo:
            before = await demand_alias(turn, alias)
            if alias == DEFAULT_ALIAS:
                raise ChangeConflict(
                    "alias_needed",
                    f"`{DEFAULT_ALIAS}` is what the adapter's bare name means: point it elsewhere.",
                    "alias",
                )
            await turn.aliases.remove(turn.adapter.id, alias, turn.stamp)
            await turn.note("alias.remove", f":{alias}", before=before)
            return await turn.info()

        return await self._changing.change(principal, name, terms, act, AdapterInfo)

    async def roll_back(
        self, principal: Principal, name: str, alias: str, version: int | None, terms: Terms = UNCONDITIONAL
    ) -> AdapterInfo:
        """Have `alias` mean again what it meant at `version`, else before what it means now.

        Rolling back again goes further back. Raises ChangeConflict where nothing is left to go back to, PartNotFound.
        """

        async def act(turn: Turn) -> AdapterInfo:
            before = await demand_alias(turn, alias)
            history = await turn.aliases.history(turn.adapter.id, alias)
            callable_ = {
                revision.number: revision
                for revision in await turn.adapters.revisions(turn.adapter.id)
                if revision.deleted_at is None
            }
            row = earlier(history, callable_.keys()) if version is None else at_version(history, version)
            if row is None or not callable_.keys() >= targets_of(row).keys() or not targets_of(row):
                raise ChangeConflict(
                    "nothing_to_roll_back_to",
                    f"`{turn.name}:{alias}` has no {'earlier version' if version is None else f'version {version}'} "
                    "whose revisions are all still there; see GET .../history, and promote a revision instead.",
                    "version",
                )
            targets = [Target(callable_[number], weight) for number, weight in targets_of(row).items()]
            await turn.aliases.point(turn.adapter.id, alias, targets, turn.stamp, row.version)
            await turn.note("alias.rollback", f":{alias}", before=before, after=await alias_of(turn, alias))
            return await turn.info()

        return await self._changing.change(principal, name, terms, act, AdapterInfo)

    async def _demand_room(self, turn: Turn) -> None:
        have = len((await turn.aliases.all(turn.adapter.id))[turn.adapter.id])
        if have >= self._max_aliases:
            raise TooManyAdapters(
                f"`{turn.name}` has {have} aliases, the most that an adapter may have (adapters.max_aliases); "
                "remove one first",
                "alias",
                "aliases",
            )


def check_alias(alias: str) -> None:
    """Raise InvalidChange for what cannot be an alias."""
    if not is_name(alias):
        raise InvalidChange(f"an alias is {GRAMMAR_IN_WORDS}; got {alias[:80]!r}", "alias")


def check_targets(targets: Sequence[WeightedRevision]) -> None:
    """Raise InvalidChange for targets that no alias can have."""
    if not 1 <= len(targets) <= MAX_TARGETS or len({target.revision for target in targets}) < len(targets):
        raise InvalidChange(f"an alias has 1 to {MAX_TARGETS} targets, each another revision", "targets")
    for number, target in enumerate(targets):
        if not 1 <= target.weight <= MAX_WEIGHT:
            raise InvalidChange(
                f"a weight is a whole number from 1 to {MAX_WEIGHT}, the target's part of the sum of all; "
                "leave a target out instead of giving it 0",
                f"targets[{number}].weight",
            )


async def alias_of(turn: Turn, alias: str) -> AliasInfo | None:
    """The alias as it is now."""
    row = await turn.aliases.get(turn.adapter.id, alias)
    if row is None:
        return None
    weights = await turn.aliases.weights(turn.adapter.id, alias)
    targets = tuple(WeightedRevision(number, weight) for number, weight in weights.items())
    return AliasInfo(name=alias, targets=targets, version=row.version, updated_at=row.updated_at)


async def demand_alias(turn: Turn, alias: str) -> AliasInfo:
    """The same; raises PartNotFound."""
    found = await alias_of(turn, alias)
    if found is None:
        raise PartNotFound("alias", turn.name, f"has no alias {alias[:80]!r}; list them with GET .../aliases.")
    return found


def at_version(history: Sequence[AliasVersionRow], version: int) -> AliasVersionRow | None:
    """The entry of that version."""
    return next((row for row in history if row.version == version), None)


def earlier(history: Sequence[AliasVersionRow], callable_: AbstractSet[int]) -> AliasVersionRow | None:
    """Of a history, newest first: the last entry before the present one that meant something else, and still can."""
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
