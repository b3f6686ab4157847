"""Why the gateway says no, without a word of HTTP.

    GatewayError(message, param, code)
    ├── InvalidRequest       the caller can mend it: `param` names the field
    ├── Unavailable          not now: try again after `retry_after` seconds
    │   ├── Draining         this server is being stopped
    │   ├── EngineDown       the engine has died
    │   └── OverCapacity     it would miss its deadline, or has missed it: nothing of it was run
    └── GenerationFailed     the house failed after it had accepted the request; nothing is charged

What the registry, the tenants and the usage refuse keeps its own type (ModelNotFound, InvalidKey, InvalidQuery, ...).
"""

from __future__ import annotations

from loramux.engine.messages import EngineFault


class GatewayError(Exception):
    """A sentence for the caller, the field it is about, and a stable code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(GatewayError):
    """The request can never be served as it stands."""


class Unavailable(GatewayError):
    """The request is fine, the moment is not."""

    retry_after: int = 1
    """Seconds."""


class Draining(Unavailable):
    """The server is being stopped; another one, or this one after its restart, will serve."""

    retry_after = 5

    def __init__(self) -> None:
        super().__init__("This server is shutting down. Please retry in a few seconds.", code="server_draining")


class EngineDown(Unavailable):
    """The engine ended under the request, or before it."""

    retry_after = 10

    def __init__(self) -> None:
        super().__init__("The engine has stopped and is being restarted. Please retry.", code="engine_unavailable")


class OverCapacity(Unavailable):
    """There is more to do than the request's deadline leaves time for."""

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.message, code=fault.code)
        self.retry_after = fault.retry_after or 1


class GenerationFailed(GatewayError):
    """What was generated until then is lost."""


def from_fault(fault: EngineFault | None) -> GatewayError:
    """What the engine reported, as what the caller is told."""
    if fault is None:
        return GenerationFailed("The engine gave the request up without a reason.", code="internal_error")
    match fault.code:
        case "context_length_exceeded":
            return InvalidRequest(fault.message, code=fault.code)
        case "engine_overloaded" | "deadline_exceeded":
            return OverCapacity(fault)
        case _:
            return GenerationFailed(fault.message, code=fault.code)
