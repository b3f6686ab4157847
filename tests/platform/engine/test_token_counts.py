"""Tokens that penalties count, kept on the device from step to step."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from loramux.engine.execution import device_sampler
from loramux.engine.execution.device_sampler import TokenCounts
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.sequence import PENDING, Sequence
from loramux_kernels.step_inputs import insert_tokens_reference
from loramux_kernels.tables import IN_PROMPT

CPU = torch.device("cpu")
WIDTH = 99


def sequence(name: str, prompt: list[int]) -> Sequence:
    request = Request(id=name, tenant="t", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5000))
    return Sequence(request, 0.0)


def counted(counts: TokenCounts, sequences: list[Sequence], drawn: list[int]) -> list[dict[int, int]]:
    """The step before drew `drawn[i]` for `sequences[i]`; return the counts of each sequence that are not zero."""
    rows = counts.count(sequences).tolist()
    own = [i for i, one in enumerate(sequences) if one.token_ids[-1] == PENDING]
    places = [[0] * len(own), own, [rows[i] for i in own]]
    pending = torch.tensor(places, dtype=torch.int64)
    number = torch.tensor([len(own)], dtype=torch.int32)
    insert_tokens_reference(
        torch.zeros(1, dtype=torch.int64), counts.table, torch.tensor(drawn, dtype=torch.int64), pending, number
    )
    table = counts.table.numpy()
    return [{int(t): int(table[row, t]) for t in np.flatnonzero(table[row])} for row in rows]


def wanted(one: Sequence) -> dict[int, int]:
    split = one.num_prompt_tokens
    generated = Counter(one.token_ids[split:])
    return {token: generated[token] + IN_PROMPT * (token in one.token_ids[:split]) for token in set(one.token_ids)}


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_all_tokens_of_each_sequence_whatever_ran_before(seed: int) -> None:
    """Sequences come, skip steps, lose their rows, are drawn ahead of the host, and end, in any order."""
    draw, counts = random.Random(seed), TokenCounts(4, WIDTH, CPU)
    alive: list[Sequence] = []
    for number in range(80):
        if len(alive) < 4 or draw.random() < 0.3:
            alive.append(sequence(f"s{number}", [draw.randrange(WIDTH) for _ in range(draw.randint(1, 30))]))
        for ended in [one for one in alive if draw.random() < 0.1]:
            alive.remove(ended)
            counts.forget(ended.id)
        chosen = draw.sample(alive, draw.randint(0, min(4, len(alive)))) if alive else []
        drawn = [draw.randrange(WIDTH) for _ in chosen]
        for one, token in zip(chosen, drawn, strict=True):
            one.token_ids += [draw.randrange(WIDTH) for _ in range(draw.choice([0, 0, 3]))]
            one.token_ids.append(PENDING if draw.random() < 0.7 else token)
        got = counted(counts, chosen, drawn)
        for one, token in zip(chosen, drawn, strict=True):
            one.token_ids[-1] = token
        assert got == [wanted(one) for one in chosen]


def test_step_sends_only_the_tokens_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, sent = TokenCounts(3, WIDTH, CPU), []
    to_device = device_sampler.to_device
    monkeypatch.setattr(
        device_sampler, "to_device", lambda array, device: sent.append(array.size) or to_device(array, device)
    )
    sequences = [sequence(name, [1] * 900) for name in "abc"]
    counted(counts, sequences, [0, 0, 0])
    assert sum(sent) == 3 * 900
    sent.clear()
    for one in sequences:
        one.token_ids.append(PENDING)
    counted(counts, sequences, [4, 5, 6])
    assert not sent, "the device counts the tokens that it has drawn"


def test_row_of_an_ended_request_counts_nothing_of_it() -> None:
    counts = TokenCounts(1, WIDTH, CPU)
    for number in range(30):
        one = sequence(f"s{number}", [7, number])
        assert counted(counts, [one], [0]) == [wanted(one)]
        counts.forget(one.id)
