"""A request whose answer another engine has begun: the same tokens as if one engine had generated them all."""

from __future__ import annotations

import time

import msgspec
import pytest
from adapter_zoo import Asked, Zoo, to_request

from loramux.common.units import TokenCounts
from loramux.engine.engine import Engine
from loramux.engine.messages import EngineCount, Request

LENGTH = 12
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.3, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.3, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def zoo(zoo_of) -> Zoo:
    return zoo_of("llama")


def run(engine: Engine, request: Request) -> tuple[list[int], EngineCount]:
    engine.submit(request)
    token_ids: list[int] = []
    for _ in range(10_000):
        report = engine.step()
        if report is None:
            time.sleep(0.001)  # its adapter is being loaded on another thread
        for event in report.events if report else ():
            token_ids += [] if event.token_id is None else [event.token_id]
            if event.finish_reason is not None:
                assert event.fault is None
                assert event.count is not None
                return token_ids, event.count
    raise AssertionError("the request did not end")


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("adapter", [None, "plain"])
def test_resumed_request_goes_on_with_the_same_tokens_and_counts_only_its_own(
    zoo: Zoo, sampling: str, adapter: str | None
) -> None:
    request = to_request(zoo, Asked("whole", adapter, (5, 6, 7, 8, 9), LENGTH), **SAMPLING[sampling])
    whole, _ = run(zoo.engine(), request)
    assert len(whole) == LENGTH
    for told in (1, 5, LENGTH - 1):
        rest = msgspec.structs.replace(request, id=f"rest {told}", output_token_ids=whole[:told], group_started=True)
        engine = zoo.engine()
        token_ids, count = run(engine, rest)
        assert whole[:told] + token_ids == whole
        assert count.tokens == TokenCounts(output=LENGTH - told)
        assert count.adapter_loads == 0, "the load is not charged twice"
        assert engine.stats().prompt_tokens == 0, "the prompt was computed before"
        if adapter is None:  # what the second engine loads for it is its tenant's share
            (flow,) = engine.scheduler.queue.flows
            assert flow.executed == 2 * (LENGTH - told)
