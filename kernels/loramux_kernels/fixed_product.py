"""Matrix products whose rows do not depend on each other, in the place of torch's, for every module of a model.

fixed_product   y = x @ weight + bias, each element's sum in one order for any number of rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loramux_kernels.device import runs_triton

_BATCHED = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
_OTHERS = frozenset(("addmm", "addmv", "mv", "baddbmm", "addbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm"))


def fixed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight + bias` `[rows, columns]` in the dtype of `x`: `x` `[rows, inputs]` and `weight`
    `[inputs, columns]` have any strides, `bias` is `[columns]`. Sums are float32."""
    if runs_triton(x):
        from loramux_kernels.cuda.fixed_product import fixed_product as launch

        return launch(x, weight, bias)
    return fixed_product_reference(x, weight, bias)


def fixed_product_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `fixed_product` in torch, on any device, one row after the other."""
    rows = [row @ weight.float() for row in x.float()]
    y = torch.stack(rows) if rows else x.new_zeros(0, weight.shape[1], dtype=torch.float32)
    return (y if bias is None else y + bias.float()).to(x.dtype)


class FixedProducts(TorchDispatchMode):
    """While it is active, torch's products of two matrices are `fixed_product`. Other products are refused, because
    their order of sums is not known."""

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        """`refuse` makes the exception for the name of an operator that is not served."""
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return fixed_product(args[0], args[1], None)
        if func is torch.ops.aten.addmm.default and not kwargs and args[0].ndim == 1:
            return fixed_product(args[1], args[2], args[0])
        # A batched product over one input is no sum: rotary embeddings are products of this kind.
        is_sum = func in _BATCHED and args[-2].shape[-1] > 1
        if is_sum or func.__name__.split(".")[0] in _OTHERS:
            raise self._refuse(func.__name__)
        # Without gradients, torch passes linear, matmul and einsum here before it reduces them to the operators above.
        with self:
            reduced = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if reduced is NotImplemented else reduced
