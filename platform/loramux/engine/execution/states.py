"""Layers that keep a state of fixed size for each sequence: linear attention, Mamba 2, short convolutions.

The state of a sequence in such a layer is one matrix a head and the last inputs of a short convolution, or these inputs
alone; its size does not depend on the sequence's length. The states of all these layers together take a fixed number of
pages, which the sequence holds before those of its KV (`PageBudget.state_pages`). They are cut into *units* as large as
one head's matrix, and a unit never straddles a page. A sequence's first chunk begins with zeros and reads nothing, so
pages need no clearing. Chunks of a prompt carry the state on. A sequence that begins after cached KV has a copy of the
states at its end (`Memory.resume`). See decision 30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loramux.engine.execution.attention import AttentionStep, UnsupportedModel
from loramux_adapters.families import family_of
from loramux_kernels.layer_operators import gated
from loramux_kernels.linear_attention import gated_norm, linear_attention, short_convolution
from loramux_kernels.tables import STATE_DTYPE, StateLayer, StateRows, StateShape, StateWeights


def state_shape(net: Any) -> StateShape:
    """Return the shape of a sequence's state in one of transformers' modules."""
    taps = net.conv_kernel_size - 1
    if hasattr(net, "conv"):  # inputs alone, which are one unit
        channels: int = net.conv.in_channels
        return StateShape(0, 1, channels * taps, channels, taps)
    if hasattr(net, "ssm_state_size"):
        return StateShape(net.num_heads, net.ssm_state_size, net.head_dim, net.conv_dim, taps)
    return StateShape(net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_dim, taps)


def state_unit_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a page must hold for the states of a model; 0 for a model without."""
    return max((state_shape(net).unit * STATE_DTYPE.itemsize for net in _nets(model).values()), default=0)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Places of each layer's units in the pages of a sequence's states."""

    layers: Mapping[int, StateShape]
    """Shapes by the layer's index; empty for a model without states."""
    page_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel, page_bytes: int) -> StateLayout:
        """Find the layers with states. Raises UnsupportedModel if a page cannot hold a unit."""
        layout = cls({layer: state_shape(net) for layer, net in _nets(model).items()}, page_bytes)
        if layout.layers and not layout.units_per_page:
            raise UnsupportedModel(
                f"engine.block_size makes pages of {page_bytes} bytes, and one head's state of this base takes "
                f"{layout.unit * STATE_DTYPE.itemsize}; raise engine.block_size."
            )
        return layout

    @property
    def unit(self) -> int:
        """Elements of a unit; of the largest one if layers differ."""
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

    def views(self, pool: torch.Tensor) -> dict[int, StateLayer]:
        """Return each layer's states as views of the flat pool; none for a model without states."""
        if not self.layers:
            return {}
        flat = pool.view(STATE_DTYPE)
        per_page = self.page_bytes // STATE_DTYPE.itemsize
        shape = (flat.numel() // per_page, self.units_per_page, self.unit)
        units = flat.as_strided(shape, (per_page, self.unit, 1))
        views, first = {}, 0
        for layer, state in self.layers.items():
            views[layer] = StateLayer(state, units, first)
            first += state.units
        return views


class GatedDeltaNet(nn.Module):
    """Replaces a gated delta net: the same parts over the packed rows of many sequences, each with its own state."""

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.net = net
        self._layer = layer
        self._weights = StateWeights(
            net.conv1d.weight.detach()[:, 0].contiguous(),
            -net.A_log.detach().float().exp(),
            net.dt_bias.detach(),
            delta_factor=2.0 if getattr(net, "allow_neg_eigval", False) else 1.0,
        )
        has_own_names = hasattr(net, "g_proj")
        self._norm = net.o_norm if has_own_names else net.norm
        self._out: nn.Module = net.o_proj if has_own_names else net.out_proj

    def forward(self, hidden_states: torch.Tensor, *, attention_step: AttentionStep, **_: Any) -> torch.Tensor:
        """Map `[1, T, hidden_size]` to the same shape."""
        rows, gate = self._project(hidden_states)
        out = linear_attention(rows, self._weights, attention_step.states[self._layer], attention_step.batch)
        y = gated_norm(out, gate, self._norm.weight, self._norm.variance_epsilon)
        result: torch.Tensor = self._out(y.flatten(1)[None])
        return result

    def _project(self, x: torch.Tensor) -> tuple[StateRows, torch.Tensor]:
        """Return the linears' results, and the gate `[T, key heads, R, Dv]`, as views."""
        net = self.net
        heads, repeats = net.num_k_heads, net.num_v_heads // net.num_k_heads
        if hasattr(net, "g_proj"):
            linears = (net.q_proj, net.k_proj, net.v_proj, net.g_proj, net.b_proj, net.a_proj)
            query, key, value, z, b, a = (linear(x)[0].unflatten(1, (heads, -1)) for linear in linears)
        elif hasattr(net, "in_proj_qkv"):
            query, key, value = net.in_proj_qkv(x)[0].split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
            parts = (query, key, value, net.in_proj_z(x)[0], net.in_proj_b(x)[0], net.in_proj_a(x)[0])
            query, key, value, z, b, a = (part.unflatten(1, (heads, -1)) for part in parts)
        else:  # the parts of one key head are next to each other
            widths = [net.head_k_dim, net.head_k_dim, *[repeats * net.head_v_dim] * 2]
            query, key, value, z = net.in_proj_qkvz(x)[0].unflatten(1, (heads, -1)).split(widths, dim=-1)
            b, a = net.in_proj_ba(x)[0].unflatten(1, (heads, -1)).chunk(2, dim=-1)
        value, z = (part.unflatten(2, (repeats, net.head_v_dim)) for part in (value, z))
        return StateRows(query, key, value, b, a), z


class Mamba2(nn.Module):
    """Replaces a Mamba 2 mixer: the same parts over the packed rows of many sequences, each with its own state."""

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        if net.activation not in ("silu", "swish"):
            raise UnsupportedModel(
                f"its Mamba 2 layers activate their convolutions by {net.activation!r}, and the engine computes 'silu'."
            )
        self.net = net
        self._layer = layer
        self._groups: int = net.n_groups
        inner, keys = net.intermediate_size, net.n_groups * net.ssm_state_size
        self._widths = [inner, inner, keys, keys, net.num_heads]
        # transformers orders the convolution's channels as values, keys, queries; the operator the other way round.
        order = torch.arange(net.conv_dim, device=net.conv1d.weight.device).split([inner, keys, keys])
        channels = torch.cat(order[::-1])
        bias = net.conv1d.bias
        self._weights = StateWeights(
            net.conv1d.weight.detach()[channels, 0].contiguous(),
            -net.A_log.detach().float().exp(),
            net.dt_bias.detach(),
            bias=None if bias is None else bias.detach()[channels],
            skip=net.D.detach().float(),
            limits=(float(net.time_step_limit[0]), float(net.time_step_limit[1])),
        )

    @property
    def is_limited(self) -> bool:
        """True if step sizes of prompts are limited."""
        return self._weights.is_limited

    def forward(self, hidden_states: torch.Tensor, *, attention_step: AttentionStep, **_: Any) -> torch.Tensor:
        """Map `[1, T, hidden_size]` to the same shape."""
        net = self.net
        gate, value, key, query, step = self._project(hidden_states).split(self._widths, dim=-1)
        query, key, value, step = (part.unflatten(1, (self._groups, -1)) for part in (query, key, value, step))
        rows = StateRows(query, key, value.unflatten(2, (-1, net.head_dim)), None, step)
        out = linear_attention(rows, self._weights, attention_step.states[self._layer], attention_step.batch)
        result: torch.Tensor = net.out_proj(self._normed(out, gate)[None])
        return result

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's result `[T, width]`; some models scale it by parts, and its input."""
        net = self.net
        if not hasattr(net, "mup_vector"):
            y: torch.Tensor = net.in_proj(x)[0]
            return y
        scaled: torch.Tensor = net.in_proj(x * net.ssm_in_multiplier)[0] * net.mup_vector[0].to(x.dtype)
        return scaled

    def _normed(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate and normalise `out` `[T, heads, Dv]` by groups of heads; return `[T, heads * Dv]`."""
        norm, groups = self.net.norm, self._groups
        if isinstance(norm, nn.Identity):
            return gated(gate, out.flatten(1), "silu")
        by_group = out.view(len(out), groups, -1)
        gates = gate.unflatten(1, (groups, 1, -1))
        weight = norm.weight.view(groups, -1)
        gates_first = not getattr(norm, "norm_before_gate", False)
        return gated_norm(by_group, gates, weight, norm.variance_epsilon, gates_first=gates_first).flatten(1)


class ShortConvolution(nn.Module):
    """Replaces a gated short convolution, whose state is its last inputs."""

    def __init__(self, net: Any, layer: int) -> None:
        super().__init__()
        self.net = net
        self._layer = layer
        self._kernel = net.conv.weight.detach()[:, 0].contiguous()

    def forward(self, hidden_states: torch.Tensor, *, attention_step: AttentionStep, **_: Any) -> torch.Tensor:
        """Map `[1, T, hidden_size]` to the same shape."""
        net, state = self.net, attention_step.states[self._layer]
        before, after, x = net.in_proj(hidden_states)[0].chunk(3, dim=-1)
        y = short_convolution(before * x, self._kernel, net.conv.bias, state, attention_step.batch)
        result: torch.Tensor = net.out_proj((after * y)[None])
        return result


MODULES = {"gated delta": GatedDeltaNet, "mamba 2": Mamba2, "short convolution": ShortConvolution}
"""Modules that replace transformers', by the rule of the family's states."""


def install_state_layers(model: PreTrainedModel) -> None:
    """Replace the model's layers that keep states by modules whose states are in the pool."""
    form = family_of(model.config).states
    for index, net in _nets(model).items():
        assert form is not None, "only a family with states has such nets"
        setattr(model.get_decoder().layers[index], form.module, MODULES[form.rule](net, index))


def tells_answers_apart(model: PreTrainedModel) -> bool:
    """Return whether a token has another state in an answer than in a prompt: a limited step size (decision 30)."""
    return any(isinstance(module, Mamba2) and module.is_limited for module in model.modules())


def _nets(model: PreTrainedModel) -> dict[int, Any]:
    """Return transformers' modules that keep states, by layer: those with a convolution."""
    if (form := family_of(model.config).states) is None:
        return {}
    nets = ((index, getattr(layer, form.module, None)) for index, layer in enumerate(model.get_decoder().layers))
    return {index: net for index, net in nets if net is not None and _has_convolution(net)}


def _has_convolution(net: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in net.children())
