"""Modules that replace the base's linears, norms, embedding and output head and add the step's adapters.

`install` puts these modules, and those of mixtures (`experts`), into a transformers model. Each replaces the base's own
module and frees its weights, one group at a time, so two copies of the model are never in memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import BaseDescription, input_of, is_expert
from loramux_adapters.base_weights import BaseLinear, BaseWeights, LocalMatrix, QuantizedLinear, base_linear, weight_of
from loramux_adapters.experts import ExpertRouter, Experts, GroupedExperts, install_mixtures
from loramux_adapters.families import LATENT_EXPANSION, NormForm, reads_other_inputs
from loramux_adapters.latent import LatentLinear, expands_latents
from loramux_adapters.ranks import Ranks, Shard
from loramux_adapters.sharding import is_held_by
from loramux_kernels.decoder_layer import LayerLinear
from loramux_kernels.device import runs_triton
from loramux_kernels.format_choice import LinearsShape
from loramux_kernels.lora import can_be_joined, lora_shrink, rescale, run_expand
from loramux_kernels.packed_linear import (
    DEFAULT_PACKING,
    PackedLinear,
    Packing,
    as_multiplied,
    rows_linear,
    rows_weight,
)
from loramux_kernels.tables import LoraGroup, OwnWeights, PendingExpand


class GroupedLinear:
    """Linears that read the same input, computed together: one base GEMM, one shrink and one expand.

    The first member that is called with a tensor computes all members; the other members return their slices of the
    result. Members are matched by the identity of the input, so a model that gives them different tensors is slower,
    but still correct.
    """

    def __init__(
        self,
        linears: list[nn.Linear | QuantizedLinear],
        sites: list[Site],
        bank: AdapterBank,
        packing: Packing = DEFAULT_PACKING,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` are the ranks whose results add up to the output, if any. LoRA reads the rank's own inputs and adds
        to the rank's part of the result. So the pairs' results are in the same sum, and no additional data is sent.
        """
        self.linear = PackedLinear([weight_of(m) for m in linears], [_bias(m) for m in linears], *packing)
        self.group = LoraGroup(tuple(s.index for s in sites), tuple(s.out_features for s in sites))
        self.bank = bank
        self._ranks = ranks
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._members_left = 0

    def serve(self, x: torch.Tensor) -> torch.Tensor:
        """Return all members' outputs `[..., sum(out_features)]` for `x` `[..., in_features]`."""
        if self._output is None or self._input is not x:
            self._input, self._output = x, self._compute(x)
            self._members_left = len(self.group.sites)
        output = self._output
        self._members_left -= 1
        if self._members_left == 0:
            self._input = self._output = None
        return output

    @property
    def layer_linear(self) -> LayerLinear:
        """Base weights of this group, in the form that a call for a whole layer takes."""
        return LayerLinear(self.linear, self.group)

    @property
    def is_shared_by_ranks(self) -> bool:
        """True if the output is a sum over ranks."""
        return self._ranks is not None

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        y, expand = self.multiply(x.reshape(-1, x.shape[-1]))
        if expand is not None:
            run_expand(expand)
        return y.view(*x.shape[:-1], y.shape[-1])

    def multiply(self, x: torch.Tensor) -> tuple[torch.Tensor, PendingExpand | None]:
        """Return all members' outputs `[T, sum(out_features)]` for `x` `[T, in_features]`, and the expand that is left
        to the operator that reads them; None if nothing is left."""
        bank = self.bank
        rows, expand = self._scaled(x), None
        if (segments := bank.segments) is None:
            y = self.linear(rows)
        else:
            with bank.side_stream.beside(len(rows)) as join:
                v = lora_shrink(rows, bank.pool, bank.table, self.group, segments)
            y = self.linear(rows)
            join()
            expand = PendingExpand(v, bank.pool, bank.table, self.group, segments, y)
            # What changes the sum afterwards needs the whole sum.
            if not can_be_joined(expand) or bank.extras is not None or self._ranks is not None:
                run_expand(expand)
                expand = None
        if bank.extras is not None and bank.extras.columns is not None:
            rescale(y, bank.pool, bank.vectors.columns, self.group, bank.extras.columns)
        if self._ranks is not None:
            self._ranks.all_reduce(y)
        return y, expand

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the members' input: `rows`, or a scaled copy if an adapter of the step scales inputs."""
        bank = self.bank
        if bank.extras is None or bank.extras.inputs is None or len(self.group.sites) > 1:
            return rows  # a vector for an input that several sites read is refused at upload
        rows = rows.clone()
        inputs = LoraGroup(self.group.sites, (rows.shape[1],))
        rescale(rows, bank.pool, bank.vectors.inputs, inputs, bank.extras.inputs)
        return rows


