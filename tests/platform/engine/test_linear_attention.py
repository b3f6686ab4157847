"""Hybrid models: states of linear attention in pages of the pool, token for token with PEFT."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import msgspec
import peft
import pytest
import torch
from adapter_zoo import CUT_HYBRIDS, HYBRIDS, NOT_FOR_PEFT, ON_RANKS, Asked, Zoo, load, make_engine, serve, to_request
from delayed_runner import late_engine
from eager_drafts import draft_always
from formats import FormatZoo
from preempting import preempting

from loramux.engine.engine import Engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.runner import PackedStep
from loramux.engine.execution.states import StateLayout, state_shape
from loramux.engine.messages import Request, SamplingParams
from loramux.engine.scheduling.policy import PageBudget
from loramux.engine.scheduling.sequence import Sequence
from loramux_adapters.sharding import CannotShard
from loramux_kernels.tables import StateLayer, StateShape

LORA = {"lora_alpha": 10, "task_type": "CAUSAL_LM"}
IN_PROJECTIONS = r".*\.(in_proj\w*|[abg]_proj)"
NORMS = ["input_layernorm", "operator_norm", "norm_f"]
RECIPES: dict[str, peft.LoraConfig] = {
    "all": peft.LoraConfig(r=5, target_modules="all-linear", **LORA),
    "linear attention": peft.LoraConfig(r=19, use_rslora=True, target_modules=IN_PROJECTIONS, **LORA),
    "outputs": peft.LoraConfig(r=4, target_modules=["out_proj", "o_proj"], rank_pattern={"o_proj": 17}, **LORA),
    "norm": peft.LoraConfig(r=3, target_modules=["out_proj", "o_proj"], modules_to_save=NORMS, **LORA),
}


@pytest.fixture(scope="module", params=HYBRIDS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo(request.param, tmp_path_factory.mktemp(request.param), [])
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        config = copy.deepcopy(recipe)  # PEFT writes what it found into it
        config.exclude_modules = NOT_FOR_PEFT.get(request.param)
        made.make_format(name, config, seed)
    return made


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    made = Zoo("qwen3_5", tmp_path_factory.mktemp("dense"))
    made.make_adapter("plain", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}, 1)
    return made


def some_requests(count: int = 10) -> list[Asked]:
    rng = random.Random(4)
    names = [None, *RECIPES]
    lengths = (1, 5, 17, 133, 33, 2, 16)
    return [
        Asked(f"r{i}", names[i % len(names)], tuple(rng.randrange(3, 97) for _ in range(lengths[i % 7])), 7)
        for i in range(count)
    ]


@ON_RANKS
def test_hybrid_mixed_batches_in_chunks_preempted_answer_as_peft_does(zoo: FormatZoo, ranks: int) -> None:
    asked = some_requests()
    assert len({tuple(zoo.answer(Asked("x", name, (5, 6, 7, 8), 8))) for name in [None, *RECIPES]}) == 1 + len(RECIPES)
    if ranks > 1 and zoo.family not in CUT_HYBRIDS:
        with pytest.raises(CannotShard, match="states whose division among ranks no test compares"):
            zoo.engine(tensor_parallel_size=ranks)
        return
    settings = {"max_num_batched_tokens": 29, "tensor_parallel_size": ranks}
    engine = preempting(zoo.engine(**settings), every=9)  # the longest prompt takes six steps
    for _ in range(2):
        got = serve(zoo, engine, asked, arrivals=[i // 4 for i in range(len(asked))])
        for request in asked:
            assert got[request.name] == zoo.answer(request), request
    stats = engine.stats()
    assert stats.max_distinct_adapters_beside_base >= 2
    assert stats.preemptions > 0
    assert stats.pages_kv == 0
    assert stats.cached_tokens > 0, "the second round begins after states of the first"
    assert stats.pages_kv_cached > stats.pages_states_cached > 0
    engine.close()


def test_hybrid_in_a_pool_that_runs_out_answers_as_peft_does(dense: Zoo) -> None:
    engine = dense.engine()
    state_pages, page = engine.facts.state_pages, engine._runner.bank.page_bytes
    assert state_pages > 1
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], (7 + i, 11, 13), 40) for i in range(6)]
    # room for three states, some KV and the adapter: by far not for six requests
    small = dense.engine(pool_bytes=(3 * (state_pages + 2) + 14) * page)
    got = serve(dense, small, asked)
    assert got == {request.name: dense.answer(request) for request in asked}
    assert small.stats().pages_kv == 0
    assert small.facts.context == min(256, (small.facts.pages_total - state_pages) * 16)


def test_hybrid_earlier_contents_of_pages_change_nothing(dense: Zoo) -> None:
    engine = dense.engine()
    engine._runner.bank.pool.fill_(float("nan"))
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], tuple(range(5, 6 + i * 9)), 9) for i in range(4)]
    assert serve(dense, engine, asked) == {request.name: dense.answer(request) for request in asked}


def test_hybrid_answer_that_another_engine_began_goes_on_with_the_same_tokens(dense: Zoo) -> None:
    asked = Asked("a", "plain", (5, 6, 7, 8), 10)
    whole = dense.answer(asked)
    request = msgspec.structs.replace(to_request(dense, asked), output_token_ids=whole[:4], group_started=True)
    engine, told = make_engine(dense.base), whole[:4]
    engine.submit(request)
    while not engine.is_idle:
        report = engine.step()
        told += [event.token_id for event in report.events if event.token_id is not None] if report else []
    assert told == whole


@ON_RANKS
def test_hybrid_with_drafts_in_mixed_batches_preempted_answers_as_peft_does(zoo: FormatZoo, ranks: int) -> None:
    """Refused drafts leave no trace in a state; accepted ones are computed again after the state before them."""
    if ranks > 1 and zoo.family not in CUT_HYBRIDS:
        return
    requests = some_requests()
    answers = {one.name: zoo.answer(one) for one in requests}
    engine = preempting(zoo.engine(max_num_batched_tokens=29, tensor_parallel_size=ranks), every=9)
    draft_always(engine.scheduler, lambda own: answers[own.id], seed=3)
    for _ in range(2):
        assert serve(zoo, engine, requests, arrivals=[i // 4 for i in range(len(requests))]) == answers
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.output_tokens == stats.ended.output == 2 * sum(one.output for one in requests)
    assert stats.preemptions > 0
    assert stats.pages_kv == 0
    engine.close()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_hybrid_swapped_while_drafts_are_computed_again_answers_as_peft_does(dense: Zoo, prefix_cache: bool) -> None:
    engine = preempting(dense.engine(prefix_cache=prefix_cache, swap_bytes=1 << 22), every=3)
    engine.scheduler.memory.swap.pays = lambda _: True
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], (7 + i, *range(11, 40)), 20) for i in range(4)]
    answers = {one.name: dense.answer(one) for one in asked}
    draft_always(engine.scheduler, lambda own: answers[own.id], seed=1)
    assert serve(dense, engine, asked) == answers
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0


ONE_AHEAD = pytest.param(lambda zoo, **settings: late_engine(zoo, **settings)[0], id="one ahead")


@pytest.mark.parametrize("make", [pytest.param(Zoo.engine, id="in turn"), ONE_AHEAD])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_hybrid_swapped_states_come_back_and_nothing_is_computed_twice(
    dense: Zoo, make: Callable[..., Engine], prefix_cache: bool
) -> None:
    engine = preempting(make(dense, prefix_cache=prefix_cache, swap_bytes=1 << 22))
    engine.scheduler.memory.swap.pays = lambda _: True
    asked = [Asked(f"r{i}", [None, "plain"][i % 2], (7 + i, *range(11, 40)), 20) for i in range(4)]
    assert serve(dense, engine, asked) == {request.name: dense.answer(request) for request in asked}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.kv_pages_swapped_out >= stats.kv_pages_swapped_in > 0
    assert stats.recomputed_tokens == stats.kv_pages_in_host == 0


@pytest.mark.parametrize("make", [pytest.param(Zoo.engine, id="in turn"), ONE_AHEAD])
def test_hybrid_turns_of_a_conversation_start_at_cached_states_and_answer_as_peft_does(
    dense: Zoo, make: Callable[..., Engine]
) -> None:
    engine, bare = make(dense, swap_bytes=0), dense.engine(prefix_cache=False)
    texts = {name: tuple(range(3, 3 + 40)) for name in (None, "plain")}
    found = 0
    for turn in range(3):
        asked = [Asked(f"{turn} {name}", name, text, 21) for name, text in texts.items()]
        got = serve(dense, engine, asked)
        assert got == serve(dense, bare, asked) == {request.name: dense.answer(request) for request in asked}
        cached = engine.stats().cached_tokens
        if turn:
            assert cached - found >= sum(len(text) // 16 * 16 for text in texts.values()) - 2 * 16 - 2 * 3
        found = cached
        texts = {one.adapter: (*one.prompt, *got[one.name], 5, 6, 7) for one in asked}
    assert bare.stats().cached_tokens == 0


def test_hybrid_cached_state_at_the_same_cut_gives_the_same_logits(dense: Zoo) -> None:
    """Exact to the bit: prompts are cut at the same borders with and without a cached state."""
    asked = [Asked("first", "plain", tuple(range(5, 45)), 9), Asked("again", "plain", tuple(range(5, 45)), 9)]
    engine = dense.engine(max_num_batched_tokens=64)
    forward, seen = engine._runner._run, []

    def keep_logits(packed: PackedStep) -> torch.Tensor:
        logits = forward(packed)
        seen.append(logits.clone())
        return logits

    engine._runner._run = keep_logits
    for request in asked:
        assert serve(dense, engine, [request]) == {request.name: dense.answer(request)}
    assert engine.stats().cached_tokens == 32
    sampled = [logits for logits in seen if len(logits)]
    assert len(sampled) == 2 * 9
    assert all(torch.equal(one, other) for one, other in zip(sampled[:9], sampled[9:], strict=True))


def test_pages_that_cannot_hold_a_heads_state_are_refused(dense: Zoo) -> None:
    model = load(dense.base)[0].runner._forward.model
    nets = [layer.linear_attn.net for layer in model.get_decoder().layers if hasattr(layer, "linear_attn")]
    for layer, net in zip((0, 2, 4), nets, strict=True):
        model.get_decoder().layers[layer].linear_attn = net
    assert StateLayout.of(model, 8 * 20 * 4).num_pages == 3 * state_shape(nets[0]).units
    with pytest.raises(UnsupportedModel, match=r"raise engine\.block_size"):
        StateLayout.of(model, 8 * 20 * 4 - 4)


def test_states_of_two_layers_and_sequences_do_not_overlap() -> None:
    shape = StateShape(heads=3, key_dim=4, value_dim=5, channels=7, taps=3)
    layout = StateLayout({1: shape, 2: shape}, page_bytes=3 * 80 + 4)
    assert (shape.units, layout.units_per_page, layout.num_pages) == (5, 3, 4)
    views = layout.views(torch.full((8 * 61,), float("nan")))
    tables = torch.tensor([[5, 0, 7, 2], [1, 6, 3, 4]], dtype=torch.int32)
    kept: list[tuple[StateLayer, torch.Tensor, torch.Tensor]] = []
    for view in views.values():
        kept.append((view, torch.randn(2, 3, 4, 5), torch.randn(2, 7, 3)))
        view.write(tables, *kept[-1][1:])
    for view, matrices, inputs in kept:
        found = view.read(tables)
        assert torch.equal(found[0], matrices)
        assert torch.equal(found[1], inputs)


def test_budget_counts_the_pages_of_every_sequences_states() -> None:
    budget = PageBudget(num_pages=20, block_size=4, state_pages=3)
    assert [budget.pages_for(n) for n in (1, 4, 5)] == [4, 4, 5]
    assert budget.tokens_in(5) == 8
    assert budget.tokens_in(2) == 0
    sequences = [Sequence(to_request_of(8), 0.0) for _ in range(3)]
    assert budget.kv_peak(sequences) == 3 * (3 + 2)
    assert not budget.fits_alone(4 * 18, 0)
    assert budget.fits_alone(4 * 17, 0)


def to_request_of(tokens: int) -> Request:
    return Request(
        id="r", tenant="t", prompt_token_ids=list(range(3, 3 + tokens - 1)), sampling=SamplingParams(max_tokens=1)
    )
