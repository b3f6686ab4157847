"""Tensor parallelism: an engine of several ranks gives the tokens of one rank and of PEFT, whatever else runs."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_zoo import (
    FAMILIES,
    LINEARS,
    RECIPES,
    SERVED,
    SMALL,
    UNDIVIDED,
    Asked,
    Zoo,
    serve,
    to_request,
)
from eager_drafts import draft_always
from preempting import preempting

from loramux.engine.engine import Engine
from loramux.engine.execution import loader, rank_team, rank_worker
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.memory_plan import Card
from loramux.engine.execution.rank_team import RankDied, RankedBank
from loramux.engine.execution.rank_worker import HandledMessages, InstallAdapter, receive, send
from loramux_adapters.sharding import WHOLE, CannotShard, rules_of
from loramux_adapters.weights import AdapterWeights

EVERY_MODEL = [None, *RECIPES]
OFTEN = ("phi3", "olmo2", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Families that differ in what is cut: joined projections, norms over all heads, experts, latents, states."""
DIVIDED = [family for family in SERVED if family not in UNDIVIDED]


def ranked(zoo: Zoo, size: int = 2, **settings: object) -> Engine:
    """An engine whose ranks are threads of this process."""
    return zoo.engine(tensor_parallel_size=size, **settings)


def some_requests(count: int, names: list[str | None] = EVERY_MODEL) -> list[Asked]:
    rng = random.Random(1)
    return [
        Asked(
            name=f"r{i}",
            adapter=names[i % len(names)],
            prompt=tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 2, 5, 16, 17, 33]))),
            output=rng.randrange(3, 12),
        )
        for i in range(count)
    ]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_mixed_batches_answer_as_peft_does(zoo_of, size: int) -> None:
    """Four ranks share two key-value heads."""
    zoo = zoo_of("llama")
    asked = some_requests(18)
    with closing(ranked(zoo, size, max_num_batched_tokens=13)) as engine:
        check(zoo, asked, serve(zoo, engine, asked, arrivals=[i // 2 for i in range(len(asked))]))
        assert engine.stats().max_distinct_adapters_beside_base >= 2


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.slow) for f in DIVIDED if f != "llama"]
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_every_family_answer_as_one_does(tmp_path, family: str, size: int) -> None:
    """One rank's answers are PEFT's: test_parity.py, test_mixtures.py and others."""
    is_hybrid = family.startswith(("qwen3_5", "qwen3_next"))
    fields = {"linear_num_key_heads": 4, "linear_num_value_heads": 8} if is_hybrid else {}
    zoo = Zoo(family, tmp_path, **fields)
    zoo.make_adapter("linears", {"r": 8, "lora_alpha": 16, "target_modules": LINEARS}, 100)
    zoo.rename_adapter("linears")
    asked = some_requests(5, [None, "linears"])
    arrivals = [i // 3 for i in range(len(asked))]
    alone = serve(zoo, zoo.engine(max_num_batched_tokens=13, block_size=64), asked, arrivals)
    with closing(ranked(zoo, size, max_num_batched_tokens=13, block_size=64)) as engine:
        assert serve(zoo, engine, asked, arrivals) == alone
    assert alone["r0"] != alone["r1"], "the adapter matters"


def test_ranks_preempted_swapped_cached_and_drafted_answer_as_peft_does(zoo_of) -> None:
    """The tests of each of these, of log probabilities and of pooling run on two ranks too, among the slow ones."""
    zoo = zoo_of("llama")
    asked = [Asked(f"p{i}", adapter, (7 + i, 11, 13, *range(20, 40)), 20) for i, adapter in enumerate(EVERY_MODEL)]
    answers = {request.name: zoo.answer(request) for request in asked}
    with closing(preempting(ranked(zoo))) as engine:
        engine.scheduler.memory.swap.pays = lambda _: True
        draft_always(engine.scheduler, lambda own: answers[own.id])
        check(zoo, asked, serve(zoo, engine, asked))
        cached = engine.stats().cached_tokens
        check(zoo, asked, serve(zoo, engine, asked))
        stats = engine.stats()
    assert stats.cached_tokens > cached
    assert stats.preemptions >= 6
    assert stats.kv_pages_swapped_in > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_ranks_with_a_tiny_pool_evict_adapters_and_answer_as_peft_does(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = some_requests(12)
    with closing(ranked(zoo, pool_bytes=40 * 16 * 3 * 2 * 1 * 16 * 4)) as engine:
        check(zoo, asked, serve(zoo, engine, asked))
        assert engine.stats().adapter_evictions > 0


def test_ranks_that_cannot_divide_the_heads_are_refused_by_name(zoo_of) -> None:
    with pytest.raises(CannotShard, match=r"q_proj has 4 parts, which 3 ranks cannot divide evenly"):
        ranked(zoo_of("llama"), 3)


def test_ranks_of_a_config_whose_fields_do_not_fit_each_other_are_refused_by_name(tmp_path: Path) -> None:
    """OLMoE's class derives a head's width from the hidden size, whatever head_dim says."""
    odd = Zoo("olmoe", tmp_path, head_dim=128)
    with pytest.raises(UnsupportedModel, match="cannot run on a packed batch"):
        odd.engine()
    with pytest.raises(CannotShard, match=r"has a dimension of (32|64), .* Correct config\.json"):
        ranked(odd, 2)


def test_ranks_of_layers_that_read_all_outputs_of_a_linear_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotShard, match="gemma3n_text read all outputs of a linear at once"):
        ranked(Zoo("gemma3n", tmp_path))


def test_ranks_of_int8_weights_are_refused(zoo_of) -> None:
    with pytest.raises(UnsupportedModel, match="quantization = 'int8' is served by one rank"):
        ranked(zoo_of("llama"), quantization="int8")


@pytest.mark.parametrize(
    ("size", "settings", "said"),
    [
        (2, {"device": "cuda:3"}, r"tensor_parallel_size = 2, .* this machine has 4\. Set it to 1 or less"),
        (3, {"device": "auto"}, r"q_proj has 4 parts, which 3 ranks cannot divide evenly"),
        (2, {"device": "cuda", "in_process": True}, r"in_process = true, and the ranks .* are processes"),
    ],
)
def test_ranks_on_gpus_are_refused_from_the_config(zoo_of, monkeypatch, size: int, settings: dict, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(loader, "RankTeam", lambda _: pytest.fail("ranks are started"))
    with pytest.raises((UnsupportedModel, CannotShard), match=said):
        ranked(zoo_of("llama"), size, **{"in_process": False} | settings)


def test_ranks_on_gpus_are_planned_on_the_card_of_the_first(zoo_of, monkeypatch) -> None:
    """Before any rank starts. The step's widest tensors are those of a rank, and so are the weights."""
    asked = []

    def of(device: torch.device, _: object) -> Card:
        asked.append(str(device))
        return Card(str(device), 100_000, 100_000, 0.9, 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(Card, "of", of)
    monkeypatch.setattr(loader, "RankTeam", lambda _: pytest.fail("ranks are started"))
    with pytest.raises(UnsupportedModel, match=r"on each of 2 ranks, do not fit cuda:1"):
        ranked(zoo_of("llama"), device="cuda:1", in_process=False, pool_bytes=None)
    assert set(asked) == {"cuda:1"}


def test_install_on_another_rank_waits_for_the_steps_before_it() -> None:
    """Rank 0 of a GPU does not wait for steps, so another rank may get an install before it has launched them."""
    installed: list[int] = []
    handled, (ours, theirs) = HandledMessages(), multiprocessing.Pipe()
    bank = SimpleNamespace(
        pool=torch.zeros(1), prepare=lambda weights: weights, install=lambda *_, slot: installed.append(slot)
    )
    share = SimpleNamespace(forward=SimpleNamespace(bank=bank))
    thread = threading.Thread(target=rank_worker._answer, args=(share, handled, theirs))
    thread.start()
    send(ours, InstallAdapter(3, "weights", [1], after=2))
    handled.count_one()
    assert not ours.poll(0.2)
    assert installed == []
    handled.count_one()
    assert receive(ours) is None
    assert installed == [3]
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


class RankOf:
    """Another rank that notes what it is asked and told."""

    rank = 1

    def __init__(self) -> None:
        self.num_told = 0
        self.asked: list[object] = []

    def tell(self, _message: object) -> None:
        self.num_told += 1

    def ask(self, question: object) -> None:
        self.asked.append(question)


@pytest.mark.parametrize(("is_dropped_late", "after"), [(False, 1), (True, 4)])
def test_install_comes_after_its_fence_and_after_the_slots_last_adapter(
    monkeypatch, is_dropped_late: bool, after: int
) -> None:
    """A step of the slot's last adapter may be launched after the fence of the load that takes the slot."""
    monkeypatch.setattr(rank_team, "shard_weights", lambda weights, *_: weights)
    bank = SimpleNamespace(fence=lambda: None, prepare=lambda _: None, install=lambda *_: 7, drop=lambda slot: None)
    other = RankOf()
    ranked_bank = RankedBank(bank, None, SimpleNamespace(others=[other]))
    if not is_dropped_late:
        ranked_bank.drop(7)
    else:
        other.tell("a step")
    fence = ranked_bank.fence()
    other.tell("a step")
    other.tell("a step")
    if is_dropped_late:
        ranked_bank.drop(7)
    other.tell("a step")
    weights = object.__new__(AdapterWeights)
    assert ranked_bank.install(SimpleNamespace(source=weights), [1], fence) == 7
    assert [question.after for question in other.asked] == [after]


def step_for(engine: Engine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step()


def test_rank_that_is_killed_ends_the_engine(zoo_of, monkeypatch) -> None:
    """On a GPU also if the thread of the steps never comes back from the device: here it does not close the engine."""
    exits = threading.Event()

    def end_thread(_code: int) -> None:
        exits.set()
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end_thread)
    monkeypatch.setattr(rank_team, "END_TIMEOUT_S", 0.5)
    zoo = zoo_of("llama")
    engine = zoo.engine(tensor_parallel_size=2, in_process=False)
    engine._team._is_on_gpu = True
    others = [other.process for other in engine._team.others]
    with closing(engine):
        asked = Asked("first", "plain", tuple(range(5, 30)), 6)
        check(zoo, [asked], serve(zoo, engine, [asked]))
        engine.submit(to_request(zoo, Asked("long", "plain", tuple(range(5, 30)), 200)))
        for _ in range(5):
            engine.step()
        os.kill(others[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankDied, match="rank 1 of the engine was ended by signal 9"):
            step_for(engine, 60)
        assert time.monotonic() - began < 30
        assert exits.wait(30)
    assert not any(process.is_alive() for process in others)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_send_the_bytes_of_the_formula_and_none_for_adapters(zoo_of, size: int) -> None:
    """Docs: decision 32. Rank 0 sends no logits; a piece of four ranks is rounded up to a whole element."""
    zoo = zoo_of("llama")
    layers, hidden, itemsize, prompt = 3, 64, 4, 20
    sent = {}
    for adapter in (None, "plain"):
        with closing(ranked(zoo, size, max_num_batched_tokens=64)) as engine:
            linear = next(m for m in engine._runner._forward.model.modules() if getattr(m, "_ranks", None))
            ranks = linear._ranks
            asked = Asked("alone", adapter, tuple(range(5, 5 + prompt)), 5)
            check(zoo, [asked], serve(zoo, engine, [asked]))
            rows, steps = prompt + 4, 5  # the last token is not computed
            assert ranks.num_reductions == steps * (1 + 2 * layers)
            sent[adapter] = ranks.bytes_sent
    each = 2 * (size - 1) * rows * hidden * itemsize // size
    assert sent[None] == sent["plain"] == each * (1 + 2 * layers)


def test_every_family_cuts_what_transformers_own_plan_cuts() -> None:
    """The linears that `tp_plan` names, if it names any; OLMo's queries and keys are gathered there."""
    compared = 0
    for family, (make, fields) in FAMILIES.items():
        if family not in DIVIDED:
            continue
        text = make(**SMALL | fields).get_text_config()
        rules = rules_of(text)
        for name, style in (getattr(text, "base_model_tp_plan", None) or {}).items():
            parent, _, attribute = name.rpartition(".")
            rule = rules.get(f"experts.{attribute}" if parent.endswith(".experts") else attribute, WHOLE)
            if style in ("colwise", "packed_colwise"):
                assert rule.outputs is not None, (family, name, style)
            elif style == "rowwise":
                assert rule.inputs is not None, (family, name, style)
            else:
                continue
            compared += 1
    assert compared > 200


@pytest.mark.slow
def test_rank_that_hangs_ends_the_engine_within_the_step_timeout_and_is_killed(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine = zoo.engine(tensor_parallel_size=2, in_process=False, step_timeout_s=60)
    process = engine._team.others[0].process
    with closing(engine):
        engine.submit(to_request(zoo, Asked("long", None, tuple(range(5, 30)), 200)))
        engine.step()
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankDied, match=r"did not answer within engine\.step_timeout_s = 60 s"):
            step_for(engine, 300)
        assert 50 < time.monotonic() - began < 100
    assert not process.is_alive()
