"""Operators that expand their input themselves, against lora_expand and then the same operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_cache import decoded, fp8_layer
from layer_cases import random_norm
from lora_cases import make_case

from loramux_kernels.cuda.work_lists import ROW, RowTiles, TileMap, attach_tile_map, whole_tiles
from loramux_kernels.layer_operators import gated, rms_norm, rope_write_kv
from loramux_kernels.lora import can_be_joined, lora_shrink, run_expand
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.tables import KvLayer, Norm, PendingExpand, Rotation, Segments

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
ROWS = [2, 1, 1, 3]
"""Rows of each adapter; two rows of the base follow."""


def pending(device: torch.device, dtype: torch.dtype, ranks: list[list[int]], widths: tuple[int, ...]) -> PendingExpand:
    """Return the expand of a recorded step of single rows, as it is left to the next operator."""
    case = make_case(dtype, ranks, ROWS, in_features=600, out_features=widths, alignment=8).to(device)
    rows, largest = len(case.y), case.table.ranks.amax(dim=1).cpu().numpy().astype("int64")
    memory, rank = StagedMemory(1 << 16, device), whole_tiles(int(largest.max()))
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    tile_map = TileMap(rows, rank, (RowTiles.reserve(ROW, rows, rank, memory),), arrivals=counts)
    step = Segments((0, rows), (0,))
    attach_tile_map(step, tile_map)
    slots = torch.full((rows,), -1, device=device)
    slots[: case.segments.rows] = case.segments.row_slots(device)
    step.use_row_slots(slots)
    tile_map.refill(case.segments, largest)
    memory.send()
    x = case.x.nan_to_num()
    v = lora_shrink(x, case.pool, case.table, case.group, step)
    expand = PendingExpand(v, case.pool, case.table, case.group, step, case.y)
    assert can_be_joined(expand)
    return expand


def separate(expand: PendingExpand) -> torch.Tensor:
    """Return the result of a separate launch, without changing `expand.y`."""
    copied = replace(expand, y=expand.y.clone())
    run_expand(copied)
    return copied.y


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "widths"),
    [([[16, 16], [40, 8], [0, 0], [0, 5]], (300, 300)), ([[16], [40], [0], [5]], (600,))],
    ids=["two linears", "one linear of both"],
)
def test_gate_with_expand_equals_expand_and_then_the_gate(device, dtype, ranks, widths, activation) -> None:
    expand = pending(device, dtype, ranks, widths)
    wanted = gated(*separate(expand).chunk(2, dim=1), activation)
    assert_close(gated(*expand.y.chunk(2, dim=1), activation, expand), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_first", [True, False])
@pytest.mark.parametrize("width", [72, 700, 1536])
@pytest.mark.parametrize("adds", [True, False], ids=["of the stream", "of the result"])
def test_norm_with_expand_equals_expand_and_then_the_norm(device, dtype, rounds_first, width, adds) -> None:
    """Twice, because a recorded launch is repeated: the numbers of parts are zeros again."""
    expand = pending(device, dtype, [[16], [40], [0], [5]], (width,))
    norm = random_norm(width, rounds_first)
    norm = replace(norm, weight=norm.weight.to(device))
    base, whole, stream = expand.y.clone(), separate(expand), torch.randn_like(expand.y)
    for _ in range(2):
        expand.y.copy_(base)
        got_x, wanted_x = stream.clone(), stream.clone()
        if adds:
            got = rms_norm(got_x, norm, expand.y, 0.22, expand=expand)
            wanted = rms_norm(wanted_x, norm, whole, 0.22)
        else:
            got, wanted = rms_norm(expand.y, norm, expand=expand), rms_norm(whole, norm)
        assert_close(got, wanted)
        assert_close(got_x, wanted_x)
        assert not vars(expand.segments)["tile_map"].arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(
    ("joined", "key_dim", "rotary", "value_dim"),
    [(False, 16, 16, 16), (False, 24, 14, 8), (True, 16, 8, 16), (False, 20, 0, 12)],
    ids=["", "partly turned", "one linear", "not turned"],
)
def test_rotation_with_expand_equals_expand_and_then_the_rotation(
    device, dtype, is_fp8, with_norm, joined, key_dim, rotary, value_dim
) -> None:
    """With tokens that begin a page, and one without a place."""
    heads, kv_heads = 6, 2
    widths = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
    ranks = [[16], [40], [0], [5]] if joined else [[16, 8, 16], [40, 0, 33], [0, 0, 0], [0, 5, 5]]
    expand = pending(device, dtype, ranks, (sum(widths),) if joined else widths)
    rows = len(expand.y)
    torch.manual_seed(1)
    slots = torch.tensor([0, 4, 1, 9, 8, -1, 5, 2, 11], device=device)
    angles = torch.rand(rows, rotary // 2, device=device).repeat(1, 2) * 6
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype)) if rotary else None
    norms: list[Norm | None] = [None, None]
    if with_norm:
        norms = [replace(norm, weight=norm.weight.to(device)) for norm in (random_norm(key_dim, True) for _ in "qk")]

    def turned(y: torch.Tensor, left: PendingExpand | None) -> tuple[torch.Tensor, KvLayer]:
        pages = fp8_layer(3, kv_heads, 4, key_dim, value_dim)
        if not is_fp8:
            pages = KvLayer(*(torch.full(part.shape, float("nan"), dtype=dtype) for part in (pages.key, pages.value)))
        tensors = (pages.key, pages.value, pages.key_scale, pages.value_scale)
        layer = KvLayer(*(None if part is None else part.to(device) for part in tensors))
        dims = (key_dim, key_dim, value_dim)
        parts = (part.unflatten(1, (-1, dim)) for part, dim in zip(y.split(widths, dim=1), dims, strict=True))
        query, key, value = parts
        rope_write_kv(query, key, value, rotation, layer, slots, *norms, expand=left)
        return query, layer

    wanted, wanted_layer = turned(separate(expand), None)
    got, layer = turned(expand.y, expand)
    assert_close(got, wanted)
    if is_fp8:  # where a card rounds differently, codes are neighbours
        layer, wanted_layer = decoded(layer), decoded(wanted_layer)
    for kept, other in ((layer.key, wanted_layer.key), (layer.value, wanted_layer.value)):
        if is_fp8:
            torch.testing.assert_close(kept, other, rtol=0.13, atol=1e-2, equal_nan=True)
        else:
            assert_close(kept, other)
