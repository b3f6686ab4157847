"""A tenant with ten thousand adapters and a year of usage, written into the database as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from loramux.data.records.adapters import AdapterRow, RevisionRow
from loramux.data.records.aliases import AliasRow, AliasTargetRow, AliasVersionRow
from loramux.data.records.billing import PeriodRow
from loramux.data.records.credentials import KeyRow
from loramux.data.records.database import unix_microseconds
from loramux.data.records.ledger import LedgerHeadRow, LedgerRow
from loramux.data.records.requests import RequestRow
from loramux.data.records.revision_metrics import COUNTED, REVISION_HOURS
from loramux.data.records.tenants import AuditRow, ProjectRow, TenantRow
from loramux.data.records.webhooks import EventRow
from loramux.money.billing.periods import Month

ADAPTERS = 10_000
DAYS = 365
ENTRIES_A_DAY = 500
TENANTS = 1_000
DAY = 86_400_000_000
BATCH = 5_000


def name_of(number: int) -> str:
    """An adapter's name of 60 characters."""
    return f"customer-support-answers-in-the-house-style-of-region-{number:06d}"[:60]


def seed(url: str, tenant_name: str = "acme") -> None:
    """Fill the database of a server that is not running. Hashes of the ledger's chain are not computed."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        tenant = connection.execute(sa.select(TenantRow.id).where(TenantRow.name == tenant_name)).scalar_one()
        project = connection.execute(sa.select(ProjectRow.id).where(ProjectRow.tenant_id == tenant)).scalar_one()
        keys = connection.execute(sa.select(KeyRow.id).where(KeyRow.tenant_id == tenant)).scalars().all()
        now = unix_microseconds()
        _write(connection, TenantRow, _tenants(now))
        _write(connection, AdapterRow, _adapters(tenant, now))
        _write(connection, RevisionRow, _revisions(tenant, now))
        _write(connection, AliasRow, _aliases(tenant, now))
        _write(connection, AliasTargetRow, _targets(tenant))
        _write(connection, AliasVersionRow, _versions(tenant, now))
        _write(connection, EventRow, _events(tenant, now))
        _write(connection, AuditRow, _audit(tenant, now))
        first = connection.execute(sa.select(sa.func.coalesce(sa.func.max(LedgerRow.sequence), 0))).scalar_one() + 1
        last = _write(connection, LedgerRow, _entries(tenant, project, keys, now, first))
        _write(connection, PeriodRow, _periods(now, first, last))
        connection.execute(sa.update(LedgerHeadRow).values(sequence=first + last - 1, hash="0" * 64))
        _write(connection, RequestRow, _requests(tenant, project, keys, now))
        _write(connection, REVISION_HOURS, _hours(tenant, project, now))
        connection.execute(sa.text("ANALYZE"))
    engine.dispose()


def _write(connection: sa.Connection, table: Any, rows: Iterator[dict[str, Any]]) -> int:
    statement, written = sa.insert(getattr(table, "__table__", table)), 0
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            connection.execute(statement, batch)
            written, batch = written + BATCH, []
    if batch:
        connection.execute(statement, batch)
    return written + len(batch)


def digest_of(number: int, revision: int) -> str:
    return "sha256:" + hashlib.sha256(f"{number} {revision}".encode()).hexdigest()


def _tenants(now: int) -> Iterator[dict[str, Any]]:
    for number in range(TENANTS):
        yield {"id": f"tenant-{number}", "name": f"customer-{number:04d}", "tier": "standard", "created_at": now}


def _adapters(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(ADAPTERS):
        yield {"id": f"adapter-{number}", "tenant_id": tenant, "name": name_of(number), "created_at": now, "version": 2}


def _revisions(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(ADAPTERS):
        for revision in (1, 2):
            yield {
                "id": f"revision-{number}-{revision}",
                "tenant_id": tenant,
                "adapter_id": f"adapter-{number}",
                "number": revision,
                "digest": digest_of(number, revision),
                "rank": 16,
                "size_bytes": 12_345_678,
                "base": "of another model",
                "base_model": "tiny",
                "state": "ready",
                "created_at": now,
                "counted_until": now,
            }


def _aliases(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(ADAPTERS):
        yield {
            "adapter_id": f"adapter-{number}",
            "name": "default",
            "id": f"alias-{number}",
            "tenant_id": tenant,
            "version": 1,
            "updated_at": now,
        }


def _targets(tenant: str) -> Iterator[dict[str, Any]]:
    for number in range(ADAPTERS):
        for revision, weight in ((1, 90), (2, 10)):
            yield {
                "adapter_id": f"adapter-{number}",
                "alias": "default",
                "revision_id": f"revision-{number}-{revision}",
                "tenant_id": tenant,
                "weight": weight,
            }


def _versions(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(ADAPTERS):
        yield {
            "adapter_id": f"adapter-{number}",
            "alias": "default",
            "version": 1,
            "tenant_id": tenant,
            "targets": json.dumps({"1": 90, "2": 10}),
            "changed_by": "local:root",
            "changed_at": now,
        }


def _events(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(20_000):
        yield {
            "id": f"evt_{number}",
            "tenant_id": tenant,
            "kind": "adapter.uploaded",
            "adapter": name_of(number % ADAPTERS),
            "detail": json.dumps({"model": f"acme/{name_of(number % ADAPTERS)}@1"}),
            "created_at": now - number * 1_000_000,
        }


def _audit(tenant: str, now: int) -> Iterator[dict[str, Any]]:
    for number in range(20_000):
        yield {
            "at": now,
            "tenant_id": tenant,
            "actor": "local:root",
            "source": "local",
            "request_id": "",
            "action": "alias.put",
            "object_id": f"alias-{number}",
            "after": "{}",
        }


def _model(number: int) -> str:
    """Half of the usage is of twenty adapters, the rest of all."""
    return f"acme/{name_of(number % 20 if number % 2 else number * 7919 % ADAPTERS)}@1"


def _entries(tenant: str, project: str, keys: Any, now: int, first: int) -> Iterator[dict[str, Any]]:
    total = DAYS * ENTRIES_A_DAY
    for number in range(total):
        yield {
            "sequence": first + number,
            "event_id": f"usage:seeded-{number}",
            "kind": "usage",
            "tenant_id": tenant,
            "key_id": keys[number % len(keys)],
            "project_id": project,
            "request_id": f"seeded-{number}",
            "model": _model(number),
            "adapter_digest": digest_of(number * 7919 % ADAPTERS, 1),
            "base_model": "tiny",
            "tier": "standard",
            "input_tokens": 800,
            "cached_tokens": 300,
            "output_tokens": 150,
            "status": "completed",
            "finish_reason": "stop",
            "created_at": now - (total - number) * DAY // ENTRIES_A_DAY,
            "prev_hash": f"{number:064x}",
            "hash": f"{number + 1:064x}",
        }


def _periods(now: int, first: int, entries: int) -> Iterator[dict[str, Any]]:
    """The months before this one, closed."""
    month, this = Month.at(now - DAYS * DAY), Month.at(now)
    begin = 1
    while month < this:
        end = first - 1 + entries - (now - month.ends_at) * ENTRIES_A_DAY // DAY
        yield {
            "id": str(month),
            "starts_at": month.starts_at,
            "ends_at": month.ends_at,
            "first_sequence": begin,
            "last_sequence": end,
            "digest": "0" * 64,
            "closed_at": month.ends_at,
        }
        month, begin = month.next, end + 1


def _requests(tenant: str, project: str, keys: Any, now: int) -> Iterator[dict[str, Any]]:
    for number in range(50_000):
        yield {
            "id": f"seeded-{number}",
            "tenant_id": tenant,
            "key_id": keys[0],
            "project_id": project,
            "server_id": "none",
            "model": f"acme/{name_of(number % 20)}@1",
            "adapter_digest": digest_of(number % 20, 1),
            "base_model": "tiny",
            "prompt_tokens": 800,
            "max_tokens": 150,
            "status": "settled",
            "created_at": now - number * 1_000_000,
        }


def _hours(tenant: str, project: str, now: int) -> Iterator[dict[str, Any]]:
    hour = 3_600_000_000
    counted = dict.fromkeys(COUNTED, 5)
    for back in range(24 * 30):
        for number in range(20):
            model = f"acme/{name_of(number)}@1"
            yield {
                "tenant_id": tenant,
                "project_id": project,
                "model": model,
                "hour": (now // hour - back) * hour,
            } | counted
