"""Endpoints that a line of a batch may name, each with its body and the writer of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loramux.batches.lines import AnswerWriter, BatchEndpoint, BatchEndpoints, ParsedBody
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
            **{path: BatchEndpoint(parse, error_answer) for path, parse in parsers.items()},
            MESSAGES: BatchEndpoint(message_parser, message_error, answers_every_line=True),
        },
        max_line_bytes=inference_body_bytes(completions.context, completions.image_bytes) + LINE_BYTES,
    )
