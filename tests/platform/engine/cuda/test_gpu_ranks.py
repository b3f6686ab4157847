"""An engine of several ranks on the path of a GPU: the same recordings, collectives, tables and adapters on each rank.

In the interpreter the ranks are threads, and gloo is their collective. On a card one rank has a group of NCCL.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
import torch
from adapter_zoo import LINEARS, Asked, Zoo, load, serve, to_request
from formats import FormatZoo
from interpreted import INTERPRETED
from preempting import preempting
from torch import distributed

from loramux.common.bundle import SamplingDefaults
from loramux.engine.engine import AsyncPipeline, Engine, build_engine
from loramux.engine.execution import assembly, loader
from loramux.engine.execution.cuda_graphs import CudaGraphs, count_recordings, record_calls
from loramux.engine.execution.device_sampler import TokensInFlight
from loramux.engine.execution.gpu_runner import GpuRunner
from loramux.engine.execution.rank_team import RankDied
from loramux.engine.messages import Request
from loramux_adapters.base import describe_base
from loramux_adapters.ranks import Ranks

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="ranks are threads in the interpreter alone")


def ranked(zoo: Zoo, size: int = 2, **settings: object) -> Engine:
    sizes = {"max_num_seqs": 3, "max_model_len": 64, "block_size": 16}
    engine = zoo.engine(**{"device": "cpu", "tensor_parallel_size": size} | sizes | settings)
    assert isinstance(engine._runner, GpuRunner)
    assert isinstance(engine._pipeline, AsyncPipeline)
    return engine


MIXED = [
    Asked(f"r{i}", adapter, prompt, 3 + i)
    for i, (adapter, prompt) in enumerate(
        [("plain", (5, 6, 7)), (None, (11,)), ("rslora", tuple(range(3, 25))), ("patterns", (9, 8))]
    )
]
"""Prompts that are read in chunks while others decode, three adapters and the base."""


def told(engine: Engine, requests: list[Request]) -> dict[str, list[tuple[int, float | None]]]:
    """Return the tokens of each request, with their log probabilities."""
    found: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        for event in report.events if (report := engine.step()) else []:
            assert event.finish_reason != "error", event.fault
            if event.token_id is not None:
                found[event.request_id].append((event.token_id, event.logprob))
    return found


@in_interpreter
def test_gpu_ranks_mixed_batches_answer_as_peft_does_by_the_same_collectives(zoo_of, collectives) -> None:
    zoo = zoo_of("llama")
    with closing(ranked(zoo)) as engine:
        at_start = {rank: len(those) for rank, those in collectives.items()}
        engine._runner.bank.pool.fill_(float("nan"))  # what a page's last owner may have left there
        got = serve(zoo, engine, MIXED, arrivals=[0, 0, 1, 2])
        assert got == {asked.name: zoo.answer(asked) for asked in MIXED}
        stats = engine.stats()
    assert stats.max_distinct_adapters_beside_base >= 2
    assert stats.step_graphs + stats.step_graphs_missing == 2 * count_recordings(3, 16), "those of both ranks"
    assert collectives[0] == collectives[1]
    assert at_start[0] == at_start[1], "both ranks record the same steps"
    of_steps = [name for name, _ in collectives[0][at_start[0] :]]
    assert {"all_reduce", "gather_columns", "broadcast"} == set(of_steps)
    # One for each recorded decode step, and for each other step that follows a token that the host does not know.
    assert of_steps.count("broadcast") <= of_steps.count("gather_columns")


@in_interpreter
def test_gpu_ranks_draw_the_tokens_of_one_rank_while_requests_are_preempted(zoo_of) -> None:
    """Seeds, penalties and log probabilities are rank 0's; pages of a preempted request are restored on both ranks."""
    zoo = zoo_of("llama")
    drawing = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 1}
    asked = [Asked(f"s{i}", name, (7 + i, 11, *range(20, 38)), 5) for i, name in enumerate(("plain", None))]
    requests = [to_request(zoo, one, seed=7 + i, **drawing) for i, one in enumerate(asked)]
    with closing(zoo.engine(device="cpu", max_num_seqs=2, max_model_len=64)) as engine:
        alone = told(engine, requests)
    with closing(preempting(ranked(zoo, max_num_seqs=2))) as engine:
        engine.scheduler.memory.swap.pays = lambda _: True
        both = told(engine, requests)
        stats = engine.stats()
    assert {name: [token for token, _ in those] for name, those in both.items()} == {
        name: [token for token, _ in those] for name, those in alone.items()
    }
    assert both["s0"][-1][1] == pytest.approx(alone["s0"][-1][1], abs=1e-4)
    assert stats.preemptions >= 2
    assert stats.kv_pages_swapped_in > 0


@in_interpreter
def test_gpu_ranks_adapters_that_take_evicted_ones_slots_while_steps_fly_answer_as_peft_does(zoo_of) -> None:
    """The pool has room for one adapter; each next one takes its pages and its slot on both ranks."""
    zoo = zoo_of("llama")
    names = ["plain", "rslora", "plain", "patterns", None, "rslora"]
    asked = [Asked(f"e{i}", name, (5 + i, 6, 7), 4) for i, name in enumerate(names)]
    with closing(ranked(zoo, pool_bytes=40 * 16 * 2 * 2 * 1 * 16 * 4)) as engine:
        got = serve(zoo, engine, asked, arrivals=list(range(0, 12, 2)))
        assert engine.stats().adapter_evictions > 0
    assert got == {one.name: zoo.answer(one) for one in asked}


