"""Installation of the modules that serve adapters: each replaces the base's own and frees the weights it held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import BaseDescription, input_of, is_expert
from loramux_adapters.base_weights import BaseLinear, BaseWeights, LocalMatrix, base_linear
from loramux_adapters.experts import Experts, GroupedExperts, Router, install_mixtures
from loramux_adapters.modules import AdaptedEmbedding, AdaptedHead, AdaptedNorm, GroupedLinear, LoraLinear, SummedNorm
from loramux_adapters.quantized_linear import QuantizedLinear, weight_of
from loramux_adapters.ranks import Ranks, Shard
from loramux_kernels import Quantization


def install(
    model: nn.Module,
    base: BaseDescription,
    bank: AdapterBank,
    quantization: Quantization = "none",
    shard: Shard | None = None,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> BaseWeights:
    """Replace every module of `model` that adapters may touch, and return what they need of the base's weights.

    `quantization` is the format of linears and experts; embedding, head and routers stay as they are. `shard` is this
    rank's place where `model` is its share of the base; the weights that are returned are then the rank's own.
    `track` goes through what there is to pack, and may report how far it is.
    """
    ranks = None if shard is None else shard.ranks
    summed = install_mixtures(model, bank, quantization, ranks, track)
    linears = install_linears(model, bank, quantization, shard, summed, track)
    packed_bytes = _packed_bytes(model)
    for name, width in base.norms.items():
        if shard is not None and shard.sharding.outputs(name, shard.ranks.rank, width) is not None:
            replace_module(model, name, SummedNorm(model.get_submodule(name), shard.ranks))
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
    linears |= {module.packed_linear for module in modules if isinstance(module, Router)}
    experts = (module for module in modules if isinstance(module, Experts | GroupedExperts))
    return sum(linear.num_bytes for linear in linears) + sum(module.num_bytes for module in experts)


def install_linears(
    model: nn.Module,
    bank: AdapterBank,
    quantization: Quantization = "none",
    shard: Shard | None = None,
    summed: tuple[str, ...] = (),
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, BaseLinear]:
    """Replace every linear that is a site of `bank`, free its weights, and return a description of each.

    `summed`: names of modules whose whole result is added up over the ranks of `shard`, so that no linear in them is.

    The replaced modules' own parameters are released one group at a time, so that at no moment two copies of the
    whole model are in memory.
    """
    known = {}
    sites = {name: site for name, site in bank.sites.items() if not is_expert(name)}
    for names in track(list(_groups(sites))):
        linears = [_linear(model, name) for name in names]
        ranks = None if shard is None else _summing(names, shard, summed)
        group = GroupedLinear(linears, [bank.sites[name] for name in names], bank, quantization, ranks)
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
    """Return the ranks over which a group's results are added up; None where they are not."""
    if not shard.sharding.is_row_parallel(names[0]) or names[0].startswith(summed):
        return None
    return shard.ranks


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` stands in `model`."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def release_weight(linear: nn.Linear | QuantizedLinear) -> None:
    """Free what `linear` holds beside its bias."""
    if isinstance(linear, QuantizedLinear):
        linear.release()
    else:
        del linear.weight


def _linear(model: nn.Module, name: str) -> nn.Linear | QuantizedLinear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear | QuantizedLinear), f"{name} is a site but no linear"
    return linear


def _groups(sites: Mapping[str, Site]) -> Iterable[list[str]]:
    by_input: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(sites, key=lambda n: sites[n].index):
        by_input[input_of(name)].append(name)
    return by_input.values()
