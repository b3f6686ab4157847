"""Runs a step: packs it into tensors, lends them to the model, samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from loramux.engine.attention import AttentionStep
from loramux.engine.messages import TokenEvent
from loramux.engine.sampler import Sampler
from loramux.engine.step import BASE_SLOT, Step
from loramux_adapters.bank import AdapterBank
from loramux_kernels import AttentionBatch, KvLayer, Segments


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as the model takes it; T rows over S chunks."""

    input_ids: torch.Tensor
    """int64[1, T]"""
    position_ids: torch.Tensor
    """int64[1, T]"""
    batch: AttentionBatch
    segments: Segments | None
    """None when every row is the base model's."""
    sampled_rows: torch.Tensor
    """int64[number of chunks that sample]"""


def pack(step: Step, block_size: int, device: torch.device) -> PackedStep:
    """Lay a step's chunks out one after the other."""
    chunks = step.chunks
    lengths = np.array([c.length for c in chunks], dtype=np.int32)
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32)))
    positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
    tokens = [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
    block_table = np.zeros((len(chunks), max(len(c.sequence.pages) for c in chunks)), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        block_table[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
    pages = block_table[np.repeat(np.arange(len(chunks)), lengths), positions // block_size].astype(np.int64)
    sampled = [end - 1 for end, c in zip(cu_seqlens[1:].tolist(), chunks, strict=True) if c.samples]

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    return PackedStep(
        input_ids=tensor(tokens, torch.int64)[None],
        position_ids=tensor(positions, torch.int64)[None],
        batch=AttentionBatch(
            cu_seqlens=tensor(cu_seqlens, torch.int32),
            context_lens=tensor([c.end for c in chunks], torch.int32),
            block_table=tensor(block_table, torch.int32),
            slot_mapping=tensor(pages * block_size + positions % block_size, torch.int64),
        ),
        segments=_segments(step),
        sampled_rows=tensor(sampled, torch.int64),
    )


def _segments(step: Step) -> Segments | None:
    runs = [(slot, rows) for slot, rows in step.runs if slot != BASE_SLOT]
    if not runs:
        return None
    ends = np.cumsum([rows for _, rows in runs]).tolist()
    return Segments(cu_seqlens=(0, *ends), slots=tuple(slot for slot, _ in runs))


class ModelRunner:
    """A model whose linears serve `bank` and whose attention reads `layers`."""

    def __init__(
        self, model: nn.Module, layers: list[KvLayer], bank: AdapterBank, sampler: Sampler, block_size: int
    ) -> None:
        self.model = model
        self.bank = bank
        self.sampler = sampler
        self._layers = layers
        self._block_size = block_size
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def run(self, step: Step) -> list[TokenEvent]:
        """One forward; an event with its token for each of `step.sampling`."""
        packed = pack(step, self._block_size, self._device)
        with self.bank.serving(packed.segments):
            logits = self.model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                logits_to_keep=packed.sampled_rows,
                attention_step=AttentionStep(self._layers, packed.batch),
            ).logits[0]
        return self.sampler.sample(logits, [chunk.sequence for chunk in step.sampling])
