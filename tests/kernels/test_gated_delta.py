"""The gated delta rule: chunks and single tokens compute what the rule says, token by token."""

from __future__ import annotations

import pytest
import torch

from loramux_kernels.gated_delta import CHUNK, gated_delta_prompt, gated_delta_reference, gated_delta_step

HEADS, KEY, VALUE = 3, 8, 5


def case(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, HEADS, KEY), dim=-1) for _ in range(2))
    decay = -torch.rand(tokens, HEADS) * torch.tensor([0.01, 1.0, 40.0])  # the last forgets nearly all at each token
    return query, key, torch.randn(tokens, HEADS, VALUE), decay, torch.rand(tokens, HEADS)


def state(seed: int = 5) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(HEADS, KEY, VALUE)


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_gated_delta_prompt_equals_the_rule_token_by_token(tokens: int) -> None:
    parts, before = case(tokens), state()
    out, after = gated_delta_prompt(*parts, before)
    wanted, wanted_after = gated_delta_reference(*parts, before)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(after, wanted_after, atol=2e-5, rtol=2e-5)


def test_gated_delta_steps_of_several_sequences_equal_each_alone() -> None:
    parts, before = case(4), torch.stack([state(i) for i in range(4)])
    out, after = gated_delta_step(*parts, before)
    for i in range(4):
        wanted, wanted_after = gated_delta_reference(*(part[i : i + 1] for part in parts), before[i])
        torch.testing.assert_close(out[i], wanted[0])
        torch.testing.assert_close(after[i], wanted_after)
        alone, _ = gated_delta_step(*(part[i : i + 1] for part in parts), before[i : i + 1])
        assert torch.equal(alone[0], out[i])


@pytest.mark.parametrize("cut", [1, 17, CHUNK, 90])
def test_gated_delta_prompt_in_pieces_equals_the_whole(cut: int) -> None:
    parts, before = case(100), state()
    whole, whole_after = gated_delta_prompt(*parts, before)
    first, between = gated_delta_prompt(*(part[:cut] for part in parts), before)
    second, after = gated_delta_prompt(*(part[cut:] for part in parts), between)
    torch.testing.assert_close(torch.cat((first, second)), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(after, whole_after, atol=2e-5, rtol=2e-5)
