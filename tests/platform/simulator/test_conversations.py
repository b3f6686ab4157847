"""Conversations of the base and several adapters over one context: which prompt tokens are computed, and in which order
the requests come.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.simulator.report import SimulationReport
from loramux.simulator.scenario import ScenarioError, load_scenario, make_scenario
from loramux.simulator.simulation import Simulation
from loramux.simulator.traffic import read_workload

CONTEXT, ANSWER, ADDED, EVALUATION, INVOCATION, BLOCK = 1600, 17, 100, 8, 4, 16
TURNS, ADAPTERS = 2, 3
FIRST = CONTEXT + ANSWER
"""Tokens of the context after the base's first answer."""
SECOND = FIRST + ADAPTERS * EVALUATION + ADDED
"""Tokens of the second turn's prompt."""
EVALUATED = (FIRST + INVOCATION, SECOND + ANSWER + INVOCATION)
"""Tokens of an evaluation's prompt, by turn."""


def tokens(count: int) -> dict[str, object]:
    return {"distribution": "constant", "tokens": count}


def conversation(**fields: object) -> dict[str, object]:
    lengths = {"turn_tokens": tokens(ADDED), "evaluation_tokens": tokens(EVALUATION)}
    return {"turns": TURNS, "invocation_tokens": INVOCATION, **lengths, **fields}


def client(**fields: object) -> dict[str, object]:
    return {
        "tenant": "agent",
        "rate": 1,
        "requests": 4,
        "adapters": ADAPTERS,
        "prompt_tokens": tokens(CONTEXT),
        "output_tokens": tokens(ANSWER),
        "conversation": conversation(),
        **fields,
    }


def simulate(*clients: dict[str, object], prefix_cache: bool = True, **fields: object) -> SimulationReport:
    scenario = {"duration_s": 60, "device": "h100", "model": "llama-3.1-8b", "policy": {"prefix_cache": prefix_cache}}
    return Simulation(make_scenario(scenario | fields | {"clients": clients}, "here")).run()


def computed(report: SimulationReport) -> dict[str, int]:
    """Prompt tokens that each stage computed."""
    return {name: stage.prompt_tokens - stage.cached_tokens for name, stage in report.per_stage.items()}


def beyond(prompt: int, known: int) -> int:
    """Tokens of a prompt that are not in full pages of its `known` first tokens."""
    return prompt - known // BLOCK * BLOCK


def test_activated_adapters_compute_only_what_the_base_has_not_computed() -> None:
    """The base never computes the last token of its answer. An evaluation's KV belongs to the adapter alone."""
    report = simulate(client())
    shared = [beyond(EVALUATED[0], FIRST - 1), beyond(EVALUATED[1], SECOND + ANSWER - 1)]
    # The second adapter of a turn also finds the page that the first one has filled with the context's last token.
    again = [beyond(EVALUATED[0], FIRST), beyond(EVALUATED[1], SECOND + ANSWER)]
    assert computed(report) == {
        "first turn": 4 * CONTEXT,
        "evaluation": 4 * sum(one + (ADAPTERS - 1) * more for one, more in zip(shared, again, strict=True)),
        "later turn": 4 * beyond(SECOND, FIRST),
    }
    assert report.prompt_tokens_computed == sum(computed(report).values())


def test_plain_adapters_compute_the_context_once_each() -> None:
    """In the second turn, each finds its KV of the first turn's context, which ends before the invocation."""
    report = simulate(client(conversation=conversation(activated=False)))
    assert computed(report) == {
        "first turn": 4 * CONTEXT,
        "evaluation": 4 * ADAPTERS * (EVALUATED[0] + beyond(EVALUATED[1], FIRST)),
        "later turn": 4 * beyond(SECOND, FIRST - 1),
    }


@pytest.mark.parametrize("activated", [True, False])
def test_without_the_cache_every_stage_computes_its_whole_prompt(*, activated: bool) -> None:
    report = simulate(client(conversation=conversation(activated=activated)), prefix_cache=False)
    assert computed(report) == {
        "first turn": 4 * CONTEXT,
        "evaluation": 4 * ADAPTERS * sum(EVALUATED),
        "later turn": 4 * SECOND,
    }


