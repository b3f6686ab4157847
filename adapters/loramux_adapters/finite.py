"""No NaN, no infinity, and nothing that becomes infinite in the dtype that serves; read in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.header import ITEM_BYTES, SafetensorsHeader, TensorInfo

CHUNK_BYTES = 4 << 20

# Without their sign, floats are ordered as their bits are: what is not finite is what is not below infinity's bits.
_INFINITY: Mapping[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_ROUNDED_TO_INFINITY: Mapping[tuple[str, str], int] = {
    ("F32", "F16"): 0x477F_F000,  # 65,520
    ("F32", "BF16"): 0x7F7F_8000,
    ("BF16", "F16"): 0x4780,  # 65,536
}
"""From (the file's dtype, the serving one): the bits from which on a value has no finite neighbour."""


def check_finite(path: Path, header: SafetensorsHeader, serving: str = "F32") -> None:
    """Read every tensor of `path` once; `serving` is the dtype they are converted to when they are served.

    Raises WeightsFileRejected: `weights_not_finite`, `weights_overflow` or `weights_truncated`.
    """
    buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
    with path.open("rb") as file:
        for name, tensor in header.tensors.items():
            largest = _largest_bits(file, tensor, buffer)
            if largest >= _INFINITY[tensor.dtype][1]:
                raise WeightsFileRejected(
                    "weights_not_finite",
                    name,
                    f"{name} holds NaN or infinity, so every answer would be noise: the training diverged, or the "
                    "weights overflowed when they were converted.",
                )
            if largest >= _ROUNDED_TO_INFINITY.get((tensor.dtype, serving), largest + 1):
                raise WeightsFileRejected(
                    "weights_overflow",
                    name,
                    f"{name} holds values beyond what {serving} can express, in which this server runs its base.",
                )


def _largest_bits(file: BufferedReader, tensor: TensorInfo, buffer: npt.NDArray[np.uint8]) -> int:
    """The bits of the tensor's largest magnitude; every NaN counts as larger than infinity."""
    word, infinity = _INFINITY[tensor.dtype]
    magnitude = (1 << (8 * ITEM_BYTES[tensor.dtype] - 1)) - 1
    assert CHUNK_BYTES % ITEM_BYTES[tensor.dtype] == 0
    file.seek(tensor.start)
    left, largest = tensor.end - tensor.start, 0
    while left and largest < infinity:
        chunk = buffer[: min(left, CHUNK_BYTES)]
        if file.readinto(chunk.data) != len(chunk):
            raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
        largest = max(largest, int(np.max(chunk.view(word) & magnitude)))
        left -= len(chunk)
    return largest
