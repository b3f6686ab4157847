"""The loop around the engine: time, transfers, counting, and that a run can be repeated to the last digit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loramux.engine.memory.pages import PageUse
from loramux.engine.messages import AdapterRef
from loramux.engine.scheduling.fairness import VirtualTokenCounter
from loramux.engine.scheduling.sequence import Step
from loramux.simulator.engine import SimulatedStore, VirtualClock
from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS, StepTime, StepWork
from loramux.simulator.report import ServiceGap, SimulationReport, Times, plot_report
from loramux.simulator.scenario import load_scenario, make_scenario
from loramux.simulator.simulation import Simulation

KEYS = {
    "throughput_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "preemption_rate",
    "pages_swapped",
    "pool_use",
    "service_gap_max",
    "service_gap_bound",
    "adapter_loads",
    "prompt_tokens_computed",
    "moves",
    "bound_by",
    "accepted",
    "refused",
    "in_deadline",
    "per_stage",
    "conversation_ms",
    "per_tenant",
}


def simulate(name: str, *overrides: str) -> Simulation:
    simulation = Simulation(load_scenario(name, overrides))
    simulation.run()
    return simulation


def test_the_same_scenario_gives_the_same_report_and_another_seed_does_not() -> None:
    reports = [
        msgspec.json.encode(simulate("azure-conversation", "duration_s=8", f"seed={seed}").report())
        for seed in (0, 0, 1)
    ]
    assert reports[0] == reports[1] != reports[2]
    report = json.loads(reports[0])
    assert set(report) == KEYS
    assert set(report["ttft_ms"]) == set(report["itl_ms"]) == {"p50", "p99"}


@pytest.mark.parametrize(("device", "is_counted"), [("cpu", True), ("h200", False)])
def test_attention_of_prompts_next_to_answers_is_counted_as_in_the_engine_of_the_device(
    device: str, *, is_counted: bool
) -> None:
    """On a CPU, a prompt of 6,000 tokens then takes more steps than its tokens alone."""
    clients = [
        {
            "tenant": name,
            "rate": 1.0,
            "requests": 1,
            "start_s": at,
            "prompt_tokens": {"distribution": "constant", "tokens": prompt},
            "output_tokens": {"distribution": "constant", "tokens": output},
        }
        for name, at, prompt, output in (("answer", 0.0, 8, 2000), ("prompt", 0.5, 6000, 1))
    ]
    data = {
        "duration_s": 1.0,
        "device": {"preset": device},
        "model": {"preset": "qwen2.5-0.5b"},
        "pool_tokens": 20_000,
        "max_num_batched_tokens": 512,
        "max_mixed_prefill_tokens": 256,
        "clients": clients,
    }
    scenario = make_scenario(data, "a test")
    simulation = Simulation(scenario)
    (engine,) = simulation.engines
    lengths = []
    plan = engine.scheduler.plan

    def observed() -> Step:
        step = plan()
        lengths.extend(chunk.length for chunk in step.chunks if chunk.length > 8)
        return step

    engine.scheduler.plan = observed  # type: ignore[method-assign]
    simulation.run()
    context = scenario.model.token_context
    assert engine.scheduler.state.limits.token_context == (context if is_counted else math.inf)
    assert sum(lengths) == 6000
    start = 0
    for length in lengths[:-1]:
        cost = length + length * (start + length / 2) / context if is_counted else length
        assert 0.98 * 256 < cost <= 256
        start += length


def test_every_token_is_counted_once_whatever_is_preempted() -> None:
    simulation = simulate("azure-conversation", "duration_s=4", "pool_tokens=9000", "policy.max_service_lead=256")
    arrivals, report = simulation.arrivals, simulation.report()
    fits = arrivals.prompt_tokens + arrivals.max_tokens <= simulation.scenario.num_pages * 16
    assert report.accepted == fits.sum() - (report.refused - (~fits).sum())
    tenants = report.per_tenant.values()
    assert sum(t.accepted for t in tenants) + sum(t.refused for t in tenants) == len(arrivals)
    assert simulation.engine.scheduler.state.counters.preemptions > 0
    assert sum(t.output_tokens for t in tenants) <= arrivals.output_tokens.sum()
    assert simulation.engine.pool.num_taken(PageUse.KV) == 0


def test_idle_time_is_skipped() -> None:
    simulation = simulate("fairness-two-clients", "duration_s=100000", "clients.0.rate=0.0001", "clients.1.rate=0.0001")
    assert simulation.now > 80_000
    assert len(simulation.timeline.moments) <= 2 * 20 * 256


def test_quantiles_are_exact() -> None:
    times = Times()
    for number in np.random.default_rng(0).permutation(1000):
        times.add((number + 1) / 1000)
    assert times.milliseconds(0.5) == 500.0
    assert times.milliseconds(0.99) == 990.0
    assert times.milliseconds(1.0) == 1000.0
    assert Times().quantiles.p50 is None


def test_transfers_queue_on_the_link_and_take_their_time() -> None:
    clock, device = VirtualClock(), DEVICES["h200"]
    store = SimulatedStore(clock, device, {"a": (2, 50_000_000), "b": (3, 100_000_000)})
    first, second = store.fill(AdapterRef("a", ""), [1, 2]), store.fill(AdapterRef("b", ""), [3, 4, 5])
    assert store.next_due == pytest.approx(device.load_overhead_s + 0.001)
    clock.advance_to(store.next_due)
    store.settle()
    assert (first.result(), second.done()) == (0, False)
    assert store.link_bandwidth == device.link_bandwidth
    clock.advance_to(store.next_due)
    store.settle()
    assert second.result() == 1
    assert clock.now == pytest.approx(2 * device.load_overhead_s + 0.003)
    assert store.link_bandwidth == 0.0
    store.drop(0)
    assert store.fill(AdapterRef("b", ""), [6, 7, 8])
    assert store.digest_of(0) == "b"


def test_the_cpu_model_agrees_with_the_measured_steps() -> None:
    """Decision 0002: 41 ms, 63 ms with adapters of 0.58 of the base's bytes; 1.3 s for 1,024 tokens of prefill."""
    model = MODELS["qwen2.5-0.5b"]
    time = StepTime(DEVICES["cpu"], model)
    base = time.seconds(StepWork(16, 1600, 1600, 0, 0))
    mixed = time.seconds(StepWork(16, 1600, 1600, int(0.58 * model.weight_bytes), 16 * 30))
    prefill = time.seconds(StepWork(1024, 1024, 1024 * 512, 0, 0))
    assert base == pytest.approx(0.041, rel=0.05)
    assert mixed == pytest.approx(0.063, rel=0.05)
    assert prefill == pytest.approx(1.3, rel=0.05)


