"""A linear of the base between its checkpoint and its packing, where its weight is quantized."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from loramux_kernels import QuantizedWeight, Weight


class QuantizedLinear(nn.Module):
    """A linear of the base whose weight the checkpoint holds as codes, before it is packed."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self._quantized: QuantizedWeight | None = None

    def hold(self, weight: QuantizedWeight) -> None:
        """Take the weight, which moves between devices with the module from here on."""
        self._quantized = weight
        for name in ("codes", "scales", "offsets", "order"):
            self.register_buffer(name, getattr(weight, name), persistent=False)

    def release(self) -> None:
        """Free the weight, which has been packed."""
        self._quantized = None
        for name in ("codes", "scales", "offsets", "order"):
            delattr(self, name)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight."""
        assert self._quantized is not None, "read from the checkpoint"
        return self._quantized.with_tensors(dict(self.named_buffers()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`; a model is probed by it before it is packed."""
        return functional.linear(x, self.quantized.dequantize().to(x.dtype), self.bias)


def weight_of(linear: nn.Linear | QuantizedLinear) -> Weight:
    """Return a linear's weight `[out_features, in_features]` as it is held."""
    return linear.quantized if isinstance(linear, QuantizedLinear) else linear.weight.data
