"""A plain LoRA on disk as PEFT would save it, written tensor by tensor so that it is never in memory whole."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loramux_adapters.base import LinearShape
from loramux_adapters.convert.form import Pair
from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.parts import PREFIX
from loramux_adapters.validate import CONFIG_NAME, WEIGHTS_NAME

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlainLora:
    """The pairs that a LoRA will hold, in the order of the base's modules."""

    linears: Mapping[str, tuple[int, LinearShape]]
    """Rank and shape by the module's name."""
    base_model_name_or_path: str | None

    @property
    def max_rank(self) -> int:
        """The largest rank of any pair."""
        return max(rank for rank, _ in self.linears.values())

    @property
    def num_bytes(self) -> int:
        """Of all matrices, in float32."""
        return sum(
            rank * (shape.in_features + shape.out_features) * _ITEM_BYTES for rank, shape in self.linears.values()
        )

    def config(self) -> dict[str, Any]:
        """adapter_config.json: every module's alpha is its rank, for the scale is in the matrices."""
        common, _ = Counter(rank for rank, _ in self.linears.values()).most_common(1)[0]
        pattern = self._pattern(common)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": "none",
            "inference_mode": True,
            "r": common,
            "lora_alpha": common,
            "target_modules": list(self.linears),
            "rank_pattern": pattern,
            "alpha_pattern": pattern,
        }

    def _pattern(self, common: int) -> dict[str, int]:
        """Ranks other than `common`: by the last part of the name where its modules agree, else by module."""
        ranks: dict[str, set[int]] = {}
        for module, (rank, _) in self.linears.items():
            ranks.setdefault(_leaf(module), set()).add(rank)
        return {
            _leaf(module) if len(ranks[_leaf(module)]) == 1 else module: rank
            for module, (rank, _) in self.linears.items()
            if rank != common
        }

    def header(self) -> bytes:
        """The safetensors header, before its length."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for module, (rank, shape) in self.linears.items():
            for name, sides in (("lora_A", (rank, shape.in_features)), ("lora_B", (shape.out_features, rank))):
                end = position + sides[0] * sides[1] * _ITEM_BYTES
                entries[f"{PREFIX}{module}.{name}.weight"] = {
                    "dtype": "F32",
                    "shape": sides,
                    "data_offsets": (position, end),
                }
                position = end
        text = json.dumps(entries).encode()
        return text + b" " * (-len(text) % 8)


def write_lora(into: Path, plain: PlainLora, pairs: Iterable[tuple[str, Pair]]) -> None:
    """Write both files; `pairs` come in the order of `plain`. Raises WeightsFileRejected (`weights_overflow`)."""
    (into / CONFIG_NAME).write_text(json.dumps(plain.config(), indent=2))
    with (into / WEIGHTS_NAME).open("wb") as file:
        header = plain.header()
        file.write(struct.pack("<Q", len(header)) + header)
        for (module, (rank, shape)), (name, (a, b)) in zip(plain.linears.items(), pairs, strict=True):
            assert module == name
            assert (a.shape, b.shape) == ((rank, shape.in_features), (shape.out_features, rank))
            for matrix in (a, b):
                file.write(_rounded(matrix, module).numpy().data)


def _rounded(matrix: torch.Tensor, module: str) -> torch.Tensor:
    rounded = matrix.float().contiguous()
    if not torch.isfinite(rounded).all():
        raise WeightsFileRejected(
            "weights_overflow", None, f"The matrices of {module} multiply to values beyond what float32 can express."
        )
    return rounded


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
