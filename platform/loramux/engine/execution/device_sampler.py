"""Sampling on the device: only token ids, and log probabilities where asked for, cross to the host.

The distributions are those of `sampler`. Randomness is a counter-based generator (Philox) keyed by the request's seed
and its number of generated tokens, so a draw depends on neither the rows beside it nor the order of launches.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from loramux.engine.execution.constraints import TokenMasks, token_words
from loramux.engine.execution.prompt_logprobs import to_host
from loramux.engine.execution.sampler import (
    LARGEST,
    MIN_TEMPERATURE,
    SampledToken,
    fault_event,
    token_event,
    top_logprobs,
)
from loramux.engine.execution.token_biases import TokenBiases
from loramux.engine.execution.token_histories import TokenHistories
from loramux.engine.messages import EngineFault, TokenEvent
from loramux.engine.request import SamplingParams
from loramux.engine.scheduling.sequence import Sequence
from loramux_kernels.device import aligned_rows, to_device
from loramux_kernels.sampling import sample
from loramux_kernels.tables import Penalties, SamplingBatch
from loramux_kernels.token_mask import forbid_tokens

_SEED_BITS = 63

_NO_TOKEN = -2
"""Crosses to the host where a row's logits have no finite maximum, or its token is outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one step on the device, from where the next step reads them."""

    sequences: list[Sequence]
    tokens: torch.Tensor
    """int64[len(sequences)], on the device."""
    row_of: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log probabilities of the rows that asked for them, on the host once the copy has ended."""

    rows: list[int]
    chosen: torch.Tensor
    """float32[len(rows)]"""
    values: torch.Tensor
    """float32[len(rows), most asked for]"""
    token_ids: torch.Tensor
    """int64[len(rows), most asked for]"""
    named: torch.Tensor
    """float32[len(rows), most `logprob_token_ids`]: those of a row's own, then anything."""


