"""/v1/evaluations: comparisons of two revisions on a set of questions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import Meta

from loramux.common.identity import Principal
from loramux.common.units import SECOND
from loramux.data.entities import Evaluation
from loramux.releases.comparison import EvaluationResult
from loramux.releases.evaluations import Evaluations
from loramux.releases.graders import Grader
from loramux_api.auth import requires
from loramux_api.bodies import Body, DocumentRequest
from loramux_api.openapi import ApiController
from loramux_api.parameters import OptionalText, PathName, RevisionQuery, ShortPageLimit
from loramux_api.schemas.batches import Cursored, page_of
from loramux_api.schemas.bounds import Name
from loramux_api.schemas.tenancy import seconds

Number = Annotated[int, Meta(ge=1)]


class EvaluationBody(Body, forbid_unknown_fields=True):
    """An evaluation to run."""

    adapter: Name
    """`adapter` or `tenant/adapter`."""
    revision: Number
    """Number of the candidate."""
    against: Number | Literal["base"]
    """The revision that the candidate is compared with, or `base`: the base model of the candidate."""
    file_id: Name
    """A file of purpose `evals`: lines of {messages or prompt, expected}. Or a file of purpose `fine-tune`: the last
    message of each conversation is the expected answer.
    """
    grader: Grader
    judge_api_key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """Key for the grader `judge`: sent to the judge, stored encrypted until the evaluation ends, and never shown."""


class EvaluationObject(msgspec.Struct, kw_only=True):
    """An evaluation."""

    id: str
    object: Literal["evaluation"] = "evaluation"
    adapter: str
    models: list[str]
    """The candidate, and the model that it is compared with."""
    file_id: str
    batch_id: str
    grader: Grader
    status: str
    """Status of the evaluation: running, completed or failed."""
    result: EvaluationResult | None
    error: str | None
    created_at: int
    finished_at: int | None


def evaluation_object(one: Evaluation) -> EvaluationObject:
    """Return the evaluation as a JSON object."""
    return EvaluationObject(
        id=one.id,
        adapter=one.adapter,
        models=one.models.split(),
        file_id=one.file_id,
        batch_id=one.batch_id,
        grader=msgspec.json.decode(one.grader, type=Grader),
        status=one.state,
        result=None if one.result is None else msgspec.json.decode(one.result, type=EvaluationResult),
        error=one.error,
        created_at=one.created_at // SECOND,
        finished_at=seconds(one.finished_at),
    )


class EvaluationController(ApiController):
    """Comparisons of two revisions on a set of questions."""

    path = "/v1/evaluations"
    tags = ("Adapters",)
    guards = (requires("inference"),)

    @post(status_code=200, summary="Evaluate a revision", request_class=DocumentRequest)
    async def create(
        self,
        data: JSONBody[EvaluationBody],
        principal: NamedDependency[Principal],
        evaluations: NamedDependency[Evaluations],
    ) -> EvaluationObject:
        """Let two revisions answer the questions of a file, as a batch, and grade the answers in pairs."""
        made = await evaluations.create(
            principal,
            adapter=data.adapter,
            revision=data.revision,
            against=None if data.against == "base" else data.against,
            file_id=data.file_id,
            grader=data.grader,
            judge_api_key=data.judge_api_key,
        )
        return evaluation_object(made)

    @get(summary="List evaluations")
    async def list_evaluations(
        self,
        principal: NamedDependency[Principal],
        evaluations: NamedDependency[Evaluations],
        adapter: OptionalText = None,
        after: OptionalText = None,
        revision: RevisionQuery = None,
        limit: ShortPageLimit = 20,
    ) -> Cursored[EvaluationObject]:
        """List your project's evaluations, newest first. `after` is the id of the last evaluation on the previous page.

        `revision`: list only evaluations with this revision of `adapter` as the candidate.
        """
        found = await evaluations.before(principal, adapter, after, limit + 1, revision)
        return page_of([evaluation_object(one) for one in found], limit, [one.id for one in found])

    @get("/{evaluation_id:str}", summary="Describe an evaluation")
    async def get_evaluation(
        self,
        evaluation_id: PathName,
        principal: NamedDependency[Principal],
        evaluations: NamedDependency[Evaluations],
    ) -> EvaluationObject:
        """Describe an evaluation. After its end, the description has the result."""
        return evaluation_object(await evaluations.get(principal, evaluation_id))
