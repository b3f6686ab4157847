"""The base's own head for multi-token prediction: its drafts are those of a plain reference, and no answer changes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapter_zoo import Asked, Zoo, load, make_engine, serve, to_request
from drafting_heads import Drafted, check_drafts, head_weights, mtp_engine
from llguidance import LLMatcher
from multi_token_reference import ReferenceHead, base_of, train
from preempting import preempting
from safetensors.torch import load_file, save_file
from tiny_base import byte_tokenizer

from loramux.engine.engine import Engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import read_config
from loramux.engine.execution.memory_plan import plan_memory
from loramux.engine.messages import Constraint, Request, SamplingParams, TokenEvent
from loramux_adapters.base import describe_base
from loramux_adapters.sharding import Sharding

FAMILIES = ["qwen3_5", "qwen3_next", "qwen3_5_moe"]
ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "narrow": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
}
PROMPTS = [tuple(random.Random(seed).randrange(3, 97) for _ in range(12)) for seed in range(6)]
TRAINED = [Asked(f"t{i}", None, prompt, 48) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=[*FAMILIES, "qwen3_5 without states"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A base with a head of random weights."""
    family, _, without = request.param.partition(" without ")
    changes = {"layer_types": ["full_attention"] * 5} if without else {}
    made = Zoo(family, tmp_path_factory.mktemp(family), **changes)
    for seed, (name, recipe) in enumerate(ADAPTERS.items()):
        made.make_adapter(name, recipe, seed)
    ReferenceHead.random(base_of(made.base), seed=1).save(made.base, one_by_one=family == "qwen3_next")
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A base whose head was trained on the base's own answers to PROMPTS."""
    made = Zoo("qwen3_5", tmp_path_factory.mktemp("trained"))
    for seed, (name, recipe) in enumerate(ADAPTERS.items()):
        made.make_adapter(name, recipe, seed)
    model = base_of(made.base)
    head = ReferenceHead.random(model, seed=2)
    assert train(head, model, [[*one.prompt, *made.answer(one)] for one in TRAINED], steps=400) < 0.2
    head.save(made.base)
    return made


def some_requests(seed: int = 0, count: int = 10) -> list[Asked]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(3, 97) for _ in range(40))
    lengths = (1, 5, 17, 70, 33, 2, 16)
    names = (None, *ADAPTERS)
    found = []
    for i in range(count):
        own = tuple(rng.randrange(3, 97) for _ in range(lengths[i % 7]))
        found.append(Asked(f"r{i}", names[i % 3], shared + own if i % 2 else own, 9))
    return found


@pytest.mark.parametrize("block_size", [16, 37])
def test_head_in_chunks_after_cached_prefixes_and_preempted_drafts_as_the_reference_does(
    zoo: Zoo, block_size: int
) -> None:
    engine = preempting(mtp_engine(zoo, max_num_batched_tokens=29, block_size=block_size), every=7)
    engine._runner.bank.pool.fill_(float("nan"))  # a page's earlier contents change nothing
    drafted, asked = Drafted(engine), some_requests()
    for _ in range(2):
        got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
        assert got == {one.name: zoo.answer(one) for one in asked}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.pages_kv == 0
    assert {sequence.digest for sequence, *_ in drafted.seen} == {None, *(f"sha256:{name}" for name in ADAPTERS)}
    check_drafts(zoo, drafted)


def test_head_after_a_swap_drafts_as_the_reference_does(trained: Zoo) -> None:
    engine = preempting(mtp_engine(trained, swap_bytes=1 << 22))
    engine.scheduler.memory.swap.pays = lambda _: True
    drafted, asked = Drafted(engine), some_requests(count=5)
    assert serve(trained, engine, asked) == {one.name: trained.answer(one) for one in asked}
    assert engine.stats().preemptions > 0
    check_drafts(trained, drafted)


