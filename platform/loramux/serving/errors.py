"""Errors of the serving layer, as a part of the error tree.

ServingError(message, field, code)
├── InvalidRequest       the caller can correct it: `field` names what is wrong: 400
│   ├── PromptTooLong    the prompt and its answer do not fit in the context
│   └── PreviousResponseNotFound  the response to continue is gone
├── ResponseNotFound     no such stored response: 404
├── ItemNotFound         no stored response has such an item: 404
├── FolderNotFound       a folder of the server's machine is absent, or not below its root: 404
├── NotAllowed           the credential is valid and does not allow this: 403
├── Unavailable          not now: try again after `retry_after` seconds: 503
│   ├── Draining         this server is being stopped
│   ├── EngineDown       the engine has died
│   ├── TooManyAnswers   the tenant's answers hold as much memory as they may: 429
│   └── OverCapacity     it would miss its deadline, or has missed it: 429
├── InvalidBase          a base model that cannot be added as it is described: 400
├── UnknownBase          no base model has this name: 404
├── BaseConflict         the set of base models, or the use of one, forbids a change: 409
└── GenerationFailed     the server failed after it had accepted the request; nothing is charged: 500
    └── AdapterNotLoaded     the adapter cannot be loaded; once a choice has begun, it ends only the others
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError
from loramux.engine.messages import EngineFault


class ServingError(LoramuxError):
    """Base of the errors that the serving layer raises."""

    def __init__(self, message: str, field: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message, field)
        self.code = code or type(self).code


class InvalidRequest(ServingError):
    """The request can never be served in this form."""


class PromptTooLong(InvalidRequest):
    """The message gives the limit. `tokens` is a lower bound of the prompt's tokens, and `most` the number that is
    allowed.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, field: str, *, tokens: int, most: int) -> None:
        super().__init__(message, field)
        self.tokens, self.most = tokens, most


class PreviousResponseNotFound(InvalidRequest):
    """The response, or a response that it continues, does not exist, has expired, was deleted, or belongs to another
    tenant or project.
    """

    code = "previous_response_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"Previous response with id '{id[:80]}' not found.", "previous_response_id")


class ResponseNotFound(ServingError):
    """The response does not exist, has expired, was deleted, or belongs to another tenant or project."""

    code = "response_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id '{id[:80]}' not found.", "response_id")


class ItemNotFound(ServingError):
    """The item does not exist, because its response was deleted or never stored."""

    code = "item_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str, field: str) -> None:
        super().__init__(
            f"Item with id '{id[:80]}' not found. Items are not persisted when `store` is set to false. Try again with "
            "`store` set to true, or remove this item from your input.",
            field,
        )


class InvalidBase(ServingError):
    """The message says which part of the base model is wrong, and how to change it."""

    code = "invalid_base_model"


class UnknownBase(ServingError):
    """The message lists the base models."""

    code = "base_model_not_found"
    status = HTTPStatus.NOT_FOUND


class BaseConflict(ServingError):
    """`code` names the conflict."""

    status = HTTPStatus.CONFLICT

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message, field, code=code)


class FolderNotFound(ServingError):
    """The folder is absent, holds no adapter, or is not below the operator's root; the caller cannot tell the
    difference.
    """

    code = "adapter_files_missing"
    status = HTTPStatus.NOT_FOUND


class NotAllowed(ServingError):
    """The key or token lacks the scope."""

    code = "insufficient_permissions"
    status = HTTPStatus.FORBIDDEN


class Unavailable(ServingError):
    """The request is valid, but the server cannot serve it now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = 1


class Draining(Unavailable):
    """The server is being stopped. Another server, or this server after its restart, will answer."""

    code = "server_draining"
    retry_after = 5

    def __init__(self) -> None:
        super().__init__("This server is shutting down. Please retry in a few seconds.")


class EngineDown(Unavailable):
    """The engine ended before the request or during it."""

    code = "engine_unavailable"
    retry_after = 10

    def __init__(self) -> None:
        super().__init__("The engine has stopped and is being restarted. Please retry.")


class TooManyAnswers(Unavailable):
    """The tenant's answers that are not sent yet hold as much memory as they may."""

    code = "too_many_answers"
    status = HTTPStatus.TOO_MANY_REQUESTS


class OverCapacity(Unavailable):
    """The server cannot send the first token within the request's deadline."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.message, code=fault.code)
        self.retry_after = fault.retry_after or 1


def deadline_exceeded() -> OverCapacity:
    """Return the error of a request whose deadline has passed before it was admitted."""
    message = (
        "The request's deadline passed while its prompt was read or it waited for its admission, and nothing of it was "
        "run. Retry later, or allow more time."
    )
    return OverCapacity(EngineFault("deadline_exceeded", message, retry_after=1))


class GenerationFailed(ServingError):
    """The server failed after it had accepted the request; the tokens generated until then are lost."""

    code = "internal_error"
    status = HTTPStatus.INTERNAL_SERVER_ERROR


class AdapterNotLoaded(GenerationFailed):
    """The adapter's files are missing or unreadable: its owner may have deleted it while the request waited."""

    code = "adapter_failed"


def from_fault(fault: EngineFault | None) -> ServingError:
    """Translate the engine's fault into the error that the caller gets."""
    if fault is None:
        return GenerationFailed("The engine gave the request up without a reason.")
    match fault.code:
        case (
            "context_length_exceeded"
            | "adapter_not_finite"
            | "invalid_constraint"
            | "constraint_too_complex"
            | "not_a_classifier"
            | "images_not_supported"
        ):
            return InvalidRequest(fault.message, fault.field, code=fault.code)
        case "adapter_failed":
            return AdapterNotLoaded(fault.message)
        case "engine_overloaded" | "deadline_exceeded":
            return OverCapacity(fault)
        case _:
            return GenerationFailed(fault.message, code=fault.code)
