"""Sampling on the host: penalties, bias, temperature, top-k, top-p, min-p, and one random number for each token.

Tokens that a request's constraint does not allow are removed first, as if the model did not know them; log
probabilities are those of the allowed tokens.

The order is then the OpenAI API's and vLLM's: penalties and bias change logits, temperature scales them, then top-k,
top-p and min-p each remove tokens from the rest. A draw depends on the request's seed and its number of generated
tokens alone: not on other rows, nor on the engine that generated the tokens before.

A chunk with drafts also has a row for each draft (speculative decoding). Each row's token is chosen from the model's
distribution after the tokens before it, with the draw of its place in the answer, as if it ran alone. The next row was
computed with the draft as its input, so it counts only if the chosen token is that draft. So an answer is the same with
drafts and without, seeded or not, and needs no correction as in rejection sampling (Leviathan et al., 2023).

A vocabulary has 150,000 tokens and every sampled row pays for its passes over them, so one request's parameters can
delay every row of the step. Therefore no code here sorts the vocabulary, draws a number for each token, or counts a
history from its beginning. Rows that no penalty or bias changes are drawn from together (`draw_tokens`).

**Log probabilities of a prompt's own tokens** say how well the model expected each token, given those before it. Row p
of a prompt's chunk has the logits for token p + 1. So all rows of a prompt but the last are scored, and the last row is
sampled from. A step scores few rows (`scheduling.sequence.MAX_SCORED_ROWS`), because scoring a row takes as long as
choosing a token, and the other rows of the step wait for it. Temperature, penalties and constraints do not apply: these
are the model's own numbers, as in vLLM and in OpenAI's completions with `echo`.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from loramux.common.sampling import DRAWING, NEUTRAL, STEERING
from loramux.engine.execution.constraints import TokenMasks
from loramux.engine.messages import EngineFault, PromptLogprob, PromptLogprobs, SamplingParams, TokenEvent, TopLogprob
from loramux.engine.scheduling.sequence import Chunk, Sequence
from loramux_kernels.device import to_host
from loramux_kernels.sampling import Draw, draw_tokens, forbid_tokens, most_likely_tokens

_NEVER = float("-inf")

_steering = attrgetter(*STEERING)
_NEUTRAL = _steering(NEUTRAL)
_KEEPING = tuple(name for name in DRAWING if name != "temperature")
"""Parameters that remove tokens from a draw."""

MIN_TEMPERATURE = 1e-4
"""Least temperature; lower ones count as this one, and give the same tokens."""

LARGEST = torch.finfo(torch.float32).max


class SampledToken(NamedTuple):
    """A token and, if requested, its log probability and its most likely alternatives."""

    token_id: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None


class RequestState:
    """Everything that sampling keeps of one request from token to token."""

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        self.seed = secrets.randbits(64) if params.seed is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.bias = (
            torch.tensor(list(params.logit_bias), dtype=torch.long),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float64),
        )
        self.allowed = torch.tensor(params.allowed_token_ids, dtype=torch.long)
        """The only tokens to choose from; empty: all."""
        self._counts_output = bool(params.presence_penalty or params.frequency_penalty)
        self.counts = torch.zeros(vocab if self._counts_output else 0)
        """Times that each token was generated."""
        self.seen = torch.zeros(vocab if params.repetition_penalty != 1.0 else 0, dtype=torch.bool)
        """True for tokens of the prompt and the output."""
        self._num_counted = 0

    def count(self, sequence: Sequence) -> None:
        """Count the tokens since the last call; token ids are only ever appended."""
        done, self._num_counted = self._num_counted, max(self._num_counted, len(sequence.token_ids))
        if len(self.seen):
            self.seen[torch.tensor(sequence.token_ids[done:], dtype=torch.long)] = True
        if self._counts_output:
            fresh = torch.tensor(sequence.token_ids[max(done, sequence.num_prompt_tokens) :], dtype=torch.long)
            self.counts.index_add_(0, fresh, torch.ones(len(fresh)))

    def accept(self, token_id: int) -> None:
        """Count an accepted draft, because the next row of the chunk follows it. The sequence gets it only when the
        step is committed."""
        self._num_counted += 1
        if len(self.seen):
            self.seen[token_id] = True
        if self._counts_output:
            self.counts[token_id] += 1.0


class Sampler:
    """Chooses the tokens of rows. A request's draws depend on its seed and its tokens' number, and nothing else."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self._states: dict[str, RequestState] = {}

    def sample(self, logits: torch.Tensor, chunks: Items[Chunk], masks: TokenMasks | None = None) -> list[TokenEvent]:
        """Return the events of chunks that sample: one for each, and one more for each draft that is accepted.

        `logits` `[rows, vocab]`, any float dtype, are those of the chunks' sampled rows in order; `masks` removes
        tokens from them in place. A row without a finite maximum, before or after steering, has no token to choose: its
        event is a fault, and the other chunks are sampled.
        """
        if not chunks:
            return []
        faults: Mapping[int, EngineFault] = {}
        if masks is not None:
            forbid_tokens(logits, torch.from_numpy(masks.rows), torch.from_numpy(masks.words))
            faults = masks.faults
        best = most_likely_tokens(logits)
        drawn = self._draw_unsteered(logits, chunks, [row for row, likely in enumerate(best) if likely is not None])
        events: list[TokenEvent] = []
        first = 0
        for chunk in chunks:
            sequence = chunk.sequence
            for offset, draft in enumerate((*chunk.drafts, None)):
                row, num_output = first + offset, sequence.num_output_tokens + offset
                token: SampledToken | None = None
                likely = None if row in faults else best[row]
                ends = forbidden_ends(sequence, num_output, self.eos_token_ids)
                if likely is not None and is_plain_greedy(sequence) and likely not in ends:
                    token = SampledToken(likely)
                elif likely is not None and row in drawn:
                    token = SampledToken(drawn[row])
                elif likely is not None:
                    token = self._choose(logits[row].float(), sequence, num_output)
                # A token outside the vocabulary would raise in the next step, which other requests share.
                if token is None or not 0 <= token.token_id < logits.shape[1]:
                    events.append(fault_event(sequence, faults.get(row)))
                    break
                events.append(token_event(sequence, token, ending_tokens(sequence, self.eos_token_ids)))
                if token.token_id != draft or events[-1].finish_reason is not None:
                    break
                if state := self._states.get(sequence.id):
                    state.accept(draft)
            first += 1 + len(chunk.drafts)
        return events

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        self._states.pop(request_id, None)

    def _draw_unsteered(self, logits: torch.Tensor, chunks: Items[Chunk], finite: list[int]) -> dict[int, int]:
        """Draw in one call the tokens of all `finite` rows that depend on nothing but their own logits and number."""
        places = [(chunk.sequence, offset) for chunk in chunks for offset in range(1 + len(chunk.drafts))]
        draws = []
        for row in finite:
            sequence, offset = places[row]
            params, num_output = sequence.request.sampling, sequence.num_output_tokens + offset
            ends = forbidden_ends(sequence, num_output, self.eos_token_ids)
            if not (params.greedy or params.logprobs is not None or is_steered(sequence) or ends):
                seed = self._state_of(sequence, logits.shape[1]).seed
                draws.append(draw_of(params, seed, num_output, row))
        tokens = draw_tokens(logits, draws)
        return {draw.row: token for draw, token in zip(draws, tokens, strict=True)}

    def _state_of(self, sequence: Sequence, vocab: int) -> RequestState:
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = RequestState(sequence.request.sampling, vocab)
        return state

    def _choose(self, logits: torch.Tensor, sequence: Sequence, num_output: int) -> SampledToken | None:
        """Return the token of one row, after `num_output` generated ones; None if steering leaves none to choose."""
        params, state = sequence.request.sampling, self._state_of(sequence, len(logits))
        steered = self._forbid_early_end(steer(logits, sequence, state), sequence, num_output)
        highest, best = steered.max(dim=0)
        if not highest.isfinite():
            return None
        token_id = int(best)
        if not params.greedy:
            (token_id,) = draw_tokens(steered[None], [draw_of(params, state.seed, num_output, row=0)])
        if params.logprobs is None:
            return SampledToken(token_id)
        total = logits.logsumexp(dim=-1)
        if params.logprob_token_ids:
            reported = list(dict.fromkeys((*params.logprob_token_ids, token_id)))
            values = logits[reported]
        else:
            values, ids = logits.topk(params.logprobs)
            reported = ids.tolist()
        top = top_logprobs(reported, (values - total).tolist())
        return SampledToken(token_id, float(logits[token_id] - total), top)

    def _forbid_early_end(self, logits: torch.Tensor, sequence: Sequence, num_output: int) -> torch.Tensor:
        ends = [i for i in forbidden_ends(sequence, num_output, self.eos_token_ids) if i < logits.numel()]
        if not ends:
            return logits
        return logits.index_fill(0, torch.tensor(ends, dtype=torch.long, device=logits.device), _NEVER)


