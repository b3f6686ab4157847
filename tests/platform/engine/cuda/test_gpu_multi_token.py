"""The base's head for multi-token prediction on a GPU: its drafts are those of a reference, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_zoo import Asked, Zoo, serve, to_request
from drafting_heads import Drafted, check_drafts, mtp_engine
from multi_token_reference import ReferenceHead, base_of, train
from preempting import preempting
from recorded_steps import record_and_run, recorded
from specializations import specialization

from loramux.engine.engine import Engine
from loramux.engine.execution import cuda_graphs, gpu_head, step_buffers
from loramux.engine.execution.cuda_graphs import count_recordings, host_syncs_of
from loramux.engine.execution.gpu_head import GpuHead
from loramux.engine.execution.gpu_runner import GpuRunner, warm_up
from loramux_kernels.cuda.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "narrow": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []}
BASES = {
    "qwen3_5": ("qwen3_5", HYBRID),
    "qwen3_next": ("qwen3_next", HYBRID),
    "without states": ("qwen3_5", {"layer_types": ["full_attention"] * 2}),
    "deepseek_v3": ("deepseek_v3", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
}
SIZES = {"device": DEVICE, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 24, "block_size": 16}
PROMPTS = [tuple(random.Random(seed).randrange(3, 97) for _ in range(5 + 14 * (seed % 2))) for seed in range(4)]
TEXTS = [Asked(f"t{i}", None, prompt, 16) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def zoo_with_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Zoo]:
    """zoo_with_head("qwen3_5"): a base of two layers whose head was trained on the base's own answers to PROMPTS."""
    made: dict[str, Zoo] = {}

    def get(base: str) -> Zoo:
        if base not in made:
            family, fields = BASES[base]
            zoo = Zoo(family, tmp_path_factory.mktemp("base"), num_hidden_layers=2, **fields)
            for seed, (name, recipe) in enumerate(ADAPTERS.items()):
                zoo.make_adapter(name, recipe, seed)
            model = base_of(zoo.base)
            head = ReferenceHead.random(model, seed=2)
            train(head, model, [[*one.prompt, *zoo.answer(one)] for one in TEXTS], steps=250)
            head.save(zoo.base, one_by_one=family == "qwen3_next")
            made[base] = zoo
        return made[base]

    return get


def head_of(engine: Engine) -> GpuHead:
    head = engine._runner._head
    assert isinstance(head, GpuHead)
    return head


def replays_of(engine: Engine) -> list[int]:
    """Return a list that gets the bucket of each recording of the head that is replayed."""
    seen: list[int] = []

    class Watched(dict):
        def __getitem__(self, rows: int) -> Any:
            seen.append(rows)
            return super().__getitem__(rows)

    head_of(engine)._recordings = Watched(head_of(engine)._recordings)
    return seen


MIXED = [
    Asked("r0", None, PROMPTS[0], 14),
    Asked("r1", "plain", PROMPTS[1], 9),
    Asked("r2", None, PROMPTS[1], 14),
    Asked("r3", "narrow", tuple(range(3, 40)), 7),
    Asked("r4", None, PROMPTS[3][:1], 6),
]


@pytest.mark.parametrize(
    ("base", "most_recorded"),
    [*((base, 2048) for base in BASES), ("qwen3_5", 4), ("without states", 4)],  # 4: only small steps are recorded
)
def test_gpu_head_in_chunks_after_cached_prefixes_and_preempted_drafts_as_the_reference_does(
    zoo_with_head, base: str, most_recorded: int, monkeypatch, copies_of_decode_steps
) -> None:
    """Over pages of NaN, next to adapters, after tokens that the host does not know, and with accepted drafts."""
    for module in (step_buffers, cuda_graphs, gpu_head):
        monkeypatch.setattr(module, "MOST_RECORDED_ROWS", most_recorded)
    zoo = zoo_with_head(base)
    engine = mtp_engine(zoo, **SIZES, swap_bytes=(1 << 22) if base == "qwen3_5" else 0)
    assert isinstance(engine._runner, GpuRunner)
    engine._runner.bank.pool.fill_(float("nan"))
    engine.scheduler.memory.swap.pays = lambda _: True
    times: Any = engine.scheduler.speculation.times
    times.is_measured = lambda rows: engine.stats().steps % 3 > 0  # whole recorded steps, which run ahead, in between
    copies, replays = copies_of_decode_steps(engine), replays_of(engine)
    engine, drafted = preempting(engine, every=6), Drafted(engine)
    answers = {one.name: zoo.answer(one) for one in MIXED}
    assert serve(zoo, engine, MIXED, arrivals=[0, 0, 1, 2, 2]) == answers
    again = [
        Asked("again", None, (*PROMPTS[1], *answers["r2"][:-1], 9), 4),
        Asked("last", "narrow", MIXED[3].prompt, 5),
    ]
    assert serve(zoo, engine, again) == {one.name: zoo.answer(one) for one in again}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.pages_kv == 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert drafted.num_pending > 0, "a step was in flight"
    assert {tuple(step) for step in copies} == {("send",)}
    assert 0 < len(replays) <= stats.steps
    assert max(replays) <= 4 if most_recorded == 4 else len(replays) == stats.steps
    check_drafts(zoo, drafted)


