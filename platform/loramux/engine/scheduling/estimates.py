"""Estimates that planning is based on: step times, answer lengths, waiting work, and the tokens that may follow.

Estimates are not promises. Estimates decide how memory is planned, in which order tenants are admitted, which deadlines
can be met and which tokens are drafted. A wrong estimate costs a preemption, a refusal or a row, never a wrong answer.

A draft is the estimate of a sequence's next tokens, by prompt lookup (Saxena, 2023; vLLM's n-gram speculation). Prompt
lookup needs no second model: it finds an earlier copy of the sequence's last tokens in the sequence, and drafts the
tokens that followed this copy. Answers of extraction, rewriting and code edits repeat parts of their prompts.
`Acceptance` counts how many drafted tokens were right so far.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def attention_pairs(context: int, length: int) -> float:
    """Return the query-key pairs of `length` tokens after `context` tokens. Each token reads the context and the tokens
    between."""
    return length * (context + length / 2.0)


def tokens_with_attention(tokens: float, pairs: float, token_context: float) -> float:
    """Return the number of tokens without context that take as long as `tokens` tokens with `pairs` query-key pairs.

    `token_context` is `SchedulerLimits.token_context`; inf: attention is not counted.
    """
    return tokens + pairs / token_context


class StepTimeModel:
    """Seconds of a step = fixed + per_token * tokens: least squares over the latest steps, exponentially weighted.

    Tokens of prompts are counted with their attention (`tokens_with_attention`).
    """

    MEMORY = 64.0
    """Steps after which a measurement counts for 1/e."""
    ENOUGH = 4.0
    """Measured steps from which a prediction is useful."""
    SPREAD = 1e-3
    """Relative variance of the tokens in a step below which the two terms cannot be separated."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """True if enough steps were measured."""
        return self._weight >= self.ENOUGH

    def observe(self, tokens: float, seconds: float) -> None:
        """Count a step of `tokens` tokens that took `seconds`."""
        keep = 1.0 - 1.0 / self.MEMORY
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + tokens
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + tokens * tokens
        self._xy = keep * self._xy + tokens * seconds

    def seconds(self, steps: float, tokens: float) -> float:
        """Return the expected seconds of `steps` steps with `tokens` tokens in all; 0 before enough is known."""
        if not self.is_known:
            return 0.0
        fixed, per_token = self._line()
        return steps * fixed + tokens * per_token

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of the latest steps; 0 before enough is known."""
        return self._y / self._weight if self.is_known else 0.0

    def compute_seconds(self, tokens: int) -> float:
        """Return the expected seconds of `tokens` more tokens in steps that run anyway; 0 before enough is known."""
        return self.seconds(0, tokens)

    def tokens_in(self, share: float) -> float:
        """Return the number of tokens that lengthen a step by `share` of its fixed time; infinite before enough steps
        were measured.
        """
        if not self.is_known:
            return math.inf
        fixed, per_token = self._line()
        return share * fixed / per_token if per_token else math.inf

    def _line(self) -> tuple[float, float]:
        """Return (fixed, per_token), both at least 0."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = (self._xy / self._weight - x * y) / variance if variance > self.SPREAD * x * x else 0.0
        per_token = min(max(slope, 0.0), y / x)
        return y - per_token * x, per_token


@dataclass(slots=True)
class _MeanTime:
    """Mean of the steps with about the same number of rows."""

    rows: float = 0.0
    seconds: float = 0.0
    count: int = 0
    """Steps that the mean holds, up to `DecodeTimes.MEMORY`."""
    latest: int = 0
    """Number of the latest of them."""

    def add(self, number: int, rows: float, seconds: float) -> None:
        """Count the step of this `number`."""
        if (pause := number - self.latest) > DecodeTimes.RENEWED:
            self.count = min(self.count, DecodeTimes.KEPT) if pause <= DecodeTimes.FORGOTTEN else 0
        self.count, self.latest = min(self.count + 1, DecodeTimes.MEMORY), number
        self.rows += (rows - self.rows) / self.count
        self.seconds += (seconds - self.seconds) / self.count


class DecodeTimes:
    """Measured seconds of steps without a prompt, as a function of their rows that never falls.

    The function has one mean for each quarter of an octave of row counts, joined by lines. Beyond the largest measured
    number of rows, a row costs as much as a token in steps of all kinds.

    If each step has drafts, steps without them are not measured, and the other way round. So both are asked for again:
    see `is_measured` and `FORGOTTEN`.

    Steps with drafts of the base's own head are not in the function, because the head's time is not a row's. They give
    `ahead_seconds`: how much longer they take, divided by the tokens of their longest draft.
    """

    MEMORY = 16
    """Steps after which a measurement counts for 1/e."""
    OUTLIER = 2.0
    """A measurement above this multiple of the mean counts as this multiple, because the process may have been stopped
    during the step.
    """
    RENEWED, KEPT = 64, 4
    """Steps after which a time is to be measured again, and the earlier steps that its mean then counts at most."""
    FORGOTTEN = 512
    """Steps after which a mean is forgotten. A first step with drafts that took too long would forbid drafts for ever:
    no other would be measured."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._means: dict[int, _MeanTime] = {}
        """Means by quarter of an octave."""
        self._ahead = _MeanTime()
        self._num_steps = 0
        self._curve: list[tuple[float, float]] = []
        """Rows and seconds, both ascending."""

    @property
    def is_known(self) -> bool:
        """True if a step was measured, and the time of a token is known."""
        return bool(self._means) and self._step_time.is_known

    def is_measured(self, rows: int) -> bool:
        """Return whether a step of at most `rows` rows was measured among the latest ones."""
        return any(mean.rows < rows + 0.5 for mean in self._means_within(self.RENEWED))

    @property
    def ahead_seconds(self) -> float:
        """Seconds of the head for one draft of all sequences. 0, so that it is tried: too few of the latest steps were
        measured."""
        is_known = self._ahead.count >= self.KEPT and self._num_steps - self._ahead.latest <= self.FORGOTTEN
        return self._ahead.seconds if is_known else 0.0

    def observe(self, rows: int, seconds: float, ahead: int = 0) -> None:
        """Count a step of `rows` decoding and drafted rows, whose longest drafts of the head have `ahead` tokens."""
        self._num_steps += 1
        mean = self._ahead if ahead else self._means.setdefault(round(4 * math.log2(rows)), _MeanTime())
        if ahead:
            alone = self.seconds(rows)
            if self.ahead_seconds:
                seconds = min(seconds, self.OUTLIER * (alone + ahead * mean.seconds))
            seconds = (seconds - alone) / ahead
            if 0 < mean.count < self.KEPT:  # the first runs are slow, and would forbid the next ones
                seconds = mean.seconds = min(seconds, mean.seconds)
        elif mean.count and self._num_steps - mean.latest <= self.FORGOTTEN:
            seconds = min(seconds, self.OUTLIER * mean.seconds)
        mean.add(self._num_steps, rows, seconds)
        self._curve.clear()

    def seconds(self, rows: float) -> float:
        """Return the expected seconds of a step of `rows` rows."""
        if not self._curve:
            self._curve = _ascending((mean.rows, mean.seconds) for mean in self._means_within(self.FORGOTTEN))
        curve = self._curve
        index = bisect_left(curve, (rows, 0.0))
        if index == len(curve):
            last, seconds = curve[-1]
            return seconds + self._step_time.seconds(0, rows - last)
        above, seconds = curve[index]
        if not index:
            return seconds
        below, before = curve[index - 1]
        return before + (seconds - before) * (rows - below) / (above - below)

    def _means_within(self, steps: int) -> Iterable[_MeanTime]:
        """Return the means that hold one of the latest `steps` steps."""
        return (mean for mean in self._means.values() if self._num_steps - mean.latest <= steps)


