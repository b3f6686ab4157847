"""Token for token what PEFT says in float32, whatever else is in the batch, however prefill is cut."""

from __future__ import annotations

import itertools
import random

import pytest
from adapter_zoo import FIRST_FAMILIES, NEWER_FAMILIES, RECIPES, REFUSED_FAMILIES, Asked, Zoo, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from preempting import preempting

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.loader import load_model

# Of mixtures PEFT loads no two different adapters into one model: test_mixtures.py.
FIRST = [family for family in FIRST_FAMILIES if family not in ("mixtral", "qwen3_moe")]
EVERY_MODEL = [None, *RECIPES]
DRAWN = itertools.count()


def some_requests(seed: int, count: int) -> list[Asked]:
    rng = random.Random(seed)
    return [
        Asked(
            name=f"r{i}",
            adapter=EVERY_MODEL[i % len(EVERY_MODEL)],
            prompt=tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 5, 16, 17, 33]))),
            output=rng.randrange(1, 12),
        )
        for i in range(count)
    ]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@pytest.mark.parametrize("family", [*FIRST, *NEWER_FAMILIES])
def test_mixed_batches_of_every_family_answer_as_peft_does(zoo_of, family: str) -> None:
    zoo = zoo_of(family)
    at_length = family in FIRST
    asked = some_requests(seed=1, count=18 if at_length else 7)
    engine = zoo.engine(max_num_batched_tokens=13 if at_length else 29)
    check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 if at_length else i // 6 for i in range(len(asked))]))
    stats = engine.stats()
    assert stats.max_distinct_adapters_beside_base >= (2 if at_length else 0)
    assert stats.pages_kv == 0
    assert stats.waiting == stats.running == 0


@pytest.mark.parametrize("adapter", EVERY_MODEL)
def test_every_adapter_alone_answers_as_peft_does(zoo_of, adapter: str | None) -> None:
    zoo = zoo_of("llama")
    asked = [Asked("alone", adapter, tuple(range(5, 40)), 12)]
    check(zoo, asked, serve(zoo, zoo.engine(max_num_batched_tokens=7), asked))


def test_every_adapter_changes_the_answer(zoo_of) -> None:
    zoo = zoo_of("llama")
    answers = {tuple(zoo.answer(Asked("x", adapter, tuple(range(5, 20)), 8))) for adapter in EVERY_MODEL}
    assert len(answers) == len(EVERY_MODEL)


def test_tiny_pool_that_evicts_adapters_answers_as_peft_does(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(seed=2, count=18)
    # 28 pages of 16 tokens: the largest adapter and one long request leave room for little else.
    engine = zoo.engine(pool_bytes=28 * 16 * 3 * 2 * 2 * 16 * 4)
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().adapter_evictions > 0


def test_preempted_requests_answer_as_peft_does(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"p{i}", adapter, (7 + i, 11, 13), 20) for i, adapter in enumerate(EVERY_MODEL)]
    engine = preempting(zoo.engine())
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().preemptions >= 6


@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_newer_family_preempted_and_cached_requests_answer_as_peft_does(zoo_of, family: str) -> None:
    zoo = zoo_of(family)
    asked = some_requests(seed=1, count=7)
    engine = preempting(zoo.engine())
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().preemptions > 0
    cached = engine.stats().cached_tokens
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().cached_tokens > cached


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    budget=st.integers(8, 40),
    block_size=st.sampled_from([6, 7, 16]),
    max_num_seqs=st.integers(1, 8),
)
def test_any_order_of_arrivals_answers_as_peft_does(
    zoo_of, seed: int, arrivals: list[int], budget: int, block_size: int, max_num_seqs: int
) -> None:
    zoo = zoo_of("qwen3")
    asked = some_requests(seed, count=7)
    engine = zoo.engine(max_num_batched_tokens=budget, block_size=block_size, max_num_seqs=max_num_seqs)
    check(zoo, asked, serve(zoo, engine, asked, arrivals))


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = st.integers(1, 40)
RECIPE = st.fixed_dictionaries(
    {
        "r": RANKS,
        "lora_alpha": st.integers(1, 40),
        "use_rslora": st.booleans(),
        "target_modules": st.sets(st.sampled_from(LINEARS), min_size=1),
        "layers_to_transform": st.none() | st.sets(st.integers(0, 2), min_size=1).map(sorted),
        "rank_pattern": st.dictionaries(st.sampled_from(LINEARS), RANKS, max_size=2),
        "alpha_pattern": st.dictionaries(st.sampled_from(LINEARS), st.integers(1, 40), max_size=2),
    }
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(recipes=st.lists(RECIPE, min_size=1, max_size=3), seed=st.integers(0, 10_000))
def test_any_ranks_and_targets_answer_as_peft_does(zoo_of, recipes: list[dict[str, object]], seed: int) -> None:
    zoo = zoo_of("llama")
    names = [f"drawn{next(DRAWN)}" for _ in recipes]
    try:
        for name, recipe in zip(names, recipes, strict=True):
            zoo.make_adapter(name, recipe, seed)
        asked = [Asked(f"{name} {i}", name, tuple(range(5 + i, 20 + 3 * i)), 6) for i in (0, 1) for name in names]
        asked.append(Asked("base", None, (9, 8, 7), 6))
        check(zoo, asked, serve(zoo, zoo.engine(max_num_batched_tokens=11), asked))
    finally:
        for name in names:
            zoo.forget_adapter(name)


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_base_that_the_attention_function_cannot_serve_is_refused(zoo_of, tmp_path, family: str) -> None:
    zoo = Zoo(family, tmp_path)
    with pytest.raises(UnsupportedModel, match=family):
        load_model(Settings(model=ModelSettings(path=str(zoo.base), served_model_name="b")))
