"""Scenarios are checked data: what is shipped loads, any value can be changed, and mistakes are named."""

from __future__ import annotations

import numpy as np
import pytest

from loramux.simulator.scenario import (
    Constant,
    LogNormal,
    Scenario,
    ScenarioError,
    Uniform,
    arrival_times,
    choose,
    load_scenario,
    make_scenario,
    scenario_names,
    with_pauses,
)
from loramux.simulator.traffic import draw_arrivals

REQUIRED = {
    "fairness-two-clients",
    "fairness-flood",
    "adapters-5",
    "adapters-2000",
    "active-8",
    "active-16",
    "azure-conversation",
    "azure-code",
    "overload",
}


def test_every_promised_scenario_is_shipped_and_valid() -> None:
    names = scenario_names()
    assert set(names) >= REQUIRED
    for name in names:
        assert load_scenario(name).description


def test_any_value_can_be_changed() -> None:
    scenario = load_scenario(
        "fairness-two-clients",
        [
            "pool_tokens=1000000",
            "clients.1.rate=3.5",
            "clients.0.prompt_tokens.tokens=7",
            "device.link_bandwidth=1e9",
            "model.preset=llama-3.1-8b",
            "order=fifo",
            "policy.max_service_lead=5",
        ],
    )
    assert scenario.num_pages == 62_500
    assert scenario.clients[1].rate == 3.5
    assert scenario.clients[0].prompt_tokens == Constant(7)
    assert scenario.device.link_bandwidth == 1e9
    assert scenario.device.memory_bandwidth == 600e9
    assert scenario.model.kv_bytes_per_token == 131_072
    assert (scenario.order, scenario.policy.max_service_lead) == ("fifo", 5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pool_tokens", "no '='"),
        ("pool_tokens=0", ">= 1"),
        ("pool_tokens=many", "pool_tokens"),
        ("pool_tokns=1", "pool_tokns"),
        ("clients.2.rate=1", "0 to 1"),
        ("clients.0.rat=1", "rat"),
        ("clients.0.rate=-1", "rate"),
        ("duration_s.x=1", "no fields"),
        ("device.preset=h900", "h100"),
        ("policy.max_service_led=1", "max_service_lead"),
        ("order=lifo", "fifo"),
        ("clients.0.popularity=zapf", None),
    ],
)
def test_a_wrong_override_is_refused_by_name(override: str, words: str | None) -> None:
    if words is None:
        scenario = load_scenario("adapters-5", [override])
        with pytest.raises(ScenarioError, match="popularity 'zapf'"):
            draw_arrivals(scenario.clients, scenario.duration_s, 0)
        return
    with pytest.raises(ScenarioError, match=words):
        load_scenario("fairness-two-clients", [override])


def test_unknown_scenario_error_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="fairness-flood"):
        load_scenario("fairness-food")


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ScenarioError, match="does not fit"):
        load_scenario("active-8", ["model=llama-3.1-70b", "pool_tokens=null"])


def test_gaps_have_the_mean_and_variation_that_were_asked_for() -> None:
    gaps = np.diff(arrival_times(np.random.default_rng(1), 200_000, rate=4.0, cv=2.0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.02)
    assert np.diff(arrival_times(np.random.default_rng(1), 10, rate=4.0, cv=0.0)) == pytest.approx(0.25)


def test_pauses_move_arrivals_after_the_silence() -> None:
    assert with_pauses(np.array([0.0, 59.0, 61.0, 121.0]), 60, 60).tolist() == [0.0, 59.0, 121.0, 241.0]


def test_lengths_and_popularity_follow_their_distributions() -> None:
    rng = np.random.default_rng(2)
    assert np.log(LogNormal(5.0, 0.5).draw(rng, 100_000)).mean() == pytest.approx(5.0, abs=0.01)
    assert set(Uniform(3, 5).draw(rng, 100).tolist()) == {3, 4, 5}
    shares = np.bincount(choose(rng, 300_000, "zipf:1.0", 100)) / 300_000
    assert shares[0] / shares[9] == pytest.approx(10, rel=0.1)
    assert choose(rng, 5, "distinct", 3).tolist() == [0, 1, 2, 0, 1]


def test_one_client_more_changes_no_other() -> None:
    one = load_scenario("adapters-5", ["duration_s=20"])
    two = Scenario(**{f: getattr(one, f) for f in one.__struct_fields__} | {"clients": one.clients * 2})
    alone = draw_arrivals(one.clients, 20, 0)
    both = draw_arrivals(two.clients, 20, 0)
    first = both.only(both.source < len(one.clients[0].ranks) * 5)
    assert first.at.tolist() == alone.at.tolist()
    assert first.output_tokens.tolist() == alone.output_tokens.tolist()


def test_engines_share_all_requests_evenly_and_keep_rare_adapters_together() -> None:
    traffic = load_scenario("adapters-2000", ["duration_s=200"])
    arrivals = draw_arrivals(traffic.clients, traffic.duration_s, 0)
    parts = [arrivals.on_engine(engine, 4) for engine in range(4)]
    assert sum(map(len, parts)) == len(arrivals)
    assert max(map(len, parts)) - min(map(len, parts)) <= len(arrivals) * 0.02
    homes = [set(part.source.tolist()) for part in parts]
    assert sum(map(len, homes)) <= 2000 + 4


def test_a_scenario_needs_clients() -> None:
    with pytest.raises(ScenarioError, match=r"here: .*clients"):
        make_scenario({"clients": []}, "here")
