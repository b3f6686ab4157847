"""The data of an evaluation: its questions, both revisions' answers, and the result.

A set of questions is read from a file and written as a batch's input, two lines for each question. The answers are read
from the batch's output. `compare` computes the result: paired scores, and the tokens, times and costs of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.batches.files import FINE_TUNE
from loramux.common.identity import TenantId
from loramux.common.units import TokenCounts
from loramux.data.records.ledger import LedgerEntry
from loramux.money.billing.catalog import PlanTariff
from loramux.money.limits.budgets import ChargedUsage
from loramux.money.pricing import NANO_DIGITS, plain_text, to_decimal
from loramux.releases.graders import Expected, Grader, InvalidGrader, Label, f1, label_of
from loramux.releases.statistics import Interval, mean_interval, paired_difference
from loramux.serving.messages import Timing

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_QUESTIONS = 10_000
MAX_QUESTION_BYTES = 1 << 20
MIN_ANSWER_TOKENS = 64
"""Tokens that an answer to an example of a training file may have, or more if the expected one is long."""

_encode = msgspec.json.Encoder().encode


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a set: a conversation, with tools if it has any, or a text; and the expected answer."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    tools: list[dict[str, Any]] | UnsetType = UNSET
    expected: Expected = None
    max_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class _Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a training file: a conversation that ends with the expected answer."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=2)]
    tools: list[dict[str, Any]] | UnsetType = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET


class Answered(msgspec.Struct, frozen=True):
    """A revision's answer to one question."""

    request_id: str
    text: str
    timing: Timing | None


def read_questions(path: Path, purpose: str) -> Iterator[Question]:
    """Read a set, or a training file whose conversations end with the expected answer. Raises InvalidGrader with the
    line.

    `purpose`: the file's.
    """
    read = _lesson if purpose == FINE_TUNE else msgspec.json.Decoder(Question).decode
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_QUESTION_BYTES + 1), b""), 1):
            if number > MAX_QUESTIONS:
                raise InvalidGrader(f"A set has at most {MAX_QUESTIONS} questions; divide it.", "file_id")
            if len(line) > MAX_QUESTION_BYTES:
                raise InvalidGrader(f"Line {number} has more than {MAX_QUESTION_BYTES} bytes.", "file_id")
            try:
                question = read(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidGrader(f"Line {number} is no question: {str(error)[:200]}.", "file_id") from None
            if (question.messages is UNSET) == (question.prompt is UNSET):
                raise InvalidGrader(f"Line {number} has either 'messages' or 'prompt'.", "file_id")
            yield question


def _lesson(line: bytes) -> Question:
    """Read an example of a training file as a question. Raises msgspec.ValidationError."""
    example = msgspec.json.decode(line, type=_Example)
    *asked, answer = example.messages
    expected = answer.get("content")
    if answer.get("role") != "assistant" or not isinstance(expected, str) or not expected:
        raise msgspec.ValidationError("a conversation ends with an assistant's message that has a text")
    messages = [{name: value for name, value in one.items() if name != "weight"} for one in asked]
    # a token has a byte at least, so an answer of twice the expected length is never cut
    max_tokens = max(MIN_ANSWER_TOKENS, 2 * len(expected.encode()))
    return Question(messages=messages, tools=example.tools, expected=expected, max_tokens=max_tokens)


def write_input(questions: Path, target: Path, models: Sequence[str], purpose: str) -> tuple[str, int]:
    """Write the batch's input; return its endpoint and its size in bytes. Raises InvalidGrader."""
    endpoint = ""
    with target.open("xb") as file:
        for number, question in enumerate(read_questions(questions, purpose)):
            path = TEXT if question.messages is UNSET else CHAT
            if path != (endpoint := endpoint or path):
                raise InvalidGrader("All questions have 'messages', or all have 'prompt'.", "file_id")
            asked = {name: getattr(question, name) for name in ("messages", "prompt", "tools", "max_tokens")}
            given = {name: value for name, value in asked.items() if value is not UNSET}
            for side, model in enumerate(models):
                body = {"model": model, "temperature": 0} | given
                line = {"custom_id": f"{number}:{side}", "method": "POST", "url": path, "body": body}
                file.write(_encode(line) + b"\n")
        return endpoint, file.tell()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Body(msgspec.Struct):
    id: str
    choices: list[_Choice]


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response
    timing: Timing | None = None


def read_answers(output: Path, questions: int) -> list[list[Answered | None]]:
    """Read a batch's output: the answers of each side in the order of the questions; None for a missing answer."""
    decoder = msgspec.json.Decoder(_Line)
    sides: list[list[Answered | None]] = [[None] * questions, [None] * questions]
    with output.open("rb") as file:
        for text in file:
            line = decoder.decode(text)
            number, _, side = line.custom_id.partition(":")
            body = line.response.body
            if body.choices:
                choice = body.choices[0]
                said = choice.text if choice.message is None else choice.message.content
                sides[int(side)][int(number)] = Answered(body.id, said or "", line.timing)
    return sides


Answers = Sequence[Answered | None]
"""One revision's answers, in the order of the questions."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of the answers, without the time in the queue."""

    answers: int
    """Number of answers whose times are known."""
    first_token_seconds: dict[str, float]
    """Seconds until the first token: p50, p90, p99."""
    tokens_per_second: float | None
    """Output tokens per second of one answer, measured from its first token."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The price of the answers: the ledger's quantities at the prices of batches."""

    amount: str
    """The amount as a decimal number."""
    currency: str


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One revision's part of a result."""

    model: str
    score: Interval
    errors: int
    """Number of questions that the revision did not answer; their score is 0."""
    prompt_tokens: int
    output_tokens: int
    f1: dict[str, float] | None = None
    """F1 of the grader `label`: macro and micro."""
    latency: Latency | None = None
    cost: Cost | None = None
    """The price of the answers; null: the tenant has no price plan."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result: scores from 0 to 1, and the candidate's score minus that of the other revision."""

    questions: int
    candidate: Side
    against: Side
    difference: Interval
    """The mean difference of the paired scores, with its 95% confidence interval."""
    better: int
    """Questions on which the candidate scores higher."""
    worse: int


class EvaluationBill(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger entries and prices by which an evaluation's requests are charged."""

    tenant: TenantId
    entries: Mapping[str, LedgerEntry]
    """The ledger entries, by request."""
    tariff: PlanTariff
    currency: str | None
    """The plan's currency; None: the tenant has no price plan."""

    def cost(self, entries: Sequence[LedgerEntry]) -> Cost | None:
        """Return the cost of these entries. If prices have volume steps, the highest price counts, as for budgets."""
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
    bill: EvaluationBill,
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
    model: str,
    grader: Grader,
    questions: Sequence[Question],
    answers: Answers,
    scores: Sequence[float],
    bill: EvaluationBill,
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


def _latency(answers: Answers, bill: EvaluationBill) -> Latency | None:
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
