"""Reused KV changes no token: PEFT's answers in float32, with the cache on and off, however prefill is cut."""

from __future__ import annotations

import pytest
from adapter_zoo import ON_RANKS, Asked, Zoo, serve

from loramux.engine.engine import Engine

TEXT = tuple(range(5, 75))
MODELS = [None, "plain", "rslora"]


def conversations(turn: int) -> list[Asked]:
    """Every model is asked texts that begin alike and end otherwise; the turns ask the same."""
    return [
        Asked(f"{turn} {model} {end}", model, (*TEXT[:end], 80 + end % 7, 3), 6)
        for end in (30, 47, 64, 70)
        for model in MODELS
    ]


def check(zoo: Zoo, engine: Engine, asked: list[Asked]) -> None:
    got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@ON_RANKS
@pytest.mark.parametrize(("family", "budget"), [("llama", 11), ("llama", 64), ("mistral", 11), ("gemma3", 64)])
def test_prefix_cache_cached_and_computed_prompts_answer_the_same(zoo_of, family: str, budget: int, ranks: int) -> None:
    zoo = zoo_of(family)
    engine = zoo.engine(max_num_batched_tokens=budget, tensor_parallel_size=ranks)
    for turn in range(2):
        check(zoo, engine, conversations(turn))
    stats = engine.stats()
    whole = sum(len(asked.prompt) for asked in conversations(0))
    assert stats.prompt_tokens + stats.cached_tokens == 2 * whole
    assert stats.cached_tokens >= sum(len(asked.prompt) // 16 * 16 for asked in conversations(1))
    assert stats.recomputed_tokens == 0
    assert (stats.pages_kv, stats.pages_adapters) == (0, 0)
    assert stats.pages_kv_cached > 0
    assert stats.pages_adapters_idle > 0
    engine.close()


def test_prefix_cache_switched_off_reuses_nothing(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine = zoo.engine(prefix_cache=False)
    for turn in range(2):
        check(zoo, engine, conversations(turn))
    stats = engine.stats()
    assert stats.cached_tokens == stats.pages_kv_cached == 0
    assert stats.prompt_tokens == 2 * sum(len(asked.prompt) for asked in conversations(0))


@ON_RANKS
def test_prefix_cache_preempted_requests_reuse_their_own_kv_and_count_no_token_twice(zoo_of, ranks: int) -> None:
    zoo = zoo_of("mistral")
    engine = zoo.engine(tensor_parallel_size=ranks, swap_bytes=0)  # what comes back from there is not recomputed
    scheduler = engine.scheduler
    plan = scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 4 == 3:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    asked = [Asked(f"p{i}", model, (*TEXT[i:50], 4), 14) for i, model in enumerate([*MODELS, *MODELS])]
    check(zoo, engine, asked)
    stats = engine.stats()
    assert stats.preemptions >= 4
    assert stats.prompt_tokens + stats.cached_tokens == sum(len(one.prompt) for one in asked)
    assert stats.output_tokens == 14 * len(asked)
    assert 0 < stats.recomputed_tokens < 16 * stats.preemptions, "all but the pages that were not full"
    engine.close()


@ON_RANKS
def test_prefix_cache_and_adapters_that_evict_each_other_answer_as_peft_does(zoo_of, ranks: int) -> None:
    zoo = zoo_of("llama")
    # 32 pages, of which a rank of two has half of each
    engine = zoo.engine(pool_bytes=32 * 16 * 3 * 2 * 2 * 16 * 4 // ranks, tensor_parallel_size=ranks)
    for turn in range(2):
        check(zoo, engine, conversations(turn))
    stats = engine.stats()
    assert stats.kv_evictions > 0
    assert stats.adapter_evictions > 0
    for name in ("alone", "again"):
        check(zoo, engine, [Asked(name, None, (*TEXT, 9), 6)])
    assert engine.stats().cached_tokens >= stats.cached_tokens + 64
    engine.close()
