"""What a simulation has to say."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loramux.simulator.measures import Quantiles, Tally, merged


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part."""

    accepted: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Quantiles
    itl_ms: Quantiles
    in_deadline: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulation; the same scenario gives the same ones."""

    throughput_tokens_per_s: float
    """Prompt tokens computed and tokens generated, each counted once, from the first arrival to the last token."""
    ttft_ms: Quantiles
    """From arrival to the first token."""
    itl_ms: Quantiles
    """Between two tokens of one answer."""
    preemption_rate: float
    """Preemptions over accepted requests."""
    pages_swapped: int
    """Of KV of preempted requests, carried to the host's memory instead of being computed again."""
    pool_use: float
    """Share of the pool's pages that running requests and their adapters held, on average while others waited for room
    (while anything ran, if nothing ever waited)."""
    service_gap_max: float
    """The most that the service of two tenants of a class drifted apart while both waited, in units over weight."""
    service_gap_bound: float
    """What it can be at most (decision 0004)."""
    accepted: int
    refused: int
    in_deadline: float | None
    """Share of the accepted requests with a deadline that had their first token in time; None where none had one."""
    per_tenant: dict[str, TenantReport]


def share_in_deadline(tallies: Iterable[Tally]) -> float | None:
    """Of the accepted requests that had a deadline; None where none had one."""
    asked = in_time = 0
    for tally in tallies:
        asked += tally.with_deadline
        in_time += tally.in_deadline
    return in_time / asked if asked else None


def tenant_report(tally: Tally) -> TenantReport:
    """One tenant's part."""
    return TenantReport(
        accepted=tally.accepted,
        refused=tally.refused,
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        ttft_ms=tally.ttft.quantiles,
        itl_ms=tally.itl.quantiles,
        in_deadline=share_in_deadline([tally]),
    )


def overall(tallies: Iterable[Tally]) -> TenantReport:
    """All tenants as if they were one."""
    together = list(tallies)
    return tenant_report(
        Tally(
            accepted=sum(t.accepted for t in together),
            refused=sum(t.refused for t in together),
            prompt_tokens=sum(t.prompt_tokens for t in together),
            output_tokens=sum(t.output_tokens for t in together),
            with_deadline=sum(t.with_deadline for t in together),
            in_deadline=sum(t.in_deadline for t in together),
            ttft=merged(t.ttft for t in together),
            itl=merged(t.itl for t in together),
        )
    )
