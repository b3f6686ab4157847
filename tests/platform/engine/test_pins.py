"""AdapterPins: loaded without a request, never evicted, within limits, and never blocking other adapters for ever."""

from __future__ import annotations

import asyncio

from scheduler_harness import Harness

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.client import spawn_engine
from loramux.engine.memory.memory import AdapterPins, PinLimits
from loramux.engine.memory.pages import PageUse
from loramux.engine.memory.residency import AdapterState
from loramux.engine.messages import AdapterRef, Pinned

A, B, C = (AdapterRef(name, f"/{name}") for name in "abc")


def pins_of(harness: Harness, pool_share: float = 0.5, per_tenant: int = 2) -> AdapterPins:
    budget = harness.scheduler.state.budget
    return AdapterPins(
        PinLimits(int(budget.num_pages * pool_share), budget.watermark, per_tenant), harness.scheduler.memory
    )


def settle(harness: Harness, pins: AdapterPins) -> list[Pinned]:
    told = []
    for _ in range(6):
        harness.store.finish_all()
        harness.step()
        told += pins.advance()
    return told


def test_a_pinned_revision_is_loaded_unasked_and_stays_when_the_room_is_needed() -> None:
    harness = Harness(num_pages=12, block_size=4)
    pins = pins_of(harness)
    pins.pin(A, "t")
    assert settle(harness, pins) == [Pinned("a", "t")]
    assert len(pins) == 1
    harness.submit("b", 16, 8, adapter="b")
    harness.run()
    harness.submit("large", 30, 10)
    harness.run()
    assert harness.residency.state("a") is AdapterState.READY
    assert harness.residency.state("b") is AdapterState.KNOWN
    pins.unpin("a", "t")
    harness.submit("whole", 40, 8)
    harness.run()
    assert harness.finished["whole"] == "length"
    assert harness.residency.state("a") is AdapterState.KNOWN


def test_request_that_fits_only_without_pins_is_refused_with_numbers() -> None:
    harness = Harness(num_pages=12, block_size=4)
    pins = pins_of(harness)
    pins.pin(A, "")
    settle(harness, pins)
    harness.submit("whole", 40, 8)
    harness.run()
    assert harness.finished["whole"] == "error"
    assert "12 pages of KV" in harness.faults["whole"].message
    assert "pinned adapters hold 2" in harness.faults["whole"].message


def test_a_pin_has_several_owners_and_goes_with_the_last() -> None:
    harness = Harness(num_pages=12, block_size=4)
    pins = pins_of(harness)
    pins.pin(A, "t")
    pins.pin(A, "")
    assert settle(harness, pins) == [Pinned("a", ""), Pinned("a", "t")]
    pins.unpin("a", "t")
    assert len(pins) == 1
    pins.unpin("a", "")
    pins.unpin("a", "")
    assert len(pins) == 0
    harness.residency.retire("a")
    assert harness.pool.num_taken(PageUse.ADAPTER) == 0


def test_limits_of_the_pool_and_of_a_tenant() -> None:
    harness = Harness(num_pages=12, block_size=4)
    pins = pins_of(harness, pool_share=0.5, per_tenant=1)
    pins.pin(A, "t")
    pins.pin(B, "t")
    pins.pin(B, "")
    pins.pin(C, "u")
    told = {(one.digest, one.owner): one.fault for one in settle(harness, pins)}
    assert told["a", "t"] is None
    assert told["b", ""] is None
    assert told["b", "t"] is not None
    assert "1 pins" in told["b", "t"].message
    assert told["c", "u"] is not None
    assert "takes 2 pages; 5 of the 6" in told["c", "u"].message


def test_a_failed_load_and_a_deletion_end_a_pin() -> None:
    harness = Harness(num_pages=12, block_size=4)
    pins = pins_of(harness)
    pins.pin(A, "t")
    harness.store.finish(0, RuntimeError("disk on fire"))
    (failed,) = settle(harness, pins)
    assert failed.fault is not None
    assert "disk on fire" in failed.fault.message
    pins.pin(B, "t")
    settle(harness, pins)
    pins.retire("b")
    harness.scheduler.memory.retire("b")
    (deleted,) = pins.advance()
    assert deleted.fault is not None
    assert harness.pool.num_taken(PageUse.ADAPTER) == 0


def test_a_pin_through_the_mailbox_waits_until_the_weights_are_there(zoo_of) -> None:
    zoo = zoo_of("llama")

    async def use() -> None:
        model = ModelSettings(path=str(zoo.base), served_model_name="base", dtype="float32")
        small = EngineSettings(num_threads=1, pool_bytes=4 << 20, in_process=True)
        engine = spawn_engine(Settings(model=model, engine=small))
        await engine.start()
        try:
            assert await engine.pin(zoo.ref("plain"), "t") is None
            assert engine.stats().adapters_pinned == engine.stats().adapters_resident == 1
            missing = await engine.pin(AdapterRef("sha256:none", "/nowhere"))
            assert missing is not None
            assert missing.code == "adapter_failed"
            engine.unpin(zoo.ref("plain").digest, "t")
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(use(), 60))
