"""The promised figures, exactly repeatable. Small versions run always; the scenarios as they are shipped are slow."""

from __future__ import annotations

import pytest

from loramux.simulator.report import SimulationReport
from loramux.simulator.scenario import load_scenario
from loramux.simulator.simulation import Simulation


def simulate(name: str, *overrides: str) -> SimulationReport:
    return Simulation(load_scenario(name, overrides)).run()


small = pytest.param("small", id="small")
full = pytest.param("full", id="full", marks=pytest.mark.slow)
sizes = pytest.mark.parametrize("size", [small, full])


def shorter(size: str, seconds: int) -> list[str]:
    return [f"duration_s={seconds}"] if size == "small" else []


@sizes
@pytest.mark.parametrize("pool_tokens", [10_000, 1_000_000])
def test_two_clients_get_the_same_at_any_pool_size_and_nothing_is_lost(size: str, pool_tokens: int) -> None:
    """VTC, OSDI 2024: 7,946 units at 10,000 tokens, growing with the pool; FCFS 262,110."""
    overrides = [*shorter(size, 60), f"pool_tokens={pool_tokens}"]
    fair = simulate("fairness-two-clients", *overrides)
    fifo = simulate("fairness-two-clients", *overrides, "order=fifo")
    assert fair.service_gap_max <= min(8000, fair.service_gap_bound)
    assert fifo.service_gap_max > 2 * fair.service_gap_max
    assert fair.throughput_tokens_per_s >= 0.99 * fifo.throughput_tokens_per_s


@sizes
def test_a_batch_of_hundreds_changes_nothing_about_the_gap(size: str) -> None:
    fair = simulate(
        "fairness-two-clients",
        *shorter(size, 20),
        "pool_tokens=1000000",
        "max_num_seqs=512",
        "clients.0.rate=5",
        "clients.1.rate=10",
    )
    assert fair.service_gap_max <= min(8000, fair.service_gap_bound)


def test_flood_of_one_tenant_does_not_move_anothers_first_token() -> None:
    """At most a tenth of its alone value plus one step, of those that the flood makes."""
    beside = simulate("fairness-flood")
    alone = simulate("fairness-flood", "clients.1.requests=1")
    step = beside.per_tenant["flood"].itl_ms.p99
    assert beside.per_tenant["flood"].ttft_ms.p99 > 20 * beside.per_tenant["steady"].ttft_ms.p99
    assert beside.per_tenant["steady"].ttft_ms.p99 <= 1.1 * alone.per_tenant["steady"].ttft_ms.p99 + step


@sizes
def test_two_thousand_adapters_cost_five_percent_at_most(size: str) -> None:
    """S-LoRA, MLSys 2024: 10%."""
    few, many = (simulate(f"adapters-{n}", *shorter(size, 15)) for n in (5, 2000))
    assert len(many.per_tenant) > 40 * len(few.per_tenant)
    assert many.throughput_tokens_per_s >= 0.95 * few.throughput_tokens_per_s


@sizes
def test_sixteen_adapters_where_eight_slots_would_fit_are_no_cliff(size: str) -> None:
    """SGLang issue 13349: 40 ms become 6,278."""
    eight, sixteen = (simulate(f"active-{n}", *shorter(size, 20)) for n in (8, 16))
    assert sixteen.ttft_ms.p50 <= 2 * eight.ttft_ms.p50
    assert sixteen.throughput_tokens_per_s >= 0.95 * eight.throughput_tokens_per_s


@sizes
def test_cold_adapter_costs_its_own_request_only(size: str) -> None:
    scenario = load_scenario("cold-adapters")
    floor_ms = 1000 * scenario.model.adapter_bytes(16) / scenario.device.link_bandwidth
    cold = simulate("cold-adapters", *shorter(size, 60))
    warm = simulate("cold-adapters", *shorter(size, 60), "clients.1.preload=true")
    added = cold.per_tenant["cold"].ttft_ms.p99 - warm.per_tenant["cold"].ttft_ms.p99
    assert floor_ms < cold.per_tenant["cold"].ttft_ms.p50 - warm.per_tenant["cold"].ttft_ms.p50, "they were cold"
    assert added <= max(5.0, 1.3 * floor_ms)
    assert cold.per_tenant["resident"].itl_ms.p99 <= 1.03 * warm.per_tenant["resident"].itl_ms.p99