STEERED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2},
    {"logit_bias": {9: 1.5}, "frequency_penalty": 0.4, "min_tokens": 3, "stop_token_ids": tuple(range(3, 60, 7))},
]


@pytest.mark.parametrize("base", ["qwen3_5", "without states"])
def test_gpu_answers_and_their_ends_with_a_head_are_those_without(zoo_with_head, base: str) -> None:
    zoo, sizes = zoo_with_head(base), SIZES | {"block_size": 32}

    def told(engine: Engine) -> dict[str, list[tuple[int | None, Any, str | None]]]:
        found: dict[str, list[tuple[int | None, Any, str | None]]] = {}
        for number, steer in enumerate(STEERED):
            adapter = (None, "plain")[number % 3 == 2]
            engine.submit(to_request(zoo, Asked(str(number), adapter, PROMPTS[number], 12), **steer))
        while not engine.is_idle:
            for event in report.events if (report := engine.step()) else []:
                logprob = None if event.logprob is None else pytest.approx(event.logprob, abs=1e-3)
                found.setdefault(event.request_id, []).append((event.token_id, logprob, event.finish_reason))
        return found

    alone, engine = told(zoo.engine(**sizes)), mtp_engine(zoo, seed=1, **sizes)
    assert told(engine) == alone
    assert engine.stats().accepted_tokens > 0
    assert engine.stats().pages_kv == 0


def test_gpu_head_in_fp8_pages_changes_no_answer(zoo_with_head) -> None:
    zoo, sizes = zoo_with_head("without states"), SIZES | {"kv_cache_dtype": "fp8", "block_size": 64}
    asked = [*TEXTS[:3], Asked("past a page", "plain", tuple(range(3, 63)), 8)]
    answers, engine = serve(zoo, zoo.engine(**sizes), asked), mtp_engine(zoo, **sizes)
    got = serve(zoo, engine, asked)
    # A page's scale is that of its first token, whose rounding a step's rows change.
    assert sum(got[name] == answers[name] for name in answers) >= len(answers) - 1
    assert engine.stats().accepted_tokens > 0


def test_gpu_head_drafts_by_measured_times(zoo_with_head) -> None:
    """On a device on which a row costs nothing, also in steps after one that ran ahead."""
    zoo = zoo_with_head("without states")
    engine = mtp_engine(zoo, **SIZES)
    speculation: Any = engine.scheduler.speculation
    speculation.times.seconds = lambda rows: 1.0
    del speculation.count_paying, speculation.longest_paying
    assert serve(zoo, engine, TEXTS[:2]) == {one.name: zoo.answer(one) for one in TEXTS[:2]}
    stats = engine.stats()
    assert stats.accepted_tokens > stats.output_tokens // 4
    assert stats.steps < stats.output_tokens


def test_gpu_head_never_waits_for_the_device_and_its_recordings_are_counted(zoo_with_head) -> None:
    zoo = zoo_with_head("qwen3_next")
    engine = mtp_engine(zoo, **SIZES)
    assert sum(engine._runner.graphs) == count_recordings(4, 24, has_head=True)
    head, syncs = head_of(engine), []

    def record(function, inputs):
        function()
        syncs.append(host_syncs_of(function))
        return cuda_graphs.record_calls(function, inputs)

    with torch.inference_mode():
        head.record(record)
        shapes = engine._runner._decoder_graphs._attention.shapes
        assert host_syncs_of(lambda: head.warm_up(shapes)) == set()
    assert syncs == [set()] * len(head._buckets)


@pytest.mark.slow
def test_gpu_head_kernels_of_any_traffic_were_compiled_at_the_start(zoo_with_head, monkeypatch) -> None:
    seen: set[tuple[object, ...]] = set()
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: seen.add(specialization(launch)) or run(launch))
    zoo = zoo_with_head("qwen3_next")
    engine = mtp_engine(zoo, **SIZES)
    runner, head = engine._runner, head_of(engine)
    recorded(runner, record_and_run)
    with torch.inference_mode():
        head.record(record_and_run)
        shapes = runner._decoder_graphs._attention.shapes
        head.warm_up(shapes)
        warm_up(runner._forward, runner._buffers, runner._sampler, shapes)
    at_start = set(seen)
    serve(zoo, engine, MIXED, arrivals=[0, 0, 1, 2, 2])
    assert engine.stats().accepted_tokens > 0
    late = sorted(str(one) for one in seen - at_start)
    assert not late, "\n".join(late)
