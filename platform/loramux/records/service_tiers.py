"""Service tiers: how urgent one request is, beside the tier that its tenant has.

A request is charged at its tenant's tier, and behind a slash at its service tier where it has another than `default`:
`standard`, `standard/flex`, `gold/priority`, `standard/batch`. The ledger, holds, prices and invoices carry this one
text, so a price for `standard` covers all of that tier's requests unless one for `standard/batch` or `*/batch` exists.

`shadow` is the server's own: a request that it repeats on another revision. It meets no limit, and all of it is waived.
"""

from __future__ import annotations

from typing import Literal

ServiceTier = Literal["default", "flex", "priority", "batch", "shadow"]
CHOSEN: tuple[ServiceTier, ...] = ("flex", "priority", "batch")
"""Service tiers that a tenant's tier may allow; `default` needs no permission."""
ALLOWED_AT_FIRST = ("batch", "flex")
"""Those that a new tier allows: they are never before anything else."""
SHADOW: ServiceTier = "shadow"
BACKGROUND: tuple[ServiceTier, ...] = ("batch", SHADOW)
"""Service tiers without a waiting caller: they begin when there is room, and say nothing of latency."""
ANY = "*"
"""Any base model, or any tier."""


def charged_tier(tier: str, service_tier: ServiceTier) -> str:
    """Return the tier that a request is charged at."""
    return tier if service_tier == "default" else f"{tier}/{service_tier}"


def tenant_tier(charged: str) -> str:
    """Return the tenant's part of a charged tier."""
    return charged.partition("/")[0]


def service_tier(charged: str) -> str:
    """Return the request's part of a charged tier."""
    return charged.partition("/")[2] or "default"


def is_shadow(charged: str) -> bool:
    """Return whether a request of this charged tier is a shadow."""
    return service_tier(charged) == SHADOW


def tier_match(priced: str, charged: str) -> int | None:
    """Return how closely a price's tier fits a charged one, larger is closer; None: it does not.

    In this order: `gold/batch`, `*/batch`, `gold`, `*`.
    """
    of_tenant, _, of_request = priced.partition("/")
    if of_tenant not in (ANY, tenant_tier(charged)) or of_request not in ("", charged.partition("/")[2]):
        return None
    return 2 * bool(of_request) + (of_tenant != ANY)


def is_priced_tier(text: str) -> bool:
    """Return whether a price may have this tier."""
    of_tenant, slash, of_request = text.partition("/")
    return bool(of_tenant) and (not slash or of_request in CHOSEN)
