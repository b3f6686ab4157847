"""Drafts in every step, right and wrong ones, whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import Any, cast

from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.sequence import Sequence


def draft_always(scheduler: Scheduler, answer: Callable[[Sequence], Items[int]], seed: int = 0, most: int = 5) -> None:
    """Draft up to `most` tokens for every decoding sequence: the first of them as in its whole `answer`, then others.

    A third of the drafts is right to its end, so that every length of an accepted run comes up.
    """
    rng, speculation = random.Random(seed), scheduler.speculation
    speculation.times = cast(
        Any, SimpleNamespace(is_known=True, is_measured=lambda rows: True, ahead_seconds=0.0, observe=lambda *_: None)
    )
    speculation._most = most
    speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: rng.randint(0, most)

    def guess(sequence: Sequence, count: int) -> list[int]:
        right = list(answer(sequence))[sequence.num_output_tokens :][:count]
        wrong = rng.choice([count, rng.randint(0, count)])
        return [token if i < wrong else abs(token - 1) for i, token in enumerate(right)]

    speculation.guess = guess
