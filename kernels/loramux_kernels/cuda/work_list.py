"""Work items of a persistent launch: cut once a step on the host, in one buffer on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loramux_kernels.device import stage, to_device

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WorkList:
    """Items of a launch; its programs read their number from the device, so a captured launch serves any number."""

    work: torch.Tensor
    """int32[1 + capacity, width]; work[0, 0] is the number of items, which follow."""

    def refill(self, items: Ints) -> None:
        """Replace the items `[n, width]` in place, n at most the capacity: for launches held in a CUDA graph."""
        assert len(items) < len(self.work), f"{len(items)} items in a list that holds {len(self.work) - 1}"
        self.work[: len(items) + 1].copy_(stage(_with_header(items), self.work.device), non_blocking=True)


def upload(lists: Sequence[Ints], device: torch.device) -> list[WorkList]:
    """Copy lists of items `[n, width]` to the device, in one transfer; all have the same width."""
    on_device = to_device(np.concatenate([_with_header(items) for items in lists]), device)
    return [WorkList(part) for part in on_device.split([len(items) + 1 for items in lists])]


def reserve(capacity: int, width: int, device: torch.device) -> WorkList:
    """An empty list with room for `capacity` items."""
    return WorkList(torch.zeros(1 + capacity, width, dtype=torch.int32, device=device))


def cut(lengths: Ints, size: int | Ints) -> tuple[Ints, Ints]:
    """Cut runs of the given lengths into pieces of at most `size`: (run of each piece, its start within the run)."""
    pieces = -(-lengths // size)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return owner, index * (size if isinstance(size, int) else size[owner])


def _with_header(items: Ints) -> NDArray[np.int32]:
    rows = np.zeros((len(items) + 1, items.shape[1]), dtype=np.int32)
    rows[0, 0] = len(items)
    rows[1:] = items
    return rows
