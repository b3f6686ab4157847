"""Graders on right, wrong and hostile answers, and the statistics of comparisons by simulation."""

from __future__ import annotations

import json
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
    "schema",
    [
        {"pattern": "(a+)+"},
        {"items": [{"patternProperties": {}}]},
        {"$ref": "file:///etc"},
        {"$dynamicRef": "https://example.com"},
        {"type": 7},
        {"allOf": [{}] * 13_000},
        {"const": "x" * 70_000},
    ],
)
def test_grader_schema_that_fetches_or_matches_patterns_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrader):
        grade_with(Schema(schema))


def doubling(levels: int) -> dict[str, Any]:
    """A schema in which every level asks the one below it twice."""
    below = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n - 1}"}] * 2} for n in range(1, levels + 1)}
    return {"$defs": {"l0": {"type": "integer"}} | below, "$ref": f"#/$defs/l{levels}"}


BRANCHES = {"anyOf": [{"type": "string"}] * 1500}
HIDDEN = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/x"} | doubling(40)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (doubling(40), "1"),
        (HIDDEN, "1"),
        ({"items": HIDDEN}, "[1]"),
        ({"unevaluatedProperties": False} | doubling(40), "1"),
        ({"items": {"enum": [*range(5000)]}}, str([4999] * 9000)),
        ({"items": BRANCHES}, str([[0] * 1000] * 40)),
        (BRANCHES, "[" + "0," * 400_000 + "0]"),
    ],
)
def test_grader_schema_of_exponential_time_ends_soon_with_the_reason(schema: dict[str, Any], answer: str) -> None:
    began = time.thread_time()
    grade = grade_with(Schema(schema))
    with pytest.raises(InvalidGrader, match="takes too long"):
        grade(answer, None)
    assert time.thread_time() - began < 10
    assert grade_with(Schema(PERSON))('{"name": "Ada"}', None) == 1, "another schema is not affected"


def test_grader_schema_has_a_share_of_work_for_all_answers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.releases.graders.MAX_WORK", 10_000)
    grade = grade_with(Schema(doubling(5)))
    assert [grade("1", None) for _ in range(10)] == [1] * 10
    with pytest.raises(InvalidGrader, match="takes too long"):
        _ = [grade("1", None) for _ in range(1000)]


def test_grader_schema_finds_items_that_are_there_twice_in_linear_time() -> None:
    grade, began = grade_with(Schema({"uniqueItems": True})), time.thread_time()
    assert grade(json.dumps([{"a": number} for number in range(20_000)]), None) == 1
    assert grade('[{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]', None) == 0
    assert grade('[1, true, "1", [1]]', None) == 1
    assert time.thread_time() - began < 5


def test_grader_schema_may_name_a_property_pattern() -> None:
    grade = grade_with(Schema({"properties": {"pattern": {"type": "string"}}, "required": ["pattern"]}))
    assert (grade('{"pattern": "x"}', None), grade('{"pattern": 1}', None)) == (1, 0)


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
