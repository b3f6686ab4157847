"""A sampler of a GPU without a runner: it sends the parameters of its rows itself."""

from __future__ import annotations

from typing import Any

import torch

from loramux.engine.execution.constraints import TokenMasks
from loramux.engine.execution.device_sampler import (
    NONE_PENDING,
    DeviceSampler,
    PendingTokens,
    SampledRows,
    SampledTokens,
    StagedRows,
    TokensInFlight,
)
from loramux.engine.scheduling.sequence import PENDING
from loramux_kernels.staged_memory import StagedMemory

MEMORY_BYTES = 1 << 16


class SamplerAlone:
    """Steps of up to `max_rows` rows of logits over `vocab` tokens."""

    def __init__(self, eos_token_ids: tuple[int, ...], vocab: int, max_rows: int = 16) -> None:
        device = torch.device("cpu")
        self.memory = StagedMemory(MEMORY_BYTES, device)
        self.sampler = DeviceSampler(eos_token_ids, self.memory, max_rows, max_rows, vocab, device)
        self.input_ids = torch.zeros(max_rows, dtype=torch.int64)

    def stage(self, rows: SampledRows, before: SampledTokens | None = None) -> StagedRows:
        """Send the parameters of `rows`; last tokens that are PENDING are those of the step `before`."""
        pending = NONE_PENDING
        if before is not None:
            own = [s for s in dict.fromkeys(rows.sequences) if s.token_ids[-1] == PENDING]
            sources = torch.tensor([before.row_of[s] for s in own], dtype=torch.int64).numpy()
            pending = PendingTokens(own, torch.arange(len(own)).numpy(), sources)
        staged = self.sampler.stage(rows, pending)
        self.memory.send()
        self.sampler.insert_pending(self.input_ids)
        return staged

    def launch(
        self,
        logits: torch.Tensor,
        rows: SampledRows,
        before: SampledTokens | None = None,
        masks: TokenMasks | None = None,
        **options: Any,
    ) -> TokensInFlight:
        """Sample from `logits` as a step that is not recorded."""
        return self.sampler.launch(logits, self.stage(rows, before), masks, **options)

    def replay(self, logits: torch.Tensor, rows: SampledRows, before: SampledTokens | None = None) -> TokensInFlight:
        """Sample as a recorded step of `len(logits)` rows, a bucket of which `rows` are the first."""
        staged = self.stage(rows, before)
        self.sampler.choose(logits)
        count = len(rows.sequences)
        return self.sampler.launch(logits[:count], staged, is_chosen=staged.is_recordable)
