"""Evaluations: two revisions answer the same questions, as one batch, and a grader scores the answers in pairs.

The set of questions is a file; an evaluation writes a batch's input of it, two lines a question, and grades the batch's
output when it has ended. So it costs what a batch costs, waits as a batch waits, and survives what a batch survives.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.batches import Batches, BatchServices, Files
from loramux.errors import LoramuxError
from loramux.gateway import Platform, run_periodically
from loramux.records import Database, Principal, RecordsError
from loramux.records.batches import UNFINISHED, Batch, BatchRepository
from loramux.records.evaluations import RUNNING, Evaluation, EvaluationJobs, EvaluationRepository
from loramux.records.files import FileRepository, StoredFile, Viewpoint
from loramux.records.identity import new_id
from loramux.releases.graders import Expected, Grader, InvalidGrader, Label, f1, grade_with, label_of
from loramux.releases.statistics import Interval, mean_interval, paired_difference
from loramux.storage import BlobStore, StorageError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_QUESTIONS = 10_000
MAX_QUESTION_BYTES = 1 << 20
TEND_SECONDS = 5.0

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class EvaluationNotFound(LoramuxError):
    """No such evaluation, or another project's or tenant's."""

    code = "evaluation_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"No such evaluation: '{id[:80]}'.", "evaluation_id")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a set: a conversation or a text, and what a good answer is."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    expected: Expected = None
    max_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


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


class Evaluations:
    """Evaluations of every tenant; each caller sees those of its project."""

    def __init__(self, platform: Platform, services: BatchServices) -> None:
        self._platform = platform
        self._database: Database = platform.database
        self._blobs: BlobStore = platform.blobs
        self._files: Files = services.files
        self._batches: Batches = services.batches
        self._server_id = platform.usage.server_id

    async def create(
        self, principal: Principal, *, adapter: str, revision: int, against: int, file_id: str, grader: Grader
    ) -> Evaluation:
        """Evaluate a revision against another one. Raises InvalidGrader, AdapterNotFound, and as a batch does."""
        grade_with(grader)
        info = await self._platform.adapters.queries.get(principal, adapter)
        models = (f"{info.name}@{revision}", f"{info.name}@{against}")
        if revision == against:
            raise InvalidGrader("'against' is another revision.", "against")
        for model in models:
            await self._platform.completions.ensure_model(principal, model)
        file = await self._files.get(principal, file_id)
        with self._blobs.staging() as folder:
            path = await self._files.fetch(file, folder)
            endpoint, size = await self._files.threads.run(_write_input, path, folder / "input", models)
            name = f"evaluation of {info.name}.jsonl"
            made = await self._files.add(principal, folder / "input", size, filename=name, purpose="batch")
        batch = await self._batches.create(
            principal, endpoint=endpoint, input_file_id=made.id, completion_window="24h", metadata=None
        )
        evaluation = Evaluation(
            id=new_id("eval"),
            tenant_id=principal.tenant,
            project_id=principal.project,
            owner=batch.owner,
            adapter=info.name,
            models=" ".join(models),
            file_id=file.id,
            batch_id=batch.id,
            grader=_encode(grader).decode(),
            state=RUNNING,
            server_id=self._server_id,
            attempts=1,
            created_at=self._database.now(),
        )
        async with self._database.begin() as session:
            await EvaluationRepository(session, principal.tenant).add(evaluation)
        return evaluation

    async def get(self, principal: Principal, id: str) -> Evaluation:
        """Return an evaluation. Raises EvaluationNotFound."""
        async with self._database.read() as session:
            found = await EvaluationRepository(session, principal.tenant).get(id, principal.project)
        if found is None or not principal.may_use(found.adapter):
            raise EvaluationNotFound(id)
        return found

    async def before(self, principal: Principal, adapter: str | None, id: str | None, limit: int) -> list[Evaluation]:
        """List at most `limit` evaluations older than that one, newest first; of one adapter or of all."""
        if adapter is not None and "/" not in adapter:
            adapter = f"{principal.tenant_name}/{adapter}"
        async with self._database.read() as session:
            found = await EvaluationRepository(session, principal.tenant).before(principal.project, adapter, id, limit)
        return [one for one in found if principal.may_use(one.adapter)]

    async def tend(self) -> None:
        """Adopt evaluations of dead servers, and grade those whose batch has ended."""
        async with self._database.begin() as session:
            await EvaluationJobs(session).adopt_abandoned(self._server_id)
        async with self._database.read() as session:
            ready = await EvaluationJobs(session).ready(self._server_id, UNFINISHED)
        for evaluation in ready:
            try:
                result, error = await self._graded(evaluation), None
            except LoramuxError as refusal:
                result, error = None, refusal.message
            except (RecordsError, StorageError) as failure:
                logger.warning("the evaluation %s is graded later: %s", evaluation.id, failure)
                continue
            except Exception:
                logger.exception("the evaluation %s could not be graded", evaluation.id)
                result, error = None, "The server failed while it graded the answers."
            text = None if result is None else _encode(result).decode()
            async with self._database.begin() as session:
                jobs = EvaluationJobs(session)
                await jobs.finish(evaluation.id, self._server_id, text, error, self._database.now())

    async def _graded(self, evaluation: Evaluation) -> EvaluationResult:
        everything = Viewpoint(evaluation.project_id)
        async with self._database.read() as session:
            batch = await BatchRepository(session, evaluation.tenant_id).get(evaluation.batch_id, everything)
            files = FileRepository(session, evaluation.tenant_id)
            asked = await files.get(evaluation.file_id, everything)
            output = None if batch is None else await files.get(batch.output_file_id or "", everything)
        if asked is None or output is None:
            raise InvalidGrader(_reason(batch, asked), "file_id")
        with self._blobs.staging() as folder:
            for name in ("set", "output"):
                (folder / name).mkdir()
            questions = await self._files.fetch(asked, folder / "set")
            answers = await self._files.fetch(output, folder / "output")
            return await self._files.threads.run(_grade, evaluation, questions, answers)


@asynccontextmanager
async def open_evaluations(platform: Platform, services: BatchServices) -> AsyncIterator[Evaluations]:
    """Grade evaluations while the block runs."""
    evaluations = Evaluations(platform, services)
    async with run_periodically(TEND_SECONDS, evaluations.tend):
        yield evaluations


def _questions(path: Path) -> Iterator[Question]:
    """Read a set. Raises InvalidGrader with the line."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_QUESTION_BYTES + 1), b""), 1):
            if number > MAX_QUESTIONS:
                raise InvalidGrader(f"A set has at most {MAX_QUESTIONS} questions; divide it.", "file_id")
            if len(line) > MAX_QUESTION_BYTES:
                raise InvalidGrader(f"Line {number} has more than {MAX_QUESTION_BYTES} bytes.", "file_id")
            try:
                question = msgspec.json.decode(line, type=Question)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidGrader(f"Line {number} is no question: {str(error)[:200]}.", "file_id") from None
            if (question.messages is UNSET) == (question.prompt is UNSET):
                raise InvalidGrader(f"Line {number} has either 'messages' or 'prompt'.", "file_id")
            yield question