@dataclass(frozen=True, slots=True)
class TokensInFlight:
    """A step's tokens while they are copied to the host."""

    sampled: SampledTokens
    eos_token_ids: tuple[int, ...]
    faults: Mapping[int, EngineFault]
    """Why a row has no token to choose, by row."""
    _tokens: torch.Tensor
    _logprobs: _Logprobs | None
    _arrived: torch.cuda.Event | None

    def events(self) -> list[TokenEvent]:
        """Wait for the tokens; return an event for each row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = [SampledToken(token) for token in self._tokens.tolist()]
        if self._logprobs is not None:
            self._add_logprobs(tokens, self._logprobs)
        return [
            fault_event(sequence, self.faults.get(row))
            if token.token_id == _NO_TOKEN or row in self.faults
            else token_event(sequence, token, self.eos_token_ids)
            for row, (sequence, token) in enumerate(zip(self.sampled.sequences, tokens, strict=True))
        ]

    def _add_logprobs(self, tokens: list[SampledToken], logprobs: _Logprobs) -> None:
        numbers = (logprobs.chosen, logprobs.values, logprobs.token_ids, logprobs.named)
        found = (logprobs.rows, *(number.tolist() for number in numbers))
        for row, chosen, values, token_ids, named in zip(*found, strict=True):
            params, token_id = self.sampled.sequences[row].request.sampling, tokens[row].token_id
            if params.logprob_token_ids:
                reported = dict(zip(params.logprob_token_ids, named, strict=False)) | {token_id: chosen}
                top = top_logprobs(list(reported), list(reported.values()))
            else:
                top = top_logprobs(token_ids[: params.logprobs], values[: params.logprobs])
            tokens[row] = SampledToken(token_id, chosen, top)


class DeviceSampler:
    """Chooses one token for each row. A request's draws depend on its seed and its tokens' number, and nothing else."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seeds: dict[str, int] = {}
        self._histories = TokenHistories(device)
        self._biases = TokenBiases(eos_token_ids, device)

    def launch(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        previous: SampledTokens | None,
        masks: TokenMasks | None = None,
    ) -> TokensInFlight:
        """Sample from `logits` `[len(sequences), vocab]`; PENDING tokens of the sequences are `previous`'s.

        `masks` removes tokens from `logits` in place.
        """
        if masks is not None:
            forbid_tokens(logits, to_device(masks.rows, self._device), to_device(masks.words, self._device))
        if not sequences:  # chunks of prompts only
            tokens = reported = torch.zeros(0, dtype=torch.int64, device=self._device)
        else:
            allowed = self._allowed_only(logits, sequences)
            tokens = sample(allowed, self._batch(sequences, logits.shape[1], previous))
            # The next step reads `tokens` as input ids, so they stay valid ids where the host is sent a fault.
            is_valid = allowed.amax(dim=-1).isfinite() & (tokens >= 0) & (tokens < logits.shape[1])
            tokens, reported = torch.where(is_valid, tokens, 0), torch.where(is_valid, tokens, _NO_TOKEN)
        sampled = SampledTokens(sequences, tokens, {sequence: row for row, sequence in enumerate(sequences)})
        logprobs = self._logprobs(logits, sampled)
        return TokensInFlight(
            sampled,
            self._eos_token_ids,
            {} if masks is None else masks.faults,
            to_host(reported),
            logprobs,
            _record_event(self._device),
        )

    def forget(self, request_id: str) -> None:
        """Drop the seed, the history and the bias of a request that has ended."""
        self._seeds.pop(request_id, None)
        self._histories.forget(request_id)
        self._biases.forget(request_id)

    def _allowed_only(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Return `logits`, or a copy where rows have `allowed_token_ids`: log probabilities are those of all tokens."""
        own = {row: ids for row, r in enumerate(sequences) if (ids := r.request.sampling.allowed_token_ids)}
        if not own:
            return logits
        words = np.stack([token_words(ids, logits.shape[1]) for ids in own.values()])
        logits = logits.clone()
        forbid_tokens(
            logits, to_device(np.array(list(own), dtype=np.int64), self._device), to_device(words, self._device)
        )
        return logits

    def _batch(self, sequences: list[Sequence], vocab: int, previous: SampledTokens | None) -> SamplingBatch:
        params = [sequence.request.sampling for sequence in sequences]
        floats = np.array([[_temperature(p), p.top_p, p.min_p] for p in params], dtype=np.float32).T
        temperature, top_p, min_p = aligned_rows(floats, self._device)
        # A vocabulary has fewer than 2^31 tokens, so a larger top_k keeps all as well.
        ints = [[min(p.top_k, 2**31 - 1) for p in params], [r.num_output_tokens for r in sequences]]
        top_k, step = aligned_rows(np.array(ints, dtype=np.int32), self._device)
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=to_device(np.array([self._seed(sequence) for sequence in sequences], dtype=np.int64), self._device),
            step=step,
            penalties=self._penalties(sequences, previous),
            bias=self._biases.of_step(sequences, vocab),
        )

    def _seed(self, sequence: Sequence) -> int:
        if sequence.id not in self._seeds:
            asked = sequence.request.sampling.seed
            self._seeds[sequence.id] = secrets.randbits(_SEED_BITS) if asked is None else asked & (1 << _SEED_BITS) - 1
        return self._seeds[sequence.id]

    def _penalties(self, sequences: list[Sequence], previous: SampledTokens | None) -> Penalties | None:
        params = [sequence.request.sampling for sequence in sequences]
        factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        penalised = [row for row, own in enumerate(factors) if own != (1.0, 0.0, 0.0)]
        if not penalised:
            return None
        own = [sequences[row] for row in penalised]
        drawn = None if previous is None else previous.tokens
        sources = [0 if previous is None else previous.row_of.get(sequence, 0) for sequence in own]
        columns = aligned_rows(np.clip(factors, -LARGEST, LARGEST).astype(np.float32).T, self._device)
        return Penalties(*self._histories.flat(own, penalised, drawn, sources), *columns)

    def _logprobs(self, logits: torch.Tensor, sampled: SampledTokens) -> _Logprobs | None:
        params = [sequence.request.sampling for sequence in sampled.sequences]
        asked = {row: p for row, p in enumerate(params) if p.logprobs is not None}
        if not asked:
            return None
        rows = to_device(np.array(list(asked), dtype=np.int64), self._device)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        values, token_ids = logprobs.topk(max(p.logprobs or 0 for p in asked.values()))
        chosen = logprobs.gather(1, sampled.tokens[rows][:, None])[:, 0]
        own = np.zeros((len(asked), max(len(p.logprob_token_ids) for p in asked.values())), dtype=np.int64)
        for place, p in zip(own, asked.values(), strict=True):
            place[: len(p.logprob_token_ids)] = p.logprob_token_ids
        named = logprobs.gather(1, to_device(own, self._device))
        return _Logprobs(list(asked), *map(to_host, (chosen, values, token_ids, named)))


def _temperature(params: SamplingParams) -> float:
    return params.temperature if params.greedy else max(params.temperature, MIN_TEMPERATURE)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind everything that was launched so far; None where launches end before they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
