"""Services that run beside the platform: batches, evaluations, shadows, guards, release policies, migrations.

Batches know no wire format: `batch_endpoints` gives them the endpoints that a line may name, each with its body and the
writer of its answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from loramux.batches import open_batches
from loramux.batches.files import Files
from loramux.batches.lines import AnswerWriter, Endpoints, ParsedBody
from loramux.batches.service import Batches
from loramux.common.jobs import JobRunner
from loramux.data.records.batches import Batch
from loramux.releases.evaluations import Evaluations, open_evaluations
from loramux.releases.metrics import RevisionMetrics, open_revision_metrics
from loramux.releases.migrations import BaseMigrations, open_base_migrations
from loramux.releases.policies import CanaryGuards, ReleasePolicies, open_canary_guards
from loramux.releases.shadows import Shadows, open_shadows
from loramux.server.platform import Platform
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Answer, GenerationRequest
from loramux_api.auth import Connection
from loramux_api.bodies import body_limit, decode_body, look_through
from loramux_api.controllers import completions
from loramux_api.controllers.chat import ChatWriter
from loramux_api.controllers.pooling import EmbeddingWriter
from loramux_api.controllers.responses import ResponseWriter
from loramux_api.problems import error_answer
from loramux_api.schemas import chat, pooling, responses

B = TypeVar("B", chat.ChatBody, completions.CompletionBody, responses.ResponseBody, pooling.EmbeddingBody)
LINE_BYTES = 1 << 10
"""Bytes of a line beside its body."""


def batch_endpoints(platform: Platform) -> Endpoints:
    """Return what the lines of batches may ask for."""
    fingerprint_of = platform.completions.fingerprint_of

    def parser(
        body: type[B],
        to_request: Callable[[B], GenerationRequest],
        writer: Callable[[B, Answer, str], AnswerWriter],
    ) -> Callable[[bytes], ParsedBody]:
        def parse(data: bytes) -> ParsedBody:
            for _ in look_through(data):
                pass
            asked = decode_body(data, body)
            if not isinstance(asked, pooling.EmbeddingBody) and asked.stream:
                raise InvalidRequest("The answers of a batch are not streamed; leave 'stream' out.", field="stream")
            return ParsedBody(to_request(asked), lambda answer: writer(asked, answer, fingerprint_of(answer)))

        return parse

    return Endpoints(
        parsers={
            "/v1/chat/completions": parser(chat.ChatBody, chat.to_request, ChatWriter),
            "/v1/completions": parser(completions.CompletionBody, completions.to_request, completions.CompletionWriter),
            "/v1/embeddings": parser(
                pooling.EmbeddingBody, pooling.embedding_request, lambda body, answer, _: EmbeddingWriter(body, answer)
            ),
            "/v1/responses": parser(
                responses.ResponseBody, responses.to_request, lambda body, answer, _: ResponseWriter(body, answer)
            ),
        },
        error_body=error_answer,
        max_line_bytes=body_limit(platform) + LINE_BYTES,
    )


@dataclass(frozen=True, slots=True)
class Services:
    """The services of an open platform; requests reach them by `services_of`."""

    batches: Batches
    files: Files
    jobs: JobRunner[Batch]
    """Runs the batches of this server."""
    evaluations: Evaluations
    guards: CanaryGuards
    shadows: Shadows
    policies: ReleasePolicies
    migrations: BaseMigrations
    revision_metrics: RevisionMetrics


@asynccontextmanager
async def open_services(platform: Platform) -> AsyncIterator[Services]:
    """Run the services of `platform` while the block runs."""
    async with (
        open_revision_metrics(platform) as revision_metrics,
        open_batches(platform, batch_endpoints(platform)) as batches,
        open_evaluations(platform, batches) as evaluations,
        open_canary_guards(platform) as guards,
        open_shadows(platform, batches.files) as shadows,
        open_base_migrations(platform, evaluations) as migrations,
    ):
        yield Services(
            batches=batches.batches,
            files=batches.files,
            jobs=batches.jobs,
            evaluations=evaluations,
            guards=guards,
            shadows=shadows,
            policies=ReleasePolicies(platform),
            migrations=migrations,
            revision_metrics=revision_metrics,
        )


def services_of(connection: Connection) -> Services:
    """Return the services that the application runs."""
    services = connection.app.state.services
    assert isinstance(services, Services)
    return services
