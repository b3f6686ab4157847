"""Endpoints that a line of a batch may name, each with its body and the writer of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from loramux.batches.lines import AnswerWriter, BatchEndpoint, BatchEndpoints, ParsedBody
from loramux.common.errors import LoramuxError
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Answer, GenerationRequest
from loramux.serving.service import CompletionService
from loramux_api.bodies import decode_body, inference_body_bytes, look_through
from loramux_api.controllers import completions as completion_routes
from loramux_api.controllers.chat import ChatWriter
from loramux_api.controllers.messages import MessageWriter, message_error
from loramux_api.controllers.pooling import EmbeddingWriter
from loramux_api.controllers.responses import ResponseWriter
from loramux_api.problems import error_answer
from loramux_api.schemas import chat, messages, pooling, responses
from loramux_api.schemas.conversation import rename_fields
from loramux_api.schemas.message_batches import MESSAGES

B = TypeVar(
    "B",
    chat.ChatBody,
    completion_routes.CompletionBody,
    responses.ResponseBody,
    pooling.EmbeddingBody,
    messages.MessageBody,
)
LINE_BYTES = 1 << 10
"""Bytes of a line in addition to its body."""
NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/embeddings": pooling.INPUT,
    "/v1/responses": responses.FIELDS,
    MESSAGES: messages.FIELDS,
}
"""Names of an endpoint for a chat's fields."""


def batch_endpoints(completions: CompletionService) -> BatchEndpoints:
    """Return the endpoints that lines of batches may use."""
    fingerprint_of = completions.fingerprint_of

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

    parsers = {
        "/v1/chat/completions": parser(chat.ChatBody, chat.to_request, ChatWriter),
        "/v1/completions": parser(
            completion_routes.CompletionBody, completion_routes.to_request, completion_routes.CompletionWriter
        ),
        "/v1/embeddings": parser(
            pooling.EmbeddingBody, pooling.embedding_request, lambda body, answer, _: EmbeddingWriter(body, answer)
        ),
        "/v1/responses": parser(
            responses.ResponseBody, responses.stateless_request, lambda body, answer, _: ResponseWriter(body, answer)
        ),
    }
    message_parser = parser(
        messages.MessageBody, messages.to_request, lambda body, answer, _: MessageWriter(body, answer)
    )
    return BatchEndpoints(
        by_path={
            **{path: BatchEndpoint(parse, _in_names_of(path, error_answer)) for path, parse in parsers.items()},
            MESSAGES: BatchEndpoint(message_parser, _in_names_of(MESSAGES, message_error), answers_every_line=True),
        },
        max_line_bytes=inference_body_bytes(completions.context, completions.image_bytes) + LINE_BYTES,
    )


def _in_names_of(
    path: str, error_body: Callable[[LoramuxError], msgspec.Struct]
) -> Callable[[LoramuxError], msgspec.Struct]:
    """Return a writer of errors that uses the field names of the endpoint `path`."""

    def write(error: LoramuxError) -> msgspec.Struct:
        rename_fields(error, NAMES.get(path, {}))
        return error_body(error)

    return write
