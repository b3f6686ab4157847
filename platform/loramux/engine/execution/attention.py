"""Attention over the page pool: KV in pages, and the registered attention function.

transformers lets a registered function replace a model's attention. If no mask function is registered, the mask arrives
as None. Queries and keys arrive rotated. `attend` writes the step's KV into its pages and reads each sequence's own
pages, so the packed batch of one needs no mask and no cache object. It serves the layers that stay transformers' own;
`fused_layers` calls the same kernels for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from loramux_adapters.base import MODEL_LOCK
from loramux_adapters.families import LATENT_EXPANSION
from loramux_adapters.latent import expands_latents, pass_latents
from loramux_kernels.paged_attention import paged_attention, write_kv
from loramux_kernels.tables import AttentionBatch, KvLayer, StateLayer

IMPLEMENTATION = "loramux"
PROBE = "loramux_probe"


class UnsupportedModel(RuntimeError):
    """The base cannot be served correctly through the attention function; the message says why."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionOptions:
    """Arguments that a layer passes to attention in addition to its tensors."""

    scaling: float | None = None
    """Factor of the scores; None: one over the root of key_dim."""
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV for one token, and its options of attention."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: AttentionOptions = AttentionOptions()
    source: int | None = None
    """Index of the earlier layer whose keys and values this layer reads; None: its own."""
    has_values_in_keys: bool = False
    """True if a value is the first elements of its key, as in a compressed KV."""
    num_heads: int = 0
    """Heads of queries."""

    @property
    def scaling(self) -> float:
        """The factor of the scores."""
        return self.key_dim**-0.5 if self.options.scaling is None else self.options.scaling

    @property
    def elements(self) -> int:
        """Elements of key and value together that the layer itself keeps."""
        return self.num_kept_heads * sum(self.kept_dims)

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Elements of a head's key and, unless the key holds it, of its value."""
        return (self.key_dim,) if self.has_values_in_keys else (self.key_dim, self.value_dim)

    @property
    def num_kept_heads(self) -> int:
        """Key-value heads that the layer itself keeps."""
        return self.num_kv_heads if self.source is None else 0


NO_KV = LayerShape(0, 0, 0)
"""Shape of a layer that keeps no KV."""

KINDS_WITHOUT_KV = frozenset(("linear_attention", "conv", "mlp", "moe"))
"""transformers' names of layers without attention, in a config's `layer_types`."""


