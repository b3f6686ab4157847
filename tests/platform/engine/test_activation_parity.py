"""Activated LoRA: PEFT's tokens in float32, in mixed batches, on KV that the base computed, however prefill is cut."""

from __future__ import annotations

import pytest
from adapter_zoo import ON_RANKS, Asked, Zoo, serve
from eager_drafts import draft_always

INVOKE = (90, 91)
TEXT = tuple(range(5, 65))
PROMPTS = {
    "in the middle": (*TEXT[:50], *INVOKE, 3),
    "twice": (*TEXT[:20], *INVOKE, *TEXT[20:41], *INVOKE, 4, 5),
    "at the very end": (*TEXT[:33], *INVOKE),
    "at a page's beginning": (*TEXT[:32], *INVOKE, *TEXT[:20]),
    "at once": (*INVOKE, *TEXT[:17]),
    "half of it": (*TEXT[:30], INVOKE[0], 7, INVOKE[1]),
    "not at all": TEXT,
}


@pytest.fixture(scope="module")
def zoo(zoo_of) -> Zoo:
    zoo = zoo_of("llama")
    recipe = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "alora_invocation_tokens": list(INVOKE)}
    zoo.make_adapter("activated", recipe, seed=7)
    return zoo


def asked_of(models: list[str | None], turn: int = 0) -> list[Asked]:
    return [Asked(f"{turn} {model} {name}", model, prompt, 7) for name, prompt in PROMPTS.items() for model in models]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@ON_RANKS
@pytest.mark.parametrize("budget", [11, 64])
def test_activated_lora_in_mixed_batches_answers_as_peft_does(zoo: Zoo, budget: int, ranks: int) -> None:
    engine = zoo.engine(max_num_batched_tokens=budget, tensor_parallel_size=ranks)
    for turn in range(2):
        asked = asked_of(["activated", None, "plain"], turn)
        check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
    stats = engine.stats()
    assert stats.max_distinct_adapters_beside_base == 2
    assert stats.prompt_tokens + stats.cached_tokens == 6 * sum(map(len, PROMPTS.values()))
    engine.close()


def test_activated_lora_with_drafts_answers_as_peft_does(zoo: Zoo) -> None:
    asked = asked_of(["activated", None, "plain"])
    answers = {request.name: zoo.answer(request) for request in asked}
    engine = zoo.engine(max_num_batched_tokens=31)
    draft_always(engine.scheduler, lambda own: answers[own.id])
    check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
    assert engine.stats().accepted_tokens > 10


def test_activated_lora_reuses_the_bases_kv(zoo: Zoo) -> None:
    engine = zoo.engine()
    base, activated = asked_of([None]), asked_of(["activated"])
    check(zoo, base, serve(zoo, engine, base))
    before = engine.stats().cached_tokens
    check(zoo, activated, serve(zoo, engine, activated))
    reusable = sum(n // 16 * 16 for n in (50, 43, 33, 32, 0, 32, 59))
    assert engine.stats().cached_tokens - before == reusable


def test_activated_lora_without_its_invocation_answers_as_the_base(zoo: Zoo) -> None:
    differs = {
        name: zoo.answer(Asked(name, "activated", prompt, 7)) != zoo.answer(Asked(name, None, prompt, 7))
        for name, prompt in PROMPTS.items()
    }
    assert {name for name, differ in differs.items() if not differ} == {"half of it", "not at all"}


def test_activated_lora_preempted_answers_the_same(zoo: Zoo) -> None:
    engine = zoo.engine(max_num_batched_tokens=9)
    scheduler = engine.scheduler
    plan = scheduler.plan

    def preempting_plan():
        if scheduler.running and engine.stats().steps % 4 == 3:
            scheduler.state.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting_plan
    asked = asked_of(["activated"])
    check(zoo, asked, serve(zoo, engine, asked))
    assert engine.stats().preemptions >= 4
