"""The load generator against a real server: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions_server import THINKING_SECONDS, TOKEN_SECONDS, Seen, answer, serving
from figures import Outcome
from loadgen import RETURN_TOKEN_IDS, Plan, Target, as_arrived, at_once, drive, in_waves
from workloads import Item, dump


@pytest.fixture
def server() -> Iterator[tuple[str, Seen]]:
    with serving() as running:
        yield running


def items(count: int, tokens: int = 5, adapter: str | None = None) -> list[Item]:
    return [Item(id=f"r{i}", prompt_token_ids=[i, 7], max_tokens=tokens, adapter=adapter) for i in range(count)]


def run(target: Target, plan: Plan) -> tuple[list[Outcome], float]:
    return asyncio.run(drive(target, plan))


def test_every_answer_comes_back_whole_and_to_its_own_request(server: tuple[str, Seen]) -> None:
    url, _ = server
    outcomes, wall_s = run(Target(url, extra_body=RETURN_TOKEN_IDS), at_once(items(12)))
    for i, outcome in enumerate(outcomes):
        assert outcome.id == f"r{i}"
        assert outcome.token_ids == [answer("base", [i, 7], k) for k in range(5)]
        assert (outcome.output_tokens, outcome.error) == (5, None)
        assert outcome.ttft_s is not None
        assert TOKEN_SECONDS <= outcome.ttft_s < outcome.total_s <= wall_s


def test_the_first_token_is_not_an_empty_first_chunk(server: tuple[str, Seen]) -> None:
    """The server sends a comment and an empty chunk at once, and the first token later."""
    outcomes, _ = run(Target(server[0], base_name="thinks-first"), at_once(items(1)))
    assert outcomes[0].ttft_s is not None
    assert outcomes[0].ttft_s >= THINKING_SECONDS


def test_the_body_asks_for_exactly_that_many_greedy_tokens(server: tuple[str, Seen]) -> None:
    url, seen = server
    run(Target(url, "sk-1", "base", "bench/{adapter}", {"seed": 3}), at_once(items(1, 3, "ad07")))
    assert seen.keys == {"Bearer sk-1"}
    assert seen.bodies == [
        {
            "model": "bench/ad07",
            "prompt": [0, 7],
            "max_tokens": 3,
            "min_tokens": 3,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": 3,
        }
    ]


def test_fields_of_an_adapter_are_only_in_its_own_requests() -> None:
    scale = {"lora": [{"id": 7, "scale": 1.0}]}
    target = Target("", adapter_bodies={"ad07": scale})
    plain, (own, other) = (
        target.body(items(1)[0]),
        (target.body(items(1, adapter=name)[0]) for name in ("ad07", "ad08")),
    )
    assert own == plain | {"model": "ad07"} | scale
    assert other == plain | {"model": "ad08"}


def test_names_are_mapped_for_each_request() -> None:
    assert [Target("", adapter_name="bench/{adapter}").model(a) for a in (None, "ad01")] == ["base", "bench/ad01"]
    assert [Target("", base_name="llama").model(a) for a in (None, "ad01")] == ["llama", "ad01"]


def test_everything_at_once_is_in_flight_together(server: tuple[str, Seen]) -> None:
    """The server answers none before it has all ten."""
    url, seen = server
    outcomes, _ = run(Target(url, base_name="all-ten"), at_once(items(10)))
    assert len(seen.ended) == 10
    assert all(o.error is None for o in outcomes)


def test_a_wave_waits_for_the_one_before(server: tuple[str, Seen]) -> None:
    url, seen = server
    outcomes, _ = run(Target(url), in_waves(items(7), 3))
    assert [seen.ended_when_began[i] for i in range(3, 7)] == [3, 3, 3, 6]
    assert all(seen.ended_when_began[i] < 3 for i in range(3))
    # All were due at the start, so the later waves' first tokens count the waiting.
    assert min(o.ttft_s or 0 for o in outcomes[3:6]) > max(o.total_s for o in outcomes[:3])
    assert (outcomes[6].ttft_s or 0) > max(o.total_s for o in outcomes[3:6])


def test_arrivals_are_followed_and_latency_counts_from_them(server: tuple[str, Seen]) -> None:
    url, _ = server
    late = [Item(id=f"r{i}", prompt_token_ids=[i], max_tokens=1, arrival_s=0.3 * i) for i in range(3)]
    outcomes, wall_s = run(Target(url), as_arrived(late, speed=2.0))
    assert wall_s >= 0.3
    assert all(o.total_s < wall_s for o in outcomes)


def test_a_refusal_is_an_outcome_and_the_others_go_on(server: tuple[str, Seen]) -> None:
    url, _ = server
    good, refused = items(2), Item(id="no", prompt_token_ids=[1], max_tokens=1, adapter="absent")
    outcomes, _ = run(Target(url), at_once([good[0], refused, good[1]]))
    assert [o.error for o in outcomes][::2] == [None, None]
    assert outcomes[1].error is not None
    assert outcomes[1].error.startswith("404: ")
    assert "model 'absent' does not exist" in outcomes[1].error
    assert outcomes[1].ttft_s is None


@pytest.mark.parametrize(
    ("model", "error"), [("breaks", "the engine ended"), ("forgets-usage", "the stream ended without usage")]
)
def test_a_stream_that_ends_badly_is_a_failure(server: tuple[str, Seen], model: str, error: str) -> None:
    outcomes, _ = run(Target(server[0], base_name=model), at_once(items(1)))
    assert outcomes[0].error is not None
    assert error in outcomes[0].error


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    with serving() as (url, _):
        pass
    outcomes, _ = run(Target(url), at_once(items(2)))
    assert all(o.error and o.error.startswith("ConnectError") for o in outcomes)


@pytest.mark.parametrize("pace", [[], ["--waves", "2"], ["--speed", "10"]])
def test_the_command_prints_one_json_line(server: tuple[str, Seen], tmp_path: Path, pace: list[str]) -> None:
    url, seen = server
    workload = tmp_path / "w.jsonl"
    workload.write_bytes(dump(items(4, adapter="ad01")))
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "loadgen.py"
    names = ["--adapter-name", "t/{adapter}", "--api-key", "k"]
    command = [sys.executable, str(script), url, str(workload), *names, *pace]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (4, 0, 20)
    assert "output_tokens_per_s" in done.stderr
    assert {body["model"] for body in seen.bodies} == {"t/ad01"}
