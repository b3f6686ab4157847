"""Evaluations: two revisions, or a revision and its base, answer the same questions, as one batch, and a grader scores
the answers in pairs.

The set of questions is a file. An evaluation writes a batch's input from it, two lines for each question, and grades
the batch's output when the batch has ended. So an evaluation has the price, the waiting time and the fault tolerance of
a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from loramux.batches.files import Files
from loramux.batches.lines import Pauses
from loramux.batches.service import Batches
from loramux.catalog.registry.registry import AdapterQueries
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, TenantId, new_id
from loramux.common.jobs import JobRunner, TenantSlots
from loramux.data.entities import Batch, Evaluation, StoredFile
from loramux.data.records.base import Viewpoint
from loramux.data.records.batches import UNFINISHED, BatchRepository, FileRepository
from loramux.data.records.comparisons import RUNNING, EvaluationJobs, EvaluationRepository
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsError
from loramux.data.records.ledger import LedgerRepository
from loramux.data.records.tenants import TenantRepository
from loramux.data.storage.blobs import BlobStore
from loramux.data.storage.errors import StorageError
from loramux.money.billing.catalog import PlanPrices
from loramux.money.usage.settlement import USAGE
from loramux.releases.comparison import (
    Answers,
    EvaluationBill,
    EvaluationResult,
    Question,
    compare,
    read_answers,
    read_questions,
    write_input,
)
from loramux.releases.graders import Grader, InvalidGrader, Judge, LocalGrader, grade_with
from loramux.releases.judges import Judges, KeyVault
from loramux.serving.errors import NotAllowed
from loramux.serving.service import CompletionService

GRADED_BYTES, GRADED_BYTES_OF_TENANT = 1 << 30, 256 << 20
"""Maximum bytes of sets and answers that are graded at a time, because they are in memory until the last score."""

_COMPARED = (
    "An evaluation grades texts. Start a shadow of the revision, which compares vectors and classes, or send your own "
    "labelled texts to both revisions by their names."
)

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class EvaluationNotFound(LoramuxError):
    """The evaluation does not exist, or belongs to another project or tenant."""

    code = "evaluation_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"No such evaluation: '{id[:80]}'.", "evaluation_id")


class Evaluations:
    """Evaluations of every tenant; each caller sees the evaluations of its project."""

    def __init__(  # noqa: PLR0913  each is a part that it uses
        self,
        *,
        database: Database,
        blobs: BlobStore,
        files: Files,
        batches: Batches,
        queries: AdapterQueries,
        completions: CompletionService,
        server_id: str,
        judges: Judges,
        keys: KeyVault,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._files = files
        self._batches = batches
        self._queries = queries
        self._completions = completions
        self._server_id = server_id
        self._judges = judges
        self._memory = TenantSlots(GRADED_BYTES, GRADED_BYTES_OF_TENANT)
        self._keys = keys
        self._jobs: JobRunner[Evaluation] = JobRunner("evaluation", self._ready, self._finish)

    async def create(
        self,
        principal: Principal,
        *,
        adapter: str,
        revision: int,
        against: int | None,
        file_id: str,
        grader: Grader,
        judge_api_key: str | None = None,
    ) -> Evaluation:
        """Evaluate a revision against another one; None: against its base model.

        Raises InvalidGrader, NotAllowed for a judge that the operator has not allowed, AdapterNotFound, and the errors
        of creating a batch.
        """
        await self._check_grader(principal, grader, judge_api_key)
        info = await self._queries.get(principal, adapter)
        if revision == against:
            raise InvalidGrader("'against' is another revision.", "against")
        candidate = await self._completions.resolve(principal, f"{info.name}@{revision}")
        other = candidate.base_model if against is None else f"{info.name}@{against}"
        models = (candidate.name, other)
        for model, field in zip(models, ("revision", "against"), strict=True):
            await self._completions.ensure_generates(principal, model, field, _COMPARED)
        file = await self._files.get(principal, file_id)
        with self._blobs.staging() as folder:
            path = await self._files.fetch(principal.tenant, file, folder)
            endpoint, size = await self._files.threads.run(
                principal.tenant, write_input, path, folder / "input", models, file.purpose
            )
            name = f"evaluation of {info.name}.jsonl"
            made = await self._files.add(principal, folder / "input", size, filename=name, purpose="batch")
        batch = await self._batches.create(
            principal, endpoint=endpoint, input_file_id=made.id, completion_window="24h", metadata=None
        )
        id = new_id("eval")
        evaluation = Evaluation(
            id=id,
            tenant_id=principal.tenant,
            project_id=principal.project,
            owner=batch.owner,
            adapter=info.name,
            models=" ".join(models),
            file_id=file.id,
            batch_id=batch.id,
            grader=_encode(grader).decode(),
            judge_key=None if judge_api_key is None else self._keys.encrypt(judge_api_key, id),
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

    async def before(
        self, principal: Principal, adapter: str | None, id: str | None, limit: int, revision: int | None = None
    ) -> list[Evaluation]:
        """List at most `limit` evaluations older than `id`, newest first; of one adapter, of one candidate, or all
        evaluations.
        """
        if adapter is None and revision is not None:
            raise InvalidGrader("'revision' is one of an 'adapter'; name it.", "adapter")
        if adapter is not None and "/" not in adapter:
            adapter = f"{principal.tenant_name}/{adapter}"
        async with self._database.read() as session:
            found = await EvaluationRepository(session, principal.tenant).before(
                principal.project, adapter, id, limit, None if revision is None else f"{adapter}@{revision}"
            )
        return [one for one in found if principal.may_use(one.adapter)]

    async def tend(self) -> None:
        """Adopt evaluations of dead servers, and begin to grade evaluations whose batch has ended."""
        async with self._database.begin() as session:
            await EvaluationJobs(session).adopt_abandoned(self._server_id)
        self._jobs.look()

    async def stop(self) -> None:
        """Stop grading. After a restart this server grades again, or another server does."""
        await self._jobs.stop()

    async def _check_grader(self, principal: Principal, grader: Grader, key: str | None) -> None:
        if not isinstance(grader, Judge):
            await self._files.threads.run(principal.tenant, grade_with, grader)
            if key is not None:
                raise InvalidGrader("'judge_api_key' is for the grader 'judge'.", "judge_api_key")
            return
        await self._ensure_judges_allowed(principal.tenant)
        await self._judges.check(grader, principal.tenant)

    async def _ensure_judges_allowed(self, tenant: TenantId) -> None:
        async with self._database.read() as session:
            if not await TenantRepository(session).may_use_judges(tenant):
                raise NotAllowed(
                    "A judge shows prompts and answers to a third party, which your organization has not allowed. Ask "
                    "your operator to allow judges, or use another grader.",
                    "grader.type",
                    code="judges_not_allowed",
                )

    async def _ready(self) -> Sequence[Evaluation]:
        async with self._database.read() as session:
            return await EvaluationJobs(session).ready(self._server_id, UNFINISHED)

    async def _finish(self, evaluation: Evaluation) -> None:
        """Grade an evaluation and write its end. After a temporary error, the evaluation is not changed and is found
        again later.
        """
        result, reason = None, None
        try:
            result = _encode(await self._graded(evaluation)).decode()
        except (RecordsError, StorageError) as failure:
            logger.warning("the evaluation %s is graded later: %s", evaluation.id, failure)
            return
        except LoramuxError as refusal:
            reason = refusal.message
        except Exception:
            logger.exception("the evaluation %s could not be graded", evaluation.id)
            reason = "The server failed while it graded the answers."
        try:
            async with self._database.begin() as session:
                jobs = EvaluationJobs(session)
                await jobs.finish(evaluation.id, self._server_id, result, reason, self._database.now())
        except RecordsError as failure:
            logger.warning("the end of the evaluation %s is written later: %s", evaluation.id, failure)

    async def _graded(self, evaluation: Evaluation) -> EvaluationResult:
        """Grade an evaluation when its tenant's share of GRADED_BYTES has room. With a judge, this may take hours."""
        asked, output = await self._inputs(evaluation)
        async with self._memory.slot(evaluation.tenant_id, asked.size + output.size):
            questions, sides = await self._answers(evaluation, asked, output)
            return await self._compared(evaluation, questions, sides)

    async def _compared(
        self, evaluation: Evaluation, questions: Sequence[Question], sides: Sequence[Answers]
    ) -> EvaluationResult:
        grader: Grader = msgspec.json.decode(evaluation.grader, type=Grader)
        if isinstance(grader, Judge):
            scores = await self._judged(evaluation, grader, questions, sides)
        else:
            scores = await self._files.threads.run(evaluation.tenant_id, _grade, grader, questions, sides)
        bill = await self._bill(evaluation, sides)
        models = evaluation.models.split()
        return await self._files.threads.run(
            evaluation.tenant_id, compare, models, grader, questions, sides, scores, bill
        )

    async def _inputs(self, evaluation: Evaluation) -> tuple[StoredFile, StoredFile]:
        """Return the set and the batch's output. Raises InvalidGrader."""
        everything = Viewpoint(evaluation.project_id)
        async with self._database.read() as session:
            batch = await BatchRepository(session, evaluation.tenant_id).get(evaluation.batch_id, everything)
            files = FileRepository(session, evaluation.tenant_id)
            asked = await files.get(evaluation.file_id, everything)
            output = None if batch is None else await files.get(batch.output_file_id or "", everything)
        if asked is None or output is None:
            raise InvalidGrader(_reason(batch, asked), "file_id")
        return asked, output

    async def _answers(
        self, evaluation: Evaluation, asked: StoredFile, output: StoredFile
    ) -> tuple[list[Question], Sequence[Answers]]:
        with self._blobs.staging() as folder:
            for name in ("set", "output"):
                (folder / name).mkdir()
            source = await self._files.fetch(evaluation.tenant_id, asked, folder / "set")
            answers = await self._files.fetch(evaluation.tenant_id, output, folder / "output")
            threads = self._files.threads.of(evaluation.tenant_id)
            questions = await threads.run(lambda: [*read_questions(source, asked.purpose)])
            return questions, await threads.run(read_answers, answers, len(questions))

    async def _judged(
        self, evaluation: Evaluation, judge: Judge, questions: Sequence[Question], sides: Sequence[Answers]
    ) -> list[list[float]]:
        await self._ensure_judges_allowed(evaluation.tenant_id)
        stored = evaluation.judge_key
        key = None if stored is None else self._keys.decrypt(stored, evaluation.id)
        return [await self._judges.scores(judge, key, evaluation.tenant_id, questions, side) for side in sides]

    async def _bill(self, evaluation: Evaluation, sides: Sequence[Answers]) -> EvaluationBill:
        ids = [answer.request_id for side in sides for answer in side if answer is not None]
        tenant = evaluation.tenant_id
        async with self._database.read() as session:
            entries = await LedgerRepository(session).of_requests(USAGE, ids)
            tariff = await PlanPrices(self._database).tariff(session, [tenant])
        return EvaluationBill(tenant=tenant, entries=entries, tariff=tariff, currency=tariff.currency(tenant))


def _grade(grader: LocalGrader, questions: Sequence[Question], sides: Sequence[Answers]) -> list[list[float]]:
    """Score each side's answers, on a thread that pauses for requests."""
    grade, pauses = grade_with(grader), Pauses()

    def score(question: Question, text: str) -> float:
        pauses.take()
        return grade(text, question.expected)

    return [
        [
            0.0 if answer is None else score(question, answer.text)
            for answer, question in zip(side, questions, strict=True)
        ]
        for side in sides
    ]


def _reason(batch: Batch | None, asked: StoredFile | None) -> str:
    if asked is None:
        return "The set of questions was deleted before the answers were graded."
    if batch is None:
        return "The batch of the evaluation is gone."
    why = f": line {batch.errors[0].line}: {batch.errors[0].message}" if batch.errors else ""
    return f"The batch {batch.id} ended as {batch.state} without an answer{why}"
