"""Measured devices: the fit of their steps, their use by simulations and plans, and the command that measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_base
from click.testing import CliRunner

from loramux.engine.messages import ServiceClass
from loramux.simulator.fitting import AdapterLoad, LongPrompt, MeasuredStep, StepMeasurements, fit_device, fit_steps
from loramux.simulator.hardware import MODELS, Device, Front, MeasuredSteps, StepTime, StepWork, between_knots
from loramux.simulator.profiles import Profile, profile_names, read_profile
from loramux.simulator.report import FrontQueue
from loramux.simulator.scenario import Scenario, ScenarioError, load_scenario
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import Arrivals, TrafficSource
from loramux_api.cli.main import main

MODEL = MODELS["qwen2.5-0.5b"]
TRUE = MeasuredSteps(
    model=MODEL,
    token_s=((1, 0.010), (16, 0.012), (256, 0.200), (1024, 0.900)),
    row_s=((1, 0.0), (16, 0.004), (64, 0.010)),
    context_s=2e-7,
    pair_s=3e-8,
    adapters_s=0.001,
    adapter_s=0.0002,
    rank_s=1e-5,
    row_rank_s=2e-6,
)


def prompt(tokens: int, rank: int = 0) -> StepWork:
    pairs = tokens * (tokens + 1) // 2
    return StepWork(tokens, tokens, pairs, MODEL.adapter_bytes(rank), tokens * rank, 1, int(rank > 0))


def decode(rows: int, context: int, adapters: int = 0, rank: int = 0) -> StepWork:
    total = rows * context
    return StepWork(rows, total, total, adapters * MODEL.adapter_bytes(rank), rows * rank, rows, adapters)


def measured(*work: StepWork) -> list[MeasuredStep]:
    return [MeasuredStep(one, TRUE.seconds(one)) for one in work]


def measurements() -> StepMeasurements:
    chunk = 256
    seconds = sum(
        TRUE.seconds(StepWork(chunk, end, chunk * end - chunk * (chunk - 1) // 2, 0, 0, 1))
        for end in (chunk, 2 * chunk, 3 * chunk)
    )
    adapters = [decode(16, 12, number, rank) for number in (1, 4, 16) for rank in (8, 64)] + [
        prompt(128, 8),
        prompt(128, 64),
    ]
    return StepMeasurements(
        prompts=measured(*(prompt(n) for n in (1, 16, 128, 256, 1024))),
        decodes=measured(*(decode(rows, 12) for rows in (1, 16, 64))),
        contexts=measured(decode(1, 2000), decode(16, 500)),
        long_prompts=[LongPrompt(chunk, 3, seconds)],
        adapters=measured(*adapters),
    )


def test_fit_of_exact_steps_predicts_steps_that_were_not_measured() -> None:
    fitted = fit_steps(MODEL, measurements())
    others = [
        decode(16, 1000, 8, 32),
        decode(40, 300, 40, 16),
        prompt(512),
        prompt(200, 64),
        StepWork(16 + 240, 16 * 500 + 2000, 16 * 500 + 240 * 1900, 3 * MODEL.adapter_bytes(64), 256 * 64, 17, 3),
    ]
    for work in others:
        assert fitted.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.01)
    assert fitted.pair_s == pytest.approx(TRUE.pair_s, rel=0.01)
    assert fitted.rank_s == pytest.approx(TRUE.rank_s, rel=0.01)


def test_fit_has_no_negative_part_whatever_was_measured() -> None:
    rng = np.random.default_rng(0)
    exact = measurements()
    for _ in range(20):
        noisy = StepMeasurements(
            *(
                [MeasuredStep(one.work, one.seconds * rng.uniform(0.3, 3.0)) for one in steps]
                for steps in (exact.prompts, exact.decodes, exact.contexts)
            ),
            exact.long_prompts,
            [MeasuredStep(one.work, one.seconds * rng.uniform(0.3, 3.0)) for one in exact.adapters],
        )
        fitted = fit_steps(MODEL, noisy)
        numbers = [
            fitted.context_s,
            fitted.pair_s,
            fitted.adapters_s,
            fitted.adapter_s,
            fitted.rank_s,
            fitted.row_rank_s,
        ]
        assert min(numbers) >= 0
        times = [fitted.seconds(prompt(n)) for n in range(1, 2000, 37)]
        assert times == sorted(times), "more tokens take no less time"


def test_fit_takes_no_slope_of_contexts_that_are_equal_and_needs_no_adapters() -> None:
    """A fast engine's short answers may grow as long as its long contexts, and a small pool may hold no adapter."""
    exact = measurements()
    contexts = [*exact.contexts, MeasuredStep(decode(64, 12), 5.0), MeasuredStep(decode(64, 13), 5.0)]
    fitted = fit_steps(MODEL, replace(exact, contexts=contexts, adapters=[]))
    assert fitted.context_s == pytest.approx(TRUE.context_s, rel=0.01)
    assert fitted.rank_s == 0.0


