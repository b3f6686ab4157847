"""No NaN and no infinity in a weights file, read in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.header import ITEM_BYTES, SafetensorsHeader, TensorInfo

CHUNK_BYTES = 4 << 20

# A float is not finite exactly when all bits of its exponent are set, which needs no conversion to see.
_EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def check_finite(path: Path, header: SafetensorsHeader) -> None:
    """Read every tensor of `path` once. Raises WeightsFileRejected: `weights_not_finite` or `weights_truncated`."""
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    with path.open("rb") as file:
        for name, tensor in header.tensors.items():
            if not _is_finite(file, tensor, buffer):
                raise WeightsFileRejected(
                    "weights_not_finite",
                    name,
                    f"{name} holds NaN or infinity, so every answer would be noise: the training diverged, or the "
                    "weights overflowed when they were converted.",
                )


def _is_finite(file: BufferedReader, tensor: TensorInfo, buffer: npt.NDArray[np.uint8]) -> bool:
    word, exponent = _EXPONENTS[tensor.dtype]
    file.seek(tensor.start)
    left = tensor.end - tensor.start
    assert CHUNK_BYTES % ITEM_BYTES[tensor.dtype] == 0
    while left:
        chunk = buffer[: min(left, CHUNK_BYTES)]
        if file.readinto(chunk.data) != len(chunk):
            raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
        if np.any(chunk.view(word) & exponent == exponent):
            return False
        left -= len(chunk)
    return True
