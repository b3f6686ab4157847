"""Sampling where the logits are: only token ids, and log probabilities where asked for, cross to the host."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.engine.messages import TokenEvent, TopLogprob
from loramux.engine.sampler import Choice, forbidden_ends, token_event
from loramux.engine.sequence import Sequence
from loramux.engine.step import PENDING
from loramux.engine.step_buffers import to_device
from loramux_kernels.sampling import LogitBias, Penalties, SamplingBatch, sample

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step, on the device and on their way to the host."""

    sequences: list[Sequence]
    tokens: torch.Tensor
    """int64[len(sequences)], on the device."""
    row_of: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of the rows that asked."""

    rows: list[int]
    chosen: torch.Tensor
    """float32[len(rows)]"""
    values: torch.Tensor
    """float32[len(rows), most asked for]"""
    token_ids: torch.Tensor
    """int64[len(rows), most asked for]"""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A step's tokens on their way to the host."""

    sampled: Sampled
    eos_token_ids: tuple[int, ...]
    _tokens: torch.Tensor
    _logprobs: _Logprobs | None
    _arrived: torch.cuda.Event | None

    def events(self) -> list[TokenEvent]:
        """Wait for the tokens: an event for each row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        choices = [Choice(token) for token in self._tokens.tolist()]
        if self._logprobs is not None:
            self._add_logprobs(choices, self._logprobs)
        return [
            token_event(sequence, c, self.eos_token_ids)
            for sequence, c in zip(self.sampled.sequences, choices, strict=True)
        ]

    def _add_logprobs(self, choices: list[Choice], logprobs: _Logprobs) -> None:
        found = (logprobs.rows, logprobs.chosen.tolist(), logprobs.values.tolist(), logprobs.token_ids.tolist())
        for row, chosen, values, token_ids in zip(*found, strict=True):
            asked = self.sampled.sequences[row].request.sampling.logprobs
            top = [TopLogprob(*pair) for pair in zip(token_ids[:asked], values[:asked], strict=True)]
            choices[row] = Choice(choices[row].token_id, chosen, top)


class DeviceSampler:
    """Chooses one token for each row. A request's draws depend on its seed and its tokens' number, and nothing else."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seeds: dict[str, int] = {}

    def launch(self, logits: torch.Tensor, sequences: list[Sequence], before: Sampled | None) -> Arriving:
        """Sample from `logits` `[len(sequences), vocab]`; PENDING tokens of the sequences are `before`'s."""
        tokens = (
            sample(logits, self._batch(sequences, logits.shape[1], before)) if sequences else _no_tokens(self._device)
        )
        sampled = Sampled(sequences, tokens, {sequence: row for row, sequence in enumerate(sequences)})
        on_its_way = (_to_host(tokens), self._logprobs(logits, sampled))
        return Arriving(sampled, self._eos_token_ids, *on_its_way, _end_of_stream(self._device))

    def forget(self, request_id: str) -> None:
        """The request has ended: drop its seed."""
        self._seeds.pop(request_id, None)

    def _batch(self, sequences: list[Sequence], vocab: int, before: Sampled | None) -> SamplingBatch:
        params = [sequence.request.sampling for sequence in sequences]
        floats = to_device(
            np.array([[p.temperature, p.top_p, p.min_p] for p in params], dtype=np.float32).T.copy(), self._device
        )
        # A vocabulary has fewer than 2^31 tokens, so a larger top_k keeps all as well.
        ints = to_device(
            np.array(
                [[min(p.top_k, 2**31 - 1) for p in params], [r.num_output_tokens for r in sequences]], dtype=np.int32
            ),
            self._device,
        )
        return SamplingBatch(
            temperature=floats[0],
            top_k=ints[0],
            top_p=floats[1],
            min_p=floats[2],
            seed=to_device(np.array([self._seed(sequence) for sequence in sequences], dtype=np.int64), self._device),
            step=ints[1],
            penalties=self._penalties(sequences, before),
            bias=self._bias(sequences, vocab),
        )

    def _seed(self, sequence: Sequence) -> int:
        if sequence.id not in self._seeds:
            asked = sequence.request.sampling.seed
            self._seeds[sequence.id] = secrets.randbits(_SEED_BITS) if asked is None else asked & (1 << _SEED_BITS) - 1
        return self._seeds[sequence.id]

    def _penalties(self, sequences: list[Sequence], before: Sampled | None) -> Penalties | None:
        params = [sequence.request.sampling for sequence in sequences]
        prices = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        penalised = [row for row, price in enumerate(prices) if price != (1.0, 0.0, 0.0)]
        if not penalised:
            return None
        histories = [np.array(sequences[row].token_ids, dtype=np.int64) for row in penalised]
        lengths = [len(history) for history in histories]
        token_ids = to_device(np.concatenate(histories).astype(np.int32), self._device)
        rows = np.repeat(np.array(penalised, dtype=np.int32), lengths)
        if before is not None and any(history[-1] == PENDING for history in histories):
            sources = np.repeat(_rows_in(before, [sequences[row] for row in penalised]), lengths)
            drawn = before.tokens[to_device(sources, self._device)].to(torch.int32)
            token_ids = torch.where(token_ids == PENDING, drawn, token_ids)
        generated = [np.arange(n) >= sequences[r].num_prompt_tokens for r, n in zip(penalised, lengths, strict=True)]
        costs = to_device(np.array(prices, dtype=np.float32).T.copy(), self._device)
        return Penalties(
            to_device(rows, self._device), token_ids, to_device(np.concatenate(generated), self._device), *costs
        )

    def _bias(self, sequences: list[Sequence], vocab: int) -> LogitBias | None:
        triples = []
        for row, sequence in enumerate(sequences):
            bias = dict(sequence.request.sampling.logit_bias)
            bias |= dict.fromkeys(forbidden_ends(sequence, self._eos_token_ids), float("-inf"))
            triples += [(row, token_id, value) for token_id, value in bias.items() if token_id < vocab]
        if not triples:
            return None
        rows, token_ids, values = zip(*triples, strict=True)
        places = to_device(np.array((rows, token_ids), dtype=np.int32), self._device)
        return LogitBias(places[0], places[1], to_device(np.array(values, dtype=np.float32), self._device))

    def _logprobs(self, logits: torch.Tensor, sampled: Sampled) -> _Logprobs | None:
        asked = {row: n for row, r in enumerate(sampled.sequences) if (n := r.request.sampling.logprobs) is not None}
        if not asked:
            return None
        rows = to_device(np.array(list(asked), dtype=np.int64), self._device)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        values, token_ids = logprobs.topk(max(asked.values()))
        chosen = logprobs.gather(1, sampled.tokens[rows][:, None])[:, 0]
        return _Logprobs(list(asked), *map(_to_host, (chosen, values, token_ids)))


def _rows_in(before: Sampled, sequences: list[Sequence]) -> NDArray[np.int64]:
    return np.array([before.row_of.get(sequence, 0) for sequence in sequences], dtype=np.int64)


def _no_tokens(device: torch.device) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64, device=device)


def _end_of_stream(device: torch.device) -> torch.cuda.Event | None:
    """What has happened once the device has done everything so far; None where it has already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
