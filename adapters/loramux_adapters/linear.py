"""The base's linears with the step's adapters added: one base GEMM, one shrink and one expand for a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from loramux_adapters.bank import AdapterBank, Site
from loramux_kernels import LoraGroup, PackedLinear, lora_expand, lora_shrink

SAME_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Names of sibling linears that transformers feeds one and the same tensor."""


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
        rows = x.reshape(-1, x.shape[-1])
        y = self.linear(rows)
        if (segments := self._bank.segments) is not None:
            v = lora_shrink(rows, self._bank.pool, self._bank.table, self.group, segments)
            lora_expand(v, self._bank.pool, self._bank.table, self.group, segments, y)
        return y.view(*x.shape[:-1], y.shape[-1])


class LoraLinear(nn.Module):
    """Stands where an nn.Linear of the base stood: its slice of the group's output."""

    def __init__(self, group: GroupedLinear, start: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self._columns = slice(start, start + linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, with the adapters of the bank's segments added."""
        return self._group.serve(x)[..., self._columns]


def install_linears(model: nn.Module, bank: AdapterBank) -> int:
    """Replace every linear that is a site of `bank`, and free the weights it held; returns the bytes of base weights.

    The replaced modules' own parameters are released one group at a time, so that at no moment two copies of the
    whole model are in memory.
    """
    total = 0
    for names in _groups(bank.sites):
        linears = [_linear(model, name) for name in names]
        group = GroupedLinear(linears, [bank.sites[name] for name in names], bank)
        total += group.linear.weight_bytes
        start = 0
        for name, linear in zip(names, linears, strict=True):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoraLinear(group, start, linear))
            start += linear.out_features
            del linear.weight
    return total


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} is a site but no linear"
    return linear


def _groups(sites: Mapping[str, Site]) -> Iterable[list[str]]:
    by_input: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(sites, key=lambda n: sites[n].index):
        parent, _, attribute = name.rpartition(".")
        family = next((min(family) for family in SAME_INPUT if attribute in family), attribute)
        by_input[parent, family].append(name)
    return by_input.values()


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.data