def test_trained_head_saves_steps_and_most_of_its_drafts_are_accepted(trained: Zoo) -> None:
    answers = {one.name: trained.answer(one) for one in TRAINED}
    plain = trained.engine()
    assert serve(trained, plain, TRAINED) == answers
    engine = mtp_engine(trained)
    engine.scheduler.speculation.count_paying = lambda rate, rows, expected, most: min(most, 2)
    assert serve(trained, engine, TRAINED) == answers
    stats = engine.stats()
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 0
    assert stats.steps < 0.8 * plain.stats().steps
    assert stats.output_tokens == stats.ended.output == sum(one.output for one in TRAINED)


def events_of(engine: Engine, zoo: Zoo, asked: list[Asked], **steer: Any) -> dict[str, list[TokenEvent]]:
    told: dict[str, list[TokenEvent]] = {one.name: [] for one in asked}
    for one in asked:
        engine.submit(to_request(zoo, one, **steer))
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            told[event.request_id].append(event)
    return told


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {9: 1.5}, "logprobs": 2}


@pytest.mark.parametrize(
    "steer",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 0.7, "seed": 3}, id="seeded"),
        pytest.param(PENALTIES | {"temperature": 1.0, "seed": 5, "top_p": 0.9}, id="penalties"),
        pytest.param({"stop_token_ids": tuple(range(3, 60, 7))}, id="stop tokens"),
    ],
)
@pytest.mark.parametrize("max_num_batched_tokens", [29, 64])
def test_answers_and_their_ends_with_a_head_are_those_without(
    trained: Zoo, steer: dict[str, Any], max_num_batched_tokens: int
) -> None:
    asked = [*TRAINED[:4], *some_requests(seed=3, count=5)]
    alone = events_of(trained.engine(), trained, asked, **steer)
    engine = mtp_engine(trained, seed=4, max_num_batched_tokens=max_num_batched_tokens)
    drafted = events_of(engine, trained, asked, **steer)
    for one in asked:
        told, expected = drafted[one.name], alone[one.name]
        assert [event.token_id for event in told] == [event.token_id for event in expected]
        assert [event.finish_reason for event in told] == [event.finish_reason for event in expected]
        assert [event.logprob for event in told] == pytest.approx([event.logprob for event in expected], abs=1e-3)
        assert told[-1].count.tokens.output == expected[-1].count.tokens.output
    assert engine.stats().accepted_tokens > 0
    assert engine.stats().pages_kv == 0


PATTERNS = ["[0-9]{12}", "(ab|cd){8}", None, '[{]"a": [0-9]{1,9}, "b": (true|false)[}]']


def test_constrained_answers_with_a_head_are_those_without(tmp_path: Path) -> None:
    """The masks of drafted rows are those of their places, and a draft that a grammar forbids is refused."""
    zoo = Zoo("qwen3_5", tmp_path, vocab_size=260, eos_token_id=256)
    byte_tokenizer().save_pretrained(zoo.base)
    asked = []
    for i, pattern in enumerate(PATTERNS):
        grammar = None if pattern is None else LLMatcher.grammar_from_regex(pattern)
        made = Request(
            id=f"r{i}",
            tenant="t",
            prompt_token_ids=list(b"answer %d: " % i),
            sampling=SamplingParams(max_tokens=30, temperature=0.8, seed=i),
            constraint=None if grammar is None else Constraint(grammar=grammar, field="f"),
        )
        asked.append(made)

    def run(engine: Engine) -> dict[str, list[int | None]]:
        told: dict[str, list[int | None]] = {one.id: [] for one in asked}
        for one in asked:
            engine.submit(one)
        while not engine.is_idle:
            report = engine.step()
            for event in report.events if report else []:
                told[event.request_id].append(event.token_id)
        return told

    alone = run(zoo.engine())
    model = base_of(zoo.base)
    head = ReferenceHead.random(model)
    texts = [[*one.prompt_token_ids, *(token or 0 for token in alone[one.id])] for one in asked]
    train(head, model, texts, steps=120)
    head.save(zoo.base)
    engine = preempting(mtp_engine(zoo), every=6)
    assert run(engine) == alone
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions > 0


