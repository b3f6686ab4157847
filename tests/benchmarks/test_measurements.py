"""Arithmetic of every figure: percentiles, floors, pairs and spreads."""

from __future__ import annotations

import math

import msgspec
import pytest
from figures import Figures, Outcome, percentile, same_answers, summarise
from measurements import (
    Case,
    Counters,
    Measurement,
    Resources,
    Spread,
    context_tokens,
    floor_of,
    paired,
    spread,
)
from specs import MODELS
from workloads import Item


def item(number: int, prompt: int, output: int) -> Item:
    return Item(id=f"r{number}", prompt_token_ids=[5] * prompt, max_tokens=output)


def outcome(
    number: int, ttft: float, total: float, tokens: int, ids: tuple[int, ...] = (), error: str | None = None
) -> Outcome:
    return Outcome(id=f"r{number}", ttft_s=ttft, total_s=total, output_tokens=tokens, token_ids=list(ids), error=error)


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.5
    assert percentile([float(i) for i in range(101)], 0.99) == pytest.approx(99.0)
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_a_summary_counts_what_was_served_and_names_what_was_not() -> None:
    items = [item(0, 10, 4), item(1, 20, 6), item(2, 30, 8)]
    outcomes = [outcome(0, 0.1, 1.0, 4), outcome(1, 0.3, 2.0, 5), outcome(2, 9.0, 9.0, 0, error="503: full")]
    figures = summarise(items, outcomes, wall_s=3.0)
    assert figures == Figures(
        requests=3,
        failed=1,
        wrong_length=1,
        wall_s=3.0,
        input_tokens=60,
        output_tokens=9,
        output_tokens_per_s=3.0,
        ttft_p50_s=pytest.approx(0.2),
        ttft_p99_s=pytest.approx(0.298),
        total_p50_s=pytest.approx(1.5),
        total_p99_s=pytest.approx(1.99),
        first_error="503: full",
    )


def test_a_summary_of_nothing_served_has_no_latencies() -> None:
    figures = summarise([item(0, 1, 1)], [outcome(0, 0.0, 1.0, 0, error="gone")], 1.0)
    assert (figures.failed, figures.output_tokens_per_s, figures.ttft_p50_s) == (1, 0.0, None)


def test_same_answers_compares_by_id() -> None:
    reference = [outcome(0, 0, 0, 2, (1, 2)), outcome(1, 0, 0, 1, (3,)), outcome(2, 0, 0, 1, (4,))]
    answers = [outcome(2, 0, 0, 1, (4,), error="cut"), outcome(1, 0, 0, 1, (5,)), outcome(0, 0, 0, 2, (1, 2))]
    assert same_answers(reference, answers) == 1
    assert same_answers(reference, reference) == 3


def test_context_tokens_adds_up_what_every_generated_token_sees() -> None:
    items = [item(0, 10, 3), item(1, 100, 1)]
    assert context_tokens(items) == (10 + 11 + 12) + 100


def test_kv_bytes_of_a_token_follow_the_shape() -> None:
    # two (K and V) x 2 bytes x 24 layers x 4 heads x 64
    assert MODELS["0.5b"].kv_bytes_per_token("bfloat16") == 24_576
    assert MODELS["0.5b"].kv_bytes_per_token("float32") == 49_152


def test_the_floor_is_bytes_over_bandwidth() -> None:
    counters = Counters(steps=10, adapter_bytes_read=400, weight_bytes=90)
    floor = floor_of(counters, kv_bytes=100, wall_s=7.0, bandwidth_bytes_per_s=1000.0)
    assert floor.omega == pytest.approx(400 / (10 * 90 + 100))
    assert floor.share == pytest.approx((10 * 90 + 100 + 400) / 1000 / 7)
    assert floor.steps == 10
    assert floor.arithmetic is None
    assert floor_of(counters, 100, 7.0, 1000.0, multiplying_s=3.5).arithmetic == 0.5


def test_operations_of_a_model_count_each_weight_once_a_token() -> None:
    """The 0.5B model's linears hold 448 million weights, its head 21 million."""
    spec = MODELS["0.5b"]
    assert spec.operations(1, 0) == 2 * 448_266_240
    assert spec.operations(0, 1) == 2 * (448_266_240 + 16_384 * 1280)


# ---- ratios


def measurement(rep: int, tokens_per_s: float, peak: int = 1) -> Measurement:
    figures = msgspec.structs.replace(summarise([item(0, 1, 1)], [], 1.0), output_tokens_per_s=tokens_per_s)
    return Measurement(
        case=Case(system="s", model="m", dtype="d", workload="w", rep=rep),
        figures=figures,
        resources=Resources(peak_pss_bytes=peak, own_cores=1.0, other_cores=0.0),
        start_s=0.0,
    )


def speed(m: Measurement) -> float:
    return m.figures.output_tokens_per_s


def test_ratios_pair_repetitions_and_not_medians() -> None:
    over = [measurement(0, 10), measurement(1, 30), measurement(2, 20)]
    under = [measurement(2, 2), measurement(0, 10), measurement(1, 1)]
    ratio = paired(over, under, speed)
    assert ratio == Spread((1.0, 30.0, 10.0))
    assert ratio.median == 10.0
    assert str(ratio) == "10.00 (1.00 to 30.00)"


def test_a_repetition_without_its_pair_is_left_out() -> None:
    assert paired([measurement(0, 4), measurement(1, 6)], [measurement(1, 2)], speed) == Spread((3.0,))
    assert paired([measurement(0, 4)], [measurement(1, 2)], speed) is None
    assert paired([measurement(0, 4)], [measurement(0, 0)], speed) is None
    assert paired([], [], speed) is None


def test_a_spread_of_one_is_one_number() -> None:
    only = spread([measurement(0, 1.234)], speed)
    assert only is not None
    assert str(only) == "1.23"
    assert spread([measurement(0, 1.0)], lambda _: None) is None
    assert math.isclose(Spread((1.0, 2.0)).median, 1.5)