class LoraLinear(nn.Module):
    """Replaces an nn.Linear of the base; returns its slice of the group's output."""

    def __init__(self, group: GroupedLinear, start: int, linear: nn.Linear | QuantizedLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.group = group
        self.columns = slice(start, start + linear.out_features)
        """Columns of this linear in the group's outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`, with the adapters of the bank's segments added."""
        return self.group.serve(x)[..., self.columns]


class SummedNorm(nn.Module):
    """Replaces a norm over all heads together if each rank has only some of the heads: an RMSNorm whose squares are
    added up over the ranks."""

    def __init__(self, base: Any, form: NormForm, ranks: Ranks) -> None:
        """`base`: the family's own norm, which has this form."""
        super().__init__()
        self.weight: torch.Tensor = base.weight
        self._eps = float(base.variance_epsilon)
        self._rounds_last = form.rounds_last
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., width]`, the rank's share of each row. A key head that several ranks repeat is counted once
        for each rank, in the sum and in the width."""
        values = x.float()
        squares = self._ranks.all_reduce(values.square().sum(-1, keepdim=True).contiguous())
        values = values * torch.rsqrt(squares / (x.shape[-1] * self._ranks.size) + self._eps)
        return (self.weight * values).to(x.dtype) if self._rounds_last else self.weight * values.to(x.dtype)


class AdaptedNorm(nn.Module):
    """Replaces a norm of the base."""

    def __init__(self, name: str, base: nn.Module, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._bank = bank

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight."""
        return self.base.get_parameter("weight")

    def own_weights(self, vectors: int = 1, added: float = 0.0) -> OwnWeights | None:
        """Return the weights with which the step's adapters replace this norm's; see OwnWeights."""
        return self._bank.own_weights(self._name, vectors, added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[1, T, width]`, or heads as `[1, T, heads, width]` or `[1, heads, T, width]`.

        Rows of an adapter with its own weight get that weight.
        """
        own = self.own_weights()
        if own is None:
            y: torch.Tensor = self.base(x)
            return y
        # A linear wrote the heads of a row one after the other, so the row dimension has the largest stride.
        rows = 1 if x.ndim == 3 or x.stride(1) >= x.stride(2) else 2
        weights = own.of_rows(self.weight, x.shape[rows])
        if x.ndim == 4 and rows == 1:
            weights = weights[:, None]
        replaced: torch.Tensor = functional_call(self.base, {"weight": weights}, (x,))
        return replaced


class AdaptedEmbedding(nn.Module):
    """Replaces the base's embedding."""

    def __init__(self, base: nn.Embedding, bank: AdapterBank, ranks: Ranks | None = None) -> None:
        """`ranks` are the ranks that share the vocabulary's rows in equal parts."""
        super().__init__()
        self.base = base
        self._bank = bank
        self._ranks = ranks

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight."""
        return self.base.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map `[..., T]` to `[..., T, hidden_size]`; adapters change the rows of their segments."""
        extras = self._bank.extras
        known = self._bank.num_tokens
        is_wide = extras is not None and extras.most_tokens > known
        y = self._look_up(input_ids.clamp(max=known - 1) if is_wide else input_ids)
        if extras is not None and extras.embedding:
            rows, ids = y.view(-1, y.shape[-1]), input_ids.reshape(-1)
            for part, first, last in extras.embedding:
                part.change_embeddings(rows[first:last], ids[first:last], self._factor)
        return y

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the base's embeddings, summed over ranks: a rank has the rows of the tokens in its share, and zeros
        for the others."""
        if self._ranks is None:
            found: torch.Tensor = self.base(input_ids)
            return found
        rows = len(self.base.weight)
        own = input_ids - self._ranks.rank * rows
        found = self.base(own.clamp(0, rows - 1))
        return self._ranks.all_reduce(found.masked_fill_(((own < 0) | (own >= rows))[..., None], 0.0))

    @property
    def _factor(self) -> torch.Tensor | float:
        """The factor of transformers' scaled embeddings, rounded as transformers rounds it."""
        scale = getattr(self.base, "embed_scale", None)
        return 1.0 if scale is None else torch.as_tensor(scale).to(self.weight)


