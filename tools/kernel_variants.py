"""All kernel variants that the launchers choose from, as launches on small tensors of representative shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from loramux_kernels.cuda import joined_expand
from loramux_kernels.cuda.coded_linear import prepare_coded_linear, prepare_grouped_coded_linear
from loramux_kernels.cuda.fixed_product import prepare_fixed_product
from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.layer_operators import prepare_gated, prepare_rms_norm, prepare_rope
from loramux_kernels.cuda.linear_attention import prepare_gated_norm, prepare_linear_attention
from loramux_kernels.cuda.lora import new_intermediate, prepare_expand, prepare_rescale, prepare_shrink
from loramux_kernels.cuda.mixture import prepare_combine, prepare_expert_items, prepare_grouped_linear, prepare_route
from loramux_kernels.cuda.paged_attention import prepare_attention, prepare_write_kv
from loramux_kernels.cuda.sampling import prepare_forbid, prepare_sample
from loramux_kernels.cuda.short_convolution import prepare_short_convolution
from loramux_kernels.cuda.step_inputs import prepare_insert_tokens, prepare_write_pages
from loramux_kernels.cuda.work_lists import (
    LONG_RANKS,
    LORA_ITEM_WIDTH,
    ROW,
    SHORT,
    RowTiles,
    TileMap,
    TileShape,
    WorkList,
    attach_tile_map,
)
from loramux_kernels.quantized_weight import EXPONENT_SCALES, Coding, QuantizedWeight, is_nibbles
from loramux_kernels.tables import (
    AttentionBatch,
    HeadColumns,
    KvLayer,
    LogitBias,
    LoraGroup,
    LoraTable,
    Norm,
    OwnWeights,
    Penalties,
    PendingExpand,
    Rotation,
    Routes,
    SamplingBatch,
    Segments,
    StateLayer,
    StateRows,
    StateShape,
    StateWeights,
)

HEAD_DIMS = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512), (64, 32))
"""Sizes of keys and of values. The last pair is for ptxas 12.8 (`paged_attention._blocks`), which fails at narrower
values.
"""


@dataclass(frozen=True)
class Variant:
    """A launch, with a name that identifies it."""

    name: str
    launch: Launch


def all_variants() -> list[Variant]:
    """Return every variant that has to compile."""
    return [
        *(*_lora(), *_rescale(), *_attention(), *_write_kv(), *_between_linears(), *_rope(), *_joined(), *_coded()),
        *(
            *_fixed_products(),
            *_mixture(),
            *_sampling(),
            *_step_inputs(),
            *_token_mask(),
            *_linear_attention(),
            *_mamba2(),
        ),
    ]


def _lora() -> Iterator[Variant]:
    steps = {
        "row": ((0, 1, 2), 64),
        "short": ((0, 20, 40), 64),
        "long": ((0, 200, 400), 64),
        "long-r16": ((0, 200, 400), 16),
        "long-r32": ((0, 200, 400), 32),
    }
    for dtype in (torch.bfloat16, torch.float32):
        for name, (cu_seqlens, rank) in steps.items():
            yield from _lora_pair(f"{name}-{_short(dtype)}", Segments(cu_seqlens, (0, 1)), rank, dtype)
    odd = LoraGroup((0, 1), (130, 66))
    heads = LoraGroup.of_heads(0, 16, HeadColumns(width=128, first=128, step=256, row=4096))
    for name, group in itertools.product(("row", "short", "long"), (odd, heads)):
        full_name = f"{name}-bf16-{'odd' if group is odd else 'heads'}"
        yield from _lora_pair(full_name, Segments(steps[name][0], (0, 1)), 64, torch.bfloat16, group)


def _lora_pair(
    name: str, segments: Segments, rank: int, dtype: torch.dtype, group: LoraGroup | None = None
) -> Iterator[Variant]:
    group = group or LoraGroup((0, 1, 2), (4096, 1024, 1024))
    offsets = torch.zeros(2, 7, 16, dtype=torch.int64)
    table = LoraTable(offsets, offsets, torch.full((2, 7), rank, dtype=torch.int32), torch.ones(2, 7))
    x = torch.empty(segments.rows, 4096, dtype=dtype)
    y = torch.empty(segments.rows, group.out_starts[-1], dtype=dtype)
    if group.heads is not None:
        x, y = (part.unflatten(1, (len(group.sites), -1))[..., : group.heads.width] for part in (x, y))
    v = new_intermediate(x, group, segments, table)
    pool = torch.empty(4096, dtype=dtype)
    for launch in prepare_shrink(x, pool, table, group, segments, v):
        yield Variant(f"shrink-{name}", launch)
    for launch in prepare_expand(v, pool, table, group, segments, y):
        yield Variant(f"expand-{name}", launch)


def _rescale() -> Iterator[Variant]:
    group, segments = LoraGroup((0, 1, 2), (4096, 1024, 1024)), Segments((0, 1, 2), (0, 1))
    for dtype in (torch.bfloat16, torch.float32):
        y = torch.empty(segments.rows, group.out_starts[-1], dtype=dtype)
        launch = prepare_rescale(y, y.view(-1), torch.zeros(2, 7, dtype=torch.int64), group, segments)
        yield Variant(f"rescale-{_short(dtype)}", launch)


def _attention() -> Iterator[Variant]:
    for dims in HEAD_DIMS:
        yield from _attention_step(*dims, torch.bfloat16)
        yield from _attention_step(*dims, torch.bfloat16, is_fp8=True)
    for dim in (64, 128, 256):
        yield from _attention_step(dim, dim, torch.float32)
    window, softcap, sinks = {"sliding_window": 4096}, {"softcap": 50.0}, {"sinks": torch.empty(16)}
    features: tuple[tuple[int, dict[str, Any]], ...] = (
        *((dim, window | softcap | sinks) for dim in (64, 128, 256)),
        *((64, sinks), (64, window | sinks), (128, window), (256, window), (256, softcap)),
    )
    for (dim, features_of), is_fp8 in itertools.product(features, (False, True)):
        yield from _attention_step(dim, dim, torch.bfloat16, is_fp8=is_fp8, **features_of)
    # Query heads of a key head as in Qwen 2.5 (7), and so many that a decode tile is higher.
    grouped = ((7, 128), (32, 64), (32, 128), (32, 256), (48, 128))
    for (groups, dim), is_fp8 in itertools.product(grouped, (False, True)):
        yield from _attention_step(dim, dim, torch.bfloat16, is_fp8=is_fp8, groups=groups)
    windows: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 1024})
    # layers in which images see ahead
    for dim, is_fp8, window in itertools.product((128, 256), (False, True), windows):
        yield from _attention_step(dim, dim, torch.bfloat16, is_fp8=is_fp8, sees_ahead=True, **window)
    for is_fp8 in (False, True):
        yield from _attention_step(576, 512, torch.bfloat16, is_fp8=is_fp8, has_values_in_keys=True)
    yield from _attention_step(576, 512, torch.bfloat16, has_values_in_keys=True, lse=torch.empty(257, 16))
    for dtype in (torch.float16, torch.float32):
        yield from _attention_step(128, 128, dtype, is_fp8=True)
    yield from _attention_step(128, 128, torch.float16)


def _attention_step(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    is_fp8: bool = False,
    has_values_in_keys: bool = False,
    sees_ahead: bool = False,
    groups: int = 4,
    **features: Any,
) -> Iterator[Variant]:
    """Yield a step with a decoding sequence, whose context is split and merged, and a step in prefill."""
    num_rows, context = 257, 4096
    batch = AttentionBatch(
        cu_seqlens=torch.tensor([0, 1, num_rows], dtype=torch.int32),
        context_lens=torch.tensor([context, num_rows - 1], dtype=torch.int32),
        block_table=torch.zeros(2, context // 16, dtype=torch.int32),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
        row_ends=torch.zeros(num_rows, dtype=torch.int32) if sees_ahead else None,
    )
    query = torch.empty(num_rows, 4 * groups, key_dim, dtype=dtype)
    output = torch.empty(num_rows, 4 * groups, value_dim, dtype=dtype)
    layer = _fp8_kv(key_dim, value_dim) if is_fp8 else _kv(key_dim, value_dim, dtype)
    if has_values_in_keys:
        layer = _in_keys(layer)
    launches = prepare_attention(query, layer, batch, 0.1, output, **features)
    name = f"{key_dim}x{value_dim}-{_short(dtype)}{'-in-keys' * has_values_in_keys}{'-fp8' * is_fp8}"
    name += "".join(f"-{feature.removeprefix('sliding_')}" for feature in features) + "-ahead" * sees_ahead
    name += "" if groups == 4 else f"-groups-of-{groups}"
    # Tiles of both steps may have one height, and then one kernel.
    for rows, launch in {launch.arguments["BLOCK_ROWS"]: launch for launch in launches}.items():
        yield Variant(f"attend-{rows}-{name}", launch)


def _write_kv() -> Iterator[Variant]:
    slots = torch.zeros(4, dtype=torch.int64)
    for key_dim, value_dim in HEAD_DIMS:
        key, value = (torch.empty(4, 4, dim, dtype=torch.bfloat16) for dim in (key_dim, value_dim))
        (launch,) = prepare_write_kv(key, value, _kv(key_dim, value_dim, torch.bfloat16), slots)
        yield Variant(f"write-kv-{key_dim}x{value_dim}-bf16", launch)
        for launch in prepare_write_kv(key, value, _fp8_kv(key_dim, value_dim), slots):
            yield Variant(f"write-kv-{_order(launch)}-{key_dim}x{value_dim}-bf16-fp8", launch)
    key = torch.empty(4, 1, 576, dtype=torch.bfloat16)
    for layer, end in ((_kv(576, 512, torch.bfloat16), ""), (_fp8_kv(576, 512), "-fp8")):
        for launch in prepare_write_kv(key, key[..., :512], _in_keys(layer), slots):
            yield Variant(f"write-kv-{_order(launch) + '-' if end else ''}576x512-bf16-in-keys{end}", launch)


def _between_linears() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(4, 4096, dtype=dtype)
        norm = Norm(torch.empty(4096), 1e-5, rounds_first=True)
        yield Variant(f"rms-norm-{_short(dtype)}", prepare_rms_norm(x, norm, None, 1.0, x))
        yield Variant(f"rms-norm-added-{_short(dtype)}", prepare_rms_norm(x, norm, x, 0.22, x))
        own = OwnWeights(x.view(-1), torch.zeros(2, 65, dtype=torch.int64), 3, Segments((0, 2), (1,)))
        yield Variant(f"rms-norm-own-{_short(dtype)}", prepare_rms_norm(x, norm, x, 1.0, x, own))
        gate, up = torch.empty(4, 28_672, dtype=dtype).chunk(2, dim=1)
        for activation in ("silu", "gelu_tanh"):
            launch = prepare_gated(gate, up, activation, torch.empty(4, 14_336, dtype=dtype))
            yield Variant(f"gated-{activation}-{_short(dtype)}", launch)
        for width in (128, 16_384):
            x, weight = torch.empty(4, width, dtype=dtype), torch.empty(width)
            launch = prepare_rms_norm(x, Norm(weight, 1e-5, rounds_first=False), x, 1.0, x)
            yield Variant(f"rms-norm-added-{width}-{_short(dtype)}", launch)


def _rope() -> Iterator[Variant]:
    norm_of = {dim: Norm(torch.empty(dim), 1e-5, rounds_first=True) for dim in (128, 256, 512)}
    shapes = ((128, 128, None, 4), (96, 72, None, 4), (256, 256, norm_of[256], 4), (128, 0, None, 4))
    for dim, rotary, norm, group in (*shapes, (128, 128, norm_of[128], 16), (512, 512, norm_of[512], 8)):
        layer = KvLayer(*(torch.empty(2, 8, 16, dim, dtype=torch.bfloat16) for _ in range(2)))
        (launch,) = _rope_launches(layer, rotary, norm, group)
        name = f"rope-{rotary}-of-{dim}" + ("-normed" if norm else "")
        yield Variant(name + ("" if group == 4 else f"-groups-of-{group}"), launch)
    for key_dim, value_dim in HEAD_DIMS:
        norm = norm_of.get(key_dim)
        for launch in _rope_launches(_fp8_kv(key_dim, value_dim), key_dim, norm, 4):
            name = f"rope-{_order(launch)}-{key_dim}x{value_dim}-bf16-fp8"
            yield Variant(name + ("-normed" if norm else ""), launch)


def _rope_launches(layer: KvLayer, rotary: int, norm: Norm | None, group: int) -> list[Launch]:
    """Return launches with `group` query heads per key head; all heads are slices of one joined output. Without rotary
    elements nothing is turned."""
    heads, key_dim, value_dim = layer.key.shape[1], layer.key.shape[3], layer.value.shape[3]
    widths = (group * heads * key_dim, heads * key_dim, heads * value_dim)
    parts = torch.empty(4, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
    query, key, value = (
        part.unflatten(1, (-1, dim)) for part, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True)
    )
    rotation = Rotation(*(torch.empty(4, rotary, dtype=torch.bfloat16) for _ in range(2))) if rotary else None
    return prepare_rope(query, key, value, rotation, layer, torch.zeros(4, dtype=torch.int64), norm, norm)


def _joined() -> Iterator[Variant]:
    """Yield the operators that expand their input themselves, of an 8B's widths and of others."""
    for dtype in (torch.bfloat16, torch.float32):
        for width in (4096, 16_384):
            expand, norm = _pending((width,), dtype), Norm(torch.empty(width), 1e-5, rounds_first=True)
            for x, name in ((expand.y, "added-"), (None, "")):
                launch = joined_expand.prepare_rms_norm(x, norm, 0.22, expand, expand.y)
                yield Variant(f"expand-norm-{name}{width}-{_short(dtype)}", launch)
        for widths in ((14_336, 14_336), (28_672,)):
            expand = _pending(widths, dtype)
            gate, up = expand.y.chunk(2, dim=1)
            launch = joined_expand.prepare_gated(gate, up, "silu", expand, torch.empty(4, 14_336, dtype=dtype))
            yield Variant(f"expand-gated-of-{len(widths)}-{_short(dtype)}", launch)
    for dim, rotary in ((128, 128), (96, 72), (256, 256), (512, 512)):
        of_heads = Norm(torch.empty(dim), 1e-5, rounds_first=True) if dim >= 256 else None
        heads, rotation = (32 * dim, 8 * dim, 8 * dim), torch.empty(4, rotary, dtype=torch.bfloat16)
        whole = KvLayer(*(torch.empty(2, 8, 16, dim, dtype=torch.bfloat16) for _ in range(2)))
        codes = KvLayer(*(torch.empty(2, 8, 16, dim, dtype=torch.uint8) for _ in range(2)), *torch.empty(2, 2, 8))
        for layer in (whole, codes):
            expand = _pending(heads, torch.bfloat16)
            query, key, value = (part.unflatten(1, (-1, dim)) for part in expand.y.split(heads, dim=1))
            slots, turn = torch.zeros(4, dtype=torch.int64), Rotation(rotation, rotation)
            for launch in joined_expand.prepare_rope(query, key, value, turn, layer, slots, of_heads, of_heads, expand):
                order = "" if layer is whole else f"{_order(launch)}-fp8-"
                yield Variant(f"expand-rope-{order}{rotary}-of-{dim}" + ("-normed" if of_heads else ""), launch)