def _ascending(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points in order of x. Neighbours with falling y are merged into a mean (pool adjacent violators)."""
    merged: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        merged.append([point])
        while len(merged) > 1 and _mean(merged[-2]) >= _mean(merged[-1]):
            merged[-2:] = [merged[-2] + merged[-1]]
    return [(x, _mean(pool)) for pool in merged for x, _ in pool]


def _mean(points: list[tuple[float, float]]) -> float:
    return sum(y for _, y in points) / len(points)


class OutputLengths:
    """Expected length of an answer: the mean of its revision's latest answers.

    Before a revision has enough answers, the expected length is the mean of all answers, and before that the request's
    limit. A mean is right because the plan needs a sum: of requests that run together, some end earlier than expected
    and some later. A high quantile of each length would leave a twentieth of the pool unused and spare no preemption
    (decision 0004).
    """

    WINDOW = 64
    """Answers remembered for each revision."""
    ENOUGH = 8
    """Answers from which a mean is useful."""
    MAX_KEYS = 16_384
    """Maximum number of remembered revisions. The revision whose last answer is oldest is forgotten first."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, _Lengths] = OrderedDict()
        self._all = _Lengths()

    def record(self, key: Hashable, num_output_tokens: int) -> None:
        """Count an answer under `key` that ended by itself or at its limit."""
        lengths = self._by_key.setdefault(key, _Lengths())
        self._by_key.move_to_end(key)
        if len(self._by_key) > self.MAX_KEYS:
            self._by_key.popitem(last=False)
        lengths.add(num_output_tokens, self.WINDOW)
        self._all.add(num_output_tokens, self.WINDOW)

    def expect(self, key: Hashable, max_tokens: int) -> float:
        """Return the tokens that a request under `key` is expected to generate; it may generate `max_tokens`."""
        own = self._by_key.get(key)
        known = (own.mean(self.ENOUGH) if own else None) or self._all.mean(self.ENOUGH)
        return max_tokens if known is None else min(max_tokens, known)


@dataclass(eq=False, slots=True)
class _Lengths:
    latest: deque[int] = field(default_factory=deque)
    total: int = 0

    def add(self, length: int, window: int) -> None:
        if len(self.latest) == window:
            self.total -= self.latest.popleft()
        self.latest.append(length)
        self.total += length

    def mean(self, enough: int) -> float | None:
        return self.total / len(self.latest) if len(self.latest) >= enough else None


@dataclass(slots=True)
class QueuedWork:
    """Expected work of one or many waiting requests, as a sum."""

    requests: float = 0.0
    prompt: float = 0.0
    """Tokens to prefill."""
    output: float = 0.0
    """Tokens to generate."""
    kv_tokens: float = 0.0
    """Number of tokens of KV that the requests hold when they end."""
    pairs: float = 0.0
    """Query-key pairs of the tokens to prefill."""

    @property
    def units(self) -> float:
        """Service in the units that will be charged."""
        return self.prompt + 2.0 * self.output

    def add(self, other: QueuedWork, times: float = 1.0) -> None:
        """Add `other` times a factor; with -1 subtract it."""
        self.requests += times * other.requests
        self.prompt += times * other.prompt
        self.output += times * other.output
        self.kv_tokens += times * other.kv_tokens
        self.pairs += times * other.pairs

    def share_of(self, units: float) -> float:
        """Return the part of this work, 0 to 1, that is worth `units`."""
        return min(1.0, max(0.0, units / self.units)) if self.units > 0.0 else 0.0


WAIT_MEMORY = 0.95
"""Share of the past ratio that is kept after each request."""
WAIT_MARGIN = 1.1


@dataclass(slots=True)
class WaitBias:
    """Ratio of a flow's waits to their predictions, because a prediction cannot include later requests that are served
    first.
    """

    waited: float = 1.0
    predicted: float = 1.0

    @property
    def factor(self) -> float:
        """Factor for a predicted wait. The factor is at least 1 and has a margin, because half of all requests wait
        longer than the mean.
        """
        return max(1.0, WAIT_MARGIN * self.waited / self.predicted)

    def add(self, waited: float, predicted: float) -> None:
        """Count one request's seconds."""
        self.waited = WAIT_MEMORY * self.waited + waited
        self.predicted = WAIT_MEMORY * self.predicted + predicted


LONGEST_MATCH, SHORTEST_MATCH = 4, 2
"""Numbers of last tokens that an earlier place must repeat: as many as possible, at most the first, at least the
second."""
PRIOR_TOKENS = 2.0
"""Weight of the first guess of an acceptance, in drafted tokens."""


@dataclass(eq=False, slots=True)
class Acceptance:
    """Drafted tokens that were verified, the latest counting most, and the totals for statistics."""

    keep: float
    """Share of the past acceptance that is kept after each draft."""
    tried: float = 0.0
    accepted: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    def rate(self, first_guess: float) -> float:
        """Return the probability that the next token of a draft is accepted."""
        return (self.accepted + PRIOR_TOKENS * first_guess) / (self.tried + PRIOR_TOKENS)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft whose first `accepted` tokens were right; tokens after a wrong token give no information."""
        self.tried = self.keep * self.tried + min(accepted + 1, drafted)
        self.accepted = self.keep * self.accepted + accepted
        self.num_drafted += drafted
        self.num_accepted += accepted

    def fade(self, keep: float) -> None:
        """Forget a part of the past, so that the first guess gains weight with time."""
        self.tried *= keep
        self.accepted *= keep


class PromptLookup:
    """The history of one sequence, and the place in the history that the sequence currently repeats."""

    def __init__(self) -> None:
        self._history: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self._length = 0
        self._next: int | None = None
        """Place of the next expected token; None while the sequence does not repeat an earlier part."""

    def draft(self, token_ids: list[int], most: int, known: int | None = None) -> list[int]:
        """Return up to `most` tokens that may follow the first `known` of `token_ids`, which begin with those of the
        last call; None: all of them are known.

        If the end of a text repeats itself, the repetition is expected to continue.
        """
        self._append(token_ids, len(token_ids) if known is None else known)
        if self._next is None:
            self._next = self._find()
        if self._next is None:
            return []
        followed = self._history[self._next : min(self._next + most, self._length)]
        # np.resize repeats `followed` if the history ends before `most` tokens.
        drafted: list[int] = np.resize(followed, most).tolist()
        return drafted

    def _append(self, token_ids: list[int], stop: int) -> None:
        """Append the new tokens before `stop`. Keep the found place if it predicted these tokens; otherwise drop the
        place."""
        start = self._length
        if stop > len(self._history):
            # Doubled, so that appending a token takes amortised constant time.
            self._history = np.resize(self._history, 2 * stop)
        self._history[start:stop] = token_ids[start:stop]
        self._length = stop
        if self._next is not None:
            begin, self._next = self._next, self._next + stop - start
            if not np.array_equal(self._history[begin : self._next], self._history[start:stop]):
                self._next = None

    def _find(self) -> int | None:
        """Return the place after the latest of the longest matches of the last tokens."""
        history, last = self._history[: self._length], self._length - 1
        places = np.flatnonzero(history[:last] == history[last])
        for back in range(1, LONGEST_MATCH):
            longer = places[places >= back]
            longer = longer[history[longer - back] == history[last - back]]
            if not len(longer):
                return int(places[-1]) + 1 if back >= SHORTEST_MATCH else None
            places = longer
        return int(places[-1]) + 1


@dataclass(eq=False, slots=True)
class Drafter:
    """Drafts and acceptance of one sequence."""

    acceptance: Acceptance
    lookup: PromptLookup = field(default_factory=PromptLookup)
