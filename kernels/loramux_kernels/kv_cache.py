"""Semantics: key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class KvLayer:
    """One layer's keys and values: strided views into the pool, a page holding `block_size` tokens."""

    key: torch.Tensor
    """[num_pages, num_kv_heads, block_size, head_dim_k]"""
    value: torch.Tensor
    """[num_pages, num_kv_heads, block_size, head_dim_v]"""

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[2]


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's sequences: which query rows are whose, and which pages hold their context."""

    cu_seqlens: torch.Tensor
    """int32[S + 1]; query rows of sequence s are cu_seqlens[s]:cu_seqlens[s + 1]."""
    context_lens: torch.Tensor
    """int32[S]; tokens of context after this step, its query rows included."""
    block_table: torch.Tensor
    """int32[S, max_blocks]; entries past a sequence's last page are never read."""
    slot_mapping: torch.Tensor
    """int64[T]; page * block_size + offset of each new token."""

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(first query row, one past the last, context length) of each sequence, on the host."""
        rows = self.cu_seqlens.tolist()
        return tuple(zip(rows, rows[1:], self.context_lens.tolist(), strict=False))


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys `[T, num_kv_heads, head_dim_k]` and values `[T, num_kv_heads, head_dim_v]`.

    `slot_mapping` int64[T]; no two tokens share a slot.
    """
    write_kv_reference(key, value, layer, slot_mapping)


def write_kv_reference(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """`write_kv` in torch, on any device and in any dtype."""
    page = slot_mapping // layer.block_size
    offset = slot_mapping % layer.block_size
    layer.key[page, :, offset] = key
    layer.value[page, :, offset] = value
