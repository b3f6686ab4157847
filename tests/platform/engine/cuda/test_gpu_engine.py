"""The whole engine as it runs on a GPU, token for token against PEFT: recordings, buffers, tables, steps ahead."""

from __future__ import annotations

import gc
import re

import msgspec
import numpy as np
import pytest
import torch
from activated_latents import INVOKE, TEXT, ActivatedZoo
from adapter_zoo import RECIPES, Asked, Zoo, load, serve, to_request
from eager_drafts import draft_always
from formats import FormatZoo
from fp8_cache import Fp8Cache
from interpreted import alike_rows
from llguidance import LLMatcher
from recorded_steps import recorded
from tiny_base import make_base
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loramux.engine.engine import AsyncPipeline, build_engine
from loramux.engine.execution.cuda_graphs import (
    DecodeGraphs,
    DecoderGraphs,
    Recording,
    count_recordings,
    host_syncs_of,
    record_calls,
)
from loramux.engine.execution.gpu_runner import GpuRunner, warm_up
from loramux.engine.messages import Constraint, Request, SamplingParams, StepLimits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_engine(zoo: Zoo, **settings: object):
    return zoo.engine(**{"device": DEVICE, "max_num_seqs": 3, "max_model_len": 64, "block_size": 16} | settings)


def check(zoo: Zoo, engine, asked: list[Asked], arrivals: list[int] | None = None) -> None:
    got = serve(zoo, engine, asked, arrivals)
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gpu_engine_mixed_batches_answer_as_peft_does(zoo_of, family: str) -> None:
    """Chunked prefill in decode steps, every kind of adapter and the base; a window and a soft cap in gemma2."""
    zoo = zoo_of(family)
    prompts = [(5, 6, 7), (11,), tuple(range(3, 25)), (9, 8)]
    adapters = ["plain", None, "rslora", "patterns"]
    asked = [Asked(f"r{i}", a, p, 3 + i) for i, (a, p) in enumerate(zip(adapters, prompts, strict=True))]
    engine = small_engine(zoo)
    assert isinstance(engine._runner, GpuRunner)
    assert isinstance(engine._pipeline, AsyncPipeline)
    engine._runner.bank.pool.fill_(float("nan"))  # what a page's last owner may have left there
    check(zoo, engine, asked, arrivals=[0, 0, 1, 2])
    assert engine.stats().max_distinct_adapters_beside_base >= 2
    assert engine.is_idle
    assert engine.stats().pages_kv == 0


KINDS_OF_PROMPTS = (("plain", 40), ("rslora", 45), ("plain", 6))


class Watched(dict):
    """Recordings, and the keys of those that were replayed."""

    def __init__(self, recorded: dict) -> None:
        super().__init__(recorded)
        self.replayed: list[tuple[int, object]] = []

    def __getitem__(self, key):
        self.replayed.append(key)
        return super().__getitem__(key)


def watch(graphs: DecodeGraphs | DecoderGraphs) -> list[tuple[int, object]]:
    """Return the (rows, kind) of the recordings that are replayed from now on."""
    graphs._graphs = Watched(graphs._graphs)
    return graphs._graphs.replayed


@pytest.mark.slow
def test_gpu_engine_keys_and_values_in_fp8_answer_as_peft_does_over_such_a_cache(zoo_of) -> None:
    """Prompts that begin a page in one step, end one in another, and answers that begin the next."""
    zoo = zoo_of("llama")
    prompts = [tuple(range(3, 3 + count)) for count in (46, 5, 57, 48)]
    asked = [
        Asked(f"r{i}", name, p, 5)
        for i, (name, p) in enumerate(zip(["plain", None, "rslora", None], prompts, strict=True))
    ]
    engine = small_engine(zoo, kv_cache_dtype="fp8", block_size=48, max_model_len=96)
    engine._runner.bank.pool.fill_(float("nan"))
    got = serve(zoo, engine, asked, arrivals=[0, 0, 1, 2])
    assert got == {request.name: zoo.generate(request, Fp8Cache(48))[0] for request in asked}


