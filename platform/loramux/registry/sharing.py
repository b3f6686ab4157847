"""Who else may call an adapter."""

from __future__ import annotations

from loramux.records import Principal
from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.registry.changing import UNCONDITIONAL, Changing, Terms, Turn
from loramux.registry.entities import GrantInfo, grant_info
from loramux.registry.errors import InvalidChange, PartNotFound, TooManyAdapters


class Sharing:
    """Gives grants and takes them back. Raises what `Changing.change` raises."""

    def __init__(self, changing: Changing, max_grants: int) -> None:
        self._changing = changing
        self._max_grants = max_grants

    async def grant(self, principal: Principal, name: str, grantee: str, terms: Terms = UNCONDITIONAL) -> GrantInfo:
        """Let the tenant of that name call the adapter, at its own cost; whether there is one, nobody is told.

        Raises InvalidChange, TooManyAdapters.
        """
        if not is_name(grantee) or grantee == principal.tenant_name:
            raise InvalidChange(
                f"a grant is for another tenant, by its name: {GRAMMAR_IN_WORDS}; got {grantee[:80]!r}", "tenant"
            )

        async def act(turn: Turn) -> GrantInfo:
            grants = {row.grantee: row for row in await turn.grants.all(turn.adapter.id)}
            if grantee in grants:
                return grant_info(grants[grantee])
            if len(grants) >= self._max_grants:
                raise TooManyAdapters(
                    f"`{turn.name}` has {len(grants)} grants, the most that an adapter may have (adapters.max_grants); "
                    "take one back first",
                    "tenant",
                    "grants",
                )
            made = grant_info(await turn.grants.add(turn.adapter.id, grantee, turn.stamp))
            await turn.note("grant.put", f" {grantee}", after=made)
            return made

        return await self._changing.change(principal, name, terms, act, GrantInfo)

    async def revoke(self, principal: Principal, name: str, grantee: str, terms: Terms = UNCONDITIONAL) -> GrantInfo:
        """Admit that tenant's requests no more; those that run finish. Raises PartNotFound."""

        async def act(turn: Turn) -> GrantInfo:
            rows = [row for row in await turn.grants.all(turn.adapter.id) if row.grantee == grantee]
            if not rows:
                raise PartNotFound("grant", turn.name, f"has no grant for {grantee[:80]!r}.")
            before = grant_info(rows[0])
            await turn.grants.remove(rows[0])
            await turn.note("grant.remove", f" {grantee}", before=before)
            return before

        return await self._changing.change(principal, name, terms, act, GrantInfo)
