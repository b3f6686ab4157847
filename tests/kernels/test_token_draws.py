"""Drawn tokens: the C++ operator against torch, token for token."""

from __future__ import annotations

import random

import pytest
import torch

from loramux_kernels.sampling import (
    Draw,
    draw_tokens,
    draw_tokens_reference,
    most_likely_tokens,
    most_likely_tokens_reference,
)

pytestmark = pytest.mark.usefixtures("native")

NEVER = float("-inf")


def some_draws(rng: random.Random, rows: int, count: int, vocab: int) -> list[Draw]:
    return [
        Draw(
            row=rng.randrange(rows),
            temperature=rng.choice([1e-4, 0.3, 1.0, 1.7, 1e30]),
            number=rng.random(),
            top_k=rng.choice([0, 1, 3, 50, vocab - 1, vocab, 10**9]),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 1e-9]),
            min_p=rng.choice([0.0, 0.0, 0.02, 1.0, 3.0]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 97, 4096, 20_011])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_draw_tokens_equals_the_reference(dtype: torch.dtype, vocab: int, spread: float) -> None:
    """In bfloat16 many logits are equal, so that ties at every cut are met."""
    rng = random.Random(vocab)
    logits = (torch.randn(6, vocab + 3, generator=torch.Generator().manual_seed(1)) * spread).to(dtype)[:, :vocab]
    logits[1, torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[: vocab // 2]] = NEVER
    logits[1, 0] = 0.0
    logits[2] = 1.0
    draws = some_draws(rng, 6, 60, vocab)
    assert draw_tokens(logits, draws) == draw_tokens_reference(logits, draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 97, 20_011])
def test_most_likely_tokens_equal_the_reference(dtype: torch.dtype, vocab: int) -> None:
    """The first of equals, in every lane; no token if the highest logit is not finite."""
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab + 3, generator=rng).to(dtype)[:, :vocab]
    logits[1] = -1.0
    logits[2] = NEVER
    logits[3, vocab // 2] = float("inf")
    logits[4, vocab - 1] = float("nan")
    logits[5, : vocab - 1] = NEVER
    logits[6, torch.randint(vocab, (3,), generator=rng)] = 9.0
    logits[7] = -logits[7].abs() - 1.0
    likely = most_likely_tokens(logits)
    assert likely == most_likely_tokens_reference(logits)
    assert likely[1] == 0
    assert likely[2:6] == [None, None, None, vocab - 1]
    assert most_likely_tokens(logits[:0]) == []


def test_draw_tokens_never_chooses_a_forbidden_token_at_the_end_of_the_sum() -> None:
    logits = torch.full((1, 40), NEVER)
    logits[0, 7], logits[0, 9] = 1.0, -20.0
    almost_one = 1.0 - 2.0**-53
    assert draw_tokens(logits, [Draw(0, 1.0, almost_one), Draw(0, 1.0, 0.0)]) == [9, 7]


def test_draw_tokens_of_nothing_is_nothing() -> None:
    assert draw_tokens(torch.zeros(0, 5), []) == []