def _write_input(questions: Path, target: Path, models: Sequence[str]) -> tuple[str, int]:
    """Write the batch's input; return its endpoint and size. Raises InvalidGrader."""
    endpoint = ""
    with target.open("xb") as file:
        for number, question in enumerate(_questions(questions)):
            path = TEXT if question.messages is UNSET else CHAT
            if path != (endpoint := endpoint or path):
                raise InvalidGrader("All questions have 'messages', or all have 'prompt'.", "file_id")
            asked = {"messages": question.messages, "prompt": question.prompt, "max_tokens": question.max_tokens}
            given = {name: value for name, value in asked.items() if value is not UNSET}
            for side, model in enumerate(models):
                body = {"model": model, "temperature": 0} | given
                line = {"custom_id": f"{number}:{side}", "method": "POST", "url": path, "body": body}
                file.write(_encode(line) + b"\n")
        return endpoint, file.tell()


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Answer(msgspec.Struct):
    custom_id: str
    response: _Response


def _grade(evaluation: Evaluation, questions: Path, output: Path) -> EvaluationResult:
    grader: Grader = msgspec.json.decode(evaluation.grader, type=Grader)
    grade, decoder = grade_with(grader), msgspec.json.Decoder(_Answer)
    answers: dict[str, _Body] = {}
    with output.open("rb") as file:
        for line in file:
            answer = decoder.decode(line)
            answers[answer.custom_id] = answer.response.body
    expected = [question.expected for question in _questions(questions)]
    texts = [[_text(answers.get(f"{number}:{side}")) for number in range(len(expected))] for side in (0, 1)]
    scores = [
        [0.0 if text is None else grade(text, wanted) for text, wanted in zip(each, expected, strict=True)]
        for each in texts
    ]
    answered = [[text or "" for text in each] for each in texts]
    labels = [label_of(str(one)) for one in expected] if isinstance(grader, Label) else None
    sides = [
        Side(
            model=model,
            score=mean_interval(scores[side]),
            errors=sum(text is None for text in texts[side]),
            prompt_tokens=sum(body.usage.prompt_tokens for id, body in answers.items() if id.endswith(f":{side}")),
            output_tokens=sum(body.usage.completion_tokens for id, body in answers.items() if id.endswith(f":{side}")),
            f1=None if labels is None else f1([*zip(map(label_of, answered[side]), labels, strict=True)]),
        )
        for side, model in enumerate(evaluation.models.split())
    ]
    pairs = list(zip(*scores, strict=True))
    return EvaluationResult(
        questions=len(expected),
        candidate=sides[0],
        against=sides[1],
        difference=paired_difference(scores[0], scores[1]),
        better=sum(one > other for one, other in pairs),
        worse=sum(one < other for one, other in pairs),
    )


def _text(body: _Body | None) -> str | None:
    if body is None or not body.choices:
        return None
    choice = body.choices[0]
    return choice.text if choice.message is None else choice.message.content or ""


def _reason(batch: Batch | None, asked: StoredFile | None) -> str:
    if asked is None:
        return "The set of questions was deleted before the answers were graded."
    if batch is None:
        return "The batch of the evaluation is gone."
    why = f": line {batch.errors[0].line}: {batch.errors[0].message}" if batch.errors else ""
    return f"The batch {batch.id} ended as {batch.state} without an answer{why}"
