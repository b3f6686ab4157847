"""Paged attention as Triton kernels: writing new keys and values into pages, and attention over pages.

Semantics:

    write_kv          key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise
    paged_attention   out[t, h] = softmax(scaling * q[t, h] @ K[s, h // G].T + mask) @ V[s, h // G], for row t of s

A tile's rows are query rows times the G heads that share a kv head: each key and value is loaded once for all of them.
Sequences with few query rows are one launch, sequences in prefill another. A long context may be cut to balance the
work. The program that writes the last partial result of a tile then merges all of the tile's, always in the same order.

The softmax is computed online (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022): each stretch of
context rescales the sums so far to the largest score seen. Cutting one context over several programs and merging their
results by log-sum-exp is Flash-Decoding (Dao et al., 2023): out = sum_p exp(lse[p]) * partial[p] / sum_p exp(lse[p]).

A row sees tokens up to itself, or up to its end in `AttentionBatch.row_ends`: rows of an image see the image's later
tokens. A tile then reads up to the largest of its rows' ends.

In FP8, key[page, h, offset] = E4M3(new_key[t, h] / key_scale[page, h]), and a token at offset 0 sets the scale first.
So the tokens that begin a page have a separate launch, before that of the others. Attention widens a key's codes to the
query's dtype, which is exact, and multiplies the scores with the pages' scales. The scales of values multiply the
weights. In float16 these products could be too small, so there values are multiplied with their scale first.

If values are the first elements of their keys (`KvLayer.has_values_in_keys`), only keys are stored, and a loaded block
of keys is the block of values too. Keys wider than 256 whose width is no power of two are loaded in two parts, so that
576 elements take the registers of 512 + 64 and not those of 1,024.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.dependent_launch import begin_dependent, wait_for_earlier
from loramux_kernels.cuda.e4m3 import from_e4m3, magnitude, page_scale, passes, reciprocal, scale_arguments, to_e4m3
from loramux_kernels.cuda.launch import AMPERE, Launch, resident_programs, run_all
from loramux_kernels.cuda.work_lists import (
    ATTENTION_ITEM_WIDTH,
    ATTENTION_PROGRAMS,
    DECODE_TILE_ROWS,
    AttentionShape,
    AttentionTiles,
    plan_attention,
)
from loramux_kernels.tables import AttentionBatch, KvLayer

_ITEM = tl.constexpr(ATTENTION_ITEM_WIDTH)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys and values: one launch for both, in FP8 two.

    Arguments as for the public operator, on a GPU. A token with a negative slot is not stored: padding rows of a
    captured step have no page.
    """
    if len(slot_mapping):
        run_all(prepare_write_kv(key, value, layer, slot_mapping))


