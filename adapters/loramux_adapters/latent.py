"""Multi-head latent attention (MLA, DeepSeek-V2, 2024) over its compressed KV, by absorbing the linear that expands it.

A token's compressed KV is a vector c, from which `kv_b_proj` makes the keys and values of every head:

    k = W_k c, v = W_v c        W_k `[key_dim, rank]`, W_v `[value_dim, rank]` of each head

    q . k = (W_k^T q) . c       so a query is multiplied instead of each key,
    sum(p v) = W_v sum(p c)     and the sum over values is taken before the product

The cache then holds c alone, one vector for all heads, and attention sees one key-value head. With an adapter,
`W + s B A` takes the place of W. All tokens of a sequence have one adapter, so a query row's adapter is that of every
key it sees: `W_k^T q + s A^T (B_k^T q)` and `W_v x + s B_v (A x)`, where each head has its own columns of B.

The exception is an activated LoRA, whose rows see earlier keys of the base. Their attention is computed twice, without
the adapter over the keys before the activation and with the adapter over the others, and joined by log-sum-exp.

On a CPU a chunk of many rows is cheaper if its context is expanded: with r = rank, w = key_dim + value_dim and d the
rotary dimension, n rows over m keys take for each head

    absorbed   n r w + n m (2 r + d)      products; each row is multiplied by the weight, each score has r + d products
    expanded   m r w + n m (w + d)        each key is multiplied by the weight

The context is expanded a block at a time, and the blocks' results are joined by log-sum-exp too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.families import LATENT_EXPANSION
from loramux_kernels.device import runs_triton
from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.packed_linear import heads_linear, rows_weight
from loramux_kernels.paged_attention import merge_attention, paged_attention, read_keys
from loramux_kernels.tables import NO_VECTORS, AttentionBatch, HeadColumns, KvLayer, LoraGroup, Segments

EXPANDED_KEYS = 512
"""Tokens of context whose keys and values are expanded at once."""
LEAST_EXPANDED_ROWS = 32
"""A chunk of fewer rows is absorbed: calls for each of its blocks would take longer than the products they save."""


def expansion_elements(widths: Mapping[str, tuple[int, int]]) -> int:
    """Return the elements that a CPU holds to expand compressed KV: each linear that expands it once more, and a block
    of one layer. `widths` are the outputs and inputs of all linears.

    A block is the compressed KV, the linear's outputs, and keys with their rotated part, no wider than the outputs.
    """
    found = [width for name, width in widths.items() if name.endswith(LATENT_EXPANSION)]
    blocks = (EXPANDED_KEYS * (inputs + 2 * outputs) for outputs, inputs in found)
    return sum(map(math.prod, found)) + max(blocks, default=0)


def expands_latents(attention: nn.Module) -> bool:
    """Return whether one of transformers' attention modules has a compressed KV, which its `expand_kv` expands."""
    return hasattr(attention, "expand_kv")


def pass_latents(model: nn.Module) -> None:
    """Have every attention module of `model` with a compressed KV pass it to attention as it is."""
    attentions: list[Any] = [module for module in model.modules() if expands_latents(module)]
    for attention in attentions:
        attention.expand_kv = _join_latents