def without_head(base: Path) -> None:
    path = base / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not k.startswith("mtp.")}, path, {"format": "pt"})


def with_scales(base: Path) -> None:
    path = base / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight_scale": torch.ones(1)}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_head, r"has no weights of a head for multi-token prediction \(mtp\.\*\)"),
        (with_scales, r"other weights than this family's \(fc\.weight_scale\): quantized heads"),
    ],
)
def test_checkpoint_without_a_servable_head_is_refused_with_the_way_out(
    trained: Zoo, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(trained.base, tmp_path / "base")
    change(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match=message) as refused:
        make_engine(tmp_path / "base", speculation="mtp")
    assert str(refused.value).startswith('engine.speculation = "mtp", and ')
    assert str(refused.value).endswith('set engine.speculation to "ngram" or "off".')
    make_engine(tmp_path / "base", speculation="ngram").close()


def test_families_and_ranks_without_a_head_are_refused_with_the_way_out(trained: Zoo, zoo_of) -> None:
    with pytest.raises(UnsupportedModel, match=r"serves no head for multi-token prediction of llama, or set engine"):
        zoo_of("llama").engine(speculation="mtp")
    with pytest.raises(UnsupportedModel, match=r"engine.tensor_parallel_size = 1 serves it"):
        trained.engine(speculation="mtp", tensor_parallel_size=2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_pages_weights_and_the_plan_before_loading_count_the_head(trained: Zoo, kv_cache_dtype: str) -> None:
    heads = {}
    for speculation in ("off", "mtp"):
        loaded, settings = load(trained.base, speculation=speculation, kv_cache_dtype=kv_cache_dtype, block_size=64)
        config = read_config(trained.base)
        plan = plan_memory(trained.base, describe_base(trained.base), Sharding(config, 1), 4, 4 << 20, settings.engine)
        assert plan.page_bytes == loaded.runner.bank.page_bytes
        heads[speculation] = plan, loaded.weight_bytes, loaded.weights.packed_bytes
    (without, weights, packed), (plan, with_weights, with_packed) = heads["off"], heads["mtp"]
    width = 1 if kv_cache_dtype == "fp8" else 4
    assert plan.page_bytes - without.page_bytes == pytest.approx(64 * 2 * 2 * 24 * width + 64 * 4, abs=32)
    own = sum(weight.numel() for weight in head_weights(trained.base).values())
    assert plan.weight_bytes - without.weight_bytes == 4 * own
    assert 0 < with_weights - weights <= 4.2 * own
    assert with_packed - packed == with_weights - weights, "the pool of a GPU leaves room for the head"


def test_head_in_fp8_pages_drafts_and_changes_no_answer(trained: Zoo) -> None:
    answers = serve(trained, trained.engine(kv_cache_dtype="fp8", block_size=64), TRAINED)
    engine = mtp_engine(trained, kv_cache_dtype="fp8", block_size=64)
    got = serve(trained, engine, TRAINED)
    same = sum(got[name] == answers[name] for name in answers)
    assert same >= len(answers) - 1  # a page's scale is that of its first token, whose rounding a step's rows change
    assert engine.stats().accepted_tokens > 0


def test_head_drafts_under_the_measured_rule_and_only_when_it_pays(trained: Zoo) -> None:
    """Real decisions: on a device on which a row costs nothing, and on one on which it costs as much as a step."""
    drafted = []
    for row_seconds in (0.0, 1.0):
        engine = trained.engine(speculation="mtp", max_draft_tokens=4)
        times = SimpleNamespace(is_known=True, observe=lambda *_: None, is_measured=lambda rows: True)
        times.seconds = lambda rows, each=row_seconds: 1.0 + each * rows
        engine.scheduler.speculation.times = cast(Any, times)
        assert serve(trained, engine, TRAINED[:2]) == {one.name: trained.answer(one) for one in TRAINED[:2]}
        drafted.append(engine.stats().drafted_tokens)
    assert drafted[0] > 0 == drafted[1]
