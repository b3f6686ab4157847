"""Sampling on the device: only token ids, and requested log probabilities, are copied to the host.

The distributions are those of `sampler`. Randomness is a counter-based generator (Philox) keyed by the request's seed
and its number of generated tokens, so a draw depends neither on other rows nor on the order of launches.

The state of a request's sampling is kept on the device from step to step. So the host's work for a step grows with its
rows, not with their contexts or parameters:

- `TokenHistories`: a penalty counts every token that a sequence has read or generated. Each token is sent once: a step
  sends the new tokens, one for a sequence that decodes.
- `TokenBiases`: terms that requests add to single logits, `logit_bias` and the ends that `min_tokens` forbids. A
  request may name a thousand tokens. They are sent once, and are joined with the other rows' terms if the rows of a
  step change. A step with the same rows as the previous one costs nothing.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loramux.common.sampling import DRAWING, KINDS, NEUTRAL, PENALTIES
from loramux.engine.execution.constraints import TokenMasks, token_words
from loramux.engine.execution.sampler import (
    LARGEST,
    MIN_TEMPERATURE,
    SampledToken,
    fault_event,
    forbidden_ends,
    token_event,
    top_logprobs,
)
from loramux.engine.messages import EngineFault, SamplingParams, TokenEvent
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence
from loramux_kernels.device import aligned_rows, to_device, to_host
from loramux_kernels.sampling import forbid_tokens, sample
from loramux_kernels.staged_memory import StagedMemory
from loramux_kernels.tables import LogitBias, Penalties, SamplingBatch

_SEED_BITS = 63

_FLOATS, _INTS = ([name for name in DRAWING if KINDS[name] is kind] for kind in (float, int))
_penalties = attrgetter(*PENALTIES)
_NO_PENALTIES = _penalties(NEUTRAL)

_NO_TOKEN = -2
"""Value copied to the host if a row's logits have no finite maximum, or its token is outside the vocabulary."""


class SampledRows(NamedTuple):
    """The rows of logits that a step's tokens are chosen from."""

    sequences: list[Sequence]
    """Each row's sequence."""
    drafts: Items[tuple[int, ...]] = ()
    """Drafted tokens that each row follows, in addition to its sequence's tokens; empty if the step has no drafts."""

    @classmethod
    def of(cls, chunks: Items[Chunk]) -> SampledRows:
        """Return the rows of `chunks`: one for each, and one more for each draft."""
        if not any(chunk.drafts for chunk in chunks):
            return cls([chunk.sequence for chunk in chunks])
        sequences = [chunk.sequence for chunk in chunks for _ in range(1 + len(chunk.drafts))]
        return cls(sequences, [chunk.drafts[:count] for chunk in chunks for count in range(1 + len(chunk.drafts))])

    @property
    def num_output_tokens(self) -> list[int]:
        """Number of generated and drafted tokens that each row follows."""
        counts = [sequence.num_output_tokens for sequence in self.sequences]
        return [count + len(own) for count, own in zip(counts, self.drafts, strict=True)] if self.drafts else counts


def accepted(events: Items[TokenEvent], chunks: Items[Chunk]) -> list[TokenEvent]:
    """Return the events of each chunk's rows up to the first whose token is not the next draft, or ends the answer."""
    kept, rows = [], iter(events)
    for chunk in chunks:
        own = [next(rows) for _ in range(1 + len(chunk.drafts))]
        for event, draft in zip(own, (*chunk.drafts, None), strict=True):
            kept.append(event)
            if event.token_id != draft or event.finish_reason is not None:
                break
    return kept


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of one step on the device, where the next step reads them."""

    sequences: list[Sequence]
    tokens: torch.Tensor
    """int64[len(sequences)], on the device."""
    row_of: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log probabilities of the rows that request them, on the host once the copy has ended."""

    rows: list[int]
    chosen: torch.Tensor
    """float32[len(rows)]"""
    values: torch.Tensor
    """float32[len(rows), most alternatives of a row]"""
    token_ids: torch.Tensor
    """int64[len(rows), most alternatives of a row]"""
    named: torch.Tensor
    """float32[len(rows), most `logprob_token_ids`]: the row's own first; the rest of the columns have no meaning."""


