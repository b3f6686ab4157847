"""An adapter's matrices in memory, in the dtype that serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from loramux_adapters.base import BaseDescription
from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.plan import AdapterPlan, Limits, LoraPair
from loramux_adapters.validate import WEIGHTS_NAME, inspect_adapter


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


class _OpenFile(Protocol):
    def get_tensor(self, name: str) -> torch.Tensor: ...


def load_adapter(directory: Path, base: BaseDescription, limits: Limits, dtype: torch.dtype) -> AdapterWeights:
    """Read the adapter in `directory` as `dtype`, after everything that can be checked without reading its weights.

    That the weights are finite is validate_adapter's question, asked once at upload; here only an overflow that the
    conversion to `dtype` itself makes is refused (`weights_overflow`). Raises AdapterRejected.
    """
    plan = inspect_adapter(directory, base, limits)
    try:
        with safe_open(directory / WEIGHTS_NAME, framework="pt", device="cpu") as file:
            modules = {pair.module: _load_pair(file, pair, dtype) for pair in plan.pairs}
    except SafetensorError as error:
        raise WeightsFileRejected("header_invalid", None, f"The safetensors file is not valid: {error}.") from error
    return AdapterWeights(plan, modules)


def _load_pair(file: _OpenFile, pair: LoraPair, dtype: torch.dtype) -> LoraWeights:
    return LoraWeights(_load(file, pair.a_key, dtype), _load(file, pair.b_key, dtype), pair.scale)


def _load(file: _OpenFile, key: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = file.get_tensor(key)
    converted = tensor.to(dtype).contiguous()
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not torch.isfinite(converted).all():
        raise WeightsFileRejected(
            "weights_overflow",
            key,
            f"{key} holds values beyond what {dtype} can express, in which this server runs its base.",
        )
    return converted
