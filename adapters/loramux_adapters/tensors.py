"""One tensor of a checked file in memory."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader

import torch

from loramux_adapters.errors import WeightsFileRejected
from loramux_adapters.header import TensorInfo

_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(file: BufferedReader, info: TensorInfo) -> torch.Tensor:
    """The tensor as it lies in `file`, on the CPU. Raises WeightsFileRejected (`weights_truncated`)."""
    # Read, not mapped as the safetensors library does: a file that shrinks under a mapping ends the process.
    data = torch.empty(info.end - info.start, dtype=torch.uint8)
    file.seek(info.start)
    if file.readinto(data.numpy().data) != len(data):
        raise WeightsFileRejected("weights_truncated", None, "The file became shorter while it was read.")
    return data.view(_DTYPES[info.dtype]).view(info.shape)
