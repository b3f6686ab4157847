"""engine.kv_cache_dtype = "fp8": tokens are PEFT's over a cache that rounds keys and values as the pages do."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from adapter_zoo import HYBRIDS, LINEARS, ON_RANKS, RECIPES, SERVED, Asked, Zoo, load, serve, to_request
from eager_drafts import draft_always
from fp8_cache import Fp8Cache, Fp8LatentCache
from preempting import preempting

from loramux.engine.execution.attention import KvLayout, LayerShape, UnsupportedModel

COMPRESSES_KV = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
BLOCK = 64
"""Pages of as many bytes hold the widest tile of an adapter."""
FP8 = {"kv_cache_dtype": "fp8", "block_size": BLOCK}
EVERY_MODEL = [None, *RECIPES]


def some_requests(count: int, names: list[str | None] = EVERY_MODEL) -> list[Asked]:
    """Prompts and answers within a page, to its end, and beyond."""
    rng = random.Random(3)
    return [
        Asked(
            name=f"r{i}",
            adapter=names[i % len(names)],
            prompt=tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 5, 33, 60, 64, 65, 100]))),
            output=rng.randrange(3, 12),
        )
        for i in range(count)
    ]


NEARLY_EQUAL = 0.02
"""Difference of nearly equal logits, whose standard deviation is 0.4 and more. A key that is half-way between two
codes, except for a last bit, may become either of them. Tokens with nearly equal logits then change places."""


def check(
    zoo: Zoo, asked: list[Asked], got: dict[str, list[int]], most_changed: int = 0, cache: type[Fp8Cache] = Fp8Cache
) -> None:
    changed = 0
    for request in asked:
        mine, (tokens, logits) = got[request.name], zoo.generate(request, cache(BLOCK))
        if mine != tokens:
            at = next(i for i, pair in enumerate(zip(mine, tokens, strict=True)) if len(set(pair)) == 2)
            assert logits[at, tokens[at]] - logits[at, mine[at]] < NEARLY_EQUAL, request
            changed += 1
    assert changed <= most_changed


@ON_RANKS
def test_fp8_kv_mixed_batches_answer_as_peft_does_over_such_a_cache(zoo_of, ranks: int) -> None:
    """A rank's pages hold its own heads, each with its own scale."""
    zoo, asked = zoo_of("llama"), some_requests(18)
    with closing(zoo.engine(tensor_parallel_size=ranks, **FP8)) as engine:
        check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
        assert engine.stats().max_distinct_adapters_beside_base >= 2


