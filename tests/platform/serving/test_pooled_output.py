"""The rows of a prompt whose tokens are classified: each once, in order, and billed when the last has come."""

from __future__ import annotations

import numpy as np
import pytest

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineCount, EngineFault, Request, SamplingParams, TokenEvent
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Classes, PromptToken, Token
from loramux.serving.output import Choice, PooledOutput

TOKENS = [PromptToken(Token(str(i), b"", i)) for i in range(7)]


def part(first: int, end: int, finish_reason: str | None = None) -> TokenEvent:
    numbers = np.arange(2 * first, 2 * end, dtype="<f4")
    return TokenEvent(request_id="x", finish_reason=finish_reason, pooled=numbers.tobytes(), pooled_tokens=(first, end))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(0, 7)], id="one chunk"),
        pytest.param([(0, 3), (3, 5), (5, 7)], id="chunks"),
        pytest.param([(0, 3), (3, 5), (0, 2), (2, 4), (4, 7)], id="after a preemption"),
        pytest.param([(0, 5), (0, 7)], id="after an engine's death"),
        pytest.param([(0, 5), (0, 5), (3, 6), (6, 7)], id="borders at other places"),
    ],
)
def test_every_row_is_given_out_once_in_order(parts: list[tuple[int, int]]) -> None:
    output = PooledOutput(0, Classes(), TOKENS)
    deltas = [output.push(part(*one, "stop" if one is parts[-1] else None)) for one in parts]
    assert [token for delta in deltas for token in delta.tokens] == TOKENS
    assert np.frombuffer(b"".join(delta.pooled for delta in deltas), dtype="<f4").tolist() == list(range(14))
    assert output.is_answered


def test_part_of_the_rows_counts_the_tokens_that_were_computed() -> None:
    """A client that leaves in the middle of the prompt: the engine's own count, not the whole prompt."""
    sampling = SamplingParams(max_tokens=1)
    request = Request(id="x", tenant="t", prompt_token_ids=[*range(7)], sampling=sampling, pooling="token_classify")
    choice = Choice(0, request, PooledOutput(0, Classes(), TOKENS))
    choice.count_event(part(0, 3))
    choice.output.push(part(0, 3))
    choice.count_event(
        TokenEvent(request_id="x", finish_reason="cancelled", count=EngineCount(tokens=TokenCounts(prompt=5)))
    )
    assert choice.computed == TokenCounts(prompt=5)
    assert not choice.output.is_answered


def test_fault_after_the_first_rows_ends_the_request() -> None:
    output = PooledOutput(0, Classes(), TOKENS)
    output.push(part(0, 3))
    fault = EngineFault("adapter_not_finite", "not a number")
    with pytest.raises(InvalidRequest, match="not a number"):
        output.push(TokenEvent(request_id="x", finish_reason="error", fault=fault))