def test_steps_that_a_disturbed_context_exceeds_still_make_a_device() -> None:
    slow = [MeasuredStep(step.work, 100 * step.seconds) for step in measurements().contexts]
    fitted = fit_steps(
        MODEL, replace(measurements(), contexts=slow, prompts=measurements().prompts[:2], long_prompts=[])
    )
    loads = [AdapterLoad(MODEL.adapter_bytes(8), 0.0)]
    found = fit_device(fitted, loads, pool_bytes=10**9, is_shared_by_ranks=True, front=None)
    assert 0 < found.memory_bandwidth < float("inf")
    assert 0 < found.flops < float("inf")


def test_knots_are_joined_by_lines_and_the_last_line_goes_on() -> None:
    knots = ((1, 1.0), (3, 2.0), (5, 6.0))
    assert [between_knots(knots, n) for n in (0, 1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert between_knots(((4, 2.0),), 9) == 2.0


def device(front: Front | None = None) -> Device:
    loads = [AdapterLoad(MODEL.adapter_bytes(rank), 0.01 + MODEL.adapter_bytes(rank) / 2e9) for rank in (8, 64)]
    return fit_device(fit_steps(MODEL, measurements()), loads, pool_bytes=10**9, is_shared_by_ranks=True, front=front)


def test_measured_device_has_the_measured_loads_and_memory() -> None:
    found = device()
    assert found.load_overhead_s == pytest.approx(0.01)
    assert found.link_bandwidth == pytest.approx(2e9)
    scenario = Scenario(duration_s=1, device=found, model=MODEL, clients=())
    assert scenario.num_pages * scenario.page_bytes == pytest.approx(10**9, rel=0.001)


def test_steps_of_another_model_or_form_are_estimated() -> None:
    found = device()
    assert StepTime(found, MODEL).seconds(prompt(200)) == pytest.approx(TRUE.seconds(prompt(200)), rel=0.01)
    shorter = msgspec.structs.replace(MODEL, max_model_len=100)
    assert found.measured_steps_of(shorter) is not None
    for other in (MODELS["llama-2-7b"], msgspec.structs.replace(MODEL, bits_per_weight=8.0), MODEL.share_of(2)):
        assert found.measured_steps_of(other) is None
    twice = StepTime(found.slowed(2.0), MODEL)
    assert twice.seconds(prompt(200)) == pytest.approx(2 * TRUE.seconds(prompt(200)), rel=0.01)


def simulated(front: Front | None, requests: int, gap_s: float) -> Simulation:
    count = np.full(requests, 4)
    source = TrafficSource("t", None, 0, ServiceClass.STANDARD, 1.0, None, preload=False)
    at = gap_s * np.arange(requests)
    arrivals = Arrivals([source], np.zeros(requests, dtype=int), at, count, count, count)
    return Simulation(Scenario(duration_s=10, device=device(front), model=MODEL, clients=()), arrivals)


def test_measured_server_adds_its_latency_and_its_queue() -> None:
    bare = simulated(None, 5, 1.0).run()
    later = simulated(Front(token_s=0.001, request_s=0.002, latency_s=0.05), 5, 1.0).run()
    assert later.ttft_ms.p50 == pytest.approx((bare.ttft_ms.p50 or 0) + 50 + 1, abs=0.01)
    # 40 requests at once: the last one passes the server after all others.
    queued = simulated(Front(token_s=0.0, request_s=0.1, latency_s=0.0), 40, 0.0).run()
    assert queued.ttft_ms.p99 is not None
    assert queued.ttft_ms.p99 >= 4000
    assert queued.bound_by == "front"


def test_tokens_wait_for_the_server_and_not_for_a_request_that_comes_later() -> None:
    queue = FrontQueue(Front(token_s=0.001, request_s=0.01, latency_s=0.03))
    assert queue.pass_request(1.0) == pytest.approx(1.03)
    assert queue.pass_token(1.0) == pytest.approx(1.011), "after the request's work"
    assert queue.pass_request(1.0) == pytest.approx(1.011 + 0.03)
    # A request that arrives at 1 s does not hold the tokens of half a second before.
    early = simulated(Front(token_s=0.0, request_s=0.0, latency_s=0.5), 2, 1.0).run()
    alone = simulated(Front(token_s=0.0, request_s=0.0, latency_s=0.5), 1, 1.0).run()
    assert early.ttft_ms.p50 == alone.ttft_ms.p50


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "here.json"
    profile = Profile(
        machine="a machine",
        commit="abc",
        date="2026-01-01",
        model_name="half",
        engine={"quantization": "none"},
        device=msgspec.structs.replace(device(), dollars_per_hour=0.5),
    )
    path.write_bytes(msgspec.json.encode(profile))
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_plan_and_simulate_take_a_profile_and_name_its_source(profile_file: Path, tmp_path: Path) -> None:
    traffic = tmp_path / "w.toml"
    traffic.write_text(
        'duration_s = 3\n[[clients]]\ntenant = "t"\nrate = 4\nadapters = 3\n'
        'prompt_tokens = { distribution = "constant", tokens = 30 }\n'
        'output_tokens = { distribution = "constant", tokens = 8 }\n'
    )
    plan = ["plan", "--workload", str(traffic), "--profile", str(profile_file)]
    code, out, _ = run(*plan)
    assert code == 0
    assert "measured on a machine with half, commit abc, 2026-01-01" in out
    assert "ESTIMATED for another model" in run(*plan, "--quantization", "int8")[1]
    assert "ESTIMATED from the data sheet of h100" in run(*plan[:3], "--gpu", "h100", "--model", "qwen2.5-0.5b")[1]
    code, out, _ = run("simulate", "--workload", str(traffic), "--profile", str(profile_file), "--json")
    assert code == 0
    assert 20 < json.loads(out)["ttft_ms"]["p50"] < 40, "30 tokens and an adapter were measured at 26 ms"
    assert run(*plan, "--gpu", "h100")[0] == 2
    assert "no profile 'absent'" in run(*plan[:3], "--profile", "absent")[2]


def test_profile_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("{", "{}", json.dumps({"machine": "x"})):
        path.write_text(text)
        with pytest.raises(ScenarioError, match="profile"):
            read_profile(str(path))


def test_shipped_profiles_say_the_machine_and_the_commit() -> None:
    for name in profile_names():
        profile = read_profile(name)
        assert profile.machine
        assert profile.commit
        assert profile.date


@pytest.mark.server
def test_measure_writes_a_profile_of_a_small_engine(tmp_path: Path) -> None:
    base = tiny_base.make_base(tmp_path / "base", context=256)
    output = tmp_path / "profile.json"
    code, out, error = run("measure", str(base), "--output", str(output), "--seconds", "5", "--skip-server")
    assert code == 0, error
    assert "Decode" in out
    profile = read_profile(str(output))
    steps = profile.device.measured
    assert steps is not None
    assert steps.token_s[0][1] > 0
    assert steps.token_s[-1][0] == 255
    assert steps.row_s[-1][0] == 64
    assert profile.device.front is None
    assert profile.model.hidden_size == 32


def test_static_batching_lets_a_request_wait_for_the_end_of_the_batch() -> None:
    overrides = ["duration_s=4", "max_num_seqs=4"]
    both = [
        Simulation(load_scenario("active-8", [*overrides, f"batching={kind}"])).run()
        for kind in ("continuous", "static")
    ]
    waits = [report.ttft_ms.p99 or 0 for report in both]
    assert waits[1] > 1.5 * waits[0]
    assert [report.accepted for report in both] == [both[0].accepted] * 2
