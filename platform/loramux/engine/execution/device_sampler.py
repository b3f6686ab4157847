"""Sampling on the device: only token ids, and requested log probabilities, are copied to the host.

The distributions are those of `sampler`. Randomness is a counter-based generator (Philox) keyed by the request's seed
and its number of generated tokens, so a draw depends neither on other rows nor on the order of launches.

**Inside recorded steps.** A recorded decode step chooses its tokens too: greedily, with temperature, top-k, top-p and
min-p, under penalties, `logit_bias` and `min_tokens`. All parameters are data at fixed addresses, which the one copy of
a step fills. A recording chooses a token for as many rows as the copy says: rows that pad its bucket have none. The
same operators are launched after the forward, on the same parameters, in all other steps: those with a prompt, with
rows that are only scored or with drafts, and those with a row that a mask (a constraint, `allowed_token_ids`) or more
than MAX_TERMS terms steer. There the copy gives the recording no row.

The state of a request's sampling is kept on the device from step to step. So the host's work for a step grows with its
rows, not with their contexts or parameters:

- `TokenCounts`: a penalty counts every token that a sequence has read or generated. Each token is sent once. The token
  that the step before has drawn is counted on the device, as it is inserted into the step's inputs.
- `TokenBiases`: terms that requests add to single logits, `logit_bias` and the ends that `min_tokens` forbids. The
  terms of a step's rows are joined if its rows are not those of the step before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, itemgetter
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
    ending_tokens,
    fault_event,
    forbidden_ends,
    token_event,
    top_logprobs,
)
from loramux.engine.messages import EngineFault, SamplingParams, TokenEvent
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence
from loramux_adapters.targets import MAX_ADDED_TOKENS
from loramux_kernels.device import to_device, to_host
from loramux_kernels.sampling import forbid_tokens, sample
from loramux_kernels.staged_memory import StagedArray, StagedMemory
from loramux_kernels.step_inputs import insert_tokens
from loramux_kernels.tables import IN_PROMPT, NO_TOKEN, LogitBias, Penalties, SamplingBatch

_SEED_BITS = 63

_FLOATS, _INTS = ([name for name in DRAWING if KINDS[name] is kind] for kind in (float, int))
_penalties = attrgetter(*PENALTIES)
_NO_PENALTIES = _penalties(NEUTRAL)
_SEQUENCE, _DRAFTS, _TOKEN_IDS, _REQUEST_ID = map(attrgetter, ("sequence", "drafts", "token_ids", "id"))
_LAST = itemgetter(-1)

MAX_TERMS = 1024
"""Terms of biases that a step's copy has room for. The tokens of a step with more are chosen after its recording."""


class SampledRows(NamedTuple):
    """The rows of logits that a step's tokens are chosen from."""

    sequences: list[Sequence]
    """Each row's sequence."""
    drafts: Items[tuple[int, ...]] = ()
    """Drafted tokens that each row follows, in addition to its sequence's tokens; empty if the step has no drafts."""

    @classmethod
    def of(cls, chunks: Items[Chunk]) -> SampledRows:
        """Return the rows of `chunks`: one for each, and one more for each draft."""
        if not any(map(_DRAFTS, chunks)):
            return cls([*map(_SEQUENCE, chunks)])
        sequences = [chunk.sequence for chunk in chunks for _ in range(1 + len(chunk.drafts))]
        return cls(sequences, [chunk.drafts[:count] for chunk in chunks for count in range(1 + len(chunk.drafts))])

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of tokens that each row follows, with drafts and the prompt; int64[rows]."""
        counts = np.array([*map(len, map(_TOKEN_IDS, self.sequences))], dtype=np.int64)
        return counts + np.array([*map(len, self.drafts)], dtype=np.int64) if self.drafts else counts


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


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of one step on the device, where the next step reads them."""

    sequences: list[Sequence]
    tokens: torch.Tensor
    """int64[len(sequences)], on the device: NO_TOKEN if a row has none. The next step overwrites them."""

    @cached_property
    def row_of(self) -> dict[Sequence, int]:
        """The row of each sequence."""
        return {sequence: row for row, sequence in enumerate(self.sequences)}

    def rows_of(self, sequences: list[Sequence]) -> NDArray[np.int64]:
        """Return the row of each of `sequences`, int64[n]."""
        if sequences == self.sequences:  # in most steps
            return np.arange(len(sequences))
        return np.array([*map(self.row_of.__getitem__, sequences)], dtype=np.int64)