SCALE_BYTES = torch.float32.itemsize
LEAST_BLOCK_SIZE, MOST_BLOCK_SIZE = 16, 256
"""Bounds, in tokens, of the block size that is chosen if `engine.block_size` is not set."""
ALIGNMENT = 16
"""Bytes: the sizes of pages in FP8, and of the scales at their beginning, are multiples of this number."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of a page of `block_size` tokens: layer after layer, keys `[heads, tokens, dim]`, then values likewise,
    unless they are part of the keys, and at the end a hidden state, if a head for multi-token prediction needs one.

    In FP8 the page begins with the scales of all heads, float32, in the same order.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    itemsize: int
    """Bytes of an element of the pool."""
    is_fp8: bool = False
    hidden_size: int = 0
    """Elements of the hidden state that ends each page, which a head for multi-token prediction reads; 0: no head."""

    def with_head(self, hidden_size: int) -> KvLayout:
        """Return this layout with a layer for the keys and values of the base's head for multi-token prediction, which
        are like those of its first layer with attention, and with a hidden state."""
        layer = next(layer for layer in self.layers if layer.num_kept_heads)
        return replace(self, layers=(*self.layers, layer), hidden_size=hidden_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        num_bytes = self._scale_bytes + self.block_size * self.token_bytes + self._hidden_bytes
        return _aligned(num_bytes) if self.is_fp8 else num_bytes

    @property
    def page_elements(self) -> int:
        """Elements of one page."""
        return self.page_bytes // self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(layer.elements for layer in self.layers) * (1 if self.is_fp8 else self.itemsize)

    def block_size_for(self, elements: int) -> int:
        """Return the smallest block size whose pages hold `elements` elements."""
        return -(-(elements * self.itemsize - self._scale_bytes - self._hidden_bytes) // self.token_bytes)

    def with_block_size(self, wanted: int | None, elements: int) -> KvLayout:
        """Return this layout with pages of `wanted` tokens.

        If that is None, pages have the least power of two of tokens, from 16 to 256, that holds `elements` elements.
        """
        if wanted is None:
            fitting = 1 << (max(self.block_size_for(elements), 1) - 1).bit_length()
            wanted = min(max(fitting, LEAST_BLOCK_SIZE), MOST_BLOCK_SIZE)
        return replace(self, block_size=wanted)

    def views(self, pool: torch.Tensor) -> list[KvLayer]:
        """Return each layer's keys and values as strided views of the flat pool."""
        num_pages = pool.numel() // self.page_elements
        cells = pool.view(torch.uint8) if self.is_fp8 else pool
        scales = pool.view(torch.float32) if self.is_fp8 else None
        start, scale_start = self._scale_bytes, 0
        views: list[KvLayer] = []
        for layer in self.layers:
            if layer.source is not None:
                views.append(replace(views[layer.source], is_read_only=True))
                continue
            sides, its_scales = [], []
            for dim in layer.kept_dims:
                shape = (num_pages, layer.num_kv_heads, self.block_size, dim)
                stride = (self.page_bytes // cells.element_size(), self.block_size * dim, dim, 1)
                sides.append(torch.as_strided(cells, shape, stride, start))
                start += math.prod(shape[1:])
                if scales is not None:
                    to_page = self.page_bytes // SCALE_BYTES
                    its_scales.append(torch.as_strided(scales, shape[:2], (to_page, 1), scale_start))
                    scale_start += layer.num_kv_heads
            if layer.has_values_in_keys:
                sides, its_scales = [sides[0], sides[0][..., : layer.value_dim]], its_scales * 2
            views.append(KvLayer(*sides, *its_scales, has_values_in_keys=layer.has_values_in_keys))
        return views

    def hidden_states(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the hidden states at the ends of pages, `[num_pages, hidden_size]`, as a view of the flat pool."""
        pages = pool.view(-1, self.page_elements)
        return pages[:, self.page_elements - self.hidden_size :]

    @property
    def _hidden_bytes(self) -> int:
        return self.hidden_size * self.itemsize

    @property
    def _scale_bytes(self) -> int:
        num_scales = sum(layer.num_kept_heads * len(layer.kept_dims) for layer in self.layers)
        return _aligned(SCALE_BYTES * num_scales) if self.is_fp8 else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The pool's views and the step's tables, which a forward passes to every layer's attention."""

    layers: list[KvLayer]
    batch: AttentionBatch
    states: Mapping[int, StateLayer] = field(default_factory=dict)
    """States of fixed size by the layer's index."""
    kept_rows: torch.Tensor | None = None
    """int64[n], ascending: the rows whose hidden states are read after the last layer; None: all."""
    causal_batch: AttentionBatch | None = None
    """Tables of layers without a window: `batch` without `row_ends`. None: all layers read `batch`."""

    def batch_of(self, sliding_window: int | None) -> AttentionBatch:
        """Return the tables for a layer with this window."""
        return self.batch if sliding_window is not None or self.causal_batch is None else self.causal_batch


def attend(  # noqa: PLR0913 - the signature is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over packed sequences: write this step's KV into its pages, then read each sequence's own
    pages.

    query `[1, Hq, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]`, already rotated; returns `[1, T, Hq, Dv]`. A
    module with a compressed KV passes it as one head, and queries before they are absorbed (see `latent`).
    """
    assert attention_mask is None, "no mask function is registered, so transformers passes none"
    layer = attention_step.layers[_layer_index(module)]
    if not layer.is_read_only:
        write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), layer, attention_step.batch.slot_mapping)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)
    options: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if (latent := getattr(module, LATENT_EXPANSION, None)) is not None:
        assert not any(option is not None for option in options.values()), "no family with a compressed KV has any"
        return latent.attend(rows, layer, attention_step.batch, scaling).unsqueeze(0), None
    batch = attention_step.batch_of(sliding_window)
    return paged_attention(rows, layer, batch, scaling, **options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend)


_KNOWN = frozenset(
    ("scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal", "position_ids", "cache_position")
)
"""Keywords that `attend` may get from the attention interface. It uses some; the others change nothing without a mask
or outside training.
"""


class _Probe:
    """Records the arguments that a model's layers pass to attention in one forward."""

    def __init__(self) -> None:
        self.seen: dict[int, LayerShape] = {}
        self.calls = 0
        self.ignored: set[str] = set()
        self.uneven: tuple[int, int] | None = None
        """Heads and key-value heads of a layer that do not fit each other."""
        self._keys: dict[int, torch.Tensor] = {}
        """Keys of each layer. A layer that passes the very tensor of an earlier layer shares that layer's KV."""

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        self.calls += 1
        self.ignored |= {name for name, value in kwargs.items() if name not in _KNOWN and value not in (None, False)}
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            self.ignored.add("is_causal=False")
        names = {"scaling": "scaling", "sliding_window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
        options = AttentionOptions(**{name: kwargs.get(keyword) for name, keyword in names.items()})
        if query.shape[1] % key.shape[1]:
            self.uneven = query.shape[1], key.shape[1]
        index = _layer_index(module)
        source = next((layer for layer, keys in self._keys.items() if keys is key), None)
        self._keys.setdefault(index, key)
        is_in_key, heads = _begins_with(key, value), query.shape[1]
        self.seen[index] = LayerShape(
            key.shape[1], key.shape[3], value.shape[3], options, source, is_in_key, num_heads=heads
        )
        width = module.v_head_dim if expands_latents(module) else value.shape[3]
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None


def _begins_with(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Is each `value` the first elements of its `key`, in the same memory?"""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (key, value)]
    return places[0] == places[1] and key.shape[:3] == value.shape[:3] and value.shape[3] <= key.shape[3]


def probe_layers(model: PreTrainedModel, num_tokens: int = 2) -> tuple[LayerShape, ...]:
    """Return every layer's KV shape, learned from one forward of `num_tokens` tokens. From then on the model calls
    `attend`, and a compressed KV is not expanded any more.

    Raises UnsupportedModel if a layer does not call the attention function exactly once (its KV would be lost), or
    passes an argument that `attend` would ignore.
    """
    probe = _Probe()
    with _attention(model, probe):
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=next(model.parameters()).device)
        positions = torch.arange(num_tokens, device=tokens.device)[None]
        try:
            # A tensor, as in a step: for a number, some models compute fewer rows in layers that share KV.
            model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=positions[0, -1:])
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedModel(f"{_kind(model)} cannot run on a packed batch: {error}") from error
    if probe.ignored:
        raise UnsupportedModel(
            f"{_kind(model)} asks attention for {', '.join(sorted(probe.ignored))}, which would be ignored; "
            f"correct its config.json or give another checkpoint."
        )
    if probe.uneven is not None:
        raise UnsupportedModel(
            f"{_kind(model)} has {probe.uneven[0]} heads and {probe.uneven[1]} key-value heads, which do not divide "
            "them; correct num_attention_heads and num_key_value_heads in its config.json."
        )
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    attending = [index for index, kind in enumerate(kinds) if kind not in KINDS_WITHOUT_KV]
    if not attending:
        raise UnsupportedModel(
            f"{_kind(model)} has no layer with attention, and the size of the pool's pages is that of the KV of "
            "attention; serve a model some of whose layers have attention."
        )
    if probe.calls != len(attending) or sorted(probe.seen) != attending:
        raise UnsupportedModel(
            f"{_kind(model)} called the attention function {probe.calls} times for {len(attending)} layers; "
            f"it does its own attention, which a shared page pool cannot serve."
        )
    return tuple(probe.seen.get(index, NO_KV) for index in range(num_layers))


@contextmanager
def _attention(model: PreTrainedModel, function: _Probe) -> Iterator[None]:
    with MODEL_LOCK:  # only one function can have the name at a time, and other threads may load engines
        AttentionInterface.register(PROBE, function)
        model.set_attn_implementation(PROBE)
        pass_latents(model)
        try:
            yield
        finally:
            model.set_attn_implementation(IMPLEMENTATION)


def _kind(model: PreTrainedModel) -> str:
    return type(model).__name__


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int), "transformers numbers its attention modules"
    return index
