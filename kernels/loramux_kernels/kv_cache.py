"""Semantics: key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import AttentionBatchAbi, KvLayerAbi


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

    @cached_property
    def abi(self) -> KvLayerAbi:
        """Addresses and strides, for the C++ operators."""
        key, value = self.key, self.value
        assert key.stride(3) == value.stride(3) == 1, "a token's row is contiguous"
        return KvLayerAbi(
            key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3],
            self.block_size, key.shape[1], key.shape[3], value.shape[3],
        )  # fmt: skip


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

    @cached_property
    def abi(self) -> AttentionBatchAbi:
        """The tensors' addresses, for the C++ operators."""
        tensors = (self.cu_seqlens, self.context_lens, self.block_table)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors), "tables are contiguous and int32"
        return AttentionBatchAbi(*(tensor.data_ptr() for tensor in tensors), *self.block_table.shape)


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys `[T, num_kv_heads, head_dim_k]` and values `[T, num_kv_heads, head_dim_v]`.

    `slot_mapping` int64[T]; no two tokens share a slot. On a GPU a token whose slot is negative is not stored.
    """
    if runs_triton(key):
        from loramux_kernels.cuda import kv_cache as triton_kv_cache

        triton_kv_cache.write_kv(key, value, layer, slot_mapping)
        return
    if (native := native_for(key)) is None:
        write_kv_reference(key, value, layer, slot_mapping)
        return
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    native.loramux_write_kv(
        key.element_size(),
        layer.abi,
        *(key.data_ptr(), key.stride(0), key.stride(1)),
        *(value.data_ptr(), value.stride(0), value.stride(1)),
        slot_mapping.data_ptr(),
        len(slot_mapping),
        torch.get_num_threads(),
    )


def write_kv_reference(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """`write_kv` in torch, on any device and in any dtype."""
    page = slot_mapping // layer.block_size
    offset = slot_mapping % layer.block_size
    layer.key[page, :, offset] = key
    layer.value[page, :, offset] = value
