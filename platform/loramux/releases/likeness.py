"""Similarity of two answers to one request: the answer that its caller got, and another revision's answer.

A request gives one observation of each measure: the mean over its choices, because choices of one request are not
independent. Only sums of observations and of their squares are kept of the answers. Intervals are computed from these
sums.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loramux.constraints.formats import AnswerFormat, JsonObject, JsonSchema, read_schema
from loramux.releases.graders import InvalidGrader, Schema, grade_with
from loramux.releases.statistics import Interval, interval_of_sums
from loramux.serving.calls import join_calls
from loramux.serving.messages import Delta, FinishReason

MILLION = 1_000_000
LARGEST_RATIO = 100.0
"""The largest ratio of lengths: larger ratios, and ratios below its reciprocal, are limited to it."""
MAX_CHECKED = 10_000_000
"""The largest product of a schema's bytes and an answer's bytes. Above it an answer is only parsed as JSON."""
LOG_RATIO = "length_ratio"

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "exact": (0.0, 1.0),
    "prefix": (0.0, 1.0),
    "similarity": (0.0, 1.0),
    LOG_RATIO: (-math.log(LARGEST_RATIO), math.log(LARGEST_RATIO)),
    "same_finish_reason": (0.0, 1.0),
    "cosine": (-1.0, 1.0),
    "same_label": (0.0, 1.0),
    "valid_current": (0.0, 1.0),
    "valid_candidate": (0.0, 1.0),
    "valid_difference": (-1.0, 1.0),
}
MEASURES = tuple(_BOUNDS)
"""Names of the measures, in the order of `_BOUNDS`.

They are: equal answers; the common beginning divided by the longer answer; F1 of shared tokens; the candidate's tokens
divided by the current revision's; equal finish reasons. Vectors have their cosine, and classes the share of texts, or
of tokens, with the same likeliest label. The last three measures are the shares of answers that the request's format
allows: of the current revision, of the candidate, and their difference.
"""


class ChoiceAnswer(msgspec.Struct, frozen=True):
    """One choice's answer."""

    text: str
    thought: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments of the tool calls."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    numbers: bytes = b""
    """The vector of a text, or the numbers of its classes or its tokens' classes, as float32s."""
    rows: int = 1
    """Number of tokens that have numbers; 1 if the text has them."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over requests, with its 95% confidence interval."""

    requests: int
    mean: float
    low: float
    high: float


class _Sums(NamedTuple):
    number: int
    total: float
    squares: float


def join_answer(deltas: Iterable[Delta]) -> list[ChoiceAnswer]:
    """Return the choices of an answer, in order."""
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [_joined(by_choice[index]) for index in sorted(by_choice)]


def _joined(deltas: Sequence[Delta]) -> ChoiceAnswer:
    calls = join_calls(call for delta in deltas for call in delta.calls)
    return ChoiceAnswer(
        text="".join(delta.text for delta in deltas),
        thought="" if any(delta.is_unended_thought for delta in deltas) else "".join(d.thought for d in deltas),
        calls=tuple((call.name or "", call.arguments) for call in calls),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=next((one.finish_reason for one in deltas if one.finish_reason is not None), None),
        numbers=b"".join(delta.pooled for delta in deltas),
        rows=sum(len(delta.tokens) for delta in deltas) or 1,
    )


def compare_answers(
    current: Sequence[ChoiceAnswer],
    candidate: Sequence[ChoiceAnswer],
    format: AnswerFormat | None,
    *,
    same_tokens: bool,
    are_classes: bool = False,
) -> dict[str, float]:
    """Return one observation of each measure. With `same_tokens`, token ids have the same meaning in both answers;
    otherwise words are compared. `are_classes`: numbers of the answers are those of classes, and not vectors.

    The function reads untrusted text, so call it on a thread.
    """
    check = None if format is None else FormatCheck.of(format)
    of_choices = [
        _compare_numbers(one, other, are_classes=are_classes)
        if one.numbers
        else _compare(one, other, check, same_tokens=same_tokens)
        for one, other in zip(current, candidate, strict=True)
    ]
    return {name: math.fsum(one[name] for one in of_choices) / len(of_choices) for name in of_choices[0]}


