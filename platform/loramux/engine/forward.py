"""One forward of the base with the step's adapters and pages lent to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from loramux.engine.attention import AttentionStep
from loramux_adapters.bank import AdapterBank
from loramux_adapters.beyond import Beyond
from loramux_kernels import AttentionBatch, KvLayer, Segments


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward reads, on its device; T rows."""

    input_ids: torch.Tensor
    """int64[T]"""
    position_ids: torch.Tensor
    """int64[T]"""
    batch: AttentionBatch
    sampled_rows: torch.Tensor
    """int64: the rows whose logits are wanted."""


class Forward:
    """A model whose modules serve `bank` and whose attention reads `layers`."""

    def __init__(self, model: nn.Module, layers: list[KvLayer], bank: AdapterBank) -> None:
        self.bank = bank
        self._model = model
        self._layers = layers

    def __call__(self, inputs: StepInputs, segments: Segments | None, beyond: Beyond | None = None) -> torch.Tensor:
        """The logits `[len(sampled_rows), vocab]`; `beyond` is what the adapters hold beside pairs on linears."""
        with self.bank.serving(segments, beyond):
            return self._model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.position_ids[None],
                use_cache=False,
                logits_to_keep=inputs.sampled_rows,
                attention_step=AttentionStep(self._layers, inputs.batch),
            ).logits[0]
