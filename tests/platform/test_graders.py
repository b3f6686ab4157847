"""Graders on right, wrong and hostile answers, and the statistics of comparisons by simulation."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from loramux.releases.graders import (
    Contains,
    Exact,
    Grader,
    InvalidGrader,
    Label,
    Number,
    Pattern,
    Schema,
    f1,
    grade_with,
)
from loramux.releases.statistics import drop_found, mean_interval, paired_difference, student_t

PERSON = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("grader", "answer", "expected", "score"),
    [
        (Exact(), " yes\n", "yes", 1),
        (Exact(), "Yes", "yes", 0),
        (Exact(ignore_case=True), "Yes", "yes", 1),
        (Contains(), "It is Paris.", "Paris", 1),
        (Contains(), "It is Lyon.", "Paris", 0),
        (Pattern(r"\d{4}"), "in 1999", None, 1),
        (Pattern(), "in 1999", r"^\d", 0),
        (Pattern(), "x", "(", 0),
        (Schema(PERSON), '{"name": "Ada"}', None, 1),
        (Schema(PERSON), '{"name": 1}', None, 0),
        (Schema(PERSON), "Ada", None, 0),
        (Schema({"$ref": "#/absent"}), "1", None, 0),
        (Schema(PERSON), "[" * 100_000, None, 0),
        (Number(), "so 3 + 4 = 7", 7, 1),
        (Number(), "1,234.5", "1234.5", 1),
        (Number(0.1), "about 7.05", 7, 1),
        (Number(0.01, relative=True), "102", 100, 0),
        (Number(), "none", 7, 0),
        (Label(), "'Spam'.", "spam", 1),
    ],
)
def test_grader_scores_the_answer(grader: Grader, answer: str, expected: Any, score: float) -> None:
    assert grade_with(grader)(answer, expected) == score


def test_grader_of_a_catastrophic_pattern_ends_at_once() -> None:
    began = time.process_time()
    assert grade_with(Pattern(r"^(a|a)*$"))("a" * 40 + "b", None) == 0
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "schema", [{"pattern": "(a+)+"}, {"items": [{"patternProperties": {}}]}, {"$ref": "file:///etc"}, {"type": 7}]
)
def test_grader_schema_that_fetches_or_matches_patterns_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrader):
        grade_with(Schema(schema))


def test_f1_of_labels_by_hand() -> None:
    scores = f1([("a", "a"), ("a", "b"), ("b", "b"), ("c", "c")])
    assert scores["micro"] == 0.75
    assert scores["macro"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_student_t_is_that_of_the_tables() -> None:
    known = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 1000: 1.962}
    assert {freedom: round(student_t(0.95, freedom), 3) for freedom in known} == known


def test_interval_covers_the_true_difference_in_95_of_100() -> None:
    rng, covered = random.Random(5), 0
    for _ in range(1000):
        pairs = [(rng.random() < 0.8, rng.random() < 0.7) for _ in range(60)]
        found = paired_difference([float(one) for one, _ in pairs], [float(other) for _, other in pairs])
        covered += found.low <= 0.1 <= found.high
    assert covered >= 930


def test_interval_of_equal_scores_is_not_certain() -> None:
    assert mean_interval([1.0] * 10).low == pytest.approx(0.7)
    assert mean_interval([1.0]).low == 0.0


def requests_to_drop(rng: random.Random, rate: float, before: float, most: int) -> float:
    """Requests of a canary with a tenth of the traffic until a drop is found; looked at after every tenth request."""
    good = total = good_before = total_before = 0
    for number in range(most):
        if rng.random() < 0.1:
            total, good = total + 1, good + (rng.random() < rate)
        else:
            total_before, good_before = total_before + 1, good_before + (rng.random() < before)
        if number % 10 == 0 and drop_found(good, total, good_before, total_before, 0.05):
            return total
    return math.inf


@pytest.mark.parametrize("rate", [0.95, 0.8, 0.5])
def test_drop_is_falsely_found_in_at_most_5_of_100_whenever_one_looks(rate: float) -> None:
    rng = random.Random(11)
    alarms = sum(requests_to_drop(rng, rate, rate, 4000) < math.inf for _ in range(200))
    assert alarms <= 10


@pytest.mark.parametrize(("rate", "within"), [(0.95, 250), (0.8, 500), (0.5, 800)])
def test_drop_of_ten_points_is_found_within_a_stated_number(rate: float, within: int) -> None:
    rng = random.Random(12)
    found = sorted(requests_to_drop(rng, rate - 0.1, rate, 20_000) for _ in range(60))
    assert found[int(0.95 * len(found))] <= within
