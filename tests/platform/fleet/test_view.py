"""A view has what a router needs, as the engine counts it."""

from __future__ import annotations

import msgspec
from scheduler_harness import Harness

from loramux.engine.memory.prefix_digests import identity_mask, prefix_digests
from loramux.engine.messages import EngineCount, EngineStats, KvIdentity
from loramux.engine.scheduling.policy import Policy
from loramux.engine.statistics import ServiceMeter, snapshot
from loramux.fleet.view import EngineState, EngineView, view_of


def view(harness: Harness) -> EngineView:
    """The view of the harness's engine, through the encoding that is sent to a server."""
    stats = snapshot(
        harness.scheduler,
        ServiceMeter(harness.scheduler.queue),
        EngineCount(),
        weight_bytes=0,
        adapters_pinned=0,
        adapters_host=0,
        adapters_host_bytes=0,
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    return view_of("e0", "base", EngineState.READY, sent, 7.0)


def test_view_of_an_idle_engine_has_no_queue() -> None:
    idle = view(Harness(40, pace=(0.01, 0.001)))
    assert (idle.requests, idle.queue_tokens, idle.wait_s, idle.at) == (0, 0, 0.0, 7.0)
    assert (idle.pages, idle.free_pages, idle.pages_used, idle.max_running) == (40, 40, 0.0, 4)


def test_view_counts_queue_residency_and_prefixes() -> None:
    harness = Harness(60, pace=(0.01, 0.001), policy=Policy(prefix_cache=True))
    harness.submit("first", list(range(12)), 4, "a")
    harness.run()
    warm = view(harness)
    digests = prefix_digests(b"", "t", list(range(12)), 4)
    assert warm.resident.keys() == {"a"}
    assert warm.prefixes == {digest ^ identity_mask(KvIdentity("t", "a", "")) for digest in digests[:3]}
    assert warm.load_s >= 0.0
    assert warm.pages_used == 0.0, "what is idle can be evicted"
    for number in range(12):
        harness.submit(f"r{number}", 30, 20, "b")
    harness.step()
    assert view(harness).queue_tokens == 12 * 30
    harness.store.finish_all()
    harness.step()
    harness.store.finish_all()
    for _ in range(8):
        harness.step()
    busy = view(harness)
    assert busy.resident.keys() == {"a", "b"}
    assert busy.running == 4
    assert busy.waiting == 8
    assert 0.0 < busy.prefill_tokens_per_s <= 1000.0
    assert busy.wait_s > 20 * 0.01, "rows come free after an answer's steps"
    assert busy.pages_used > 0.0


def test_pinned_revisions_are_in_the_view() -> None:
    harness = Harness(60, pace=(0.01, 0.001))
    harness.submit("r", 4, 2, "a")
    harness.run()
    harness.residency.keep("a")
    assert view(harness).pinned == {"a"}