@in_interpreter
def test_gpu_ranks_adapters_of_every_format_are_recorded_alike(tmp_path: Path, collectives) -> None:
    """The kinds of recordings that a step needs follow from each rank's own share of the adapters."""
    formats = ("dora", "both", "tokens")
    zoo = FormatZoo("llama", tmp_path, formats, num_hidden_layers=1)
    zoo.make_adapters()
    asked = [Asked(f"{a} {i}", a, (5 + i, 40, 7), 2) for i, a in enumerate([*zoo.formats, None])]
    with closing(ranked(zoo, max_num_seqs=2, block_size=32)) as engine:
        assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}
    assert collectives[0] == collectives[1]


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "mlp_only_layers": [],
}


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "olmo2", "gemma2", "qwen3_next"])
def test_gpu_ranks_of_other_families_answer_as_one_does(tmp_path: Path, family: str) -> None:
    """Experts, norms over all heads, norms after the sums, and states."""
    zoo = Zoo(family, tmp_path, num_hidden_layers=2, **HYBRID if family == "qwen3_next" else {})
    zoo.make_adapter("plain", {"r": 8, "lora_alpha": 16, "target_modules": LINEARS}, 100)
    asked = [Asked(one.name, name, one.prompt, 4) for name, one in zip(("plain", None) * 2, MIXED, strict=True)]
    answers = []
    for size in (1, 2):
        with closing(ranked(zoo, size, in_process=True, block_size=64)) as engine:
            answers.append(serve(zoo, engine, asked, arrivals=[0, 0, 1, 2]))
    assert answers[0] == answers[1]
    assert answers[0]["r0"] == zoo.answer(asked[0])


@in_interpreter
def test_gpu_ranks_have_pools_of_the_rank_with_the_least_memory(zoo_of, monkeypatch) -> None:
    monkeypatch.setattr(
        assembly, "pool_bytes_of", lambda _: 1 << 20 if threading.current_thread().name == "rank-1" else 4 << 20
    )
    with closing(ranked(zoo_of("llama"), max_num_seqs=1, max_num_batched_tokens=1)) as engine:
        assert engine.facts.pages_total * engine._runner.bank.page_bytes == 1 << 20


@in_interpreter
def test_gpu_ranks_step_that_never_ends_ends_the_engine(zoo_of, monkeypatch) -> None:
    """A recorded collective with a rank that hangs waits for ever, so rank 0 asks its device and does not wait."""
    zoo = zoo_of("llama")
    with closing(ranked(zoo, max_num_seqs=1, max_num_batched_tokens=1)) as engine:
        engine._team._timeout_s = 0.05
        monkeypatch.setattr(TokensInFlight, "have_arrived", property(lambda _: False))
        with pytest.raises(RankDied, match=r"did not answer within engine\.step_timeout_s"):
            told(engine, [to_request(zoo, Asked("r", None, (5,), 2))])


@pytest.fixture(scope="session")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return a group of one rank on the device of this run: NCCL's on a card, gloo's without one.

    It is not left before the process ends: NCCL would wait for the end of every graph with its collectives.
    """
    return Ranks.join(tmp_path_factory.mktemp("ranks") / "meeting", 0, 1, 60.0, DEVICE, is_ordered=False)


def test_collectives_of_one_rank_are_recorded(group_of_one: Ranks) -> None:
    """On a card NCCL's launches are in a CUDA graph; that others join them needs more cards."""
    source, output = torch.zeros(2, 4, 8, device=DEVICE)

    def run() -> None:
        summed = group_of_one.all_reduce(source * 2)
        output.copy_(group_of_one.gather_columns(group_of_one.broadcast(summed)))

    recording = (CudaGraphs(DEVICE) if DEVICE.type == "cuda" else record_calls)(run, source)
    source.fill_(3)
    recording.replay()
    assert output.eq(6).all()
    assert group_of_one.least(5) == 5
    assert recording.is_graph == (DEVICE.type == "cuda")
    if DEVICE.type == "cuda":
        assert distributed.get_backend() == "nccl"


def test_gpu_engine_of_one_rank_with_collectives_answers_as_peft_does(zoo_of, group_of_one: Ranks, monkeypatch) -> None:
    """Every collective of a step is in its recording; on a card these are CUDA graphs with NCCL."""
    zoo = zoo_of("llama")
    settings = load(zoo.base, device=str(DEVICE), max_num_seqs=3, max_model_len=64)[1]
    monkeypatch.setattr(Ranks, "join", lambda *_, **__: group_of_one)
    before = group_of_one.num_reductions
    share = assembly.load_share(settings, 0, Path())
    base = describe_base(zoo.base)
    loaded = loader._served(share, base, share.local_weights, settings, SamplingDefaults())
    engine = build_engine(loaded, settings, wake=lambda: None)
    assert serve(zoo, engine, MIXED, arrivals=[0, 0, 1, 2]) == {asked.name: zoo.answer(asked) for asked in MIXED}
    assert group_of_one.num_reductions > before
    assert (engine.stats().step_graphs_missing == 0) == (DEVICE.type == "cuda")