def test_stages_come_one_after_the_other_and_every_token_is_counted() -> None:
    """A conversation takes as long as all of its first tokens and intervals, because no request waits for another."""
    report = simulate(client(requests=1, preload=True))
    tenant = report.per_tenant["agent"]
    assert tenant.accepted == TURNS * (1 + ADAPTERS)
    assert tenant.output_tokens == TURNS * (ANSWER + ADAPTERS * EVALUATION)
    stages = report.per_stage
    assert {name: stage.requests for name, stage in stages.items()} == {
        "first turn": 1,
        "evaluation": TURNS * ADAPTERS,
        "later turn": 1,
    }
    assert report.conversation_ms.p50 == report.conversation_ms.p99
    steps = tenant.output_tokens - tenant.accepted
    assert report.conversation_ms.p50 == pytest.approx(
        stages["first turn"].ttft_ms.p50
        + stages["later turn"].ttft_ms.p50
        + TURNS * ADAPTERS * stages["evaluation"].ttft_ms.p50
        + steps * tenant.itl_ms.p50,
        rel=0.02,
    )


def test_router_of_a_fleet_sends_evaluations_to_the_context() -> None:
    """The adapters' own placement would compute most contexts again."""
    report = simulate(client(requests=20, tenants=5), engines=4, fronts=2)
    assert report.accepted == 20 * TURNS * (1 + ADAPTERS)
    found = report.per_stage["evaluation"]
    assert found.cached_tokens >= 0.9 * found.prompt_tokens


def test_other_clients_requests_are_no_stages() -> None:
    chat = {"tenant": "chat", "rate": 5, "prompt_tokens": tokens(64), "output_tokens": tokens(4)}
    report = simulate(client(), chat | {"requests": 40})
    assert report.per_tenant["chat"].accepted == 40
    assert sum(stage.requests for stage in report.per_stage.values()) == 4 * TURNS * (1 + ADAPTERS)
    assert simulate(chat).per_stage == {}


def test_refused_request_ends_its_conversation() -> None:
    report = simulate(client(), model={"preset": "llama-3.1-8b", "max_model_len": SECOND})
    assert (report.accepted, report.refused) == (4 * (1 + ADAPTERS), 4)
    assert report.conversation_ms.p50 is None


def test_same_conversations_are_drawn_whatever_the_kind_of_adapter() -> None:
    plain, activated = (
        Simulation(
            load_scenario("alora-pipelines", ["duration_s=30", f"clients.0.conversation.activated={kind}"])
        ).run()
        for kind in ("false", "true")
    )
    assert plain.accepted == activated.accepted > 0
    assert {name: stage.prompt_tokens for name, stage in plain.per_stage.items()} == {
        name: stage.prompt_tokens for name, stage in activated.per_stage.items()
    }
    assert 10 * computed(activated)["evaluation"] < computed(plain)["evaluation"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapters": 0}, "set adapters to 1 or more"),
        ({"lifetime_s": 5}, "leave out lifetime_s"),
        ({"conversation": conversation(turns=65)}, "<= 64"),
    ],
)
def test_wrong_conversation_is_refused_with_what_is_right(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(client(**fields))


def test_workload_of_a_plan_with_conversations_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "pipelines.toml"
    path.write_text(
        "duration_s = 9\n[[clients]]\ntenant = 'a'\nrate = 1\nadapters = 1\n"
        "prompt_tokens = { distribution = 'constant', tokens = 9 }\n"
        "output_tokens = { distribution = 'constant', tokens = 9 }\n[clients.conversation]\nturns = 1\n"
        "turn_tokens = { distribution = 'constant', tokens = 9 }\n"
        "evaluation_tokens = { distribution = 'constant', tokens = 9 }\n"
    )
    with pytest.raises(ScenarioError, match=r"clients\.0\.conversation .*loramux simulate"):
        read_workload(path)
