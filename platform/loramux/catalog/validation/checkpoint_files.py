"""Tensors of the base's checkpoint, one at a time: a mapping of a whole shard would count against a job's memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from loramux_adapters.base import BaseDescription, LinearShape
from loramux_adapters.weights import read_tensor
from loramux_adapters.weights_file import ITEM_BYTES, TensorInfo
from loramux_kernels.quantized_weight import Quantization, quantize

if TYPE_CHECKING:
    from loramux.engine.execution.quantized_checkpoint import WeightFormat

_ONE_FILE = "model.safetensors"
_OLDER_NAMES = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("model.", ""),
)
"""Beginnings of names in a model of text and images, and in its checkpoints: transformers 5 still saves Qwen2-VL and
Qwen2.5-VL under these older names."""
_INDEX = "model.safetensors.index.json"

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Dtypes of the tensors of quantized linears, by their names in safetensors."""


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The base's weights in the form that is served, read from its checkpoint one at a time."""

    model_dir: str
    modules: Mapping[str, LinearShape]
    quantization: Quantization = "none"
    """Quantization of the linears when the base is loaded."""
    form: WeightFormat | None = None
    """Quantization of the checkpoint's own linears."""

    @classmethod
    def of(cls, model_dir: str, base: BaseDescription, quantization: Quantization = "none") -> BaseFiles:
        """Find the checkpoint's format. Imports transformers if the checkpoint is quantized, so a job without files
        must not call it.
        """
        fields = json.loads((Path(model_dir) / "config.json").read_bytes())
        form = None
        if (saved := fields.get("quantization_config")) and saved.get("quant_method") != "mxfp4":
            from loramux.engine.execution.quantized_checkpoint import format_of

            form = format_of(fields)
        return cls(model_dir, base.modules, quantization, form)

    @property
    def precision(self) -> str:
        """Return the text that names, in a report, the weights of both sides of a comparison."""
        if self.form is not None:
            return f"on the base's weights dequantized from {self.form.name}"
        if self.quantization != "none":
            return f"on the base's weights dequantized from {self.quantization}"
        return "on the base's own weights"

    @property
    def float32_bytes(self) -> float:
        """Return the bytes of the whole base in float32; infinite if the base is not saved as safetensors."""
        files = sorted(Path(self.model_dir).glob("*.safetensors"))
        if not files:
            return math.inf
        linears = {f"{name}." for name in self.modules} if self.form is not None else set()
        saved = ((name, info) for file in files for name, info in _infos(file).items())
        # A byte of a block of MXFP4, which transformers unpacks for PEFT, holds two weights.
        rest = sum(
            math.prod(info.shape) * (2 if name.endswith("_blocks") else 1)
            for name, info in saved
            if not _belongs(name, linears)
        )
        coded = sum(shape.in_features * shape.out_features for shape in self.modules.values()) if linears else 0
        return 4 * (rest + coded)

    def linear(self, name: str) -> nn.Linear | None:
        """Read a linear in float32; None if the checkpoint has this linear under another name or in another shape."""
        weight, bias = (self.parameter(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is None or weight.ndim != 2:
            return None
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.float(), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.float(), requires_grad=False)
        return linear

    def parameter(self, name: str) -> torch.Tensor | None:
        """Read a parameter of the model. A quantized linear's weight is returned in float32. None if the checkpoint
        does not have the parameter.
        """
        module, _, kind = name.rpartition(".")
        shape = self.modules.get(module) if kind == "weight" else None
        if shape is not None and self.form is not None and (stored := self._stored(module)):
            return self.form.read(stored, shape.in_features, shape.out_features).dequantize()
        found = read_parameter(self.model_dir, name)
        if found is None or shape is None or self.quantization == "none":
            return found
        return quantize(found, self.quantization).dequantize()

    def _stored(self, module: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantized linear; empty if the linear is not quantized."""
        assert self.form is not None, "asked of quantized checkpoints only"
        names = [name for name in _files_of(self.model_dir) if name.startswith(f"{module}.")]
        parts = {name.removeprefix(f"{module}."): name for name in names}
        if not any(marker in parts for marker in self.form.markers):
            return {}
        parts.pop("bias", None)
        return {part: _tensor(_files_of(self.model_dir)[name], name) for part, name in parts.items()}


def _belongs(name: str, linears: set[str]) -> bool:
    return any(name[:at] in linears for at in range(1, len(name)) if name[at - 1] == ".")


def _files_of(model_dir: str) -> dict[str, Path]:
    """Return the file of every tensor."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    return {name: file for file in files for name in _infos(file)}


def _tensor(file: Path, name: str) -> torch.Tensor:
    """Read a tensor of any dtype."""
    info = _infos(file)[name]
    with file.open("rb") as opened:
        opened.seek(info.start)
        data = bytearray(opened.read(info.end - info.start))
    return torch.frombuffer(data, dtype=DTYPES[info.dtype]).reshape(info.shape)


def read_parameter(model_dir: str, name: str) -> torch.Tensor | None:
    """Read a parameter as saved, under its name in the model or an older one; None if no tensor of these names has a
    float dtype of 16 or 32 bits.
    """
    older = (saved + name.removeprefix(module) for module, saved in _OLDER_NAMES if name.startswith(module))
    found = (_read_tensor(model_dir, candidate) for candidate in (name, *older))
    return next((tensor for tensor in found if tensor is not None), None)


def _read_tensor(model_dir: str, name: str) -> torch.Tensor | None:
    index = Path(model_dir) / _INDEX
    shards = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    file = Path(model_dir) / shards.get(name, _ONE_FILE)
    info = _infos(file).get(name) if file.is_file() else None
    if info is None or info.dtype not in ITEM_BYTES:
        return None
    with file.open("rb") as opened:
        return read_tensor(opened, info)


def _infos(file: Path) -> Mapping[str, TensorInfo]:
    """Read the header of a file of the operator, which is trusted."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        document = json.loads(opened.read(length))
    document.pop("__metadata__", None)
    return {
        name: TensorInfo(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in document.items()
    }
