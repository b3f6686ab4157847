"""Tokens that penalties count, kept on the device from step to step."""

from __future__ import annotations

import random

import pytest
import torch

from loramux.engine.execution import device_sampler
from loramux.engine.execution.device_sampler import FIRST_WIDTH, TokenHistories
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.sequence import PENDING, Sequence

CPU = torch.device("cpu")


def sequence(name: str, prompt: list[int]) -> Sequence:
    request = Request(id=name, tenant="t", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5000))
    return Sequence(request, 0.0)


def flat(histories: TokenHistories, sequences: list[Sequence], drawn: list[int]) -> list[tuple[int, int, bool]]:
    """The step before drew `drawn[i]` for `sequences[i]`."""
    rows = [2 * i + 1 for i in range(len(sequences))]
    found = histories.flat(sequences, rows, torch.tensor(drawn), list(range(len(drawn))))
    assert [tensor.dtype for tensor in found] == [torch.int32, torch.int32, torch.bool]
    return list(zip(*(tensor.tolist() for tensor in found), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_histories_are_all_tokens_of_each_sequence_whatever_ran_before(seed: int) -> None:
    """Sequences come, skip steps, are drawn ahead of the host, and end, in any order."""
    draw, histories = random.Random(seed), TokenHistories(CPU)
    alive: list[Sequence] = []
    for number in range(60):
        if len(alive) < 4 or draw.random() < 0.3:
            alive.append(sequence(f"s{number}", [draw.randrange(99) for _ in range(draw.randint(1, 30))]))
        for ended in [one for one in alive if draw.random() < 0.1]:
            alive.remove(ended)
            histories.forget(ended.id)
        chosen = draw.sample(alive, draw.randint(0, len(alive))) if alive else []
        if not chosen:
            continue
        drawn = [draw.randrange(99) for _ in chosen]
        for one, token in zip(chosen, drawn, strict=True):
            one.token_ids.append(PENDING if draw.random() < 0.7 else token)
        got = flat(histories, chosen, drawn)
        for one, token in zip(chosen, drawn, strict=True):
            one.token_ids[-1] = token
        wanted = [
            (2 * row + 1, token, place >= one.num_prompt_tokens)
            for row, one in enumerate(chosen)
            for place, token in enumerate(one.token_ids)
        ]
        assert got == wanted


def test_step_sends_only_the_tokens_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    histories, sent = TokenHistories(CPU), []
    to_device = device_sampler.to_device
    monkeypatch.setattr(
        device_sampler, "to_device", lambda array, device: sent.append(array.size) or to_device(array, device)
    )
    sequences = [sequence(name, [1] * 900) for name in "abc"]
    flat(histories, sequences, [0, 0, 0])
    first = sum(sent)
    assert first >= 3 * 900
    sent.clear()
    for one in sequences:
        one.token_ids.append(PENDING)
    flat(histories, sequences, [4, 5, 6])
    assert sum(sent) <= 8 * len(sequences)


def test_ended_request_gives_its_row_back() -> None:
    histories = TokenHistories(CPU)
    for number in range(100):
        one = sequence(f"s{number}", [7, number])
        assert flat(histories, [one], [0]) == [(1, 7, False), (1, number, False)]
        histories.forget(one.id)
    assert histories._tokens.shape == (8, FIRST_WIDTH)


def test_longer_sequence_than_the_table_widens_it_and_loses_nothing() -> None:
    histories = TokenHistories(CPU)
    short, long = sequence("short", [1, 2]), sequence("long", list(range(FIRST_WIDTH + 5)))
    flat(histories, [short], [0])
    got = flat(histories, [short, long], [0, 0])
    assert [token for _, token, _ in got] == [1, 2, *range(FIRST_WIDTH + 5)]
