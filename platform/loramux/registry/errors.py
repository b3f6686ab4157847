"""Why the registry says no. What is wrong with an adapter's *files* is loramux_adapters.AdapterRejected instead.

RegistryError(code, field, message)
├── InvalidName            a name that cannot be, or that is not the caller's to give: 400
├── InvalidChange          a change whose own fields cannot be: 400
├── ModelNotFound          no such model, or not the caller's: 404, and the same answer
│   ├── AdapterNotFound    likewise, by the adapter's name
│   └── PartNotFound       the caller's own adapter has no such revision, alias, pin or grant: 404
├── TooManyAdapters        a limit on what there may be is reached: 400
├── ChangeConflict         it cannot be as things stand, and the message says what to change first: 409
├── PreconditionFailed     the adapter was changed since its ETag was read: 412
├── ValidationUnavailable  uploads cannot be checked at present: 503
└── RevisionUnavailable    its files are damaged, or it was made for another base model: 503
"""

from __future__ import annotations

SHOWN = 160
"""A refusal repeats at most so many characters of what it was given."""


class RegistryError(Exception):
    """A stable code, the field that is wrong, and a sentence with the way out."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidName(RegistryError):
    """The message says the grammar."""

    code = "invalid_adapter_name"


class InvalidChange(RegistryError):
    """The message says the limits."""

    code = "invalid_value"


class ModelNotFound(RegistryError):
    """The same for a model that does not exist and one that is another tenant's."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model[:SHOWN]}` does not exist or you do not have access to it.", "model")


class AdapterNotFound(ModelNotFound):
    """The same, by the name of an adapter."""

    code = "adapter_not_found"

    def __init__(self, name: str) -> None:
        RegistryError.__init__(
            self, f"The adapter `{name[:SHOWN]}` does not exist or you do not have access to it.", "name"
        )


class PartNotFound(ModelNotFound):
    """`part` is `revision`, `alias`, `pin` or `grant`."""

    def __init__(self, part: str, name: str, message: str) -> None:
        RegistryError.__init__(self, f"`{name[:SHOWN]}` {message}", part)
        self.code = f"{part}_not_found"


class TooManyAdapters(RegistryError):
    """The message names the limit. `what` is `adapters`, `revisions`, `aliases`, `grants` or `pins`."""

    def __init__(self, message: str, field: str | None = None, what: str = "adapters") -> None:
        super().__init__(message, field)
        self.code = f"too_many_{what}"


class ChangeConflict(RegistryError):
    """`code` says with what."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.code = code


class PreconditionFailed(RegistryError):
    """The message has the ETag as it is now."""

    code = "precondition_failed"


class RevisionUnavailable(RegistryError):
    """Something has changed on the operator's side since the upload; the message says what."""

    code = "adapter_unavailable"


class ValidationUnavailable(RegistryError):
    """The process that checks uploads does not start; the server's log says why."""

    code = "validation_unavailable"
