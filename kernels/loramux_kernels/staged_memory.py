"""Memory on the device that the host fills with one copy a step.

A copy of a small array costs the host 20 us, most of it for pinned memory and for the call. So the small arrays of a
step have places in one block of memory on the device, and the same places in a pinned buffer on the host. The host
writes them there, and `send` copies the part that was written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loramux_kernels.device import host_memory

ALIGNMENT = 16
"""Bytes: at other addresses Triton would compile another variant of a kernel."""

NUM_BUFFERS = 3
"""Buffers on the host, used in turn: the copies of the steps in flight may not have ended."""


class StagedArray:
    """An array of a `StagedMemory`: a tensor at a fixed address, and its place in the host's buffers."""

    def __init__(self, memory: StagedMemory, start: int, tensor: torch.Tensor, buffers: list[NDArray[Any]]) -> None:
        self._memory = memory
        self._start = start
        self._row_bytes = tensor.nbytes // max(len(tensor), 1)
        self._buffers = buffers
        self.tensor = tensor
        """The array on the device."""

    def on_host(self, count: int) -> NDArray[Any]:
        """Return the first `count` rows in the host's buffer, which `send` copies. Their contents are those of an
        earlier step."""
        turn = self._memory.mark(self._start, self._start + count * self._row_bytes)
        return self._buffers[turn][:count]


class StagedMemory:
    """Arrays on the device that one copy fills. The arrays that are written together are reserved one after the
    other."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._buffers = [host_memory((num_bytes,), torch.uint8, device).zero_() for _ in range(NUM_BUFFERS)]
        self._sent = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(NUM_BUFFERS)]
        self._used = 0
        self._turn = 0
        self._written = (num_bytes, 0)

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> StagedArray:
        """Return an array of zeros."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = start + dtype.itemsize * int(np.prod(shape))
        assert end <= len(self._memory), f"{end} bytes reserved of {len(self._memory)}"
        self._used = end
        tensor, *buffers = (part[start:end].view(dtype).view(shape) for part in (self._memory, *self._buffers))
        return StagedArray(self, start, tensor, [buffer.numpy() for buffer in buffers])

    def mark(self, start: int, end: int) -> int:
        """Note that the bytes [start, end) are written, and return the number of the buffer to write them to."""
        low, high = self._written
        self._written = min(low, start), max(high, end)
        return self._turn

    def send(self) -> None:
        """Copy what was written, in one copy, before the launches that follow on the current stream.

        Arrays between those that were written get contents of an earlier step.
        """
        low, high = self._written
        if low >= high:
            return
        self._memory[low:high].copy_(self._buffers[self._turn][low:high], non_blocking=True)
        if (sent := self._sent[self._turn]) is not None:
            sent.record()
        self._turn, self._written = (self._turn + 1) % NUM_BUFFERS, (len(self._memory), 0)
        if (earlier := self._sent[self._turn]) is not None:
            earlier.synchronize()  # returns at once: its step ended long ago
