"""Pooling: the hidden states of a prompt become one vector, chunk by chunk, in the steps of generating sequences.

`last` is the state of the last token, which causal embedding models read. `classify` puts it through the trained head
of the request's adapter. `mean` is the mean of all states, for which a sum goes on from chunk to chunk. A sequence that
was preempted goes over some of its tokens again; the sum knows how many it has, and takes each once.

The states are those behind the last norm, which the output head reads too: transformers' `last_hidden_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from loramux.engine.execution.prompt_logprobs import to_host
from loramux.engine.messages import EngineFault, TokenEvent
from loramux.engine.scheduling.step import Chunk
from loramux_adapters.extras import PagedRows

HeadOf = Callable[[int], PagedRows | None]
"""Returns the head `[labels, hidden]` of the adapter in a slot; None: it is no classifier."""
NO_HEAD = EngineFault("not_a_classifier", "The model has no classification head.", field="model")


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The vectors of a step's prompts that are whole, on the host once the step's tokens are there."""

    found: list[tuple[str, torch.Tensor | None]]
    """Requests, and float32 vectors; None: its adapter has no head."""

    def events(self) -> list[TokenEvent]:
        """Return the only event of each."""
        return [_event(request_id, vector) for request_id, vector in self.found]


NONE_POOLED = PooledVectors([])


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model before its head."""
    decoder: nn.Module = model.get_decoder()
    return model.get_submodule("model") if decoder is model else decoder  # Llama 4's calls itself its decoder


class Pooler:
    """Keeps the sums of prompts that are not computed whole."""

    def __init__(self, head_of: HeadOf) -> None:
        self._head_of = head_of
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        """Sums, and the number of leading tokens that are in each."""

    def pool(self, hidden: torch.Tensor, chunks: Iterable[tuple[int, Chunk]]) -> PooledVectors:
        """Return the vectors of the prompts that are whole now; on a GPU nothing waits for it.

        *Semantics*: `last`: `hidden[e - 1]`; `classify`: `hidden[e - 1] @ head.T`; `mean`: `sum(hidden[b:e]) / n` over
        all chunks [b, e) of the n tokens, in float64. `hidden` is `[T, hidden]`, any float dtype; `chunks` come with
        their first rows. The result is float32.
        """
        found = []
        for first, chunk in chunks:
            sequence, rows = chunk.sequence, hidden[first : first + chunk.length]
            vector = self._mean(chunk, rows) if sequence.request.pooling == "mean" else rows[-1]
            if not chunk.samples:
                continue
            if sequence.request.pooling == "classify":
                head = self._head_of(chunk.slot)
                found.append((sequence.id, None if head is None else to_host(head.times_rows(vector[None])[0].float())))
            else:
                found.append((sequence.id, to_host(vector.float())))
        return PooledVectors(found)

    def forget(self, request_id: str) -> None:
        """Drop the sum of a request that has ended."""
        self._sums.pop(request_id, None)

    def _mean(self, chunk: Chunk, rows: torch.Tensor) -> torch.Tensor:
        """Add the rows that are not in the sum yet; return the mean of all so far."""
        total, known = self._sums.get(chunk.sequence.id, (None, 0))
        assert chunk.start <= known, "nothing of it is found in the prefix cache"
        new = rows[known - chunk.start :].sum(dim=0, dtype=torch.float64)
        total, known = new if total is None else total + new, max(known, chunk.end)
        self._sums[chunk.sequence.id] = total, known
        return total / known


def _event(request_id: str, vector: torch.Tensor | None) -> TokenEvent:
    if vector is None:
        return TokenEvent(request_id=request_id, finish_reason="error", fault=NO_HEAD)
    if not bool(vector.isfinite().all()):
        fault = EngineFault("adapter_not_finite", "The model's result for this input is not a finite number.")
        return TokenEvent(request_id=request_id, finish_reason="error", fault=fault)
    return TokenEvent(request_id=request_id, finish_reason="stop", pooled=vector.numpy().tobytes())