def test_model_sizes_are_those_of_the_literature() -> None:
    llama = MODELS["llama-3.1-8b"]
    assert llama.adapter_bytes(16) == 83_886_080
    assert llama.adapter_bytes(16) // llama.kv_bytes_per_token == 640
    assert llama.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    assert MODELS["qwen2.5-0.5b"].weight_bytes == pytest.approx(2 * 0.494e9, rel=0.005)
    # Llama-3.1-8B-Instruct-AWQ-INT4 has 5.7 GB of files: codes, half-precision scales, embedding and head.
    int4 = msgspec.structs.replace(llama, bits_per_weight=WEIGHT_BITS["int4"])
    assert int4.weight_bytes == pytest.approx(5.9e9, rel=0.05)
    fp8_kv = msgspec.structs.replace(llama, bytes_per_kv_element=1)
    assert (2 * fp8_kv.kv_bytes_per_token, fp8_kv.weight_bytes) == (llama.kv_bytes_per_token, llama.weight_bytes)
    assert (int4.kv_bytes_per_token, int4.adapter_bytes(16)) == (llama.kv_bytes_per_token, llama.adapter_bytes(16))
    latent = msgspec.structs.replace(llama, kv_lora_rank=512, qk_rope_head_dim=64)
    assert latent.kv_bytes_per_token == latent.share_of(2).kv_bytes_per_token == 2 * 32 * 576


def test_the_gap_is_the_range_of_the_difference_while_both_wait() -> None:
    gap = ServiceGap(watched=2)
    one, other, third = VirtualTokenCounter(), VirtualTokenCounter(), VirtualTokenCounter()
    for account, units in ((one, 5.0), (other, 9.0), (one, 10.0)):
        account.charge(units)
        gap.observe([one, other, third])
    assert gap.largest == 10.0, "5 - 0 at first, 5 - 9 then: what was before both waited does not count"
    gap.observe([one])
    one.charge(100.0)
    gap.observe([one, other])
    assert gap.largest == 10.0, "the other one did not wait meanwhile"
    other.credit_up_to(200.0)
    gap.observe([one, other])
    assert gap.largest == 10.0, "a lift is no service"


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    simulation = simulate("fairness-two-clients", "duration_s=5")
    plot_report(simulation.timeline, "title", tmp_path / "course.png")
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")


