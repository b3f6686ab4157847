"""Grants: other tenants that may call an adapter."""

from __future__ import annotations

from loramux.records import Principal
from loramux.records.identity import GRAMMAR_IN_WORDS, is_name
from loramux.registry.changes import UNCONDITIONAL, AdapterChange, ChangeService, Preconditions
from loramux.registry.entities import GrantInfo, grant_info
from loramux.registry.errors import InvalidChange, PartNotFound, TooManyAdapters


class GrantService:
    """Grants and revokes access. Every change also raises the errors of `ChangeService.change`."""

    def __init__(self, changes: ChangeService, max_grants: int) -> None:
        self._changes = changes
        self._max_grants = max_grants

    async def grant(
        self, principal: Principal, name: str, grantee: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> GrantInfo:
        """Let the tenant of that name call the adapter, at its own cost.

        The answer is the same whether or not such a tenant exists.

        Raises InvalidChange, TooManyAdapters.
        """
        if not is_name(grantee) or grantee == principal.tenant_name:
            raise InvalidChange(
                f"a grant is for another tenant, by its name: {GRAMMAR_IN_WORDS}; got {grantee[:80]!r}", "tenant"
            )

        async def act(change: AdapterChange) -> GrantInfo:
            grants = {row.grantee: row for row in await change.grants.all(change.adapter.id)}
            if grantee in grants:
                return grant_info(grants[grantee])
            if len(grants) >= self._max_grants:
                raise TooManyAdapters(
                    f"`{change.name}` has {len(grants)} grants, the most that an adapter may have "
                    "(adapters.max_grants); take one back first",
                    "tenant",
                    "grants",
                )
            made = grant_info(await change.grants.add(change.adapter.id, grantee, change.stamp))
            await change.record("grant.put", f" {grantee}", after=made)
            return made

        return await self._changes.change(principal, name, preconditions, act, GrantInfo)

    async def revoke(
        self, principal: Principal, name: str, grantee: str, preconditions: Preconditions = UNCONDITIONAL
    ) -> GrantInfo:
        """Refuse that tenant's requests from now on; running ones finish. Raises PartNotFound."""

        async def act(change: AdapterChange) -> GrantInfo:
            rows = [row for row in await change.grants.all(change.adapter.id) if row.grantee == grantee]
            if not rows:
                raise PartNotFound("grant", change.name, f"has no grant for {grantee[:80]!r}.")
            before = grant_info(rows[0])
            await change.grants.remove(rows[0])
            await change.record("grant.remove", f" {grantee}", before=before)
            return before

        return await self._changes.change(principal, name, preconditions, act, GrantInfo)
