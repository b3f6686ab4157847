"""Operators between the linears of a decoder layer, as Triton kernels.

Semantics:

    rms_norm        y = norm(x) = x / sqrt(mean(x^2) + eps) * weight, by row; with a delta, x += factor * delta first
    gated           y = activation(gate) * up, elementwise
    rope_write_kv   q = turn(norm(q)) in place; key[page, :, offset] = turn(norm(k)); value[page, :, offset] = v

An adapter may bring its own weight for a norm. `rms_norm` then multiplies the adapter's rows with that weight, which it
reads from the pool. In FP8 `rope_write_kv` first rounds turned keys to the dtype of the queries and then stores them as
`write_kv` does, in two launches: first the tokens that begin a page, then the others. Each launch turns the queries of
its tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.dependent_launch import begin_dependent, wait_for_earlier
from loramux_kernels.cuda.e4m3 import magnitude, page_scale, passes, reciprocal, scale_arguments, to_e4m3
from loramux_kernels.cuda.launch import Launch, run_all
from loramux_kernels.cuda.paged_attention import store_heads
from loramux_kernels.tables import KvLayer, Norm, OwnWeights, Rotation

GATED_COLUMNS = 1024
"""Columns that a program of `gated` takes."""


def rms_norm(
    x: torch.Tensor, norm: Norm, delta: torch.Tensor | None, factor: float, own: OwnWeights | None = None
) -> torch.Tensor:
    """Normalise rows in one launch, after adding `delta`. Arguments as for the public operator, on a GPU."""
    y = x.new_empty(x.shape)
    if len(x):
        prepare_rms_norm(x, norm, delta, factor, y, own).run()
    return y


def prepare_rms_norm(
    x: torch.Tensor,
    norm: Norm,
    delta: torch.Tensor | None,
    factor: float,
    y: torch.Tensor,
    own: OwnWeights | None = None,
) -> Launch:
    """Return the launch that fills `y`, and changes `x` if there is a delta: a program for each row."""
    assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert delta is None or delta.stride(1) == 1, "rows are contiguous"
    width = x.shape[1]
    arguments = {
        "x": x,
        "delta": delta,
        "weight": norm.weight,
        "y": y,
        "pool": None if own is None else own.pool,
        "offsets": None if own is None else own.offsets,
        "row_slots": None if own is None else own.segments.row_slots(x.device),
        "norm": 0 if own is None else own.norm,
        "num_owned": 0 if own is None else own.segments.rows * own.vectors,
        "vectors": 0 if own is None else own.vectors,
        "num_norms": 0 if own is None else own.offsets.shape[1],
        "added": 0.0 if own is None else own.added,
        "x_row": x.stride(0),
        "delta_row": 0 if delta is None else delta.stride(0),
        "y_row": y.stride(0),
        "width": width,
        "eps": norm.eps,
        "factor": factor,
        "HAS_DELTA": delta is not None,
        "ROUNDS_FIRST": norm.rounds_first,
        "BLOCK": triton.next_power_of_2(width),
    }
    return Launch(_rms_norm, (len(x),), arguments, num_warps=min(8, max(1, width // 512)), num_stages=1)


@triton.jit(do_not_specialize=["norm", "num_owned"])
def _rms_norm(
    x: tl.tensor, delta: tl.tensor, weight: tl.tensor, y: tl.tensor, pool: tl.tensor, offsets: tl.tensor,
    row_slots: tl.tensor, norm: tl.tensor, num_owned: tl.tensor, vectors: tl.tensor, num_norms: tl.tensor,
    added: tl.tensor, x_row: tl.tensor, delta_row: tl.tensor, y_row: tl.tensor, width: tl.tensor, eps: tl.tensor,
    factor: tl.tensor,
    HAS_DELTA: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factors = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_earlier(DEPENDENT)
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        # Rounded twice, as the reference's two operators round.
        change = tl.load(delta + row * delta_row + column, mask=inside, other=0.0).to(tl.float32) * factor
        values += change.to(y.dtype.element_ty).to(tl.float32)
        rounded = values.to(y.dtype.element_ty)
        tl.store(x + row * x_row + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    values = over_root_mean_square(values, width, eps, y.dtype.element_ty, ROUNDS_FIRST)
    if pool is not None:
        slot = tl.load(row_slots + row // vectors, mask=row < num_owned, other=-1)
        start = tl.load(offsets + slot * num_norms + norm, mask=slot >= 0, other=-1)
        if start >= 0:
            factors = tl.load(pool + start + column, mask=inside, other=0.0).to(tl.float32) + added
    values *= factors
    tl.store(y + row * y_row + column, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def over_root_mean_square(
    values: tl.tensor, width: tl.tensor, eps: tl.tensor, dtype: tl.constexpr, ROUNDS_FIRST: tl.constexpr
) -> tl.tensor:
    """Divide a row of float32 values, zeros after its `width`, by the root of their mean square."""
    values *= 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    return values.to(dtype).to(tl.float32) if ROUNDS_FIRST else values


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Multiply the activated `gate` with `up`, in one launch. Arguments as for the public operator, on a GPU."""
    y = gate.new_empty(gate.shape)
    if len(gate):
        prepare_gated(gate, up, activation, y).run()
    return y