def test_gpu_engine_activated_loras_on_the_expansion_of_a_compressed_kv_answer_as_peft_does(tmp_path) -> None:
    zoo = ActivatedZoo("deepseek_v2", tmp_path)
    engine = small_engine(zoo)
    runner = engine._runner
    with torch.inference_mode():  # as on a card, where kernels are compiled
        warm_up(runner._forward, runner._buffers, runner._sampler, runner._decoder_graphs._attention.shapes)
    prompts = (*TEXT[:20], *INVOKE, 3), (*TEXT[:9], *INVOKE, *TEXT[9:25], 4)
    adapters = (None, "activated", "activated_bias")
    check(zoo, engine, [Asked(f"{name} {i}", name, prompt, 3) for name in adapters for i, prompt in enumerate(prompts)])


def test_gpu_engine_adapters_of_every_format_are_replayed(tmp_path) -> None:
    """Steps with them, mixed with plain rows and the base's, and the steps after they have ended."""
    formats = ("plain", "dora", "ia3", "both", "tokens", "saved_norms")
    zoo = FormatZoo("llama", tmp_path, formats, num_hidden_layers=2)
    zoo.make_adapters()
    asked = [Asked(f"{a} {i}", a, (5 + i, 40, 7), 3) for i, a in enumerate([*zoo.formats, None])]
    asked.append(Asked("last", "plain", (9, 8), 9))
    engine = small_engine(zoo, max_num_seqs=4)
    runner = engine._runner
    of_decoder, whole, steps = watch(runner._decoder_graphs), watch(runner._decode_graphs), []
    launch = runner.launch
    runner.launch = lambda step: steps.append(step) or launch(step)
    check(zoo, engine, asked)
    assert len(of_decoder) + len(whole) == len(steps), "none was launched operator by operator"
    assert "extras" in {kind for _, kind in of_decoder}
    assert len(whole) > 1, "those after the others have ended"


def test_gpu_engine_constrains_its_rows_and_leaves_their_neighbours_alone(tmp_path) -> None:
    """Their tokens are chosen after those of the previous step, which are read while the forward runs."""
    base = make_base(tmp_path)

    def answers(*patterns: str | None, drafts: list[list[int]] | None = None) -> list[list[int]]:
        drafted = {"speculation": "ngram", "max_draft_tokens": 3} if drafts else {}
        loaded, settings = load(base, device=DEVICE, max_num_seqs=3, max_model_len=64, block_size=16, **drafted)
        engine = build_engine(loaded, settings, wake=lambda: None)
        assert isinstance(engine._runner, GpuRunner)
        if drafts is not None:
            draft_always(engine.scheduler, lambda own: drafts[int(own.id)], most=3)
        tokens: list[list[int]] = [[] for _ in patterns]
        for number, pattern in enumerate(patterns):
            grammar = LLMatcher.grammar_from_regex(pattern or "")
            sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
            request = Request(id=str(number), tenant="t", prompt_token_ids=[5, 6 + number], sampling=sampling)
            constraint = Constraint(grammar=grammar, field="f") if pattern else None
            engine.submit(msgspec.structs.replace(request, constraint=constraint))
        while not engine.is_idle:
            for event in report.events if (report := engine.step()) else []:
                tokens[int(event.request_id)].append(event.token_id)
        return tokens

    free, bound, other = answers(None, "[0-9]{5}", "x{3}y")
    assert free == answers(None)[0]
    assert re.fullmatch("[0-9]{5}", bytes(bound[:-1]).decode())
    assert (bytes(other[:-1]), other[-1]) == (b"xxxy", 256)
    found = [free, bound, other]
    assert answers(None, "[0-9]{5}", "x{3}y", drafts=found) == found, "masks of rows that follow drafts"


