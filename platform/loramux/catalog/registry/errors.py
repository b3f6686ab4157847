"""Refusals of the registry. Faults of an adapter's *files* are loramux_adapters.AdapterRejected instead.

RegistryError(message, field)
├── InvalidName            400  a malformed name, or one that the caller may not use
├── InvalidChange          400  a change whose own fields are invalid
├── TooManyAdapters        400  a limit on adapters, revisions, aliases, grants or pins is reached
├── ModelNotFound          404  no such model, or it is another tenant's
│   ├── AdapterNotFound    404  likewise, by the adapter's name
│   └── PartNotFound       404  the caller's own adapter has no such revision, alias, pin or grant
├── ChangeConflict         409  impossible in the present state; the message says what to change first
├── PreconditionFailed     412  the adapter was changed after its ETag was read
├── ValidationUnavailable  503  uploads cannot be checked at present
├── RevisionUnavailable    503  the files are damaged, or were made for another base model
└── BaseRetired            410  the base model is not served any more
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.common.errors import LoramuxError

SHOWN = 160
"""Maximum number of characters of the caller's input in a message."""
RETRY_SECONDS = 10


class RegistryError(LoramuxError):
    """Base of the registry's refusals."""

    code = "invalid_request"


class InvalidName(RegistryError):
    """The name is malformed, or the caller may not use it. The message states the grammar of names."""

    code = "invalid_adapter_name"


class InvalidChange(RegistryError):
    """A field of the change is invalid. The message states the limits."""

    code = "invalid_value"


class ModelNotFound(RegistryError):
    """The model does not exist, or it belongs to another tenant. The answer is the same in both cases."""

    code = "model_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, model: str, nearest: str | None = None) -> None:
        """`nearest` is a name that the caller may use and perhaps meant."""
        suggestion = "" if nearest is None else f" Did you mean `{nearest}`?"
        message = f"The model `{model[:SHOWN]}` does not exist or you do not have access to it.{suggestion}"
        super().__init__(message, "model")


class AdapterNotFound(ModelNotFound):
    """The adapter does not exist, or it belongs to another tenant. The answer is the same in both cases."""

    code = "adapter_not_found"

    def __init__(self, name: str) -> None:
        RegistryError.__init__(
            self, f"The adapter `{name[:SHOWN]}` does not exist or you do not have access to it.", "name"
        )


class PartNotFound(ModelNotFound):
    """The adapter has no such part. `part` is `revision`, `alias`, `pin` or `grant`."""

    def __init__(self, part: str, name: str, message: str) -> None:
        RegistryError.__init__(self, f"`{name[:SHOWN]}` {message}", part)
        self.code = f"{part}_not_found"


def where_listed(name: str, part: str) -> str:
    """Return where to see the parts of an adapter: the command, and the call over HTTP."""
    return f"see `loramux adapter show {name[:SHOWN]}` or GET /v1/adapters/{name[:SHOWN]}/{part}"


class TooManyAdapters(RegistryError):
    """A limit is reached; the message names it. `what` is `adapters`, `revisions`, `aliases`, `grants` or `pins`."""

    def __init__(self, message: str, field: str | None = None, what: str = "adapters") -> None:
        super().__init__(message, field)
        self.code = f"too_many_{what}"


class ChangeConflict(RegistryError):
    """The change is impossible in the present state. `code` names the conflict."""

    status = HTTPStatus.CONFLICT

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.code = code


class PreconditionFailed(RegistryError):
    """The adapter was changed after its ETag was read. The message contains the current ETag."""

    code = "precondition_failed"
    status = HTTPStatus.PRECONDITION_FAILED


class RevisionUnavailable(RegistryError):
    """The revision cannot be served, because files or bases have changed since the upload. The message says how."""

    code = "adapter_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = RETRY_SECONDS


class BaseRetired(RegistryError):
    """The base model is no longer served. The message names the base to use instead."""

    code = "base_model_retired"
    status = HTTPStatus.GONE


class ValidationUnavailable(RegistryError):
    """The process that checks uploads does not start; the server's log has the reason."""

    code = "validation_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after = RETRY_SECONDS