@dataclass(frozen=True, slots=True)
class TokensInFlight:
    """A step's tokens while they are copied to the host."""

    sampled: SampledTokens
    eos_token_ids: tuple[int, ...]
    faults: Mapping[int, EngineFault]
    """Faults of rows without a token to choose, by row."""
    _tokens: torch.Tensor
    _logprobs: _Logprobs | None
    _arrived: torch.cuda.Event | None

    @property
    def have_arrived(self) -> bool:
        """True if `events` need not wait."""
        return self._arrived is None or self._arrived.query()

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
        self._parameters = RowParameters(ROWS_ALONE, StagedMemory(ROWS_ALONE * RowParameters.BYTES, device))
        self._histories = TokenHistories(device)
        self._biases = TokenBiases(eos_token_ids, device)

    def send_parameters_with(self, memory: StagedMemory, max_rows: int) -> None:
        """Have `stage` write to `memory`, which a step sends; a step samples up to `max_rows` rows."""
        self._parameters = RowParameters(max_rows, memory)

    def stage(self, rows: SampledRows) -> dict[str, torch.Tensor]:
        """Put the rows' parameters into the step's copy; return them by their names in SamplingBatch, valid until the
        next step is sent."""
        return self._parameters.stage(rows, self._seed)

    def launch(
        self,
        logits: torch.Tensor,
        rows: SampledRows,
        previous: SampledTokens | None,
        masks: TokenMasks | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> TokensInFlight:
        """Sample from `logits` `[rows, vocab]`; PENDING tokens of the sequences are taken from `previous`.

        `masks` removes tokens from `logits` in place. `parameters` were staged and sent; None: they are sent now.
        """
        if masks is not None:
            forbid_tokens(logits, to_device(masks.rows, self._device), to_device(masks.words, self._device))
        sequences = rows.sequences
        if not sequences:  # chunks of prompts only
            tokens = reported = torch.zeros(0, dtype=torch.int64, device=self._device)
        else:
            allowed = self._allowed_only(logits, sequences)
            tokens = sample(allowed, self._batch(rows, logits.shape[1], previous, parameters))
            # The next step reads `tokens` as input ids, so they stay valid ids even if the host gets a fault.
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
        self._parameters.names = None
        self._histories.forget(request_id)
        self._biases.forget(request_id)

    def _allowed_only(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Return `logits`, or a copy if rows have `allowed_token_ids`, because log probabilities are those of all
        tokens."""
        own = {row: ids for row, r in enumerate(sequences) if (ids := r.request.sampling.allowed_token_ids)}
        if not own:
            return logits
        words = np.stack([token_words(ids, logits.shape[1]) for ids in own.values()])
        logits = logits.clone()
        forbid_tokens(
            logits, to_device(np.array(list(own), dtype=np.int64), self._device), to_device(words, self._device)
        )
        return logits

    def _batch(
        self,
        rows: SampledRows,
        vocab: int,
        previous: SampledTokens | None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> SamplingBatch:
        if parameters is None:
            parameters = self.stage(rows)
            self._parameters.memory.send()
        return SamplingBatch(
            **parameters,
            penalties=self._penalties(rows, previous),
            bias=self._biases.of_step(rows, vocab),
        )

    def _seed(self, sequence: Sequence) -> int:
        if sequence.id not in self._seeds:
            asked = sequence.request.sampling.seed
            self._seeds[sequence.id] = secrets.randbits(_SEED_BITS) if asked is None else asked & (1 << _SEED_BITS) - 1
        return self._seeds[sequence.id]

    def _penalties(self, rows: SampledRows, previous: SampledTokens | None) -> Penalties | None:
        params = [sequence.request.sampling for sequence in rows.sequences]
        factors = [_penalties(p) for p in params]
        penalised = [row for row, own in enumerate(factors) if own != _NO_PENALTIES]
        if not penalised:
            return None
        own = [rows.sequences[row] for row in penalised]
        drafts = [rows.drafts[row] for row in penalised] if rows.drafts else ()
        drawn = None if previous is None else previous.tokens
        sources = [0 if previous is None else previous.row_of.get(sequence, 0) for sequence in own]
        columns = aligned_rows(np.clip(factors, -LARGEST, LARGEST).astype(np.float32).T, self._device)
        named = dict(zip((name.removesuffix("_penalty") for name in PENALTIES), columns, strict=True))
        return Penalties(*self._histories.flat(own, penalised, drawn, sources, drafts), **named)

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


ROWS_ALONE = 64
"""Rows that a sampler has room for before it gets a step's memory."""


class RowParameters:
    """The parameters of a step's rows on the device. If the rows are those of the step before, only the numbers of
    generated tokens are read again."""

    BYTES = 8 + 4 * (len(DRAWING) + 1)
    """Bytes of a row."""

    def __init__(self, max_rows: int, memory: StagedMemory) -> None:
        self.memory = memory
        """Memory whose copy sends the parameters."""
        width = -(-max_rows // 4) * 4  # every array begins at a multiple of 16 bytes
        self._seeds = memory.reserve((max_rows,), torch.int64)
        self._floats = memory.reserve((len(_FLOATS), width), torch.float32)
        self._ints = memory.reserve((len(_INTS) + 1, width), torch.int32)
        self.names: list[str] | None = None
        """Requests of the latest step's rows; None if one of them has ended since."""
        self._constant: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int32]]

    def stage(self, sampled: SampledRows, seed_of: Callable[[Sequence], int]) -> dict[str, torch.Tensor]:
        """Return each row's parameters, its seed and its number of generated tokens, by the names of SamplingBatch.
        They are there once `memory` is sent."""
        sequences = sampled.sequences
        rows, names = len(sequences), [sequence.id for sequence in sequences]
        if names != self.names:
            params = [sequence.request.sampling for sequence in sequences]
            floats = [
                [_temperature(p) if name == "temperature" else getattr(p, name) for p in params] for name in _FLOATS
            ]
            # A vocabulary has fewer than 2^31 tokens, so a larger bound keeps all tokens as well.
            ints = [[min(getattr(p, name), 2**31 - 1) for p in params] for name in _INTS]
            seeds = [seed_of(sequence) for sequence in sequences]
            self._constant = np.array(seeds, dtype=np.int64), np.array(floats, np.float32), np.array(ints, np.int32)
            self.names = names
        seeds_there, floats_there = self._seeds.on_host(rows), self._floats.on_host(len(_FLOATS))
        ints_there = self._ints.on_host(len(_INTS) + 1)
        seeds_there[:], floats_there[:, :rows], ints_there[:-1, :rows] = self._constant
        ints_there[-1, :rows] = sampled.num_output_tokens
        *own_ints, step = self._ints.tensor[:, :rows]
        drawing = dict(zip(_FLOATS + _INTS, (*self._floats.tensor[:, :rows], *own_ints), strict=True))
        return drawing | {"seed": self._seeds.tensor[:rows], "step": step}


def _temperature(params: SamplingParams) -> float:
    return params.temperature if params.greedy else max(params.temperature, MIN_TEMPERATURE)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after everything that was launched so far; None if launches end before they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


FIRST_WIDTH = 1024
"""Initial width of the table, in tokens of a sequence; it doubles when it is too small."""


@dataclass(slots=True)
class _Place:
    """A row of the table, and the number of its tokens that are written."""

    row: int
    length: int = 0


class TokenHistories:
    """A table on the device with a row for each sequence that has had penalties and has not ended.

    It takes 4 bytes a token, far below a thousandth of the sequence's KV, so no budget counts it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.zeros(0, FIRST_WIDTH, dtype=torch.int32, device=device)
        self._places: dict[str, _Place] = {}
        self._free: list[int] = []

    def flat(
        self,
        sequences: list[Sequence],
        rows: list[int],
        drawn: torch.Tensor | None,
        sources: list[int],
        drafts: Items[tuple[int, ...]] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the new tokens of `sequences`; return all their tokens, one sequence after the other, and then `drafts`,
        which the rows follow too and which are not kept. A sequence may have several rows.

        A last token that is PENDING is `drawn[source]`. The results have N elements, on the device: the sequence's
        element of `rows`, int32; the token, int32; True if the sequence generated it, bool.
        """
        places = [self._place(sequence) for sequence in sequences]
        own = {sequence: (place, source) for sequence, place, source in zip(sequences, places, sources, strict=True)}
        self._append(list(own), [place for place, _ in own.values()], drawn, [source for _, source in own.values()])
        total = sum(place.length for place in places)
        columns = np.array(
            [
                [place.length for place in places],
                [place.row * self._tokens.shape[1] for place in places],
                [sequence.num_prompt_tokens for sequence in sequences],
                rows,
            ],
            dtype=np.int64,
        )
        lengths, firsts, prompts, owners = to_device(columns, self._device)
        owner = torch.repeat_interleave(lengths, output_size=total)
        offsets = torch.arange(total, device=self._device) - (lengths.cumsum(0) - lengths)[owner]
        found = owners[owner].to(torch.int32), self._tokens.view(-1)[firsts[owner] + offsets], offsets >= prompts[owner]
        drafted = [(row, token) for row, tokens in zip(rows, drafts, strict=False) for token in tokens]
        if not drafted:
            return found
        more_rows, more_tokens = to_device(np.array(drafted, dtype=np.int32).T, self._device)
        more = more_rows, more_tokens, torch.ones_like(more_rows, dtype=torch.bool)
        return torch.cat((found[0], more[0])), torch.cat((found[1], more[1])), torch.cat((found[2], more[2]))

    def forget(self, request_id: str) -> None:
        """Free the row of a request that has ended."""
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place.row)

    def _append(
        self, sequences: list[Sequence], places: list[_Place], drawn: torch.Tensor | None, sources: list[int]
    ) -> None:
        new = [sequence.token_ids[place.length :] for sequence, place in zip(sequences, places, strict=True)]
        counts = [len(tokens) for tokens in new]
        if not any(counts):
            return
        starts = np.repeat([place.length for place in places], counts)
        within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.array(
            [
                np.repeat([place.row for place in places], counts),
                starts + within,
                np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in new]),
                np.repeat(sources, counts),
            ],
            dtype=np.int64,
        )
        for sequence, place in zip(sequences, places, strict=True):
            place.length = len(sequence.token_ids)
        self._widen(max(place.length for place in places))
        rows, positions, values, source = to_device(table, self._device)
        if drawn is not None and PENDING in table[2]:
            values = torch.where(values == PENDING, drawn[source], values)
        self._tokens[rows, positions] = values.to(torch.int32)

    def _place(self, sequence: Sequence) -> _Place:
        place = self._places.get(sequence.id)
        if place is None:
            if not self._free:
                self._add_rows()
            place = self._places[sequence.id] = _Place(self._free.pop())
        return place

    def _add_rows(self) -> None:
        have, width = self._tokens.shape
        more = self._tokens.new_zeros(max(8, have), width)
        self._tokens = torch.cat((self._tokens, more))
        self._free += range(have, have + len(more))

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, max(width, 2 * have) - have))


_Key = tuple[tuple[int, str, bool], ...]
"""Rows that have terms: number, request, and True if its end tokens are forbidden."""


class TokenBiases:
    """Terms of the sequences that have had any and have not ended."""

    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._terms: defaultdict[str, dict[tuple[bool, int], tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        """Token ids and values by request, then by (end tokens are forbidden, the logits' width)."""
        self._joined: tuple[_Key, int, LogitBias | None] = ((), 0, None)

    def of_step(self, rows: SampledRows, vocab: int) -> LogitBias | None:
        """Return the terms of a step's rows of logits `[vocab]`."""
        sequences = rows.sequences
        key = tuple(
            (row, sequence.id, count < params.min_tokens)
            for row, (sequence, count) in enumerate(zip(sequences, rows.num_output_tokens, strict=True))
            if (params := sequence.request.sampling).logit_bias or count < params.min_tokens
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