class PendingTokens(NamedTuple):
    """Tokens of a step's inputs that the host does not know yet: the step before has sampled them."""

    sequences: list[Sequence]
    rows: NDArray[np.int64]
    """int64[n]; rows of the step's inputs."""
    sources: NDArray[np.int64]
    """int64[n]; rows of the step before that sampled the tokens."""


NONE_PENDING = PendingTokens([], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts of a step's rows that do not change while the rows are those of the step before."""

    sequences: list[Sequence]
    num_prompt_tokens: NDArray[np.int64]
    """int64[rows]"""
    ends: list[frozenset[int]]
    """Tokens that end each row's answer."""
    penalised: list[Sequence]
    """Sequences that have penalties, each once."""
    place_of: NDArray[np.int64]
    """int64[rows]; place of each row's sequence in `penalised`, -1: it has no penalties."""
    asked: dict[int, SamplingParams]
    """Rows whose log probabilities are requested, with their parameters."""
    biased: list[int]
    """Rows that have terms of biases, at least before `min_tokens`."""
    is_constrained: bool
    """True if a row has a constraint."""
    is_masked: bool
    """True if a row has a constraint or `allowed_token_ids`."""

    @classmethod
    def of(cls, sequences: list[Sequence], eos_token_ids: tuple[int, ...]) -> RowFacts:
        """Read the requests of `sequences`."""
        params = [sequence.request.sampling for sequence in sequences]
        is_constrained = any(sequence.request.constraint is not None for sequence in sequences)
        penalised = [s for s, p in zip(sequences, params, strict=True) if _penalties(p) != _NO_PENALTIES]
        places = {sequence: place for place, sequence in enumerate(dict.fromkeys(penalised))}
        return cls(
            sequences,
            np.array([sequence.num_prompt_tokens for sequence in sequences], dtype=np.int64),
            [ending_tokens(sequence, eos_token_ids) for sequence in sequences],
            [*places],
            np.array([places.get(sequence, -1) for sequence in sequences], dtype=np.int64),
            {row: p for row, p in enumerate(params) if p.logprobs is not None},
            [row for row, p in enumerate(params) if p.logit_bias or p.min_tokens],
            is_constrained,
            is_constrained or any(p.allowed_token_ids for p in params),
        )


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of a step whose parameters are in the step's copy. They are valid until the next step is sent."""

    sampled: SampledRows
    facts: RowFacts
    bias: LogitBias | None
    """Terms of all rows; None if there are none."""
    is_recordable: bool
    """True if a recorded step chooses the tokens of all these rows. If not, a recorded step chooses none."""
    _sampler: DeviceSampler

    @property
    def batch(self) -> SamplingBatch:
        """The parameters of all rows: views, which a recorded step does not need."""
        return self._sampler.batch_of(self)


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
    ends: list[frozenset[int]]
    """Tokens that end each row's answer."""
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
        sequences, token_ids = self.sampled.sequences, self._tokens.tolist()
        events = [
            TokenEvent(request_id=sequence.id, token_id=token_id, finish_reason="stop" if token_id in ends else None)
            for sequence, token_id, ends in zip(sequences, token_ids, self.ends, strict=True)
        ]
        if self._logprobs is not None:
            for row, token in self._with_logprobs(token_ids, self._logprobs):
                events[row] = token_event(sequences[row], token, self.ends[row])
        without = [row for row, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
        for row in (*without, *self.faults):
            events[row] = fault_event(sequences[row], self.faults.get(row))
        return events

    def _with_logprobs(self, tokens: list[int], logprobs: _Logprobs) -> Iterator[tuple[int, SampledToken]]:
        """Yield the rows whose log probabilities are requested, each with its token."""
        numbers = (logprobs.chosen, logprobs.values, logprobs.token_ids, logprobs.named)
        found = (logprobs.rows, *(number.tolist() for number in numbers))
        for row, chosen, values, token_ids, named in zip(*found, strict=True):
            params, token_id = self.sampled.sequences[row].request.sampling, tokens[row]
            if params.logprob_token_ids:
                reported = dict(zip(params.logprob_token_ids, named, strict=False)) | {token_id: chosen}
                top = top_logprobs(list(reported), list(reported.values()))
            else:
                top = top_logprobs(token_ids[: params.logprobs], values[: params.logprobs])
            yield row, SampledToken(token_id, chosen, top)


class DeviceSampler:
    """Chooses one token for each row. A request's draws depend on its seed and its tokens' number, and nothing else."""

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        memory: StagedMemory,
        max_rows: int,
        max_sequences: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        """`memory`: what a step sends. A step samples up to `max_rows` rows of up to `max_sequences` sequences.
        `vocab`: the base's tokens."""
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seeds: dict[str, int] = {}
        self._parameters = RowParameters(max_rows, memory)
        self._pending = memory.reserve((3, max_sequences + max_sequences % 2), torch.int64)
        self._counts = TokenCounts(max_sequences, vocab + MAX_ADDED_TOKENS, device)
        self._biases = TokenBiases(eos_token_ids, memory, self._parameters.num_terms, device)
        self._facts: RowFacts | None = None
        """Facts of the latest step's rows; None if one of their requests has ended since."""
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """The latest step's tokens. Recordings read and write them."""

    def stage(self, rows: SampledRows, pending: PendingTokens, *, has_scored_rows: bool = False) -> StagedRows:
        """Put the rows' parameters into the step's copy, and the places of tokens that the host does not know.

        `has_scored_rows`: the step's logits have rows of scored prompts too, which a recorded step would choose for.
        """
        if (facts := self._facts) is None or facts.sequences != rows.sequences:
            facts = self._facts = RowFacts.of(rows.sequences, self._eos_token_ids)
            self._parameters.use(rows.sequences, self._seed)
        num_output = rows.num_tokens - facts.num_prompt_tokens
        counters = self._counters_of(facts)
        places = self._pending.on_host(3)[:, : len(pending.rows)]
        places[0], places[1], places[2] = pending.rows, pending.sources, -1
        if facts.penalised and pending.sequences == rows.sequences:
            places[2] = counters
        elif facts.penalised:
            counter_of = dict(zip(rows.sequences, counters.tolist(), strict=True))
            places[2] = [counter_of.get(sequence, -1) for sequence in pending.sequences]
        biased, bias = self._biases.stage(rows, facts.biased, num_output)
        is_short = bias is None or bias is self._biases.staged
        is_recordable = is_short and not (has_scored_rows or facts.is_masked)
        numbers = len(rows.sequences) if is_recordable else 0, self._biases.number, len(pending.rows)
        self._parameters.stage(num_output, counters, biased, numbers)
        return StagedRows(rows, facts, bias, is_recordable, self)

    def _counters_of(self, facts: RowFacts) -> NDArray[np.int64]:
        """Count the new tokens of sequences with penalties; return each row's row of the counts, -1 if it has none."""
        if not facts.penalised:
            return facts.place_of
        return np.append(self._counts.count(facts.penalised), -1)[facts.place_of]

    def insert_pending(self, input_ids: torch.Tensor) -> None:
        """Launch the insertion of the tokens of the step before into `input_ids`; it is recorded too."""
        number = self._parameters.num_pending
        insert_tokens(input_ids, self._counts.table, self._tokens, self._pending.tensor, number)

    def choose(self, logits: torch.Tensor) -> None:
        """Launch the choice of tokens from a recorded step's `logits` `[rows of the bucket, vocab]`."""
        rows, parameters = len(logits), self._parameters
        penalties = parameters.penalties(self._counts.table, rows, None)
        batch = replace(parameters.batch(rows, is_recorded=True), penalties=penalties, bias=self._biases.staged)
        sample(logits, batch, self._tokens[:rows])

    def launch(
        self, logits: torch.Tensor, staged: StagedRows, masks: TokenMasks | None = None, *, is_chosen: bool = False
    ) -> TokensInFlight:
        """Sample from `logits` `[rows, vocab]` with parameters that were sent, and start the copies to the host.

        `masks` removes tokens from `logits` in place. `is_chosen`: a recorded step has chosen the tokens.
        """
        if masks is not None:
            forbid_tokens(logits, to_device(masks.rows, self._device), to_device(masks.words, self._device))
        sequences = staged.sampled.sequences
        tokens = self._tokens[: len(sequences)]
        if sequences and not is_chosen:  # a step may have chunks of prompts only
            sample(self._allowed_only(logits, sequences), staged.batch, tokens)
        sampled = SampledTokens(sequences, tokens)
        logprobs = self._logprobs(logits, sampled, staged.facts.asked)
        return TokensInFlight(
            sampled,
            staged.facts.ends,
            {} if masks is None else masks.faults,
            to_host(tokens),
            logprobs,
            _record_event(self._device),
        )

    def forget(self, request_id: str) -> None:
        """Drop the seed, the counts and the bias of a request that has ended."""
        self._seeds.pop(request_id, None)
        self._facts = None
        self._counts.forget(request_id)
        self._biases.forget(request_id)

    def batch_of(self, staged: StagedRows) -> SamplingBatch:
        """Return the parameters of all rows: views."""
        rows, facts = len(staged.sampled.sequences), staged.facts
        batch = self._parameters.batch(rows, is_recorded=False)
        if not facts.penalised and staged.bias is None:
            return batch
        drafts = self._drafts_of(staged.sampled, facts.penalised)
        return replace(batch, penalties=self._parameters.penalties(self._counts.table, rows, drafts), bias=staged.bias)

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

    def _seed(self, sequence: Sequence) -> int:
        if sequence.id not in self._seeds:
            asked = sequence.request.sampling.seed
            self._seeds[sequence.id] = secrets.randbits(_SEED_BITS) if asked is None else asked & (1 << _SEED_BITS) - 1
        return self._seeds[sequence.id]

    def _drafts_of(self, rows: SampledRows, penalised: Collection[Sequence]) -> torch.Tensor | None:
        """Return the drafts that each penalised row follows, int32[rows, most drafts of a row], filled up with -1."""
        most = max((len(own) for own in rows.drafts), default=0)
        if not most:
            return None
        table = np.full((len(rows.sequences), most), -1, dtype=np.int32)
        for row, (sequence, own) in enumerate(zip(rows.sequences, rows.drafts, strict=True)):
            if sequence in penalised:
                table[row, : len(own)] = own
        return to_device(table, self._device)

    def _logprobs(
        self, logits: torch.Tensor, sampled: SampledTokens, asked: Mapping[int, SamplingParams]
    ) -> _Logprobs | None:
        if not asked:
            return None
        rows = to_device(np.array(list(asked), dtype=np.int64), self._device)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        values, token_ids = logprobs.topk(max(p.logprobs or 0 for p in asked.values()))
        chosen = logprobs.gather(1, sampled.tokens[rows].clamp(min=0)[:, None])[:, 0]
        own = np.zeros((len(asked), max(len(p.logprob_token_ids) for p in asked.values())), dtype=np.int64)
        for place, p in zip(own, asked.values(), strict=True):
            place[: len(p.logprob_token_ids)] = p.logprob_token_ids
        named = logprobs.gather(1, to_device(own, self._device))
        return _Logprobs(list(asked), *map(to_host, (chosen, values, token_ids, named)))


class RowParameters:
    """The parameters of a step's rows on the device."""

    def __init__(self, max_rows: int, memory: StagedMemory) -> None:
        width = -(-max_rows // 4) * 4  # every array begins at a multiple of 16 bytes
        self._seeds = memory.reserve((max_rows,), torch.int64)
        self._floats = memory.reserve((len(_FLOATS) + len(PENALTIES), width), torch.float32)
        self._ints = memory.reserve((len(_INTS) + 3, width), torch.int32)
        # Rows of a recorded step, all rows, terms, pending tokens: each with an address that is a multiple of 16 bytes.
        self._numbers = memory.reserve((4, 4), torch.int32)
        self._num_recorded, self._num_rows, self.num_terms, self.num_pending = self._numbers.tensor[:, :1]
        self._constant: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int32]]

    def use(self, sequences: list[Sequence], seed_of: Callable[[Sequence], int]) -> None:
        """Read the seeds and parameters of the rows of this step, and of later steps with the same rows."""
        params = [sequence.request.sampling for sequence in sequences]
        floats = [[_temperature(p) if name == "temperature" else getattr(p, name) for p in params] for name in _FLOATS]
        floats += np.clip([[getattr(p, name) for p in params] for name in PENALTIES], -LARGEST, LARGEST).tolist()
        # A vocabulary has fewer than 2^31 tokens, so a larger bound keeps all tokens as well.
        ints = [[min(getattr(p, name), 2**31 - 1) for p in params] for name in _INTS]
        seeds = [seed_of(sequence) for sequence in sequences]
        self._constant = np.array(seeds, dtype=np.int64), np.array(floats, np.float32), np.array(ints, np.int32)

    def stage(
        self,
        num_output: NDArray[np.int64],
        counters: NDArray[np.int64],
        biased: Collection[int],
        numbers: tuple[int, int, int],
    ) -> None:
        """Put each row's parameters, its seed, its number of generated tokens and its row of the counts into the copy.

        `counters`: rows of the counts, -1 for a row without penalties. `biased`: rows with terms. `numbers`: rows that
        a recorded step samples, terms, pending tokens.
        """
        rows = len(num_output)
        seeds_there, floats_there = self._seeds.on_host(rows), self._floats.on_host(len(self._floats.tensor))
        ints_there = self._ints.on_host(len(self._ints.tensor))
        seeds_there[:], floats_there[:, :rows], ints_there[:-3, :rows] = self._constant
        steps, counted, is_steered = ints_there[-3:, :rows]
        steps[:] = num_output
        counted[:] = counters
        is_steered[:] = counted >= 0
        is_steered[list(biased)] = 1
        num_recorded, num_terms, num_pending = numbers
        self._numbers.on_host(4)[:, 0] = num_recorded, rows, num_terms, num_pending

    def batch(self, rows: int, *, is_recorded: bool) -> SamplingBatch:
        """Return the first `rows` rows, without penalties and bias: views. `is_recorded`: those of a recorded step."""
        *ints, step, _, is_steered = self._ints.tensor[:, :rows]
        drawing = dict(zip(_FLOATS + _INTS, (*self._floats.tensor[: len(_FLOATS), :rows], *ints), strict=True))
        return SamplingBatch(
            num_rows=self._num_recorded if is_recorded else self._num_rows,
            is_steered=is_steered,
            seed=self._seeds.tensor[:rows],
            step=step,
            **drawing,
        )

    def penalties(self, counts: torch.Tensor, rows: int, drafts: torch.Tensor | None) -> Penalties:
        """Return the penalties of the first `rows` rows, which follow `drafts` in addition: views."""
        columns = self._floats.tensor[len(_FLOATS) :, :rows]
        named = dict(zip((name.removesuffix("_penalty") for name in PENALTIES), columns, strict=True))
        return Penalties(counts, self._ints.tensor[-2, :rows], **named, drafts=drafts)


def _temperature(params: SamplingParams) -> float:
    return params.temperature if params.greedy else max(params.temperature, MIN_TEMPERATURE)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after everything that was launched so far; None if launches end before they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class TokenCounts:
    """A table on the device with a row for each sequence of the latest steps that has penalties.

    Its size is fixed, because recorded steps hold its address: 4 bytes for each token of the vocabulary and each
    sequence of the largest step, in the plan of memory.
    """

    def __init__(self, max_sequences: int, width: int, device: torch.device) -> None:
        """`width`: the number of tokens, added ones included."""
        self._device = device
        self.table = torch.zeros(max_sequences, width, dtype=torch.int32, device=device)
        """int32[sequences, tokens], as `Penalties` reads it."""
        self._lengths = np.zeros(max_sequences, dtype=np.int64)
        """Number of tokens of each row's sequence that are counted."""
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_sequences))

    def count(self, sequences: Items[Sequence]) -> NDArray[np.int64]:
        """Count the new tokens of each sequence, and return its row, int64[n].

        A last token that is PENDING is counted only as `insert_tokens` inserts it into the step's inputs. In most steps
        no sequence has another new token.
        """
        rows = self._rows_of(sequences)
        token_ids = [*map(_TOKEN_IDS, sequences)]
        counted, held = self._lengths[rows], np.array([*map(len, token_ids)], dtype=np.int64)
        is_last_known = np.array([*map(_LAST, token_ids)], dtype=np.int64) != PENDING
        behind = np.flatnonzero(held - counted > ~is_last_known)
        places, generated = [], []  # of all sequences, because each copy to the device takes as long as a kernel
        width = self.table.shape[1]
        for number, row, first in zip(behind.tolist(), rows[behind].tolist(), counted[behind].tolist(), strict=True):
            new = token_ids[number][first:]
            known = new[:-1] if new[-1] == PENDING else new
            split = max(0, sequences[number].num_prompt_tokens - first)
            if prompt := known[:split]:
                index = to_device(np.array(prompt, dtype=np.int64), self._device)
                self.table[row].index_fill_(0, index, IN_PROMPT)
            generated += known[split:]
            places += [row * width] * len(known[split:])
        self._lengths[rows] = held
        if generated:
            index = to_device(np.array(places, dtype=np.int64) + np.array(generated, dtype=np.int64), self._device)
            self.table.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        return rows

    def _rows_of(self, sequences: Items[Sequence]) -> NDArray[np.int64]:
        """Return the row of each sequence; a sequence without one gets an empty row."""
        names = [*map(_REQUEST_ID, sequences)]
        missing = [name for name in names if name not in self._row_of]
        if (lacking := len(missing) - len(self._free)) > 0:
            kept = {*names}
            others = [name for name in self._row_of if name not in kept]
            for name in others[:lacking]:  # the oldest; each is counted again from its first token if it returns
                self.forget(name)
        for name in missing:
            row = self._row_of[name] = self._free.pop()
            self._lengths[row] = 0
            self.table[row].zero_()
        return np.array([*map(self._row_of.__getitem__, names)], dtype=np.int64)

    def forget(self, request_id: str) -> None:
        """Free the row of a request that has ended."""
        if (row := self._row_of.pop(request_id, None)) is not None:
            self._free.append(row)


