"""The memory plan: what is logged before loading is what loading takes; what cannot fit is refused."""

from __future__ import annotations

import logging

import pytest
from adapter_zoo import load, make_engine

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.memory_plan import MemoryPlan

GB = 10**9


def test_plan_before_loading_counts_the_pages_and_weights_that_loading_finds(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        loaded, _ = load(zoo.base)
    (line,) = (record.message for record in caplog.records if record.message.startswith("loading base: "))
    assert f"= {loaded.facts.pages_total} pages" in line
    assert "adapters of rank 64" in line


def test_plan_of_two_ranks_has_half_the_weights_of_the_linears(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        engine = make_engine(zoo.base, tensor_parallel_size=2)
    engine.close()
    (line,) = (record.message for record in caplog.records if record.message.startswith("loading base: "))
    assert f"= {engine.facts.pages_total:,} pages" in line
    assert line.endswith("on each of 2 ranks")


@pytest.mark.parametrize(
    ("plan", "way_out"),
    [
        (MemoryPlan(1, 15 * GB, 20 * GB, 10**6, 10**8), r"set engine.pool_bytes to 9000000000 or less"),
        (MemoryPlan(2, 8 * GB, 9 * GB, 10**6, 10**8), r"set engine.pool_bytes to 4000000000 or less"),
        (MemoryPlan(1, 40 * GB, GB, 10**6, 10**8), r'quantization = "int8" or "nf4"'),
        (MemoryPlan(2, 20 * GB, GB, 10**6, 10**8), r"all ranks share this machine"),
    ],
)
def test_plan_that_does_not_fit_is_refused_with_what_would(plan: MemoryPlan, way_out: str) -> None:
    with pytest.raises(UnsupportedModel, match=way_out):
        plan.check(24 * GB)


def test_plan_is_said_in_one_sentence() -> None:
    plan = MemoryPlan(1, 15 * GB, 98 * GB, 1_960_000, 311 * 10**6)
    assert str(plan) == "weights 15.0 GB, pool 98.0 GB = 50,000 pages, or 315 adapters of rank 64 on all linears"