def test_no_class_and_no_tenant_waits_for_ever() -> None:
    """While others never stop asking for more than there is, one request of the smallest class still gets its turn."""
    client = {"prompt_tokens": {"distribution": "constant", "tokens": 64}, "adapters": 2}
    crowd = {"tenant": "crowd", "tenants": 4, "rate": 60, "output_tokens": {"distribution": "constant", "tokens": 64}}
    last = {"tenant": "last", "rate": 1, "requests": 1, "start_s": 5, "weight": 0.5, "service_class": "batch"}
    short = {"distribution": "constant", "tokens": 8}
    scenario = make_scenario(
        {
            "duration_s": 60,
            "device": "a10g",
            "model": "llama-2-7b",
            "pool_tokens": 4000,
            "max_num_seqs": 16,
            "clients": [
                client | crowd | {"service_class": "interactive"},
                client | crowd | {"tenant": "more", "service_class": "standard"},
                client | last | {"output_tokens": short},
            ],
        },
        "here",
    )
    simulation = Simulation(scenario)
    while simulation.now < 60:
        assert simulation.advance()
    assert simulation.meter.tallies["crowd-0"].ttft.milliseconds(1.0) > 10_000, "the engine is far behind"
    assert simulation.meter.tallies["last"].accepted == 1


def report_of(prompt: int, output: int, rate: float, **fields: object) -> SimulationReport:
    """The report of one engine of an 8B on an H100 under simple traffic."""
    client = {
        "tenant": "t",
        "rate": rate,
        "prompt_tokens": {"distribution": "constant", "tokens": prompt},
        "output_tokens": {"distribution": "constant", "tokens": output},
    }
    scenario = {"duration_s": 3, "device": "h100", "model": "llama-3.1-8b", "clients": [client]}
    return Simulation(make_scenario(scenario | fields, "here")).run()


def test_report_names_the_resource_that_binds() -> None:
    assert report_of(4000, 2, 12.0).bound_by == "arithmetic"
    assert report_of(8, 200, 20.0).bound_by == "bandwidth"
    assert report_of(100, 100, 60.0, pool_tokens=4000).bound_by == "memory"
    assert report_of(8, 2, 2000.0).bound_by == "front", "2,000 requests per second are too many for one process"


def test_prompts_of_one_source_share_their_system_prompt_only() -> None:
    """Two tenants with system prompts: the cache computes each once, and the rest of each prompt."""
    client = {
        "tenant": "t",
        "tenants": 2,
        "rate": 10,
        "system_tokens": {"distribution": "constant", "tokens": 1600},
        "prompt_tokens": {"distribution": "constant", "tokens": 16},
        "output_tokens": {"distribution": "constant", "tokens": 2},
    }
    scenario = {"duration_s": 10, "device": "h100", "model": "llama-3.1-8b", "clients": [client]}
    cached = Simulation(make_scenario(scenario | {"policy": {"prefix_cache": True}}, "here"))
    report, whole = cached.run(), Simulation(make_scenario(scenario, "here")).run()
    count = len(cached.arrivals)
    assert whole.prompt_tokens_computed == count * 1616
    assert 2 * 1600 + count * 16 <= report.prompt_tokens_computed <= 4 * 1600 + count * 32


def test_requests_of_the_warm_up_are_in_no_figure() -> None:
    whole, late = report_of(100, 10, 20.0), report_of(100, 10, 20.0, warmup_s=2.0)
    assert 0 < late.accepted < whole.accepted
    assert late.prompt_tokens_computed < whole.prompt_tokens_computed


def test_popular_adapters_are_replaced_after_their_lifetime() -> None:
    client = {
        "tenant": "t",
        "rate": 50,
        "adapters": 4,
        "lifetime_s": 2,
        "prompt_tokens": {"distribution": "constant", "tokens": 8},
        "output_tokens": {"distribution": "constant", "tokens": 2},
    }
    scenario = {"duration_s": 10, "device": "h100", "model": "llama-3.1-8b", "clients": [client]}
    arrivals = Simulation(make_scenario(scenario, "here")).arrivals
    early = set(arrivals.source[arrivals.at < 2].tolist())
    late = set(arrivals.source[arrivals.at > 8].tolist())
    assert len(set(arrivals.source.tolist())) >= 20
    assert not early & late
