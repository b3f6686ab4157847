"""An adapter's matrices in memory, in the dtype that serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import torch

from loramux_adapters.base import BaseDescription
from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.header import SafetensorsHeader, TensorInfo, read_header
from loramux_adapters.layout import Kind, Matrix
from loramux_adapters.parts import AdapterPlan, RowsPart, VectorKind
from loramux_adapters.plan import Limits, plan_adapter
from loramux_adapters.tensors import read_tensor
from loramux_adapters.validate import WEIGHTS_NAME, read_config


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One module's pair: `y += scale * (x @ a.T) @ b.T`. Contiguous, on the CPU."""

    a: torch.Tensor
    """`[rank, in_features]`"""
    b: torch.Tensor
    """`[out_features, rank]`"""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Everything that an adapter brings, by the name of the base's module; on the CPU."""

    plan: AdapterPlan
    modules: Mapping[str, LoraWeights]
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, out_features]`: the factor of each output of base and pair together, and what is added then."""
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, in_features]`: the same of each input."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[n, hidden_size]`: the embedding's or the head's, in the order of the tokens' ids."""
    magnitudes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features]`, of DoRA: what fit_to_base makes columns of."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[tokens, hidden_size]`: what PEFT saved of the base, for fit_to_base to compare."""

    def matrix(self, matrix: Matrix) -> torch.Tensor:
        """`[matrix.rows, matrix.width]`"""
        match matrix.kind:
            case Kind.A:
                found = self.modules[matrix.module].a
            case Kind.B:
                found = self.modules[matrix.module].b
            case Kind.COLUMNS:
                found = self.columns[matrix.module]
            case Kind.INPUTS:
                found = self.inputs[matrix.module]
            case Kind.ROWS:
                found = self.rows[matrix.module]
        return found.T if matrix.transposed else found


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
    pairs = {
        pair.module: LoraWeights(*pair.share(tensors[pair.a_key], tensors[pair.b_key]), pair.scale)
        for pair in plan.pairs
    }
    return AdapterWeights(
        plan,
        pairs,
        columns=_columns(plan, tensors),
        inputs={module: factor_only(v) for module, v in _vectors(plan, tensors, VectorKind.INPUT).items()},
        rows={part.module: _in_order(part, tensors[part.key]) for part in plan.rows},
        magnitudes=_vectors(plan, tensors, VectorKind.MAGNITUDE),
        copies={copy.module: tensors[copy.key] for copy in plan.copies if copy.key in tensors},
    )


def factor_only(vector: torch.Tensor) -> torch.Tensor:
    """`[2, n]`: the factors of `vector` `[n]`, and nothing added."""
    return torch.stack((vector, torch.zeros_like(vector)))


def _vectors(plan: AdapterPlan, tensors: Mapping[str, torch.Tensor], kind: VectorKind) -> dict[str, torch.Tensor]:
    return {part.module: tensors[part.key].flatten() for part in plan.vectors if part.kind is kind}


def _columns(plan: AdapterPlan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    columns = {module: factor_only(v) for module, v in _vectors(plan, tensors, VectorKind.OUTPUT).items()}
    for part in plan.vectors:
        if part.kind is VectorKind.LORA_BIAS:
            bias = tensors[part.key]
            columns[part.module] = torch.stack((torch.ones_like(bias), part.scale * bias))
    return columns


def _in_order(part: RowsPart, rows: torch.Tensor) -> torch.Tensor:
    """By token, so that a token's row is found by halving."""
    return rows if part.token_ids is None else rows[torch.tensor(part.token_ids).argsort()]


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
