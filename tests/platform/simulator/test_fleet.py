"""Fleets, exactly repeatable: loads, spreading, shares and losses. Small versions run always."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from loramux.engine.messages import AdapterRef, Request, ServiceClass
from loramux.simulator.scenario import ScenarioError, load_scenario, make_scenario
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import Arrivals, TrafficSource

small = pytest.param("small", id="small")
full = pytest.param("full", id="full", marks=pytest.mark.slow)
sizes = pytest.mark.parametrize("size", [small, full])


def simulate(name: str, *overrides: str) -> Simulation:
    simulation = Simulation(load_scenario(name, overrides))
    simulation.run()
    return simulation


def engines_of(simulation: Simulation, tenant: str, begin: float, end: float) -> dict[int, int]:
    """Requests of `tenant` that arrived in an interval, by the engine that they were sent to."""
    arrivals = simulation.arrivals
    theirs = np.array([arrivals.sources[source].tenant == tenant for source in arrivals.source])
    chosen = np.array(simulation.sent_to)[theirs & (arrivals.at >= begin) & (arrivals.at < end)]
    return dict(zip(*np.unique(chosen, return_counts=True), strict=True))


def tokens_per_s(simulation: Simulation, begin: float, end: float) -> float:
    """Generated tokens a second of all tenants."""
    moments = simulation.timeline.moments
    first, last = (next(moment for moment in moments if moment.seconds >= time) for time in (begin, end))
    return (sum(last.tokens.values()) - sum(first.tokens.values())) / (last.seconds - first.seconds)


def test_the_same_fleet_gives_the_same_report() -> None:
    reports = [msgspec.json.encode(simulate("fleet-hot", "duration_s=12", "fronts=2").report()) for _ in range(2)]
    assert reports[0] == reports[1]
    assert json.loads(reports[0])["adapter_loads"] > 0


@sizes
def test_adapters_are_loaded_a_third_as_often_as_by_random_routing(size: str) -> None:
    """And the first token comes no later than by least-loaded routing. A short run has more first loads in it."""
    overrides = ["duration_s=12"] if size == "small" else []
    routed, at_random, balanced = (
        simulate("fleet-zipf", *overrides, f"routing={kind}") for kind in ("router", "random", "least-loaded")
    )
    distinct = len(set(routed.arrivals.source.tolist()))
    assert routed.num_loads <= (0.65 if size == "small" else 1 / 3) * at_random.num_loads
    assert routed.num_loads <= 1.35 * distinct, "hardly any adapter is on two engines"
    assert routed.report().ttft_ms.p99 <= balanced.report().ttft_ms.p99


@pytest.mark.slow
def test_moves_of_adapters_do_not_delay_first_tokens() -> None:
    """Moved adapters are loaded at their new engines; requests wait for a load only if the other engine is later."""
    routed, by_hash = (simulate("fleet-ranks", f"routing={kind}").report() for kind in ("router", "residency"))
    assert routed.moves > 10
    assert routed.ttft_ms.p99 <= 1.2 * by_hash.ttft_ms.p99


@pytest.mark.slow
def test_shared_prompts_are_computed_at_most_six_tenths_as_often_as_by_the_router_without_reports() -> None:
    routed, by_hash = (simulate("fleet-prefix", f"routing={kind}").report() for kind in ("router", "residency"))
    assert routed.prompt_tokens_computed <= 0.6 * by_hash.prompt_tokens_computed
    assert routed.ttft_ms.p99 <= by_hash.ttft_ms.p99


def test_hot_adapter_spreads_within_ten_seconds_and_is_back_within_a_minute() -> None:
    """It takes 80% of the traffic from 20 s to 50 s."""
    simulation = simulate("fleet-hot")
    assert len(engines_of(simulation, "hot", 0, 20)) == 1
    spread = engines_of(simulation, "hot", 28, 50)
    assert len(spread) == 8
    at = simulation.arrivals.at
    requests = np.bincount(np.array(simulation.sent_to)[(at >= 28) & (at < 50)], minlength=8)
    assert max(requests) <= 1.3 * min(requests), "it takes what the homes of other adapters leave"
    assert engines_of(simulation, "hot", 110, 140).keys() == engines_of(simulation, "hot", 0, 20).keys()
    tenants = simulation.report().per_tenant
    assert tenants["hot"].ttft_ms.p99 <= 100.0


def test_two_tenants_share_a_fleet_that_one_of_them_floods() -> None:
    """Both want more than half. The flooder has 40 adapters, the other one."""
    simulation = Simulation(load_scenario("fleet-fairness"))
    served = {}
    while simulation.now < 90:
        assert simulation.advance()
        if "half" not in served and simulation.now >= 45:
            served["half"] = {name: tally.output_tokens for name, tally in simulation.meter.tallies.items()}
    end = {name: tally.output_tokens for name, tally in simulation.meter.tallies.items()}
    modest, flood = (end[name] - served["half"][name] for name in ("modest", "flood"))
    assert modest == pytest.approx(flood, rel=0.05)
    report = simulation.report()
    assert 0.0 < report.service_gap_max <= report.service_gap_bound


def test_tenant_that_asks_for_less_than_its_share_is_not_held_up_by_a_flood() -> None:
    simulation = Simulation(load_scenario("fleet-fairness", ["clients.0.rate=4", "duration_s=60"]))
    while simulation.now < 60:
        assert simulation.advance()
    modest = simulation.meter.tallies["modest"]
    assert modest.output_tokens >= 0.8 * 4 * 256 * (60 - 11), "an answer takes eleven seconds"
    assert modest.ttft.milliseconds(0.5) <= 2000
    assert simulation.meter.tallies["flood"].ttft.milliseconds(0.5) >= 15_000


def test_lost_engine_costs_its_share_and_no_request() -> None:
    loss = '[{"engine": "engine-3", "at_s": 10, "back_s": 20}]'
    simulation = Simulation(load_scenario("fleet-loss", ["duration_s=30", f"losses={loss}"]))
    asked = simulation.arrivals
    report = simulation.run()
    assert report.accepted == len(asked)
    assert report.per_tenant["tenant"].output_tokens == asked.output_tokens.sum(), "every answer is whole"
    whole, without, again = (tokens_per_s(simulation, *times) for times in ((5, 9), (11, 19.5), (22, 29)))
    assert 0.98 * 7 / 8 <= without / whole <= 0.9
    assert again == pytest.approx(whole, rel=0.02)


def test_all_engines_but_one_may_be_lost() -> None:
    losses = json.dumps([{"engine": f"engine-{n}", "at_s": 2 + 0.1 * n, "back_s": 4} for n in range(7)])
    simulation = simulate("fleet-loss", "duration_s=5", "clients.0.rate=40", f"losses={losses}")
    assert simulation.report().accepted == len(simulation.arrivals)
    assert set(simulation.sent_to) == set(range(8))


@dataclass(frozen=True)
class GuessedPrompts(Arrivals):
    """A victim's requests with one prompt, then an attacker's with its guess; all else is equal."""

    victims_token: int = 7

    def requests(self) -> Iterator[tuple[float, TrafficSource, int, Request]]:
        """Yield the requests."""
        for at, source, output, request in super().requests():
            token = self.victims_token if source.tenant == "victim" else 7
            yield at, source, output, msgspec.structs.replace(request, prompt_token_ids=[token] * 2000)


@pytest.mark.parametrize(("engines", "adapter"), [(1, None), (1, "a"), (4, "a")])
def test_tenant_cannot_time_whether_another_tenant_has_asked_its_prompt(engines: int, adapter: str | None) -> None:
    """All times and engines are exactly equal. The attacker's own prompt is found in the cache."""
    ref = AdapterRef(adapter, "") if adapter else None
    sources = [
        TrafficSource(tenant, ref, 16, ServiceClass.STANDARD, 1.0, None, preload=False)
        for tenant in ("victim", "attacker")
    ]
    columns = np.array([[0] * 4 + [1] * 4, [2000] * 8, [8] * 8, [8] * 8])
    scenario = load_scenario("fleet-prefix", [f"engines={engines}", "fronts=1", "warmup_s=0"])
    seen = []
    for token in (7, 8):
        arrivals = GuessedPrompts(sources, columns[0], np.arange(8) * 2.0, *columns[1:], victims_token=token)
        simulation = Simulation(scenario, arrivals)
        report = simulation.run()
        seen.append((msgspec.json.encode(report), simulation.sent_to, simulation.meter.tallies["attacker"].ttft.counts))
        assert report.prompt_tokens_computed == 2 * (2000 + 3 * 16)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_sixty_four_engines_and_ten_thousand_adapters() -> None:
    report = simulate("fleet-large").report()
    assert report.refused == 0
    assert report.ttft_ms.p99 <= 1000.0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"routing": "sticky"}, "router, residency, random, least-loaded"),
        ({"losses": [{"engine": "engine-9", "at_s": 1, "back_s": 2}]}, "engine-0 to engine-1"),
        ({"slowness": {"e0": 2.0}}, "engine-0 to engine-1"),
        ({"order": "fifo"}, "engines = 1"),
    ],
)
def test_wrong_fleet_is_named_with_what_is_right(field: dict[str, object], message: str) -> None:
    client = {
        "tenant": "t",
        "rate": 1,
        "prompt_tokens": {"distribution": "constant", "tokens": 8},
        "output_tokens": {"distribution": "constant", "tokens": 8},
    }
    scenario = {"duration_s": 1, "device": "h100", "model": "llama-3.1-8b", "engines": 2, "clients": [client]}
    with pytest.raises(ScenarioError, match=message):
        make_scenario(scenario | field, "here")
