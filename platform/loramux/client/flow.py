"""What the client does, written once: a flow is a generator of steps, and whoever runs it is synchronous or not.

def roll_out(name: str, revision: int) -> Flow[Adapter]:
    yield from canary(name, revision, percent=5)
    yield Wait(600)
    return (yield from promote(name, revision))

Client().run(roll_out("support", 4))
await AsyncClient().run(roll_out("support", 4))
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request of the API and the type of its answer; as a flow, the call itself."""

    method: str
    path: str
    answer: type[T]
    params: Mapping[str, Any] = field(default_factory=dict)
    """Those that are None are left out."""
    body: object = None
    """Sent as JSON."""
    content: bytes | None = None
    """Sent as it is."""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """Whether it may be sent again when nobody knows whether it has arrived."""

    def __iter__(self) -> Generator[Step, Any, T]:
        """Yield the call, and return its answer."""
        return (yield self)


@dataclass(frozen=True, slots=True)
class Send:
    """One attempt at a call; comes back with httpx's response, or raises httpx.TransportError."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Do:
    """Something that blocks, such as reading a file; comes back with its result."""

    act: Callable[[], Any]


Step = Call[Any] | Send | Wait | Do


Flow = Generator[Step, Any, T]
"""Steps that end in a T."""


class Runnable(Protocol[T_co]):
    """A flow, or a call, which is the shortest of flows."""

    def __iter__(self) -> Generator[Step, Any, T_co]: ...
