"""Semantics: q = turn(norm(q)) in place; key[page, :, offset] = turn(norm(k)); value[page, :, offset] = v."""

from __future__ import annotations

import ctypes

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.kv_cache import write_kv_reference
from loramux_kernels.native import native_for
from loramux_kernels.native.abi import DTYPES, MAX_HEAD_DIM, NormAbi, RopeAbi
from loramux_kernels.rms_norm import rms_norm_reference
from loramux_kernels.tables import KvLayer, Norm, Rotation


def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> None:
    """Turn queries in place by their positions (RoPE, Su et al., 2021), and store turned keys, and values, in pages.

    `query` `[T, Hq, Dk]`, `key` `[T, Hkv, Dk]`, `value` `[T, Hkv, Dv]`, last dimensions contiguous; `slot_mapping` as
    for `write_kv`. `query_norm` and `key_norm` normalise each head first. Without a rotation nothing turns.
    """
    if runs_triton(query):
        from loramux_kernels.cuda import rope as triton_rope

        triton_rope.rope_write_kv(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)
    elif (native := native_for(query)) is not None and query.shape[2] <= MAX_HEAD_DIM:
        _turn_natively(native, query, key, value, rotation, layer, slot_mapping, (query_norm, key_norm))
    else:
        rope_write_kv_reference(query, key, value, rotation, layer, slot_mapping, query_norm, key_norm)


def _turn_natively(
    native: ctypes.CDLL,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    norms: tuple[Norm | None, Norm | None],
) -> None:
    call = RopeAbi(
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        None if rotation is None else rotation.cos.data_ptr(),
        None if rotation is None else rotation.sin.data_ptr(),
        slot_mapping.data_ptr(),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        query.shape[0], query.shape[1], 0 if rotation is None else rotation.cos.shape[1],
        rotation is not None and rotation.cos.dtype == torch.float32,
        *(NormAbi() if norm is None else norm.abi for norm in norms),
    )  # fmt: skip
    native.loramux_rope(DTYPES[query.dtype], call, layer.abi, torch.get_num_threads())


def rope_write_kv_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> None:
    """`rope_write_kv` in torch, on any device and in any floating dtype."""
    query.copy_(_turned(query, rotation, query_norm))
    write_kv_reference(_turned(key, rotation, key_norm), value, layer, slot_mapping)


def _turned(heads: torch.Tensor, rotation: Rotation | None, norm: Norm | None) -> torch.Tensor:
    if norm is not None:
        heads = rms_norm_reference(heads, norm)
    if rotation is None:
        return heads
    cos, sin = rotation.cos.float()[:, None], rotation.sin.float()[:, None]
    turning, rest = heads[..., : cos.shape[-1]].float(), heads[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(heads.dtype), rest), dim=-1)
