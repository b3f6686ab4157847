"""The shapes of errors: OpenAI's, and RFC 9457's for operators."""

from __future__ import annotations

import msgspec


class ErrorObject(msgspec.Struct, kw_only=True):
    """An error as OpenAI's clients expect it: all four keys are always present."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ProblemDetails(msgspec.Struct, kw_only=True):
    """RFC 9457, with our `code` and `param` beside its own members."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    """The request's id, as in `x-request-id`."""
    code: str | None = None
    param: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of an error."""

    error: ErrorObject
