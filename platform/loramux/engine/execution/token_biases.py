"""Terms that requests add to single logits, kept on the device: `logit_bias`, and ends that `min_tokens` forbids.

A request may name a thousand tokens. They are sent once, and joined with the other rows' where the rows of a step
change; a step of the same rows as the one before costs nothing.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from loramux.engine.execution.sampler import forbidden_ends
from loramux.engine.scheduling.sequence import Sequence
from loramux_kernels.device import to_device
from loramux_kernels.tables import LogitBias

_Key = tuple[tuple[int, str, bool], ...]
"""Rows that have terms: number, request, and whether its ends are forbidden."""


class TokenBiases:
    """The terms of the sequences that have had any and have not ended."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._terms: defaultdict[str, dict[tuple[bool, int], tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        """Token ids and values, by request and by whether its ends are forbidden and the logits' width."""
        self._joined: tuple[_Key, int, LogitBias | None] = ((), 0, None)

    def of_step(self, sequences: list[Sequence], vocab: int) -> LogitBias | None:
        """Return the terms of a step whose i-th row of logits `[vocab]` is that of `sequences[i]`."""
        key = tuple(
            (row, sequence.id, sequence.num_output_tokens < params.min_tokens)
            for row, sequence in enumerate(sequences)
            if (params := sequence.request.sampling).logit_bias or sequence.num_output_tokens < params.min_tokens
        )
        if self._joined[:2] != (key, vocab):
            found = [self._terms_of(sequences[row], forbids, vocab) for row, _, forbids in key]
            self._joined = key, vocab, self._join([row for row, *_ in key], found)
        return self._joined[2]

    def forget(self, request_id: str) -> None:
        """Drop the terms of a request that has ended."""
        if self._terms.pop(request_id, None) is not None:
            self._joined = (), 0, None

    def _terms_of(self, sequence: Sequence, forbids: bool, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._terms[sequence.id]
        if (forbids, vocab) not in held:
            bias = dict(sequence.request.sampling.logit_bias)
            if forbids:
                ends = forbidden_ends(sequence, sequence.num_output_tokens, self._eos_token_ids)
                bias |= dict.fromkeys(ends, float("-inf"))
            own = {token_id: value for token_id, value in bias.items() if token_id < vocab}
            held[forbids, vocab] = (
                to_device(np.array(list(own), dtype=np.int32), self._device),
                to_device(np.array(list(own.values()), dtype=np.float32), self._device),
            )
        return held[forbids, vocab]

    def _join(self, rows: list[int], terms: list[tuple[torch.Tensor, torch.Tensor]]) -> LogitBias | None:
        counts = [len(token_ids) for token_ids, _ in terms]
        if not any(counts):
            return None
        numbers, lengths = to_device(np.array((rows, counts), dtype=np.int64), self._device)
        return LogitBias(
            torch.repeat_interleave(numbers, lengths, output_size=sum(counts)).to(torch.int32),
            torch.cat([token_ids for token_ids, _ in terms]),
            torch.cat([values for _, values in terms]),
        )