def _pending(widths: tuple[int, ...], dtype: torch.dtype) -> PendingExpand:
    """Return the expand of four rows, each with an adapter of rank 64, as a recorded step leaves it."""
    group, segments = LoraGroup(tuple(range(len(widths))), widths), Segments((0, 4), (0,))
    offsets = torch.zeros(2, 7, 16, dtype=torch.int64)
    table = LoraTable(offsets, offsets, torch.full((2, 7), 64, dtype=torch.int32), torch.ones(2, 7))
    lists = (WorkList(torch.zeros(5, LORA_ITEM_WIDTH, dtype=torch.int32)) for _ in range(2))
    arrivals = torch.zeros(4, dtype=torch.int32)
    attach_tile_map(segments, TileMap(4, 64, (RowTiles(ROW, *lists),), arrivals=arrivals))
    x, y = torch.empty(4, 4096, dtype=dtype), torch.empty(4, sum(widths), dtype=dtype)
    return PendingExpand(new_intermediate(x, group, segments, table), x.view(-1), table, group, segments, y)


def _coded() -> Iterator[Variant]:
    bias, values = torch.empty(4096), torch.empty(16)
    forms: tuple[tuple[Coding, int, bool], ...] = (
        *(("int8", 4096, False), ("int4", 128, True), ("nf4", 64, False), ("mxfp4", 32, False), ("fp8", 4096, False)),
        ("int4", 32, True),
    )
    for coding, group, has_offsets in forms:
        codes = torch.empty(4096, 2048 if is_nibbles(coding) else 4096, dtype=torch.uint8)
        scales = torch.empty(4096, 4096 // group, dtype=torch.uint8 if coding in EXPONENT_SCALES else torch.float32)
        weight = QuantizedWeight(coding, codes, scales, group, 4096, scales if has_offsets else None)
        name = coding if (coding, group) != ("int4", 32) else "int4-groups-of-32"
        for rows in (4, 256):
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.empty(rows, 4096, dtype=dtype)
                launch = prepare_coded_linear(x, weight, values, bias, torch.empty_like(x))
                yield Variant(f"coded-{name}-{rows}-{_short(dtype)}", launch)
        experts = 128  # of 32 outputs each
        starts, one = torch.zeros(experts + 1, dtype=torch.int64), bias[:4096].view(experts, 32)
        for rows in (512, 32_768):
            x, y = torch.empty(rows, 4096, dtype=torch.bfloat16), torch.empty(rows, 32, dtype=torch.bfloat16)
            for own in (None, one.bfloat16()) if coding in ("nf4", "mxfp4") else (None,):
                launch = prepare_grouped_coded_linear(x, weight, values, own, starts, y)
                yield Variant(f"grouped-coded-{name}-{rows}{'' if own is None else '-bias'}", launch)
        x, y = torch.empty(512, 4096), torch.empty(512, 32)
        launch = prepare_grouped_coded_linear(x, weight, values, None, starts, y)
        yield Variant(f"grouped-coded-{name}-fp32", launch)


def _fixed_products() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.empty(64, 4096, dtype=dtype), torch.empty(4096, 4096, dtype=dtype).T
        for bias in (None, torch.empty(4096, dtype=dtype)):
            launch = prepare_fixed_product(x, weight, bias, torch.empty_like(x))
            yield Variant(f"fixed-product-{_short(dtype)}{'' if bias is None else '-bias'}", launch)


def _mixture() -> Iterator[Variant]:
    experts, choices = 128, 8
    starts = torch.zeros(experts + 1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (512, 32_768):
            x, bias = torch.empty(rows, 64, dtype=dtype), torch.empty(experts, 96, dtype=dtype)
            y, name = torch.empty(rows, 96, dtype=dtype), f"grouped-linear-{rows}-{_short(dtype)}"
            weight = torch.empty(experts, 96, 64, dtype=dtype)
            yield Variant(name, prepare_grouped_linear(x, weight, None, starts, y))
            weight = torch.empty(experts, 64, 96, dtype=dtype).transpose(1, 2)
            yield Variant(f"{name}-transposed-bias", prepare_grouped_linear(x, weight, bias, starts, y))
        chosen = torch.zeros(64, choices, dtype=torch.int64)
        routes = Routes(chosen.view(-1), chosen.view(-1), chosen, starts)
        rows_of, weights = torch.empty(512, 2048, dtype=dtype), torch.empty(64, choices, dtype=dtype)
        yield Variant(f"combine-{_short(dtype)}", prepare_combine(rows_of, routes, weights, rows_of[:64]))
        ten = torch.empty(64, 10, dtype=dtype)
        launch = prepare_combine(rows_of.repeat(2, 1)[:640], routes, ten, rows_of[:64])
        yield Variant(f"combine-of-10-{_short(dtype)}", launch)
        whole, shape = Segments((0, 512), (0,)), TileShape(SHORT.rows, LONG_RANKS[-1], SHORT.rows)
        lists = (WorkList(torch.zeros(1 + 512, LORA_ITEM_WIDTH, dtype=torch.int32)) for _ in range(2))
        attach_tile_map(whole, TileMap(512, 64, (RowTiles(shape, *lists),), made_by_kernel=True))
        yield from _lora_pair(f"experts-{_short(dtype)}", whole, 64, dtype, LoraGroup((0,), (1536,)))
    yield Variant("route", prepare_route(chosen, chosen[:, 0], routes))
    yield Variant("route-without-slots", prepare_route(chosen, None, routes))
    items = torch.zeros(1 + 512, LORA_ITEM_WIDTH, dtype=torch.int32)
    yield Variant("expert-items", prepare_expert_items(routes, Segments((0, 64), (0,)), 256, shape, items, items))


def _sampling() -> Iterator[Variant]:
    rows = 4
    floats, ints, terms = torch.ones(rows), torch.ones(rows, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    counts = torch.zeros(rows, 151_936 + 65_536, dtype=torch.int32)
    penalties = Penalties(counts, ints, floats, floats, floats)
    bias = LogitBias(terms, terms, torch.zeros(32), ints)
    columns: dict[str, Any] = dict.fromkeys(
        (one.name for one in fields(SamplingBatch) if one.default is MISSING), floats
    )
    numbers = dict.fromkeys(("num_rows", "is_steered", "top_k", "step"), ints)
    plain = SamplingBatch(**columns | numbers | {"seed": ints.long()})
    steered = replace(plain, penalties=penalties, bias=bias)
    for batch, dtype in itertools.product((plain, steered), (torch.bfloat16, torch.float16, torch.float32)):
        logits = torch.empty(rows, 151_936, dtype=dtype)
        for launch in prepare_sample(logits, batch, torch.empty(rows, dtype=torch.int64)):
            name = f"sample-{launch.kernel.__name__.strip('_')}-{_short(dtype)}" + "-steered" * (batch is steered)
            yield Variant(name + "-copy" * (launch.arguments.get("OF_STEERED", False)), launch)


def _step_inputs() -> Iterator[Variant]:
    ints, longs = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int64)
    yield Variant("write-pages", prepare_write_pages(ints, longs[0], ints[0], ints[0]))
    yield Variant("insert-tokens", prepare_insert_tokens(longs[0], ints, longs[0], longs[:3], ints[0]))


def _token_mask() -> Iterator[Variant]:
    rows, words = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 151_936 // 32, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        launch = prepare_forbid(torch.empty(4, 151_936, dtype=dtype), rows, words)
        yield Variant(f"forbid-tokens-{_short(dtype)}", launch)


def _linear_attention() -> Iterator[Variant]:
    """Yield a step with a decoding sequence and a prompt: 16 heads of keys, 16 or 32 of values, as published, and the
    narrower keys and wider values of OLMo Hybrid."""
    batch = AttentionBatch(
        cu_seqlens=torch.tensor([0, 1, 101], dtype=torch.int32),
        context_lens=torch.tensor([300, 100], dtype=torch.int32),
        block_table=torch.zeros(2, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(101, dtype=torch.int64),
        state_tables=torch.zeros(2, 16, dtype=torch.int32),
    )
    of_128 = ((torch.bfloat16, 2), (torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 2))
    for dtype, repeats, dim, value_dim in (*((*shape, 128, 128) for shape in of_128), (torch.bfloat16, 1, 96, 192)):
        widths = (dim, dim, repeats * value_dim, repeats * value_dim, repeats, repeats)
        joined = torch.empty(101, 16, sum(widths), dtype=dtype)
        query, key, value, gate, b, a = joined.split(widths, dim=-1)
        value, gate = (part.unflatten(2, (repeats, value_dim)) for part in (value, gate))
        shape = StateShape(16 * repeats, dim, value_dim, 16 * (2 * dim + repeats * value_dim), 3)
        kernel, heads = torch.empty(shape.channels, 4, dtype=dtype), torch.empty(shape.heads)
        weights = StateWeights(kernel, heads, heads.to(dtype))
        state = StateLayer(shape, torch.empty(2, 6, shape.unit), 0)
        out = torch.empty(101, shape.heads, value_dim, dtype=dtype)
        name = f"{16 * repeats}-heads-{_short(dtype)}" + ("" if dim == 128 else f"-{dim}x{value_dim}")
        for launch in prepare_linear_attention(StateRows(query, key, value, b, a), weights, state, batch, out):
            stage = launch.kernel.__name__.split("_")[1]
            rows = f"-{launch.arguments['BLOCK_ROWS']}" if "BLOCK_ROWS" in launch.arguments else ""
            yield Variant(f"linear-attention-{stage}{rows}-{name}", launch)
        norm = prepare_gated_norm(out, gate, torch.empty(value_dim, dtype=dtype), 1e-6, out)
        yield Variant(f"gated-norm-{name}", norm)


def _mamba2() -> Iterator[Variant]:
    """Yield the same step of Mamba 2 and of a short convolution, as published: Granite 4 has one group, Nemotron-H
    eight, and Falcon-H1 states of 256 numbers."""
    batch = AttentionBatch(
        cu_seqlens=torch.tensor([0, 1, 101], dtype=torch.int32),
        context_lens=torch.tensor([300, 100], dtype=torch.int32),
        block_table=torch.zeros(2, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(101, dtype=torch.int64),
        state_tables=torch.zeros(2, 16, dtype=torch.int32),
    )
    shapes = ((torch.bfloat16, 1, 128), (torch.bfloat16, 8, 128), (torch.float32, 1, 128), (torch.bfloat16, 1, 256))
    for dtype, groups, width in shapes:
        repeats = 48 // groups
        widths = (48 * 64, 48 * 64, groups * width, groups * width, 48)
        parts = torch.empty(101, sum(widths), dtype=dtype).split(widths, dim=-1)
        gate, value, key, query, step = (part.unflatten(1, (groups, -1)) for part in parts)
        shape = StateShape(48, width, 64, 48 * 64 + 2 * groups * width, 3)
        heads = torch.empty(48)
        weights = StateWeights(
            torch.empty(shape.channels, 4, dtype=dtype), heads, heads.to(dtype),
            bias=torch.empty(shape.channels, dtype=dtype), skip=heads, limits=(0.001, float("inf")),
        )  # fmt: skip
        state = StateLayer(shape, torch.empty(2, 6, shape.unit), 0)
        out = torch.empty(101, 48, 64, dtype=dtype)
        parts_of_rows = StateRows(query, key, value.unflatten(2, (repeats, 64)), None, step)
        name = f"{groups}-groups-of-{width}-{_short(dtype)}"
        for launch in prepare_linear_attention(parts_of_rows, weights, state, batch, out):
            stage = launch.kernel.__name__.split("_")[1]
            height = f"-{launch.arguments['BLOCK_ROWS']}" if "BLOCK_ROWS" in launch.arguments else ""
            yield Variant(f"mamba2-{stage}{height}-{name}", launch)
        x, weight = out.view(101, groups, -1), torch.empty(groups, 48 * 64 // groups, dtype=dtype)
        norm = prepare_gated_norm(x, gate[:, :, None], weight, 1e-6, x, gates_first=True)
        yield Variant(f"gated-norm-first-{name}", norm)
    shape = StateShape(0, 1, 2 * 2048, 2048, 2)
    state, x = StateLayer(shape, torch.empty(2, 6, shape.unit), 0), torch.empty(101, 2048, dtype=torch.bfloat16)
    for launch in prepare_short_convolution(x, torch.empty(2048, 3, dtype=x.dtype), None, state, batch, x):
        yield Variant(f"short-convolution-{launch.arguments['BLOCK_ROWS']}-bf16", launch)


def _kv(key_dim: int, value_dim: int, dtype: torch.dtype) -> KvLayer:
    return KvLayer(torch.empty(2, 4, 16, key_dim, dtype=dtype), torch.empty(2, 4, 16, value_dim, dtype=dtype))


def _fp8_kv(key_dim: int, value_dim: int) -> KvLayer:
    return KvLayer(
        *(torch.empty(2, 4, 16, dim, dtype=torch.uint8) for dim in (key_dim, value_dim)),
        *(torch.empty(2, 4) for _ in range(2)),
    )


def _in_keys(layer: KvLayer) -> KvLayer:
    """Return the layer with one head, whose values are the first elements of its keys."""
    key, scale = layer.key[:, :1], None if layer.key_scale is None else layer.key_scale[:, :1]
    return KvLayer(key, key[..., : layer.value.shape[3]], scale, scale, has_values_in_keys=True)


def _order(launch: Launch) -> str:
    """Return which tokens of a page a launch stores in FP8: the first, or the others."""
    return "first" if launch.arguments["BEGINS"] else "others"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
