"""An adapter's tensors in memory, in the serving dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import torch

from loramux_adapters.base import BaseDescription
from loramux_adapters.components import AdapterPlan, TokenRows, VectorKind
from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.layout import Matrix, MatrixKind
from loramux_adapters.plan import Limits, plan_adapter
from loramux_adapters.validate import WEIGHTS_NAME, read_config
from loramux_adapters.weights_file import SafetensorsHeader, TensorInfo, read_header


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
    """All tensors of an adapter, by the name of the base's module; on the CPU."""

    plan: AdapterPlan
    modules: Mapping[str, LoraWeights]
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, out_features]`: a factor for each output of base and pair together, and a shift that is added afterwards."""
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[2, in_features]`: a factor and a shift for each input."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[n, hidden_size]`: rows of the embedding or the head, in the order of the token ids."""
    magnitudes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features]`: DoRA's magnitudes; fit_to_base turns them into columns."""
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[out_features]`: biases that replace the base's; fit_to_base turns them into shifts of columns."""
    norms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[1, width]`: weights that replace those of norms."""
    classifier: torch.Tensor | None = None
    """`[labels, hidden_size]`: the head of a sequence classifier."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`[tokens, hidden_size]`: PEFT's copies of the base's matrices; fit_to_base compares them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        others = (self.columns, self.inputs, self.rows, self.magnitudes, self.biases, self.norms, self.copies)
        tensors = [tensor for mapping in others for tensor in mapping.values()]
        tensors += [] if self.classifier is None else [self.classifier]
        tensors += [tensor for pair in self.modules.values() for tensor in (pair.a, pair.b)]
        return sum(tensor.nbytes for tensor in tensors)

    def matrix(self, matrix: Matrix) -> torch.Tensor:
        """Return the tensor of `matrix`, `[matrix.rows, matrix.width]`."""
        match matrix.kind:
            case MatrixKind.A:
                found = self.modules[matrix.module].a
            case MatrixKind.B:
                found = self.modules[matrix.module].b
            case MatrixKind.COLUMNS:
                found = self.columns[matrix.module]
            case MatrixKind.INPUTS:
                found = self.inputs[matrix.module]
            case MatrixKind.ROWS:
                found = self.rows[matrix.module]
            case MatrixKind.NORM:
                found = self.norms[matrix.module]
            case MatrixKind.CLASSIFIER:
                assert self.classifier is not None, "the plan has it"
                found = self.classifier
        return found.T if matrix.transposed else found


def load_adapter(directory: Path, base: BaseDescription, limits: Limits, dtype: torch.dtype) -> AdapterWeights:
    """Read the adapter in `directory` as `dtype`, after everything that can be checked without reading its weights.

    validate_adapter proved at upload that the weights are finite. Here only an overflow of the conversion to `dtype` is
    refused (`weights_overflow`). Raises AdapterRejected.
    """
    config, path = read_config(directory), directory / WEIGHTS_NAME
    header = read_header(path)
    return read_weights(path, header, plan_adapter(config, header, base, limits), dtype)


def read_weights(path: Path, header: SafetensorsHeader, plan: AdapterPlan, dtype: torch.dtype) -> AdapterWeights:
    """Read the tensors of `header` as `dtype`; `plan` describes the same ones. Raises WeightsFileRejected."""
    with path.open("rb") as file:
        tensors = {name: _read(file, name, info, dtype) for name, info in header.tensors.items()}
    for key, original in plan.repeats:
        if key in tensors and not torch.equal(tensors[key], tensors[original]):
            raise WeightsFileRejected("copy_differs", key, f"{key} must equal {original}; which of them counts?")
    pairs = {
        pair.module: LoraWeights(*pair.share(tensors[pair.a_key], tensors[pair.b_key]), pair.scale)
        for pair in plan.pairs
    }
    return AdapterWeights(
        plan,
        pairs,
        columns=_columns(plan, tensors),
        inputs={module: factor_only(v) for module, v in _vectors(plan, tensors, VectorKind.INPUT).items()},
        rows={part.module: _in_order(part, _rows(part, tensors)) for part in plan.rows},
        magnitudes=_vectors(plan, tensors, VectorKind.MAGNITUDE),
        biases=_vectors(plan, tensors, VectorKind.BIAS),
        norms={module: vector[None] for module, vector in _vectors(plan, tensors, VectorKind.NORM).items()},
        classifier=None if plan.classifier is None else tensors[plan.classifier.key],
        copies={copy.module: tensors[copy.key] for copy in plan.copies if copy.key in tensors},
    )


def factor_only(vector: torch.Tensor) -> torch.Tensor:
    """Return `[2, n]`: `vector` `[n]` as factors, and shifts of zero."""
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


def _rows(part: TokenRows, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return all rows of `part`, the copied ones last."""
    if part.copied is None:
        return tensors[part.key]
    copied = tensors[part.copied.key][torch.tensor(part.copied.token_ids)]
    return torch.cat((tensors[part.key], copied)) if part.key else copied


def _in_order(part: TokenRows, rows: torch.Tensor) -> torch.Tensor:
    """Order the rows by token id, so that a token's row is found by bisection."""
    return rows if part.served_ids is None else rows[torch.tensor(part.served_ids).argsort()]


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


_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(file: BufferedReader, info: TensorInfo) -> torch.Tensor:
    """Read a tensor of a checked file, as saved, on the CPU. Raises WeightsFileRejected (`weights_truncated`)."""
    # Read, not mapped as the safetensors library does: a file that shrinks under a mapping kills the process.
    data = torch.empty(info.end - info.start, dtype=torch.uint8)
    file.seek(info.start)
    if file.readinto(data.numpy().data) != len(data):
        raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
    return data.view(_DTYPES[info.dtype]).view(info.shape)
