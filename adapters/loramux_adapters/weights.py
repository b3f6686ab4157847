"""An adapter's matrices in memory, in the dtype that serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch

from loramux_adapters.base import BaseDescription
from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.header import SafetensorsHeader, TensorInfo, read_header
from loramux_adapters.plan import AdapterPlan, Limits, plan_adapter
from loramux_adapters.tensors import read_tensor
from loramux_adapters.validate import WEIGHTS_NAME, read_config


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One linear's matrices: `y += scale * (x @ a.T) @ b.T`. Contiguous, on the CPU."""

    a: torch.Tensor
    """`[rank, in_features]`"""
    b: torch.Tensor
    """`[out_features, rank]`"""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Every matrix of an adapter, by the name of the base's module."""

    plan: AdapterPlan
    modules: Mapping[str, LoraWeights]


def load_adapter(directory: Path, base: BaseDescription, limits: Limits, dtype: torch.dtype) -> AdapterWeights:
    """Read the adapter in `directory` as `dtype`, after everything that can be checked without reading its weights.

    That the weights are finite is validate_adapter's question, asked once at upload; here only an overflow that the
    conversion to `dtype` itself makes is refused (`weights_overflow`). Raises AdapterRejected.
    """
    config, path = read_config(directory), directory / WEIGHTS_NAME
    header = read_header(path)
    return read_weights(path, header, plan_adapter(config, header, base, limits), dtype)


def read_weights(path: Path, header: SafetensorsHeader, plan: AdapterPlan, dtype: torch.dtype) -> AdapterWeights:
    """The tensors of `header` as `dtype`; `plan` is made of the same ones. Raises WeightsFileRejected."""
    with path.open("rb") as file:
        tensors = {name: _read(file, name, info, dtype) for name, info in header.tensors.items()}
    modules = {pair.module: LoraWeights(tensors[pair.a_key], tensors[pair.b_key], pair.scale) for pair in plan.pairs}
    return AdapterWeights(plan, modules)


def _read(file: BufferedReader, name: str, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    tensor = read_tensor(file, info)
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not torch.isfinite(converted).all():
        raise WeightsFileRejected(
            "weights_overflow",
            name,
            f"{name} holds values beyond what {dtype} can express, in which this server runs its base.",
        )
    return converted
