"""The recurrence of Mamba 2: chunks and single tokens compute what the rule says, token by token."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Sizes, make_linear_case

from loramux_kernels.linear_attention import linear_attention_reference
from loramux_kernels.mamba2 import CHUNK, mamba2_prompt, mamba2_reference, mamba2_step

GROUPS, HEADS, KEY, VALUE = 2, 6, 8, 5


def case(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    query, key = torch.randn(2, tokens, GROUPS, KEY) * KEY**-0.5
    beta = torch.rand(tokens, HEADS) * torch.tensor([0.001, 0.1, 1.0] * 2)
    decay = -beta * torch.tensor([1.0, 3.0, 40.0] * 2)  # the last forgets nearly all at each token
    return query, key, torch.randn(tokens, HEADS, VALUE), decay, beta


def state(seed: int = 5) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(HEADS, KEY, VALUE)


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_mamba2_prompt_equals_the_rule_token_by_token(tokens: int) -> None:
    parts, before = case(tokens), state()
    out, after = mamba2_prompt(*parts, before)
    wanted, wanted_after = mamba2_reference(*parts, before)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(after, wanted_after, atol=2e-5, rtol=2e-5)


def test_mamba2_steps_of_several_sequences_equal_each_alone() -> None:
    parts, before = case(4), torch.stack([state(i) for i in range(4)])
    out, after = mamba2_step(*parts, before)
    for i in range(4):
        wanted, wanted_after = mamba2_reference(*(part[i : i + 1] for part in parts), before[i])
        torch.testing.assert_close(out[i], wanted[0])
        torch.testing.assert_close(after[i], wanted_after)
        alone, _ = mamba2_step(*(part[i : i + 1] for part in parts), before[i : i + 1])
        assert torch.equal(alone[0], out[i])


def test_mamba2_limits_the_step_sizes_of_a_prompt_alone() -> None:
    """The first 5 of 9 tokens are the prompt, however the tokens are cut into steps."""
    sizes = Sizes(1, 2, 8, 16)
    whole = make_linear_case(sizes, [(9, 0)], torch.float32, torch.device("cpu"), is_mamba=True)
    whole.batch.prompt_lens[0] = 5
    expected = linear_attention_reference(*whole.with_copied_pool().arguments)
    unlimited = make_linear_case(sizes, [(9, 0)], torch.float32, torch.device("cpu"), is_mamba=True)
    unlimited.batch.prompt_lens[0] = 0
    free = linear_attention_reference(*unlimited.arguments)
    assert not torch.allclose(free[:5], expected[:5])
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
        rows = type(whole.rows)(*(p if p is None else p[start:stop] for p in vars(whole.rows).values()))
        lengths = torch.tensor([0, stop - start], dtype=torch.int32), torch.tensor([stop], dtype=torch.int32)
        batch = type(whole.batch)(*lengths, *list(vars(whole.batch).values())[2:6])
        got = linear_attention_reference(rows, whole.weights, whole.state, batch)
        torch.testing.assert_close(got, expected[start:stop], atol=2e-5, rtol=2e-5)
