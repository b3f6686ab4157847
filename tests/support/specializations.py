"""Properties of arguments for which Triton compiles a kernel anew, read from a launch, so that late compilations are
counted without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from loramux_kernels.cuda.launch import LEAST_DEPENDENT_ARCH, Launch


def specialization(launch: Launch) -> tuple[object, ...]:
    """Return everything that Triton compiles a kernel anew for."""
    function: Any = launch.kernel
    generic = getattr(function, "kwargs", None) or {p.name: p.do_not_specialize for p in function.params}
    never = set(generic.get("do_not_specialize") or ()) if "do_not_specialize" in generic else set(generic)
    arguments, options = launch.for_arch(LEAST_DEPENDENT_ARCH)
    keys: list[object] = [function.__name__, *options.items()]
    for name, parameter in inspect.signature(function.fn).parameters.items():
        value = arguments[name]
        if "constexpr" in str(parameter.annotation) or value is None:
            keys.append((name, value))
        elif isinstance(value, torch.Tensor):
            keys.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, float):
            keys.append((name, float))
        else:
            special = () if name in never else (value == 1, value % 16 == 0)
            keys.append((name, -(2**31) <= value < 2**31, special))
    return tuple(keys)
