"""Runs steps: the interface that the engine knows, and the runner that has each step's tokens when it returns."""

from __future__ import annotations

from typing import Protocol

import torch

from loramux.engine.forward import Forward, StepInputs
from loramux.engine.messages import TokenEvent
from loramux.engine.packing import PackedStep, pack
from loramux.engine.sampler import Sampler
from loramux.engine.step import Step
from loramux_adapters.bank import AdapterBank
from loramux_kernels import AttentionBatch


class Launched(Protocol):
    """A step that was started."""

    def events(self) -> list[TokenEvent]:
        """An event with its token for each of `step.sampling`; waits until the device has them."""


class Runner(Protocol):
    """Starts steps, in order."""

    runs_ahead: bool
    """Whether a step may be launched before the tokens of the one before it have been read."""

    @property
    def bank(self) -> AdapterBank:
        """The adapters that steps may name."""

    def launch(self, step: Step) -> Launched:
        """Start a step."""

    def forget(self, request_id: str) -> None:
        """A request has ended: drop what was kept for it."""


class Ready:
    """A step that has ended."""

    def __init__(self, events: list[TokenEvent]) -> None:
        self._events = events

    def events(self) -> list[TokenEvent]:
        """As they are."""
        return self._events


class ModelRunner:
    """Runs a step where it stands and samples on the host: for CPUs, where nothing could go on meanwhile."""

    runs_ahead = False

    def __init__(self, forward: Forward, sampler: Sampler, block_size: int) -> None:
        self.sampler = sampler
        self._forward = forward
        self._block_size = block_size

    @property
    def bank(self) -> AdapterBank:
        """The adapters that steps may name."""
        return self._forward.bank

    @torch.inference_mode()
    def launch(self, step: Step) -> Ready:
        """One forward, and a token for each of `step.sampling`."""
        packed = pack(step, self._block_size)
        beyond = self.bank.beyond_pairs(packed.segments, packed.sampled_rows)
        logits = self._forward(_inputs(packed), packed.segments, beyond)
        return Ready(self.sampler.sample(logits, [chunk.sequence for chunk in step.sampling]))

    def forget(self, request_id: str) -> None:
        """Drop the request's generator."""
        self.sampler.forget(request_id)


def _inputs(packed: PackedStep) -> StepInputs:
    tables = (packed.cu_seqlens, packed.context_lens, packed.block_table, packed.slot_mapping)
    return StepInputs(
        input_ids=torch.from_numpy(packed.input_ids),
        position_ids=torch.from_numpy(packed.position_ids),
        batch=AttentionBatch(*map(torch.from_numpy, tables)),
        sampled_rows=torch.from_numpy(packed.sampled_rows),
    )
