"""Layers with linear attention: a state of fixed size for each sequence, in pages of the one pool.

A hybrid model (Qwen3-Next, Qwen3.5) has layers that keep no KV. What such a layer remembers of a sequence is one matrix
a head and the last inputs of a short convolution, however long the sequence is. The states of all these layers together
take a fixed number of pages, which the sequence holds in front of its KV (`PageBudget.state_pages`). They are cut into
*units* as large as one head's matrix, and a unit never straddles a page.

A sequence's first chunk begins with zeros and reads nothing, so pages need no clearing, and a preempted sequence is
computed again from its tokens. Chunks of a prompt carry the state on. See decision 30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from loramux.engine.execution.attention import AttentionStep, UnsupportedModel
from loramux_kernels.gated_delta import gated_delta_prompt, gated_delta_step

LINEAR_ATTENTION = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""transformers' modules that are replaced."""

STATE_DTYPE = torch.float32
"""States are sums over all tokens of a sequence, whatever the model's dtype is."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state of one sequence."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    """Of the convolution."""
    taps: int
    """Earlier inputs that the convolution reads."""

    @classmethod
    def of(cls, net: Any) -> StateShape:
        """Read transformers' module."""
        return cls(net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_dim, net.conv_kernel_size - 1)

    @property
    def unit(self) -> int:
        """Elements of one head's matrix."""
        return self.key_dim * self.value_dim

    @property
    def units(self) -> int:
        """Units of the matrices and, behind them, of the convolution's inputs."""
        return self.heads + -(-self.channels * self.taps // self.unit)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where each layer's units lie in the pages of a sequence's states."""

    layers: Mapping[int, StateShape]
    """By the layer's index; empty for a model without linear attention."""
    page_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel, page_bytes: int) -> StateLayout:
        """Find the layers. Raises UnsupportedModel where a page cannot hold a unit."""
        layout = cls({layer: StateShape.of(net) for layer, net in _nets(model).items()}, page_bytes)
        if layout.layers and not layout.units_per_page:
            raise UnsupportedModel(
                f"engine.block_size makes pages of {page_bytes} bytes, and one head's state of this base takes "
                f"{layout.unit * STATE_DTYPE.itemsize}; raise engine.block_size."
            )
        return layout

    @property
    def unit(self) -> int:
        """Elements of a unit: of the largest, where layers differ."""
        return max(shape.unit for shape in self.layers.values())

    @property
    def units_per_page(self) -> int:
        """Whole units in a page."""
        return self.page_bytes // (self.unit * STATE_DTYPE.itemsize)

    @property
    def num_pages(self) -> int:
        """Pages of one sequence's states."""
        units = sum(shape.units for shape in self.layers.values())
        return -(-units // self.units_per_page) if units else 0

    def views(self, pool: torch.Tensor) -> dict[int, LayerState]:
        """Return each layer's states as views of the flat pool."""
        flat = pool.view(STATE_DTYPE)
        per_page = self.page_bytes // STATE_DTYPE.itemsize
        shape = (flat.numel() // per_page, self.units_per_page, self.unit)
        units = flat.as_strided(shape, (per_page, self.unit, 1))
        views, first = {}, 0
        for layer, state in self.layers.items():
            numbers = torch.arange(first, first + state.units, device=pool.device)
            views[layer] = LayerState(state, units, numbers // self.units_per_page, numbers % self.units_per_page)
            first += state.units
        return views


@dataclass(frozen=True, eq=False, slots=True)
class LayerState:
    """One layer's states in the pool."""

    shape: StateShape
    units: torch.Tensor
    """float32[num_pages, units_per_page, unit]"""
    pages: torch.Tensor
    """int64[units of the layer]: which of a sequence's state pages holds each."""
    places: torch.Tensor
    """int64[units of the layer]: where in that page."""

    def read(self, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the matrices `[n, heads, Dk, Dv]` and the inputs `[n, channels, taps]` of n sequences."""
        shape = self.shape
        found = self.units[tables[:, self.pages], self.places]
        matrices = found[:, : shape.heads, : shape.unit].unflatten(2, (shape.key_dim, shape.value_dim))
        inputs = found[:, shape.heads :].flatten(1)[:, : shape.channels * shape.taps]
        return matrices, inputs.unflatten(1, (shape.channels, shape.taps))

    def write(self, tables: torch.Tensor, matrices: torch.Tensor, inputs: torch.Tensor) -> None:
        """Store what `read` returns."""
        shape, (_, _, unit) = self.shape, self.units.shape
        rest = (shape.units - shape.heads) * unit - shape.channels * shape.taps
        tail = functional.pad(inputs.flatten(1).to(STATE_DTYPE), (0, rest)).unflatten(1, (-1, unit))
        heads = functional.pad(matrices.flatten(2), (0, unit - shape.unit))
        self.units[tables[:, self.pages], self.places] = torch.cat((heads, tail), dim=1)


class GatedDeltaNet(nn.Module):
    """Replaces a gated delta net: the same parts over the packed rows of many sequences, each with its own state."""

    def __init__(self, net: Any, state: LayerState) -> None:
        super().__init__()
        self.net = net
        self._state = state
        self._repeats = net.num_v_heads // net.num_k_heads
        self._decay = -net.A_log.detach().float().exp()
        self._kernel = net.conv1d.weight.detach()

    def forward(self, hidden_states: torch.Tensor, *, attention_step: AttentionStep, **_: Any) -> torch.Tensor:
        """Map `[1, T, hidden_size]` to the same shape."""
        net, shape, states = self.net, self._state.shape, attention_step.states
        assert states is not None, "a step of a model with linear attention has the pages of its states"
        mixed, z, b, a = self._project(hidden_states)
        decay = self._decay * functional.softplus(a.float() + net.dt_bias)
        beta = b.sigmoid().float()
        out = torch.empty(len(mixed), shape.heads, shape.value_dim, device=mixed.device)
        if states.decoding is not None:
            rows, tables = states.decoding
            matrices, inputs = self._state.read(tables)
            window = torch.cat((inputs, mixed[rows, :, None]), dim=-1)
            parts = self._parts(self._convolve(window)[..., 0])
            out[rows], matrices = gated_delta_step(*parts, decay[rows], beta[rows], matrices)
            self._state.write(tables, matrices, window[..., 1:])
        for span, table, begins in states.prompts:
            matrices, inputs = self._zeros(mixed.device) if begins else self._state.read(table)
            window = torch.cat((inputs, mixed[None, span].mT), dim=-1)
            parts = self._parts(self._convolve(window)[0].T)
            out[span], after = gated_delta_prompt(*parts, decay[span], beta[span], matrices[0])
            self._state.write(table, after[None], window[..., -shape.taps :])
        y = net.norm(out.to(z.dtype).view(-1, shape.value_dim), z.reshape(-1, shape.value_dim))
        result: torch.Tensor = net.out_proj(y.view(1, len(mixed), -1))
        return result

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the convolution's inputs `[T, channels]`, z, b and a of each row."""
        net = self.net
        if hasattr(net, "in_proj_qkv"):
            projected = (net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x))
            return tuple(part[0] for part in projected)
        query, key, value, *others = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
        mixed = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=-1)
        return mixed, *(part[0] for part in others)

    def _convolve(self, window: torch.Tensor) -> torch.Tensor:
        """Map inputs `[n, channels, taps + t]` to `[n, channels, t]`."""
        kernel = self._kernel
        return functional.silu(functional.conv1d(window.to(kernel.dtype), kernel, groups=len(kernel)))

    def _parts(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split rows `[n, channels]` into queries, keys and values of every head, float32; the first two of length
        one, queries scaled."""
        net, shape = self.net, self._state.shape
        query, key, value = mixed.float().split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
        query, key = (part.unflatten(1, (-1, shape.key_dim)) for part in (query, key))
        query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
        query, key = (part.repeat_interleave(self._repeats, dim=1) for part in (query * shape.key_dim**-0.5, key))
        return query, key, value.unflatten(1, (-1, shape.value_dim))

    def _zeros(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._state.shape
        matrices = torch.zeros(1, shape.heads, shape.key_dim, shape.value_dim, device=device)
        return matrices, torch.zeros(1, shape.channels, shape.taps, device=device)


def install_linear_attention(model: PreTrainedModel, layout: StateLayout, pool: torch.Tensor) -> None:
    """Replace the model's linear attention by modules that keep their states in `pool`."""
    views = layout.views(pool) if layout.layers else {}
    for index, net in _nets(model).items():
        model.get_decoder().layers[index].linear_attn = GatedDeltaNet(net, views[index])


def _nets(model: PreTrainedModel) -> dict[int, Any]:
    layers = enumerate(model.get_decoder().layers)
    nets = ((index, getattr(layer, "linear_attn", None)) for index, layer in layers)
    return {index: net for index, net in nets if type(net).__name__ in LINEAR_ATTENTION}
