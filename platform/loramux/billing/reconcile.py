"""Reconciliation: the engines' own counts against the ledger, weights by weights.

Compared are the requests that are settled: prompt tokens, those of them found in a cache, and output tokens, billed
and waived together. What an engine counted is written in the transaction that settles, so that both survive a crash
or neither does; the numbers themselves come from two sides (the steps that ran; the texts and events that the gateway
saw). Requests that were interrupted, or whose engine died, are in neither: nobody knows what they used, and nobody
pays it.
"""

from __future__ import annotations

import msgspec

from loramux.records import Database
from loramux.records.counts import Counted, CountRepository
from loramux.records.ledger import LedgerRepository


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One set of weights, by both counts."""

    base_model: str
    adapter_digest: str
    """Empty for the base model itself."""
    engine: Counted
    ledger: Counted
    drift: int
    """Tokens by which they differ; 0 if all is well."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Both counts, and the ledger's own proof."""

    entries: int
    """Length of the chain, every link of which was computed again."""
    drift_tokens: int
    weights: tuple[Comparison, ...]


async def reconcile(database: Database) -> Reconciliation:
    """Compare both counts in one snapshot, and verify the chain. Raises ChainBroken."""
    async with database.read() as session:
        head = await LedgerRepository(session).verify()
        counts = CountRepository(session)
        engines, ledger = await counts.engines(), await counts.ledger()
    weights = tuple(
        Comparison(
            base_model=key[0],
            adapter_digest=key[1],
            engine=(engine := engines.get(key, Counted())),
            ledger=(billed := ledger.get(key, Counted())),
            drift=engine.drift(billed),
        )
        for key in sorted(engines.keys() | ledger.keys())
    )
    return Reconciliation(entries=head.sequence, drift_tokens=sum(one.drift for one in weights), weights=weights)