def prepare_gated(gate: torch.Tensor, up: torch.Tensor, activation: str, y: torch.Tensor) -> Launch:
    """Return the launch that fills `y`: a program for each row and block of columns."""
    assert gate.stride(1) == up.stride(1) == y.stride(1) == 1, "rows are contiguous"
    rows, width = gate.shape
    arguments = {
        "gate": gate,
        "up": up,
        "y": y,
        "gate_row": gate.stride(0),
        "up_row": up.stride(0),
        "width": width,
        "IS_SILU": activation == "silu",
        "BLOCK_COLUMNS": GATED_COLUMNS,
    }
    return Launch(_gated, (rows, triton.cdiv(width, GATED_COLUMNS)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _gated(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, gate_row: tl.tensor, up_row: tl.tensor, width: tl.tensor,
    IS_SILU: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < width
    x = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    active = activated(x, IS_SILU)
    passed = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    product = active.to(y.dtype.element_ty).to(tl.float32) * passed
    tl.store(y + row * width + column, product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def activated(x: tl.tensor, IS_SILU: tl.constexpr) -> tl.tensor:
    """Return silu(x), or else gelu(x) by its approximation with tanh; float32."""
    if IS_SILU:
        return x / (1.0 + tl.exp(-x))
    # gelu(x) ~ x * sigmoid(2 u): tanh(u) = 2 * sigmoid(2 u) - 1
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
) -> None:
    """Turn queries in place and store turned keys and values: one launch, in FP8 two.

    Arguments as for the public operator. A token with a negative slot is not stored: padding rows of a captured step
    have no page.
    """
    if len(query):
        run_all(prepare_rope(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm))


def prepare_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
) -> list[Launch]:
    """Return the launches: a program for each token and key head, with the query heads that read that head."""
    heads, kv_heads = query.shape[1], key.shape[1]
    arguments = rope_arguments(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)
    arguments |= {"GROUP": heads // kv_heads, "BLOCK_GROUP": triton.next_power_of_2(heads // kv_heads)}
    grid = (len(query), kv_heads)
    return [
        Launch(_rope_write_kv, grid, arguments | {"BEGINS": begins}, num_warps=2, num_stages=1)
        for begins in passes(layer)
    ]


def rope_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
) -> dict[str, object]:
    """Return the arguments of a kernel that turns heads and stores keys and values."""
    tensors = {"query": query, "key": key, "value": value, "key_cache": layer.key, "value_cache": layer.value}
    assert all(tensor.stride(-1) == 1 for tensor in tensors.values()), "each head's vector is contiguous"
    assert rotation is None or rotation.cos.stride() == rotation.sin.stride(), "cos and sin lie alike"
    assert query_norm is None or key_norm is None or query_norm.eps == key_norm.eps, "one eps for both"
    key_dim, rotary = query.shape[2], 0 if rotation is None else rotation.cos.shape[1]
    arguments: dict[str, object] = dict(tensors)
    for name in ("query", "key", "value"):
        arguments |= {f"{name}_token": tensors[name].stride(0), f"{name}_head": tensors[name].stride(1)}
    for name in ("key_cache", "value_cache"):
        arguments |= {f"{name}_{axis}": tensors[name].stride(i) for i, axis in enumerate(("page", "head", "token"))}
    return arguments | {
        **scale_arguments(layer),
        "cos": None if rotation is None else rotation.cos,
        "sin": None if rotation is None else rotation.sin,
        "rotation_token": 0 if rotation is None else rotation.cos.stride(0),
        "query_weight": None if query_norm is None else query_norm.weight,
        "key_weight": None if key_norm is None else key_norm.weight,
        "eps": 0.0 if query_norm is None else query_norm.eps,
        "slot_mapping": slot_mapping,
        "block_size": layer.block_size,
        "ROUNDS_FIRST": query_norm is not None and query_norm.rounds_first,
        "KEY_DIM": key_dim,
        "HALF": rotary // 2,
        "VALUE_DIM": value.shape[2],
        "BLOCK_HALF": triton.next_power_of_2(max(rotary // 2, 1)),
        "BLOCK_REST": triton.next_power_of_2(max(key_dim - rotary, 1)),
        "BLOCK_VALUE": triton.next_power_of_2(value.shape[2]),
    }


@triton.jit
def _rope_write_kv(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor,
    key_scale: tl.tensor, value_scale: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_weight: tl.tensor,
    key_weight: tl.tensor, slot_mapping: tl.tensor, eps: tl.tensor, block_size: tl.tensor, rotation_token: tl.tensor,
    query_token: tl.tensor, query_head: tl.tensor, key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor,
    value_head: tl.tensor, key_cache_page: tl.tensor, key_cache_head: tl.tensor, key_cache_token: tl.tensor,
    value_cache_page: tl.tensor, value_cache_head: tl.tensor, value_cache_token: tl.tensor, key_scale_page: tl.tensor,
    value_scale_page: tl.tensor,
    ROUNDS_FIRST: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BEGINS: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    begin_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    wait_for_earlier(DEPENDENT)
    if BEGINS is not None:  # noqa: SIM102 - evaluated when compiling; the nested condition is not
        if (slot % block_size == 0) != BEGINS:
            return
    if cos is not None:
        cos += token * rotation_token
        sin += token * rotation_token
    heads = query + token * query_token + kv_head * GROUP * query_head
    turn(
        heads, query_head, heads, query_head, None, cos, sin, query_weight, eps,
        ROUNDS_FIRST, GROUP, KEY_DIM, HALF, BLOCK_GROUP, BLOCK_HALF, BLOCK_REST, None,
    )  # fmt: skip
    if slot >= 0:
        page = slot // block_size
        offset = slot % block_size
        if BEGINS is not None:
            key_scale += page * key_scale_page + kv_head
            value_scale += page * value_scale_page + kv_head
        to_key = key_cache + page * key_cache_page + kv_head * key_cache_head + offset * key_cache_token
        turn(
            key + token * key_token + kv_head * key_head, key_head, to_key, 0, key_scale, cos, sin, key_weight, eps,
            ROUNDS_FIRST, 1, KEY_DIM, HALF, 1, BLOCK_HALF, BLOCK_REST, BEGINS,
        )  # fmt: skip
        to_value = value_cache + page * value_cache_page + kv_head * value_cache_head + offset * value_cache_token
        store_heads(
            value + token * value_token + kv_head * value_head, 0, to_value, 0, value_scale,
            1, VALUE_DIM, 1, BLOCK_VALUE, BEGINS,
        )  # fmt: skip


@triton.jit
def turn(
    source: tl.tensor, source_head: tl.tensor, target: tl.tensor, target_head: tl.tensor, scales: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, weight: tl.tensor, eps: tl.tensor,
    ROUNDS_FIRST: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BEGINS: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise and turn HEADS vectors. A vector is two halves of turned elements, then elements that are not turned.

    If BEGINS is None, they keep their dtype; else they are stored as E4M3 in units of the page's `scales`.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    other = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_pair = (head < HEADS) & (pair < HALF)
    in_rest = (head < HEADS) & (other < DIM)
    start = source + head.to(tl.int64) * source_head
    first = tl.load(start + pair, mask=in_pair, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + pair, mask=in_pair, other=0.0).to(tl.float32)
    rest = tl.load(start + other, mask=in_rest, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        first *= scale
        second *= scale
        rest *= scale
        if ROUNDS_FIRST:
            first = first.to(dtype).to(tl.float32)
            second = second.to(dtype).to(tl.float32)
            rest = rest.to(dtype).to(tl.float32)
        first = (first * tl.load(weight + pair, mask=pair < HALF, other=0.0)).to(dtype).to(tl.float32)
        second = (second * tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0)).to(dtype).to(tl.float32)
        rest = rest * tl.load(weight + other, mask=other < DIM, other=0.0)
    if cos is not None:
        cos_first = tl.load(cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        turned = (first * cos_first - second * sin_first).to(dtype)
        second = (second * cos_second + first * sin_second).to(dtype)
        first = turned
    rest = rest.to(dtype)
    if BEGINS is not None:
        rest = rest.to(tl.float32)
        largest = tl.max(magnitude(rest), axis=1)
        if cos is not None:
            first = first.to(tl.float32)
            second = second.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.maximum(magnitude(first), magnitude(second)), axis=1))
        inverse = reciprocal(page_scale(scales + head, largest[:, None], head < HEADS, BEGINS))
        rest = to_e4m3(rest * inverse)
        if cos is not None:
            first = to_e4m3(first * inverse)
            second = to_e4m3(second * inverse)
    to = target + head.to(tl.int64) * target_head
    if cos is not None:
        tl.store(to + pair, first, mask=in_pair)
        tl.store(to + HALF + pair, second, mask=in_pair)
    tl.store(to + other, rest, mask=in_rest)