def test_fp8_kv_preempted_swapped_cached_and_drafted_answers_stay_the_same(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [
        Asked(f"p{i}", adapter, (7 + i, 11, 13, *(3 + j % 90 for j in range(70))), 20)
        for i, adapter in enumerate(EVERY_MODEL)
    ]
    answers = {request.name: zoo.generate(request, Fp8Cache(BLOCK))[0] for request in asked}
    with closing(preempting(zoo.engine(**FP8))) as engine:
        engine.scheduler.memory.swap.pays = lambda _: True
        draft_always(engine.scheduler, lambda own: answers[own.id])
        assert serve(zoo, engine, asked) == answers
        cached = engine.stats().cached_tokens
        assert serve(zoo, engine, asked) == answers
        stats = engine.stats()
    assert stats.cached_tokens > cached
    assert stats.preemptions >= 6
    assert stats.kv_pages_swapped_in > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next") else pytest.mark.slow)
        for f in SERVED
        if f != "llama"
    ],
)
def test_fp8_kv_of_every_family_answers_as_peft_does_over_such_a_cache(tmp_path, family: str) -> None:
    """Windows, soft caps, sinks, a compressed KV. If transformers caches states, there is no such cache for PEFT. Then
    a request is compared with itself alone, with its prompt in other pieces."""
    zoo = Zoo(family, tmp_path)
    zoo.make_adapter("linears", {"r": 8, "lora_alpha": 16, "target_modules": LINEARS}, 100)
    zoo.rename_adapter("linears")
    asked = some_requests(5, [None, "linears"])
    # One narrow layer of attention: a page of BLOCK tokens is smaller than a rank tile.
    settings = FP8 | ({"block_size": 4 * BLOCK} if family.startswith("lfm2") else {})
    with closing(zoo.engine(**settings)) as engine:
        got = serve(zoo, engine, asked, [i // 3 for i in range(len(asked))])
    if family in HYBRIDS or family.startswith("qwen3_5"):
        with closing(zoo.engine(**settings, max_num_batched_tokens=23)) as engine:
            assert {request.name: serve(zoo, engine, [request])[request.name] for request in asked} == got
    else:
        cache = Fp8LatentCache if family in COMPRESSES_KV else Fp8Cache
        check(zoo, asked, got, most_changed=1, cache=cache)
    assert got["r0"] != got["r1"], "the adapter matters"


def test_fp8_kv_pages_are_a_quarter_of_float32s_and_half_of_bfloat16s() -> None:
    layers = (LayerShape(8, 128, 128),) * 32
    pages = {itemsize: KvLayout(layers, 16, itemsize).page_bytes for itemsize in (2, 4)}
    in_fp8 = {itemsize: KvLayout(layers, 16, itemsize, is_fp8=True).page_bytes for itemsize in (2, 4)}
    assert in_fp8[2] == in_fp8[4] == pages[2] // 2 + 32 * 8 * 2 * 4
    assert pages[4] == 2 * pages[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_kv_views_of_a_pool_do_not_overlap(dtype: torch.dtype) -> None:
    """Heads of odd widths, values in their keys, layers without keys, a pool of a few bytes more than its pages."""
    in_keys = LayerShape(2, 6, 4, has_values_in_keys=True)
    shapes = (LayerShape(3, 5, 7), in_keys, LayerShape(0, 0, 0), LayerShape(1, 9, 2))
    layout = KvLayout(shapes, 3, dtype.itemsize, is_fp8=True)
    assert layout.page_bytes % 16 == 0
    pool = torch.zeros(4 * layout.page_elements, dtype=dtype)
    views = layout.views(pool)
    for layer in views:
        layer.key.add_(1)
        layer.key_scale.view(torch.int32).add_(0x01010101)
        if layer.has_values_in_keys:
            assert (layer.value == 1).all()
            continue
        layer.value.add_(1)
        layer.value_scale.view(torch.int32).add_(0x01010101)
    cells = pool.view(torch.uint8).view(4, -1)
    assert cells.max() == 1
    assert (cells == 1).sum() == 4 * (3 * 3 * 12 + 2 * 3 * 6 + 1 * 3 * 11 + 2 * 4 * (3 + 1) + 4 * 2)
    assert (views[3].value == 1).all()


def test_fp8_kv_pages_too_small_for_an_adapters_tile_name_the_block_size_that_is_not(zoo_of) -> None:
    zoo = zoo_of("llama")
    with pytest.raises(UnsupportedModel, match=r"block_size = 16 makes pages too small .* use 32\+"):
        load(zoo.base, kv_cache_dtype="fp8", block_size=16)
    with pytest.raises(UnsupportedModel, match=r"use 32\+"):
        load(zoo.base, kv_cache_dtype="fp8", block_size=31)
    loaded, _ = load(zoo.base, kv_cache_dtype="fp8", block_size=32)
    assert loaded.facts.pages_total > 0


def test_fp8_kv_of_another_request_changes_no_answer(zoo_of) -> None:
    """A prompt whose keys are far larger than any other's changes no page but its own."""
    zoo, asked = zoo_of("llama"), some_requests(8, [None, "plain"])
    with closing(zoo.engine(**FP8)) as engine:
        alone = serve(zoo, engine, asked[:4])
    with closing(zoo.engine(**FP8)) as engine:
        engine.submit(to_request(zoo, Asked("loud", "rslora", tuple(range(3, 90)), 30)))
        assert {name: tokens for name, tokens in serve_beside(zoo, engine, asked).items() if name in alone} == alone


def serve_beside(zoo: Zoo, engine: object, asked: list[Asked]) -> dict[str, list[int]]:
    """Run `serve` with one more request, whose answer is not compared."""
    for request in asked:
        engine.submit(to_request(zoo, request))
    tokens: dict[str, list[int]] = {request.name: [] for request in asked}
    ended: set[str] = set()
    while len(ended) < len(asked):
        report = engine.step()
        for event in report.events if report else []:
            if event.request_id in tokens:
                tokens[event.request_id] += [] if event.token_id is None else [event.token_id]
                ended |= {event.request_id} if event.finish_reason else set()
    return tokens
