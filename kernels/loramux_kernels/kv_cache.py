"""Semantics: key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise.

In FP8, key[page, h, offset] = E4M3(new_key[t, h] / key_scale[page, h]), and a token at offset 0 sets the scale first.
"""

from __future__ import annotations

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.e4m3 import encode, scale_for
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES
from loramux_kernels.tables import KvLayer


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
        DTYPES[key.dtype],
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
    for rows, cache, scales in ((key, layer.key, layer.key_scale), (value, layer.value, layer.value_scale)):
        if scales is None:
            cache[page, :, offset] = rows
            continue
        begins = offset == 0
        scales[page[begins]] = scale_for(rows[begins])
        cache[page, :, offset] = encode(rows, scales[page])
