"""The scheduler remembers no more than its bounds, whatever it has seen: every container, by a walk over objects."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from loramux.engine.memory import residency as residency_module
from loramux.engine.memory.pages import PagePool
from loramux.engine.memory.residency import Residency
from loramux.engine.messages import AdapterRef, Request, SamplingParams, ServiceClass, TokenEvent
from loramux.engine.scheduling import estimates, speculation, state
from loramux.engine.scheduling.policy import PageBudget, Policy, SchedulerLimits
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.statistics import RequestAccounting, ServiceMeter, count_step, snapshot
from loramux.simulator.engine import SimulatedStore, VirtualClock
from loramux.simulator.hardware import DEVICES

PAGES, BLOCK, AT_ONCE = 300, 4, 50
BOUND = 64
"""Bound of each memory that has one; the product's own bounds are thousands."""


class EveryAdapter(dict[str, tuple[int, int]]):
    """Any digest is an adapter of two pages."""

    def __missing__(self, digest: str) -> tuple[int, int]:
        return 2, 2


class Crowd:
    """Requests of ever new tenants for ever new adapters, a batch at a time: answered, cancelled, late and refused."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = SimulatedStore(self.clock, DEVICES["h100"], EveryAdapter())
        pool = PagePool(PAGES)
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=400),
            PageBudget(PAGES, BLOCK),
            pool,
            Residency(pool, self.store, self.clock),
            Policy(prefix_cache=True, max_draft_tokens=3, weight_pages=1000.0, tenant_max_pages=0.5),
        )
        self.meter = ServiceMeter(self.scheduler.queue)
        self.accounting = RequestAccounting()
        self.num_seen = 0

    def serve(self, count: int) -> None:
        """Serve `count` more requests to the last."""
        for _ in range(0, count, AT_ONCE):
            for _ in range(AT_ONCE):
                self.scheduler.add(self._request(self.num_seen))
                if self.num_seen % 11 == 3:
                    self.scheduler.cancel(f"r{self.num_seen}")
                self.num_seen += 1
            while not self.scheduler.is_idle:
                self._step()

    def _step(self) -> None:
        self.store.settle()
        step = self.scheduler.plan()
        events = self.scheduler.drain_events()
        if not step.empty:
            count_step(self.scheduler.state.counters, step, lambda slot: 1)
            self.accounting.count_step(step)
            self.clock.advance_to(self.clock.now + 0.01)
            events += self.scheduler.commit(step, list(self._sampled(step)))
        else:
            self.clock.advance_to(max(self.clock.now, self.store.next_due or self.clock.now))
        self.accounting.count_events(events)

    def _sampled(self, step: Any) -> Iterator[TokenEvent]:
        for chunk in step.sampling:
            for draft in (*chunk.drafts, None):
                yield TokenEvent(request_id=chunk.sequence.id, token_id=7)
                if draft != 7:
                    break

    def _request(self, number: int) -> Request:
        digest = f"d{number // 2}"
        return Request(
            id=f"r{number}",
            tenant=f"t{number // 3}",
            prompt_token_ids=[number, number + 1, 5, 6, 7, 8, number % 5, 9],
            sampling=SamplingParams(max_tokens=1 + number % 4),
            adapter=AdapterRef(digest, "") if number % 4 else None,
            service_class=list(ServiceClass)[number % 3],
            deadline_ms=1 if number % 17 == 5 else None,
            group_id=f"g{number // 2}" if number % 5 == 0 else "",
            cache_scope=f"s{number}",
        )

    def sizes(self) -> dict[str, int]:
        """The length of every container, by the attributes that lead to it; of equal ones their sum."""
        self.scheduler.queue.take_service()
        snapshot(
            self.scheduler,
            self.meter,
            self.accounting.ended,
            weight_bytes=1,
            adapters_pinned=0,
            adapters_host=0,
            adapters_host_bytes=0,
        )
        found: defaultdict[str, int] = defaultdict(int)
        _measure(self.scheduler, "scheduler", found, set())
        _measure(self.meter, "meter", found, set())
        _measure(self.accounting, "accounting", found, set())
        return dict(found)


def _measure(value: Any, path: str, found: defaultdict[str, int], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, SimulatedStore | VirtualClock | str | int | float | None):
        return
    seen.add(id(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque | array):
        found[path] += len(value)
        inside = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        for one in inside if not isinstance(value, array) else ():
            _measure(one, f"{path}[]", found, seen)
    elif type(value).__module__.startswith("loramux"):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in [*names, *getattr(value, "__dict__", {})]:
            if hasattr(value, name) and not callable(getattr(value, name)):
                _measure(getattr(value, name), f"{path}.{name}", found, seen)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    """With small bounds, so that a short run reaches them."""
    monkeypatch.setattr(residency_module, "MAX_DORMANT", BOUND)
    monkeypatch.setattr(estimates.OutputLengths, "MAX_KEYS", BOUND)
    monkeypatch.setattr(state, "MAX_ENDED_GROUPS", BOUND)
    monkeypatch.setattr(speculation, "MAX_REVISIONS", BOUND)
    return Crowd()


def check_flat(crowd: Crowd, warm_up: int, more: int) -> None:
    crowd.serve(warm_up)
    before = crowd.sizes()
    crowd.serve(more)
    after = crowd.sizes()
    grown = {path: (before.get(path, 0), size) for path, size in after.items() if size > 1.2 * before.get(path, 0) + 99}
    assert not grown
    assert len(after) > 30, "the walk has seen the scheduler's parts"


def test_memory_stays_flat_however_many_tenants_and_adapters_are_seen(crowd: Crowd) -> None:
    check_flat(crowd, 2000, 4000)
    assert sum(crowd.sizes().values()) < 20 * (PAGES + BOUND)


@pytest.mark.slow
def test_memory_stays_flat_over_ten_million_requests() -> None:
    """With the product's own bounds; about an hour on one core."""
    check_flat(Crowd(), 200_000, 10_000_000)
