"""Semantics: key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.tables import KvLayer


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys and values, both in one launch. Arguments as for the public operator, on a GPU.

    A token whose slot is negative is not stored, so that padding rows of a captured step need no page.
    """
    if len(slot_mapping):
        prepare_write_kv(key, value, layer, slot_mapping).run()


def prepare_write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> Launch:
    """The launch that stores keys and values: a program for each token."""
    tensors = (key, value, layer.key, layer.value)
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "each head's vector is contiguous"
    names = ("key", "value", "key_cache", "value_cache")
    arguments: dict[str, object] = dict(zip(names, tensors, strict=True))
    for name, tensor in zip(names[:2], tensors[:2], strict=True):
        arguments |= {f"{name}_token": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    for name, cache in zip(names[2:], tensors[2:], strict=True):
        arguments |= {f"{name}_{axis}": cache.stride(i) for i, axis in enumerate(("page", "head", "token"))}
    arguments |= {
        "slot_mapping": slot_mapping,
        "block_size": layer.block_size,
        "NUM_HEADS": key.shape[1],
        "KEY_DIM": key.shape[2],
        "VALUE_DIM": value.shape[2],
        "BLOCK_HEADS": triton.next_power_of_2(key.shape[1]),
        "BLOCK_KEY": triton.next_power_of_2(key.shape[2]),
        "BLOCK_VALUE": triton.next_power_of_2(value.shape[2]),
    }
    return Launch(_write_kv, (len(slot_mapping),), arguments, num_warps=4, num_stages=1)


@triton.jit
def _write_kv(
    key: tl.tensor, value: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, slot_mapping: tl.tensor,
    block_size: tl.tensor, key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    key_cache_page: tl.tensor, key_cache_head: tl.tensor, key_cache_token: tl.tensor, value_cache_page: tl.tensor,
    value_cache_head: tl.tensor, value_cache_token: tl.tensor,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        page = slot // block_size
        offset = slot % block_size
        to_key = key_cache + page * key_cache_page + offset * key_cache_token
        _copy_heads(
            key + token * key_token, key_head, to_key, key_cache_head, NUM_HEADS, KEY_DIM, BLOCK_HEADS, BLOCK_KEY
        )
        to_value = value_cache + page * value_cache_page + offset * value_cache_token
        _copy_heads(
            value + token * value_token,
            value_head,
            to_value,
            value_cache_head,
            NUM_HEADS,
            VALUE_DIM,
            BLOCK_HEADS,
            BLOCK_VALUE,
        )


@triton.jit
def _copy_heads(
    source: tl.tensor, source_head: tl.tensor, target: tl.tensor, target_head: tl.tensor,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    element = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < NUM_HEADS) & (element < DIM)
    values = tl.load(source + head.to(tl.int64) * source_head + element, mask=inside)
    tl.store(target + head.to(tl.int64) * target_head + element, values, mask=inside)
