"""What a batch of requests takes of its limits and gives back, under the locks of one transaction.

Admission and the row that says `open` are one transaction; so are settlement and release. A crash in between leaves
an open row and its holds, and the sweep that settles the one releases the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loramux.limits.bucket import Bucket
from loramux.limits.demand import Demand
from loramux.limits.errors import LimitReached
from loramux.limits.names import BIGGEST, tier_subject
from loramux.limits.prices import Prices, Used
from loramux.limits.purses import Purses
from loramux.limits.rules import Caps, Counter, demand_room, given_back, refilled, standing, taken
from loramux.limits.standing import Standing, tighter
from loramux.records.limits import CountRepository, LimitRepository

CAPS = frozenset(Caps.__struct_fields__)


class Books:
    """The limits and counters that a batch touches, locked by `read`, changed in memory, written once."""

    def __init__(self, session: AsyncSession, now: int) -> None:
        self._session = session
        self._counts = CountRepository(session)
        self._purses = Purses(session, now)
        self._now = now
        self._caps: dict[str, Caps] = {}
        self._counters: dict[str, Counter] = {}
        self._held: dict[str, list[Any]] = defaultdict(list)
        self._new: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._ended: list[str] = []

    async def read(self, demands: Sequence[Demand], ended: Collection[str], prices: Prices) -> None:
        """Look up and lock what these requests touch. Whoever locks the ledger's head as well does that first."""
        if demands:
            await self._read_caps(demands)
        limited = (demand.request_id for demand in demands if not demand.subjects.keys().isdisjoint(self._caps))
        requests = {*ended, *limited}
        for row in await self._counts.holds(requests) if requests else ():
            self._held[row.request_id].append(row)
        subjects = {subject for demand in demands for subject in demand.subjects if subject in self._caps}
        subjects |= {row.subject for rows in self._held.values() for row in rows}
        for row in await self._counts.counters(subjects) if subjects else ():
            self._counters[row.subject] = Counter(
                Bucket(row.requests_free, row.requests_at), Bucket(row.tokens_free, row.tokens_at), row.running
            )
        await self._purses.read(demands, ended, prices)

    def admit(self, demand: Demand) -> Standing:
        """Take what the request needs, of every subject or of none.

        Once per request: who asks again, not knowing whether it was heard, has it already. Raises LimitReached or
        RequestTooLarge.
        """
        capped = {subject: word for subject, word in demand.subjects.items() if subject in self._caps}
        counters = {subject: refilled(self._counters[subject], self._caps[subject], self._now) for subject in capped}
        if self.holds(demand.request_id):
            return self._standing(counters)
        try:
            for subject, word in capped.items():
                demand_room(word, self._caps[subject], counters[subject], demand)
            cost = self._purses.demand(demand)
        except LimitReached as reached:
            reached.standing = self._standing(counters)
            raise
        for subject, counter in counters.items():
            counters[subject] = taken(counter, self._caps[subject], demand.tokens)
            reserved = 0 if self._caps[subject].tokens_per_minute is None else demand.tokens
            hold = {"request_id": demand.request_id, "subject": subject, "tokens": reserved}
            self._new[demand.request_id].append(hold)
        self._counters |= counters
        self._purses.hold(demand, cost)
        return self._standing(counters)

    def holds(self, request_id: str) -> bool:
        """Whether the request has taken anything, now or before."""
        return request_id in self._held or request_id in self._new or self._purses.holds(request_id)

    def release(self, request_id: str, used: Used) -> None:
        """Give back what the request holds and did not use. Once: nothing is held afterwards."""
        if self.holds(request_id):
            self._ended.append(request_id)
        for row in self._held.pop(request_id, ()):
            counter = given_back(self._counters[row.subject], max(0, row.tokens - used.tokens))
            tokens = Bucket(min(counter.tokens.free, BIGGEST), counter.tokens.at)
            self._counters[row.subject] = Counter(counter.requests, tokens, counter.running)
        self._purses.release(request_id, used)

    async def write(self) -> None:
        """Write what has changed."""
        await self._counts.write_counters([_row(*item) for item in sorted(self._counters.items())])
        await self._counts.add_holds(list(chain.from_iterable(self._new.values())))
        await self._purses.write()
        if self._ended:
            await self._counts.remove_holds(self._ended)

    async def _read_caps(self, demands: Sequence[Demand]) -> None:
        subjects = {subject for demand in demands for subject in demand.subjects}
        values: dict[str, dict[str, int]] = defaultdict(dict)
        for row in await LimitRepository(self._session).limits(subjects | {tier_subject(d.tier) for d in demands}):
            values[row.subject][row.name] = row.value
        for demand in demands:
            values[demand.tenant] = values[tier_subject(demand.tier)] | values[demand.tenant]
        for subject in subjects:
            caps = {name: value for name, value in values[subject].items() if name in CAPS}
            if caps:
                self._caps[subject] = Caps(**caps)

    def _standing(self, counters: dict[str, Counter]) -> Standing:
        tightest = Standing()
        for subject, counter in counters.items():
            left = standing(self._caps[subject], counter)
            tightest = Standing(tighter(tightest.requests, left.requests), tighter(tightest.tokens, left.tokens))
        return tightest


def _row(subject: str, counter: Counter) -> dict[str, Any]:
    return {
        "subject": subject,
        "requests_free": counter.requests.free,
        "requests_at": counter.requests.at,
        "tokens_free": counter.tokens.free,
        "tokens_at": counter.tokens.at,
        "running": counter.running,
    }