class AdaptedHead(nn.Module):
    """Replaces the base's output head.

    If ranks share the vocabulary's rows, rank 0 gets the logits of all ranks and adds the adapters' changes. The other
    ranks return their own logits, which are not read.
    """

    def __init__(self, base: nn.Linear, bank: AdapterBank, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._ranks = ranks
        self._rows = rows_weight(base.weight.data)

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the sampled rows `[..., n, hidden_size]` to logits `[..., n, width]`: the width is the number of the
        base's tokens, or at least the largest number of tokens of a row. `StepExtras.forbid_unknown` excludes tokens
        that a row does not have.
        """
        y = rows_linear(x, self._rows, self.base.bias)
        if self._ranks is not None:
            y = self._ranks.gather_columns(y)
            if self._ranks.rank:
                return y
            y = y[..., : self._bank.num_tokens].contiguous()
        extras = self._bank.extras
        if extras is not None and extras.most_tokens > y.shape[-1]:
            y = functional.pad(y, (0, padded_width(extras.most_tokens, y.shape[-1]) - y.shape[-1]))
        if extras is not None and extras.head:
            logits, rows = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            for part, first, last in extras.head:
                part.change_logits(logits[first:last], rows[first:last])
        return y


ALIGNMENT = 16
"""Triton compiles a kernel anew for an integer that is divisible by it, and reads rows of such a width faster."""


def padded_width(num_tokens: int, base_tokens: int) -> int:
    """Return the width of logits that hold `num_tokens`: divisible by `ALIGNMENT` if, and only if, the base's is.

    Kernels that were compiled for the base's logits then serve these too; a compilation would stop every request.
    """
    if base_tokens % ALIGNMENT == 0:
        return -(-num_tokens // ALIGNMENT) * ALIGNMENT
    return num_tokens if num_tokens % ALIGNMENT else num_tokens + 1


def _bias(linear: nn.Linear | QuantizedLinear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.data


def install(
    model: nn.Module,
    base: BaseDescription,
    bank: AdapterBank,
    packing: Packing = DEFAULT_PACKING,
    shard: Shard | None = None,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> BaseWeights:
    """Replace every module of `model` that adapters change, and return the base's weights in the form that adapters
    need. Modules that read images or sound stay transformers' own.

    `packing` is that of linears and experts; embedding, head and routers are not packed. `shard` is
    this rank's place if `model` is its share of the base; the returned weights are then the rank's own. `track`
    iterates over the linears to pack, and may report progress.
    """
    ranks = None if shard is None else shard.ranks
    summed = install_mixtures(model, bank, packing, ranks, track)
    linears = install_linears(model, bank, packing, shard, summed, track)
    packed_bytes = _packed_bytes(model)
    for name, width in base.norms.items():
        if reads_other_inputs(name):
            continue
        if shard is not None and shard.sharding.outputs(name, shard.ranks.rank, width) is not None:
            replace_module(model, name, SummedNorm(model.get_submodule(name), shard.sharding.family.norm, shard.ranks))
        replace_module(model, name, AdaptedNorm(name, model.get_submodule(name), bank))
    if (vocabulary := base.vocabulary) is None:
        return BaseWeights(linears, {}, packed_bytes)
    embedding, head = model.get_submodule(vocabulary.embedding), model.get_submodule(vocabulary.head)
    assert isinstance(embedding, nn.Embedding), "described as one"
    assert isinstance(head, nn.Linear), "described as one"
    replace_module(model, vocabulary.embedding, AdaptedEmbedding(embedding, bank, ranks))
    replace_module(model, vocabulary.head, AdaptedHead(head, bank, ranks))
    linears[vocabulary.head] = base_linear(head, head, slice(None))
    matrices = {
        vocabulary.embedding: LocalMatrix(embedding.weight.data),
        vocabulary.head: LocalMatrix(head.weight.data),
    }
    return BaseWeights(linears, matrices, packed_bytes)


def _packed_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that were packed; members of a group share one."""
    modules = list(model.modules())
    linears = {module.group.linear for module in modules if isinstance(module, LoraLinear)}
    linears |= {module.packed_linear for module in modules if isinstance(module, ExpertRouter)}
    experts = (module for module in modules if isinstance(module, Experts | GroupedExperts))
    return sum(linear.num_bytes for linear in linears) + sum(module.num_bytes for module in experts)


def install_linears(
    model: nn.Module,
    bank: AdapterBank,
    packing: Packing = DEFAULT_PACKING,
    shard: Shard | None = None,
    summed: tuple[str, ...] = (),
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, BaseLinear]:
    """Replace every linear that is a site of `bank`, free its weights, and return a description of each.

    `summed`: names of modules whose whole result is added up over the ranks of `shard`. The results of linears in them
    are then not added up.

    The replaced modules' own parameters are released one group at a time, so two copies of the model are never in
    memory.
    """
    known = {}
    rank = 0 if shard is None else shard.ranks.rank
    sites = {name: site for name, site in bank.sites.items() if not is_expert(name) and is_held_by(rank, name)}
    for name in list(filter(reads_other_inputs, sites)):
        if isinstance(linear := model.get_submodule(name), nn.Linear):
            # Not the module itself: while an image is computed, its hooks add another adapter's changes (`tower`).
            known[name] = base_linear(linear, linear.forward, slice(None))
            del sites[name]
    for names in track(list(_groups(sites))):
        linears = [_linear(model, name) for name in names]
        attention = model.get_submodule(names[0].rpartition(".")[0])
        if names[0].endswith(LATENT_EXPANSION) and expands_latents(attention):
            weight = as_multiplied(weight_of(linears[0]), packing.quantization)
            site = bank.sites[names[0]]
            # A GPU never expands contexts.
            whole = None if runs_triton(bank.pool) else GroupedLinear(linears, [site], bank, packing).serve
            latent = LatentLinear(weight, attention, site, bank, whole)
            replace_module(model, names[0], latent)
            known[names[0]] = base_linear(linears[0], latent.multiply, slice(None), weight)
            release_weight(linears[0])
            continue
        ranks = None if shard is None else _summing(names, shard, summed)
        group = GroupedLinear(linears, [bank.sites[name] for name in names], bank, packing, ranks)
        start = 0
        for name, linear in zip(names, linears, strict=True):
            stand_in = LoraLinear(group, start, linear)
            replace_module(model, name, stand_in)
            multiplied = group.linear.as_multiplied(weight_of(linear))
            known[name] = base_linear(linear, group.linear, stand_in.columns, multiplied)
            start += linear.out_features
            release_weight(linear)
    return known


def _summing(names: list[str], shard: Shard, summed: tuple[str, ...]) -> Ranks | None:
    """Return the ranks over which a group's results are added up; None if the results are not added up."""
    if not shard.sharding.is_row_parallel(names[0]) or names[0].startswith(summed):
        return None
    return shard.ranks


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of this `name` in `model`."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def release_weight(linear: nn.Linear | QuantizedLinear) -> None:
    """Free everything that `linear` holds except its bias."""
    if isinstance(linear, QuantizedLinear):
        linear.release()
    else:
        del linear.weight


def _linear(model: nn.Module, name: str) -> nn.Linear | QuantizedLinear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear | QuantizedLinear), f"{name} is a site but no linear"
    return linear


def linears_shapes(sites: Mapping[str, Site]) -> list[LinearsShape]:
    """Return the shapes of the linears that `install` packs: members of a group are one linear."""
    experts = [(site.in_features, site.out_features) for name, site in sites.items() if is_expert(name)]
    groups = [
        [sites[name] for name in names] for names in _groups({n: s for n, s in sites.items() if not is_expert(n)})
    ]
    joined = [(group[0].in_features, sum(site.out_features for site in group)) for group in groups]
    return [LinearsShape(*shape, count) for shape, count in Counter(joined + experts).items()]


def _groups(sites: Mapping[str, Site]) -> Iterable[list[str]]:
    by_input: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(sites, key=lambda n: sites[n].index):
        by_input[input_of(name)].append(name)
    return by_input.values()
