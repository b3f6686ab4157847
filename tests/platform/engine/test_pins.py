"""Pins: loaded without being asked for, never evicted, within limits, and in nobody's way for ever."""

from __future__ import annotations

import asyncio

from house import House

from loramux.engine import spawn_engine
from loramux.engine.messages import Pinned
from loramux.engine.pins import PinLimits, Pins
from loramux.engine.request import AdapterRef
from loramux.engine.resident import AdapterState
from loramux.settings import EngineSettings, ModelSettings, Settings

A, B, C = (AdapterRef(name, f"/{name}") for name in "abc")


def pins_of(house: House, pool_share: float = 0.5, per_tenant: int = 2) -> Pins:
    return Pins(PinLimits(pool_share, per_tenant), house.scheduler.budget, house.scheduler.memory)


def settle(house: House, pins: Pins) -> list[Pinned]:
    told = []
    for _ in range(6):
        house.store.finish_all()
        house.step()
        told += pins.advance()
    return told


def test_a_pinned_revision_is_loaded_unasked_and_stays_when_the_room_is_needed() -> None:
    house = House(num_pages=12, block_size=4)
    pins = pins_of(house)
    pins.pin(A, "t")
    assert settle(house, pins) == [Pinned("a", "t")]
    assert len(pins) == 1
    house.submit("b", 16, 8, adapter="b")
    house.run()
    house.submit("large", 30, 10)
    house.run()
    assert house.residency.state("a") is AdapterState.READY
    assert house.residency.state("b") is AdapterState.KNOWN
    pins.unpin("a", "t")
    house.submit("whole", 40, 8)
    house.run()
    assert house.finished["whole"] == "length"
    assert house.residency.state("a") is AdapterState.KNOWN


def test_what_fits_only_without_the_pins_is_refused_with_the_numbers_and_not_waited_for() -> None:
    house = House(num_pages=12, block_size=4)
    pins = pins_of(house)
    pins.pin(A, "")
    settle(house, pins)
    house.submit("whole", 40, 8)
    house.run()
    assert house.finished["whole"] == "error"
    assert "12 pages of KV" in house.faults["whole"].message
    assert "pinned adapters hold 2" in house.faults["whole"].message


def test_a_pin_has_several_owners_and_goes_with_the_last() -> None:
    house = House(num_pages=12, block_size=4)
    pins = pins_of(house)
    pins.pin(A, "t")
    pins.pin(A, "")
    assert settle(house, pins) == [Pinned("a", ""), Pinned("a", "t")]
    pins.unpin("a", "t")
    assert len(pins) == 1
    pins.unpin("a", "")
    pins.unpin("a", "")
    assert len(pins) == 0
    house.residency.retire("a")
    assert house.pool.counts.adapters == 0


def test_limits_of_the_pool_and_of_a_tenant() -> None:
    house = House(num_pages=12, block_size=4)
    pins = pins_of(house, pool_share=0.5, per_tenant=1)
    pins.pin(A, "t")
    pins.pin(B, "t")
    pins.pin(B, "")
    pins.pin(C, "u")
    told = {(one.digest, one.owner): one.fault for one in settle(house, pins)}
    assert told["a", "t"] is None
    assert told["b", ""] is None
    assert told["b", "t"] is not None
    assert "1 pins" in told["b", "t"].message
    assert told["c", "u"] is not None
    assert "takes 2 pages; 5 of the 6" in told["c", "u"].message


def test_a_failed_load_and_a_deletion_end_a_pin() -> None:
    house = House(num_pages=12, block_size=4)
    pins = pins_of(house)
    pins.pin(A, "t")
    house.store.finish(0, RuntimeError("disk on fire"))
    (failed,) = settle(house, pins)
    assert failed.fault is not None
    assert "disk on fire" in failed.fault.message
    pins.pin(B, "t")
    settle(house, pins)
    pins.retire("b")
    house.scheduler.memory.retire("b")
    (deleted,) = pins.advance()
    assert deleted.fault is not None
    assert house.pool.counts.adapters == 0


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
