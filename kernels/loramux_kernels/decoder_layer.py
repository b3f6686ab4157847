"""A decoder's layers, one after the other, in one C++ call.

Semantics, over packed rows x:

    x += factor * after_attention(out(attention(turn(qkv(before_attention(x))))))
    x += factor * after_network(down(gated(gate_up(before_network(x)))))

On a CPU a step of few rows is hundreds of operators of some ten microseconds each. If Python calls the operators one by
one, the interpreter needs about the same time again for each, and threads that sleep between two calls must be woken.
This call uses the same C++ operators as `paged_attention`, `rms_norm` and others, and its results are equal to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.layer_operators import Activation
from loramux_kernels.native.abi import (
    ACTIVATIONS,
    DTYPES,
    MAX_HEAD_DIM,
    LayerAbi,
    LayerLinearAbi,
    LayerStepAbi,
    NormAbi,
)
from loramux_kernels.native.loader import native_for
from loramux_kernels.packed_linear import PackedLinear
from loramux_kernels.tables import AttentionBatch, KvLayer, LoraGroup, LoraTable, Norm, Rotation, Segments


@dataclass(frozen=True, eq=False)
class LayerLinear:
    """A product of a layer, and the sites of adapters that add to its output."""

    linear: PackedLinear
    group: LoraGroup

    @cached_property
    def abi(self) -> LayerLinearAbi | None:
        """Addresses of the weights; None if C++ does not read them."""
        held = self.linear.abi()
        if held is not None:
            held.group = self.group.packed.buffer_info()[0]
        return held


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """A step's adapters, applied to the layer's linears."""

    pool: torch.Tensor
    table: LoraTable
    segments: Segments


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The parts of a layer whose two sublayers are attention and a gated feed-forward network."""

    qkv: LayerLinear
    """Queries, keys and values in one product, next to each other."""
    out: LayerLinear
    gate_up: LayerLinear
    down: LayerLinear
    before_attention: Norm
    after_attention: Norm | None
    before_network: Norm
    after_network: Norm | None
    query_norm: Norm | None
    """Norm of each head's query; `key_norm` is that of each head's key."""
    key_norm: Norm | None
    num_heads: int
    turns: bool
    scaling: float
    activation: Activation
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """float32[num_heads], contiguous; see `paged_attention`."""
    factor: float = 1.0
    """Factor of what is added to the residual stream."""

    @cached_property
    def linears(self) -> tuple[LayerLinear, ...]:
        """All products of the layer."""
        return self.qkv, self.out, self.gate_up, self.down

    @cached_property
    def abi(self) -> LayerAbi | None:
        """Addresses and numbers of the layer; None if C++ cannot read one of its linears."""
        linears = [linear.abi for linear in self.linears]
        norms = (self.before_attention, self.after_attention, self.before_network, self.after_network)
        if any(linear is None for linear in linears):
            return None
        return LayerAbi(
            *(NormAbi() if norm is None else norm.abi for norm in (*norms, self.query_norm, self.key_norm)),
            *linears,
            None if self.sinks is None else self.sinks.data_ptr(),
            self.num_heads, self.sliding_window or 0, self.turns, ACTIVATIONS[self.activation],
            self.scaling, self.softcap or 0.0, self.factor,
        )  # fmt: skip


class DecoderLayers:
    """Layers that follow one another."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = tuple(layers)
        self._most_sites = max(len(linear.group.sites) for layer in layers for linear in layer.linears)

    @cached_property
    def _abi(self) -> ctypes.Array[LayerAbi] | None:
        described = [layer.abi for layer in self._layers]
        known = [layer for layer in described if layer is not None]
        return (LayerAbi * len(known))(*known) if len(known) == len(described) else None

    def native_for(self, x: torch.Tensor, kv: Sequence[KvLayer]) -> ctypes.CDLL | None:
        """Return the library whose one call runs these layers for rows like `x`; None if no library can run them."""
        if runs_triton(x) or self._abi is None or any(layer.key.shape[3] > MAX_HEAD_DIM for layer in kv):
            return None
        return native_for(x)

    def run(
        self,
        native: ctypes.CDLL,
        x: torch.Tensor,
        rotation: Rotation,
        kv: Sequence[KvLayer],
        batch: AttentionBatch,
        adapters: LayerAdapters | None,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Change the residual stream `x` `[T, hidden_size]`, contiguous, in place, and write the step's KV.

        `native` is the result of `native_for`; `rotation` has T rows; `kv` has each layer's part of the pool. `kept`,
        int64`[n]` and ascending, lists the rows of x that are read afterwards: the last layer skips computations that
        only other rows need. None: all rows are kept.
        """
        assert x.is_contiguous(), "rows are found by arithmetic"
        step = LayerStepAbi(
            x=x.data_ptr(),
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            dtype=DTYPES[x.dtype],
            rows=x.shape[0],
            rotary_dim=rotation.cos.shape[1],
            rotation_is_float=rotation.cos.dtype == torch.float32,
        )
        if adapters is not None:
            segments, table = adapters.segments, adapters.table
            step.max_rank = segments.max_rank(table)
            shrunk = torch.empty(self._most_sites * segments.rows * step.max_rank, dtype=torch.float32)
            step.pool, step.shrunk = adapters.pool.data_ptr(), shrunk.data_ptr()
            step.table, step.segments = ctypes.addressof(table.abi), segments.packed.buffer_info()[0]
        if kept is not None and len(kept) < len(x):
            kept_segments = None if adapters is None else adapters.segments.among(kept)
            step.kept, step.num_kept = kept.data_ptr(), len(kept)
            step.kept_segments = None if kept_segments is None else kept_segments.packed.buffer_info()[0]
        pages = (ctypes.c_void_p * len(kv))(*(ctypes.addressof(layer.abi) for layer in kv))
        native.loramux_layers(self._abi, pages, len(kv), step, batch.abi, torch.get_num_threads())
