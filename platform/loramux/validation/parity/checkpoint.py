"""Weights of the base, straight from its checkpoint: a file's header, or one linear at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

_INDEX = "model.safetensors.index.json"


def float32_bytes(model_dir: str) -> float:
    """What the whole base takes in float32; infinite where it is not saved as safetensors."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    return 4 * sum(map(_numel, files)) if files else math.inf


def read_linear(model_dir: str, name: str) -> nn.Linear | None:
    """The linear `name` in float32; None where the checkpoint has it under another name, or in another form."""
    weight, bias = (_read(Path(model_dir), f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2:
        return None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _numel(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _read(model_dir: Path, tensor: str) -> torch.Tensor | None:
    index = model_dir / _INDEX
    shards = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    file = model_dir / shards.get(tensor, "model.safetensors")
    if not file.is_file():
        return None
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(tensor).float() if tensor in tensors.keys() else None  # noqa: SIM118
