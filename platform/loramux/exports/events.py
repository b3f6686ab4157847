"""What sinks are told: one event for every meter of every ledger entry that bills something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loramux.pricing import METERS
from loramux.records.identity import TenantId
from loramux.records.ledger import LedgerEntry


class MeterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity of one meter. The id is the same whenever and by whomever it is sent."""

    id: str
    sequence: int
    tenant_id: str
    tenant_name: str
    meter: str
    quantity: int
    """Negative in a correction."""
    occurred_at: int
    """Microseconds since the epoch."""
    model: str
    base_model: str
    tier: str
    project_id: str | None
    api_key_id: str
    request_id: str
    corrects: str | None
    tags: dict[str, str]


def quantities(entry: LedgerEntry) -> dict[str, int]:
    """What an entry bills, by meter; those that are not 0."""
    values = {
        "input_uncached": entry.input_tokens - entry.cached_tokens,
        "input_cached": entry.cached_tokens,
        "output": entry.output_tokens,
        "adapter_load": entry.adapter_load,
        "adapter_byte_seconds": entry.adapter_byte_seconds,
        "adapter_resident_byte_seconds": entry.adapter_resident_byte_seconds,
    }
    assert tuple(values) == METERS
    return {meter: value for meter, value in values.items() if value}


def meter_events(entries: Sequence[LedgerEntry], tenants: Mapping[TenantId, str]) -> list[MeterEvent]:
    """The events of some entries, in order; `tenants` has every tenant's name by its id."""
    return [
        MeterEvent(
            id=f"{entry.event_id}:{meter}",
            sequence=entry.sequence,
            tenant_id=entry.tenant_id,
            tenant_name=tenants[entry.tenant_id],
            meter=meter,
            quantity=quantity,
            occurred_at=entry.occurred_at or entry.created_at,
            model=entry.model,
            base_model=entry.base_model,
            tier=entry.tier,
            project_id=entry.project_id,
            api_key_id=entry.key_id,
            request_id=entry.request_id,
            corrects=entry.corrects,
            tags=msgspec.json.decode(entry.tags, type=dict[str, str]) if entry.tags else {},
        )
        for entry in entries
        for meter, quantity in quantities(entry).items()
    ]
