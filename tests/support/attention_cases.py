"""Packed sequences whose context is in a poisoned cache, and float64 attention over it without pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from loramux_kernels.paged_attention import merge_attention, write_kv_reference
from loramux_kernels.tables import AttentionBatch, KvLayer


@dataclass(frozen=True)
class Shape:
    """A model's attention."""

    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    has_values_in_keys: bool = False


@dataclass(frozen=True)
class Case:
    """Packed sequences whose whole context is in a poisoned cache."""

    query: torch.Tensor
    layer: KvLayer
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def to(self, device: torch.device) -> Case:
        """The same case on `device`. `keys` and `values` are not copied and stay where they are."""
        pool = self.layer.key.untyped_storage().clone()
        pool = torch.tensor([], dtype=self.layer.key.dtype).set_(pool).to(device)
        views = (
            torch.as_strided(pool, v.shape, v.stride(), v.storage_offset()) for v in (self.layer.key, self.layer.value)
        )
        is_latent = self.layer.has_values_in_keys
        scales = [s if s is None else s.to(device) for s in (self.layer.key_scale, self.layer.value_scale)]
        scales = scales[:1] * 2 if is_latent else scales
        fields = vars(self.batch)
        tensors: dict[str, Any] = {n: v.to(device) for n, v in fields.items() if isinstance(v, torch.Tensor)}
        layer = KvLayer(*views, *scales, has_values_in_keys=is_latent)
        return replace(self, query=self.query.to(device), layer=layer, batch=AttentionBatch(**tensors))


def make_case(sequences: list[tuple[int, int]], dtype: torch.dtype, shape: Shape = Shape(), seed: int = 0) -> Case:
    """`sequences`: (query rows, context length) each; pages are handed out in a random order."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-context // shape.block_size) for _, context in sequences]
    num_pages = sum(pages_of) + 2
    order = torch.randperm(num_pages, generator=generator)
    # One page holds two layers, of which this is the second: strides are not those of a contiguous tensor.
    size_k = shape.kv_heads * shape.block_size * shape.key_dim
    size_v = 0 if shape.has_values_in_keys else shape.kv_heads * shape.block_size * shape.value_dim
    pool = torch.full((num_pages, 2 * (size_k + size_v)), float("nan"), dtype=dtype)
    start = size_k + size_v
    key = pool[:, start : start + size_k].unflatten(1, (shape.kv_heads, shape.block_size, shape.key_dim))
    if shape.has_values_in_keys:
        value = key[..., : shape.value_dim]
    else:
        value = pool[:, start + size_k :].unflatten(1, (shape.kv_heads, shape.block_size, shape.value_dim))
    layer = KvLayer(key, value, has_values_in_keys=shape.has_values_in_keys)
    block_table = torch.full((len(sequences), max(pages_of)), -1, dtype=torch.int32)
    keys, values, slots, first = [], [], [], 0
    for row, ((count, context), pages) in enumerate(zip(sequences, pages_of, strict=True)):
        block_table[row, :pages] = order[first : first + pages]
        first += pages
        keys.append(torch.randn(context, shape.kv_heads, shape.key_dim, generator=generator).to(dtype))
        if shape.has_values_in_keys:
            values.append(keys[-1][..., : shape.value_dim])
        else:
            values.append(torch.randn(context, shape.kv_heads, shape.value_dim, generator=generator).to(dtype))
        at = torch.arange(context)
        slot = block_table[row][at // shape.block_size].long() * shape.block_size + at % shape.block_size
        write_kv_reference(keys[-1], values[-1], layer, slot)
        slots.append(slot[context - count :])
    counts = torch.tensor([0] + [count for count, _ in sequences])
    batch = AttentionBatch(
        cu_seqlens=counts.cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.cat(slots),
    )
    query = torch.randn(int(counts.sum()), shape.query_heads, shape.key_dim, generator=generator).to(dtype)
    return Case(query, layer, batch, keys, values)


def with_images(case: Case, images: list[tuple[int, int, int]]) -> Case:
    """Let the rows of images, (sequence, first position, end) each, see to the ends of their images."""
    spans = case.batch.spans
    ends = torch.cat([torch.arange(context - stop + start, context) for start, stop, context in spans]).int() + 1
    for sequence, first, end in images:
        start, stop, context = spans[sequence]
        to_row = stop - context
        ends[max(start, first + to_row) : end + to_row] = end
    return replace(case, batch=replace(case.batch, row_ends=ends))


def expected(
    case: Case, scaling: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """float64 on the CPU, wherever the case is."""
    outputs = []
    for (start, stop, context), key, value in zip(case.batch.spans, case.keys, case.values, strict=True):
        groups = case.query.shape[1] // key.shape[1]
        q = case.query[start:stop].cpu().double()
        scores = torch.einsum("qhd,khd->hqk", q, key.double().repeat_interleave(groups, 1)) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at, other = torch.arange(context - (stop - start), context)[:, None], torch.arange(context)
        ends = case.batch.row_ends
        hidden = other > at if ends is None else other >= ends[start:stop, None].cpu()
        if window:
            hidden |= other <= at - window
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp().view(-1, 1, 1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights / total, value.double().repeat_interleave(groups, 1)))
    return torch.cat(outputs)


def check_ranges(case: Case, attend: Callable[..., torch.Tensor], tolerance: float) -> None:
    """Attend to two ranges of each sequence's context, one of which may be empty, and join the results."""
    scaling, spans = case.query.shape[2] ** -0.5, case.batch.spans
    cuts = torch.tensor([(context - stop + start) * i // 3 for i, (start, stop, context) in enumerate(spans)])
    ends = case.batch.context_lens
    parts = []
    for first, last in ((torch.zeros_like(ends), cuts.int()), (cuts.int(), ends)):
        batch = replace(case.batch, key_ranges=torch.stack((first, last), dim=1))
        lse = torch.empty(case.query.shape[:2], device=case.query.device)
        parts.append((attend(case.query, case.layer, batch, scaling, lse=lse).float(), lse))
    (output, lse), (other, other_lse) = parts[::-1]
    empty = slice(*spans[0][:2])
    assert (other[empty] == 0).all(), "the first sequence is not cut"
    assert (other_lse[empty] == -torch.inf).all()
    merge_attention(output, lse, other, other_lse)
    wanted = expected(case, scaling, None, None, None)
    torch.testing.assert_close(output.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