def top_logprobs(token_ids: list[int], logprobs: list[float]) -> list[TopLogprob]:
    """Return the alternatives at a position, without tokens that are not allowed."""
    return [TopLogprob(*pair) for pair in zip(token_ids, logprobs, strict=True) if pair[1] > _NEVER]


def ending_tokens(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens that end the sequence's answer."""
    request, params = sequence.request, sequence.request.sampling
    if params.ignore_eos and request.constraint is None:  # the mask of a constraint allows the end
        return _union(params.stop_token_ids, ())
    return _union(params.stop_token_ids, request.eos_token_ids or eos_token_ids)


@lru_cache(maxsize=1024)
def _union(some: tuple[int, ...], others: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens of both. Most requests have the same, so few sets are made."""
    return frozenset(some + others)


def token_event(sequence: Sequence, token: SampledToken, ends: Collection[int]) -> TokenEvent:
    """Return the event of one sampled token, with `stop` if it is one of the sequence's `ending_tokens`."""
    return TokenEvent(
        request_id=sequence.id,
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=token.top,
        finish_reason="stop" if token.token_id in ends else None,
    )


def fault_event(sequence: Sequence, fault: EngineFault | None = None) -> TokenEvent:
    """Return the end of an answer whose next token cannot be chosen, because of `fault`, or because its logits are NaN
    or infinite."""
    model = "adapter" if sequence.digest else "base model"
    fault = fault or EngineFault(
        "adapter_not_finite" if sequence.digest else "internal_error",
        f"The {model} computed logits that are not finite numbers, so the answer cannot be continued; "
        f"its weights may be too large for the number format that the server computes in.",
        field="model" if sequence.digest else None,
    )
    return TokenEvent(request_id=sequence.id, finish_reason="error", fault=fault)


def forbidden_ends(sequence: Sequence, num_output: int, eos_token_ids: tuple[int, ...]) -> set[int]:
    """Return the tokens that would end an answer of `num_output` tokens before it has `min_tokens`. None if no other
    token is allowed. In a constrained answer the masks forbid them."""
    params = sequence.request.sampling
    if num_output >= params.min_tokens or sequence.request.constraint is not None:
        return set()
    ends = {*(sequence.request.eos_token_ids or eos_token_ids), *params.stop_token_ids}
    return set() if params.allowed_token_ids and ends.issuperset(params.allowed_token_ids) else ends


def is_plain_greedy(sequence: Sequence) -> bool:
    """Is each token the most likely allowed one, with nothing to change or report?"""
    p = sequence.request.sampling
    return p.greedy and p.logprobs is None and not is_steered(sequence)


def is_steered(sequence: Sequence) -> bool:
    """May a penalty, a bias or allowed tokens change the sequence's logits?"""
    return _steering(sequence.request.sampling) != _NEUTRAL


def draw_of(params: SamplingParams, seed: int, num_output: int, row: int) -> Draw:
    """Return the draw, from a row of logits, of the token after `num_output` generated ones."""
    temperature = min(max(params.temperature, MIN_TEMPERATURE), LARGEST)
    number = uniform(seed, num_output)
    return Draw(row, temperature, number, **{name: getattr(params, name) for name in _KEEPING})


def steer(logits: torch.Tensor, sequence: Sequence, state: RequestState) -> torch.Tensor:
    """Return one row of float32 logits `[vocab]` after penalties, bias and allowed tokens, in a new tensor.

    The repetition penalty (Keskar et al., 2019) counts tokens of the prompt and the output; presence and frequency
    penalties count tokens of the output only, as in the OpenAI API. Values beyond float32's range are set to its limit;
    -inf stays.
    """
    p = sequence.request.sampling
    state.count(sequence)
    logits = logits.clone()
    if len(state.seen):
        seen = state.seen.nonzero()[:, 0]
        values = logits[seen].double()
        penalized = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        logits[seen] = _bounded(penalized, values)
    if len(state.counts):
        written = state.counts.nonzero()[:, 0]
        frequency, presence = (min(max(f, -LARGEST), LARGEST) for f in (p.frequency_penalty, p.presence_penalty))
        penalty = frequency * state.counts[written].double() + presence
        values = logits[written].double()
        logits[written] = _bounded(values - penalty, values)
    ids, terms = state.bias
    if len(ids):
        values = logits[ids].double()
        logits[ids] = _bounded(values + terms, values)
    if len(state.allowed):
        logits = torch.full_like(logits, _NEVER).index_copy_(0, state.allowed, logits[state.allowed])
    return logits


def _bounded(changed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the float64 `changed` as float32. A value beyond float32's range becomes its limit; a value that was -inf
    in `values`, and so forbids its token, stays -inf."""
    return torch.where(values == _NEVER, values, changed.clamp(-LARGEST, LARGEST)).float()


def uniform(seed: int, step: int) -> float:
    """Return the number in [0, 1) that a request with `seed` draws for its token number `step`: a hash of both."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(slots=True)
class ScoredRows:
    """Scored rows of a step, among those whose logits are computed."""

    rows: list[int] = field(default_factory=list)
    """Places among the step's `sampled_rows`."""
    spans: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """A sequence, and the first and one past the last of the tokens that its rows score."""

    def add(self, sequence: Sequence, first: int, last: int, place: int) -> None:
        """Add the tokens [first, last), whose logits begin at `place`."""
        if first < last:
            self.rows += range(place, place + last - first)
            self.spans.append((sequence, first, last))

    @property
    def targets(self) -> list[int]:
        """Token after each row's token."""
        return [token for sequence, first, last in self.spans for token in sequence.token_ids[first + 1 : last + 1]]

    @property
    def most_asked(self) -> int:
        """Most alternatives that any of the requests needs."""
        return max(sequence.request.sampling.prompt_logprobs or 0 for sequence, _, _ in self.spans)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a step's rows. They are on the host once the step's tokens are."""

    scored: ScoredRows
    logprobs: torch.Tensor
    """float32[rows]"""
    ranks: torch.Tensor
    """int64[rows]"""
    values: torch.Tensor
    """float32[rows, most alternatives]"""
    token_ids: torch.Tensor
    """int64[rows, most alternatives]"""

    def events(self) -> list[TokenEvent]:
        """Return an event for each sequence."""
        found = (self.logprobs.tolist(), self.ranks.tolist(), self.values.tolist(), self.token_ids.tolist())
        rows = iter(zip(*found, strict=True))
        events = []
        for sequence, first, last in self.scored.spans:
            asked = sequence.request.sampling.prompt_logprobs or 0
            tokens = []
            for _ in range(first, last):
                logprob, rank, values, token_ids = next(rows)
                top = [TopLogprob(*pair) for pair in zip(token_ids[:asked], values[:asked], strict=True)]
                tokens.append(PromptLogprob(logprob, rank, top))
            events.append(TokenEvent(request_id=sequence.id, prompt_logprobs=PromptLogprobs(first + 1, tokens)))
        return events


NO_SCORES = PromptScores(ScoredRows(), *(torch.empty(0) for _ in range(4)))


def split_scored(logits: torch.Tensor, scored: ScoredRows | None) -> tuple[torch.Tensor, PromptScores]:
    """Return the logits that tokens are sampled from, and the scores of the other rows.

    Scores of logits on a device are copied to the host after the work that was enqueued before.
    """
    if scored is None:
        return logits, NO_SCORES
    is_scored = np.zeros(len(logits), dtype=bool)
    is_scored[scored.rows] = True
    sampled = torch.from_numpy(np.flatnonzero(~is_scored)).to(logits.device)
    rows = logits[torch.tensor(scored.rows, device=logits.device)].float()
    targets = torch.tensor(scored.targets, device=logits.device)[:, None]
    totals = rows.logsumexp(dim=-1)
    chosen = rows.gather(1, targets)
    values, token_ids = rows.topk(scored.most_asked)
    results = (chosen[:, 0] - totals, (rows > chosen).sum(dim=-1) + 1, values - totals[:, None], token_ids)
    return logits[sampled], PromptScores(scored, *(to_host(result) for result in results))