def test_gpu_engine_batch_invariant_answers_are_bit_equal_with_any_requests(zoo_of, monkeypatch) -> None:
    """An adapter's request alone, and between other adapters' rows, whose prompts change how its own is cut."""
    alike_rows(monkeypatch)
    zoo = zoo_of("llama")
    asked = Asked("r", "plain", tuple(range(3, 24)), 4)
    others = [Asked("a", "plain", (5, 6, 7, 8, 9), 6), Asked("b", "rslora", tuple(range(30, 62)), 3)]
    sizes = {"max_num_batched_tokens": 24, "batch_invariant": True, "prefix_cache": False}

    def logprobs(*before: Asked) -> list[tuple[int, float]]:
        engine = small_engine(zoo, **sizes)
        for other in before:
            engine.submit(to_request(zoo, other))
        engine.submit(to_request(zoo, asked, logprobs=1))
        told = []
        while not engine.is_idle:
            events = report.events if (report := engine.step()) else []
            told += [(event.token_id, event.logprob) for event in events if event.request_id == "r"]
        return told

    alone = logprobs()
    assert [token for token, _ in alone] == zoo.answer(asked)
    assert logprobs(*others) == alone


def test_gpu_engine_drafts_are_verified_in_recorded_steps_and_change_no_answer(zoo_of) -> None:
    """Greedy answers are PEFT's; a seed draws the same tokens under penalties, whichever drafts are accepted."""
    zoo = zoo_of("llama")
    asked = [Asked("r0", "plain", (5, 6, 7), 9), Asked("r1", None, (11, 12), 8)]
    drawn = Asked("s", "rslora", (9, 8), 8)
    sampling = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1}

    def told(engine) -> dict[str, list[int]]:
        engine.submit(to_request(zoo, drawn, **sampling))
        tokens: dict[str, list[int]] = {"s": []}
        for one in asked:
            engine.submit(to_request(zoo, one))
        while not engine.is_idle:
            for event in report.events if (report := engine.step()) else []:
                tokens.setdefault(event.request_id, []).append(event.token_id)
        return tokens

    alone = told(small_engine(zoo))
    assert all(alone[one.name] == zoo.answer(one) for one in asked)
    engine, steps = small_engine(zoo, speculation="ngram", max_draft_tokens=3, max_num_batched_tokens=32), []
    draft_always(engine.scheduler, lambda own: alone[own.id], most=3)
    runner = engine._runner
    of_decoder, whole, launch = watch(runner._decoder_graphs), watch(runner._decode_graphs), runner.launch
    runner.launch = lambda step: steps.append(step) or launch(step)
    assert told(engine) == alone
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens
    assert len(of_decoder) + len(whole) == len(steps), "none was launched operator by operator"
    assert len(steps) < 9 + 3, "accepted drafts save steps"


def test_gpu_engine_prompts_alone_replay_no_launch_for_short_segments(zoo_of) -> None:
    """A step of long segments only, one in which another adapter's row decodes, and one of a short prompt."""
    zoo = zoo_of("llama")
    asked = [Asked(f"r{i}", name, tuple(range(3, 3 + n)), 3) for i, (name, n) in enumerate(KINDS_OF_PROMPTS)]
    engine = small_engine(zoo, max_num_batched_tokens=128)
    kinds = watch(engine._runner._decoder_graphs)
    check(zoo, engine, asked, arrivals=[0, 1, 6])
    assert [kind for _, kind in kinds] == ["prompts", "pairs", "pairs"]
    assert sum(engine._runner.graphs) == count_recordings(3, 128)


def test_gpu_engine_records_the_largest_buckets_alone_if_asked(zoo_of) -> None:
    runner = small_engine(zoo_of("llama"))._runner
    args = (runner._forward, (), None, StepLimits(3, 48, 48), 64, 16)
    one, two = (GpuRunner.build(*args, most_buckets=count) for count in (1, 2))
    assert {rows for rows, _ in one._decode_graphs._graphs} == {3}
    assert {rows for rows, _ in two._decode_graphs._graphs} == {3, 2}
    assert {rows for rows, _ in one._decoder_graphs._graphs} == {48}
    assert (sum(one.graphs), sum(two.graphs)) == (3 + 4, 3 + 4 + 3 + 3), "prompts are longer than 32 rows"


def test_gpu_engine_many_rows_of_one_adapter_take_the_tensor_core_graph(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"r{i}", "plain", (5 + i, 6), 3) for i in range(3)]
    engine = small_engine(zoo)
    kinds = watch(engine._runner._decode_graphs)
    check(zoo, engine, asked)
    assert {rows for rows, _ in kinds} <= {1, 2, 3}
    assert any(kind is not None and kind.rows == 16 for _, kind in kinds)


