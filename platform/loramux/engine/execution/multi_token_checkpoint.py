"""The head for multi-token prediction in a checkpoint: where its tensors are, and its weights read from them.

If a checkpoint has several heads, the first drafts all tokens. Some families save the base's embedding and output
matrix with the head once more: such copies are not read. Linears are codes if the checkpoint is quantized and did not
leave the head out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.quantized_checkpoint import (
    WeightFormat,
    coded_linears,
    format_of,
    read_tensor,
    read_weight,
)
from loramux.engine.execution.sharded_checkpoint import files_by_key
from loramux_adapters.base import served_config
from loramux_adapters.base_weights import COMPARED_ROWS, QuantizedLinear
from loramux_adapters.families import tensors_of_heads

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
COPIES = {"embed_tokens.weight": (EMBEDDING,), "lm_head.weight": (OUTPUT, EMBEDDING)}
"""Matrices of a head, and the names of the base's; the first that the checkpoint has."""

Place = tuple[Path, str]
"""A tensor's file and its name there."""


@dataclass(frozen=True, slots=True)
class StoredHead:
    """The first head in a checkpoint's files, without copies of the base's matrices."""

    places: Mapping[str, Place]
    """Its tensors by their names in `MultiTokenHead`, where experts are stacked."""
    form: WeightFormat | None
    """The format of linears that are stored as codes; None: the checkpoint is not quantized."""

    @classmethod
    def of(cls, directory: Path) -> StoredHead:
        """Find the head of the checkpoint in `directory`; without a head `places` is empty. Raises UnsupportedModel."""
        config, files = served_config(directory), files_by_key(directory)
        heads = tensors_of_heads(config, files)
        places = {part: (files[key], key) for key, (head, part) in heads.items() if head == 0}
        for part, names in COPIES.items():
            base = next((name for name in names if name in files), None)
            if part in places and base is not None and _are_equal(places[part], (files[base], base)):
                del places[part]
        return cls(places, format_of(vars(config)))

    @property
    def coded(self) -> set[str]:
        """The linears that are stored as codes."""
        return set() if self.form is None else coded_linears(self.places, self.form)

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights in memory: `itemsize` for an element, and codes as they are stored."""
        found, coded = 0, self.coded
        for part, (path, key) in self.places.items():
            with safe_open(path, framework="pt") as file:
                held = file.get_slice(key)
                shape, dtype = held.get_shape(), held.get_dtype()
            is_code = _linear_of(part, coded) is not None
            found += math.prod(shape) * (_itemsize_of(dtype) if is_code else itemsize)
        return found

    def read_codes(self, name: str, linear: nn.Linear) -> QuantizedLinear:
        """Read the linear `name` of `coded`, of the shape of `linear`. Raises UnsupportedModel."""
        assert self.form is not None, "it has codes"
        has_bias = linear.bias is not None
        held = QuantizedLinear(linear.in_features, linear.out_features, has_bias, linear.weight.dtype)
        own = {part: place for part, place in self.places.items() if _linear_of(part, {name}) is not None}
        stored = {
            part.removeprefix(f"{name}."): read_tensor(*place)
            for part, place in own.items()
            if not (has_bias and part == f"{name}.bias")
        }
        try:
            held.hold(read_weight(stored, self.form, held.in_features, held.out_features))
        except ValueError as error:
            raise UnsupportedModel(f"{name} of the head for multi-token prediction {error}") from error
        return held

    def read(
        self, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype, without: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Read the tensors, in `dtypes` by their names or else in `dtype`; of the linears `without`, biases alone."""
        found = {
            # A copy, because a tensor keeps its whole file in memory.
            part: read_tensor(*place).to(dtypes.get(part, dtype), copy=True)
            for part, place in self.places.items()
            if part.endswith(".bias") or _linear_of(part, without) is None
        }
        _stack_experts(found)
        return found


def _linear_of(part: str, linears: Collection[str]) -> str | None:
    """Return the linear, of `linears`, to which the tensor `part` belongs; None: to none."""
    return next((name for name in linears if part.startswith(f"{name}.")), None)


def _itemsize_of(dtype: str) -> int:
    """Return the bytes of an element, by safetensors' name of its dtype, such as F8_E4M3 or I32."""
    bits = "".join(character for character in dtype.partition("_")[0] if character.isdecimal())
    return max(1, int(bits or 8) // 8)


def _are_equal(one: Place, other: Place) -> bool:
    """Compare two matrices of a checkpoint, some rows at a time."""
    with safe_open(one[0], framework="pt") as first, safe_open(other[0], framework="pt") as second:
        a, b = first.get_slice(one[1]), second.get_slice(other[1])
        shape: list[int] = a.get_shape()
        if (shape, a.get_dtype()) != (b.get_shape(), b.get_dtype()):
            return False

        def rows(matrix: Any, start: int) -> torch.Tensor:
            taken: torch.Tensor = matrix[start : start + COMPARED_ROWS]
            return taken

        return all(torch.equal(rows(a, start), rows(b, start)) for start in range(0, shape[0], COMPARED_ROWS))


def _stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Stack the weights of experts that were saved one by one, as transformers does for the base's; none if one is
    absent."""
    prefix = "layers.0.mlp.experts."
    count = len({name.split(".")[4] for name in tensors if name.startswith(prefix) and name.endswith(".weight")})
    names = {
        projection: [f"{prefix}{expert}.{projection}.weight" for expert in range(count)]
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    if not count or any(name not in tensors for group in names.values() for name in group):
        return
    gate, up, down = (torch.stack([tensors.pop(name) for name in group]) for group in names.values())
    tensors[f"{prefix}gate_up_proj"] = torch.cat((gate, up), dim=1)
    tensors[f"{prefix}down_proj"] = down
