"""The result of an evaluation: scores in pairs, and what the answers took in tokens, time and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from loramux.billing import PlanTariff
from loramux.limits import ChargedUsage
from loramux.pricing import plain_text, to_decimal
from loramux.pricing.money import NANO_DIGITS
from loramux.records import TenantId
from loramux.records.ledger import LedgerEntry
from loramux.releases.graders import Grader, Label, f1, label_of
from loramux.releases.question_sets import Answered, Question
from loramux.releases.statistics import Interval, mean_interval, paired_difference
from loramux.units import TokenCounts

Answers = Sequence[Answered | None]
"""One revision's answers, in the order of the questions."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the answers came, without the time in the queue."""

    answers: int
    """Those whose time is known."""
    first_token_seconds: dict[str, float]
    """p50, p90, p99."""
    tokens_per_second: float | None
    """Of one answer, after its first token."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers are charged: the ledger's quantities at the prices of batches."""

    amount: str
    """A decimal number."""
    currency: str


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One revision's part of a result."""

    model: str
    score: Interval
    errors: int
    """Questions that it did not answer; their score is 0."""
    prompt_tokens: int
    output_tokens: int
    f1: dict[str, float] | None = None
    """Of the grader label."""
    latency: Latency | None = None
    cost: Cost | None = None
    """null: the tenant has no price plan."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result: scores of 0 to 1, and by how much the candidate is above the other revision."""

    questions: int
    candidate: Side
    against: Side
    difference: Interval
    """Of the paired scores, with its 95% confidence interval."""
    better: int
    """Questions on which the candidate scores higher."""
    worse: int


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation's requests are charged by."""

    tenant: TenantId
    entries: Mapping[str, LedgerEntry]
    """By request."""
    tariff: PlanTariff
    currency: str | None
    """None: the tenant has no price plan."""

    def cost(self, entries: Sequence[LedgerEntry]) -> Cost | None:
        """Return the cost of these entries; of volume steps the dearest, as for budgets."""
        if self.currency is None:
            return None
        used: dict[tuple[str, str], ChargedUsage] = {}
        for entry in entries:
            before = used.get((entry.base_model, entry.tier), ChargedUsage())
            sums = ChargedUsage(before.tokens + entry.billed, before.adapter_loads + entry.adapter_load)
            used[entry.base_model, entry.tier] = sums
        nanos = sum(self.tariff.cost(self.tenant, base, tier, one) for (base, tier), one in used.items())
        return Cost(amount=plain_text(to_decimal(nanos, NANO_DIGITS)), currency=self.currency)


def compare(
    models: Sequence[str],
    grader: Grader,
    questions: Sequence[Question],
    answers: Sequence[Answers],
    scores: Sequence[Sequence[float]],
    bill: Bill,
) -> EvaluationResult:
    """Return the result; `models`, `answers` and `scores` have the candidate first."""
    candidate, against = (
        _side(model, grader, questions, mine, scored, bill)
        for model, mine, scored in zip(models, answers, scores, strict=True)
    )
    pairs = list(zip(*scores, strict=True))
    return EvaluationResult(
        questions=len(questions),
        candidate=candidate,
        against=against,
        difference=paired_difference(scores[0], scores[1]),
        better=sum(one > other for one, other in pairs),
        worse=sum(one < other for one, other in pairs),
    )


def _side(
    model: str, grader: Grader, questions: Sequence[Question], answers: Answers, scores: Sequence[float], bill: Bill
) -> Side:
    entries = [bill.entries[one.request_id] for one in answers if one is not None and one.request_id in bill.entries]
    used = sum((entry.billed for entry in entries), TokenCounts())
    labels = None
    if isinstance(grader, Label):
        given = [label_of("" if one is None else one.text) for one in answers]
        wanted = [label_of(str(question.expected)) for question in questions]
        labels = f1([*zip(given, wanted, strict=True)])
    return Side(
        model=model,
        score=mean_interval(scores),
        errors=sum(one is None for one in answers),
        prompt_tokens=used.prompt,
        output_tokens=used.output,
        f1=labels,
        latency=_latency(answers, bill),
        cost=bill.cost(entries),
    )


def _latency(answers: Answers, bill: Bill) -> Latency | None:
    timed = [(one.request_id, one.timing) for one in answers if one is not None and one.timing is not None]
    if not timed:
        return None
    firsts = sorted(timing.first_token_seconds for _, timing in timed)
    tokens = seconds = 0.0
    for id, timing in timed:
        entry = bill.entries.get(id)
        if entry is not None and entry.output_tokens > 1:
            tokens += entry.output_tokens - 1
            seconds += timing.seconds - timing.first_token_seconds
    return Latency(
        answers=len(timed),
        first_token_seconds={f"p{q}": firsts[math.ceil(q / 100 * len(firsts)) - 1] for q in (50, 90, 99)},
        tokens_per_second=round(tokens / seconds, 3) if seconds > 0 else None,
    )