def prepare_write_kv(
    key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor
) -> list[Launch]:
    """Return the launches that store keys and values: a program for each token."""
    tensors = (key, value, layer.key, layer.value)
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "each head's vector is contiguous"
    names = ("key", "value", "key_cache", "value_cache")
    arguments: dict[str, object] = dict(zip(names, tensors, strict=True))
    for name, tensor in zip(names[:2], tensors[:2], strict=True):
        arguments |= {f"{name}_token": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    for name, cache in zip(names[2:], tensors[2:], strict=True):
        arguments |= {f"{name}_{axis}": cache.stride(i) for i, axis in enumerate(("page", "head", "token"))}
    arguments |= {
        **scale_arguments(layer),
        "slot_mapping": slot_mapping,
        "block_size": layer.block_size,
        "NUM_HEADS": key.shape[1],
        "KEY_DIM": key.shape[2],
        "VALUE_DIM": 0 if layer.has_values_in_keys else value.shape[2],
        "BLOCK_HEADS": triton.next_power_of_2(key.shape[1]),
        "BLOCK_KEY": triton.next_power_of_2(key.shape[2]),
        "BLOCK_VALUE": triton.next_power_of_2(value.shape[2]),
    }
    grid = (len(slot_mapping),)
    return [
        Launch(_write_kv, grid, arguments | {"BEGINS": begins}, num_warps=4, num_stages=1) for begins in passes(layer)
    ]


@triton.jit
def _write_kv(
    key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, key_scale: tl.tensor,
    value_scale: tl.tensor, slot_mapping: tl.tensor, block_size: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_token: tl.tensor, value_head: tl.tensor, key_cache_page: tl.tensor, key_cache_head: tl.tensor,
    key_cache_token: tl.tensor, value_cache_page: tl.tensor, value_cache_head: tl.tensor, value_cache_token: tl.tensor,
    key_scale_page: tl.tensor, value_scale_page: tl.tensor,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, BEGINS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if BEGINS is not None:  # noqa: SIM102 - evaluated when compiling; the nested condition is not
        if (slot % block_size == 0) != BEGINS:
            return
    if slot >= 0:
        page = slot // block_size
        offset = slot % block_size
        if BEGINS is not None:
            key_scale += page * key_scale_page
            value_scale += page * value_scale_page
        to_key = key_cache + page * key_cache_page + offset * key_cache_token
        store_heads(
            key + token * key_token, key_head, to_key, key_cache_head, key_scale,
            NUM_HEADS, KEY_DIM, BLOCK_HEADS, BLOCK_KEY, BEGINS,
        )  # fmt: skip
        if VALUE_DIM > 0:
            to_value = value_cache + page * value_cache_page + offset * value_cache_token
            store_heads(
                value + token * value_token, value_head, to_value, value_cache_head, value_scale,
                NUM_HEADS, VALUE_DIM, BLOCK_HEADS, BLOCK_VALUE, BEGINS,
            )  # fmt: skip


@triton.jit
def store_heads(
    source: tl.tensor, source_head: tl.tensor, target: tl.tensor, target_head: tl.tensor, scales: tl.tensor,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BEGINS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy NUM_HEADS vectors of a token into its page, or store them as E4M3 in units of the page's `scales`."""
    head = tl.arange(0, BLOCK_HEADS)
    element = tl.arange(0, BLOCK_DIM)[None, :]
    is_head = head < NUM_HEADS
    inside = is_head[:, None] & (element < DIM)
    values = tl.load(source + head.to(tl.int64)[:, None] * source_head + element, mask=inside, other=0.0)
    if BEGINS is not None:
        values = values.to(tl.float32)
        scale = page_scale(scales + head, tl.max(magnitude(values), axis=1), is_head, BEGINS)
        values = to_e4m3(values * reciprocal(scale)[:, None])
    tl.store(target + head.to(tl.int64)[:, None] * target_head + element, values, mask=inside)


def paged_attention(
    query: torch.Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of packed query rows `[T, Hq, Dk]` over each sequence's own pages: `[T, Hq, Dv]`.

    Arguments as for the public operator, on a GPU. Rows that belong to no sequence of the batch stay undefined.
    """
    output = batch.new_output(query, layer, lse)
    options: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap, "sinks": sinks, "lse": lse}
    run_all(prepare_attention(query, layer, batch, scaling, output, **options))
    return output


def prepare_attention(
    query: torch.Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scaling: float,
    output: torch.Tensor,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> list[Launch]:
    """Return the launches that fill `output` `[T, Hq, Dv]` and, if it is given, `lse` `[T, Hq]`."""
    assert query.stride(2) == layer.key.stride(3) == layer.value.stride(3) == 1, "each head's vector is contiguous"
    kv_heads, key_dim, value_dim = layer.key.shape[1], layer.key.shape[3], layer.value.shape[3]
    block_key, block_rest, block_value = _blocks(key_dim, value_dim)
    long_rows = _long_rows(max(key_dim, value_dim), query.dtype)
    repeats = _repeats(query.shape[1] // kv_heads, long_rows)
    groups = query.shape[1] // kv_heads // repeats
    sees_ahead = batch.row_ends is not None
    shape = AttentionShape(groups, kv_heads * repeats, sliding_window, long_rows, batch.is_invariant, sees_ahead)
    attend: dict[str, Any] = {
        "output": output,
        "output_token": output.stride(0),
        "lse": lse,
        "KV_HEADS": shape.kv_heads,
        "GROUPS": shape.groups,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE": block_value,
        "query": query,
        "key_cache": layer.key,
        "value_cache": layer.value,
        "block_table": batch.block_table,
        "row_ends": batch.row_ends,
        "sinks": sinks,
        "scaling": scaling,
        "softcap": softcap,
        "window": sliding_window,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        **_strides("key", layer.key),
        **_strides("value", layer.value),
        **scale_arguments(layer),
        "table_stride": batch.block_table.stride(0),
        "PAGE": layer.block_size,
        "KEY_DIM": key_dim,
        "BLOCK_KEY": block_key,
        "BLOCK_REST": block_rest,
        "REPEATS": repeats,
        "VALUES_IN_KEYS": layer.has_values_in_keys and block_key == block_value,
    }
    return [_launch(tiles, attend, query) for tiles in plan_attention(batch, shape)]


def _long_rows(dim: int, dtype: torch.dtype) -> int:
    """Return the height of prefill tiles: as many rows as a thread's registers can hold sums of."""
    if dtype == torch.float32:
        return DECODE_TILE_ROWS
    if dim > 256:
        return DECODE_TILE_ROWS
    return 32 if dim > 128 else 64


def _repeats(groups: int, most: int) -> int:
    """Return the tiles that share a kv head: each has at most `most` of its query heads, because registers must hold
    the sums of all rows of a tile."""
    return min(n for n in range(1, groups + 1) if groups % n == 0 and groups // n <= most)


def _blocks(key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Return the elements of a block of keys, of what is left of each key, and of a block of values.

    They are rounded up to sizes that a tensor core multiplies: powers of two, at least 16. A wide key is not: it has a
    second part.

    Below 64 both are made equal. ptxas 12.8, which Triton 3.6 and 3.7 ship, confuses the WGMMA descriptors of keys
    with those of narrower values; the two differ in form only below 64 (`compile_check` finds it).
    """
    key, value = (max(16, int(triton.next_power_of_2(dim))) for dim in (key_dim, value_dim))
    if key_dim > 256 and key > key_dim:
        return key // 2, max(16, int(triton.next_power_of_2(key_dim - key // 2))), value
    return max(key, min(64, value)), 0, max(value, min(64, key))


def _strides(name: str, cache: torch.Tensor) -> dict[str, int]:
    return {f"{name}_{axis}": cache.stride(i) for i, axis in enumerate(("page", "head", "token"))}


def _block_tokens(rows: int, dim: int, value_dim: int, dtype: torch.dtype, is_fp8: bool) -> int:
    """Return the context tokens of one pass: registers must hold their addresses, scores and widened codes."""
    if dtype == torch.float32:
        return 32 if is_fp8 and dim <= 128 else 16
    if dim > 256 or (is_fp8 and rows > DECODE_TILE_ROWS and value_dim > 128):
        return 16
    return 64 if dim <= 64 or (dim <= 128 and rows == DECODE_TILE_ROWS and not is_fp8) else 32


def _stages(rows: int, same_width: bool, dtype: torch.dtype, is_fp8: bool, sees_ahead: bool, has_softcap: bool) -> int:
    """Return Triton's number of pipeline stages.

    A key's address comes from the block table, and its value follows. Five stages make two buffers of each, so one
    block is loaded while another is multiplied; three stages make one buffer. High tiles are limited by their products
    and have no free registers. A kernel for keys and values of different widths on sm_90 has none either. In FP8 all
    but the highest tiles have room for two buffers, with a softcap for one, and with separate ends of rows for none.
    """
    if dtype == torch.float32:
        return 1
    if is_fp8:
        return 1 if sees_ahead else 5 if rows <= 32 and not has_softcap else 3
    return 5 if rows == DECODE_TILE_ROWS and same_width else 3


def _on_ampere(rows: int, groups: int, is_in_parts: bool, is_fp8: bool) -> dict[str, int]:
    """Return the facts of a launch that differ on sm_80 to sm_89, where some version of Triton spills otherwise.

    For keys in two parts, more warps share a tile's sums; one program of them fits. In FP8, a high tile that divides
    its rows by a number that is no power of two has no registers for a buffer.
    """
    if is_fp8 and rows > 32 and groups.bit_count() > 1:
        return {"num_stages": 1}
    return {"num_warps": 16, "programs": 1} if is_in_parts and not is_fp8 else {}


def _launch(tiles: AttentionTiles, attend: dict[str, Any], query: torch.Tensor) -> Launch:
    """Return attention over one tile height."""
    shape = (tiles.partials, attend["KV_HEADS"], tiles.rows)
    is_fp8 = attend["key_scale"] is not None
    widest = max(attend["BLOCK_KEY"], attend["BLOCK_VALUE"])
    arguments = {
        **attend,
        "partial_output": query.new_empty(*shape, attend["VALUE_DIM"], dtype=torch.float32),
        "partial_lse": query.new_empty(shape, dtype=torch.float32),
        "arrivals": tiles.arrivals,
        "work": tiles.items.work,
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_TOKENS": _block_tokens(tiles.rows, widest, attend["BLOCK_VALUE"], query.dtype, is_fp8),
    }
    grid = (resident_programs(query.device, ATTENTION_PROGRAMS),)
    same_width = attend["BLOCK_KEY"] == attend["BLOCK_VALUE"]
    sees_ahead, has_softcap = attend["row_ends"] is not None, attend["softcap"] is not None
    stages = _stages(tiles.rows, same_width, query.dtype, is_fp8, sees_ahead, has_softcap)
    warps = 4
    if widest > 256:  # the sums of one row are as wide as a value, and codes are widened
        warps = 16 if is_fp8 else 8
    # Left to itself, ptxas spills in some tiles to fit a third program, which no launch has.
    programs = ATTENTION_PROGRAMS if widest <= 256 else None
    ampere = _on_ampere(tiles.rows, attend["GROUPS"], attend["BLOCK_REST"] > 0, is_fp8)
    facts = {AMPERE: ampere}
    return Launch(_attend, grid, arguments, num_warps=warps, num_stages=stages, programs=programs, by_major=facts)


@triton.jit
def _attend(
    query: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, output: tl.tensor, lse: tl.tensor,
    partial_output: tl.tensor, partial_lse: tl.tensor, arrivals: tl.tensor, work: tl.tensor, block_table: tl.tensor,
    row_ends: tl.tensor, sinks: tl.tensor,
    scaling: tl.tensor, softcap: tl.tensor, window: tl.tensor, query_token: tl.tensor, query_head: tl.tensor,
    key_page: tl.tensor, key_head: tl.tensor, key_token: tl.tensor, value_page: tl.tensor, value_head: tl.tensor,
    value_token: tl.tensor, table_stride: tl.tensor, output_token: tl.tensor, key_scale: tl.tensor,
    value_scale: tl.tensor, key_scale_page: tl.tensor, value_scale_page: tl.tensor,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, REPEATS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one tile of query rows, one kv head and one stretch of context for each item."""
    begin_dependent(DEPENDENT)
    d = tl.arange(0, BLOCK_KEY)
    tasks = tl.load(work) * KV_HEADS
    parts_written = 0
    wait_for_earlier(DEPENDENT)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % KV_HEADS
        item = work + (task // KV_HEADS + 1) * _ITEM
        tile_row = tl.arange(0, BLOCK_ROWS) // GROUPS
        member = tl.arange(0, BLOCK_ROWS) % GROUPS
        row = tl.load(item + 1).to(tl.int64) + tile_row
        has_row = tile_row < tl.load(item + 2)
        first_position = tl.load(item + 3)
        first_token = tl.load(item + 4)
        stop = tl.load(item + 5)
        partial = tl.load(item + 6).to(tl.int64)
        position = first_position + tile_row
        last = position
        if row_ends is not None:
            last = tl.load(row_ends + row, mask=has_row, other=0) - 1
            stop = tl.minimum(stop, tl.max(last, axis=0) + 1)
        query_heads = (head * GROUPS + member).to(tl.int64)[:, None] * query_head
        query_rows = query + row[:, None] * query_token + query_heads
        q = tl.load(query_rows + d[None, :], mask=has_row[:, None] & (d < KEY_DIM)[None, :], other=0.0)
        q_rest = None
        if BLOCK_REST > 0:
            rest = BLOCK_KEY + tl.arange(0, BLOCK_REST)
            q_rest = tl.load(query_rows + rest[None, :], mask=has_row[:, None] & (rest < KEY_DIM)[None, :], other=0.0)
        highest = tl.full((BLOCK_ROWS,), _NEVER, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        if sinks is not None:  # noqa: SIM102 - evaluated when compiling; the nested condition is not
            if tl.load(item + 7) != 0:
                highest = tl.load(sinks + head * GROUPS + member).to(tl.float32) * _LOG2_E
                total += 1.0
        sums = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
        # Tokens that every row of the tile sees need no mask. With a window there are hardly any.
        seen = first_token
        if window is None:
            whole = tl.maximum(tl.minimum(stop, first_position + 1) - first_token, 0)
            seen += whole // BLOCK_TOKENS * BLOCK_TOKENS
        kv_head = head // REPEATS
        keys = key_cache + kv_head * key_head
        values = value_cache + kv_head * value_head
        key_scales = key_scale
        value_scales = value_scale
        if key_scale is not None:
            key_scales += kv_head
            value_scales += kv_head
        pages = block_table + tl.load(item).to(tl.int64) * table_stride
        sums, total, highest = absorb(
            q, q_rest, sums, total, highest, keys, values, key_scales, value_scales, pages,
            first_token, seen, position, last, scaling, softcap, window,
            key_page, key_token, value_page, value_token, key_scale_page, value_scale_page,
            KEY_DIM, VALUE_DIM, PAGE, BLOCK_KEY, BLOCK_REST, BLOCK_VALUE, BLOCK_TOKENS, VALUES_IN_KEYS, False,
        )  # fmt: skip
        sums, total, highest = absorb(
            q, q_rest, sums, total, highest, keys, values, key_scales, value_scales, pages,
            seen, stop, position, last, scaling, softcap, window,
            key_page, key_token, value_page, value_token, key_scale_page, value_scale_page,
            KEY_DIM, VALUE_DIM, PAGE, BLOCK_KEY, BLOCK_REST, BLOCK_VALUE, BLOCK_TOKENS, VALUES_IN_KEYS, True,
        )  # fmt: skip
        e = tl.arange(0, BLOCK_VALUE)
        tile_row, member = heads_of_rows(stop, GROUPS, BLOCK_ROWS)
        row = tl.load(item + 1).to(tl.int64) + tile_row
        has_row = tile_row < tl.load(item + 2)
        inside = has_row[:, None] & (e < VALUE_DIM)[None, :]
        # The total of a row that saw no token is 0.
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        if partial < 0:
            out = output + row[:, None] * output_token + (head * GROUPS + member)[:, None] * VALUE_DIM + e[None, :]
            tl.store(out, result.to(output.dtype.element_ty), mask=inside)
            if lse is not None:
                place = (row * KV_HEADS + head) * GROUPS + member
                tl.store(lse + place, (highest + tl.log2(total)) / _LOG2_E, mask=has_row)
        else:
            slot = (partial * KV_HEADS + head) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            tl.store(partial_output + slot[:, None] * VALUE_DIM + e[None, :], result, mask=inside)
            # -inf for a row that saw no token: its weight in the merge is 0.
            tl.store(partial_lse + slot, highest + tl.log2(total), mask=has_row)
            parts_written += 1
    # A separate loop: in the other one, merging would take registers from attention.
    if parts_written > 0:
        merge_last_parts(
            output, lse, partial_output, partial_lse, arrivals, work, tasks, output_token,
            KV_HEADS, GROUPS, VALUE_DIM, BLOCK_VALUE, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def heads_of_rows(count: tl.tensor, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the query row and the head of each row of a tile; `count` is not negative.

    They are computed anew after a loop. The compiler would else keep those from before it in registers that the loop
    needs, as it does not see that the minimum of `count` and 0 is 0.
    """
    place = tl.arange(0, BLOCK_ROWS) + tl.minimum(count, 0)
    return place // GROUPS, place % GROUPS


@triton.jit
def merge_last_parts(
    output: tl.tensor, lse: tl.tensor, partial_output: tl.tensor, partial_lse: tl.tensor, arrivals: tl.tensor,
    work: tl.tensor, tasks: tl.tensor, output_token: tl.tensor,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Count the parts that this program has written, and merge those of each tile that has them all."""
    # All threads have stored their parts before one thread counts them.
    tl.debug_barrier()
    tile_row, member = heads_of_rows(tasks, GROUPS, BLOCK_ROWS)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        item = work + (task // KV_HEADS + 1) * _ITEM
        parts = tl.load(item + 9)
        if parts > 0:
            head = task % KV_HEADS
            first = tl.load(item + 8).to(tl.int64) * KV_HEADS + head
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(arrivals + first, 0)
                row = tl.load(item + 1).to(tl.int64) + tile_row
                has_row = tile_row < tl.load(item + 2)
                lses = lse
                if lse is not None:
                    lses += (row * KV_HEADS + head) * GROUPS + member
                heads = (head * GROUPS + member)[:, None] * VALUE_DIM
                merge_partials(
                    output + row[:, None] * output_token + heads, lses, partial_output, partial_lse, first, parts,
                    has_row, KV_HEADS, VALUE_DIM, BLOCK_VALUE, BLOCK_ROWS,
                )  # fmt: skip


@triton.jit
def absorb(
    q: tl.tensor, q_rest: tl.tensor, sums: tl.tensor, total: tl.tensor, highest: tl.tensor, keys: tl.tensor,
    values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor, pages: tl.tensor, start: tl.tensor,
    stop: tl.tensor, position: tl.tensor, last: tl.tensor, scaling: tl.tensor, softcap: tl.tensor, window: tl.tensor,
    key_page: tl.tensor, key_token: tl.tensor, value_page: tl.tensor, value_token: tl.tensor,
    key_scale_page: tl.tensor, value_scale_page: tl.tensor,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add tokens [start, stop) to (sums, total, highest); MASKED if some row does not see all of them.

    A row at `position` sees tokens up to `last`, which is the position itself except in images.
    `highest` is each row's largest score so far, in units of log 2; `total` and `sums` are relative to `highest`.
    """
    d = tl.arange(0, BLOCK_KEY)
    e = tl.arange(0, BLOCK_VALUE)
    for first in range(start, stop, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        exists = token < stop
        page = tl.load(pages + token // PAGE, mask=exists, other=0).to(tl.int64)
        key_rows = keys + (page * key_page + (token % PAGE) * key_token)[:, None]
        held = tl.load(key_rows + d[None, :], mask=exists[:, None] & (d < KEY_DIM)[None, :], other=0.0)
        k = held
        if key_scales is not None:
            k = from_e4m3(held).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_REST > 0:
            rest = BLOCK_KEY + tl.arange(0, BLOCK_REST)
            k = tl.load(key_rows + rest[None, :], mask=exists[:, None] & (rest < KEY_DIM)[None, :], other=0.0)
            if key_scales is not None:
                k = from_e4m3(k).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
        scores *= scaling
        if key_scales is not None:
            scores *= tl.load(key_scales + page * key_scale_page, mask=exists, other=1.0)[None, :]
        if softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        # exp(x) = exp2(x * log2(e)), and GPUs have an instruction for exp2.
        scores *= _LOG2_E
        if MASKED:
            visible = exists[None, :] & (token[None, :] <= last[:, None])
            if window is not None:
                visible &= token[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, _NEVER)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # The weights of a row that has seen no token yet are 0, not NaN.
        shift = tl.where(new_highest == _NEVER, 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        if VALUES_IN_KEYS:
            v = held
        else:
            value = values + (page * value_page + (token % PAGE) * value_token)[:, None] + e[None, :]
            v = tl.load(value, mask=exists[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        if value_scales is not None:
            value_scale = tl.load(value_scales + page * value_scale_page, mask=exists, other=1.0)
            weights, v = widened(weights, v, value_scale, q.dtype)
        sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
        highest = new_highest
    return sums, total, highest


@triton.jit
def widened(
    weights: tl.tensor, codes: tl.tensor, scales: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return weights and values, of which one is multiplied with the values' scales, one scale for each token."""
    if dtype == tl.float16:  # weights times scales could be too small for it
        return weights, (from_e4m3(codes) * scales[:, None]).to(dtype)
    return weights * scales[None, :], from_e4m3(codes).to(dtype)


@triton.jit
def merge_partials(
    outputs: tl.tensor, lses: tl.tensor, partial_output: tl.tensor, partial_lse: tl.tensor, first: tl.tensor,
    parts: tl.tensor, has_row: tl.tensor,
    KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Join the partial results of one tile of query rows and one kv head, in order; `first` is the place of the first.

    Other programs have written them, so they are read from the cache that all multiprocessors share (`.cg`).
    """
    row = tl.arange(0, BLOCK_ROWS)
    # At most 128 columns at a time: attention's own indices of 512 columns would be kept for here, in its registers.
    BLOCK: tl.constexpr = min(BLOCK_VALUE, 128)
    for first_column in range(0, VALUE_DIM, BLOCK):
        e = first_column + tl.arange(0, BLOCK)[None, :]
        inside = has_row[:, None] & (e < VALUE_DIM)
        highest = tl.full((BLOCK_ROWS,), _NEVER, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        sums = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
        for part in range(parts):
            slot = (first + part * KV_HEADS) * BLOCK_ROWS
            its_lse = tl.load(partial_lse + slot + row, mask=has_row, other=_NEVER, cache_modifier=".cg")
            results = partial_output + slot * VALUE_DIM + row[:, None] * VALUE_DIM
            result = tl.load(results + e, mask=inside, other=0.0, cache_modifier=".cg")
            new_highest = tl.maximum(highest, its_lse)
            shift = tl.where(new_highest == _NEVER, 0.0, new_highest)
            weight = tl.exp2(its_lse - shift)
            decay = tl.exp2(highest - shift)
            sums = sums * decay[:, None] + result * weight[:, None]
            total = total * decay + weight
            highest = new_highest
        merged = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(outputs + e, merged.to(outputs.dtype.element_ty), mask=inside)
        if lses is not None:
            tl.store(lses, (highest + tl.log2(total)) / _LOG2_E, mask=has_row)
