"""Keys and values in FP8: layers of poisoned pages, attention cases over them, and a cache for transformers."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from attention_cases import Case

from loramux_kernels.e4m3 import decode, encode, scale_for
from loramux_kernels.paged_attention import write_kv_reference
from loramux_kernels.tables import KvLayer

NAN_CODE = 0x7F


def fp8_layer(
    num_pages: int, heads: int, block_size: int, key_dim: int, value_dim: int, has_values_in_keys: bool = False
) -> KvLayer:
    """Pages in which every byte is a NaN and every scale too: the second layer of two, after both layers' scales."""
    sizes = [heads * block_size * dim for dim in (key_dim, value_dim)]
    pool = torch.full((num_pages, 2 * sum(sizes)), NAN_CODE, dtype=torch.uint8)
    scales = torch.full((num_pages, 4, heads), float("nan"))
    key, value = pool[:, sum(sizes) :].split(sizes, dim=1)
    if has_values_in_keys:
        key = key.unflatten(1, (heads, block_size, key_dim))
        return KvLayer(key, key[..., :value_dim], *[scales[:, 2]] * 2, has_values_in_keys=True)
    return KvLayer(
        key.unflatten(1, (heads, block_size, key_dim)),
        value.unflatten(1, (heads, block_size, value_dim)),
        scales[:, 2],
        scales[:, 3],
    )


def decoded(layer: KvLayer) -> KvLayer:
    """The same numbers in float32."""
    assert layer.key_scale is not None
    assert layer.value_scale is not None
    pairs = ((layer.key, layer.key_scale), (layer.value, layer.value_scale))
    return KvLayer(*(decode(codes, scales[:, :, None].expand(codes.shape[:3])) for codes, scales in pairs))


def in_fp8(case: Case) -> Case:
    """The case with its context in FP8, and with the keys and values that are left of it."""
    num_pages, heads, block_size, key_dim = case.layer.key.shape
    is_latent = case.layer.has_values_in_keys
    layer = fp8_layer(num_pages, heads, block_size, key_dim, case.layer.value.shape[3], is_latent)
    keys, values = [], []
    for pages, key, value in zip(case.batch.block_table, case.keys, case.values, strict=True):
        at = torch.arange(len(key))
        slots = pages[at // block_size].long() * block_size + at % block_size
        write_kv_reference(key, value, layer, slots)
        held = decoded(layer)
        keys.append(held.key.transpose(1, 2).flatten(0, 1)[slots])
        values.append(held.value.transpose(1, 2).flatten(0, 1)[slots])
    return replace(case, layer=layer, keys=keys, values=values)


class Fp8Cache(transformers.DynamicCache):
    """A cache of transformers that gives back what pages of `block_size` tokens in FP8 would hold."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self._scales: dict[tuple[int, str], torch.Tensor] = {}
        self._seen: dict[tuple[int, str], int] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step's keys `[1, heads, T, dim]` and values, and return all of the layer."""
        key, value = self._held(key_states, layer_idx, "key"), self._held(value_states, layer_idx, "value")
        return super().update(key, value, layer_idx, *args, **kwargs)

    def _held(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        held, at = [], self._seen.get((layer, side), 0)
        for row in rows.unbind(2):
            if at % self._block_size == 0:
                self._scales[layer, side] = scale_for(row)
            scales = self._scales[layer, side]
            held.append(decode(encode(row, scales), scales).to(rows.dtype))
            at += 1
        self._seen[layer, side] = at
        return torch.stack(held, dim=2)


class Fp8LatentCache(Fp8Cache):
    """The same for a compressed KV, which transformers gives in two parts, and pages hold as one row with one scale."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step's latents `[1, 1, T, rank]` and rotated keys, and return all of the layer."""
        widths = [key_states.shape[-1], value_states.shape[-1]]
        rows = self._held(torch.cat((key_states, value_states), dim=-1), layer_idx, "key")
        latents, rotated = rows.split(widths, dim=-1)
        return transformers.DynamicCache.update(self, latents, rotated, layer_idx, *args, **kwargs)
