"""When a request that comes now would get its first token: from the queue, the shares, and the measured pace."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from loramux.engine.batch import Batch
from loramux.engine.budget import Budget
from loramux.engine.load import Load
from loramux.engine.pace import Pace
from loramux.engine.policy import SchedulerLimits
from loramux.engine.queue import RequestQueue
from loramux.engine.room import Room
from loramux.engine.sequence import Sequence


class Forecast:
    """Pure questions; an estimate, not a promise: what it cannot know is who else comes and how long answers get."""

    def __init__(
        self,
        limits: SchedulerLimits,
        budget: Budget,
        queue: RequestQueue,
        batch: Batch,
        pace: Pace,
        room: Room,
    ) -> None:
        """`pace`: of the steps; whoever runs them measures them."""
        self._limits = limits
        self._budget = budget
        self._queue = queue
        self._batch = batch
        self._residency = room.residency
        self._room = room
        self._pace = pace

    def first_token(self, candidate: Sequence) -> float:
        """Seconds until `candidate`, which is not queued yet, has its first token; 0 before the pace is known.

        It waits until those that run have left room for those that are admitted before it; or until every prompt before
        its own is computed; or for its adapter: whatever takes longest.
        """
        if not self._pace.known:
            return 0.0
        ahead = self._queue.ahead_of(candidate.flow)
        running = self._batch.running
        decoding = min(len(running) + ahead.requests, self._limits.max_num_seqs)
        prompts = sum(s.num_uncomputed for s in running if s.num_uncomputed > 1) + ahead.prompt
        prompts += candidate.num_uncomputed
        chunk = max(1.0, self._limits.max_num_batched_tokens - decoding)
        steps = max(self._steps_to_admission(candidate, ahead), prompts / chunk)
        return max(self._pace.seconds(math.ceil(steps), steps * decoding + prompts), self._load_seconds(candidate))

    def _load_seconds(self, candidate: Sequence) -> float:
        return self._residency.expected_wait(candidate.digest) if candidate.digest else 0.0

    def _steps_to_admission(self, candidate: Sequence, ahead: Load) -> float:
        """Steps until enough has come free, at one token a step; at once of those that must make place for it."""
        budget = self._budget
        left_of = {s: 0 if self._room.owes(s, candidate) else s.likely_left for s in self._batch.running}
        running = sorted(left_of, key=left_of.__getitem__)
        pool = budget.num_pages - budget.watermark - self._residency.pinned_pages(candidate.digest)
        rows = len(running) + ahead.requests + 1.0 - self._limits.max_num_seqs
        pages = budget.kv_peak(running) + (ahead.room + candidate.likely_len) / budget.block_size - pool
        left = [left_of[sequence] for sequence in running]
        freed = [budget.pages_for(len(sequence.token_ids) + sequence.likely_left) for sequence in running]
        generation = ahead.output / max(ahead.requests, 1.0)
        return max(_steps_until(rows, [1] * len(left), left, generation), _steps_until(pages, freed, left, generation))


def _steps_until(needed: float, freed: list[int], left: list[int], generation: float) -> float:
    """Steps until those that end have freed `needed`.

    The i-th to end frees `freed[i]` after `left[i]` steps. Whoever takes its place is like it, and takes `generation`
    steps: so the same comes free again and again.
    """
    if needed <= 0.0 or not freed:
        return 0.0
    before = math.ceil(needed / sum(freed)) - 1
    last = bisect_left(list(accumulate(freed)), needed - before * sum(freed))
    return before * generation + left[min(last, len(left) - 1)]
