"""Adapters in the host's memory: the dear, small and often used stay, and what is there is never read again."""

from __future__ import annotations

import shutil

import pytest
import torch
from house import House
from zoo import Asked, Zoo, make_engine, serve

from loramux.engine.host_tier import HostTier
from loramux.engine.resident import AdapterState
from loramux_adapters import AdapterPlan
from loramux_adapters.weights import AdapterWeights, LoraWeights

KIB = 1 << 10


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def weights(num_bytes: int) -> AdapterWeights:
    half = torch.zeros(1, num_bytes // 8)
    return AdapterWeights(AdapterPlan((), num_bytes), {"m": LoraWeights(half, half, 1.0)})


def test_the_least_worthy_goes_and_the_bytes_add_up() -> None:
    tier = HostTier(3000 * KIB, clock := Clock())
    for name in ("often", "once", "third"):
        tier.put(name, weights(1000 * KIB))
    tier.get("often")
    clock.now = 600.0
    tier.put("new", weights(1000 * KIB))
    assert tier.get("once") is None
    assert tier.get("often") is not None
    assert tier.get("new") is not None
    assert tier.num_bytes == 3000 * KIB
    tier.forget("new")
    assert tier.num_bytes == 2000 * KIB


def test_a_passing_one_does_not_displace_what_is_used_often() -> None:
    tier = HostTier(1000 * KIB, Clock())
    tier.put("often", weights(1000 * KIB))
    for _ in range(3):
        tier.get("often")
    tier.put("passing", weights(1000 * KIB))
    assert tier.get("passing") is None
    assert tier.get("often") is not None


def test_of_two_used_alike_the_small_one_stays() -> None:
    tier = HostTier(4100 * KIB, clock := Clock())
    tier.put("large", weights(4000 * KIB))
    tier.put("small", weights(100 * KIB))
    clock.now = 1.0
    tier.put("next", weights(100 * KIB))
    assert tier.get("large") is None
    assert tier.get("small") is not None


def test_what_is_larger_than_the_tier_is_never_kept() -> None:
    tier = HostTier(100 * KIB, Clock())
    assert not tier.may_take(200 * KIB)
    tier.put("large", weights(200 * KIB))
    assert len(tier) == tier.num_bytes == 0


def test_one_that_comes_back_is_not_read_again_and_a_deleted_one_is_gone(zoo_of, tmp_path) -> None:
    zoo: Zoo = zoo_of("llama")
    engine = make_engine(zoo.base)
    ref = zoo.ref("plain")
    copy = tmp_path / "plain"
    shutil.copytree(ref.path, copy)
    zoo.ref = lambda name: type(ref)(digest=ref.digest, path=str(copy))  # type: ignore[method-assign]
    try:
        asked = Asked("first", "plain", (5, 6, 7), 4)
        assert serve(zoo, engine, [asked])["first"] == zoo.answer(asked)
        shutil.rmtree(copy)
        residency = engine.scheduler.residency
        residency.evict(residency._known[ref.digest])
        again = Asked("again", "plain", (5, 6, 7), 4)
        assert serve(zoo, engine, [again])["again"] == zoo.answer(asked)
        engine.retire(ref.digest)
        assert engine.stats().adapters_host == 0
    finally:
        del zoo.ref
        engine.close()


@pytest.mark.parametrize("max_loading", [1, 2])
def test_loads_are_bounded_and_those_beyond_wait_in_order_and_keep_nobody_out(max_loading: int) -> None:
    house = House(num_pages=60, max_num_seqs=8, max_tokens=64, max_loading=max_loading)
    for name in ("a", "b", "c"):
        house.submit(name, 4, 2, adapter=name, tenant=name)
    house.store.finish_all()
    house.step()
    states = [house.residency.state(name) for name in ("a", "b", "c")]
    assert states.count(AdapterState.LOADING) == max_loading
    assert states[0] is AdapterState.LOADING
    house.submit("base", 4, 2, tenant="z")
    house.step()
    house.step()
    assert house.finished["base"] == "length"
    house.run()
    assert set(house.finished.values()) == {"length"}
