"""The whole engine as it runs on a GPU, token for token against PEFT: recordings, buffers, tables, steps ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats import FormatZoo
from zoo import RECIPES, Asked, Zoo, serve, to_request

from loramux.engine.decode_graphs import DecodeGraphs
from loramux.engine.gpu_runner import GpuRunner
from loramux.engine.graphs import questions_of, record_calls
from loramux.engine.turns import OneAhead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_engine(zoo: Zoo, **settings: object):
    return zoo.engine(**{"device": DEVICE, "max_num_seqs": 3, "max_model_len": 64, "block_size": 16} | settings)


def check(zoo: Zoo, engine, asked: list[Asked], arrivals: list[int] | None = None) -> None:
    got = serve(zoo, engine, asked, arrivals)
    for request in asked:
        assert got[request.name] == zoo.answer(request), request


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_everything_mixed(zoo_of, family: str) -> None:
    """Chunked prefill beside decode, every kind of adapter and the base; a window and a soft cap in gemma2."""
    zoo = zoo_of(family)
    prompts = [(5, 6, 7), (11,), tuple(range(3, 25)), (9, 8)]
    adapters = ["plain", None, "rslora", "patterns"]
    asked = [Asked(f"r{i}", a, p, 3 + i) for i, (a, p) in enumerate(zip(adapters, prompts, strict=True))]
    engine = small_engine(zoo)
    assert isinstance(engine._runner, GpuRunner)
    assert isinstance(engine._turns, OneAhead)
    check(zoo, engine, asked, arrivals=[0, 0, 1, 2])
    assert engine.stats().max_distinct_adapters_beside_base >= 2
    assert engine.idle
    assert engine.stats().pages_kv == 0


def test_what_is_more_than_pairs_leaves_the_recordings(tmp_path) -> None:
    """Steps with it, mixed with plain rows and the base's, and the steps after they have ended."""
    zoo = FormatZoo("llama", tmp_path, ("plain", "dora", "ia3", "both", "tokens"))
    zoo.make_adapters()
    asked = [Asked(f"{a} {i}", a, (5 + i, 40, 7), 3) for i, a in enumerate([*zoo.formats, None])]
    asked.append(Asked("last", "plain", (9, 8), 9))
    engine = small_engine(zoo, max_num_seqs=4)
    graphs = engine._runner._graphs
    replayed = []
    run = graphs.run
    graphs.run = lambda packed, ranks: replayed.append(packed.segments) or run(packed, ranks)
    check(zoo, engine, asked)
    assert replayed
    assert engine._runner.bank.beyond_pairs(replayed[-1], np.arange(1)) is None


def test_many_rows_of_one_adapter_take_the_tensor_core_recording(zoo_of) -> None:
    zoo = zoo_of("llama")
    asked = [Asked(f"r{i}", "plain", (5 + i, 6), 3) for i in range(3)]
    engine = small_engine(zoo)
    graphs, kinds = engine._runner._graphs, []
    recorded = graphs._recorded

    class Watched(dict):
        def __getitem__(self, key):
            kinds.append(key)
            return recorded[key]

    graphs._recorded = Watched()
    check(zoo, engine, asked)
    assert {rows for rows, _ in kinds} <= {1, 2, 3}
    assert any(kind is not None and kind.rows == 16 for _, kind in kinds)


def test_sampled_requests_repeat_with_their_seed_whatever_runs_beside(zoo_of) -> None:
    zoo = zoo_of("llama")
    sampling = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2}

    def tokens(*others: Asked) -> list[tuple[int, float]]:
        engine = small_engine(zoo, max_num_seqs=2)
        engine.submit(to_request(zoo, Asked("s", "plain", (5, 6, 7), 4), **sampling))
        for other in others:
            engine.submit(to_request(zoo, other))
        told = []
        while not engine.idle:
            report = engine.step()
            told += [event for event in report.events if event.request_id == "s"] if report else []
        assert all(len(event.top_logprobs) == 2 for event in told)
        return [(event.token_id, pytest.approx(event.logprob, abs=1e-4)) for event in told]

    alone = tokens()
    assert len(alone) == 4
    assert tokens(Asked("o", None, (9, 8), 6)) == alone


def test_a_recorded_forward_asks_the_device_nothing(zoo_of) -> None:
    zoo = zoo_of("gemma2")
    runner = small_engine(zoo, max_num_seqs=1)._runner
    asked = []

    def record(function):
        recording = record_calls(function)  # the first call makes what is made on first use
        asked.append(questions_of(recording.replay))
        return recording

    with torch.inference_mode():
        DecodeGraphs(runner._forward, runner._buffers, record, max_rank=33)
    assert asked == [set()] * 3, "without adapters, row by row and in tiles"


def test_adapters_of_every_slot_are_known_by_their_largest_rank(zoo_of) -> None:
    zoo = zoo_of("llama")
    engine = small_engine(zoo, max_num_seqs=1)
    check(zoo, engine, [Asked(name, name, (5,), 1) for name in RECIPES])
    bank = engine._runner.bank
    for slot in range(len(RECIPES)):
        assert bank.rank_of(slot) in (0, int(bank.table.ranks[slot].max()))
    assert 33 in {bank.rank_of(slot) for slot in range(len(RECIPES))}
    assert np.isin([20, 17], [bank.rank_of(slot) for slot in range(len(RECIPES))]).all()
