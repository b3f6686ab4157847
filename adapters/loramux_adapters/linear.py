"""The base's linears with the step's adapters added: one base GEMM, one shrink and one expand for a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import input_of, is_part
from loramux_adapters.base_weights import BaseLinear, base_linear
from loramux_kernels import LoraGroup, PackedLinear, lora_expand, lora_shrink, rescale


class GroupedLinear:
    """Linears that read the same input, computed together.

    The first member called with a tensor computes all of them; the others take their slices of that result. Members
    are matched by the identity of the input, so a model that feeds them different tensors is merely slower.
    """

    def __init__(self, linears: list[nn.Linear], sites: list[Site], bank: AdapterBank) -> None:
        self.linear = PackedLinear([m.weight.data for m in linears], [_bias(m) for m in linears])
        self.group = LoraGroup(tuple(s.index for s in sites), tuple(s.out_features for s in sites))
        self._bank = bank
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._members_left = 0

    def serve(self, x: torch.Tensor) -> torch.Tensor:
        """All members' outputs `[..., sum(out_features)]` for `x` `[..., in_features]`."""
        if self._output is None or self._input is not x:
            self._input, self._output = x, self._compute(x)
            self._members_left = len(self.group.sites)
        output = self._output
        self._members_left -= 1
        if self._members_left == 0:
            self._input = self._output = None
        return output

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        bank = self._bank
        rows = self._scaled(x.reshape(-1, x.shape[-1]))
        y = self.linear(rows)
        if (segments := bank.segments) is not None:
            v = lora_shrink(rows, bank.pool, bank.table, self.group, segments)
            lora_expand(v, bank.pool, bank.table, self.group, segments, y)
        if bank.beyond is not None and bank.beyond.columns is not None:
            rescale(y, bank.pool, bank.vectors.columns, self.group, bank.beyond.columns)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """What the members read: `rows`, or a copy where an adapter of the step scales inputs."""
        bank = self._bank
        if bank.beyond is None or bank.beyond.inputs is None or len(self.group.sites) > 1:
            return rows  # a vector for an input that several sites read is refused at upload
        rows = rows.clone()
        inputs = LoraGroup(self.group.sites, (rows.shape[1],))
        rescale(rows, bank.pool, bank.vectors.inputs, inputs, bank.beyond.inputs)
        return rows


class LoraLinear(nn.Module):
    """Stands where an nn.Linear of the base stood: its slice of the group's output."""

    def __init__(self, group: GroupedLinear, start: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self.columns = slice(start, start + linear.out_features)
        """Where its outputs stand among its group's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, with the adapters of the bank's segments added."""
        return self._group.serve(x)[..., self.columns]


def install_linears(model: nn.Module, bank: AdapterBank) -> dict[str, BaseLinear]:
    """Replace every linear that is a site of `bank` and free the weights it held; what the base still knows of them.

    The replaced modules' own parameters are released one group at a time, so that at no moment two copies of the
    whole model are in memory.
    """
    known = {}
    for names in _groups({name: site for name, site in bank.sites.items() if not is_part(name)}):
        linears = [_linear(model, name) for name in names]
        group = GroupedLinear(linears, [bank.sites[name] for name in names], bank)
        start = 0
        for name, linear in zip(names, linears, strict=True):
            stand_in = LoraLinear(group, start, linear)
            replace_module(model, name, stand_in)
            known[name] = base_linear(linear, group.linear, stand_in.columns)
            start += linear.out_features
            del linear.weight
    return known


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` stands in `model`."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} is a site but no linear"
    return linear


def _groups(sites: Mapping[str, Site]) -> Iterable[list[str]]:
    by_input: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(sites, key=lambda n: sites[n].index):
        by_input[input_of(name)].append(name)
    return by_input.values()


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.data