def test_gpu_engine_decode_step_is_sent_in_one_copy(zoo_of, copies_of_decode_steps) -> None:
    """Its inputs, tables of pages, work lists and the parameters of sampling."""
    zoo = zoo_of("llama")
    engine = small_engine(zoo)
    copies = copies_of_decode_steps(engine)
    asked = [Asked(f"r{i}", name, (5 + i, 6), 3) for i, name in enumerate(("plain", None, "rslora"))]
    check(zoo, engine, asked)
    assert copies
    assert all(step == ["send"] for step in copies), copies


def test_gpu_engine_seeded_requests_repeat_with_any_other_rows(zoo_of) -> None:
    zoo = zoo_of("llama")
    sampling = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2}

    def tokens(*others: Asked) -> list[tuple[int, float]]:
        engine = small_engine(zoo, max_num_seqs=2)
        engine.submit(to_request(zoo, Asked("s", "plain", (5, 6, 7), 4), **sampling))
        for other in others:
            engine.submit(to_request(zoo, other))
        told = []
        while not engine.is_idle:
            report = engine.step()
            told += [event for event in report.events if event.request_id == "s"] if report else []
        assert all(len(event.top_logprobs) == 2 for event in told)
        return [(event.token_id, pytest.approx(event.logprob, abs=1e-4)) for event in told]

    alone = tokens()
    assert len(alone) == 4
    assert tokens(Asked("o", None, (9, 8), 6)) == alone


def test_recorded_steps_never_wait_for_the_device(zoo_of) -> None:
    runner = small_engine(zoo_of("gemma2"), max_num_seqs=1, max_num_batched_tokens=1)._runner
    asked = []

    def record(function, inputs):
        function()  # makes what is made on first use
        asked.append(host_syncs_of(function))
        return record_calls(function, inputs)

    recorded(runner, record)
    assert asked == [set()] * 6, "whole: without adapters, row by row and in tiles; the decoder: base, pairs, extras"


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_decode_steps_of_a_dense_model_are_recorded(zoo_of, family: str, caplog) -> None:
    """Lengths that stay on the host may be read there: that is no wait for the device."""
    small_engine(zoo_of(family), max_num_seqs=1)
    assert "without CUDA graphs" not in caplog.text


class _InputWatch(TorchDispatchMode):
    """Storages that operators read and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, tuple[str, StorageWeakRef]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._made:
                self.read.setdefault(key, (f"{func} {tuple(tensor.shape)}", StorageWeakRef(tensor.untyped_storage())))
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.read:
                self._made.add(key)
        return result


def test_recorded_graph_keeps_every_tensor_that_it_reads(zoo_of) -> None:
    """The recorder keeps addresses only, as a CUDA graph does: the recorded function and its closure are dropped."""
    runner = small_engine(zoo_of("llama"), max_num_seqs=1, max_num_batched_tokens=2)._runner
    watches, kept = [], []

    def record(function, inputs):
        function()  # makes what is made on first use
        watches.append(_InputWatch())
        with watches[-1]:
            function()
        kept.append(Recording(lambda: None, inputs))
        return kept[-1]

    graphs = recorded(runner, record)
    gc.collect()
    assert len(graphs) == 2, "the owners of results and embeddings"
    assert len(watches) == 3 + 6, "whole of one row; the decoder of one and two"
    for watch in watches:
        assert watch.read
        assert [name for name, storage in watch.read.values() if storage.expired()] == []


def test_bank_knows_every_slots_largest_rank(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine = small_engine(zoo, max_num_seqs=1)
    check(zoo, engine, [Asked(name, name, (5,), 1) for name in RECIPES])
    bank = engine._runner.bank
    for slot in range(len(RECIPES)):
        assert bank.rank_of(slot) in (0, int(bank.table.ranks[slot].max()))
    assert 33 in {bank.rank_of(slot) for slot in range(len(RECIPES))}
    assert np.isin([20, 17], [bank.rank_of(slot) for slot in range(len(RECIPES))]).all()