_Terms = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Token ids and values."""
_Key = tuple[tuple[int, str, bool], ...]
"""Rows that have terms: number, request, and True if its end tokens are forbidden."""


class TokenBiases:
    """Terms of the sequences that have had any and have not ended."""

    def __init__(
        self, eos_token_ids: tuple[int, ...], memory: StagedMemory, num_terms: torch.Tensor, device: torch.device
    ) -> None:
        """`num_terms` int32[1]: the number of a step's terms on the device."""
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._there: tuple[StagedArray, StagedArray, StagedArray] = (
            memory.reserve((MAX_TERMS,), torch.int32),
            memory.reserve((MAX_TERMS,), torch.int32),
            memory.reserve((MAX_TERMS,), torch.float32),
        )
        rows, token_ids, values = (array.tensor for array in self._there)
        self.staged = LogitBias(rows, token_ids, values, num_terms)
        """Terms that a step's copy sends."""
        self.number = 0
        """The number of terms of the latest step."""
        self._terms: dict[tuple[str, bool], _Terms] = {}
        """Terms of a request, if its end tokens are forbidden or not."""
        self._key: _Key = ()
        self._joined: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]
        self._long: LogitBias | None = None
        """Terms of the latest rows, if there are too many for the copy."""

    def stage(
        self, rows: SampledRows, biased: list[int], num_output: NDArray[np.int64]
    ) -> tuple[Collection[int], LogitBias | None]:
        """Return the rows that have terms, and the terms: in the step's copy if it has room for them.

        `biased` are the rows that may have any; each row follows `num_output` generated tokens.
        """
        key = tuple(
            (row, sequence.id, output < params.min_tokens)
            for row, output in zip(biased, num_output[biased].tolist(), strict=True)
            if (params := (sequence := rows.sequences[row]).request.sampling).logit_bias or output < params.min_tokens
        )
        if key != self._key:
            self._join(key, [self._terms_of(rows.sequences[row], forbids) for row, _, forbids in key])
        if not self.number:
            return (), None
        if self._long is None:
            for array, values in zip(self._there, self._joined, strict=True):
                array.on_host(self.number)[:] = values
        return [row for row, *_ in key], self.staged if self._long is None else self._long

    def forget(self, request_id: str) -> None:
        """Drop the terms of a request that has ended."""
        held = [self._terms.pop((request_id, forbids), None) for forbids in (False, True)]
        if any(held):  # another request may have its id and its row
            self._key, self.number, self._long = (), 0, None

    def _terms_of(self, sequence: Sequence, forbids: bool) -> _Terms:
        if (sequence.id, forbids) not in self._terms:
            bias = dict(sequence.request.sampling.logit_bias)
            if forbids:
                ends = forbidden_ends(sequence, sequence.num_output_tokens, self._eos_token_ids)
                bias |= dict.fromkeys(ends, float("-inf"))
            self._terms[sequence.id, forbids] = (
                np.fromiter(bias, dtype=np.int32, count=len(bias)),
                np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            )
        return self._terms[sequence.id, forbids]

    def _join(self, key: _Key, terms: list[_Terms]) -> None:
        counts = [len(token_ids) for token_ids, _ in terms]
        self._joined = (
            np.repeat(np.array([row for row, *_ in key], dtype=np.int32), counts),
            np.concatenate([np.zeros(0, dtype=np.int32), *(token_ids for token_ids, _ in terms)]),
            np.concatenate([np.zeros(0, dtype=np.float32), *(values for _, values in terms)]),
        )
        self._key, self.number, self._long = key, sum(counts), None
        if self.number > MAX_TERMS:
            rows, token_ids, values = (to_device(array, self._device) for array in self._joined)
            self._long = LogitBias(rows, token_ids, values, self.staged.number)
