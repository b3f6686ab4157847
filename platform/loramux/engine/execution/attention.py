"""KV in the page pool, and the attention function of the layers that stay transformers' own (see fused_layers).

transformers lets a model's attention be replaced by a registered function. With no mask function registered the mask
arrives as None, queries and keys arrive rotated. The function writes the step's KV into its pages and reads each
sequence's own pages, so the packed batch of one needs no mask and no cache object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from loramux_adapters.base import MODEL_LOCK
from loramux_kernels import AttentionBatch, KvLayer, paged_attention, write_kv

IMPLEMENTATION = "loramux"
PROBE = "loramux_probe"


class UnsupportedModel(RuntimeError):
    """The base cannot be served correctly through the attention function; the message says why."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionOptions:
    """Arguments that a layer passes to attention beside its tensors."""

    scaling: float | None = None
    """None: one over the root of key_dim."""
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV for one token, and how it attends."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: AttentionOptions = AttentionOptions()

    @property
    def scaling(self) -> float:
        """The factor of the scores."""
        return self.key_dim**-0.5 if self.options.scaling is None else self.options.scaling

    @property
    def elements(self) -> int:
        """Elements of key and value together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


NO_KV = LayerShape(0, 0, 0)
"""Of a layer with linear attention."""


SCALE_BYTES = torch.float32.itemsize
ALIGNMENT = 16
"""Bytes of which pages in FP8, and the scales that they begin with, are a multiple."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of a page of `block_size` tokens: layer after layer, keys `[heads, tokens, dim]`, then values likewise.

    In FP8 the scales of all heads stand before them, float32, in the same order.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    itemsize: int
    """Bytes of an element of the pool."""
    is_fp8: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        num_bytes = self._scale_bytes + self.block_size * self.token_bytes
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
        return -(-(elements * self.itemsize - self._scale_bytes) // self.token_bytes)

    def views(self, pool: torch.Tensor) -> list[KvLayer]:
        """Return each layer's keys and values as strided views of the flat pool."""
        num_pages = pool.numel() // self.page_elements
        cells = pool.view(torch.uint8) if self.is_fp8 else pool
        scales = pool.view(torch.float32) if self.is_fp8 else None
        start, scale_start, views = self._scale_bytes, 0, []
        for layer in self.layers:
            sides, its_scales = [], []
            for dim in (layer.key_dim, layer.value_dim):
                shape = (num_pages, layer.num_kv_heads, self.block_size, dim)
                stride = (self.page_bytes // cells.element_size(), self.block_size * dim, dim, 1)
                sides.append(torch.as_strided(cells, shape, stride, start))
                start += math.prod(shape[1:])
                if scales is not None:
                    to_page = self.page_bytes // SCALE_BYTES
                    its_scales.append(torch.as_strided(scales, shape[:2], (to_page, 1), scale_start))
                    scale_start += layer.num_kv_heads
            views.append(KvLayer(*sides, *its_scales))
        return views

    @property
    def _scale_bytes(self) -> int:
        return _aligned(2 * SCALE_BYTES * sum(layer.num_kv_heads for layer in self.layers)) if self.is_fp8 else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class StateStep:
    """The sequences of one step and the pages of their states."""

    tables: torch.Tensor
    """int64[S, state pages]"""
    spans: tuple[tuple[int, int, int], ...]
    """(first row, one past the last, context length after the step) of each sequence."""

    @cached_property
    def decoding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows int64[n] that are one later token of a sequence each, and the tables of these; None without any."""
        found = [(i, start) for i, (start, stop, context) in enumerate(self.spans) if stop - start == 1 < context]
        if not found:
            return None
        sequences, rows = torch.tensor(found, device=self.tables.device).T
        return rows, self.tables[sequences]

    @cached_property
    def prompts(self) -> list[tuple[slice, torch.Tensor, bool]]:
        """Rows, table `[1, state pages]` and whether they begin the sequence, of each other sequence."""
        return [
            (slice(start, stop), self.tables[i : i + 1], stop - start == context)
            for i, (start, stop, context) in enumerate(self.spans)
            if not stop - start == 1 < context
        ]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The pool's views and the step's tables, which a forward passes to every layer's attention."""

    layers: list[KvLayer]
    batch: AttentionBatch
    states: StateStep | None = None
    """None where the model has no linear attention."""


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
    """Attention over packed sequences: write this step's KV into its pages, then read each sequence's own.

    query `[1, Hq, T, Dk]`, key `[1, Hkv, T, Dk]`, value `[1, Hkv, T, Dv]`, already rotated; returns `[1, T, Hq, Dv]`.
    """
    assert attention_mask is None, "no mask function is registered, so transformers passes none"
    layer = attention_step.layers[_layer_index(module)]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), layer, attention_step.batch.slot_mapping)
    output = paged_attention(
        query[0].transpose(0, 1),
        layer,
        attention_step.batch,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend)


_KNOWN = frozenset(
    ("scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal", "position_ids", "cache_position")
)
"""Keywords of the attention interface that `attend` serves, or that change nothing without a mask or in evaluation."""


class _Probe:
    """Records what a model's layers pass to attention in one forward."""

    def __init__(self) -> None:
        self.seen: dict[int, LayerShape] = {}
        self.calls = 0
        self.ignored: set[str] = set()

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        self.calls += 1
        self.ignored |= {name for name, value in kwargs.items() if name not in _KNOWN and value not in (None, False)}
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            self.ignored.add("is_causal=False")
        names = {"scaling": "scaling", "sliding_window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
        options = AttentionOptions(**{name: kwargs.get(keyword) for name, keyword in names.items()})
        self.seen[_layer_index(module)] = LayerShape(key.shape[1], key.shape[3], value.shape[3], options)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def probe_layers(model: PreTrainedModel, num_tokens: int = 2) -> tuple[LayerShape, ...]:
    """Return every layer's KV shape, learned from one forward of `num_tokens` tokens.

    Raises UnsupportedModel when a layer does not call the attention function exactly once (its KV would be lost) or
    passes it something that `attend` would ignore.
    """
    probe = _Probe()
    with _attention(model, probe):
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=next(model.parameters()).device)
        positions = torch.arange(num_tokens, device=tokens.device)[None]
        try:
            model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedModel(f"{_kind(model)} cannot run on a packed batch: {error}") from error
    if probe.ignored:
        raise UnsupportedModel(
            f"{_kind(model)} asks attention for {', '.join(sorted(probe.ignored))}, which would be ignored; "
            f"correct its config.json or give another checkpoint."
        )
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    attending = [index for index, kind in enumerate(kinds) if kind != "linear_attention"]
    if probe.calls != len(attending) or sorted(probe.seen) != attending:
        raise UnsupportedModel(
            f"{_kind(model)} called the attention function {probe.calls} times for {len(attending)} layers; "
            f"it does its own attention, which a shared page pool cannot serve."
        )
    return tuple(probe.seen.get(index, NO_KV) for index in range(num_layers))


@contextmanager
def _attention(model: PreTrainedModel, function: _Probe) -> Iterator[None]:
    with MODEL_LOCK:  # one function has the name at a time, whatever engines load on other threads
        AttentionInterface.register(PROBE, function)
        model.set_attn_implementation(PROBE)
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
