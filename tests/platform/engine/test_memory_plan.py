"""The memory plan: what is logged before loading is what loading takes; what cannot fit is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from adapter_zoo import load, make_engine
from quantized_zoo import CHECKPOINTS, QuantizedZoo

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import load_checkpoint, read_config
from loramux.engine.execution.loader import MemoryPlan, plan_memory
from loramux_adapters.base import describe_base
from loramux_adapters.base_weights import QuantizedLinear
from loramux_adapters.sharding import Sharding

GB = 10**9


def test_plan_before_loading_counts_the_pages_and_weights_that_loading_finds(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        loaded, _ = load(zoo.base)
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert f"= {loaded.facts.pages_total} pages" in line
    assert "adapters of rank 64" in line


def test_plan_of_two_ranks_has_half_the_weights_of_the_linears(zoo_of, caplog) -> None:
    zoo = zoo_of("llama")
    with caplog.at_level(logging.INFO):
        engine = make_engine(zoo.base, tensor_parallel_size=2)
    engine.close()
    (line,) = (record.message for record in caplog.records if " pool " in record.message)
    assert f"= {engine.facts.pages_total:,} pages" in line
    assert line.endswith("on each of 2 ranks")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "checkpoint", ["awq", *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS if name != "awq")]
)
def test_plan_of_a_quantized_checkpoint_counts_the_bytes_that_are_held(tmp_path, checkpoint: str, size: int) -> None:
    """Up to zero points that are all the same, which are not held, and groups that ranks cut."""
    directory = QuantizedZoo("llama", tmp_path, (), checkpoint).quantized
    config = read_config(directory)
    base, sharding = describe_base(directory), Sharding(config, size)
    plan = plan_memory(directory, base, sharding, 4, 1 << 20, 16)
    model = load_checkpoint(directory, "float32", torch.device("cpu"))
    plain = 4 * sum(parameter.numel() for parameter in model.parameters())
    held = sum(module.quantized.nbytes for module in model.modules() if isinstance(module, QuantizedLinear))
    assert plan.weight_bytes == pytest.approx((plain + held) / size, rel=0.12)


@pytest.mark.parametrize(
    ("plan", "way_out"),
    [
        (MemoryPlan(1, 15 * GB, 20 * GB, 10**6, 10**8), r"set engine.pool_bytes to 9000000000 or less"),
        (MemoryPlan(2, 8 * GB, 9 * GB, 10**6, 10**8), r"set engine.pool_bytes to 4000000000 or less"),
        (
            MemoryPlan(1, 15 * GB, 8 * GB, 10**6, 10**8, image_bytes=2 * GB),
            r"images 2\.0 GB do not fit .* set engine.pool_bytes and engine.image_bytes to 9000000000 or less together",
        ),
        (MemoryPlan(1, 40 * GB, GB, 10**6, 10**8), r'quantization = "int8" or "nf4"'),
        (MemoryPlan(2, 20 * GB, GB, 10**6, 10**8, is_quantized=True), r"a checkpoint of fewer bits"),
        (MemoryPlan(2, 20 * GB, GB, 10**6, 10**8), r"all ranks share this machine"),
    ],
)
def test_plan_that_does_not_fit_is_refused_with_what_would(plan: MemoryPlan, way_out: str) -> None:
    with pytest.raises(UnsupportedModel, match=way_out):
        plan.check(24 * GB)


def test_plan_is_said_in_one_sentence() -> None:
    plan = MemoryPlan(1, 15 * GB, 98 * GB, 1_960_000, 311 * 10**6)
    assert str(plan) == "weights 15.0 GB, pool 98.0 GB = 50,000 pages, or 315 adapters of rank 64 on all linears"
