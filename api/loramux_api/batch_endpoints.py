"""The endpoints that the lines of batches may go to: their bodies, and their answers in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loramux.batches import AnswerWriter, Endpoints, ParsedBody
from loramux.gateway import Answer, GenerationRequest, InvalidRequest, Platform
from loramux_api.bodies import body_limit, look_through
from loramux_api.controllers.chat import ChatWriter
from loramux_api.controllers.completions import CompletionWriter
from loramux_api.controllers.pooling import EmbeddingWriter
from loramux_api.controllers.responses import ResponseWriter
from loramux_api.problems import error_answer
from loramux_api.schemas import chat, completions, pooling, responses
from loramux_api.schemas.strict import decode_body

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
            "/v1/completions": parser(completions.CompletionBody, completions.to_request, CompletionWriter),
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
