"""Registration of a revision: the statements behind an upload, over adapters, aliases and grants."""

from __future__ import annotations

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.records.adapters import READY, AdapterRepository, AdapterRow, RevisionContent, RevisionRow, Stamp
from loramux.records.aliases import DEFAULT_ALIAS, WHOLE, AliasRepository, AliasRow, Target
from loramux.records.grants import GrantRow
from loramux.records.identity import TenantId, new_id
from loramux.records.release_policies import ReleasePolicyRepository, ReleasePolicyRow


async def register_revision(
    session: AsyncSession, tenant: TenantId, name: str, content: RevisionContent, stamp: Stamp, *, promote: bool = True
) -> tuple[AdapterRow, RevisionRow]:
    """Make `content` a revision of `name`: a new one unless the adapter already has this very content.

    With `promote`, and always for an adapter's first revision, the default alias moves to a new or restored revision.
    A release policy of that alias keeps it where it is.
    Content that the adapter has already changes nothing: an upload that is repeated must not undo a later release. The
    caller holds the lock CONTENTS, so that revision numbers are assigned one at a time.
    """
    adapters, aliases = AdapterRepository(session, tenant), AliasRepository(session, tenant)
    adapter = await _revive(session, tenant, name, stamp.at)
    revision = await adapters.with_content(adapter.id, content)
    is_fresh = revision is None or revision.state != READY or revision.base != content.base
    if revision is None:
        revision = await adapters.add_revision(adapter, content, stamp.at)
    elif revision.state != READY:
        await adapters.restore(adapter, revision, stamp.at)
    revision.base, revision.base_model = content.base, content.base_model
    await session.flush()
    weights = await aliases.weights(adapter.id, DEFAULT_ALIAS)
    may_promote = promote and await ReleasePolicyRepository(session).get(adapter.id, DEFAULT_ALIAS) is None
    if not weights or (may_promote and is_fresh and weights.keys() != {revision.number}):
        await aliases.point(adapter.id, DEFAULT_ALIAS, [Target(revision, WHOLE)], stamp)
    if is_fresh:
        adapter.version += 1
        await session.flush()
    return adapter, revision


async def _revive(session: AsyncSession, tenant: TenantId, name: str, at: int) -> AdapterRow:
    """Return the adapter of that name, inserted if need be; of a deleted one only its revision numbers stay."""
    adapters = AdapterRepository(session, tenant)
    adapter = await adapters.lock_deleted(name)
    if adapter is not None:
        for table in (AliasRow, GrantRow, ReleasePolicyRow):
            await session.execute(delete(table).where(table.adapter_id == adapter.id))
        adapter.deleted_at = adapter.expires_at = None
    adapter = adapter or await adapters.lock(name)
    if adapter is None:
        adapter = AdapterRow(id=new_id("adapter"), tenant_id=tenant, name=name, created_at=at, version=0)
        session.add(adapter)
    await session.flush()
    return adapter
