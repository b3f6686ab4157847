"""Records a GPU runner's steps by a test's own recorder."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loramux.engine.execution.cuda_graphs import (
    DecodeGraphs,
    DecoderGraphs,
    GraphRecorder,
    Recording,
    ReservedAttention,
)
from loramux.engine.execution.gpu_runner import GpuRunner


def recorded(runner: GpuRunner, record: GraphRecorder) -> tuple[DecodeGraphs, DecoderGraphs]:
    """Record all steps of `runner` once more."""
    forward, buffers = runner._forward, runner._buffers
    hidden_size = forward.model.config.get_text_config().hidden_size
    with torch.inference_mode():
        logits = forward(buffers.padded(1), None)
        attention = ReservedAttention(runner._decoder_graphs._attention.shapes, buffers)
        whole = DecodeGraphs(forward, buffers, attention, record, logits, runner._ends)
        return whole, DecoderGraphs(forward, buffers, attention, record, hidden_size)


def record_and_run(function: Callable[[], object], inputs: object) -> Recording:
    """Record as a card does: what is recorded is compiled."""
    function()
    return Recording(function, inputs)
