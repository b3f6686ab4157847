"""Tensors of the base's checkpoint, one at a time: a mapping of a whole shard would count against a job's memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from loramux_adapters import TensorInfo
from loramux_adapters.weights import read_tensor
from loramux_adapters.weights_file import ITEM_BYTES

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def float32_bytes(model_dir: str) -> float:
    """Return the size of the whole base in float32; infinite where it is not saved as safetensors."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    return 4 * sum(math.prod(info.shape) for file in files for info in _infos(file).values()) if files else math.inf


def read_linear(model_dir: str, name: str) -> nn.Linear | None:
    """Read the linear `name` in float32; None where the checkpoint has it under another name or in another shape."""
    weight, bias = (read_parameter(model_dir, f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2:
        return None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.float(), requires_grad=False)
    return linear


def read_parameter(model_dir: str, name: str) -> torch.Tensor | None:
    """Read a tensor as saved; None where there is none of that name in a float dtype of 16 or 32 bits."""
    index = Path(model_dir) / _INDEX
    shards = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    file = Path(model_dir) / shards.get(name, _ONE_FILE)
    info = _infos(file).get(name) if file.is_file() else None
    if info is None or info.dtype not in ITEM_BYTES:
        return None
    with file.open("rb") as opened:
        return read_tensor(opened, info)


def _infos(file: Path) -> Mapping[str, TensorInfo]:
    """Read the header of a file of the operator's own, which is trusted."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        document = json.loads(opened.read(length))
    document.pop("__metadata__", None)
    return {
        name: TensorInfo(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in document.items()
    }
