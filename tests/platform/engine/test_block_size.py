"""The block size is chosen from the base if `engine.block_size` is not set."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from adapter_zoo import RECIPES, Asked, Zoo, load, serve

from loramux.engine.execution.attention import KvLayout, LayerShape

RANK_TILE = 16


@pytest.mark.parametrize(
    ("layers", "heads", "widest_linear", "expected"),
    [(32, 8, 14_336, 16), (2, 8, 14_336, 64), (1, 1, 14_336, 256), (2, 2, 96, 16)],
    ids=["an 8B", "two layers of an 8B", "too few keys and values", "a tiny base"],
)
def test_default_block_size_is_the_least_power_of_two_that_holds_a_rank_tile(
    layers: int, heads: int, widest_linear: int, expected: int
) -> None:
    layout = KvLayout((LayerShape(heads, 128, 128),) * layers, 1, 2)
    assert layout.with_block_size(None, RANK_TILE * widest_linear).block_size == expected


@pytest.mark.parametrize("wanted", [1, 8, 48])
def test_a_set_block_size_is_kept(wanted: int) -> None:
    layout = KvLayout((LayerShape(8, 128, 128),) * 2, 1, 2)
    assert layout.with_block_size(wanted, RANK_TILE * 14_336).block_size == wanted


def test_base_with_few_heads_of_kv_is_served_with_default_settings(tmp_path: Path) -> None:
    """Its pages of 16 tokens are too small for its adapters; what it answers is PEFT's."""
    wide = Zoo("llama", tmp_path, intermediate_size=512, num_key_value_heads=1)
    wide.make_adapter("plain", RECIPES["plain"], 1)
    wide.rename_adapter("plain")
    asked = [Asked(name or "base", name, tuple(range(5, 26)), 4) for name in (None, "plain")]
    loaded, _ = load(wide.base, block_size=None)
    assert loaded.facts.block_size == 128
    with closing(wide.engine(block_size=None)) as engine:
        got = serve(wide, engine, asked)
    assert got == {request.name: wide.answer(request) for request in asked}
