"""Workloads: the same seed gives the same requests, and the distributions are those they are named after."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from arrivals import PATTERNS, choose_adapters
from specs import ADAPTERS, MAX_MODEL_LEN, RANKS, VOCAB_SIZE, rank_of
from workloads import SHARES, SUITES, Item, comparison, dump, load, trace

from loramux.simulator.scenario import LogNormal, Uniform, arrival_times

ALL = [f"{suite}-{share}" for suite in SUITES for share in SHARES]


@pytest.mark.parametrize("name", ALL)
def test_a_workload_is_the_same_every_time_and_fits_the_models(name: str) -> None:
    items = comparison(name)
    assert dump(items) == dump(comparison(name))
    assert len(items) == int(name[1:3])
    assert len({item.id for item in items}) == len(items)
    for item in items:
        assert 16 <= len(item.prompt_token_ids) <= 512
        assert 8 <= item.max_tokens <= 256
        assert len(item.prompt_token_ids) + item.max_tokens <= MAX_MODEL_LEN
        assert all(3 <= token < VOCAB_SIZE for token in item.prompt_token_ids)


def test_workloads_of_a_suite_differ_in_the_adapters_alone() -> None:
    def without_adapters(name: str) -> list[tuple[list[int], int, float]]:
        return [(item.prompt_token_ids, item.max_tokens, item.arrival_s) for item in comparison(name)]

    for suite in SUITES:
        assert len({repr(without_adapters(f"{suite}-{share}")) for share in SHARES}) == 1
    assert without_adapters("w24-base") != without_adapters("w64-base")[:24]


def test_who_is_asked() -> None:
    asked = {name: Counter(item.adapter for item in comparison(name)) for name in ALL}
    assert set(asked["w64-base"]) == {None}
    assert set(asked["w64-one"]) == {"ad03"}
    assert set(asked["w64-mix"]) == {None, *ADAPTERS}
    assert asked["w64-zipf"].most_common(1)[0][0] == "ad00"
    assert rank_of(ADAPTERS.index("ad03")) == max(RANKS)


def test_an_unknown_workload_is_named_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ValueError, match=r"'w64-mixed' does not exist; there are w64-base"):
        comparison("w64-mixed")


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(dump(comparison("w24-mix")))
    assert load(path) == comparison("w24-mix")


@pytest.mark.parametrize("cv", [1.0, 2.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = arrival_times(np.random.default_rng(1), 200_000, rate=2.5, cv=cv)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 2.5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_lengths_follow_their_distribution() -> None:
    rng = np.random.default_rng(2)
    uniform = Uniform(8, 512).draw(rng, 100_000)
    assert (uniform.min(), uniform.max()) == (8, 512)
    assert uniform.mean() == pytest.approx(260, rel=0.02)
    log_normal = LogNormal(5.02, 0.86, high=1 << 30).draw(rng, 100_000)
    assert np.median(log_normal) == pytest.approx(np.exp(5.02), rel=0.02)
    assert np.log(log_normal).std() == pytest.approx(0.86, rel=0.02)
    assert LogNormal(5.02, 3.0, 16, 64).draw(rng, 1000).min() == 16
    assert LogNormal(5.02, 3.0, 16, 64).draw(rng, 1000).max() == 64


def test_popularity() -> None:
    names = ["a", "b", "c", "d"]

    def shares(popularity: str, count: int = 40_000) -> Counter[str | None]:
        return Counter(choose_adapters(np.random.default_rng(3), count, popularity, names))

    assert shares("base") == {None: 40_000}
    assert shares("only:x") == {"x": 40_000}
    assert shares("identical") == {"a": 40_000}
    assert shares("distinct", 10) == {"a": 3, "b": 3, "c": 2, "d": 2}
    assert [shares("uniform")[n] for n in names] == pytest.approx([10_000] * 4, rel=0.05)
    zipf = shares("zipf:1.5")
    assert zipf["a"] / zipf["b"] == pytest.approx(2**1.5, rel=0.05)
    assert zipf["b"] / zipf["d"] == pytest.approx(2**1.5, rel=0.05)
    with pytest.raises(ValueError, match="'power' is none of"):
        shares("power")


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_makes_a_trace(name: str) -> None:
    items = trace(PATTERNS[name], 50, ["a", "b"], seed=4)
    assert items == trace(PATTERNS[name], 50, ["a", "b"], seed=4)
    assert items != trace(PATTERNS[name], 50, ["a", "b"], seed=5)
    assert [item.arrival_s for item in items] == sorted(item.arrival_s for item in items)


def test_the_command_writes_what_it_was_asked_for() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads.py"
    command = [sys.executable, str(script), "lmsys", "--requests", "30", "--adapters", "2", "--popularity", "distinct"]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    assert len(lines) == 30
    assert {json.loads(line)["adapter"] for line in lines} == {"ad00", "ad01"}
    assert Item(**json.loads(lines[0]))
