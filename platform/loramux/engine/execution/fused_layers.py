"""Decoder layers with few operators: they compute the same as transformers' own modules in a third of the passes.

Every family's layer is two sublayers, attention and feed-forward, on one residual stream x:

    x = x + factor * norm_after(sublayer(norm_before(x)))        either norm may be absent

One pass adds a sublayer's result to x and normalises x for the next one. One pass rotates queries and keys and writes
keys and values to their pages. One pass applies the activation of a gate and multiplies. The linears are the modules
that `install` has put there. A layer whose parts are not all known stays as it is, and `attend` serves it.

On a CPU all layers are one call (`DecoderLayers`) if the step's adapters are pairs on linears. The modules below define
the result of that call, and serve all other steps.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from loramux.engine.execution.attention import AttentionStep, LayerShape
from loramux_adapters.bank import AdapterBank
from loramux_adapters.families import GATES, Family, NormForm, family_of
from loramux_adapters.modules import AdaptedNorm, GroupedLinear, LoraLinear, replace_module
from loramux_kernels.decoder_layer import DecoderLayer, DecoderLayers, LayerAdapters
from loramux_kernels.layer_operators import Activation, gated, rms_norm, rope_write_kv
from loramux_kernels.lora import run_expand
from loramux_kernels.paged_attention import paged_attention
from loramux_kernels.tables import Norm, OwnWeights, PendingExpand, Rotation


def fuse_layers(model: PreTrainedModel, layers: Sequence[LayerShape]) -> int:
    """Replace the decoder layers of `model` whose parts are all known, and its last norm; return the number of
    layers."""
    family = family_of(model.config)
    if not family.fuses_layers:
        return 0
    decoder: Any = model.get_decoder()
    norm = type(_base_of(decoder.norm))
    fused = 0
    for index, (layer, shape) in enumerate(zip(decoder.layers, layers, strict=True)):
        if _is_known(layer, norm):
            decoder.layers[index] = FusedLayer(layer, shape, family)
            fused += 1
    if fused:
        replace_module(decoder, "norm", FusedNorm(decoder.norm, family.norm))
    _stack(decoder, family)
    return fused


def _stack(decoder: Any, family: Family) -> None:
    """Put consecutive layers into one module if one call computes all of them, or none. If some layers are not
    replaced, or rotate by different angles, each layer gets its own module."""
    layers = list(decoder.layers)
    described = [describe(layer) if isinstance(layer, FusedLayer) else None for layer in layers]
    runs = [[index] for index in range(len(layers))]
    if all(isinstance(layer, FusedLayer) for layer in layers) and not family.angles_by_layer:
        runs = [list(run) for _, run in groupby(range(len(layers)), lambda index: described[index] is None)]
    stacks = []
    for run in runs:
        members = [layers[index] for index in run]
        if isinstance(members[0], FusedLayer):
            whole = [layer for index in run if (layer := described[index]) is not None]
            members = [FusedStack(members, whole, is_last=run[-1] == len(layers) - 1)]
        stacks += members
    decoder.layers = nn.ModuleList(stacks)


def _is_known(layer: Any, norm_class: type[nn.Module]) -> bool:
    """Are all norms of one class, and the projections those of attention?"""
    norms = [child for name, child in layer.named_modules() if name.endswith("norm")]
    attention = layer.self_attn
    projects = all(hasattr(attention, f"{x}_proj") for x in "qkvo") or hasattr(attention, "qkv_proj")
    return projects and all(type(_base_of(norm)) is norm_class for norm in norms)


def _base_of(norm: nn.Module) -> Any:
    """Return the family's own norm."""
    return norm.base if isinstance(norm, AdaptedNorm) else norm