def _compare(
    current: ChoiceAnswer, candidate: ChoiceAnswer, check: FormatCheck | None, *, same_tokens: bool
) -> dict[str, float]:
    mine, other = ((one.token_ids if same_tokens else one.text.split()) for one in (current, candidate))
    longer = max(len(mine), len(other))
    common = next(
        (at for at, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
    )
    shared = (Counter(mine) & Counter(other)).total()
    ratio = max(1, len(candidate.token_ids)) / max(1, len(current.token_ids))
    found = {
        "exact": float(_said(current) == _said(candidate)),
        "prefix": common / longer if longer else 1.0,
        "similarity": 2 * shared / (len(mine) + len(other)) if longer else 1.0,
        LOG_RATIO: math.log(min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)),
        "same_finish_reason": float(current.finish_reason == candidate.finish_reason),
    }
    if check is not None:
        valid, candidate_valid = float(check.allows(current)), float(check.allows(candidate))
        found |= {
            "valid_current": valid,
            "valid_candidate": candidate_valid,
            "valid_difference": candidate_valid - valid,
        }
    return found


def _compare_numbers(current: ChoiceAnswer, candidate: ChoiceAnswer, *, are_classes: bool) -> dict[str, float]:
    """Compare two vectors, or the classes of a text or its tokens. Numbers of other shapes have nothing in common."""
    mine, other = (
        np.frombuffer(one.numbers, dtype="<f4").astype(np.float64).reshape(one.rows, -1) for one in (current, candidate)
    )
    exact = {"exact": float(current.numbers == candidate.numbers)}
    if are_classes:
        same = _likeliest(mine) == _likeliest(other) if mine.shape == other.shape else np.zeros(1)
        return exact | {"same_label": float(np.mean(same))}
    lengths = np.linalg.norm(mine) * np.linalg.norm(other)
    is_comparable = mine.shape == other.shape and lengths > 0
    return exact | {"cosine": float(np.clip(np.vdot(mine, other) / lengths, -1.0, 1.0)) if is_comparable else 0.0}


def _likeliest(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the likeliest label of each row; of a single label, whether it is more likely than not."""
    return numbers.argmax(axis=1) if numbers.shape[1] > 1 else (numbers[:, 0] > 0).astype(np.int64)


def _said(answer: ChoiceAnswer) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    return answer.text, answer.thought, answer.calls


class FormatCheck:
    """Checks whether an answer is complete JSON that the request's schema allows.

    A schema whose validation may take long (patterns, references) is not validated again. The grammar has enforced the
    schema, so a complete answer is valid.
    """

    def __init__(self, schema: dict[str, object] | None, size: int) -> None:
        self._grade = None
        self._size = size
        if schema is not None and "$ref" not in json.dumps(schema):
            try:
                self._grade = grade_with(Schema(schema))
            except InvalidGrader:
                self._grade = None

    @classmethod
    def of(cls, format: AnswerFormat) -> FormatCheck | None:
        """Return the check of a format; None if the format is not JSON."""
        if isinstance(format, JsonObject):
            return cls({"type": "object"}, 0)
        if not isinstance(format, JsonSchema):
            return None
        schema = read_schema(format.schema)
        return cls(schema if isinstance(schema, dict) else None, len(json.dumps(schema)))

    def allows(self, answer: ChoiceAnswer) -> bool:
        """Return whether the format allows the answer."""
        if answer.finish_reason != "stop":
            return False
        if self._grade is not None and self._size * len(answer.text) <= MAX_CHECKED:
            with suppress(InvalidGrader):  # the validation takes too long
                return bool(self._grade(answer.text, None))
        try:
            msgspec.json.decode(answer.text)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


def sums_of(observations: Mapping[str, float]) -> dict[str, int]:
    """Return the additions of an observation to the sums, in millionths: count, total and squares of each measure."""
    added: dict[str, int] = {}
    for name, value in observations.items():
        added[f"{name}.number"] = 1
        added[f"{name}.total"] = round(value * MILLION)
        added[f"{name}.squares"] = round(value**2 * MILLION)
    return added


def measures_of(sums: Mapping[str, int]) -> dict[str, Measure]:
    """Return the measures that were observed. The mean of ratios of lengths is geometric."""
    found = {}
    for name, bounds in _BOUNDS.items():
        of = _Sums(
            sums.get(f"{name}.number", 0),
            sums.get(f"{name}.total", 0) / MILLION,
            sums.get(f"{name}.squares", 0) / MILLION,
        )
        if of.number:
            interval = interval_of_sums(*of, *bounds)
            found[name] = _measure(of.number, interval, is_log=name == LOG_RATIO)
    return found


def _measure(requests: int, interval: Interval, *, is_log: bool) -> Measure:
    mean, low, high = (math.exp(one) if is_log else one for one in (interval.mean, interval.low, interval.high))
    return Measure(requests=requests, mean=round(mean, 6), low=round(low, 6), high=round(high, 6))
