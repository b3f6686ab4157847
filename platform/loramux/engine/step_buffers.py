"""A step's inputs on the device, at addresses that never change, filled from pinned memory without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.engine.forward import StepInputs
from loramux.engine.packing import PackedStep
from loramux.engine.step import PENDING
from loramux_kernels import AttentionBatch

NO_SLOT = -1
"""In `slot_mapping`: a padding row, whose KV is stored nowhere."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on `device`; on a GPU through pinned memory, so that the host goes on at once."""
    return stage(array, device).to(device, non_blocking=True)


def stage(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` where `device` can copy it from on its own; torch keeps the memory until that has happened."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class StepBuffers:
    """Inputs of steps up to `max_rows` rows and `max_sequences` sequences of `max_blocks` pages each."""

    def __init__(self, max_rows: int, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self.max_sequences = max_sequences
        self._device = device
        self._rows = torch.zeros(4, max_rows, dtype=torch.int64, device=device)
        self._rows[2] = NO_SLOT
        self._block_table = torch.zeros(max_sequences, max_blocks, dtype=torch.int32, device=device)

    def fill(self, packed: PackedStep, sources: NDArray[np.int64], sampled: torch.Tensor | None) -> StepInputs:
        """Replace what the buffers hold.

        A PENDING token is taken from `sampled`, the tokens that an earlier step leaves on the device: row i's from
        `sampled[sources[i]]`.
        """
        length, (sequences, blocks) = len(packed.input_ids), packed.block_table.shape
        rows = np.zeros(self._rows.shape, dtype=np.int64)
        rows[2] = NO_SLOT
        rows[:, :length] = packed.input_ids, packed.position_ids, packed.slot_mapping, sources
        self._rows.copy_(stage(rows, self._device), non_blocking=True)
        if PENDING in packed.input_ids:
            assert sampled is not None, "a pending token was sampled by the step before"
            ids = self._rows[0]
            ids.copy_(torch.where(ids == PENDING, sampled[self._rows[3].clamp(min=0)], ids))
        self._block_table[:sequences, :blocks].copy_(stage(packed.block_table, self._device), non_blocking=True)
        return self._inputs(length, sequences, packed)

    def padded(self, rows: int) -> StepInputs:
        """The first `rows` rows as a decode step's inputs, whatever is put into them later."""
        return StepInputs(
            input_ids=self._rows[0, :rows],
            position_ids=self._rows[1, :rows],
            batch=AttentionBatch(
                cu_seqlens=torch.arange(rows + 1, dtype=torch.int32),
                context_lens=torch.ones(rows, dtype=torch.int32),
                block_table=self._block_table[:rows],
                slot_mapping=self._rows[2, :rows],
            ),
            sampled_rows=torch.arange(rows, device=self._device),
        )

    def _inputs(self, length: int, sequences: int, packed: PackedStep) -> StepInputs:
        return StepInputs(
            input_ids=self._rows[0, :length],
            position_ids=self._rows[1, :length],
            # The kernels' work lists are cut from the lengths on the host, which is where they stay.
            batch=AttentionBatch(
                cu_seqlens=torch.from_numpy(packed.cu_seqlens),
                context_lens=torch.from_numpy(packed.context_lens),
                block_table=self._block_table[:sequences],
                slot_mapping=self._rows[2, :length],
            ),
            sampled_rows=to_device(packed.sampled_rows, self._device),
        )