def _join_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one key head `[1, 1, T, rank + rotary dim]`, and its first elements, `latents`, as values."""
    key = torch.cat((latents, rotated), dim=-1)
    return key, key[..., : latents.shape[-1]]


@contextmanager
def rows_expanded(model: nn.Module) -> Iterator[None]:
    """Have linears that expand a compressed KV get it as `[batch, T, rank]`. transformers passes it as one head, and
    PEFT's activated LoRA on a linear takes no dimension of heads."""
    attentions: list[Any] = [module for module in model.modules() if expands_latents(module)]
    linears: list[nn.Module] = [getattr(attention, LATENT_EXPANSION) for attention in attentions]
    hooks = [linear.register_forward_pre_hook(lambda _, inputs: (inputs[0].squeeze(1),)) for linear in linears]
    hooks += [linear.register_forward_hook(lambda _module, _inputs, output: output.unsqueeze(1)) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class LatentLinear(nn.Module):
    """Replaces the linear that expands a compressed KV, `kv_b_proj`: queries and outputs are multiplied instead."""

    def __init__(
        self,
        weight: torch.Tensor,
        attention: Any,
        site: Site,
        bank: AdapterBank,
        linear: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`weight` is `[heads * (key_dim + value_dim), rank]`; `attention` is transformers' module; `linear` is the
        linear itself with adapters, which expands contexts on a CPU."""
        super().__init__()
        self._key_dim: int = attention.qk_nope_head_dim
        self._dims = (self._key_dim, attention.v_head_dim)
        self._site = site
        self._linear = linear
        self._bank = bank
        rank, step = weight.shape[1], sum(self._dims)
        keys, values = weight.to(bank.pool.dtype).unflatten(0, (-1, step)).split(self._dims, dim=1)
        self.keys = _held(keys.transpose(1, 2))
        """W_k, transposed: `[heads, rank, key_dim]`."""
        self.values = _held(values)
        """W_v: `[heads, value_dim, rank]`."""
        self._rank, heads = rank, len(keys)

        def group(width: int, first: int, step: int, row: int) -> LoraGroup:
            return LoraGroup.of_heads(site.index, heads, HeadColumns(width, first, step, row))

        self._of_latents = group(rank, 0, 0, rank)
        self._of_keys = group(self._key_dim, 0, step, heads * step)
        self._of_values = group(self._dims[1], self._key_dim, step, heads * step)

    def attend(self, query: torch.Tensor, layer: KvLayer, batch: AttentionBatch, scaling: float) -> torch.Tensor:
        """Compute attention of queries `[T, heads, key_dim + rotary dim]`: `[T, heads, value_dim]`."""
        long = [] if runs_triton(query) else [i for i, span in enumerate(batch.spans) if self._expands(*span)]
        if not long:
            return self._attend_absorbed(query, layer, batch, scaling)
        output = query.new_empty(*query.shape[:2], self._dims[1])
        for sequence in long:
            start, stop, _ = batch.spans[sequence]
            output[start:stop] = self._attend_expanded(query[start:stop], layer, batch, sequence, scaling)
        if others := sorted(set(range(len(batch.spans))) - set(long)):
            rows = batch.rows_of(others)
            with self._bank.serving_rows(rows):
                output[rows] = self._attend_absorbed(query[rows], layer, batch.among(others), scaling)
        return output

    def _expands(self, start: int, stop: int, context: int) -> bool:
        """Return whether a sequence's rows `[start, stop)` take fewer products if their context is expanded."""
        rows, width = stop - start, sum(self._dims)
        saved = rows * context * (2 * self._rank - width)
        return rows >= LEAST_EXPANDED_ROWS and saved > (context - rows) * self._rank * width

    def _attend_absorbed(
        self, query: torch.Tensor, layer: KvLayer, batch: AttentionBatch, scaling: float
    ) -> torch.Tensor:
        if batch.activations is None:
            return self.expand(paged_attention(self.absorb(query), layer, batch, scaling))
        earlier, later = batch.parts
        lse, earlier_lse = query.new_empty(2, *query.shape[:2], dtype=torch.float32)
        output = self.expand(paged_attention(self.absorb(query), layer, later, scaling, lse=lse)).float()
        self._add_key_shifts(lse, query, scaling)
        with self._bank.serving(None):
            of_base = self.expand(paged_attention(self.absorb(query), layer, earlier, scaling, lse=earlier_lse))
        merge_attention(output, lse, of_base, earlier_lse)
        return output.to(query.dtype)

    def _add_key_shifts(self, lse: torch.Tensor, query: torch.Tensor, scaling: float) -> None:
        """Add to `lse` what `absorb` leaves out: the shift of all keys changes each score of a row by one number."""
        if (columns := self._columns()) is not None:
            shift = columns[1][..., : self._key_dim].float()
            lse[: len(shift)] += scaling * (query[: len(shift), :, : self._key_dim].float() * shift).sum(-1)

    def _attend_expanded(
        self, query: torch.Tensor, layer: KvLayer, batch: AttentionBatch, sequence: int, scaling: float
    ) -> torch.Tensor:
        """Attend with the rows `query` of one sequence, whose context is expanded block by block."""
        context = batch.spans[sequence][2]
        position = context - len(query)
        output = query.new_zeros(*query.shape[:2], self._dims[1], dtype=torch.float32)
        lse = output.new_full(query.shape[:2], float("-inf"))
        for first, end, slot in self._blocks(batch, sequence):
            expanded = self._expanded(
                read_keys(layer, batch.block_table[sequence], first, end)[0].to(query.dtype), slot
            )
            after = max(0, first - position)
            rows, part_lse = query[after:], lse.new_empty(len(query) - after, query.shape[1])
            part = paged_attention(
                rows, expanded, _block_batch(len(rows), context - first, end - first), scaling, lse=part_lse
            )
            merge_attention(output[after:], lse[after:], part, part_lse)
        return output.to(query.dtype)

    def _blocks(self, batch: AttentionBatch, sequence: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield the blocks of a sequence's context: first position, one past the last, and their adapter's slot."""
        start, _, context = batch.spans[sequence]
        spans = () if self._bank.segments is None else self._bank.segments.spans
        slot = next((slot for slot, first, last in spans if first <= start < last), None)
        activation = 0 if batch.activations is None else int(batch.activations[sequence])
        for first, end in pairwise(sorted({*range(0, context, EXPANDED_KEYS), activation, context})):
            yield first, end, None if first < activation else slot

    def _expanded(self, latents: torch.Tensor, slot: int | None) -> KvLayer:
        """Return the keys and values of one block, a page, from its compressed KV `[n, rank + rotary dim]`."""
        assert self._linear is not None, "given on a CPU"
        compressed, rotated = latents.split((self._rank, latents.shape[1] - self._rank), dim=1)
        with self._bank.serving_slot(slot, len(latents)):
            heads = self._linear(compressed).unflatten(1, (-1, sum(self._dims)))
        keys, values = heads.split(self._dims, dim=2)
        keys = torch.cat((keys, rotated[:, None].expand(-1, keys.shape[1], -1)), dim=2)
        return KvLayer(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[n, rank]` to `[n, heads * (key_dim + value_dim)]`, without adapters."""
        parts = (self.keys.transpose(1, 2), self.values)
        return functional.linear(x, torch.cat([part.to(x.dtype) for part in parts], dim=1).flatten(0, 1))

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Map queries `[T, heads, key_dim + rotary dim]`, already rotated, to `[T, heads, rank + rotary dim]`."""
        bank, segments = self._bank, self._bank.segments
        keys, rotated = query.split((self._key_dim, query.shape[-1] - self._key_dim), dim=-1)
        if (columns := self._columns()) is not None:
            # A shift of all keys changes each of a query's scores by the same number, and no weight.
            keys = _rescaled(keys, columns[0][..., : self._key_dim])
        out = query.new_empty(*query.shape[:2], self._rank + rotated.shape[-1])
        absorbed = out[..., : self._rank]
        absorbed.copy_(heads_linear(keys, self.keys))
        if segments is not None:
            table = bank.table.transposed
            v = lora_shrink(keys, bank.pool, table, self._of_keys, segments)
            lora_expand(v, bank.pool, table, self._of_latents, segments, absorbed)
        if (inputs := self._inputs()) is not None:
            absorbed.copy_(_rescaled(absorbed, inputs[0][:, None]))
        out[..., self._rank :] = rotated
        return out

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Map the sums `[T, heads, rank]` over the compressed KV to those over values, `[T, heads, value_dim]`."""
        bank, segments = self._bank, self._bank.segments
        if (inputs := self._inputs()) is not None:
            mixed = _rescaled(mixed, inputs[0][:, None])
        out = heads_linear(mixed, self.values)
        if segments is not None:
            v = lora_shrink(mixed, bank.pool, bank.table, self._of_latents, segments)
            lora_expand(v, bank.pool, bank.table, self._of_values, segments, out)
        if (columns := self._columns()) is not None:
            factor, shift = (part[..., self._key_dim :] for part in columns)
            out = _rescaled(out, factor, shift)
        return out

    def _columns(self) -> Sequence[torch.Tensor] | None:
        """Return factors and shifts of the linear's outputs, `[rows, heads, key_dim + value_dim]` each; None if no
        adapter of the step has any."""
        extras = self._bank.extras
        if extras is None or extras.columns is None:
            return None
        found = self._vectors(self._bank.vectors.columns, extras.columns, self._site.out_features)
        return [part.unflatten(1, (-1, sum(self._dims))) for part in found]

    def _inputs(self) -> Sequence[torch.Tensor] | None:
        """Return factors of the linear's inputs, `[rows, rank]`; None if no adapter of the step has any."""
        extras = self._bank.extras
        if extras is None or extras.inputs is None:
            return None
        return self._vectors(self._bank.vectors.inputs, extras.inputs, self._rank)

    def _vectors(self, offsets: torch.Tensor, segments: Segments, width: int) -> Sequence[torch.Tensor]:
        """Return the factors and shifts, `[rows, width]` each, of the rows of `segments`; see `lora.rescale`."""
        pool, slots = self._bank.pool, segments.row_slots(offsets.device)
        starts = torch.where(slots < 0, NO_VECTORS, offsets[slots.clamp(min=0), self._site.index])[:, None]
        columns = torch.arange(width, device=offsets.device)
        factor, shift = (pool[starts.clamp(min=0) + first + columns] for first in (0, width))
        return factor.where(starts >= 0, 1.0), shift.where(starts >= 0, 0.0)


def _block_batch(rows: int, context: int, num_keys: int) -> AttentionBatch:
    """Return the batch of a sequence's last `rows` rows, of whose context `[0, context)` one page holds the first
    `num_keys` positions."""
    return AttentionBatch(
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        key_ranges=torch.tensor([[0, num_keys]], dtype=torch.int32),
    )


def _held(weight: torch.Tensor) -> nn.Parameter:
    """Return a copy, because the checkpoint's whole file stays in memory while one tensor refers to it."""
    copied = weight.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(rows_weight(copied), requires_grad=False)


def _rescaled(rows: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """Return `rows` `[T, heads, width]`, of which the first are multiplied by `factor`, and shifted, in float32."""
    changed = rows[: len(factor)].float() * factor.float()
    if shift is not None:
        changed += shift.float()
    return torch.cat((changed.to(rows.dtype), rows[len(factor) :]))