@pytest.mark.parametrize(
    ("size", "filled"),
    [
        ("small", 0.88),  # in a short run the first filling counts for more
        pytest.param("full", 0.895, marks=pytest.mark.slow),
        pytest.param(
            "full",
            0.9,
            marks=[
                pytest.mark.slow,
                pytest.mark.xfail(strict=True, reason="0.898 since loads are claims, 0.901 before (decision 4)"),
            ],
        ),
    ],
)
def test_azure_conversations_fill_the_pool_and_are_rarely_preempted(size: str, filled: float) -> None:
    report = simulate("azure-conversation", *shorter(size, 60))
    assert report.pool_use >= filled
    assert report.preemption_rate <= 0.01


@sizes
def test_overload_serves_accepted_requests_in_time(size: str) -> None:
    """S-LoRA, MLSys 2024: 0.86 of the requests in time with early abort, 0.27 first come first served."""
    report = simulate("overload", *shorter(size, 40))
    assert report.in_deadline >= 0.9
    assert 0.1 * report.accepted < report.refused < 0.5 * report.accepted, "1.5 times the capacity, and no more refused"


@sizes
def test_adapters_over_the_pool_cost_no_more_than_their_bytes(size: str) -> None:
    """128 adapters of 160 pages although 31 fit, compared with the same load on 30 that fit."""
    overrides = ["clients.0.requests=256"] if size == "small" else []
    over = Simulation(load_scenario("adapters-over-pool", overrides))
    fits = simulate("adapters-over-pool", *overrides, "clients.0.adapters=30", "clients.0.tenants=30")
    report, loads = over.run(), sum(over.engine.store.num_loads.values())
    tokens = sum(tenant.prompt_tokens + tenant.output_tokens for tenant in report.per_tenant.values())
    rounds = report.accepted / 128
    assert report.refused == 0
    assert loads <= 1.2 * 128 * rounds
    link_seconds = loads * over.scenario.model.adapter_bytes(64) / over.scenario.device.link_bandwidth
    assert tokens / report.throughput_tokens_per_s <= tokens / (0.95 * fits.throughput_tokens_per_s) + link_seconds
    assert over.engine.residency.counters.claims_revoked == 0


def test_adapters_over_the_pool_are_served_though_loads_fail() -> None:
    report = simulate("adapters-over-pool", "clients.0.requests=256", "device.load_failures=0.2")
    assert report.accepted + report.refused == 256
    assert report.accepted > 150


@sizes
def test_slow_storage_is_not_noticed_by_tenants_whose_adapters_are_resident(size: str) -> None:
    slow = simulate("slow-storage", *shorter(size, 20))
    fast = simulate("slow-storage", *shorter(size, 20), "device.load_latency_s=[0,0]")
    for tenant in (f"resident-{i}" for i in range(4)):
        with_slow, with_fast = slow.per_tenant[tenant].itl_ms.p99, fast.per_tenant[tenant].itl_ms.p99
        assert with_slow is not None
        assert with_fast is not None
        assert with_slow <= 1.03 * with_fast


@pytest.mark.parametrize(
    "seconds",
    [60, pytest.param(120, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.slow)],
)
def test_batch_raises_the_interactive_first_token_by_at_most_a_tenth(seconds: int) -> None:
    """Twice the lines that the window of batches lets through; what is left is rows that a step shares."""
    length = f"duration_s={seconds}"
    alone = simulate("batch-beside-chat", length, "clients.1.rate=0.0000001").per_tenant["chat"]
    beside = simulate("batch-beside-chat", length).per_tenant["chat"]
    assert alone.ttft_ms.p99 is not None
    assert beside.ttft_ms.p99 is not None
    assert beside.ttft_ms.p99 <= 1.1 * alone.ttft_ms.p99


@sizes
def test_shadows_delay_the_first_token_of_the_shadowed_requests_by_little(size: str) -> None:
    """The rise is a shadow's row in the step of a first token, because its prompt comes last; there is none between
    tokens."""
    alone = simulate("shadow-beside-chat", *shorter(size, 120), "clients.1.rate=0.001").per_tenant["chat"]
    both = simulate("shadow-beside-chat", *shorter(size, 120)).per_tenant
    assert both["shadow"].accepted > 100
    for before, after, most in (
        (alone.ttft_ms.p50, both["chat"].ttft_ms.p50, 1.03),
        (alone.ttft_ms.p99, both["chat"].ttft_ms.p99, 1.03),
        (alone.itl_ms.p99, both["chat"].itl_ms.p99, 1.001),
    ):
        assert before is not None
        assert after is not None
        assert after <= most * before