class FusedNorm(nn.Module):
    """Replaces a norm. Families differ in the stored values and in the place of rounding."""

    def __init__(self, norm: nn.Module, form: NormForm) -> None:
        super().__init__()
        base = _base_of(norm)
        self._of_adapters = norm.own_weights if isinstance(norm, AdaptedNorm) else None
        self._stores_distance_from_one = form.stores_distance_from_one
        eps = base.eps if hasattr(base, "eps") else base.variance_epsilon
        weight = base.weight.detach()
        factors = 1.0 + weight.float() if self._stores_distance_from_one else weight.to(torch.float32, copy=True)
        self.norm = Norm(factors, eps, rounds_first=not form.rounds_last)

    def _own_weights(self, vectors: int = 1) -> OwnWeights | None:
        if self._of_adapters is None:
            return None
        return self._of_adapters(vectors, added=1.0 if self._stores_distance_from_one else 0.0)

    @property
    def is_shared(self) -> bool:
        """True if no adapter of the step may have its own weight for this norm."""
        return self._own_weights() is None

    def normalise(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None = None,
        factor: float = 1.0,
        expand: PendingExpand | None = None,
    ) -> torch.Tensor:
        """Return the rows of `x`, `[T, width]` or heads `[T, heads, width]`, by the weights of each row's adapter.

        With `delta`, `x` `[T, width]` is first changed in place: `x += factor * delta`. `expand` is what is left to do
        for the delta, or for `x`.
        """
        # Heads of a joined projection are not contiguous, so a copy is normalised. A stream that is changed in place
        # is.
        rows = x if delta is not None or x.is_contiguous() else x.contiguous()
        own = self._own_weights(x.shape[1] if x.ndim == 3 else 1)
        return rms_norm(rows.view(-1, x.shape[-1]), self.norm, delta, factor, own, expand).view(x.shape)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `[1, T, width]`."""
        return self.normalise(hidden_states[0])[None]


class Delta(NamedTuple):
    """A sublayer's result, which is to be added to the residual stream."""

    rows: torch.Tensor
    """`[T, hidden_size]`"""
    expand: PendingExpand | None = None
    """Pairs of adapters that the operator that reads the rows next has to add to them."""

    def normalised(self, norm: FusedNorm | None) -> Delta:
        """Return the result after the norm that follows the sublayer, if any."""
        return self if norm is None else Delta(norm.normalise(self.rows, expand=self.expand))

    def add_to(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Add the whole result to the residual stream in place, and return the stream."""
        if self.expand is not None:
            run_expand(self.expand)
        return x.add_(self.rows, alpha=factor)


def _multiply(product: GroupedLinear | None, linear: nn.Module, x: torch.Tensor) -> Delta:
    """Return the result of a sublayer's last linear; `product` computes that linear alone, or is None."""
    return Delta(linear(x)) if product is None else Delta(*product.multiply(x))


class FusedAttention(nn.Module):
    """Replaces a family's attention: projections, norms of heads, rotation, KV, attention over pages."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    o_proj: nn.Module

    def __init__(self, attention: Any, shape: LayerShape, form: NormForm) -> None:
        super().__init__()
        self.is_joined = hasattr(attention, "qkv_proj")
        for name in ("qkv_proj", "o_proj") if self.is_joined else ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(attention, name))
        self.layer_idx: int = attention.layer_idx
        self.shape = shape
        heads = attention.o_proj.in_features // shape.value_dim
        kv = shape.num_kv_heads
        self.num_heads = heads
        ends = [0, *accumulate((heads * shape.key_dim, kv * shape.key_dim, kv * shape.value_dim))]
        self._columns = [slice(start, stop) for start, stop in pairwise(ends)]
        self.norms = [FusedNorm(getattr(attention, name), form) for name in QK_NORMS if hasattr(attention, name)]
        self.norms_heads = bool(self.norms) and len(self.norms[0].norm.weight) == shape.key_dim
        self.turns = bool(getattr(attention, "use_rope", True))
        self._qkv, self._out = _one_product(self.projections), _one_product([self.o_proj])

    @property
    def projections(self) -> list[nn.Module]:
        """The linears of queries, keys and values."""
        return [self.qkv_proj] if self.is_joined else [self.q_proj, self.k_proj, self.v_proj]

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> Delta:
        """Map `[T, hidden_size]` to the same shape."""
        rows, shape = x.shape[0], self.shape
        (query, key, value), expand = self._project(x)
        if self.norms and not self.norms_heads:  # over all heads together
            query, key = (norm.normalise(part) for norm, part in zip(self.norms, (query, key), strict=True))
        query, key = query.view(rows, -1, shape.key_dim), key.view(rows, -1, shape.key_dim)
        of_query, of_key = None, None
        if self.norms_heads and all(norm.is_shared for norm in self.norms):
            of_query, of_key = (norm.norm for norm in self.norms)
        elif self.norms_heads:
            query, key = (norm.normalise(part) for norm, part in zip(self.norms, (query, key), strict=True))
        cos, sin = position_embeddings
        rope_write_kv(
            query,
            key,
            value.view(rows, -1, shape.value_dim),
            Rotation(cos[0], sin[0]) if self.turns else None,
            step.layers[self.layer_idx],
            step.batch.slot_mapping,
            of_query,
            of_key,
            expand,
        )
        options = shape.options
        mixed = paged_attention(
            query,
            step.layers[self.layer_idx],
            step.batch_of(options.sliding_window),
            shape.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        return _multiply(self._out, self.o_proj, mixed.view(rows, -1))

    def _project(self, x: torch.Tensor) -> tuple[Sequence[torch.Tensor], PendingExpand | None]:
        """Return queries, keys and values, `[T, heads * dim]` each, and what the rotation has to add to them."""
        if self._qkv is not None and (self.norms_heads or not self.norms):
            whole, expand = self._qkv.multiply(x)
            return [whole[:, columns] for columns in self._columns], expand
        if self.is_joined:
            joined: torch.Tensor = self.qkv_proj(x)
            return [joined[:, columns] for columns in self._columns], None
        return (self.q_proj(x), self.k_proj(x), self.v_proj(x)), None


QK_NORMS = ("q_norm", "k_norm")


class FusedFeedForward(nn.Module):
    """Replaces a gated feed-forward network."""

    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, network: Any, activation: Activation) -> None:
        super().__init__()
        self.is_joined = hasattr(network, "gate_up_proj")
        for name in ("gate_up_proj", "down_proj") if self.is_joined else ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, getattr(network, name))
        self.activation: Activation = activation
        self._gate_up, self._down = _one_product(self.projections), _one_product([self.down_proj])

    @property
    def projections(self) -> list[nn.Module]:
        """The linears of the gate and of the factor that it multiplies."""
        return [self.gate_up_proj] if self.is_joined else [self.gate_proj, self.up_proj]

    def forward(self, x: torch.Tensor) -> Delta:
        """Map `[T, hidden_size]` to the same shape."""
        expand = None
        if self._gate_up is not None:
            whole, expand = self._gate_up.multiply(x)
            width = whole.shape[1] // 2
            gate, up = whole[:, :width], whole[:, width:]
        elif self.is_joined:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return _multiply(self._down, self.down_proj, gated(gate, up, self.activation, expand))


class PackedFeedForward(nn.Module):
    """Calls a feed-forward module that needs transformers' batch dimension, such as a mixture."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> Delta:
        """Map `[T, hidden_size]` to the same shape."""
        return Delta(self.network(x[None])[0])


def _feed_forward(network: Any, activations: Set[str]) -> nn.Module:
    activation: Any = getattr(network, "act_fn", None) or getattr(network, "activation_fn", None)
    known = next((GATES[name] for name in activations if type(ACT2FN[name]) is type(activation)), None)
    if known is None or not hasattr(network, "down_proj"):
        return PackedFeedForward(network)
    return FusedFeedForward(network, known)


@dataclass(frozen=True, slots=True)
class _Norms:
    """The norms around both sublayers; None if a family has no such norm."""

    before_attention: FusedNorm | None
    after_attention: FusedNorm | None
    before_network: FusedNorm | None
    after_network: FusedNorm | None

    @classmethod
    def of(cls, layer: Any, form: NormForm) -> _Norms:
        """Find the norms. `post_attention_layernorm` is before the network if no other norm is."""
        named = {name: FusedNorm(norm, form) for name, norm in layer.named_children() if name.endswith("norm")}
        if "post_feedforward_layernorm" in named:
            return cls(
                named.get("input_layernorm"),
                named["post_attention_layernorm"],
                named.get("pre_feedforward_layernorm"),
                named["post_feedforward_layernorm"],
            )
        return cls(named["input_layernorm"], None, named["post_attention_layernorm"], None)


def describe(layer: FusedLayer) -> DecoderLayer | None:
    """Return the description with which one call computes `layer`; None if the call cannot compute a part of it."""
    attention, network, norms = layer.self_attn, layer.mlp, layer.norms
    if not isinstance(network, FusedFeedForward) or (attention.norms and not attention.norms_heads):
        return None
    qkv, out = _one_product(attention.projections), _one_product([attention.o_proj])
    gate_up, down = _one_product(network.projections), _one_product([network.down_proj])
    if qkv is None or gate_up is None or out is None or down is None:
        return None
    if norms.before_attention is None or norms.before_network is None:
        return None
    options = attention.shape.options
    query_norm, key_norm = attention.norms or (None, None)
    return DecoderLayer(
        qkv=qkv.layer_linear,
        out=out.layer_linear,
        gate_up=gate_up.layer_linear,
        down=down.layer_linear,
        before_attention=norms.before_attention.norm,
        after_attention=_norm_of(norms.after_attention),
        before_network=norms.before_network.norm,
        after_network=_norm_of(norms.after_network),
        query_norm=_norm_of(query_norm),
        key_norm=_norm_of(key_norm),
        num_heads=attention.num_heads,
        turns=attention.turns,
        scaling=attention.shape.scaling,
        activation=network.activation,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.float().contiguous(),
        factor=layer.factor,
    )


def _one_product(members: Sequence[nn.Module]) -> GroupedLinear | None:
    """Return the group that computes exactly `members`, in this order; None if there is none, or ranks share it."""
    linears = [member for member in members if isinstance(member, LoraLinear)]
    if len(linears) < len(members) or any(linear.group is not linears[0].group for linear in linears):
        return None
    ends = [0, *(linear.columns.stop for linear in linears)]
    starts, group = [linear.columns.start for linear in linears], linears[0].group
    is_whole = [*starts, ends[-1]] == [*ends[:-1], group.group.out_starts[-1]]
    return group if is_whole and not group.is_shared_by_ranks else None


def _norm_of(norm: FusedNorm | None) -> Norm | None:
    return None if norm is None else norm.norm


class FusedLayer(nn.Module):
    """Replaces a decoder layer."""

    def __init__(self, layer: Any, shape: LayerShape, family: Family) -> None:
        super().__init__()
        self.self_attn = FusedAttention(layer.self_attn, shape, family.norm)
        self.mlp = _feed_forward(layer.mlp, family.activations)
        self.norms = _Norms.of(layer, family.norm)
        self.factor = float(getattr(layer, "residual_multiplier", 1.0))

    def forward(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> Delta:
        """Change the residual stream `x` `[T, hidden_size]` in place; return what is still to be added to it.

        `delta` is what the layer before has returned. So one pass adds it and normalises the result.
        """
        norms = self.norms
        normed = self._enter(norms.before_attention, x, delta)
        change: Delta = self.self_attn(normed, position_embeddings, step)
        normed = self._enter(norms.before_network, x, change.normalised(norms.after_attention))
        change = self.mlp(normed)
        return change.normalised(norms.after_network)

    def _enter(self, norm: FusedNorm | None, x: torch.Tensor, delta: Delta | None) -> torch.Tensor:
        """Add `delta` to the residual stream in place, and return the next sublayer's input."""
        if delta is None:
            return x if norm is None else norm.normalise(x)
        if norm is None:
            return delta.add_to(x, self.factor)
        return norm.normalise(x, delta.rows, self.factor, delta.expand)


class FusedStack(nn.Module):
    """Replaces consecutive decoder layers that rotate queries and keys by the same angles."""

    def __init__(self, layers: Sequence[FusedLayer], described: Sequence[DecoderLayer], is_last: bool) -> None:
        """`described` is `describe` of each layer, or empty. After the last stack only some rows are read."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._indices = [layer.self_attn.layer_idx for layer in layers]
        self._described = DecoderLayers(described) if described else None
        self._is_last = is_last
        self._factor = layers[0].factor
        if described:
            product = _one_product([layers[0].self_attn.o_proj])
            assert product is not None, "`describe` has found it"
            self._bank: AdapterBank = product.bank

    def run_in_one_call(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> bool:
        """Change the rows `x` in place; for a step that needs the modules, do nothing and return False."""
        if self._described is None:
            return False
        bank, kv = self._bank, [step.layers[index] for index in self._indices]
        native = self._described.native_for(x, kv) if bank.extras is None else None
        if native is None:
            return False
        cos, sin = rotation
        adapters = None if bank.segments is None else LayerAdapters(bank.pool, bank.table, bank.segments)
        kept = step.kept_rows if self._is_last else None
        self._described.run(native, x, Rotation(cos[0], sin[0]), kv, step.batch, adapters, kept)
        return True

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: AttentionStep,
        **_: Any,
    ) -> torch.Tensor:
        """Change the residual stream `[1, T, hidden_size]` in place, and return it; see AttentionStep.kept_rows."""
        x = hidden_states[0]
        if not self.run_in_one_call(x, position_embeddings, attention_step):
            delta: Delta | None = None
            for layer in self.layers:
                delta = layer(x, delta, position_embeddings, attention_step)
            assert delta is not None, "a stack has a layer"
            delta.add_to(x, self._factor)
        return hidden_states
