"""Adapters on the linears that read images: those of a vision tower and of its connector.

A tower computes one image of one request at a time. So its linears stay torch's own, and hooks add the changes of the
request's adapter while the image is computed, by PEFT's formula `W x + scale * B A x`. No weights are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from loramux_adapters.families import reads_other_inputs
from loramux_adapters.weights import AdapterWeights, LoraWeights


def linears_of_tower(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of `model` that read images, by name."""
    found = ((name, part) for name, part in model.named_modules() if reads_other_inputs(name))
    return {name: part for name, part in found if isinstance(part, nn.Linear)}


@contextmanager
def changed_linears(linears: Mapping[str, nn.Linear], weights: AdapterWeights) -> Iterator[None]:
    """Let `linears`, by their names in the model, compute in this block as an adapter that was fitted to the base
    changes them."""
    handles = []
    try:
        for name, linear in linears.items():
            if (factors := weights.inputs.get(name)) is not None:
                handles.append(linear.register_forward_pre_hook(partial(_scale_input, factors)))
            pair, columns = weights.modules.get(name), weights.columns.get(name)
            if pair is not None or columns is not None:
                handles.append(linear.register_forward_hook(partial(_change_output, pair, columns)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scale_input(factors: torch.Tensor, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x = inputs[0]
    return torch.addcmul(factors[1].to(x.device), x, factors[0].to(x.device))


def _change_output(
    pair: LoraWeights | None,
    columns: torch.Tensor | None,
    _: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    y: torch.Tensor,
) -> torch.Tensor:
    # Copied here, and not before, because only here the current stream is the tower's.
    if pair is not None:
        y = y + (inputs[0] @ pair.a.to(y.device).T) @ pair.b.to(y.device).T * pair.scale
    return y if columns is None else torch.addcmul(columns[1].to(y.device), y, columns[0].to(y.device))
