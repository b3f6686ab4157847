"""The context whose attention costs a token as much as its products, from the shapes of the base."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from adapter_zoo import Zoo

from loramux.engine.scheduling.policy import ATTENTION_COST
from loramux.simulator.scenario import model_of

DENSE = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
"""Products of a token in a layer: queries, keys and values, output, network."""
WIDE = 64 * 96 + 2 * 64 * 48 + 96 * 64
"""Products of attention with heads of 24 numbers."""


@pytest.mark.parametrize(
    ("family", "products", "attention"),
    [
        ("llama", 3 * DENSE, 3 * 4 * (16 + 16)),
        ("qwen2_5_vl", 3 * DENSE, 3 * 4 * (16 + 16)),
        # A token meets three of six experts, and the router, in two layers, and the network of the third one.
        ("qwen3_moe", 3 * WIDE + 3 * 64 * 96 + 2 * (6 * 64 + 3 * 3 * 64 * 40), 3 * 4 * (24 + 24)),
        ("mistral", 1, 0),
    ],
    ids=["dense", "next to a tower", "experts", "in a window"],
)
def test_context_that_costs_as_much_as_the_products_of_a_token_follows_the_base(
    tmp_path: Path, family: str, products: int, attention: int
) -> None:
    expected = products / (ATTENTION_COST * attention) if attention else None
    with closing(Zoo(family, tmp_path).engine()) as engine:
        assert engine.facts.token_context == expected
        if family == "llama":
            assert model_of(str(tmp_path / "base")).token_context == expected, "the simulator counts as the engine"
        assert engine.scheduler.state.limits.token_context == (expected or math.inf)
