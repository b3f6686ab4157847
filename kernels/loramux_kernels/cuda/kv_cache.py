"""Semantics: key[page, :, offset] = new_key[t], slot_mapping[t] = page * block_size + offset; values likewise.

In FP8, key[page, h, offset] = E4M3(new_key[t, h] / key_scale[page, h]), and a token at offset 0 sets the scale first:
the tokens that begin a page have a launch of their own, before that of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.e4m3 import magnitude, page_scale, passes, reciprocal, scale_arguments, to_e4m3
from loramux_kernels.cuda.launch import Launch, run_all
from loramux_kernels.tables import KvLayer


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor) -> None:
    """Store the step's new keys and values, both in one launch, or in FP8 in two.

    Arguments as for the public operator, on a GPU. A token whose slot is negative is not stored, so that padding rows
    of a captured step need no page.
    """
    if len(slot_mapping):
        run_all(prepare_write_kv(key, value, layer, slot_mapping))


def prepare_write_kv(
    key: torch.Tensor, value: torch.Tensor, layer: KvLayer, slot_mapping: torch.Tensor
) -> list[Launch]:
    """The launches that store keys and values: a program for each token."""
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
        "VALUE_DIM": value.shape[2],
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
    if BEGINS is not None:  # noqa: SIM102 - known when compiling; what is nested in it is not
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
