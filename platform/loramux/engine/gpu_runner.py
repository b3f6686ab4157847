"""Runs steps on a GPU, which is never waited for before its tokens are asked for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.engine.decode_graphs import DecodeGraphs
from loramux.engine.device_sampler import Arriving, DeviceSampler, Sampled
from loramux.engine.forward import Forward
from loramux.engine.graphs import recorder_for
from loramux.engine.packing import PackedStep, pack
from loramux.engine.step import PENDING, Step
from loramux.engine.step_buffers import StepBuffers
from loramux.settings import EngineSettings
from loramux_adapters.bank import AdapterBank
from loramux_kernels.cuda.tile_map import TileMap, lend_tile_map


class GpuRunner:
    """Decode steps are replayed from recordings; others are launched operator by operator.

    Others are those that prefill, and those whose adapters hold more than pairs on linears: recordings know of none.
    """

    runs_ahead = True

    def __init__(
        self, forward: Forward, sampler: DeviceSampler, buffers: StepBuffers, graphs: DecodeGraphs, block_size: int
    ) -> None:
        self._forward = forward
        self._sampler = sampler
        self._buffers = buffers
        self._graphs = graphs
        self._block_size = block_size
        self._before: Sampled | None = None

    @classmethod
    @torch.inference_mode()
    def over(cls, forward: Forward, sampler: DeviceSampler, settings: EngineSettings, max_model_len: int) -> GpuRunner:
        """A runner for steps as large as `settings` allow; records its decode steps before it returns."""
        device = forward.bank.pool.device
        max_blocks = -(-max_model_len // settings.block_size)
        rows = max(settings.max_num_batched_tokens, settings.max_num_seqs)
        buffers = StepBuffers(rows, settings.max_num_seqs, max_blocks, device)
        recorder = recorder_for(lambda: forward(buffers.padded(1), None), device)
        graphs = DecodeGraphs(forward, buffers, recorder, forward.bank.max_rank)
        return cls(forward, sampler, buffers, graphs, settings.block_size)

    @property
    def bank(self) -> AdapterBank:
        """The adapters that steps may name."""
        return self._forward.bank

    @torch.inference_mode()
    def launch(self, step: Step) -> Arriving:
        """Enqueue one forward and the choice of its tokens; PENDING tokens are those of the launch before."""
        packed = pack(step, self._block_size)
        tokens = None if self._before is None else self._before.tokens
        inputs = self._buffers.fill(packed, self._sources(step, packed), tokens)
        ranks = [] if packed.segments is None else [self.bank.rank_of(slot) for slot in packed.segments.slots]
        beyond = self.bank.beyond_pairs(packed.segments, packed.sampled_rows)
        if packed.decodes and beyond is None:
            logits = self._graphs.run(packed, ranks)
        else:
            if packed.segments is not None:
                tile_map = TileMap.for_step(packed.segments, np.array(ranks, dtype=np.int64), self.bank.pool.device)
                lend_tile_map(packed.segments, tile_map)
            logits = self._forward(inputs, packed.segments, beyond)
        arriving = self._sampler.launch(logits, [chunk.sequence for chunk in step.sampling], self._before)
        self._before = arriving.sampled
        return arriving

    def forget(self, request_id: str) -> None:
        """Drop the request's seed."""
        self._sampler.forget(request_id)

    def _sources(self, step: Step, packed: PackedStep) -> NDArray[np.int64]:
        """int64[T]: for each PENDING token, its row among those sampled before."""
        sources = np.zeros(len(packed.input_ids), dtype=np.int64)
        ends = packed.cu_seqlens[1:] - 1
        for chunk, last in zip(step.chunks, ends.tolist(), strict=True):
            if packed.input_ids[last] == PENDING:
                assert self._before is not None, "the step before sampled it"
                sources[last] = self._before.row_of[chunk.sequence]
        return sources
